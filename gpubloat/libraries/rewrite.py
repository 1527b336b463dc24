"""Ranges -> a copy of one file. The original is mapped for reading and never opened for writing.

Everything passes through one buffer, which is hashed, too. copy_file_range would copy 500 MB in 0.2 s instead of 0.3 to
0.7 s, but the copy's sha256 needs its bytes anyway (0.35 s).

Layout ``zeroed`` keeps every offset: payloads and the kinds of their elements become zero, function bodies 0xCC (int3),
so that a call traps at its first instruction. Layout ``moved`` moves the kept elements to the front of their region,
lowers the region's size and zeroes its tail; regions stay where they are, so wrappers and the pointer lists of version
2 wrappers stay valid. A region in which nothing is kept gets size 0: on an H200 (driver 580, lazy and eager) that gives
the same errors at the same calls as the original region, whose code fits no GPU of the targets: cuLibraryLoadData
succeeds, cuModuleLoadData and cuLibraryGetKernel give CUDA_ERROR_NO_BINARY_FOR_GPU.

Holes. Pages that were removed whole are not written, so they take no block on disk. That is so for payloads, and for
pages inside one removed function: in libtorch_cpu (torch 2.13) 71 of 250 MB of bounded functions are such pages, a
quarter of what debloating saves there. A hole reads as zeros, which are instructions (``add %al,(%rax)``); it is safe
since the function's first byte and its last 16 are never in one: a call traps before it, and whoever got into it by any
other way runs into 0xCC behind it and never into live code.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import numpy as np
import pandas as pd

from gpubloat.libraries.elf import PAGE, Array
from gpubloat.libraries.locate import CPU, Plan
from gpubloat.libraries.reader import Reader

LAYOUTS = ("zeroed", "moved")
TRAP = 0xCC
_BEHIND = 16  # bytes of 0xCC behind a hole: the last zero can take the first of them for its operand
CHUNK = 8 << 20
# Of one write. Larger ones make larger units of the page cache, of which the kernel then maps more than is used: a copy
# of libtorch_cpu written by 8 MiB took 182 MB of resident memory in a run where the original and this take 68 (6.18).
PIECE = 64 << 10
_SIZE_AT = 8  # of the u64 size in a region header
_HEADER = 16
_U64 = Struct("<Q")


class Written(NamedTuple):
    """A copy: sha256 of its content, and the bytes of the blocks it takes on disk."""

    sha256: str
    allocated_bytes: int


class Edits(NamedTuple):
    """What to change: fills (start, stop, byte), sorted and disjoint; moves (target, source, size); patches."""

    starts: Array
    stops: Array
    fill: Array
    moves: list[tuple[int, int, int]]
    patches: list[tuple[int, bytes]]


def write(reader: Reader, edits: Edits, place: Path, mode: int = 0o644) -> Written:
    """Write the copy to `place`, which must not exist. OSError passes through (full disk, no right to write)."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(CHUNK, reader.size)))
    holes = _holes(edits)
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place, "xb", buffering=0) as file:
        os.fchmod(file.fileno(), mode)
        os.truncate(file.fileno(), reader.size)
        for at in range(0, reader.size, CHUNK):
            data = buffer[: min(CHUNK, reader.size - at)]
            data[:] = reader.view(at, len(data))
            _apply(reader, edits, at, data)
            last = at
            for begin, end in [*_between(holes, at, at + len(data)), (at + len(data),) * 2]:
                data[last - at : begin - at] = bytes(begin - last)  # a hole reads as zeros
                _write_all(file.fileno(), data[begin - at : end - at], begin)
                last = end
            digest.update(data)
        reader.release()
        blocks: int = os.fstat(file.fileno()).st_blocks
    return Written(digest.hexdigest(), blocks * 512)


def edits(plan: Plan, tables: dict[str, pd.DataFrame], layout: str) -> Edits:
    """The changes that turn the original into the copy."""
    starts = plan.ranges["offset"].astype(np.int64)
    stops = starts + plan.ranges["size"].astype(np.int64)
    fill = np.where(plan.ranges["kind"] == CPU, TRAP, 0).astype(np.uint8)
    moves: list[tuple[int, int, int]] = []
    patches: list[tuple[int, bytes]] = []
    if layout == "moved":
        tails, packed = _compact(plan, tables, moves, patches)
        is_left = ~np.isin(plan.ranges["id"], packed)
        starts = np.concatenate([starts[is_left], tails[:, 0]])
        stops = np.concatenate([stops[is_left], tails[:, 1]])
        fill = np.concatenate([fill[is_left], np.zeros(len(tails), np.uint8)])
        order = np.argsort(starts, kind="stable")
        starts, stops, fill = starts[order], stops[order], fill[order]
    return Edits(starts, stops, fill, moves, patches)


