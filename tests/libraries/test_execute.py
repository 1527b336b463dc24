"""Trace, debloat, run on the copies: the path that was traced, one that was not, and every way of meeting it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubloat.errors import FormatError, GpubloatError
from gpubloat.libraries import inplace, manifest
from gpubloat.libraries.debloat import debloat
from gpubloat.libraries.execute import GUARDS, _runs, environment, execute
from gpubloat.libraries.prune import prune
from gpubloat.libraries.trace import Sources, trace
from gpubloat.native import build
from gpubloat.run import Run, RunWriter
from tests.build import fatbin
from tests.native.programs import SAMPLE, needs_compiler, shared

pytestmark = needs_compiler
NAME = "pkg/libsample.so"
# Libraries under test only: the interpreter's own are not worth their time here.
CALL = """
import ctypes, os, signal, sys, threading
lib = ctypes.CDLL(sys.argv[1])
"""
SECOND = """
int second(int x) { return x + 7; }
int third(int x) { volatile int y = x; return y - 7; }
"""


def traced(library: Path, out: Path, code: str) -> None:
    """A run of Python code that says nothing of the interpreter: only `library` is debloated."""
    run = trace(python(code, library), sources=Sources(cupti=False))
    with RunWriter("libraries", list(run), out, False) as writer:
        for name in run:
            table = run[name]
            writer.append(name, table[table["library"] == NAME] if "library" in table else table)
        writer.finish(run.provenance)


def python(code: str, library: Path) -> list[str]:
    return [sys.executable, "-S", "-c", CALL + textwrap.dedent(code), str(library)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a traced run, its library, and what debloat made of them: `used` and `also_used` were entered."""
    folder = tmp_path_factory.mktemp("made")
    library = folder / "site-packages" / NAME
    shared(library.parent, SAMPLE + SECOND)
    code = "print(lib.also_used(1), lib.read_page(1), lib.call_indirect(1)); lib.read_late(1)"
    traced(library, folder / "run", code)
    debloat(folder / "run", folder / "out")
    return folder


