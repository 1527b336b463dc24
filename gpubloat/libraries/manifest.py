"""manifest.json of a debloated folder: which file each copy stands for, and how to know both.

A folder may come from somebody else, so nothing in it is trusted: paths that leave the folder and values of the wrong
type are a FormatError.
"""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from gpubloat.errors import FormatError, GpubloatError
from gpubloat.libraries.elf import Array
from gpubloat.libraries.locate import CPU, GPU, RANGE
from gpubloat.libraries.rewrite import LAYOUTS

NAME = "manifest.json"
FILES, RANGES, ORIGINALS = "files", "ranges", "originals"
KINDS = ("runs", "targets")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One library with a copy. `path` is the original's; `copy` and `ranges` are relative to the folder."""

    library: str
    path: str
    copy: str
    sha256: str
    sha256_copy: str
    bytes: int
    layout: str
    build_id: str
    ranges: str


@dataclass(frozen=True, slots=True)
class Wheel:
    """One repacked wheel. `copy` is relative to the folder; `members` are those that changed."""

    path: str
    copy: str
    sha256: str
    sha256_copy: str
    bytes: int
    bytes_copy: int
    members: list[str]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What manifest.json says. `runs` has workload and sha256 (of its run.json) of each run."""

    gpubloat: str
    created: str
    kind: str
    targets: list[str]
    root: str
    runs: list[dict[str, str]]
    libraries: list[Entry]
    wheels: list[Wheel]


def write(folder: Path, manifest: Manifest) -> None:
    text = json.dumps(asdict(manifest), indent=1, ensure_ascii=False)
    # File names that are no UTF-8 come as surrogates.
    (folder / NAME).write_text(text + "\n", encoding="utf-8", errors="surrogateescape")


def read(folder: str | os.PathLike[str]) -> Manifest:
    """The manifest of a debloated folder. GpubloatError if there is none, FormatError if it is damaged."""
    path = Path(folder) / NAME
    try:
        refuse_endless(path)
        given = json.loads(path.read_text("utf-8", errors="surrogateescape"))
        if not isinstance(given, dict):
            raise ValueError("no object")
        return Manifest(
            gpubloat=_text(given, "gpubloat"),
            created=_text(given, "created"),
            kind=_one_of(given, "kind", KINDS),
            targets=[_of(str, t, "targets") for t in _list(given, "targets")],
            root=_text(given, "root"),
            runs=[{k: _text(_of(dict, r, "runs"), k) for k in ("workload", "sha256")} for r in _list(given, "runs")],
            libraries=_unique([_entry(_of(dict, e, "libraries")) for e in _list(given, "libraries")]),
            wheels=[_wheel(_of(dict, w, "wheels")) for w in given.get("wheels", [])],
        )
    except OSError as error:
        hint = "give what gpubloat libraries debloat wrote with --out"
        raise GpubloatError(f"{folder} is no debloated folder: {NAME}: {error.strerror}", hint) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        detail = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise FormatError(str(path), 0, f"not a manifest: {detail}") from None


def ranges(folder: str | os.PathLike[str], entry: Entry) -> Array:
    """The removed ranges of one library, dtype RANGE, sorted and disjoint. FormatError if the file is damaged."""
    path = Path(folder) / entry.ranges
    try:
        refuse_endless(path)
        with path.open("rb") as file:
            is_first_version = file.read(7)[6:] == b"\x01"  # the one that native/audit/swap.c reads
        found = np.load(path, allow_pickle=False)
    except OSError as error:
        raise GpubloatError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError, MemoryError, OverflowError) as error:
        raise FormatError(str(path), 0, f"no table of ranges: {error}") from None
    if not is_first_version or not isinstance(found, np.ndarray) or found.dtype != RANGE or found.ndim != 1:
        raise FormatError(str(path), 0, "no table of ranges")
    start, size = found["offset"], found["size"]
    fits = (size <= np.uint64(entry.bytes)) & (
        start <= np.uint64(entry.bytes) - np.minimum(size, np.uint64(entry.bytes))
    )
    stop = start + size
    if not (fits.all() and (start[1:] >= stop[:-1]).all() and np.isin(found["kind"], (CPU, GPU)).all()):
        raise FormatError(str(path), 0, "ranges that overlap or leave the file")
    return found


def refuse_endless(path: str | os.PathLike[str]) -> None:
    """FormatError for pipes and devices: to read them would never end. OSError passes through."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise FormatError(os.fspath(path), 0, "no regular file")


