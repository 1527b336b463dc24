"""Runs, folders and circumstances that nobody meant: signals, pipes, changed tables, names that are no text."""

from __future__ import annotations

import ctypes
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from gpubloat.errors import FormatError, GpubloatError
from gpubloat.libraries import attach, inplace, manifest
from gpubloat.libraries.debloat import debloat
from gpubloat.libraries.elf import Elf
from gpubloat.libraries.execute import execute
from gpubloat.libraries.locate import CPU
from gpubloat.libraries.reader import Reader
from gpubloat.libraries.trace import Sources, trace
from gpubloat.run import Run, RunWriter
from tests.build import fatbin
from tests.libraries import traced
from tests.libraries.test_execute import carrying
from tests.native.programs import SAMPLE, needs_compiler, shared

pytestmark = needs_compiler
NAME = "pkg/libsample.so"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    elements = [fatbin.element(bytes([n + 1]) * 6000, number=arch) for n, arch in enumerate((80, 90, 90, 100))]
    return carrying(tmp_path / "lib", fatbin.region(elements), ".nv_fatbin", "a")


@pytest.fixture
def run(library: Path, tmp_path: Path) -> Run:
    return traced.run(tmp_path / "run", {NAME: library}, functions={NAME: ["byte_at"]}, elements={NAME: [(0, 1)]})


def changed(run: Run, out: Path, **tables: Callable[[pd.DataFrame], pd.DataFrame]) -> Path:
    with RunWriter("libraries", list(run), out, False) as writer:
        for name in run:
            table = run[name].copy()
            writer.append(name, tables[name](table) if name in tables else table)
        writer.finish(run.provenance)
    return out


# --- commands and signals --------------------------------------------------------------------------------------------


def test_one_trace_inside_another_attaches_once() -> None:
    once = attach.audited({"LD_AUDIT": "/their/audit.so"})["LD_AUDIT"]
    assert once.split(":")[1:] == ["/their/audit.so"]
    assert attach.audited({"LD_AUDIT": once})["LD_AUDIT"] == once
    assert attach.audited({"LD_AUDIT": f":{once}::"})["LD_AUDIT"] == once


