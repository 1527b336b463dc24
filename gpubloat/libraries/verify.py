"""Does a command behave on debloated copies as it does on the originals, and what does it cost on each?"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from gpubloat.errors import FormatError, GpubloatError
from gpubloat.libraries import cost, sampling
from gpubloat.libraries.cost import Cost
from gpubloat.run import Run, RunWriter, provenance, refuse_overwrite

Copies = Callable[[], AbstractContextManager[Mapping[str, str]]]

LOADINGS = ("default", "lazy", "eager")
VARIANTS = ("original", "debloated")
GUARDS = ("off", "report", "restore")
VERDICTS = ("crashed", "differs", "not_deterministic", "equal")  # the worst first
LIMIT_S, LIMIT_TIMES = 60.0, 10.0  # a driver that meets a damaged element can loop for ever

METHOD = {
    **cost.METHOD,
    "order": "rounds of originals and copies, every other round in reverse order; the first round can meet cold caches",
    "is_equal": "exit status, sha256 of stdout and of the compared files",
    "within_spread": "last number on stdout: medians of copies and originals no further apart than the originals are",
}
_NUMBER = re.compile(rb"(?<![\w.])[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf)(?!\.?\w)", re.IGNORECASE)


class Outcome(NamedTuple):
    """What of a run is compared."""

    exit_status: int
    stdout: str
    files: tuple[str, ...]


class Measured(NamedTuple):
    """One run: which libraries, which loading mode, which round, what it cost."""

    variant: str
    loading: str
    repeat: int
    cost: Cost

    @property
    def outcome(self) -> Outcome:
        return Outcome(self.cost.exit_status, self.cost.stdout_sha256, self.cost.files_sha256)


def verify(
    folder: str | os.PathLike[str],
    command: Sequence[str],
    *,
    repeat: int = 5,
    compare: Sequence[str | os.PathLike[str]] = (),
    ignore: Sequence[str] = (),
    loadings: Sequence[str] = ("default",),
    guard: str = "off",
    copies: Copies | None = None,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: bool = False,
    command_line: str = "gpubloat.libraries.verify",
) -> Run:
    """Run `command` on the originals and on the copies in `folder`, in turn, and compare.

    Parameters
    ----------
    folder : what `debloat` wrote. command : program and arguments, run in the current folder, nothing on stdin.
    repeat : rounds; each runs both variants once in every loading mode.
    compare : files that the command writes and overwrites: digested after each run, never deleted.
    ignore : regular expressions of lines of stdout to leave out, such as those that tell a time.
    loadings : of default, lazy, eager: CUDA_MODULE_LOADING; default leaves the environment as it is.
    guard : off, report or restore: what happens when the copies meet removed code.
    copies : context manager that gives the variables which put the command onto the copies; default: what `exec` does.
    out, force, progress : keep the run in this folder, replacing what is there; show a progress bar on stderr.
    command_line : what run.json says was run.

    Returns
    -------
    Run with repeats and verdicts. run.json also has `verdict`, the worst of all loading modes; `numbers`, per mode the
    last number that each run printed and `within_spread`, for commands whose output differs from run to run; and
    `n_timeouts`. A run of the copies may take a minute plus ten times the slowest original, then it is ended: crashed.

    Raises
    ------
    GpubloatError : `folder` is none of `debloat`; the command fails on the originals or does not write a compared file.
    """
    command, loadings = list(command), list(dict.fromkeys(loadings))
    _check(command, repeat, loadings, guard)
    cost.compiled(ignore)
    if out is not None:
        refuse_overwrite(Path(out), force)
    manifest = _manifest(Path(folder))
    if copies is None:
        with tempfile.TemporaryDirectory(prefix="gpubloat-") as logs:
            execute = import_module("gpubloat.libraries.execute")
            runs = _measure(
                command, lambda: execute.environment(folder, guard, logs), repeat, loadings, compare, ignore, progress
            )
    else:
        runs = _measure(command, copies, repeat, loadings, compare, ignore, progress)
    verdicts = [_verdict(loading, [r for r in runs if r.loading == loading]) for loading in loadings]
    with RunWriter("libraries", ["repeats", "verdicts"], out, force) as writer:
        writer.append("repeats", _repeats(runs))
        writer.append(
            "verdicts",
            pd.DataFrame(verdicts).astype(dict.fromkeys(("peak_gpu_bytes", "peak_gpu_bytes_after"), "Int64")),
        )
        record = provenance(command_line, METHOD, manifest)
        record |= {
            "gpus": sampling.gpus(),
            "guard": guard,
            "verdict": min((str(v["verdict"]) for v in verdicts), key=VERDICTS.index),
            "n_timeouts": sum(r.cost.is_ended for r in runs),
            "ignore": list(ignore),
            "compare": [Path(file).name for file in compare],
            "CUDA_MODULE_LOADING": os.environ.get("CUDA_MODULE_LOADING", ""),
            "numbers": {loading: _numbers([r for r in runs if r.loading == loading]) for loading in loadings},
        }
        return writer.finish(record)


def _check(command: Sequence[str], repeat: int, loadings: Sequence[str], guard: str) -> None:
    if not command:
        raise GpubloatError("there is no command to run", "put it behind --")
    if repeat < 1:
        raise GpubloatError(f"{repeat} rounds are too few", "ask for at least 1")
    for given, known, what in [(loadings, LOADINGS, "a way of loading"), ([guard], GUARDS, "a mode of the guard")]:
        for name in given:
            if name not in known:
                raise GpubloatError(f"{name!r} is not {what}", f"known: {', '.join(known)}")
    if not loadings:
        raise GpubloatError("no way of loading was named", f"known: {', '.join(LOADINGS)}")


def _manifest(folder: Path) -> list[dict[str, Any]]:
    """Name, size and sha256 of the originals that have copies."""
    path = folder / "manifest.json"
    try:
        content = json.loads(path.read_text("utf-8"))
        return [
            {"name": entry["library"], "bytes": entry["bytes"], "sha256": entry["sha256"]}
            for entry in content["libraries"]
        ]
    except OSError as error:
        raise GpubloatError(
            f"{folder} holds no debloated copies: manifest.json: {error.strerror}", "give what debloat --out wrote"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(str(path), 0, f"not a manifest of debloated copies: {error!r}") from None


def _measure(
    command: Sequence[str],
    copies: Copies,
    repeat: int,
    loadings: Sequence[str],
    compare: Sequence[str | os.PathLike[str]],
    ignore: Sequence[str],
    progress: bool,
) -> list[Measured]:
    """All runs, in order of time. The very first of each loading mode is an original: it tells whether to go on."""
    runs: list[Measured] = []
    for number, loading, variant in _progress(_order(repeat, loadings), progress):
        env = dict(os.environ)
        limit = None
        with contextlib.ExitStack() as stack:
            if variant == "debloated":
                env |= stack.enter_context(copies())
                slowest = max(r.cost.wall_s for r in runs if (r.variant, r.loading) == ("original", loading))
                limit = LIMIT_S + LIMIT_TIMES * slowest
            if loading != "default":
                env["CUDA_MODULE_LOADING"] = loading.upper()
            found = cost.run(command, env=env, files=compare, ignore=ignore, limit_s=limit)
        runs.append(Measured(variant, loading, number, found))
        if variant == "original" and number == 0:
            _worth_comparing(found, compare)
    return runs


def _order(repeat: int, loadings: Sequence[str]) -> list[tuple[int, str, str]]:
    """(round, loading mode, variant): original, copies, copies, original, ... so that a slow drift meets both alike."""
    one = [(loading, variant) for loading in loadings for variant in VARIANTS]
    return [(number, *which) for number in range(repeat) for which in (one if number % 2 == 0 else one[::-1])]


def _progress(order: list[tuple[int, str, str]], wanted: bool) -> Iterator[tuple[int, str, str]]:
    if not wanted:
        return iter(order)
    from tqdm.auto import tqdm

    return iter(tqdm(order, unit="run", disable=None, leave=False))


def _worth_comparing(found: Cost, compare: Sequence[str | os.PathLike[str]]) -> None:
    """GpubloatError if the command fails on the originals: that the copies fail as well would prove nothing."""
    if found.exit_status:
        how = f"exit status {found.exit_status}"
        if found.exit_status < 0:
            how = f"signal {-found.exit_status}"
        lines = found.stderr_tail.decode("utf-8", "replace").strip().splitlines()
        said = f": {lines[-1].strip()}" if lines else ""
        raise GpubloatError(f"the command fails on the originals ({how}){said}", "give a command that succeeds")
    for file, digest in zip(compare, found.files_sha256):
        if digest == cost.MISSING:
            raise GpubloatError(
                f"{os.fspath(file)} was not written by the command", "compare files that it writes anew in each run"
            )


def _repeats(runs: Sequence[Measured]) -> pd.DataFrame:
    """Table repeats, in order of time."""
    first: dict[str, Outcome] = {}
    rows = []
    for run in runs:
        first.setdefault(run.loading, run.outcome)
        rows.append(
            {
                "variant": run.variant,
                "loading": run.loading,
                "repeat": run.repeat,
                "exit_status": run.cost.exit_status,
                "wall_s": run.cost.wall_s,
                "peak_rss_bytes": run.cost.peak_rss_bytes,
                "peak_gpu_bytes": run.cost.peak_gpu_bytes,
                "stdout_sha256": run.cost.stdout_sha256,
                "files_sha256": " ".join(run.cost.files_sha256),
                "is_equal": run.outcome == first[run.loading],
            }
        )
    return pd.DataFrame(rows).astype({"peak_gpu_bytes": "Int64"})


def _verdict(loading: str, runs: Sequence[Measured]) -> dict[str, Any]:
    """One row of verdicts, from the runs of one loading mode."""
    originals, copies = ([r for r in runs if r.variant == variant] for variant in VARIANTS)
    known = {r.outcome for r in originals}
    statuses = {r.cost.exit_status for r in originals}
    is_deterministic = len(known) == 1
    # Among originals that differ, the copies may give what any of them gave.
    is_equal = all(r.outcome in known for r in copies)
    odd = [r for r in copies if r.cost.exit_status not in statuses]
    if any(r.cost.exit_status for r in odd):
        verdict = "crashed"
    elif odd or (is_deterministic and not is_equal):
        verdict = "differs"
    else:
        verdict = "equal" if is_deterministic else "not_deterministic"
    row: dict[str, Any] = {
        "loading": loading,
        "n_repeats": len(originals),
        "is_deterministic": is_deterministic,
        "is_equal": is_equal,
        "verdict": verdict,
    }
    for suffix, group in (("", originals), ("_after", copies)):
        walls = [r.cost.wall_s for r in group]
        gpu = [r.cost.peak_gpu_bytes for r in group if r.cost.peak_gpu_bytes is not None]
        row |= {
            f"wall_s{suffix}": statistics.median(walls),
            f"wall_spread_s{suffix}": max(walls) - min(walls),
            f"peak_rss_bytes{suffix}": round(statistics.median(r.cost.peak_rss_bytes for r in group)),
            f"peak_gpu_bytes{suffix}": round(statistics.median(gpu)) if gpu else None,
        }
    return row


def _numbers(runs: Sequence[Measured]) -> dict[str, Any]:
    """The last number that each run printed, as text, and whether the copies' are within the spread of the originals'.

    `within_spread`: the medians differ by no more than the originals among themselves; None if a run printed none.
    """
    original, debloated = ([last_number(r.cost.stdout_tail) for r in runs if r.variant == v] for v in VARIANTS)
    within = None
    if None not in original and None not in debloated:
        ones, others = ([float(text) for text in texts if text] for texts in (original, debloated))
        spread, apart = max(ones) - min(ones), abs(statistics.median(others) - statistics.median(ones))
        within = apart <= spread or set(original) == set(debloated)  # nan is equal to itself here
    return {"original": original, "debloated": debloated, "within_spread": within}


def last_number(printed: bytes) -> str | None:
    """The last number in what a program printed, as it stands there: a training loss, say."""
    found: list[bytes] = _NUMBER.findall(printed)
    return found[-1].decode("ascii") if found else None
