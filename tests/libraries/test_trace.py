"""Whole traces of small libraries: tables, run.json, and what happens when something is missing or goes away."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import pytest

from gpubloat.errors import GpubloatError, MissingToolError
from gpubloat.libraries.trace import Sources, trace
from gpubloat.native import build
from gpubloat.run import Run
from gpubloat.tables.usage import TABLES as USAGE
from tests.native.programs import SAMPLE, needs_compiler, shared

pytestmark = needs_compiler
LOAD = "import ctypes, os, shutil, signal, sys, threading, time\nlib = ctypes.CDLL(sys.argv[1])\n"
NAME = "pkg/libsample.so"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared(tmp_path_factory.mktemp("built"), SAMPLE)


@pytest.fixture
def sample(built: Path, tmp_path: Path) -> Path:
    """The library as a package has it, so that its name tells no folder."""
    path = tmp_path / "site-packages" / NAME
    path.parent.mkdir(parents=True)
    shutil.copy(built, path)
    return path


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders go: looked at in the end."""
    build_cache = build.cache()
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("GPUBLOAT_CACHE", str(build_cache))
    return path


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-S", "-c", LOAD + textwrap.dedent(code), *map(str, arguments)]


def functions(run: Run, library: Path | None = None) -> set[str]:
    """Names of the functions of a library (default: the sample in its package) that were entered."""
    loaded, used = run["loaded"], run["used_functions"]
    (name,) = loaded.loc[loaded["path"] == str(library), "library"] if library else [NAME]
    return set(used.loc[used["library"] == name, "function"])


def test_tables_and_provenance(sample: Path, tmp_path: Path, temporary: Path) -> None:
    code = "lib.also_used(1); lib.read_page(3); lib.read_late(2); sys.exit(7)"
    run = trace(python(code, sample), out=tmp_path / "run", workload="one", command_line="said")
    assert {"used", "also_used", "start", "helper", "read_page", "read_late"} <= functions(run)
    assert not {"unused", "chosen", "call_indirect"} & functions(run)
    assert set(run) == {*USAGE, "libraries", "regions", "elements", "functions", "problems"}
    loaded = run["loaded"].set_index("library")
    row = loaded.loc[NAME]
    assert row["path"] == str(sample)
    assert row["sha256"] == run["libraries"].set_index("library").loc[NAME, "sha256"]
    assert (row["n_processes"], row["cpu_problem"], row["file_bytes"]) == (1, "", sample.stat().st_size)
    assert (row["n_pages_guarded"], row["n_pages_touched"]) == (20, 2)
    assert row["n_functions_used"] == len(functions(run)) < row["n_functions_watched"]
    known = run["functions"].set_index(["library", "function"])
    for used in run["used_functions"].query("library == @NAME").itertuples():
        assert known.loc[(NAME, used.function), "offset_bytes"] == used.offset_bytes
    assert any(name.endswith("libc.so.6") for name in loaded.index)
    (process,) = run["processes"].to_dict("records")
    assert process["program"].startswith("python")
    assert (process["n_libraries"], process["cupti"], process["problem"]) == (len(loaded), "no_cuda", "")

    said = json.loads((tmp_path / "run" / "run.json").read_text())
    assert said == run.provenance
    assert (said["exit_status"], said["workload"], said["targets"], said["command"]) == (7, "one", [], "said")
    assert (said["trace"], said["loading"], said["is_gpu_traced"], said["repeat"]) == ("trace", "lazy", True, 1)
    assert 0 < said["wall_s"] < 60
    assert said["record_problems"] == []
    assert all(said["empty"][name] for name, n_rows in said["tables"].items() if name in said["empty"] and not n_rows)
    text = (tmp_path / "run" / "run.json").read_text()
    for machine in (tmp_path, Path.home(), Path(sys.executable).parent, temporary, Path.cwd()):
        assert f"{machine}/" not in text
    assert list(temporary.iterdir()) == []
    assert Run.load(tmp_path / "run")["loaded"].equals(run["loaded"])


def test_a_run_without_out_goes_with_its_object(sample: Path, temporary: Path) -> None:
    run = trace(python("lib.used(1)", sample), sources=Sources(cupti=False))
    assert run.provenance["workload"] == f"{Path(sys.executable).name} -S"
    assert run.folder.parent == temporary
    del run
    assert list(temporary.iterdir()) == []


