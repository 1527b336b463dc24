"""Debloated folders: copies, manifest, conservation, putting in place and back, and everything that can go wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubloat.errors import FormatError, GpubloatError
from gpubloat.libraries import inplace, locate, manifest, rewrite
from gpubloat.libraries.debloat import debloat
from gpubloat.libraries.inputs import Input, opened
from gpubloat.libraries.locate import CPU, GPU, RANGE, Plan
from gpubloat.run import Run
from tests import oracles
from tests.build import elf, fatbin
from tests.libraries import traced
from tests.libraries.common import library

SOURCE = """
#include <stdlib.h>
#define KEEP __attribute__((noinline, visibility("default")))
static int started;
__attribute__((constructor)) static void start(void) { started = 40; }
__attribute__((noinline)) static int helper(int n) { return n + started; }
KEEP int used(int n) { return helper(n); }
KEEP int unused(int n) { return n * 3 + 1; }
KEEP int large(int n) { volatile int x = n; %s return x; }
KEEP int failing(int n) { if (__builtin_expect(n > 5, 0)) { abort(); } return n; }
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small library from the system's C compiler: functions in use, unused ones, a constructor, a large one."""
    if not shutil.which("gcc") or os.uname().machine != "x86_64":
        pytest.skip("needs gcc on x86-64")
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "a.c").write_text(SOURCE % ("x += n; " * 4000))
    command = ["gcc", "-O1", "-shared", "-fPIC", "-o", str(folder / "libsmall.so"), str(folder / "a.c")]
    subprocess.run(command, check=True)
    return folder / "libsmall.so"


@pytest.fixture
def small(compiled: Path, tmp_path: Path) -> Path:
    path = tmp_path / "lib" / "libsmall.so"
    path.parent.mkdir()
    shutil.copy(compiled, path)
    return path


def debloated(path: Path, out: Path, **more: Any) -> Run:
    run = traced.run(None, {"libsmall.so": path}, functions={"libsmall.so": ["used", "helper"]})
    return debloat([run], out, **more)


def listed(path: Path) -> Counter[tuple[str, str]]:
    """What cuobjdump lists; skips the test where there is none."""
    try:
        return oracles.listed_elements(path)
    except oracles.OracleError as error:
        if "missing" in str(error):
            pytest.skip(str(error))
        raise


def copy(out: Path, number: int = 0) -> Path:
    return out / manifest.read(out).libraries[number].copy


def called(path: Path, function: str, argument: int = 2) -> subprocess.CompletedProcess[str]:
    code = f"import ctypes; print(ctypes.CDLL({str(path)!r}).{function}({argument}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def gone(ranges: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    mask = np.zeros(size, bool)
    for offset, length in zip(ranges["offset"].tolist(), ranges["size"].tolist()):
        mask[offset : offset + length] = True
    return mask


def conserved(out: Path) -> None:
    """Every byte outside of the removed ranges is the original's, and every byte inside of them is the fill; the ranges
    are what `removed` names, and the kinds of its elements.
    """
    run = Run.load(out)
    removed, rows = run["removed"], run["reduction"].set_index("library")
    for entry in manifest.read(out).libraries:
        before = np.fromfile(entry.path, np.uint8)
        after = np.fromfile(out / entry.copy, np.uint8)
        ranges = manifest.ranges(out, entry)
        assert len(before) == len(after) == entry.bytes
        assert hashlib.sha256(after.tobytes()).hexdigest() == entry.sha256_copy
        mask = gone(ranges, len(before))
        if entry.layout == "zeroed":
            assert np.array_equal(before[~mask], after[~mask])
            assert set(np.unique(after[mask])) <= {0, rewrite.TRAP}
        named = removed.iloc[ranges["id"]]
        assert set(named["library"]) == {entry.library}
        own = removed[removed["library"] == entry.library]
        elements = traced.scan(Path(entry.path), entry.library)["elements"]
        assert ranges.tolist() == traced.expected_ranges(own, elements)
        n_kinds = len(ranges) - len(own)
        row = rows.loc[entry.library]
        assert row["cpu_removed_bytes"] + row["gpu_removed_bytes"] + 2 * n_kinds == mask.sum()
        assert row["n_functions_removed"] == (ranges["kind"] == CPU).sum()
        assert row["n_functions_removed"] + row["n_elements_removed"] == len(own)
        assert row["allocated_bytes_after"] == (out / entry.copy).stat().st_blocks * 512
    assert len(removed) == (rows["n_functions_removed"] + rows["n_elements_removed"]).sum()


