"""Originals against copies: a shell script stands for the workload, and a variable for the copies."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from gpubloat import Run
from gpubloat.errors import FormatError, GpubloatError
from gpubloat.libraries import cost, manifest, record
from gpubloat.libraries.verdicts import last_number
from gpubloat.libraries.verify import verify

module = import_module("gpubloat.libraries.verify")  # the package has a function of that name


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A debloated folder as far as `verify` looks at it; the workload runs in an empty folder beside it."""
    path = tmp_path / "debloated"
    path.mkdir()
    digest = "0" * 64
    entry = manifest.Entry(
        "pkg/liba.so", "/usr/lib/liba.so", "files/usr/lib/liba.so", digest, digest, 5, "zeroed", "", "ranges/0.npy"
    )
    manifest.write(path, manifest.Manifest("0", "", "runs", [], "/", [], [entry], []))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    return path


@contextlib.contextmanager
def copies() -> Iterator[dict[str, str]]:
    yield {"COPIES": "1"}


def check(folder: Path, script: str, **options: Any) -> Run:
    """`script` sees COPIES=1 on the copies, and N, the number of the run, counted in a file."""
    count = "N=$(cat n 2>/dev/null || echo 0); echo $((N + 1)) >n; "
    return verify(folder, ["sh", "-c", count + script], **{"repeat": 3, "copies": copies, **options})


def only(run: Run) -> dict[str, Any]:
    (row,) = run["verdicts"].to_dict("records")
    assert run.provenance["verdict"] == row["verdict"]
    return row


def test_equal(folder: Path) -> None:
    run = check(folder, "echo loss 4.5; echo $N >file", compare=["n"])
    assert set(run) == {"repeats", "verdicts"}
    row = only(run)
    assert (row["verdict"], row["n_repeats"]) == ("not_deterministic", 3)  # n differs from run to run
    row = only(check(folder, "echo loss 4.5; echo same >file", compare=["file", "./file"]))
    assert (row["verdict"], row["is_deterministic"], row["is_equal"]) == ("equal", True, True)
    assert row["peak_rss_bytes"] > 0
    assert row["wall_s_after"] > 0


def test_what_comes_before_each_run(folder: Path) -> None:
    """Such as dropping the page cache. It is no part of a run."""
    done: list[str] = []

    def before() -> None:
        done.append(Path("n").read_text().strip() if Path("n").exists() else "0")

    check(folder, "echo 1", repeat=2, before=before)
    assert done == ["0", "1", "2", "3"]


def test_rounds_alternate_and_say_what_they_compared(folder: Path) -> None:
    run = check(folder, "echo ${COPIES:-0}; echo x >file", compare=["file"])
    repeats = run["repeats"]
    assert run.provenance["peak_gpu_of"] == []  # no GPU was seen
    assert [v[0] for v in repeats["variant"]] == list("oddood")
    assert list(repeats["repeat"]) == [0, 0, 1, 1, 2, 2]
    assert set(repeats["files_sha256"]) == {hashlib.sha256(b"x\n").hexdigest()}
    assert repeats.groupby("variant")["stdout_sha256"].unique().map(list).to_dict() == {
        "original": [hashlib.sha256(b"0\n").hexdigest()],
        "debloated": [hashlib.sha256(b"1\n").hexdigest()],
    }
    assert list(repeats["is_equal"]) == [v == "original" for v in repeats["variant"]]
    assert list(repeats["peak_gpu_bytes"].isna()) == [True] * 6


@pytest.mark.parametrize(
    ("script", "verdict", "is_deterministic", "is_equal"),
    [
        ("echo ${COPIES:-0}", "differs", True, False),
        ("echo ${COPIES:-0} >file", "differs", True, False),
        ("test $COPIES || echo x >file", "differs", True, False),  # the copies leave the file of the run before
        ("test $N != 1 || echo once", "differs", True, False),  # runs 0, 3, 4 are originals; 1, 2, 5 copies
        ("exit ${COPIES:-0}", "crashed", True, False),
        ("test $COPIES && kill -TRAP $$; :", "crashed", True, False),
        ("echo $N; test $COPIES && kill -SEGV $$; :", "crashed", False, False),
        ("echo $N", "not_deterministic", False, False),
        ("test $N -lt 2; echo $?", "not_deterministic", False, True),
    ],
)
def test_verdicts(folder: Path, script: str, verdict: str, is_deterministic: bool, is_equal: bool) -> None:
    compare = ["file"] if ">file" in script else []
    row = only(check(folder, script, compare=compare))
    assert (row["verdict"], row["is_deterministic"], row["is_equal"]) == (verdict, is_deterministic, is_equal)


