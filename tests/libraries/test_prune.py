"""Pruning by target: what cuobjdump reads afterwards, wheels with a valid RECORD, and where the copies go."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from gpubloat.errors import FormatError, GpubloatError
from gpubloat.libraries import inplace, manifest, scan
from gpubloat.libraries.prune import prune
from gpubloat.tables import targets as gpu_targets
from tests import oracles
from tests.build import containers, elf, fatbin
from tests.libraries import traced
from tests.libraries.common import library, tables
from tests.libraries.test_debloat import conserved, listed, nothing_left

RECORD = "pkg-1.dist-info/RECORD"


def pruned_copy(out: Path, number: int = 0) -> Path:
    return out / manifest.read(out).libraries[number].copy


@pytest.mark.parametrize("options", [(), ("-compress-mode=size",), ("-compress-all",)])
def test_cuobjdump_lists_exactly_the_kept_elements(
    tmp_path: Path, targets: tuple[fatbin.Code, ...], options: tuple[str, ...]
) -> None:
    region = fatbin.packed(targets, options)
    empty = fatbin.packed(targets[:2], options)  # nothing of this one can be given to an sm_90
    path = tmp_path / "a.so"
    path.write_bytes(library(region + empty + region))
    run = prune(path, "sm_90", tmp_path / "out")
    made = pruned_copy(tmp_path / "out")
    assert listed(made) == Counter({("cubin", "sm_90"): 2, ("cubin", "sm_90a"): 2})
    after = tables(made)
    assert after["regions"]["n_elements"].tolist() == [2, 0, 2]
    assert after["regions"]["offset_bytes"].tolist() == traced.scan(path, "a.so")["regions"]["offset_bytes"].tolist()
    assert not len(after["problems"])
    kept = scan(path, target="sm_90")["elements"].query("is_loadable")
    assert after["elements"]["digest"].tolist() == kept["digest"].tolist()
    assert (after["elements"]["offset_bytes"] % 8 == 0).all()
    conserved(tmp_path / "out")
    row = run["reduction"].iloc[0]
    assert row["n_other_architecture"] == row["n_elements_removed"] == row["n_elements"] - 4
    assert row["n_unused_element"] == row["n_functions_removed"] == 0


@pytest.mark.parametrize("options", [(), ("-compress-mode=size",), ("-compress-all",)])
def test_cuobjdump_passes_over_removed_elements_that_stay_in_place(
    tmp_path: Path, targets: tuple[fatbin.Code, ...], options: tuple[str, ...]
) -> None:
    region = fatbin.packed(targets, options)
    empty = fatbin.packed(targets[:2], options)
    path = tmp_path / "a.so"
    path.write_bytes(library(region + empty + region))
    run = prune(path, "sm_90", tmp_path / "out", layout="zeroed")
    made = pruned_copy(tmp_path / "out")
    assert listed(made) == Counter({("cubin", "sm_90"): 2, ("cubin", "sm_90a"): 2})
    before, after = scan(path, target="sm_90")["elements"], tables(made)["elements"]
    kept = before["is_loadable"].to_numpy(bool)
    assert after["offset_bytes"].tolist() == before["offset_bytes"].tolist()
    assert after["digest"][kept].tolist() == before["digest"][kept].tolist()
    assert (after["kind"][~kept] == "unknown").all()
    conserved(tmp_path / "out")
    assert run["reduction"]["n_other_architecture"].tolist() == [(~kept).sum()]


def test_a_real_library_in_place(tmp_path: Path, sample_wheel: Path) -> None:
    with zipfile.ZipFile(sample_wheel) as held:
        path = Path(held.extract(next(n for n in held.namelist() if ".so" in n), tmp_path / "in"))
    before = scan(path, target="sm_90")
    prune(path, "sm_90", tmp_path / "out", layout="zeroed")
    kept = before["elements"][before["elements"]["is_loadable"]]
    assert 0 < len(kept) < len(before["elements"])
    assert listed(pruned_copy(tmp_path / "out")) == oracles.our_elements(oracles.visible(kept, before["regions"]))
    conserved(tmp_path / "out")


def test_a_real_library(tmp_path: Path, sample_wheel: Path) -> None:
    with zipfile.ZipFile(sample_wheel) as held:
        name = next(n for n in held.namelist() if ".so" in n)
        path = Path(held.extract(name, tmp_path / "in"))
    before = scan(path, target="sm_90", kernels=True)
    prune(path, ["H100"], tmp_path / "out", zstd=True)
    made = pruned_copy(tmp_path / "out")
    after = scan(made, target="sm_90", kernels=True)
    kept = before["elements"][before["elements"]["is_loadable"]]
    assert len(kept) < len(before["elements"])
    assert after["elements"]["digest"].tolist() == kept["digest"].tolist()
    assert oracles.our_elements(oracles.visible(kept, before["regions"])) == listed(made)
    wanted = before["kernels"].merge(kept[["region", "element"]])
    assert sorted(after["kernels"]["kernel"]) == sorted(wanted["kernel"])
    row = manifest.read(tmp_path / "out").libraries[0]
    assert made.stat().st_size == row.bytes == path.stat().st_size
    assert made.stat().st_blocks < path.stat().st_blocks
    assert subprocess.run(["readelf", "-a", made], capture_output=True).stderr == b""
    conserved(tmp_path / "out")


def test_every_gpu_keeps_what_it_could_be_given(tmp_path: Path, targets: tuple[fatbin.Code, ...]) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(library(fatbin.packed(targets)))
    for wanted in (["sm_80"], ["sm_86", "sm_90"], "sm_90,sm_120", ["sm_100", "89"], ["sm_75"]):
        out = tmp_path / str(wanted)
        prune(path, wanted, out)
        elements = scan(path)["elements"]
        names = wanted.split(",") if isinstance(wanted, str) else wanted
        fits = [gpu_targets.fit(elements, gpu)["is_loadable"] for gpu in names]
        kept = elements[sum(fits[1:], fits[0])]
        assert tables(pruned_copy(out))["elements"]["digest"].tolist() == kept["digest"].tolist()


def test_elements_of_odd_size_are_zeroed_in_place(tmp_path: Path) -> None:
    odd = fatbin.element(b"\x05" * 64, number=80, payload_size=60)[:-4]
    path = tmp_path / "a.so"
    path.write_bytes(library(fatbin.region([odd, fatbin.element(b"\x06" * 64, number=90)])))
    prune(path, "sm_90", tmp_path / "out")
    before, after = (tables(p)["elements"] for p in (path, pruned_copy(tmp_path / "out")))
    assert before["offset_bytes"].tolist() == after["offset_bytes"].tolist()


def test_pointers_to_prelinked_regions_stay_valid(tmp_path: Path) -> None:
    file = elf.Elf()
    region = fatbin.region([fatbin.element(b"\x05" * 64, number=n) for n in (80, 90)])
    plain = file.rodata(".nv_fatbin", region)
    linked = file.rodata("__nv_relfatbin", region * 2)
    addresses = [linked.sh_addr, linked.sh_addr + len(region), 0]
    listing = file.data(".data", b"".join(a.to_bytes(8, "little") for a in addresses))
    file.wrappers([plain.sh_addr], version=2, lists=[listing.sh_addr])
    path = tmp_path / "a.so"
    path.write_bytes(file.bytes())
    prune(path, "sm_90", tmp_path / "out")
    found = tables(pruned_copy(tmp_path / "out"))
    assert found["regions"]["is_wrapped"].tolist() == [True] * 3
    assert found["elements"]["target"].tolist() == ["sm_90"] * 3
    assert not len(found["problems"])


def test_folders_mirror_their_tree(tmp_path: Path) -> None:
    root = tmp_path / "site-packages" / "torch"
    (root / "lib").mkdir(parents=True)
    data = library(fatbin.region([fatbin.element(b"\x05" * 64, number=n) for n in (80, 90)]))
    (root / "lib" / "a.so").write_bytes(data)
    (root / "b.so").write_bytes(data)
    (root / "plain.so").write_bytes(elf.Elf().bytes())
    (root / "bad.so").write_bytes(b"\x7fELF\x01" + bytes(100))
    (root / "x.py").write_text("pass")
    run = prune(root, "sm_90", tmp_path / "out")
    found = manifest.read(tmp_path / "out")
    assert sorted(e.copy for e in found.libraries) == ["files/torch/b.so", "files/torch/lib/a.so"]
    assert {e.path for e in found.libraries} == {str(root / "b.so"), str(root / "lib" / "a.so")}
    assert found.kind == "targets"
    assert found.targets == ["sm_90"]
    assert run["problems"]["library"].tolist() == ["bad.so"]
    assert len(run["reduction"]) == 4
    assert inplace.apply(tmp_path / "out") == ["b.so", "lib/a.so"]
    assert tables(root / "b.so")["elements"]["target"].tolist() == ["sm_90"]
    inplace.restore(tmp_path / "out")
    assert (root / "b.so").read_bytes() == (root / "lib" / "a.so").read_bytes() == data


def test_archives_and_bare_fatbins(tmp_path: Path) -> None:
    region = fatbin.region([fatbin.element(b"\x05" * 64, number=n) for n in (80, 90)])
    (tmp_path / "a.a").write_bytes(containers.archive([("one.o", library(region)), ("two.o", library(region))]))
    (tmp_path / "b.fatbin").write_bytes(region)
    prune([tmp_path / "a.a", tmp_path / "b.fatbin"], "sm_90", tmp_path / "out")
    for entry, n in zip(manifest.read(tmp_path / "out").libraries, (2, 1)):
        assert tables(tmp_path / "out" / entry.copy)["elements"]["target"].tolist() == ["sm_90"] * n


# --- wheels ---------------------------------------------------------------------------------------------------------


def digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def made_wheel(path: Path, *, record: bool = True) -> Path:
    data = library(fatbin.region([fatbin.element(b"\x05" * 9000, number=n) for n in (80, 90)]))
    members = {
        "pkg/a.so": data,
        "pkg/b,c.so": data,
        "pkg/__init__.py": b"x = 1\n",
        "pkg-1.dist-info/METADATA": b"Name: pkg\n",
    }
    lines = [[name, digest(content), str(len(content))] for name, content in members.items()] + [[RECORD, "", ""]]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    members["pkg-1.dist-info/RECORD.jws"] = b"signature"
    if record:
        members[RECORD] = text.getvalue().encode()
    methods = {"pkg/a.so": containers.STORED}
    return containers.wheel(path, {n: (d, methods.get(n, containers.DEFLATED)) for n, d in members.items()})


def valid(path: Path) -> dict[str, bytes]:
    """The members of a wheel whose RECORD names each of them as it is."""
    with zipfile.ZipFile(path) as held:
        assert held.testzip() is None
        members = {n: held.read(n) for n in held.namelist()}
    record = next(n for n in members if n.endswith(".dist-info/RECORD"))
    rows = {r[0]: r[1:] for r in csv.reader(io.StringIO(members[record].decode()))}
    assert set(rows) == set(members)
    for name, content in members.items():
        assert rows[name] == ([digest(content), str(len(content))] if name != record else ["", ""])
    return members


def test_a_wheel_is_repacked_with_a_valid_record(tmp_path: Path) -> None:
    path = made_wheel(tmp_path / "pkg-1-py3-none-any.whl")
    run = prune(path, "sm_90", tmp_path / "out")
    made = tmp_path / "out" / path.name
    members, before = valid(made), zipfile.ZipFile(path)
    assert set(members) == set(before.namelist()) - {"pkg-1.dist-info/RECORD.jws"}
    for old in before.infolist():
        if old.filename in members:
            new = zipfile.ZipFile(made).getinfo(old.filename)
            assert (new.date_time, new.compress_type, new.external_attr) == (
                old.date_time, old.compress_type, old.external_attr,
            )  # fmt: skip
    for name in ("pkg/a.so", "pkg/b,c.so"):
        (tmp_path / "member.so").write_bytes(members[name])
        assert tables(tmp_path / "member.so")["elements"]["target"].tolist() == ["sm_90"]
    assert members["pkg/__init__.py"] == b"x = 1\n"
    found = manifest.read(tmp_path / "out")
    assert not found.libraries
    (entry,) = found.wheels
    assert (entry.copy, entry.members) == (path.name, ["pkg/a.so", "pkg/b,c.so"])
    assert entry.sha256_copy == hashlib.sha256(made.read_bytes()).hexdigest()
    assert made.stat().st_size == entry.bytes_copy < entry.bytes == path.stat().st_size
    assert len(run["removed"]) == 2
    assert not (tmp_path / "out" / ".members").exists()
    prune(path, "sm_90", tmp_path / "again")
    assert (tmp_path / "again" / path.name).read_bytes() == made.read_bytes()


def test_pip_installs_a_pruned_wheel(tmp_path: Path, sample_wheel: Path) -> None:
    prune(sample_wheel, "sm_90", tmp_path / "out")
    made = tmp_path / "out" / sample_wheel.name
    members = valid(made)
    assert made.stat().st_size < sample_wheel.stat().st_size
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(tmp_path / "t"), made]
    subprocess.run(command, check=True, capture_output=True)
    for name, content in members.items():
        if not name.endswith("RECORD"):
            assert (tmp_path / "t" / name).read_bytes() == content


def test_wheels_in_folders_keep_their_place(tmp_path: Path) -> None:
    (tmp_path / "dist" / "sub").mkdir(parents=True)
    made_wheel(tmp_path / "dist" / "sub" / "pkg-1-py3-none-any.whl")
    prune(tmp_path / "dist", "sm_90", tmp_path / "out")
    assert valid(tmp_path / "out" / "files" / "dist" / "sub" / "pkg-1-py3-none-any.whl")


def test_a_wheel_without_record(tmp_path: Path) -> None:
    path = made_wheel(tmp_path / "pkg-1-py3-none-any.whl", record=False)
    with pytest.raises(FormatError, match="one RECORD"):
        prune(path, "sm_90", tmp_path / "out")
    nothing_left(tmp_path, path.name)
    archive = path.rename(tmp_path / "pkg.zip")
    prune(archive, "sm_90", tmp_path / "out")
    assert zipfile.ZipFile(tmp_path / "out" / "pkg.zip").testzip() is None


def test_two_wheels_of_one_name(tmp_path: Path) -> None:
    paths = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        paths.append(made_wheel(tmp_path / folder / "pkg-1-py3-none-any.whl"))
    with pytest.raises(GpubloatError, match="would have the same copy"):
        prune(paths, "sm_90", tmp_path / "out")


# --- bad input ------------------------------------------------------------------------------------------------------


def test_bad_input_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no library")
    (tmp_path / "cut.so").write_bytes(library(fatbin.region([fatbin.element(b"a" * 999)]))[:700])
    (tmp_path / "x86.so").write_bytes(b"\x7fELF\x01\x01" + bytes(100))
    cases = [("text", "no ELF file"), ("cut.so", "."), ("x86.so", "not a 64-bit ELF"), ("none", "no such file")]
    for name, text in cases:
        with pytest.raises(GpubloatError, match=text):
            prune(tmp_path / name, "sm_90", tmp_path / "out")
    for targets, text in (("", "no GPU to keep"), ("sm_90a", "no compute capability"), ([], "no GPU to keep")):
        with pytest.raises(GpubloatError, match=text):
            prune(tmp_path / "text", targets, tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(GpubloatError, match="no library in"):
        prune(tmp_path / "empty", "sm_90", tmp_path / "out")
    nothing_left(tmp_path, "text", "cut.so", "x86.so", "empty")


def test_nothing_to_prune(tmp_path: Path) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(elf.Elf().bytes())
    run = prune(path, "sm_90", tmp_path / "out")
    assert run["removed"].empty
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["libraries"] == []