def test_used_functions_work_and_unused_ones_trap(small: Path, tmp_path: Path) -> None:
    before = small.read_bytes()
    run = debloated(small, tmp_path / "out")
    made = copy(tmp_path / "out")
    assert called(made, "used").stdout == "42\n"
    for name in ("unused", "large", "failing"):
        assert called(made, name).returncode == -signal.SIGTRAP
        assert called(small, name).returncode == 0
    assert small.read_bytes() == before
    assert made == tmp_path / "out" / "files" / str(small).lstrip("/")
    assert made.stat().st_mode == small.stat().st_mode
    row = run["reduction"].iloc[0]
    assert row["n_functions_removed"] >= 3
    assert row["file_bytes"] == row["file_bytes_after"]
    assert row["allocated_bytes_after"] < row["allocated_bytes"], "whole pages of a large function are holes"
    assert row[["zstd_bytes", "zstd_bytes_after"]].isna().all()
    conserved(tmp_path / "out")


def test_a_function_in_use_keeps_its_cold_part(small: Path, tmp_path: Path) -> None:
    run = traced.run(None, {"libsmall.so": small}, functions={"libsmall.so": ["failing"]})
    debloat(run, tmp_path / "out")
    assert called(copy(tmp_path / "out"), "failing", 1).stdout == "1\n"
    assert called(copy(tmp_path / "out"), "failing", 9).returncode == -signal.SIGABRT
    assert called(copy(tmp_path / "out"), "used").returncode == -signal.SIGTRAP


def test_first_and_last_bytes_of_a_function_are_never_in_a_hole(small: Path, tmp_path: Path) -> None:
    debloated(small, tmp_path / "out")
    (entry,) = manifest.read(tmp_path / "out").libraries
    after = (tmp_path / "out" / entry.copy).read_bytes()
    for offset, size, *_ in manifest.ranges(tmp_path / "out", entry).tolist():
        assert after[offset] == rewrite.TRAP
        assert set(after[offset + max(size - 16, 0) : offset + size]) == {rewrite.TRAP}


def test_what_the_folder_says_of_itself(small: Path, tmp_path: Path) -> None:
    run = debloated(small, tmp_path / "out", zstd=True, command="gpubloat libraries debloat RUN")
    assert run.provenance["targets"] == ["sm_90"]
    assert run.provenance["kind"] == "runs"
    assert run.provenance["workloads"] == ["test"]
    assert str(tmp_path) not in json.dumps(run.provenance)
    found = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert set(found) >= {"gpubloat", "created", "kind", "targets", "root", "runs", "libraries"}
    assert found["libraries"][0]["path"] == str(small)
    assert found["libraries"][0]["sha256"] == hashlib.sha256(small.read_bytes()).hexdigest()
    assert len(found["runs"][0]["sha256"]) == 64
    row = run["reduction"].iloc[0]
    assert 0 < row["zstd_bytes_after"] < row["zstd_bytes"] < row["file_bytes"]
    assert set(run) == {"libraries", "removed", "reduction", "problems"}
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_the_same_input_gives_the_same_copies(small: Path, tmp_path: Path) -> None:
    debloated(small, tmp_path / "one")
    run = traced.run(tmp_path / "run", {"libsmall.so": small}, functions={"libsmall.so": ["used"]}, scanned=False)
    again = traced.run(None, {"libsmall.so": small}, functions={"libsmall.so": ["helper"]}, scanned=False)
    with ProcessPoolExecutor(1) as executor:
        debloat([run.folder, again], tmp_path / "two", executor=executor)
    assert copy(tmp_path / "one").read_bytes() == copy(tmp_path / "two").read_bytes()
    assert len(manifest.read(tmp_path / "two").runs) == 2


def test_libraries_of_which_nothing_goes_have_no_copy(small: Path, tmp_path: Path) -> None:
    run = debloat(traced.run(None, {"libsmall.so": small}, problem="not asked for"), tmp_path / "out")
    assert manifest.read(tmp_path / "out").libraries == []
    assert run["removed"].empty
    row = run["reduction"].iloc[0]
    assert row["n_functions_unknown"] == row["n_functions"] > 0
    assert row["allocated_bytes"] == row["allocated_bytes_after"]