def test_a_status_that_only_some_originals_have(folder: Path) -> None:
    # 0 3 4 are the originals; the second of them fails, and so do the copies then.
    assert only(check(folder, "test $N != 3"))["verdict"] == "not_deterministic"
    (folder.parent / "here" / "n").unlink()
    assert only(check(folder, "test $N = 0 || test $COPIES || exit 5"))["verdict"] == "not_deterministic"


def test_lines_can_be_ignored(folder: Path) -> None:
    assert only(check(folder, "echo took $N s; echo loss 1", ignore=["^took"]))["verdict"] == "equal"


def test_numbers_within_the_spread(folder: Path) -> None:
    # originals: runs 0, 3, 4; copies: 1, 2, 5
    run = check(folder, "echo loss 4.7$N")
    numbers = run.provenance["numbers"]["default"]
    assert numbers["original"] == ["4.70", "4.73", "4.74"]
    assert numbers["debloated"] == ["4.71", "4.72", "4.75"]
    assert numbers["within_spread"] is True
    assert only(run)["verdict"] == "not_deterministic"
    (folder.parent / "here" / "n").unlink()
    assert check(folder, "echo loss ${COPIES:+9}4.7$N").provenance["numbers"]["default"]["within_spread"] is False
    assert check(folder, "test $COPIES || echo 1").provenance["numbers"]["default"]["within_spread"] is None
    assert check(folder, "echo nan").provenance["numbers"]["default"]["within_spread"] is True
    assert (
        check(folder, "test $COPIES && echo nan || echo 1").provenance["numbers"]["default"]["within_spread"] is False
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("step 3, loss=4.71.", "4.71"),
        ("1e-05\n", "1e-05"),
        ("loss -.5 (sm_90, 4.5s, v1.2.3)", "-.5"),
        ("loss: NaN", "NaN"),
        ("0.99%", "0.99"),
        ("nano info", None),
        ("", None),
    ],
)
def test_the_last_number(text: str, number: str | None) -> None:
    assert last_number(text.encode()) == number


def test_loading_modes(folder: Path) -> None:
    run = check(folder, "echo $CUDA_MODULE_LOADING$COPIES", loadings=["lazy", "eager", "default", "lazy"], repeat=2)
    repeats = run["repeats"]
    expected = [(v, m) for m in ("lazy", "eager", "default") for v in ("original", "debloated")]
    assert list(zip(repeats["variant"], repeats["loading"])) == expected + expected[::-1]
    for row in repeats.itertuples():
        name = {"lazy": "LAZY", "eager": "EAGER", "default": ""}[row.loading]
        printed = f"{name}{'1' if row.variant == 'debloated' else ''}\n"
        assert row.stdout_sha256 == hashlib.sha256(printed.encode()).hexdigest()
    assert list(run["verdicts"]["loading"]) == ["lazy", "eager", "default"]
    assert run.provenance["verdict"] == "differs"


def test_the_worst_verdict_counts(folder: Path) -> None:
    run = check(folder, 'test "$CUDA_MODULE_LOADING$COPIES" != EAGER1', loadings=["lazy", "eager"])
    assert list(run["verdicts"]["verdict"]) == ["equal", "crashed"]
    assert run.provenance["verdict"] == "crashed"


def test_a_crash_is_not_silent(folder: Path) -> None:
    run = check(
        folder,
        "test $COPIES || exit 0; echo /a/lib-1/b.so: removed code >&2; echo >&2; kill -TRAP $$",
        loadings=["lazy"],
    )
    assert run.provenance["complaints"] == {"lazy": "b.so: removed code"}


def test_a_copy_that_hangs_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 0.3)
    monkeypatch.setattr(module, "LIMIT_TIMES", 1)
    run = check(folder, "test $COPIES && sleep 60; :", repeat=1)
    assert only(run)["verdict"] == "crashed"
    assert run.provenance["n_timeouts"] == 1
    assert list(run["repeats"]["exit_status"]) == [0, -15]