@pytest.fixture
def own(made: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    library = tmp_path / "site-packages" / NAME
    library.parent.mkdir(parents=True)
    shutil.copy(made / "site-packages" / NAME, library)
    traced(library, tmp_path / "run", "lib.also_used(1)")
    debloat(tmp_path / "run", tmp_path / "out")
    return tmp_path


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders go: looked at in the end."""
    cache = build.cache()
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("GPUBLOAT_CACHE", str(cache))
    return path


def run(
    folder: Path, code: str, capfd: pytest.CaptureFixture[str], guard: str = "restore", out: Path | None = None
) -> tuple[int, str, str, Run]:
    capfd.readouterr()
    status, found = execute(folder / "out", python(code, folder / "site-packages" / NAME), guard=guard, out=out)
    return status, *capfd.readouterr(), found


@pytest.mark.parametrize("guard", GUARDS)
def test_the_traced_path(made: Path, capfd: pytest.CaptureFixture[str], guard: str, temporary: Path) -> None:
    code = """
    print(lib.also_used(1), lib.read_page(1), lib.call_indirect(1), ctypes.c_int.in_dll(lib, "constructed").value)
    maps = open("/proc/self/maps").read()
    print(str(sys.argv[1]) in maps, "/out/files" in maps)
    """
    status, text, error, found = run(made, code, capfd, guard)
    assert (status, text.split(), error) == (0, ["4", "1", "101", "5", "True", "True"], "")
    assert found["misses"].empty
    said = found.provenance
    assert (said["guard"], said["exit_status"], said["trace"]) == (guard, 0, "guard")
    assert said["n_swapped"] >= 1
    assert said["problems"] == []
    assert said["empty"]["misses"] == ("the guard was off" if guard == "off" else "no removed code was met")
    assert [p for p in temporary.iterdir() if p != found.folder] == []


def test_what_was_removed(made: Path) -> None:
    removed = Run.load(made / "out")["removed"].query("library == @NAME")
    functions = Run.load(made / "run")["functions"].query("library == @NAME").set_index("offset_bytes")["function"]
    names = {functions[offset] for offset in removed["offset_bytes"]}
    assert {"unused", "second", "third"} <= names
    assert not {"used", "also_used", "start", "helper", "read_page", "call_indirect", "chosen"} & names


def test_off_traps_at_the_first_instruction(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, text, error, found = run(made, "print('before', flush=True); lib.unused(1)", capfd, "off")
    assert (status, text, error) == (-5, "before\n", "")
    assert found["misses"].empty


def test_report_names_the_function(made: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, text, error, found = run(made, "lib.unused(1); print('never')", capfd, "report", tmp_path / "misses")
    assert (status, text) == (-5, "")
    assert error.count("\n") == 1
    for part in (str(made / "site-packages" / NAME), "function unused", "unused in the traced runs", "trace --out"):
        assert part in error
    (miss,) = Run.load(tmp_path / "misses")["misses"].to_dict("records")
    assert (miss["library"], miss["function"], miss["action"], miss["n_processes"]) == (NAME, "unused", "reported", 1)
    assert found["misses"].equals(Run.load(tmp_path / "misses")["misses"])


@pytest.mark.parametrize("guard", ["restore", "restore-cpu"])
def test_restore_goes_on(made: Path, capfd: pytest.CaptureFixture[str], guard: str) -> None:
    code = "print(lib.unused(1), lib.unused(2), lib.second(1), [lib.read_page(n) for n in range(16)][7])"
    status, text, error, found = run(made, code, capfd, guard)
    assert (status, text, error) == (0, "4 7 8 7\n", "")
    misses = found["misses"].set_index("function")
    assert set(misses.index) == {"unused", "second"}
    assert set(misses["action"]) == {"restored"}
    removed = Run.load(made / "out")["removed"].query("library == @NAME").set_index("offset_bytes")["size_bytes"]
    assert all(removed[row.offset_bytes] == row.size_bytes for row in misses.itertuples())


def test_misses_are_one_more_run(made: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = "print(lib.unused(1), lib.also_used(1))"
    assert run(made, code, capfd, "off")[0] == -5
    assert run(made, code, capfd, out=tmp_path / "misses")[:2] == (0, "4 4\n")
    debloat([made / "run", tmp_path / "misses"], tmp_path / "out")
    library = made / "site-packages" / NAME
    status, _ = execute(tmp_path / "out", python(code, library), guard="off")
    assert (status, capfd.readouterr().out) == (0, "4 4\n")
    status, _ = execute(tmp_path / "out", python("lib.second(1)", library), guard="off")
    assert status == -5
    with pytest.raises(GpubloatError, match="only misses of a guard"):
        debloat([tmp_path / "misses"], tmp_path / "other")


def test_threads(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = """
    go = threading.Barrier(200); sums = []
    def work(n):
        go.wait(); sums.append(lib.unused(n) + lib.second(n) + lib.third(n) + lib.also_used(n))
    threads = [threading.Thread(target=work, args=(n,)) for n in range(200)]
    [t.start() for t in threads]; [t.join() for t in threads]
    print(sum(sums) == sum(3 * n + 1 + n + 7 + n - 7 + 2 * (n + 1) for n in range(200)))
    """
    status, text, error, found = run(made, code, capfd)
    assert (status, text, error) == (0, "True\n", "")
    assert set(found["misses"]["function"]) == {"unused", "second", "third"}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers(made: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path, method: str) -> None:
    (tmp_path / "work.py").write_text(
        "import ctypes, multiprocessing, sys\n"
        "def one(n):\n    lib = ctypes.CDLL(sys.argv[1])\n    return lib.unused(n) + lib.also_used(n)\n"
        "if __name__ == '__main__':\n"
        f"    with multiprocessing.get_context('{method}').Pool(2) as pool:\n"
        "        print(sum(pool.map(one, range(10), chunksize=5)))\n"
    )
    command = [sys.executable, "-S", str(tmp_path / "work.py"), str(made / "site-packages" / NAME)]
    status, found = execute(made / "out", command)
    assert (status, *capfd.readouterr()) == (0, f"{sum(3 * n + 1 + 2 * (n + 1) for n in range(10))}\n", "")
    (miss,) = found["misses"].query("library == @NAME").to_dict("records")
    assert miss["function"] == "unused"
    assert 1 <= miss["n_processes"] <= 2


def test_opened_twice_and_handlers_of_the_program(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = """
    import _ctypes
    got = []
    signal.signal(signal.SIGTRAP, lambda number, frame: got.append(number))
    print(lib.unused(1))
    _ctypes.dlclose(lib._handle)
    lib = ctypes.CDLL(sys.argv[1])
    print(lib.unused(2), lib.also_used(1))
    os.kill(os.getpid(), signal.SIGTRAP)
    print(got == [signal.SIGTRAP])
    """
    status, text, error, _ = run(made, code, capfd)
    assert (status, text.split(), error) == (0, ["4", "7", "4", "True"], "")


def test_exit_status_and_threads_of_the_caller(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(made, "sys.exit(9)", capfd)[0] == 9
    assert run(made, "os.kill(os.getpid(), signal.SIGTERM)", capfd)[0] == -15
    found: list[int] = []
    command = python("sys.exit(lib.unused(1))", made / "site-packages" / NAME)
    thread = threading.Thread(target=lambda: found.append(execute(made / "out", command)[0]))
    thread.start()
    thread.join()
    assert found == [4]


def test_other_programs_run_on_their_originals(made: Path) -> None:
    status, found = execute(made / "out", ["sh", "-c", "exit 3"])
    assert status == 3
    assert found.provenance["problems"] == []


def appended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def rebuilt(path: Path) -> None:
    """Of the same size, with other code."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (appended, "is not the version that was debloated"),
        (rebuilt, "is not the version that was debloated"),
        (os.unlink, "cannot be read: No such file"),
        (lambda path: os.replace(path, path.parent / "aside"), "cannot be read: No such file"),
    ],
)
def test_an_original_that_changed_since(own: Path, change: Callable[[Path], None], message: str) -> None:
    change(own / "site-packages" / NAME)
    with pytest.raises(GpubloatError, match=message) as caught:
        execute(own / "out", ["touch", str(own / "ran")], out=own / "misses")
    assert caught.value.hint
    assert "\n" not in caught.value.message
    assert not (own / "ran").exists()
    assert not (own / "misses").exists()


