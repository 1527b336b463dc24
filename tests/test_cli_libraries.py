"""The verbs that trace, remove and run, by their command lines: exit statuses, sentences, JSON, files."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pandas as pd
import pytest

from gpubloat.run import Run
from tests.build import fatbin
from tests.commands import Command, Done, command
from tests.libraries.common import library as cuda_library
from tests.libraries.test_execute import traced
from tests.libraries.test_prune import made_wheel, valid
from tests.native.programs import SAMPLE, needs_compiler, shared

pytestmark = needs_compiler
NAME = "pkg/libsample.so"
CALL = "import ctypes, os, signal, sys\nlib = ctypes.CDLL(sys.argv[1])\n"


@pytest.fixture
def gpubloat(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`gpubloat libraries` with these words, in this process."""
    return command("libraries", capfd, monkeypatch)


def python(code: str, path: Path) -> list[str]:
    return ["--", sys.executable, "-S", "-c", CALL + code, str(path)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of which `used` and `also_used` were entered in `run`, and `out`, without the rest."""
    from gpubloat.libraries.debloat import debloat

    folder = tmp_path_factory.mktemp("made")
    path = folder / "site-packages" / NAME
    shared(path.parent, SAMPLE)
    traced(path, folder / "run", "lib.also_used(1)")
    debloat(folder / "run", folder / "out")
    return folder


@pytest.fixture
def sample(made: Path) -> Path:
    return made / "site-packages" / NAME


def test_trace(gpubloat: Command, sample: Path, tmp_path: Path) -> None:
    run, tables = tmp_path / "run", tmp_path / "csv"
    done = gpubloat(
        "trace",
        "--out",
        run,
        "--csv",
        tables,
        "--workload",
        "one",
        "--repeat",
        "2",
        *python("print(lib.used(1))", sample),
    )
    assert (done.status, done.out) == (0, "2\n2\n"), done.error  # the command's own output, and no other
    assert "used in this run" in done.error
    assert NAME in done.error
    assert f"wrote {run}" in done.error
    assert f"wrote {tables}" in done.error
    found = Run.load(run)
    assert (found.provenance["workload"], found.provenance["repeat"]) == ("one", 2)
    assert f"{tmp_path}/" not in (run / "run.json").read_text()
    used = pd.read_csv(tables / "used_functions.csv").query("library == @NAME")
    assert {"used", "start"} <= set(used["function"])
    assert {p.stem for p in tables.glob("*.csv")} == set(found)


def test_trace_as_json(gpubloat: Command, sample: Path, tmp_path: Path) -> None:
    done = gpubloat("trace", "--json", "--no-cupti", "--out", tmp_path / "run", *python("sys.exit(7)", sample))
    answer = json.loads(done.out)
    assert (done.status, answer["exit_status"], answer["targets"]) == (7, 7, [])
    assert answer["workload"] == f"{Path(sys.executable).name} -S"
    assert "ended with status 7" in done.error


@pytest.mark.parametrize(
    ("code", "status"),
    [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9), ("os.abort()", 128 + 6)],
)
def test_the_commands_own_exit_status(
    gpubloat: Command, made: Path, sample: Path, tmp_path: Path, code: str, status: int
) -> None:
    words = ["--no-functions", "--no-pages", "--no-cupti", "--out", tmp_path / "run"]
    assert gpubloat("trace", *words, *python(code, sample)).status == status
    assert Run.load(tmp_path / "run")["loaded"].empty is False
    assert gpubloat("exec", made / "out", *python(code, sample)).status == status


def test_debloat(gpubloat: Command, made: Path, tmp_path: Path) -> None:
    done = gpubloat("debloat", made / "run", "--out", tmp_path / "out", "--csv", tmp_path / "csv", "--zstd")
    assert done.status == 0, done.error
    assert "unused in these runs" in done.out
    assert NAME in done.out
    assert done.out.splitlines()[-2:] == [f"wrote {tmp_path / 'csv'}", f"wrote {tmp_path / 'out'}"]
    removed = pd.read_csv(tmp_path / "csv" / "removed.csv")
    assert set(removed["reason"]) == {"unused_function"}
    assert gpubloat("debloat", made / "run", "--out", tmp_path / "out").refused()[1].endswith("force=True)")
    done = gpubloat("debloat", made / "run", "--out", tmp_path / "out", "--force", "--json")
    answer = json.loads(done.out)
    (row,) = answer["libraries"]
    assert (row["library"], row["zstd_bytes"], row["n_functions_removed"]) == (NAME, None, len(removed))


def test_exec(gpubloat: Command, made: Path, sample: Path, tmp_path: Path) -> None:
    done = gpubloat("exec", made / "out", *python("print(lib.also_used(1))", sample))
    assert done == Done(0, "4\n", "")
    done = gpubloat("exec", made / "out", "--guard", "off", *python("lib.unused(1)", sample))
    assert (done.status, done.out) == (128 + 5, "")
    assert "--guard report says which" in done.error
    done = gpubloat("exec", made / "out", "--guard", "report", *python("lib.unused(1)", sample))
    assert done.status == 128 + 5
    first, second = done.error.splitlines()
    assert "function unused" in first
    assert second == "note: removed code was met and reported: 1 function"
    words = ["--out", tmp_path / "misses"]
    done = gpubloat("exec", made / "out", *words, *python("print(lib.unused(1), lib.read_page(2))", sample))
    assert done == Done(0, "4 2\n", "note: removed code was met and restored: 2 functions\n")
    assert set(Run.load(tmp_path / "misses")["misses"]["function"]) == {"unused", "read_page"}

    assert gpubloat("debloat", made / "run", tmp_path / "misses", "--out", tmp_path / "out").status == 0
    done = gpubloat("exec", tmp_path / "out", "--guard", "off", *python("print(lib.unused(1))", sample))
    assert done == Done(0, "4\n", "")


def test_exec_of_something_else(gpubloat: Command, made: Path) -> None:
    done = gpubloat("exec", made / "out", "--", "echo", "-n", "hello", "--json")
    assert (done.status, done.out) == (0, "hello --json")
    assert done.error.startswith("note: no library of this folder was loaded")


def test_verify(gpubloat: Command, made: Path, sample: Path, tmp_path: Path) -> None:
    words = ["verify", made / "out", "--repeat", "1"]
    done = gpubloat(*words, "--json", "--out", tmp_path / "run", *python("print(lib.also_used(1))", sample))
    answer = json.loads(done.out)
    assert (done.status, answer["verdict"]) == (0, "equal")
    assert answer["verdicts"][0]["is_equal"] is True
    assert Run.load(tmp_path / "run").provenance["verdict"] == "equal"
    done = gpubloat(*words, "--guard", "off", "--csv", tmp_path / "csv", *python("print(lib.unused(1))", sample))
    assert done.status == 1
    assert "verdict: crashed" in done.out
    assert pd.read_csv(tmp_path / "csv" / "verdicts.csv")["verdict"].tolist() == ["crashed"]
    done = gpubloat(*words, *python("print(lib.unused(1))", sample))
    assert (done.status, "verdict: equal" in done.out) == (0, True)


def test_apply_and_restore_byte_for_byte(gpubloat: Command, tmp_path: Path, sample: Path) -> None:
    path = tmp_path / "site-packages" / NAME
    path.parent.mkdir(parents=True)
    shutil.copy2(sample, path)
    traced(path, tmp_path / "run", "lib.used(1)")
    assert gpubloat("debloat", tmp_path / "run", "--out", tmp_path / "out").status == 0
    before = path.read_bytes()
    assert gpubloat("apply", tmp_path / "out", "--dry-run") == Done(0, f"would replace {path}\n", "")
    assert path.read_bytes() == before
    assert gpubloat("apply", tmp_path / "out") == Done(0, f"replaced {NAME}\n", "")
    assert path.read_bytes() != before
    call = [sys.executable, "-c", CALL + "print(lib.used(1), flush=True); lib.unused(1)", str(path)]
    done = subprocess.run(call, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-5, "2\n")
    again = gpubloat("trace", "--no-cupti", "--out", tmp_path / "again", "--", *call)  # a trap of the file's own
    assert (again.status, again.out) == (133, "2\n")
    sentence, _ = gpubloat("exec", tmp_path / "out", "--", "true").refused()
    assert "replaced by its copy already" in sentence
    assert gpubloat("apply", tmp_path / "out").out.startswith("nothing to replace")
    assert gpubloat("restore", tmp_path / "out") == Done(0, f"restored {NAME}\n", "")
    assert path.read_bytes() == before
    assert gpubloat("restore", tmp_path / "out").out.startswith("nothing to restore")
    path.write_bytes(before + b"x")
    assert "sha256 differs" in gpubloat("apply", tmp_path / "out").refused()[0]
    assert "is not the version" in gpubloat("exec", tmp_path / "out", "--", "true").refused()[0]
    assert "sha256 differs" in gpubloat("debloat", tmp_path / "run", "--out", tmp_path / "out2").refused()[0]
    path.unlink()
    assert "cannot be read" in gpubloat("exec", tmp_path / "out", "--", "true").refused()[0]
    assert not (tmp_path / "out2").exists()


def test_pruning_a_library(gpubloat: Command, tmp_path: Path) -> None:
    path = tmp_path / "liba.so"
    elements = [fatbin.element(bytes([n]) * 6000, number=n) for n in (80, 90)]
    path.write_bytes(cuda_library(fatbin.region(elements)))
    done = gpubloat(
        "debloat", path, "--targets", "sm_90", "--out", tmp_path / "out", "--json", "--csv", tmp_path / "csv"
    )
    (row,) = json.loads(done.out)["libraries"]
    assert (row["n_elements"], row["n_other_architecture"], row["n_functions_removed"]) == (2, 1, 0)
    with (tmp_path / "csv" / "removed.csv").open() as file:
        assert [r["reason"] for r in csv.DictReader(file)] == ["other_architecture"]
    assert gpubloat("debloat", path, "--targets", "sm_80,H100", "--out", tmp_path / "both").status == 0
    assert Run.load(tmp_path / "both")["removed"].empty


def test_pruning_a_wheel(gpubloat: Command, tmp_path: Path) -> None:
    wheel = made_wheel(tmp_path / "pkg-1-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as held:
        before = {name: held.read(name) for name in held.namelist()}
    done = gpubloat("debloat", wheel, "--targets", "sm_90", "--out", tmp_path / "out")
    assert done.status == 0, done.error
    after = valid(tmp_path / "out" / wheel.name)
    assert set(after) == {name for name in before if not name.endswith(".jws")}
    assert any(after[name] != before[name] for name in after if name.endswith(".so"))
    with zipfile.ZipFile(tmp_path / "out" / wheel.name) as held:
        assert held.testzip() is None
    sentence, hint = gpubloat("exec", tmp_path / "out", "--", "true").refused()
    assert "no copies to run on" in sentence
    assert "pip" in hint


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["trace", "--out", "{new}"], "no command was given"),
        (["trace", "--out", "{new}", "--"], "no command was given"),
        (["trace", "--", "true"], "the run would be lost"),
        (["trace", "--out", "{new}", "--", "no-such-program"], "is no program that can be run"),
        (["trace", "--out", "{new}", "--target", "hopper", "--", "true"], "is no compute capability"),
        (["trace", "--out", "{file}", "--", "true"], "is a file"),
        (["trace", "--out", "{full}", "--", "true"], "is not empty"),
        (["trace", "--out", "{new}", "--csv", "{full}", "--", "true"], "is not empty"),
        (["exec", "{out}"], "no command was given"),
        (["exec", "{out}", "--", "no-such-program"], "is no program that can be run"),
        (["exec", "{out}", "--guard", "on", "--", "true"], "is no mode of the guard"),
        (["exec", "{out}", "--out", "{full}", "--", "true"], "is not empty"),
        (["exec", "{full}", "--", "true"], "is no debloated folder"),
        (["exec", "{new}", "--", "true"], "is no debloated folder"),
        (["exec", "{run}", "--", "true"], "is no debloated folder"),
        (["verify", "{out}"], "no command"),
        (["verify", "{full}", "--", "true"], "is no debloated folder"),
        (["verify", "{out}", "--loading", "eagre", "--", "true"], "is not a way of loading"),
        (["verify", "{out}", "--repeat", "1", "--", "true"], "loaded none of the libraries"),
        (["verify", "{out}", "--repeat", "1", "--", "false"], "fails on the originals"),
        (["apply", "{full}"], "is no debloated folder"),
        (["restore", "{new}"], "is no debloated folder"),
        (["debloat", "{full}", "--out", "{new}"], "is no run folder"),
        (["debloat", "{new}x", "--out", "{new}"], "is no run folder"),
        (["debloat", "{run}", "{full}", "--out", "{new}"], "is no run, and others are"),
        (["debloat", "{run}", "{library}", "--targets", "sm_90", "--out", "{new}"], "is no run, and others are"),
        (["debloat", "{out}", "--out", "{new}"], "is no traced run"),
        (["debloat", "{run}", "--out", "{full}"], "is not empty"),
        (["debloat", "{run}", "--out", "{new}", "--csv", "{full}"], "is not empty"),
        (["debloat", "{run}", "--layout", "flat", "--out", "{new}"], "is no layout"),
        (["debloat", "{library}", "--out", "{new}"], "is no run folder"),
        (["debloat", "{library}", "--targets", "hopper", "--out", "{new}"], "is no compute capability"),
        (["debloat", "{library}", "--targets", ",", "--out", "{new}"], "no GPU to keep code for"),
        (["debloat", "{file}", "--targets", "sm_90", "--out", "{new}"], "no ELF file"),
    ],
)  # fmt: skip
def test_refused(gpubloat: Command, made: Path, sample: Path, tmp_path: Path, words: list[str], sentence: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "file").write_text("not ours")
    places = {"new": tmp_path / "new", "full": tmp_path / "full", "file": tmp_path / "file"}
    places |= {"library": sample, "run": made / "run", "out": made / "out"}
    done = gpubloat(*(word.format_map({k: str(v) for k, v in places.items()}) for word in words))
    assert sentence in done.refused()[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "full"]
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["mine"]


@pytest.mark.parametrize(
    "words",
    [
        ["trace", "--repeat", "0", "--out", "x", "--", "true"],
        ["trace", "--no-such-option", "--", "true"],
        ["debloat", "--out", "x"],
        ["debloat", "run"],
        ["exec"],
        ["exec", "--guard"],
        ["verify"],
        ["verify", "x", "--repeat", "many", "--", "true"],
        ["apply"],
        ["restore", "a", "b"],
        ["destroy"],
    ],
)
def test_bad_usage_is_exit_2(
    gpubloat: Command, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = gpubloat(*words)
    assert (done.status, done.out) == (2, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["trace", "debloat", "exec", "verify", "apply", "restore"])
def test_help(gpubloat: Command, verb: str) -> None:
    done = gpubloat(verb, "--help")
    assert done.status == 0
    assert "dead" not in done.out


def test_as_a_program(made: Path, sample: Path, tmp_path: Path) -> None:
    """In a process of its own: stdin goes to the command, and a missing compiler is one sentence."""
    words = [sys.executable, "-m", "gpubloat", "libraries", "exec", str(made / "out")]
    code = "print(sys.stdin.read(), os.path.exists(os.environ['GPUBLOAT_PLAN'])); sys.exit(lib.unused(1))"
    done = subprocess.run([*words, *python(code, sample)], input="given", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (4, "given True\n")
    assert done.stderr == "note: removed code was met and restored: 1 function\n"
    env = {name: value for name, value in os.environ.items() if name != "CC"} | {"PATH": str(tmp_path)}
    env["GPUBLOAT_CACHE"] = str(tmp_path / "cache")
    words = [sys.executable, "-m", "gpubloat", "libraries", "trace", "--out", str(tmp_path / "run")]
    done = subprocess.run([*words, "--", sys.executable, "-V"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("gpubloat: a C compiler is not installed\n  hint: install it with: ")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_ends_the_command_and_keeps_the_run(sample: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "gpubloat", "libraries", "trace", "--no-cupti", "--out", str(tmp_path / "run")]
    code = "lib.used(1); print('ready', flush=True); signal.pause()"
    with subprocess.Popen(
        [*words, *python(code, sample)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 128 + 2
    run = Run.load(tmp_path / "run")
    assert run.provenance["exit_status"] == -2
    assert "used" in set(run["used_functions"]["function"])
