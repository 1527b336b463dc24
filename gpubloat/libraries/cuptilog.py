"""The logs of the CUPTI injection library (native/cupti.c), one file for each process: what was loaded and looked up.

Each line is an event, its fields are separated by tabs and escaped as in C. A process can be killed at any time, and a
file can be anything: a line that does not fit is counted and skipped.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gpubloat.errors import FormatError

STATES = ("recorded", "missing", "refused", "yielded")  # a later one says more about what is absent
LOOKUPS = ("kernel", "variable", "all")
KINDS = ("fatbin", "cubin", "ptx", "mapped", "file", "unknown")
MAX_LINE = 1 << 19  # a name of 64 KiB, every byte of it escaped

_NAME = re.compile(r"([0-9]{1,10})\.cupti")
_HEX = re.compile(r"[0-9a-f]{1,16}")
_CRC = re.compile(r"[0-9a-f]{8}")
_COUNT = re.compile(r"[0-9]{1,18}")
_TARGET = re.compile(r"sm_[0-9]{2,3}")
_ESCAPE = re.compile(rb"\\(?:x([0-9a-f]{2})|(\\))")


@dataclass(frozen=True, slots=True)
class Image:
    """What one handle (CUmodule or CUlibrary) was loaded from.

    `path` is the mapped object that holds it and `vaddr` its place there (relative to the load bias); `path` is empty
    for images on the heap, of which `crc32` and `size` are known if they are cubins.
    """

    api: str
    path: str
    vaddr: int
    kind: str
    crc32: int
    size: int

    @property
    def is_loaded_at_once(self) -> bool:
        """The cuModuleLoad functions read their image; cuLibraryLoadData, with which the CUDA runtime registers all
        fatbins of a program, waits for the first look-up."""
        return self.api.startswith("cuModule")


@dataclass(frozen=True, slots=True)
class Lookup:
    """A name that was asked for; `load` is a position in `Log.loads`, None for a handle whose load was not seen."""

    what: str
    name: str
    load: int | None


@dataclass(slots=True)
class Log:
    """One process.

    `devices` are (target, name) by number, `modules` counts loads by (crc32, size), and `made` says during which load's
    calls they came: (position in `loads`, crc32, size).
    """

    pid: int
    state: str = ""
    reason: str = ""
    devices: dict[int, tuple[str, str]] = field(default_factory=dict)
    loads: list[Image] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    modules: Counter[tuple[int, int]] = field(default_factory=Counter)
    made: list[tuple[int, int, int]] = field(default_factory=list)
    n_callbacks: int = 0
    n_skipped: int = 0
    is_full: bool = False

    @property
    def gpus(self) -> list[tuple[str, str]]:
        """(target, name) of each GPU that the process saw."""
        return list(self.devices.values())

    @property
    def problem(self) -> str:
        """What could not be recorded, in words; empty if nothing."""
        said = [self.reason] if self.reason else []
        if self.is_full:
            said.append("more distinct events than are recorded")
        if self.n_skipped:
            said.append(f"{self.n_skipped} lines of the log are no events")
        return "; ".join(said)


def read_all(folder: str | os.PathLike[str]) -> list[Log]:
    """All logs of a trace folder, by process number. FormatError where a file or the folder cannot be read."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise FormatError(str(folder), 0, f"cannot be read: {error.strerror}") from None
    found = [(int(match[1]), name) for name in names if (match := _NAME.fullmatch(name))]
    return [read(Path(folder) / name, pid) for pid, name in sorted(found)]


def read(path: Path, pid: int) -> Log:
    """One log. FormatError if the file cannot be read; nothing else is raised, whatever is in it."""
    log = Log(pid)
    program = _Program()
    try:
        for line in _lines(path, log):
            fields = [_unescaped(part) for part in line.split(b"\t")]
            if not _event(log, program, fields):
                log.n_skipped += 1
    except OSError as error:
        raise FormatError(str(path), 0, f"cannot be read: {error.strerror}") from None
    program.close(log)
    if not log.state:
        log.state = "recorded" if log.loads or log.lookups or log.modules else "missing"
        log.reason = log.reason or "the log does not say how the recording went"
    return log


@dataclass(slots=True)
class _Program:
    """What holds until the process executes another program: handles by number, and running counts."""

    handles: dict[int, int] = field(default_factory=dict)
    modules: dict[tuple[int, int], int] = field(default_factory=dict)

    def close(self, log: Log) -> None:
        log.modules.update(self.modules)
        self.handles.clear()
        self.modules.clear()


def _lines(path: Path, log: Log) -> Iterator[bytes]:
    """Whole lines; a part without an end (the process was killed while it wrote) and too long ones are counted."""
    with path.open("rb") as file:
        is_inside = False  # of a line that is too long
        while line := file.readline(MAX_LINE):
            if not line.endswith(b"\n"):
                log.n_skipped += not is_inside
                is_inside = True
            elif is_inside:
                is_inside = False
            else:
                yield line[:-1]


def _unescaped(part: bytes) -> str:
    if b"\\" in part:
        part = _ESCAPE.sub(lambda m: bytes([int(m[1], 16)]) if m[1] else b"\\", part)
    return part.decode("utf-8", "backslashreplace")


def _event(log: Log, program: _Program, fields: list[str]) -> bool:
    """Take one line into `log`; False if it is no event."""
    match fields:
        case ["start", _]:
            program.close(log)
        case ["cupti", state, reason] if state in STATES:
            if not log.state or STATES.index(state) >= STATES.index(log.state):
                log.state, log.reason = state, reason
        case ["gpu", number, target, name] if _COUNT.fullmatch(number) and _TARGET.fullmatch(target):
            log.devices[int(number)] = target, name
        case ["load", handle, api, path, vaddr, kind, crc, size] if (
            _HEX.fullmatch(handle) and _HEX.fullmatch(vaddr) and kind in KINDS and path and _is_content(crc, size)
        ):
            program.handles[int(handle, 16)] = len(log.loads)
            where = "" if path == "-" else path
            log.loads.append(Image(api, where, int(vaddr, 16), kind, int(crc, 16), int(size)))
        case ["alias", module, library] if _HEX.fullmatch(module) and _HEX.fullmatch(library):
            program.handles.pop(int(module, 16), None)
            if (load := program.handles.get(int(library, 16))) is not None:
                program.handles[int(module, 16)] = load
        case ["kernel" | "variable" as what, handle, name] if _HEX.fullmatch(handle) and name:
            log.lookups.append(Lookup(what, name, program.handles.get(int(handle, 16))))
        case ["all", handle] if _HEX.fullmatch(handle):
            log.lookups.append(Lookup("all", "", program.handles.get(int(handle, 16))))
        case ["module", crc, size, n] if _is_content(crc, size) and _COUNT.fullmatch(n) and 0 < int(n) < 1 << 40:
            key = int(crc, 16), int(size)
            program.modules[key] = max(program.modules.get(key, 0), int(n))
        case ["made", handle, crc, size] if _HEX.fullmatch(handle) and _is_content(crc, size):
            if (load := program.handles.get(int(handle, 16))) is not None:
                log.made.append((load, int(crc, 16), int(size)))
        case ["callbacks", n] if _COUNT.fullmatch(n):
            log.n_callbacks += int(n)
        case ["full"]:
            log.is_full = True
        case _:
            return False
    return True


def _is_content(crc: str, size: str) -> bool:
    return bool(_CRC.fullmatch(crc) and _COUNT.fullmatch(size))
