"""Traced runs, or GPU targets alone -> a folder of debloated copies with a manifest. The originals are not touched."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gpubloat import __version__
from gpubloat.errors import FormatError, GpubloatError
from gpubloat.libraries import manifest, onecopy, outfolder, union
from gpubloat.libraries.inputs import Input
from gpubloat.libraries.manifest import FILES, RANGES, Entry, Manifest
from gpubloat.libraries.names import is_driver
from gpubloat.libraries.onecopy import Done, Job
from gpubloat.libraries.rewrite import LAYOUTS
from gpubloat.run import Run, RunWriter, provenance
from gpubloat.tables import targets as gpu_targets

METHOD = {
    "elements": "kept if any run used them or nothing is known of them; else removed, for reason I or II",
    "functions": "removed if watched in every run and entered in none, with known bounds; else kept",
    "allocated_bytes": "512 x st_blocks of the copy; of the original, its size in whole pages",
    "zstd_bytes": "zstd level 3 of the whole file",
}
TABLES = ("libraries", "removed", "reduction", "problems")
MAX_THREADS = 4


def debloat(
    runs: Run | str | os.PathLike[str] | Iterable[Run | str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    targets: Sequence[str] | None = None,
    layout: str = "zeroed",
    zstd: bool = False,
    executor: Executor | None = None,
    force: bool = False,
    progress: bool = False,
    command: str = "gpubloat.libraries.debloat",
) -> Run:
    """Remove from the libraries of traced runs what none of the runs used.

    Parameters
    ----------
    runs : traced runs, and runs under the guard (what they missed counts as used); Run objects or folders.
    out : folder to write; appears whole or not at all.
    targets : GPUs to keep code for; default, those that the runs saw. Code for a GPU that no run saw is kept.
    layout : ``zeroed`` (same offsets, so the guard can bring code back) or ``moved`` (see `rewrite`).
    zstd : also measure how well originals and copies compress (level 3).
    executor : any `concurrent.futures.Executor`; default, a few threads.
    force : replace a debloated folder.
    progress : show a progress bar on stderr.
    command : what run.json says was run.

    Returns
    -------
    Run with libraries, removed, reduction, problems, in `out`; beside its tables are manifest.json, the copies in
    files/ and the removed ranges in ranges/. Libraries from which nothing was removed have no copy. Libraries of the
    driver, and files that were gone or replaced when their run ended, are left out of everything.

    Raises
    ------
    GpubloatError : no traced run; a library is missing or not the traced one (sha256); `out` cannot be written.
    """
    given = [runs] if isinstance(runs, (Run, str, os.PathLike)) else list(runs)
    _check(out, layout, force)
    wanted = None if targets is None else spelled(targets)
    found = union.load(given)
    libraries = [entry for entry in union.libraries(found) if entry.sha256 and not is_driver(entry.path)]
    paths = [_original(entry) for entry in libraries]
    with outfolder.appearing(Path(out), force) as new:
        jobs = [
            Job(
                Input(entry.library, entry.library, path), entry.sha256, entry.tables, entry.usage, wanted, layout,
                zstd, str(new / copy_of(path)), stat.S_IMODE(os.stat(path).st_mode),
            )
            for entry, path in zip(libraries, paths)
        ]  # fmt: skip
        done = work(jobs, executor, progress)
        entries = [_entry(job, result, copy_of(job.entry.path), n) for n, (job, result) in enumerate(zip(jobs, done))]
        seen = sorted(set().union(*(entry.usage.targets for entry in libraries))) if wanted is None else list(wanted)
        about: dict[str, Any] = {"kind": "runs", "targets": seen, "layout": layout}
        about["workloads"] = [union.record(run)["workload"] for run in found]
        listed = [entry for entry in entries if entry is not None]
        finish(new, done, listed, [], [union.record(run) for run in found], about, command)
    return Run.load(out)


def spelled(targets: Sequence[str]) -> tuple[str, ...]:
    """GPUs as the tables spell them, sorted, each once: ``("sm_80", "sm_90")``. GpubloatError if there is none."""
    given = [targets] if isinstance(targets, str) else list(targets)
    numbers = {gpu_targets.gpu(part) for text in given for part in text.split(",") if part.strip()}
    if not numbers:
        raise GpubloatError("no GPU to keep code for", "name at least one, such as sm_90")
    for number in sorted(numbers - set(gpu_targets.KNOWN)):
        raise GpubloatError(f"no GPU is known to be sm_{number}", "code for it cannot be told from code for none")
    return tuple(f"sm_{number}" for number in sorted(numbers))


def copy_of(path: str) -> str:
    """Where the copy of an absolute path is in the folder."""
    return f"{FILES}/{path.lstrip('/')}"


def work(jobs: Sequence[Job], executor: Executor | None, progress: bool) -> list[Done]:
    """The results in the order of the jobs. Large files go first, so that no worker is left with one at the end."""
    if executor is None:
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
            return work(jobs, threads, progress)
    order = sorted(range(len(jobs)), key=lambda n: -os.path.getsize(jobs[n].entry.path))
    waiting: dict[Future[Done], int] = {executor.submit(onecopy.run, jobs[n]): n for n in order}
    found: dict[int, Done] = {}
    try:
        for future in _progress(as_completed(waiting), len(jobs), progress):
            found[waiting[future]] = future.result()
    finally:
        for future in waiting:
            future.cancel()
    return [found[n] for n in range(len(jobs))]


def finish(
    new: Path,
    done: Sequence[Done],
    entries: Sequence[Entry],
    wheels: Sequence[manifest.Wheel],
    runs: list[dict[str, str]],
    about: dict[str, Any],
    command: str,
) -> None:
    """Write tables, run.json, ranges and manifest.json into the folder `new`."""
    ranges = {entry.library: entry.ranges for entry in entries}
    (new / RANGES).mkdir(exist_ok=True)
    with RunWriter("libraries", list(TABLES), None, False) as writer:
        n_removed = 0
        for result in done:
            library = str(result.reduction["library"])
            if library in ranges:
                result.ranges["id"] += np.uint32(n_removed)
                np.save(new / ranges[library], result.ranges, allow_pickle=False)
            n_removed += len(result.removed)
            writer.append("libraries", result.library)
            writer.append("removed", result.removed)
            if result.problems is not None:
                writer.append("problems", result.problems)
        rows = pd.DataFrame([result.reduction for result in done])
        if len(rows):
            rows = rows.astype({"zstd_bytes": "Int64", "zstd_bytes_after": "Int64"})
        writer.append("reduction", rows)
        read = [{"name": r.reduction["library"], "bytes": r.reduction["file_bytes"], "sha256": r.sha256} for r in done]
        record = provenance(command, METHOD, read) | about
        record["empty"] = {"removed": "nothing can go from these libraries"} if not n_removed else {}
        run = writer.finish(record)
        run.save(new, force=True)
    created = str(record["created"])
    kind, targets = str(about["kind"]), list(about["targets"])
    manifest.write(new, Manifest(__version__, created, kind, targets, "/", runs, list(entries), list(wheels)))


def _check(out: str | os.PathLike[str], layout: str, force: bool) -> None:
    outfolder.check(Path(out), force)
    if layout not in LAYOUTS:
        raise GpubloatError(f"{layout!r} is no layout", f"one of {', '.join(LAYOUTS)}")


def _original(entry: union.Library) -> str:
    """Path of the file that was traced. GpubloatError if the run does not tell, or if it is gone."""
    path = entry.path
    if not path:
        hint = "published runs carry no paths: trace the workload on this machine"
        raise GpubloatError(f"where {entry.library} was is not in the run", hint)
    if not os.path.isabs(path) or os.path.normpath(path) != path or "\0" in path:
        raise FormatError("loaded", 0, f"{path!r} is no absolute path of a library")
    if not os.path.isfile(path):
        hint = "trace the workload again, with the libraries that are there now"
        raise GpubloatError(f"{entry.library} is missing: no file {path}", hint)
    return path


def _entry(job: Job, done: Done, copy: str, number: int) -> Entry | None:
    if not done.sha256_copy:
        return None
    return Entry(
        job.entry.library, job.entry.path, copy, done.sha256, done.sha256_copy, int(done.reduction["file_bytes"]),
        job.layout, str(done.library["build_id"].iloc[0]), f"{RANGES}/{number}.npy",
    )  # fmt: skip


def _progress(futures: Iterator[Future[Done]], total: int, wanted: bool) -> Iterator[Future[Done]]:
    if not wanted:
        return futures
    from tqdm.auto import tqdm

    return iter(tqdm(futures, total=total, unit="file", disable=None, leave=False))
