"""The audit library: what it records of real processes, and that the processes do what they did without it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gpubloat.libraries import attach, record
from gpubloat.libraries.elf import Elf
from gpubloat.libraries.functions import read as functions_of
from gpubloat.libraries.reader import Reader
from gpubloat.libraries.record import Record
from tests.native.programs import SAMPLE, needs_compiler, shared

pytestmark = needs_compiler
LOAD = "import ctypes, os, signal, sys, threading, time\nlib = ctypes.CDLL(sys.argv[1])\n"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared(tmp_path_factory.mktemp("sample"), SAMPLE)


def observe(
    folder: Path, code: str, *arguments: str, status: int = 0, env: dict[str, str] | None = None
) -> tuple[str, Record]:
    """Run Python code under the audit library; its output and the record."""
    folder = folder / "record"
    folder.mkdir(exist_ok=True)
    variables = {"GPUBLOAT_DIR": str(folder), "GPUBLOAT_FUNCTIONS": "1", "GPUBLOAT_PAGES": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env=attach.audited(os.environ | (env or {}), **variables),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stderr
    return done.stdout, record.read(folder)


def entered(found: Record, library: Path) -> set[str]:
    """Names of the functions of `library` that were entered."""
    (watched,) = [w for w in found.libraries if w.path == str(library)]
    data = library.read_bytes()
    table, _ = functions_of(Elf(Reader(str(library), data)), "x")
    names = dict(zip(table["address"].astype(int), table["function"], strict=True))
    return {names.get(int(site), hex(site)) for site, n in zip(watched.sites, watched.n_hits, strict=True) if n}


def test_exactly_the_functions_that_ran(sample: Path, tmp_path: Path) -> None:
    text, found = observe(
        tmp_path, LOAD + "print(lib.also_used(1), ctypes.c_int.in_dll(lib, 'constructed').value)", str(sample)
    )
    assert text.split() == ["4", "5"]
    names = entered(found, sample)
    assert {"used", "also_used", "start", "helper", "indirect"} <= names  # indirect: the resolver has its name
    assert not {"unused", "read_page", "chosen", "call_indirect"} & names
    assert found.problems == []


def test_functions_without_unwind_entries_are_known_by_their_symbols(tmp_path: Path) -> None:
    assembly = """
    int plain(void) { return 1; }
    __asm__(".text\\n.globl by_hand\\n.type by_hand,@function\\nby_hand: mov $7, %eax\\nret\\n"
            ".size by_hand, .-by_hand");
    """
    library = shared(tmp_path, assembly)
    text, found = observe(tmp_path, LOAD + "print(lib.by_hand())", str(library))
    assert text.strip() == "7"
    assert "by_hand" in entered(found, library)
    assert "plain" not in entered(found, library)


def test_sites_are_the_unwind_entries_outside_stubs(sample: Path, tmp_path: Path) -> None:
    _, found = observe(tmp_path, LOAD, str(sample))
    (watched,) = [w for w in found.libraries if w.path == str(sample)]
    table, _ = functions_of(Elf(Reader(str(sample), sample.read_bytes())), "x")
    known = table[(table["size_bytes"] > 0) & (table["function"] != "indirect")]
    assert set(watched.sites.tolist()) >= set(known["address"].astype(int))
    assert set(watched.sites.tolist()) <= set(table["address"].astype(int))
    assert {"used", "unused"} <= set(known["function"])


def test_first_touch_of_gpu_code(sample: Path, tmp_path: Path) -> None:
    text, found = observe(tmp_path, LOAD + "print(lib.read_page(3), lib.read_page(11), lib.read_page(3))", str(sample))
    assert text.split() == ["3", "11", "3"]
    (watched,) = [w for w in found.libraries if w.path == str(sample)]
    pages = (watched.touched_addresses() - watched.runs["vaddr"][0]) // record.PAGE
    assert pages.tolist() == [3, 11]
    assert watched.runs["n_pages"].tolist() == [16, 4]


def test_closed_and_opened_again(sample: Path, tmp_path: Path) -> None:
    code = """
    import _ctypes, ctypes, sys
    a = ctypes.CDLL(sys.argv[1]); a.used(1)
    _ctypes.dlclose(a._handle)
    import mmap
    keep = [mmap.mmap(-1, 1 << 21) for _ in range(8)]  # so that it comes to lie elsewhere
    b = ctypes.CDLL(sys.argv[1]); print(b.unused(1), b.used(2), b.read_page(2))
    """
    text, found = observe(tmp_path, code, str(sample))
    assert text.split() == ["4", "3", "2"]
    assert {"used", "unused", "read_page"} <= entered(found, sample)
    assert len([w for w in found.libraries if w.path == str(sample)]) == 1


def test_a_killed_process_loses_nothing(sample: Path, tmp_path: Path) -> None:
    _, found = observe(tmp_path, LOAD + "lib.used(1); os.kill(os.getpid(), signal.SIGKILL)", str(sample), status=-9)
    assert "used" in entered(found, sample)


def test_children_by_fork_spawn_and_exec(sample: Path, tmp_path: Path) -> None:
    code = """
    import ctypes, multiprocessing, os, subprocess, sys
    def one(n):
        return ctypes.CDLL(sys.argv[1]).used(n)
    if __name__ == "__main__":
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(pool.map(one, [1, 2]), flush=True)  # exec drops what is in the buffer
        run = [sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1]).unused(1)", sys.argv[1]]
        subprocess.run(run, check=True)
        code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).read_page(1)"
        os.execv(sys.executable, [sys.executable, "-c", code, sys.argv[1]])
    """
    text, found = observe(tmp_path, code, str(sample))
    assert text.strip() == "[2, 3]"
    assert {"used", "unused", "read_page"} <= entered(found, sample)
    (watched,) = [w for w in found.libraries if w.path == str(sample)]
    assert len(watched.processes) >= 3
    assert sum(p.program.startswith("python") for p in found.processes) >= 3


def test_spawned_workers(sample: Path, tmp_path: Path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(
        "import ctypes, multiprocessing, sys\n"
        "def one(path):\n    return ctypes.CDLL(path).used(1)\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(2) as pool:\n"
        "        print(pool.map(one, [sys.argv[1]] * 2))\n"
    )
    code = "import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    text, found = observe(tmp_path, code, str(script), str(sample))
    assert text.strip() == "[2, 2]"
    assert "used" in entered(found, sample)


def test_two_hundred_threads_meet_the_same_sites(sample: Path, tmp_path: Path) -> None:
    code = """
    go = threading.Barrier(200); sums = []
    def work(n):
        go.wait(); sums.append(lib.also_used(n) + lib.read_page(n % 16))
    threads = [threading.Thread(target=work, args=(n,)) for n in range(200)]
    [t.start() for t in threads]; [t.join() for t in threads]
    print(sum(sums) == sum(2 * (n + 1) + n % 16 for n in range(200)))
    """
    text, found = observe(tmp_path, LOAD + textwrap.dedent(code), str(sample))
    assert text.strip() == "True"
    assert {"used", "also_used", "read_page"} <= entered(found, sample)


def test_a_program_with_handlers_of_its_own(sample: Path, tmp_path: Path) -> None:
    code = """
    got = []
    assert signal.getsignal(signal.SIGTRAP) == signal.SIG_DFL
    signal.signal(signal.SIGTRAP, lambda number, frame: got.append(number))
    assert callable(signal.getsignal(signal.SIGTRAP))
    print(lib.used(1), lib.read_page(4))
    os.kill(os.getpid(), signal.SIGTRAP)
    import faulthandler
    faulthandler.enable()
    print(lib.unused(1), lib.read_page(5), got == [signal.SIGTRAP])
    """
    text, found = observe(tmp_path, LOAD + textwrap.dedent(code), str(sample))
    assert text.split() == ["2", "4", "4", "5", "True"]
    assert {"used", "unused"} <= entered(found, sample)


def test_blocked_signals_do_not_kill(sample: Path, tmp_path: Path) -> None:
    code = """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    print(lib.used(1), lib.read_page(6))
    run = subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True)
    print(run.stdout.decode())
    """
    text, found = observe(tmp_path, "import subprocess\n" + LOAD + textwrap.dedent(code), str(sample))
    assert text.split() == ["2", "6", "7"]
    assert "used" in entered(found, sample)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGTRAP)", -5),
        ("ctypes.string_at(0)", -11),
        ("signal.signal(signal.SIGTRAP, signal.SIG_IGN); os.kill(os.getpid(), signal.SIGTRAP); os._exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -11),
        ("os.abort()", -6),
    ],
)
def test_signals_end_the_program_as_without_us(sample: Path, tmp_path: Path, code: str, status: int) -> None:
    observe(tmp_path, LOAD + "lib.used(1)\n" + code, str(sample), status=status)


def test_a_record_folder_that_is_gone_does_not_stop_the_program(sample: Path, tmp_path: Path) -> None:
    variables = {"GPUBLOAT_DIR": str(tmp_path / "none"), "GPUBLOAT_FUNCTIONS": "1", "GPUBLOAT_PAGES": "1"}
    env = attach.audited(os.environ, **variables)
    done = subprocess.run(
        [sys.executable, "-c", LOAD + "print(lib.used(1))", str(sample)], env=env, capture_output=True
    )
    assert (done.returncode, done.stdout) == (0, b"2\n")


def test_what_is_not_watched_says_why(sample: Path, tmp_path: Path) -> None:
    bare = shared(tmp_path, "int f(void) { return 1; }", "libbare.so", "-fno-asynchronous-unwind-tables", "-nostdlib")
    code = LOAD + "print(lib.used(1), ctypes.CDLL(sys.argv[2]).f())"
    _, found = observe(tmp_path, code, str(sample), str(bare))
    problems = {Path(w.path).name: w.problem for w in found.libraries}
    assert problems["libbare.so"] == "no search table of unwind entries"
    assert problems["libc.so.6"] == "part of the C library"
    assert problems[sample.name] == ""
