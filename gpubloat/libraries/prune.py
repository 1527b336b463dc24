"""Libraries and wheels -> copies without the code that none of some GPUs can be given. No run is needed.

What ``nvprune`` does for object files and static libraries, for finished shared libraries, environments and wheels.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpubloat.errors import GpubloatError
from gpubloat.libraries import inputs, outfolder, wheel
from gpubloat.libraries.debloat import _check, _entry, finish, spelled, work
from gpubloat.libraries.inputs import Input
from gpubloat.libraries.manifest import FILES, Wheel
from gpubloat.libraries.names import PACKAGES
from gpubloat.libraries.onecopy import Done, Job
from gpubloat.run import Run

_MEMBERS = ".members"  # pruned members of wheels, until they are packed


def prune(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    targets: str | Sequence[str],
    out: str | os.PathLike[str],
    *,
    layout: str = "moved",
    zstd: bool = False,
    executor: Executor | None = None,
    force: bool = False,
    progress: bool = False,
    command: str = "gpubloat.libraries.prune",
) -> Run:
    """Remove from libraries the fatbin elements that none of `targets` could be given (reason I).

    Parameters
    ----------
    paths : files (ELF, archive, fatbin), folders, wheels, or names of installed packages.
    targets : GPUs to keep code for, such as ``"sm_80,sm_90"`` or ``["A100", "H100"]``.
    out : folder to write. A file's copy is files/<its path relative to the parent of the path that was given>; a
        wheel's is <its name>, repacked with a valid RECORD.
    layout, zstd, executor, force, progress, command : see `debloat`.

    Returns
    -------
    Run as of `debloat`, in `out`.

    Raises
    ------
    FormatError : a file that was named itself cannot be read. GpubloatError : no such path, `out` cannot be written.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    wanted = spelled([targets] if isinstance(targets, str) else targets)
    _check(out, layout, force)
    found = [_settled(entry) for entry in inputs.discover(given).files]
    if not found:
        raise GpubloatError(
            f"no library in {', '.join(os.fspath(p) for p in given)}", "give a library, a folder or a wheel"
        )
    places = _places(given, found)
    with outfolder.appearing(Path(out), force) as new:
        jobs = []
        for number, (entry, place) in enumerate(zip(found, places)):
            target = new / (place if entry.member is None else f"{_MEMBERS}/{number}")
            jobs.append(Job(entry, "", None, None, wanted, layout, zstd, str(target), _mode(entry)))
        done = work(jobs, executor, progress)
        rows = zip(jobs, done, places)
        entries = [_entry(j, d, p, n) for n, (j, d, p) in enumerate(rows) if j.entry.member is None]
        wheels = _wheels(new, jobs, done, places)
        shutil.rmtree(new / _MEMBERS, ignore_errors=True)
        about: dict[str, Any] = {"kind": "targets", "targets": list(wanted), "layout": layout}
        finish(new, done, [e for e in entries if e is not None], wheels, [], about, command)
    return Run.load(out)


def _settled(entry: Input) -> Input:
    return replace(entry, path=os.path.realpath(entry.path))


def _mode(entry: Input) -> int:
    return 0o644 if entry.error else stat.S_IMODE(os.stat(entry.path).st_mode)


def _places(given: Sequence[str | os.PathLike[str]], found: Sequence[Input]) -> list[str]:
    """Where each file's copy (or that of its wheel) is in the folder; GpubloatError where two would be one."""
    roots = [os.path.realpath(os.fspath(p)) for p in given]
    places = []
    owner: dict[str, str] = {}
    for entry in found:
        root = next((r for r in roots if entry.path == r or entry.path.startswith(r.rstrip("/") + "/")), None)
        if entry.member is not None and entry.path == root:
            place = os.path.basename(entry.path)
        elif root is not None:
            place = f"{FILES}/{os.path.relpath(entry.path, os.path.dirname(root))}"
        else:  # of an installed package
            parts = Path(entry.path).parts
            site = max((n for n, part in enumerate(parts[:-1]) if part in PACKAGES), default=len(parts) - 2)
            place = f"{FILES}/{'/'.join(parts[site + 1 :])}"
        if owner.setdefault(place, entry.path) != entry.path:
            raise GpubloatError(f"{owner[place]} and {entry.path} would have the same copy", "prune them one by one")
        places.append(place)
    return places


def _wheels(new: Path, jobs: Sequence[Job], done: Sequence[Done], places: Sequence[str]) -> list[Wheel]:
    """Repack each wheel of which a member has changed."""
    changed: dict[str, dict[str, Path]] = {}
    copies: dict[str, str] = {}
    for job, result, place in zip(jobs, done, places):
        if job.entry.member is not None and result.sha256_copy:
            changed.setdefault(job.entry.path, {})[job.entry.member] = Path(job.place)
            copies[job.entry.path] = place
    found = []
    for path, members in changed.items():
        copy = new / copies[path]
        copy.parent.mkdir(parents=True, exist_ok=True)
        wheel.repack(Path(path), members, copy)
        sizes = os.path.getsize(path), copy.stat().st_size
        found.append(Wheel(path, copies[path], _sha256(path), _sha256(copy), *sizes, sorted(members)))
        for member in members.values():
            member.unlink()
    return found


def _sha256(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