def test_what_run_json_says(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = check(folder, "echo 1 >file", out=out, compare=["file"], ignore=["x"], guard="report", command_line="said")
    assert Run.load(out).provenance == run.provenance
    said = run.provenance
    assert said["command"] == "said"
    assert said["inputs"] == [{"name": "pkg/liba.so", "bytes": 5, "sha256": "0" * 64}]
    assert (said["guard"], said["ignore"], said["compare"]) == ("report", ["x"], ["file"])
    assert said["n_timeouts"] == 0
    assert not re.search(re.escape(os.fspath(tmp_path)), (out / "run.json").read_text())
    with pytest.raises(GpubloatError, match="not empty"):
        check(folder, "echo ran >ran", out=out)
    assert not Path("ran").exists()  # refused before anything ran
    assert said["complaints"] == {"default": ""}
    check(folder, ":", out=out, force=True)


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("echo one >&2; echo 'no module' >&2; exit 4", {}, r"fails on the originals \(exit status 4\): no module"),
        ("kill -9 $$", {}, r"fails on the originals \(signal 9\)"),
        (":", {"compare": ["absent"]}, "absent was not written by the command"),
        (":", {"compare": ["old"]}, "old was not written by the command"),
        (":", {"repeat": 0}, "0 rounds"),
        (":", {"loadings": ["eagre"]}, "'eagre' is not a way of loading"),
        (":", {"loadings": []}, "no way of loading"),
        (":", {"guard": "on"}, "'on' is not a mode of the guard"),
        (":", {"ignore": ["*"]}, "no regular expression"),
    ],
)  # fmt: skip
def test_refused(folder: Path, tmp_path: Path, script: str, options: dict[str, Any], message: str) -> None:
    Path("old").write_text("old")
    with pytest.raises(GpubloatError, match=message):
        check(folder, script, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_folders_that_are_none(folder: Path) -> None:
    with pytest.raises(GpubloatError, match="no command"):
        verify(folder, [], copies=copies)
    with pytest.raises(GpubloatError, match="is no debloated folder"):
        verify(folder / "absent", ["true"], copies=copies)
    for text in ("{", "[]", '{"libraries": [{"library": 1}]}'):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(FormatError, match="not a manifest"):
            verify(folder, ["true"], copies=copies)


def test_copies_are_set_up_for_the_copies_only(folder: Path) -> None:
    events = []

    @contextlib.contextmanager
    def noted() -> Iterator[dict[str, str]]:
        events.append("in")
        yield {}
        events.append("out")

    check(folder, ":", copies=noted, repeat=2)
    assert events == ["in", "out"] * 2


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, str, Path]]:
    """`execute.environment` without an audit library: gives the folder of records to the command, as LOGS."""
    given = []

    @contextlib.contextmanager
    def environment(folder: Path, guard: str, logs: str) -> Iterator[dict[str, str]]:
        given.append((folder, guard, Path(logs)))
        yield {"COPIES": "1", "LOGS": logs}

    monkeypatch.setattr(module, "environment", environment)
    return given


def recorded(monkeypatch: pytest.MonkeyPatch, swapped: list[str], problems: list[str]) -> None:
    process = record.Process("1-a", "sh", problems, swapped)
    misses = [record.Miss(tag, "page", "restored", 64, False, "/usr/lib/liba.so") for tag in ("1-a", "2-b")]
    monkeypatch.setattr(record, "read", lambda _: record.Record([], [process], misses, []))


def test_by_default_the_command_runs_as_exec_runs_it(
    folder: Path, logs: list[tuple[Path, str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(monkeypatch, ["/usr/lib/liba.so"], ["odd"])
    run = check(folder, "test $COPIES && touch $LOGS/used; echo ${COPIES:-0}", copies=None, guard="restore", repeat=2)
    assert only(run)["verdict"] == "differs"
    assert [run.provenance[name] for name in ("n_swapped", "n_misses", "problems")] == [1, 1, ["odd"]]
    assert [(where, guard) for where, guard, _ in logs] == [(folder, "restore")] * 2
    assert not logs[0][2].exists()


def test_a_command_that_uses_no_copy_proves_nothing(
    folder: Path, logs: list[tuple[Path, str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(monkeypatch, [], ["no audit in static programs"])
    with pytest.raises(GpubloatError, match="loaded none of the libraries") as caught:
        check(folder, ":", copies=None)
    assert caught.value.hint == "no audit in static programs"
    assert len(logs) == 1


def test_progress_is_shown_only_if_wanted(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check(folder, ":", repeat=1)
    assert capfd.readouterr() == ("", "")
    check(folder, ":", repeat=1, progress=True)
    assert capfd.readouterr().out == ""


def test_methods_are_named() -> None:
    assert set(cost.METHOD) < set(module.METHOD)
