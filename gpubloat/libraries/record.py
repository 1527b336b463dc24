"""What the audit library wrote while a command ran: which libraries each process loaded, and what it touched of them.

The files are described in `native/audit/audit.h`. They were written by the traced program's own processes, so they are
read as files from outside: what does not fit is counted as a problem, and never trusted.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpubloat.errors import FormatError

PAGE = 4096
_LIB = struct.Struct("<8s5Q64s")
_USE = struct.Struct("<8s2Q72s")
_RUN = np.dtype([("vaddr", "<u8"), ("n_pages", "<u8"), ("first", "<u8")])
_MAX_LINES = 1_000_000


@dataclass(slots=True)
class Watched:
    """One library of the record: what could be observed in it, and how many processes touched each thing."""

    path: str
    file_bytes: int
    problem: str
    sites: npt.NDArray[np.uint64]  # addresses of function starts, before relocation
    runs: npt.NDArray[np.void]  # dtype with vaddr, n_pages, first
    n_hits: npt.NDArray[np.int64]  # per site: processes that entered it
    n_touches: npt.NDArray[np.int64]  # per page of all runs: processes that touched it
    processes: set[str] = field(default_factory=set)

    def touched_addresses(self) -> npt.NDArray[np.uint64]:
        """Addresses (before relocation) of the pages that were touched, ascending."""
        pages = [
            run["vaddr"] + PAGE * np.flatnonzero(self.n_touches[int(run["first"]) :][: int(run["n_pages"])])
            for run in self.runs
        ]
        return np.sort(np.concatenate(pages).astype(np.uint64)) if pages else np.zeros(0, np.uint64)


@dataclass(slots=True)
class Process:
    """One process of the record. `tag` is its id and a random word, which change with fork and exec."""

    tag: str
    program: str = ""
    problems: list[str] = field(default_factory=list)
    swapped: list[str] = field(default_factory=list)

    @property
    def pid(self) -> str:
        return self.tag.partition("-")[0]


@dataclass(slots=True)
class Miss:
    """Removed code that a process met: `what` is function or page; `offset` is in the original file."""

    tag: str
    what: str
    action: str
    offset: int
    is_whole: bool
    path: str


@dataclass(slots=True)
class Record:
    """All that a record folder says."""

    libraries: list[Watched]
    processes: list[Process]
    misses: list[Miss]
    problems: list[str]


def read(folder: Path) -> Record:
    """Read a record folder; files that do not fit their format become `problems`."""
    problems: list[str] = []
    watched: dict[str, Watched] = {}
    for path in sorted(folder.glob("*.lib")):
        try:
            watched[path.name] = _lib(path)
        except (FormatError, OSError, ValueError) as error:
            problems.append(f"{path.name} cannot be read: {error}")
    for path in sorted(folder.glob("*.use")):
        try:
            _use(path, watched)
        except (FormatError, OSError, ValueError) as error:
            problems.append(f"{path.name} cannot be read: {error}")
    processes = _processes(folder, watched)
    return Record([w for w in watched.values() if w.processes], processes, _misses(folder), problems)


def _lib(path: Path) -> Watched:
    data = path.read_bytes()
    if len(data) < _LIB.size:
        raise FormatError(str(path), 0, "shorter than its header")
    magic, size, n_sites, n_runs, n_pages, path_size, problem = _LIB.unpack_from(data)
    if magic != b"GBLLIB1\0" or _LIB.size + path_size + 8 * n_sites + _RUN.itemsize * n_runs != len(data):
        raise FormatError(str(path), 0, "its counts do not fit its size")
    at = _LIB.size
    name = data[at : at + path_size].split(b"\0")[0].decode("utf-8", "surrogateescape")
    sites = np.frombuffer(data, "<u8", n_sites, at + path_size)
    runs = np.frombuffer(data, _RUN, n_runs, at + path_size + 8 * n_sites)
    if n_runs and (n_pages > 1 << 40 or int(runs["n_pages"].max()) > n_pages or int(runs["first"].max()) > n_pages):
        raise FormatError(str(path), 0, "its runs of pages do not fit")
    if n_pages != int(runs["n_pages"].sum()) or n_pages * PAGE > size:
        raise FormatError(str(path), 0, "its runs of pages do not fit")
    text = problem.split(b"\0")[0].decode("ascii", "replace")
    return Watched(name, size, text, sites, runs, np.zeros(n_sites, np.int64), np.zeros(n_pages, np.int64))


def _use(path: Path, watched: dict[str, Watched]) -> None:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < _USE.size:
            raise FormatError(str(path), 0, "shorter than its header")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            magic, n_sites, n_pages, key = _USE.unpack_from(data)
            library = watched.get(key.split(b"\0")[0].decode("ascii", "replace"))
            if magic != b"GBLUSE1\0" or library is None or len(data) != _USE.size + n_sites + n_pages:
                raise FormatError(str(path), 0, "its counts do not fit its size")
            if n_sites != len(library.sites) or n_pages != len(library.n_touches):
                raise FormatError(str(path), 0, "it belongs to another library")
            library.n_hits += np.frombuffer(bytes(data[_USE.size : _USE.size + n_sites]), np.uint8) > 0
            library.n_touches += np.frombuffer(bytes(data[_USE.size + n_sites :]), np.uint8) > 0
    library.processes.add(path.stem.rpartition("-")[0])


def _processes(folder: Path, watched: dict[str, Watched]) -> list[Process]:
    """Every program of every process, in order of start (which the times of the files tell)."""
    started = {path.stem: path.stat().st_mtime_ns for path in folder.glob("*.proc")}
    found = {tag: Process(tag) for tag in sorted(started, key=lambda tag: (started[tag], tag))}
    for tag, process in found.items():
        for number, line in enumerate(_lines(folder / f"{tag}.proc")):
            kind, _, rest = line.partition("\t")
            if kind == "problem":
                process.problems.append(rest)
            elif kind == "swapped":
                process.swapped.append(rest)
            elif number == 0:
                process.program = os.path.basename(line)
    for library in watched.values():  # a forked child that loads more has no line of its own
        for tag in library.processes:
            found.setdefault(tag, Process(tag, "(forked)"))
    return list(found.values())


def _misses(folder: Path) -> list[Miss]:
    found = []
    for path in sorted(folder.glob("*.miss")):
        for line in _lines(path):
            words = line.split("\t", 4)
            if len(words) != 5 or words[0] not in ("function", "page") or not words[2].isdecimal():
                continue  # the last line of a killed process
            what, action, offset, extent, library = words
            if action in ("reported", "restored") and int(offset) < 1 << 63:
                found.append(Miss(path.stem, what, action, int(offset), extent == "whole", library))
    return found


def _lines(path: Path) -> list[str]:
    with path.open("rb") as file:
        data = file.read(256 << 20)
    return data.decode("utf-8", "surrogateescape").splitlines()[:_MAX_LINES]