@pytest.mark.parametrize("layout", rewrite.LAYOUTS)
def test_several_libraries_with_gpu_code(small: Path, tmp_path: Path, layout: str) -> None:
    paths = {"libsmall.so": small}
    for name in ("a.so", "b.so"):
        elements = [fatbin.element(bytes([n]) * 9000, number=n) for n in (80, 90, 90, 120)]
        paths[name] = tmp_path / name
        paths[name].write_bytes(library(fatbin.region(elements) + fatbin.region(elements)))
    run = traced.run(None, paths, elements={"a.so": [(0, 1)], "b.so": [(1, 2)]}, functions={"a.so": ["main"]})
    debloat(run, tmp_path / "out", layout=layout)
    conserved(tmp_path / "out")
    for name, kept in (("a.so", (0, 1)), ("b.so", (1, 2))):
        entry = next(e for e in manifest.read(tmp_path / "out").libraries if e.library == name)
        tables = traced.scan(tmp_path / "out" / entry.copy, name)
        elements = tables["elements"]
        if layout == "moved":
            assert tables["regions"]["n_elements"].sum() == 1
        else:
            with opened(Input(name, name, str(tmp_path / "out" / entry.copy))) as reader:
                kinds = [int.from_bytes(reader.view(at, 2), "little") for at in elements["offset_bytes"]]
            places = zip(elements["region"], elements["element"])
            assert kinds == [fatbin.CUBIN if place == kept else 0 for place in places]
            assert (elements["kind"] != "unknown").tolist() == [kind != 0 for kind in kinds]
        assert len(tables["regions"]) == 2
        with opened(Input(name, name, str(tmp_path / "out" / entry.copy))) as reader:
            alive = [
                (r, e if layout == "zeroed" else kept[1])
                for r, e, at, size in elements[["region", "element", "offset_bytes", "payload_bytes"]].itertuples(
                    index=False
                )
                if any(reader.view(at + 64, size))
            ]
        assert alive == [kept]