CHILD = """
import os, signal, sys, time
def clean(number, frame):
    os.write(1, f"cleaned up after {number}\\n".encode())  # print may be in the middle of "ready"
    sys.exit(7)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, clean)
os.write(1, b"ready\\n")
time.sleep(60)
"""
PARENT = """
import os, sys
from gpubloat.libraries import attach
print("status", attach.run([sys.executable, "-c", sys.argv[1]], os.environ), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_us_ends_the_command_first(number: signal.Signals) -> None:
    words = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.read() == f"cleaned up after {int(number)}\nstatus 7\n"
    assert process.returncode == 0


def test_signals_that_are_ignored_stay_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        code = "import signal, sys; sys.exit(signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)"
        assert attach.run([sys.executable, "-c", code], os.environ) == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nothing_is_left_behind_by_a_command_that_is_ended(run: Run, tmp_path: Path) -> None:
    debloat([run], tmp_path / "out")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    call = [sys.executable, "-c", "from gpubloat.cli import main; main()", "libraries", "verify"]
    mark = tmp_path / "mark"
    words = [*call, str(tmp_path / "out"), "--", "sh", "-c", f"touch {mark}; exec sleep 60"]
    with subprocess.Popen(words, env={**os.environ, "TMPDIR": str(temporary)}) as process:
        for _ in range(600):
            if mark.exists() or process.poll() is not None:
                break
            time.sleep(0.05)
        assert any(temporary.iterdir())
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    assert list(temporary.iterdir()) == []


def test_a_path_that_is_no_text_is_left_out(tmp_path: Path) -> None:
    """What a long run used of other libraries is not lost for it."""
    built = shared(tmp_path / "built", SAMPLE)
    odd = os.fsencode(tmp_path) + b"/bad\xff"
    os.mkdir(odd)
    os.rename(built, odd + b"/libsample.so")
    other = shared(tmp_path / "pkg", SAMPLE, "libother.so")
    code = "import ctypes, os, sys; [ctypes.CDLL(os.fsencode(p)).used(1) for p in sys.argv[1:]]"
    words = [sys.executable, "-S", "-c", code, os.fsdecode(odd + b"/libsample.so"), str(other)]
    made = trace(words, sources=Sources(cupti=False), out=tmp_path / "run", command_line=" ".join(words))
    assert made.provenance["exit_status"] == 0
    assert "pkg/libother.so" in set(made["loaded"]["library"])
    assert not any("libsample" in name for name in made["loaded"]["library"])
    assert any("bad\\xff/libsample.so was left out" in said for said in made.provenance["record_problems"])


# --- tables that say what no scan says -------------------------------------------------------------------------------


def test_functions_outside_the_code_are_kept(run: Run, library: Path, tmp_path: Path) -> None:
    def move(table: pd.DataFrame) -> pd.DataFrame:
        row = table["function"] == "through_pointer"
        table.loc[row, ["offset_bytes", "size_bytes"]] = (0, 64)  # the header of the file
        return table

    debloat([changed(run, tmp_path / "changed", functions=move)], tmp_path / "out")
    (entry,) = manifest.read(tmp_path / "out").libraries
    assert (tmp_path / "out" / entry.copy).read_bytes()[:64] == library.read_bytes()[:64]
    code = [s for s in Elf(Reader("x", library.read_bytes())).sections if s.is_code]
    ranges = manifest.ranges(tmp_path / "out", entry)
    for start, size in ranges[ranges["kind"] == CPU][["offset", "size"]].tolist():
        assert any(s.sh_offset <= start and start + size <= s.sh_offset + s.sh_size for s in code)


def test_regions_that_come_twice(run: Run, tmp_path: Path) -> None:
    twice = changed(run, tmp_path / "changed", regions=lambda table: pd.concat([table, table]))
    assert len(debloat([twice], tmp_path / "out")["removed"]) > 0


@pytest.mark.parametrize(("column", "value"), [("payload_bytes", 2**63 - 1), ("offset_bytes", 2**63 - 100)])
def test_elements_that_leave_the_file(run: Run, tmp_path: Path, column: str, value: int) -> None:
    def grow(table: pd.DataFrame) -> pd.DataFrame:
        table.loc[table["element"] == 0, column] = value
        return table

    debloat([changed(run, tmp_path / "changed", elements=grow)], tmp_path / "out")
    for entry in manifest.read(tmp_path / "out").libraries:
        manifest.ranges(tmp_path / "out", entry)


# --- folders from somebody else --------------------------------------------------------------------------------------


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def second_version(path: Path) -> None:
    """The guard reads version 1 only, and would not bring anything back."""
    table = np.load(path)
    with path.open("wb") as file:
        np.lib.format.write_array(file, table, version=(2, 0))


def endless_shape(path: Path) -> None:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        out, {"descr": np.lib.format.dtype_to_descr(np.load(path).dtype), "fortran_order": False, "shape": (10**20,)}
    )
    path.write_bytes(out.getvalue())


@pytest.mark.parametrize("damage", [pipe, device, second_version, endless_shape])
def test_ranges_that_are_none(run: Run, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    debloat([run], tmp_path / "out")
    damage(tmp_path / "out/ranges/0.npy")
    with pytest.raises(FormatError, match=r"0\.npy"):
        execute(tmp_path / "out", ["true"])


@pytest.mark.parametrize("damage", [pipe, device])
def test_a_manifest_that_never_ends(run: Run, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    debloat([run], tmp_path / "out")
    damage(tmp_path / "out" / manifest.NAME)
    for function in (inplace.apply, inplace.restore):
        with pytest.raises(FormatError, match="no regular file"):
            function(tmp_path / "out")


@pytest.mark.parametrize("damage", [pipe, device])
def test_originals_that_never_end(run: Run, library: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    debloat([run], tmp_path / "out")
    damage(library)
    for function in (inplace.apply, inplace.restore):
        with pytest.raises(GpubloatError, match="no regular file"):
            function(tmp_path / "out")


def test_an_original_whose_name_no_file_can_have(run: Run, tmp_path: Path) -> None:
    debloat([run], tmp_path / "out")
    path = tmp_path / "out" / manifest.NAME
    about = json.loads(path.read_text())
    about["libraries"][0]["path"] = "/" + "a" * 300
    path.write_text(json.dumps(about))
    with pytest.raises(GpubloatError):
        inplace.apply(tmp_path / "out")
    assert inplace.restore(tmp_path / "out") == []


def test_what_gpubloat_itself_runs_on_is_not_replaced(run: Run, library: Path, tmp_path: Path) -> None:
    """With its own interpreter debloated, `restore` would end before it could put that back."""
    debloat([run], tmp_path / "out")
    before = library.read_bytes()
    code = "import sys; from gpubloat.libraries import inplace; print(inplace.in_use(sys.argv[1]), {}(sys.argv[1]))"

    def elsewhere(function: str) -> str:
        words = [sys.executable, "-c", code.format(function), str(tmp_path / "out")]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    held = ctypes.CDLL(str(library))
    assert inplace.in_use(tmp_path / "out") == [NAME]
    assert inplace.apply(tmp_path / "out") == []
    assert library.read_bytes() == before
    assert elsewhere("inplace.apply") == f"[] ['{NAME}']\n"
    assert library.read_bytes() != before
    assert held.through_pointer() == 41
    assert elsewhere("inplace.restore") == f"[] ['{NAME}']\n"
    assert library.read_bytes() == before
