"""Debloated copies in the place of originals, and what happens when removed code is met."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from gpubloat.libraries import attach, record
from gpubloat.libraries.elf import Elf
from gpubloat.libraries.functions import read as functions_of
from gpubloat.libraries.reader import Reader
from gpubloat.libraries.record import Record
from tests.native.programs import SAMPLE, needs_compiler, shared

pytestmark = needs_compiler
RANGE = np.dtype([("offset", "<u8"), ("size", "<u8"), ("kind", "<u4"), ("id", "<u4")])
LOAD = "import ctypes, os, signal, sys, threading\nlib = ctypes.CDLL(sys.argv[1])\n"
PAGE = 4096


class Copy:
    """A library, and a copy without `unused`, pages 3, 4 and half of 5 of its GPU code, and some of the writable."""

    def __init__(self, folder: Path) -> None:
        self.original = shared(folder, SAMPLE)
        data = bytearray(self.original.read_bytes())
        table, _ = functions_of(Elf(Reader("x", bytes(data))), "x")
        row = table[table["function"] == "unused"].iloc[0]
        view = Elf(Reader("x", bytes(data)))
        gpu = next(s for s in view.sections if s.name == ".nv_fatbin").sh_offset
        section = next(s for s in view.sections if s.name == ".ldata")
        late = section.sh_offset + -section.sh_addr % PAGE  # where the aligned array is
        self.function = int(row["offset_bytes"])
        self.gpu = gpu
        ranges = [
            (self.function, int(row["size_bytes"]), 1, 0),
            (gpu + 3 * PAGE, 2 * PAGE + PAGE // 2, 2, 1),
            (late + PAGE // 2, 2 * PAGE, 2, 2),
        ]
        for offset, size, kind, _ in ranges:
            data[offset : offset + size] = (b"\xcc" if kind == 1 else b"\0") * size
        self.copy = folder / "copy.so"
        self.copy.write_bytes(data)
        np.save(folder / "ranges.npy", np.array(sorted(ranges), RANGE))
        self.plan = folder / "plan"
        self.plan.write_text(f"{self.original}\t{self.copy}\t{folder / 'ranges.npy'}\t{len(data)}\n")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return Copy(tmp_path_factory.mktemp("copy"))


def run(copy: Copy, folder: Path, guard: str, code: str) -> tuple[int, str, str, Record]:
    folder = folder / "record"
    folder.mkdir(exist_ok=True)
    env = attach.audited(os.environ, GPUBLOAT_DIR=str(folder), GPUBLOAT_PLAN=str(copy.plan), GPUBLOAT_GUARD=guard)
    words = [sys.executable, "-c", LOAD + textwrap.dedent(code), str(copy.original)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr, record.read(folder)


@pytest.mark.parametrize("guard", ["off", "report", "restore"])
def test_kept_code_runs_from_the_copy_under_the_path_of_the_original(copy: Copy, tmp_path: Path, guard: str) -> None:
    code = """
    print(lib.also_used(1), lib.read_page(2), lib.call_indirect(1))
    maps = open("/proc/self/maps").read()
    print("copy.so" in maps, lib._name == sys.argv[1])
    """
    status, text, _, found = run(copy, tmp_path, guard, code)
    assert (status, text.split()) == (0, ["4", "2", "101", "True", "True"])
    assert found.misses == []
    assert any(str(copy.original) in p.swapped for p in found.processes)


def test_removed_code_traps_without_the_guard(copy: Copy, tmp_path: Path) -> None:
    status, _, error, _ = run(copy, tmp_path, "off", "lib.unused(1)")
    assert (status, error) == (-5, "")
    status, text, _, _ = run(copy, tmp_path, "off", "print(lib.read_page(3), *(lib.read_late(n) for n in range(4)))")
    assert (status, text) == (0, "0 0 0 0 3\n")


def test_report_names_library_function_and_remedy(copy: Copy, tmp_path: Path) -> None:
    status, _, error, found = run(copy, tmp_path, "report", "lib.unused(1)")
    assert status == -5
    assert error.count("\n") == 1
    for part in (str(copy.original), "function unused", "unused in the traced runs", "gpubloat libraries trace"):
        assert part in error
    (miss,) = found.misses
    assert (miss.what, miss.action, miss.offset) == ("function", "reported", copy.function)


def test_report_of_gpu_code_lets_the_program_go_on(copy: Copy, tmp_path: Path) -> None:
    status, text, error, found = run(copy, tmp_path, "report", "print(lib.read_page(4), lib.read_page(4))")
    assert (status, text) == (0, "0 0\n")
    assert error.count("GPU code at offset") == 1
    assert [(m.what, m.offset, m.is_whole) for m in found.misses] == [("page", copy.gpu + 4 * PAGE, True)]


def test_restore_brings_everything_back(copy: Copy, tmp_path: Path) -> None:
    code = """
    print(lib.unused(1), lib.unused(2), *(lib.read_page(n) for n in range(16)), *(lib.read_late(n) for n in range(4)))
    """
    status, text, error, found = run(copy, tmp_path, "restore", code)
    assert (status, error) == (0, "")
    assert text.split() == ["4", "7", *map(str, range(16)), *map(str, range(4))]
    pages = {(m.offset - copy.gpu) // PAGE: m.is_whole for m in found.misses if m.what == "page"}
    pages = {page: is_whole for page, is_whole in pages.items() if page < 16}
    assert pages == {3: True, 5: False}  # with page 3 all that only the same element has came back
    assert [m.offset for m in found.misses if m.what == "function"] == [copy.function]


def test_restore_under_two_hundred_threads_and_forks(copy: Copy, tmp_path: Path) -> None:
    code = """
    go = threading.Barrier(200); sums = []
    def work(n):
        go.wait(); sums.append(lib.unused(n) + lib.read_page(n % 16))
    threads = [threading.Thread(target=work, args=(n,)) for n in range(200)]
    [t.start() for t in threads]; [t.join() for t in threads]
    child = os.fork()
    if not child:
        os._exit(lib.unused(3) + lib.read_page(5))
    print(sum(sums) == sum(3 * n + 1 + n % 16 for n in range(200)), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    status, text, error, _ = run(copy, tmp_path, "restore", code)
    assert (status, text.split(), error) == (0, ["True", "15"], "")


def test_the_programs_own_handlers_stay(copy: Copy, tmp_path: Path) -> None:
    code = """
    got = []
    signal.signal(signal.SIGTRAP, lambda number, frame: got.append(number))
    import faulthandler; faulthandler.enable()
    print(lib.unused(1), lib.read_page(3))
    os.kill(os.getpid(), signal.SIGTRAP)
    print(got == [signal.SIGTRAP])
    """
    status, text, error, _ = run(copy, tmp_path, "restore", code)
    assert (status, text.split(), error) == (0, ["4", "3", "True"], "")


def test_another_version_of_the_library_is_left_alone(copy: Copy, tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text(copy.plan.read_text().rpartition("\t")[0] + "\t12345\n")
    other = Copy.__new__(Copy)
    other.original, other.plan = copy.original, plan
    status, text, _, found = run(other, tmp_path, "restore", "print(lib.unused(1))")
    assert (status, text) == (0, "4\n")
    assert any("another version" in problem for p in found.processes for problem in p.problems)


@pytest.mark.parametrize("damage", [b"", b"garbage", b"\0" * 200, b"\t\t\t\n" * 50, b"a\tb\n"])
def test_a_damaged_plan_changes_nothing(copy: Copy, tmp_path: Path, damage: bytes) -> None:
    other = Copy.__new__(Copy)
    other.original, other.plan = copy.original, tmp_path / "plan"
    other.plan.write_bytes(damage)
    status, text, _, _ = run(other, tmp_path, "restore", "print(lib.unused(1))")
    assert (status, text) == (0, "4\n")