def _compact(
    plan: Plan, tables: dict[str, pd.DataFrame], moves: list[tuple[int, int, int]], patches: list[tuple[int, bytes]]
) -> tuple[Array, Array]:
    """Tails (start, stop) of the packed regions, shape (n, 2), and the rows of `removed` that this takes care of."""
    gone: dict[int, dict[int, int]] = {}
    rows = plan.removed[plan.removed["what"] == "element"]
    for row, region, element in zip(rows.index.tolist(), rows["region"].tolist(), rows["element"].tolist()):
        gone.setdefault(region, {})[element] = row
    regions, elements = tables["regions"], tables["elements"]
    places = dict(
        zip(regions["region"].tolist(), zip(regions["offset_bytes"].tolist(), regions["size_bytes"].tolist()))
    )
    outer = elements[elements["member"].isna() & elements["region"].isin(list(gone))]
    columns = [outer[name].tolist() for name in ("region", "element", "offset_bytes", "header_bytes", "payload_bytes")]
    tails: list[tuple[int, int]] = []
    packed: list[int] = []
    for region, group in groupby(zip(*columns), key=itemgetter(0)):
        inside, removed = list(group), gone[region]
        offset, size = places[region]
        sizes = [header + payload for *_, header, payload in inside]
        if any(n % 8 for n in sizes) or _HEADER + sum(sizes) != size:
            continue
        at = offset + _HEADER
        for _, element, source, header, payload in inside:
            if element in removed:
                continue
            if source != at:
                moves.append((at, source, header + payload))
            at += header + payload
        patches.append((offset + _SIZE_AT, _U64.pack(at - offset - _HEADER)))
        tails.append((at, offset + size))
        packed += removed.values()
    return np.array(tails, np.int64).reshape(-1, 2), np.array(packed, np.int64)


def _apply(reader: Reader, edits: Edits, at: int, data: memoryview) -> None:
    """Change the piece `data`, which starts at file offset `at`."""
    end = at + len(data)
    first, last = np.searchsorted(edits.stops, at, "right"), np.searchsorted(edits.starts, end, "left")
    trap, zero = bytes([TRAP]), b"\0"
    for begin, stop, value in zip(
        edits.starts[first:last].tolist(), edits.stops[first:last].tolist(), edits.fill[first:last].tolist()
    ):
        begin, stop = max(begin, at), min(stop, end)
        data[begin - at : stop - at] = (trap if value else zero) * (stop - begin)
    for target, source, size in edits.moves:
        begin, stop = max(target, at), min(target + size, end)
        if begin < stop:
            data[begin - at : stop - at] = reader.view(source + begin - target, stop - begin)
    for target, piece in edits.patches:
        for index in range(max(target, at), min(target + len(piece), end)):
            data[index - at] = piece[index - target]


def _holes(edits: Edits) -> Array:
    """Pages that need not be written, as (start, stop) of runs of whole pages, sorted. Shape (n, 2)."""
    is_cpu = edits.fill == TRAP
    begin = -(-(edits.starts + is_cpu) // PAGE) * PAGE  # the first byte of a function stays out
    end = (edits.stops - _BEHIND * is_cpu) // PAGE * PAGE
    found: Array = np.stack([begin, end], axis=1)[begin < end]
    return found


def _between(holes: Array, at: int, end: int) -> Iterator[tuple[int, int]]:
    """What the holes leave of [at, end)."""
    first, last = np.searchsorted(holes[:, 1], at, "right"), np.searchsorted(holes[:, 0], end, "left")
    for begin, stop in holes[first:last].tolist():
        if at < begin:
            yield at, begin
        at = stop
    if at < end:
        yield at, end


def _write_all(file: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(file, data[: PIECE - at % PIECE], at)
        data, at = data[done:], at + done
