"""Traces as CSV: RMM's log of a memory resource, and MiniMalloc's list of buffers.

RMM writes ``Thread,Time,Action,Pointer,Size,Stream`` with the actions allocate, free, allocate failure. MiniMalloc
has ``id,lower,upper,size``: a buffer lives in [lower, upper). Its buffers have no addresses; each is given one of its
own here, so that what frees it can be told, and nothing can be compared with it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pandas as pd

from gpubloat.errors import FormatError

RMM = ["thread", "time", "action", "pointer", "size", "stream"]
MINIMALLOC = ["id", "lower", "upper", "size"]
CHUNK = 100_000
_MAX_LINE = 4096
_TIME = re.compile(r"(\d{1,3}):(\d{1,2}):(\d{1,2})(?:[.:](\d{1,9}))?")
_ACTIONS = {"allocate": "alloc", "free": "free_completed", "allocate failure": "oom"}
_FIRST_ADDRESS = 1 << 32


def kind(head: str) -> str | None:
    """``rmm`` or ``minimalloc`` by the first line of a file, or None."""
    names = [name.strip().strip('"').lower() for name in head.strip().lstrip("\ufeff").split(",")]
    if names == RMM:
        return "rmm"
    return "minimalloc" if sorted(names) == sorted(MINIMALLOC) or set(MINIMALLOC) < set(names) else None


def events(path: Path, which: str) -> Iterator[pd.DataFrame]:
    """The table events, in pieces. Raises FormatError with the number of the first bad line."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        if which == "rmm":
            yield from _rmm(file, str(path))
        else:
            yield _minimalloc(file, str(path))


def _rows(file: TextIO, path: str) -> Iterator[tuple[int, dict[str, str]]]:
    """(offset of the line, its fields by name) of each line that is not empty."""
    names: list[str] = []
    offset = 0
    while line := file.readline(_MAX_LINE):
        start, offset = offset, offset + len(line.encode("utf-8", "replace"))
        if len(line) >= _MAX_LINE:
            raise FormatError(path, start, "a line that is longer than any of such a log")
        text = line.strip().lstrip("\ufeff")
        if not text:
            continue
        try:
            fields = next(csv.reader([text]))
        except csv.Error as error:
            raise FormatError(path, start, f"is no CSV: {error}") from None
        if not names:
            names = [field.strip().lower() for field in fields]
            continue
        if len(fields) != len(names):
            raise FormatError(path, start, f"{len(fields)} fields where the header has {len(names)}", "is it cut off?")
        yield start, dict(zip(names, (field.strip() for field in fields)))


def _number(text: str, path: str, at: int, what: str) -> int:
    """Decimal or 0x hexadecimal, below 2**64. Null pointers as the C library prints them are 0."""
    if text in ("(nil)", "null", "nullptr"):
        return 0
    if re.fullmatch(r"[0-9]{1,20}|0[xX][0-9a-fA-F]{1,16}", text):
        value = int(text, 16 if text[:2].lower() == "0x" else 10)
        if value < 1 << 64:
            return value
    raise FormatError(path, at, f"{what} is no number of 64 bits: {text[:40]!r}")


def _rmm(file: TextIO, path: str) -> Iterator[pd.DataFrame]:
    rows: list[tuple[Any, ...]] = []
    day, last = 0, 0
    for n, (at, row) in enumerate(_rows(file, path)):
        action = _ACTIONS.get(row["action"].lower())
        if action is None:
            raise FormatError(path, at, f"unknown action {row['action'][:40]!r}", f"known: {', '.join(_ACTIONS)}")
        time = _TIME.fullmatch(row["time"])
        when = None
        if time:  # a clock without a date: it starts again at midnight
            hours, minutes, seconds = (int(part) for part in time.groups()[:3])
            when = (hours * 3600 + minutes * 60 + seconds) * 1_000_000 + int((time[4] or "0").ljust(6, "0")[:6])
            day += 86_400_000_000 if when < last - 43_200_000_000 else 0
            last = when
            when += day
        size, stream = (_number(row[key], path, at, key) for key in ("size", "stream"))
        rows.append((n, action, _number(row["pointer"], path, at, "pointer"), size, stream, when))
        if len(rows) == CHUNK:
            yield _frame(rows)
            rows = []
    yield _frame(rows)


def _minimalloc(file: TextIO, path: str) -> pd.DataFrame:
    """Frees come before allocations of the same moment: `upper` is the first moment that a buffer does not need."""
    moments: list[tuple[int, int, int, int]] = []
    address = _FIRST_ADDRESS
    for n, (at, row) in enumerate(_rows(file, path)):
        lower, upper, size = (_number(row[key], path, at, key) for key in ("lower", "upper", "size"))
        if lower >= upper:
            raise FormatError(path, at, f"a buffer that lives from {lower} to {upper}")
        if address + size >= 1 << 62:
            raise FormatError(path, at, "buffers of more bytes than there are addresses")
        moments += [(lower, n, address, size), (upper, -1 - n, address, size)]
        address += max(size, 1)
    moments.sort(key=lambda m: (m[0], m[1] >= 0, abs(m[1])))
    rows = [(i, "alloc" if m[1] >= 0 else "free_completed", m[2], m[3], 0, None) for i, m in enumerate(moments)]
    return _frame(rows)


def _frame(rows: list[tuple[Any, ...]]) -> pd.DataFrame:
    number, action, address, size, stream, when = zip(*rows) if rows else ((), (), (), (), (), ())
    n = len(rows)
    return pd.DataFrame(
        {
            "device": np.zeros(n, np.int64),
            "event": np.array(number, np.int64),
            "action": list(action),
            "address": np.array(address, np.uint64),
            "size_bytes": np.array(size, np.uint64),
            "stream": np.array(stream, np.uint64),
            "pool": ["0.0"] * n,
            "time_us": pd.array(list(when), dtype="Int64"),
            "stack": pd.array([None] * n, dtype="Int64"),
        }
    )