def test_an_original_that_was_only_touched(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    os.utime(own / "site-packages" / NAME)
    assert run(own, "print(lib.unused(1))", capfd)[:2] == (0, "4\n")


def test_copies_in_place_are_not_guarded_by_themselves(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    inplace.apply(own / "out")
    with pytest.raises(GpubloatError, match="is replaced by its copy already") as caught:
        run(own, "print(lib.unused(1))", capfd)
    assert "libraries restore" in str(caught.value.hint)
    inplace.restore(own / "out")
    assert run(own, "print(lib.unused(1))", capfd)[:2] == (0, "4\n")


def test_damaged_folders(own: Path) -> None:
    (entry,) = [e for e in manifest.read(own / "out").libraries if e.library == NAME]
    command = ["touch", str(own / "ran")]
    ranges, copy = own / "out" / entry.ranges, own / "out" / entry.copy
    before = ranges.read_bytes()
    ranges.write_bytes(before[:-5])
    with pytest.raises(FormatError, match="no table of ranges"):
        execute(own / "out", command)
    ranges.unlink()
    with pytest.raises(GpubloatError, match="cannot be read"):
        execute(own / "out", command)
    ranges.write_bytes(before)
    os.truncate(copy, entry.bytes - 1)
    with pytest.raises(GpubloatError, match=r"the copy of .* is damaged"):
        execute(own / "out", command)
    copy.unlink()
    with pytest.raises(GpubloatError, match=r"the copy of .* is damaged"):
        execute(own / "out", command)
    assert not (own / "ran").exists()


def test_bad_arguments(made: Path, tmp_path: Path, temporary: Path) -> None:
    with pytest.raises(GpubloatError, match="no command was given"):
        execute(made / "out", [], out=tmp_path / "misses")
    with pytest.raises(GpubloatError, match="is no program that can be run"):
        execute(made / "out", ["no-such-program"], out=tmp_path / "misses")
    with pytest.raises(GpubloatError, match="'on' is no mode of the guard"):
        execute(made / "out", ["true"], guard="on", out=tmp_path / "misses")
    with pytest.raises(GpubloatError, match="is no debloated folder"):
        execute(tmp_path / "none", ["true"], out=tmp_path / "misses")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    with pytest.raises(GpubloatError, match="is not empty"):
        execute(made / "out", ["touch", str(tmp_path / "ran")], out=tmp_path / "full")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "temporary"]
    assert list(temporary.iterdir()) == []


def test_the_environment_stays_the_callers(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_AUDIT", "/no/such/other.so")
    monkeypatch.setenv("GPUBLOAT_FUNCTIONS", "1")
    with environment(made / "out", "report") as variables:
        ours, other = variables["LD_AUDIT"].split(":")
        assert (Path(ours).is_file(), other) == (True, "/no/such/other.so")
        assert Path(variables["GPUBLOAT_PLAN"]).is_file()
        assert "GPUBLOAT_DIR" not in variables
    assert os.environ["LD_AUDIT"] == "/no/such/other.so"
    assert not Path(variables["GPUBLOAT_PLAN"]).exists()


def carrying(folder: Path, region: bytes, section: str, flags: str) -> Path:
    """A library that carries `region` in `section`, and says what is at an offset of it."""
    numbers = ",".join(map(str, region))
    source = f"""
    __attribute__((section("{section},\\"{flags}\\",@progbits#"), aligned(4096)))
    unsigned char code[] = {{{numbers}}};
    struct {{ unsigned int magic, version; void *data, *file; }} wrapper
        __attribute__((section(".nvFatBinSegment,\\"aw\\",@progbits#"))) = {{0x466243b1, 1, code, 0}};
    static int neighbour = 41;
    int *pointer = &neighbour;
    int byte_at(int n) {{ return ((volatile unsigned char *)code)[n]; }}
    int through_pointer(void) {{ return *pointer; }}
    """
    return shared(folder, source)


@given(st.lists(st.tuples(st.integers(1, 300), st.booleans()), max_size=8))
def test_runs_of_changed_bytes(stretches: list[tuple[int, bool]]) -> None:
    differs = np.array([value for length, value in stretches for _ in range(length)], bool)
    covered = np.zeros(len(differs), bool)
    end = -1
    for begin, stop in _runs(differs):
        assert end < begin < stop
        assert differs[begin]
        assert differs[stop - 1]
        covered[begin:stop] = True
        end = stop
    assert covered[differs].all()
    at = 0
    for length, value in stretches:
        if length >= 128 and not value:  # as .dynamic, which nothing may be copied over
            assert not covered[at : at + length].any()
        at += length


@pytest.mark.parametrize(("section", "flags"), [(".nv_fatbin", "a"), (".ldata", "aw")])
@pytest.mark.parametrize("layout", ["moved", "zeroed"])
def test_pruned_regions_under_exec(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], section: str, flags: str, layout: str
) -> None:
    """Also in a writable segment, which cannot be mapped as a whole: the loader has written addresses into it."""
    elements = [fatbin.element(bytes([n + 1]) * 6000, number=arch) for n, arch in enumerate((80, 90, 100))]
    region = fatbin.region(elements)
    library = carrying(tmp_path / "lib", region, section, flags)
    prune(library, "sm_90", tmp_path / "out", layout=layout)
    (entry,) = manifest.read(tmp_path / "out").libraries
    copy = (tmp_path / "out" / entry.copy).read_bytes()
    at = library.read_bytes().index(region)
    kept = copy[at : at + len(region)]
    assert kept != region
    code = f"sys.stdout.write(bytes(lib.byte_at(n) for n in range({len(region)})).hex()); print(lib.through_pointer())"
    for guard in ("off", "restore"):
        status, found = execute(tmp_path / "out", python(code, library), guard=guard)
        text, error = capfd.readouterr()
        assert (status, error) == (0, "")
        assert found.provenance["n_swapped"] == 1
        expected = region if (layout, guard) == ("zeroed", "restore") else kept
        assert text == f"{expected.hex()}41\n"
        is_back = expected is region
        assert sorted(found["misses"]["element"]) == ([0, 2] if is_back else [])