@pytest.mark.parametrize("layout", rewrite.LAYOUTS)
@pytest.mark.parametrize("options", [(), ("-compress-all",), ("-concat",)])
def test_cuobjdump_lists_exactly_what_the_runs_used(
    tmp_path: Path, targets: tuple[fatbin.Code, ...], options: tuple[str, ...], layout: str
) -> None:
    region = fatbin.packed(targets, options)
    path = tmp_path / "a.so"
    path.write_bytes(library(region * 3))
    before = traced.scan(path, "a.so")
    outer = before["elements"][before["elements"]["member"].isna()]
    used = [(0, 0), (0, len(outer) // 3 - 1), (2, 0)]
    run = debloat(traced.run(None, {"a.so": path}, elements={"a.so": used}), tmp_path / "out", layout=layout)
    conserved(tmp_path / "out")
    rows = before["elements"].set_index(["region", "element"])
    kept = rows.drop(index=list(run["removed"][["region", "element"]].dropna().itertuples(index=False, name=None)))
    assert set(used) <= set(kept.index)
    assert len(run["removed"]) > len(outer) // 3
    visible = oracles.visible(kept.reset_index(), before["regions"])
    made = copy(tmp_path / "out")
    if "-concat" in options and layout == "zeroed":
        # Also of kind 0, cuobjdump reads the target, and a concatenated element has none (0): it gets one for this.
        with pytest.raises(oracles.OracleError, match=r"missing|Invalid gpu architecture"):
            oracles.listed_elements(made)
        data = bytearray(made.read_bytes())
        for place in outer[~pd.MultiIndex.from_frame(outer[["region", "element"]]).isin(kept.index)]["offset_bytes"]:
            data[place + 28 : place + 32] = (90).to_bytes(4, "little")
        made.write_bytes(data)
    assert listed(made) == oracles.our_elements(visible)


def test_linker_input_that_nothing_touched_goes(tmp_path: Path) -> None:
    path = tmp_path / "a.so"
    kinds = (fatbin.LTO_IR, fatbin.RELOCATABLE_PTX, fatbin.TILE_IR)
    path.write_bytes(library(fatbin.region([fatbin.element(b"\5" * 20000, kind=kind) for kind in kinds])))
    run = traced.run(None, {"a.so": path}, elements={"a.so": [(0, 1)]}, source="page")
    found = debloat(run, tmp_path / "out")
    conserved(tmp_path / "out")
    removed = found["removed"].query("what == 'element'")
    assert removed["element"].tolist() == [0, 2]
    assert set(removed["reason"]) == {"unused_element"}
    blind = traced.run(None, {"a.so": path}, pages=0)
    assert set(debloat([run, blind], tmp_path / "blind")["removed"]["what"]) == {"function"}


def test_libraries_of_the_driver_are_left_alone(small: Path, tmp_path: Path) -> None:
    names = ("libcuda.so.1", "libnvidia-ml.so.1", "libcudadebugger.so.1")
    drivers = {name: Path(shutil.copy(small, small.parent / name)) for name in names}
    run = traced.run(None, {"libsmall.so": small, **drivers}, functions={"libsmall.so": ["used", "helper"]})
    found = debloat(run, tmp_path / "out")
    for table in ("libraries", "removed", "reduction"):
        assert set(found[table]["library"]) == {"libsmall.so"}
    assert [entry.library for entry in manifest.read(tmp_path / "out").libraries] == ["libsmall.so"]
    assert sorted(p.name for p in (tmp_path / "out" / "files").rglob("*.so*")) == ["libsmall.so"]
    for path in drivers.values():
        path.unlink()  # it may be gone, too: nothing of it is read
    debloat(run, tmp_path / "again")
    conserved(tmp_path / "again")


def test_a_file_that_was_replaced_while_it_was_traced_is_left_alone(small: Path, tmp_path: Path) -> None:
    gone = traced.run(None, {"libsmall.so": small}, problem="the file was gone", is_gone=True)
    assert len(debloat(gone, tmp_path / "alone")["reduction"]) == 0
    whole = traced.run(None, {"libsmall.so": small}, functions={"libsmall.so": ["used"]})
    for runs in ([gone, whole], [whole, gone]):  # what the first of them used is not known
        found = debloat(runs, tmp_path / "both", force=True)
        assert found["reduction"]["n_functions_removed"].tolist() == [0]


def test_a_run_of_the_driver_alone(small: Path, tmp_path: Path) -> None:
    path = small.rename(small.parent / "libcuda.so.1")
    found = debloat(traced.run(None, {"libcuda.so.1": path}), tmp_path / "out")
    assert found["reduction"].empty
    assert manifest.read(tmp_path / "out").libraries == []


def test_copies_are_written_in_small_pieces(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {"libsmall.so": small, "a.so": tmp_path / "a.so"}
    element = fatbin.element(np.random.default_rng(1).bytes(300_000))
    paths["a.so"].write_bytes(library(fatbin.region([element, fatbin.element(bytes(300_000)), element])))
    run = traced.run(None, paths, elements={"a.so": [(0, 0), (0, 2)]})
    plain, pieces, write = debloat(run, tmp_path / "plain"), [], os.pwrite

    def short(file: int, data: memoryview, at: int) -> int:
        pieces.append((at, len(data)))
        return write(file, data[: len(data) // 2 + 1], at)  # as a disk may

    monkeypatch.setattr(rewrite.os, "pwrite", short)
    debloat(run, tmp_path / "short")
    assert rewrite.PIECE == 65536
    assert max(length for _, length in pieces) == rewrite.PIECE
    assert all(at // rewrite.PIECE == (at + length - 1) // rewrite.PIECE for at, length in pieces)
    conserved(tmp_path / "short")
    for number in range(len(plain["reduction"])):
        assert copy(tmp_path / "short", number).read_bytes() == copy(tmp_path / "plain", number).read_bytes()


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 60000),
    ranges=st.lists(st.tuples(st.integers(0, 60000), st.integers(0, 20000), st.sampled_from([CPU, GPU])), max_size=12),
    chunk=st.sampled_from([4096, 12288, 8 << 20]),
)
def test_every_byte_outside_of_the_ranges_is_kept(
    tmp_path_factory: pytest.TempPathFactory, size: int, ranges: list[tuple[int, int, int]], chunk: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    before = np.random.default_rng(size).integers(1, 0xCC, size, np.uint8)
    before.tofile(folder / "a")
    rows, end = [], 0
    for start, length, kind in sorted(ranges):
        if start >= end and start + length <= size and length:
            rows.append((start, length, kind, len(rows)))
            end = start + length
    table = np.array(rows, RANGE)
    removed = pd.DataFrame(columns=["what", *locate.COLUMNS])
    with pytest.MonkeyPatch.context() as patch, opened(Input("a", "a", str(folder / "a"))) as reader:
        patch.setattr(rewrite, "CHUNK", chunk)
        edits = rewrite.edits(Plan(removed, table, 0), {}, "zeroed")
        written = rewrite.write(reader, edits, folder / "b")
    after = np.fromfile(folder / "b", np.uint8)
    mask = gone(table, size)
    assert len(after) == size
    assert np.array_equal(before[~mask], after[~mask])
    assert (after[mask] % rewrite.TRAP == 0).all()
    assert written.sha256 == hashlib.sha256(after.tobytes()).hexdigest()
    for start, length, kind, _ in rows:
        piece = after[start : start + length]
        assert (piece == 0).all() if kind == GPU else piece[0] == piece[-1] == rewrite.TRAP


# --- in place -------------------------------------------------------------------------------------------------------


def test_apply_and_restore_give_the_original_back(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    debloated(small, out)
    small.chmod(0o755)
    before, times = small.read_bytes(), small.stat().st_mtime_ns
    listing = sorted(str(p) for p in out.rglob("*"))
    assert inplace.apply(out) == ["libsmall.so"]
    assert small.read_bytes() == copy(out).read_bytes()
    assert small.stat().st_mode & 0o777 == 0o755
    assert called(small, "unused").returncode == -signal.SIGTRAP
    assert inplace.apply(out) == [], "it is there already"
    with pytest.raises(GpubloatError, match="keeps the originals"):
        debloated(small, out, force=True)
    assert inplace.restore(out, "libsmall.so") == ["libsmall.so"]
    assert small.read_bytes() == before
    assert small.stat().st_mtime_ns == times
    assert inplace.restore(out) == []
    assert sorted(str(p) for p in out.rglob("*")) == listing
    assert [p.name for p in small.parent.iterdir()] == ["libsmall.so"]


def test_a_removed_library_comes_back(small: Path, tmp_path: Path) -> None:
    debloated(small, tmp_path / "out")
    before = small.read_bytes()
    inplace.apply(tmp_path / "out")
    small.unlink()
    inplace.restore(tmp_path / "out")
    assert small.read_bytes() == before


def test_links_stay_links(small: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.so"
    link.symlink_to(small)
    debloated(link, tmp_path / "out")
    inplace.apply(tmp_path / "out")
    assert link.is_symlink()
    assert small.read_bytes() == copy(tmp_path / "out").read_bytes()


def test_a_library_that_was_installed_anew_is_left_alone(small: Path, tmp_path: Path) -> None:
    debloated(small, tmp_path / "out")
    inplace.apply(tmp_path / "out")
    small.write_bytes(b"new version")
    with pytest.raises(GpubloatError, match="neither the original nor the debloated copy"):
        inplace.restore(tmp_path / "out")
    with pytest.raises(GpubloatError, match="not the file that was debloated"):
        inplace.apply(tmp_path / "out")
    assert small.read_bytes() == b"new version"


def test_damaged_copies_and_originals_are_not_used(small: Path, tmp_path: Path) -> None:
    out, before = tmp_path / "out", small.read_bytes()
    debloated(small, out)
    good = copy(out).read_bytes()
    copy(out).write_bytes(b"other")
    with pytest.raises(GpubloatError, match=r"the copy of .* is damaged"):
        inplace.apply(out)
    assert small.read_bytes() == before
    copy(out).write_bytes(good)
    inplace.apply(out)
    (kept,) = [p for p in (out / "originals").rglob("*") if p.is_file()]
    kept.write_bytes(b"other")
    with pytest.raises(GpubloatError, match=r"the kept original of .* is damaged"):
        inplace.restore(out)
    kept.unlink()
    with pytest.raises(GpubloatError, match="is missing"):
        inplace.restore(out)
    with pytest.raises(GpubloatError, match="has no copy"):
        inplace.restore(out, "nothing.so")


def test_apply_puts_back_what_it_replaced_when_one_fails(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "lib" / "libsmall2.so"
    shutil.copy(small, other)
    run = traced.run(None, {"a.so": small, "b.so": other}, functions={"a.so": ["used"], "b.so": ["used"]})
    debloat(run, tmp_path / "out")
    before = small.read_bytes()
    replace, moved = os.replace, []

    def failing(source: str, target: Path) -> None:
        moved.append(target)
        if target == other:
            raise OSError(errno.EROFS, "Read-only file system")
        replace(source, target)

    monkeypatch.setattr(inplace.os, "replace", failing)
    with pytest.raises(GpubloatError, match=r"b\.so cannot be replaced.*Read-only"):
        inplace.apply(tmp_path / "out")
    assert small in moved
    assert small.read_bytes() == other.read_bytes() == before
    assert sorted(p.name for p in small.parent.iterdir()) == ["libsmall.so", "libsmall2.so"]


# --- bad input ------------------------------------------------------------------------------------------------------


def nothing_left(folder: Path, *known: str) -> None:
    assert sorted(p.name for p in folder.iterdir()) == sorted(known)


def test_a_library_that_changed_since_is_named(small: Path, tmp_path: Path) -> None:
    run = traced.run(None, {"libsmall.so": small}, functions={"libsmall.so": ["used"]})
    data = bytearray(small.read_bytes())
    for change in (lambda: data.__setitem__(-1, data[-1] ^ 1), lambda: data.__delitem__(slice(2000, None))):
        change()
        small.write_bytes(data)
        with pytest.raises(GpubloatError, match=r"libsmall\.so is not the file that was traced") as caught:
            debloat(run, tmp_path / "out")
        assert "trace the workload again" in str(caught.value.hint)
    small.unlink()
    with pytest.raises(GpubloatError, match=r"libsmall\.so is missing"):
        debloat(run, tmp_path / "out")
    nothing_left(tmp_path, "lib")


def test_bad_arguments(small: Path, tmp_path: Path) -> None:
    for more, text in (
        ({"layout": "packed"}, "no layout"),
        ({"targets": ["sm_90a"]}, "no compute"),
        ({"targets": []}, "no GPU"),
    ):
        with pytest.raises(GpubloatError, match=text):
            debloated(small, tmp_path / "out", **more)
    with pytest.raises(GpubloatError, match="is no run folder"):
        debloat(tmp_path, tmp_path / "out")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    for force in (False, True):  # a folder of something else is not replaced, whatever is asked for
        with pytest.raises(GpubloatError, match="not empty" if not force else "something else"):
            debloated(small, tmp_path / "used", force=force)
    nothing_left(tmp_path, "lib", "used")


def test_force_replaces_the_folder(small: Path, tmp_path: Path) -> None:
    debloated(small, tmp_path / "out")
    (tmp_path / "out" / "files" / "old").touch()
    with pytest.raises(GpubloatError, match="not empty"):
        debloated(small, tmp_path / "out")
    debloated(small, tmp_path / "out", force=True)
    assert not (tmp_path / "out" / "files" / "old").exists()
    nothing_left(tmp_path, "lib", "out")


def test_published_runs_have_no_paths(small: Path, tmp_path: Path) -> None:
    run = traced.run(None, {"libsmall.so": small})
    frame = run["loaded"].assign(path="")
    frame.to_parquet(run.folder / "loaded.parquet")
    with pytest.raises(GpubloatError, match="is not in the run"):
        debloat(run.folder, tmp_path / "out")
    frame.assign(path="/tmp/../etc/passwd").to_parquet(run.folder / "loaded.parquet")
    with pytest.raises(FormatError, match="no absolute path"):
        debloat(run.folder, tmp_path / "out")


def test_a_32_bit_file_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(elf.Elf().bytes())
    run = traced.run(None, {"a.so": path}, scanned=False)
    data = bytearray(path.read_bytes())
    data[4] = 1
    path.write_bytes(data)
    frame = run["loaded"].assign(sha256=hashlib.sha256(data).hexdigest())
    frame.to_parquet(run.folder / "loaded.parquet")
    found = debloat(run.folder, tmp_path / "out")
    assert found["problems"]["detail"].tolist() == ["not a 64-bit ELF"]
    assert found["removed"].empty


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_target_that_may_not_be_written(small: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    with pytest.raises(GpubloatError, match="cannot be written: Permission denied"):
        debloated(small, tmp_path / "locked" / "out")


@pytest.mark.parametrize("target", ["/proc/out", "/proc/self/nothing/out"])
def test_a_target_that_cannot_be_written(small: Path, target: str) -> None:
    with pytest.raises(GpubloatError, match="cannot be written"):
        debloated(small, Path(target))


def failing_after(n: int) -> Callable[..., int]:
    write, count = os.pwrite, 0

    def full(file: int, data: bytes, at: int) -> int:
        nonlocal count
        count += 1
        if count > n:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data, at)

    return full


@pytest.mark.parametrize("n", [0, 1])
def test_a_full_disk_leaves_nothing_behind(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    monkeypatch.setattr(rewrite.os, "pwrite", failing_after(n))
    with pytest.raises(GpubloatError, match="cannot be written: No space left on device"):
        debloated(small, tmp_path / "out")
    nothing_left(tmp_path, "lib")


def hostile(**change: object) -> Callable[[dict[str, Any]], None]:
    return lambda found: found["libraries"][0].update(change)


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "copy above": hostile(copy="../../etc/passwd"),
    "copy below and above": hostile(copy="files/../../x"),
    "copy absolute": hostile(copy="/etc/passwd"),
    "copy elsewhere": hostile(copy="manifest.json"),
    "path relative": hostile(path="lib/a.so"),
    "path above": hostile(path="/usr/../etc/passwd"),
    "path number": hostile(path=3),
    "ranges above": hostile(ranges="ranges/../../a.npy"),
    "ranges null": hostile(ranges=None),
    "nul": hostile(path="/a\0b"),
    "sha256": hostile(sha256="0"),
    "bytes text": hostile(bytes="12"),
    "bytes negative": hostile(bytes=-1),
    "bytes true": hostile(bytes=True),
    "layout": hostile(layout="other"),
    "twice": lambda found: found["libraries"].append(found["libraries"][0]),
    "libraries": lambda found: found.update(libraries={}),
    "library": lambda found: found.update(libraries=[3]),
    "kind": lambda found: found.update(kind="other"),
    "targets": lambda found: found.update(targets=[90]),
    "runs": lambda found: found.update(runs=[[]]),
    "missing": lambda found: found.pop("libraries"),
    "wheels": lambda found: found.update(wheels=[{"path": "/a", "copy": "../a"}]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests(small: Path, tmp_path: Path, name: str) -> None:
    out, before = tmp_path / "out", small.read_bytes()
    debloated(small, out)
    found = json.loads((out / "manifest.json").read_text())
    HOSTILE[name](found)
    (out / "manifest.json").write_text(json.dumps(found))
    for action in (manifest.read, inplace.apply, inplace.restore):
        with pytest.raises(FormatError, match="not a manifest"):
            action(out)
    assert small.read_bytes() == before


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000, '{"gpubloat": 1}'])
def test_what_is_no_manifest(tmp_path: Path, text: str) -> None:
    with pytest.raises(GpubloatError, match="no debloated folder"):
        manifest.read(tmp_path)
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(FormatError, match="not a manifest"):
        manifest.read(tmp_path)


def test_copies_that_are_links_are_not_followed(small: Path, tmp_path: Path) -> None:
    debloated(small, tmp_path / "out")
    made = copy(tmp_path / "out")
    made.unlink()
    made.symlink_to(small)
    with pytest.raises(FormatError, match="link out of the folder"):
        inplace.apply(tmp_path / "out")


def test_damaged_ranges(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    debloated(small, out)
    (entry,) = manifest.read(out).libraries
    good = manifest.ranges(out, entry)
    path = out / entry.ranges
    bad = [good[::-1], good["offset"].copy(), np.zeros((2, 2)), np.array(["a"], object)]
    beyond = good.copy()
    beyond["size"][-1] = 1 << 63
    kind = good.copy()
    kind["kind"][0] = 9
    for table in (*bad, beyond, kind):
        np.save(path, table, allow_pickle=True)
        with pytest.raises(FormatError, match="ranges"):
            manifest.ranges(out, entry)
    path.write_bytes(b"")
    with pytest.raises(FormatError, match="no table of ranges"):
        manifest.ranges(out, entry)
    path.unlink()
    with pytest.raises(GpubloatError, match="cannot be read"):
        manifest.ranges(out, entry)