def inside(folder: Path, relative: str) -> Path:
    """The file `relative` of the folder; FormatError if it is no regular file of it (a link leads elsewhere)."""
    path = folder / relative
    if path.is_symlink() or not path.resolve().is_relative_to(folder.resolve()):
        raise FormatError(str(folder / NAME), 0, f"{relative} is a link out of the folder")
    return path


def _entry(given: dict[str, Any]) -> Entry:
    return Entry(
        library=_text(given, "library"),
        path=_absolute(given, "path"),
        copy=_relative(given, "copy", FILES),
        sha256=_digest(given, "sha256"),
        sha256_copy=_digest(given, "sha256_copy"),
        bytes=_count(given, "bytes"),
        layout=_one_of(given, "layout", LAYOUTS),
        build_id=_text(given, "build_id"),
        ranges=_relative(given, "ranges", RANGES),
    )


def _wheel(given: dict[str, Any]) -> Wheel:
    return Wheel(
        path=_absolute(given, "path"),
        copy=_relative(given, "copy", ""),
        sha256=_digest(given, "sha256"),
        sha256_copy=_digest(given, "sha256_copy"),
        bytes=_count(given, "bytes"),
        bytes_copy=_count(given, "bytes_copy"),
        members=[_of(str, m, "members") for m in _list(given, "members")],
    )


def _unique(entries: list[Entry]) -> list[Entry]:
    for name in ("library", "path", "copy"):
        values = [getattr(e, name) for e in entries]
        if len(set(values)) < len(values):
            raise ValueError(f"two libraries with the same {name}")
    return entries


def _of(kind: type, value: Any, name: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name!r} holds a {type(value).__name__}, not a {kind.__name__}")
    return value


def _text(given: dict[str, Any], name: str) -> str:
    found: str = _of(str, given[name], name)
    return found


def _list(given: dict[str, Any], name: str) -> list[Any]:
    found: list[Any] = _of(list, given[name], name)
    return found


def _count(given: dict[str, Any], name: str) -> int:
    found: int = _of(int, given[name], name)
    if not 0 <= found < 1 << 63:
        raise ValueError(f"{name!r} is {found}")
    return found


def _one_of(given: dict[str, Any], name: str, known: tuple[str, ...]) -> str:
    if _text(given, name) not in known:
        raise ValueError(f"{name!r} is {given[name]!r}, not one of {', '.join(known)}")
    return str(given[name])


def _digest(given: dict[str, Any], name: str) -> str:
    if not _SHA256.fullmatch(_text(given, name)):
        raise ValueError(f"{name!r} is no sha256")
    return str(given[name])


def _absolute(given: dict[str, Any], name: str) -> str:
    text = _text(given, name)
    if not text.startswith("/") or "\0" in text or ".." in PurePosixPath(text).parts or os.path.normpath(text) != text:
        raise ValueError(f"{name!r} is no absolute path: {text!r}")
    return text


def _relative(given: dict[str, Any], name: str, top: str) -> str:
    text = _text(given, name)
    parts = PurePosixPath(text).parts
    if not text or "\0" in text or text.startswith("/") or ".." in parts or os.path.normpath(text) != text:
        raise ValueError(f"{name!r} leaves the folder: {text!r}")
    if top and (parts[0] != top or len(parts) < 2):
        raise ValueError(f"{name!r} is not in {top}: {text!r}")
    return text