def test_repeats_are_one_run(sample: Path, tmp_path: Path) -> None:
    code = """
    first = not os.path.exists(sys.argv[2])
    open(sys.argv[2], "w").close()
    lib.used(1) if first else lib.unused(1)
    sys.exit(3 if first else 0)
    """
    run = trace(python(code, sample, tmp_path / "seen"), repeat=2)
    assert {"used", "unused"} <= functions(run)
    used = run["used_functions"].query("library == @NAME").set_index("function")["n_processes"]
    assert (used["used"], used["unused"], used["start"]) == (1, 1, 2)
    assert len(run["processes"]) == 2
    assert run["loaded"].set_index("library").loc[NAME, "n_processes"] == 2
    assert run.provenance["exit_status"] == 3  # one of them failed
    assert run.provenance["repeat"] == 2


def test_only_what_was_asked_for(sample: Path) -> None:
    run = trace(python("lib.used(1); lib.read_page(3)", sample), sources=Sources(functions=False, cupti=False))
    row = run["loaded"].set_index("library").loc[NAME]
    assert (row["n_functions_watched"], row["n_pages_touched"]) == (0, 1)
    assert row["cpu_problem"] == "functions were not asked for"
    assert run["used_functions"].empty
    run = trace(python("lib.used(1); lib.read_page(3)", sample), sources=Sources(pages=False, cupti=False))
    assert run["loaded"].set_index("library").loc[NAME, "n_pages_guarded"] == 0
    assert "used" in functions(run)


def test_signals_and_children(sample: Path) -> None:
    code = """
    child = os.fork()
    if not child:
        lib.unused(1)
        os._exit(0)
    os.waitpid(child, 0)
    words = [sys.executable, "-S", "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1]).used(1)", sys.argv[1]]
    os.posix_spawn(sys.executable, words, os.environ)
    os.wait()
    os.kill(os.getpid(), signal.SIGKILL)
    """
    run = trace(python(code, sample))
    assert run.provenance["exit_status"] == -9
    assert {"used", "unused"} <= functions(run)
    assert len(run["processes"]) == 2


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([], "no command was given"),
        (["no-such-program"], "no-such-program is no program that can be run"),
        (["/no/such/program"], "is no program that can be run"),
        ([""], "is no program that can be run"),
        (["/"], "is no program that can be run"),
        (["{folder}/data"], "is no program that can be run"),
        (["{folder}/broken"], "cannot be started: Exec format error"),
        (["{folder}/orphan"], "cannot be started: No such file or directory"),
    ],
)
def test_commands_that_cannot_be_run(tmp_path: Path, temporary: Path, command: list[str], message: str) -> None:
    (tmp_path / "data").write_text("#!/bin/sh\n")
    (tmp_path / "broken").write_bytes(b"\x7fELF")
    (tmp_path / "orphan").write_text("#!/no/such/interpreter\n")
    for name in ("broken", "orphan"):
        (tmp_path / name).chmod(0o755)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(GpubloatError, match=message):
        trace([word.format(folder=tmp_path) for word in command], out=tmp_path / "run")
    assert sorted(tmp_path.iterdir()) == before
    assert list(temporary.iterdir()) == []


def test_a_folder_that_is_there_is_refused_before_anything_runs(tmp_path: Path, temporary: Path) -> None:
    command = ["touch", str(tmp_path / "ran")]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("mine")
    with pytest.raises(GpubloatError, match="is not empty"):
        trace(command, out=tmp_path / "run")
    with pytest.raises(GpubloatError, match="is a file"):
        trace(command, out=tmp_path / "run" / "mine", force=True)
    with pytest.raises(GpubloatError, match="is no compute capability"):
        trace(command, target="hopper")
    with pytest.raises(GpubloatError, match=r"cannot be written: .* is a file"):
        trace(command, out=tmp_path / "run" / "mine" / "deeper")
    assert not (tmp_path / "ran").exists()
    assert list(temporary.iterdir()) == []
    trace(command, out=tmp_path / "run", force=True)
    assert (tmp_path / "ran").exists()


