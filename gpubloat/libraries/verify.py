"""Does a command behave on debloated copies as it does on the originals, and what does it cost on each?"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pandas as pd

from gpubloat.errors import GpubloatError
from gpubloat.libraries import cost, manifest, record, sampling
from gpubloat.libraries.cost import Cost
from gpubloat.libraries.execute import GUARDS, environment, problems
from gpubloat.libraries.verdicts import VARIANTS, VERDICTS, Measured, complaint, last_line, numbers, repeats, verdict
from gpubloat.run import Run, RunWriter, provenance, refuse_overwrite

Copies = Callable[[], AbstractContextManager[Mapping[str, str]]]

LOADINGS = ("default", "lazy", "eager")
LIMIT_S, LIMIT_TIMES = 60.0, 10.0  # a driver that meets a damaged element can loop for ever

METHOD = {
    **cost.METHOD,
    "order": "rounds of originals and copies, every other round in reverse order; the first round can meet cold caches",
    "is_equal": "exit status, sha256 of stdout and of the compared files",
    "within_spread": "last number on stdout: medians of copies and originals no further apart than the originals are",
}


def verify(
    folder: str | os.PathLike[str],
    command: Sequence[str],
    *,
    repeat: int = 5,
    compare: Sequence[str | os.PathLike[str]] = (),
    ignore: Sequence[str] = (),
    loadings: Sequence[str] = ("default",),
    guard: str = "restore",
    copies: Copies | None = None,
    before: Callable[[], None] | None = None,
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
    guard : restore, restore-cpu, report or off: what happens when the copies meet removed code.
    copies : context manager that gives the variables which put the command onto the copies; default: what `exec` does.
    before : called before each run, outside of its time: to drop the page cache, or to put files back.
    out, force, progress : keep the run in this folder, replacing what is there; show a progress bar on stderr.
    command_line : what run.json says was run.

    Returns
    -------
    Run with repeats and verdicts. run.json also has `verdict`, the worst of all loading modes; `numbers`, per mode the
    last number that each run printed and `within_spread`, for commands whose output differs from run to run;
    `complaints`, per mode the last line on stderr of a copy that ended otherwise, folders left out; `n_timeouts`;
    `peak_gpu_of`, whose GPU memory was seen, "processes" (those of the command) or "gpus" (all that they held); and,
    unless `copies` was given, `n_swapped`, the libraries that ran from their copies, `n_misses`, the places of removed
    code that the guard met, and `problems`. A run of the copies may take a minute plus ten times the slowest original;
    then it is ended.

    Raises
    ------
    GpubloatError : `folder` is none of `debloat`; the command fails on the originals, does not write a compared file,
    or loads none of the libraries that have copies.
    """
    command, loadings = list(command), list(dict.fromkeys(loadings))
    _check(command, repeat, loadings, guard)
    cost.compiled(ignore)
    if out is not None:
        refuse_overwrite(Path(out), force)
    about = manifest.read(folder)
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="gpubloat-record-") as logs:
        given = copies or (lambda: _copies(folder, guard, Path(logs)))
        runs = _measure(command, given, repeat, loadings, compare, ignore, before, progress)
        if copies is None:
            details = _met(Path(logs))
    by_loading = {loading: [r for r in runs if r.loading == loading] for loading in loadings}
    verdicts = [verdict(loading, mine) for loading, mine in by_loading.items()]
    with RunWriter("libraries", ["repeats", "verdicts"], out, force) as writer:
        writer.append("repeats", repeats(runs))
        writer.append(
            "verdicts",
            pd.DataFrame(verdicts).astype(dict.fromkeys(("peak_gpu_bytes", "peak_gpu_bytes_after"), "Int64")),
        )
        inputs = [{"name": e.library, "bytes": e.bytes, "sha256": e.sha256} for e in about.libraries]
        details = provenance(command_line, METHOD, inputs) | details
        details |= {
            "gpus": sampling.gpus(),
            "guard": guard,
            "verdict": min((str(v["verdict"]) for v in verdicts), key=VERDICTS.index),
            "n_timeouts": sum(r.cost.is_ended for r in runs),
            "peak_gpu_of": sorted({r.cost.peak_gpu_of for r in runs if r.cost.peak_gpu_of is not None}),
            "complaints": {loading: complaint(mine) for loading, mine in by_loading.items()},
            "ignore": list(ignore),
            "compare": [Path(file).name for file in compare],
            "CUDA_MODULE_LOADING": os.environ.get("CUDA_MODULE_LOADING", ""),
            "numbers": {loading: numbers(mine) for loading, mine in by_loading.items()},
        }
        return writer.finish(details)


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


@contextlib.contextmanager
def _copies(folder: str | os.PathLike[str], guard: str, logs: Path) -> Iterator[dict[str, str]]:
    """The variables of `execute.environment`; after the first run, whether they did anything."""
    is_first = not any(logs.iterdir())
    with environment(folder, guard, str(logs)) as variables:
        yield variables
    if is_first:
        found = record.read(logs)
        if not any(process.swapped for process in found.processes):
            said = problems(found)
            raise GpubloatError(
                f"the command loaded none of the libraries that have copies in {folder}",
                said[0] if said else "give a command that uses them",
            )


def _met(logs: Path) -> dict[str, Any]:
    """What the audit library recorded in all runs of the copies, for run.json."""
    found = record.read(logs)
    return {
        "n_swapped": len({path for process in found.processes for path in process.swapped}),
        "n_misses": len({(miss.path, miss.what, miss.offset) for miss in found.misses}),
        "problems": problems(found),
    }


def _measure(
    command: Sequence[str],
    copies: Copies,
    repeat: int,
    loadings: Sequence[str],
    compare: Sequence[str | os.PathLike[str]],
    ignore: Sequence[str],
    before: Callable[[], None] | None,
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
            if before is not None:
                before()
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
        said = last_line(found.stderr_tail)
        said = f": {said}" if said else ""
        raise GpubloatError(f"the command fails on the originals ({how}){said}", "give a command that succeeds")
    for file, digest in zip(compare, found.files_sha256):
        if digest == cost.MISSING:
            raise GpubloatError(
                f"{os.fspath(file)} was not written by the command", "compare files that it writes anew in each run"
            )
