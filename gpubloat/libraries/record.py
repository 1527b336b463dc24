"""What the audit library wrote while a command ran: which libraries each process loaded, and what it touched of them.

The files are described in `native/audit/audit.h`. They were written by the traced program's own processes, so they are
read as files from outside: what does not fit is counted as a problem, and never trusted.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpubloat.errors import FormatError
from gpubloat.libraries.elf import PAGE

_LIB = struct.Struct("<8s5Q64s")
_USE = struct.Struct("<8s2Q72s")
_RUN = np.dtype([("vaddr", "<u8"), ("n_pages", "<u8"), ("first", "<u8")])
_MAX_LINES = 1_000_000
_MAX_RUNS = 64  # of native/audit/sites.c
_MAX_TEXT = 64 << 20  # bytes of one file of lines
_MAX_LIBRARY = 1 << 36  # bytes; no library is so large or has so many functions, and memory goes with both
_MAX_SITES = 1 << 24
_TAG = re.compile(r"[0-9]{1,10}-[0-9a-f]{8}")


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
    key: str = ""  # which file it was: device, inode, size, time
    processes: set[str] = field(default_factory=set)

    def is_there(self) -> bool:
        """Whether the file at `path` is still the one that was loaded."""
        try:
            now = os.stat(self.path)
        except (OSError, ValueError):
            return False
        key = f"{now.st_dev:x}-{now.st_ino:x}-{now.st_size:x}-{now.st_mtime_ns // 1_000_000:x}.lib"
        return stat.S_ISREG(now.st_mode) and self.key == key

    def touched_addresses(self) -> npt.NDArray[np.uint64]:
        """Addresses (before relocation) of the pages that were touched, ascending."""
        pages = [
            run["vaddr"]
            + PAGE * np.flatnonzero(self.n_touches[int(run["first"]) :][: int(run["n_pages"])]).astype("<u8")
            for run in self.runs
        ]
        return np.sort(np.concatenate(pages)) if pages else np.zeros(0, np.uint64)


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
    for path in _files(folder, "lib", problems):
        try:
            watched[path.name] = _lib(path)
        except (FormatError, OSError, ValueError) as error:
            problems.append(f"{path.name} cannot be read: {error}")
    for path in _files(folder, "use", problems):
        try:
            _use(path, watched)
        except (FormatError, OSError, ValueError) as error:
            problems.append(f"{path.name} cannot be read: {error}")
    processes = _processes(folder, watched, problems)
    misses = _misses(folder, problems)
    return Record([w for w in watched.values() if w.processes], processes, misses, problems)


def with_text_paths(found: Record) -> list[Watched]:
    """The libraries whose paths a table can hold. The others become problems of the record."""
    kept = []
    for watched in found.libraries:
        if (shown := text(watched.path)) == watched.path:
            kept.append(watched)
        else:
            found.problems.append(f"{shown} was left out: its path is no UTF-8")
    return kept


def text(name: str) -> str:
    """What is no UTF-8 as escapes: a table can hold nothing else."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _files(folder: Path, kind: str, problems: list[str]) -> list[Path]:
    """The files of one kind, by name. Pipes (which would wait for ever), folders and foreign names are problems."""
    found = []
    for path in sorted(folder.glob(f"*.{kind}")):
        tag = path.stem.rpartition("-")[0] if kind == "use" else path.stem
        if not path.is_file() or path.is_symlink() or (kind != "lib" and not _TAG.fullmatch(tag)):
            problems.append(f"{path.name} is no file of a record")
        else:
            found.append(path)
    return found


def _lib(path: Path) -> Watched:
    with path.open("rb") as file:  # the head first: a hole can be of any size
        head = file.read(_LIB.size)
        if len(head) < _LIB.size:
            raise FormatError(str(path), 0, "shorter than its header")
        magic, size, n_sites, n_runs, n_pages, path_size, problem = _LIB.unpack(head)
        n_bytes = path_size + 8 * n_sites + _RUN.itemsize * n_runs
        if magic != b"GBLLIB1\0" or _LIB.size + n_bytes != os.fstat(file.fileno()).st_size:
            raise FormatError(str(path), 0, "its counts do not fit its size")
        if size > _MAX_LIBRARY or n_sites > _MAX_SITES or n_runs > _MAX_RUNS or path_size > PAGE:
            raise FormatError(str(path), 0, "its counts are those of no library")
        data = head + file.read(n_bytes)
    if len(data) != _LIB.size + n_bytes:
        raise FormatError(str(path), 0, "it was cut while it was read")
    at = _LIB.size
    name = data[at : at + path_size].split(b"\0")[0].decode("utf-8", "surrogateescape")
    sites = np.frombuffer(data, "<u8", n_sites, at + path_size)
    runs = np.frombuffer(data, _RUN, n_runs, at + path_size + 8 * n_sites)
    counts = [int(n) for n in runs["n_pages"]]
    firsts = [sum(counts[:n]) for n in range(len(counts))]
    if firsts != runs["first"].tolist() or sum(counts) != n_pages or n_pages * PAGE > size:
        raise FormatError(str(path), 0, "its runs of pages do not fit")
    text = problem.split(b"\0")[0].decode("ascii", "replace")
    return Watched(name, size, text, sites, runs, np.zeros(n_sites, np.int64), np.zeros(n_pages, np.int64), path.name)


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


def _processes(folder: Path, watched: dict[str, Watched], problems: list[str]) -> list[Process]:
    """Every program of every process, in order of start (which the times of the files tell)."""
    started = {path.stem: path.stat().st_mtime_ns for path in _files(folder, "proc", problems)}
    found = {tag: Process(tag) for tag in sorted(started, key=lambda tag: (started[tag], tag))}
    for tag, process in found.items():
        for number, line in enumerate(_lines(folder / f"{tag}.proc", problems)):
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


def _misses(folder: Path, problems: list[str]) -> list[Miss]:
    found = []
    for path in _files(folder, "miss", problems):
        n_bad = 0
        for line in _lines(path, problems):
            what, action, offset, extent, library, *_ = [*line.split("\t", 4), "", "", "", "", ""]
            is_known = what in ("function", "page") and action in ("reported", "restored")
            if is_known and library and offset.isascii() and offset.isdecimal() and len(offset) < 19:
                found.append(Miss(path.stem, what, action, int(offset), extent == "whole", library))
            else:
                n_bad += 1
        if n_bad:
            problems.append(f"{path.name} has {n_bad} lines that cannot be read")
    return found


def _lines(path: Path, problems: list[str]) -> list[str]:
    """Whole lines. Names of files can hold every character but this one that ends a line elsewhere."""
    with path.open("rb") as file:
        data = file.read(_MAX_TEXT + 1)
    lines = data.split(b"\n", _MAX_LINES)
    if len(data) > _MAX_TEXT or len(lines) > _MAX_LINES:
        problems.append(f"{path.name} is too long: its end was left out")
    elif lines[-1]:  # a full disk, or a process that was killed
        problems.append(f"the last line of {path.name} is not whole")
    return [line.decode("utf-8", "surrogateescape") for line in lines[:-1]]