def test_without_a_compiler(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("GPUBLOAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(MissingToolError, match="C compiler is not installed") as caught:
        trace([sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"], out=tmp_path / "run")
    assert "CC" in str(caught.value.hint)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bin", "temporary"]
    assert list(temporary.iterdir()) == []


def test_a_cache_that_cannot_be_written(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("GPUBLOAT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(GpubloatError, match="cannot be written"):
        trace(["true"], out=tmp_path / "run")
    assert list(temporary.iterdir()) == []


def test_a_library_that_is_deleted_while_the_run_goes_on(sample: Path, tmp_path: Path) -> None:
    run = trace(python("lib.used(1); os.unlink(sys.argv[1]); print(lib.unused(1))", sample), out=tmp_path / "run")
    row = run["loaded"].set_index("library").loc[NAME]
    assert row["cpu_problem"] == "the file was gone or changed when the run ended"
    assert (row["sha256"], row["n_functions_used"]) == ("", 0)
    assert functions(run) == set()
    assert run.provenance["exit_status"] == 0


@pytest.mark.parametrize("tail", [b"", b"longer"])
def test_a_library_that_is_replaced_while_the_run_goes_on(sample: Path, tmp_path: Path, tail: bytes) -> None:
    """As code that is built at run time, under one name: two files were loaded, and neither is to be believed."""
    code = f"""
    lib.used(1)
    data = open(sys.argv[1], "rb").read()
    os.unlink(sys.argv[1])
    open(sys.argv[1], "wb").write(data + {tail!r})
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).unused(1)"
    os.execv(sys.executable, [sys.executable, "-S", "-c", code, sys.argv[1]])
    """
    run = trace(python(code, sample), out=tmp_path / "run")
    assert run.provenance["exit_status"] == 0
    (row,) = run["loaded"].query("library == @NAME").to_dict("records")
    assert (row["cpu_problem"], row["sha256"]) == ("the file was gone or changed when the run ended", "")
    assert row["n_processes"] == 2
    assert functions(run) == set()


def test_a_library_that_is_loaded_late_and_closed_again(sample: Path, built: Path) -> None:
    code = """
    import _ctypes
    late = ctypes.CDLL(sys.argv[2])
    late.unused(1)
    _ctypes.dlclose(late._handle)
    late = ctypes.CDLL(sys.argv[2])
    print(late.also_used(1))
    """
    run = trace(python(code, sample, built))
    assert {"unused", "also_used", "used"} <= functions(run, built)
    assert not {"unused", "used"} & functions(run)


def test_two_libraries_of_one_name(sample: Path, built: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "site-packages" / NAME
    other.parent.mkdir(parents=True)
    shutil.copy(built, other)
    run = trace(python("lib.used(1); ctypes.CDLL(sys.argv[2]).unused(1)", sample, other))
    assert "unused" in functions(run, other)
    assert "unused" not in functions(run, sample)


def test_the_injected_collector_is_no_library_of_the_command(sample: Path, built: Path) -> None:
    injected = build.cache() / f"cupti-{os.getpid()}.so"
    shutil.copy(built, injected)
    try:
        run = trace(python("ctypes.CDLL(sys.argv[2]).unused(1)", sample, injected))
    finally:
        injected.unlink()
    assert {NAME} == {name for name in run["loaded"]["library"] if "sample" in name or "cupti" in name}


def test_a_static_program_has_no_record(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("int main(void) { return 4; }")
    if os.system(f"cc -static -o {tmp_path / 'a'} {tmp_path / 'a.c'} 2>/dev/null"):
        pytest.skip("the C compiler cannot link static programs")
    run = trace([str(tmp_path / "a")])
    assert run.provenance["exit_status"] == 4
    assert "static" in run.provenance["empty"]["loaded"]
    assert run["loaded"].empty


def test_traces_from_threads(sample: Path) -> None:
    """Only the main thread may set signal handlers."""
    runs: list[Run] = []
    commands = [python(f"lib.{name}(1)", sample) for name in ("used", "unused")]
    threads = [threading.Thread(target=lambda c=c: runs.append(trace(c))) for c in commands]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r.provenance["exit_status"] for r in runs] == [0, 0]
    assert sorted("unused" in functions(r) for r in runs) == [False, True]


def test_hostile_records_do_not_end_the_trace(sample: Path, tmp_path: Path) -> None:
    code = """
    folder = os.environ["GPUBLOAT_DIR"]
    for name in ("x.proc", "x-0.use", "1-2-3-4.lib", "cupti-x.log"):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(bytes(range(256)) * 4)
    os.mkfifo(os.path.join(folder, "9.miss"))
    """
    run = trace(python(code, sample), out=tmp_path / "run")
    assert "start" in functions(run)
    assert len(run.provenance["record_problems"]) >= 4
