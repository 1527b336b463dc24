"""What no allocator can do with less: the bytes alive at one moment, in chunks, and laid out once for all."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pandas as pd

from gpubloat.memory.allocators.pieces import CHUNK
from gpubloat.memory.allocators.small import LARGE
from gpubloat.memory.replay import begin
from gpubloat.memory.start import Start
from gpubloat.memory.trace import Trace, opened, traces
from gpubloat.run import Run, RunWriter, provenance

MOST_BLOCKS = 50_000  # beyond, packing would take minutes: its time grows with the square
METHOD = {
    "live": "most requested bytes alive at one moment: what an allocator that moves blocks, byte by byte, would need",
    "chunks": "the same with blocks of 2 MiB or more in whole chunks of 2 MiB, smaller ones in multiples of 512 bytes, "
    "their sum in whole chunks: what stitching of such chunks would need",
    "packing": "height of one layout of all lifetimes where no block moves; found block by block, each in the smallest "
    "gap that fits among those alive with it, with the largest first, the longest-lived first, or the largest area "
    "first, whichever is lowest: not below the least height, and exact where it meets `live`",
}
Ints = np.ndarray[Any, np.dtype[np.int64]]


def bounds(
    trace: Run | str | os.PathLike[str], *, out: str | os.PathLike[str] | None = None, force: bool = False
) -> Run:
    """Bounds of the memory that each GPU's trace needs, however it is allocated.

    Parameters
    ----------
    trace : a Run of `load`, its folder, or a file that `load` reads.
    out, force : as in `load`.

    Returns
    -------
    Run with bounds: per GPU, live, chunks and packing; see METHOD. GpubloatError where the trace has no events.
    """
    run = opened(trace)
    with RunWriter("memory", ["bounds"], out, force) as writer:
        for one in traces(run):
            writer.append("bounds", of_trace(one))
        return writer.finish(provenance("gpubloat.memory.bounds", METHOD, run.provenance.get("inputs", [])))


def of_trace(trace: Trace) -> pd.DataFrame:
    """The table bounds of one GPU."""
    lower, upper, size = lifetimes(trace, begin(trace))
    live, live_event = peak(lower, upper, size)
    large = -(-size // 512) * 512 >= LARGE
    rounded = np.where(large, -(-size // CHUNK) * CHUNK, np.maximum(-(-size // 512), 1) * 512)
    chunks, chunk_event = peak(lower, upper, rounded)
    height = pack(lower, upper, size) if len(size) <= MOST_BLOCKS else None
    return pd.DataFrame(
        {
            "device": trace.device,
            "bound": ["live", "chunks", "packing"],
            "peak_reserved_bytes": pd.array([live, -(-chunks // CHUNK) * CHUNK, height], dtype="UInt64"),
            "side": ["lower", "lower", "exact" if height == live else "upper"],
            "event": pd.array([live_event, chunk_event, None], dtype="Int64"),
            "n_blocks": len(size),
        }
    )


def lifetimes(trace: Trace, before: Start) -> tuple[Ints, Ints, Ints]:
    """Of each block: its first event (-1: before the trace), the event that it is gone with, its requested bytes.

    As in a replay: what is not freed lives to the end, and an allocation where a block lives ends that block.
    """
    lower: list[int] = []
    upper: list[int] = []
    size: list[int] = []
    live: dict[int, int] = {}
    for address in sorted(before.held):
        live[address] = len(lower)
        lower.append(-1)
        size.append(before.held[address][1])
    end = len(trace.actions)
    upper = [end] * len(lower)
    for event, (action, address, asked) in enumerate(zip(trace.actions, trace.addresses, trace.sizes)):
        if action not in ("alloc", "free_completed"):
            continue
        if address in live:
            upper[live.pop(address)] = event
        if action == "alloc":
            live[address] = len(lower)
            lower.append(event)
            upper.append(end)
            size.append(asked)
    most = np.iinfo(np.int64).max
    return tuple(np.array([min(v, most) for v in column], np.int64) for column in (lower, upper, size))  # type: ignore[return-value]


def peak(lower: Ints, upper: Ints, size: Ints) -> tuple[int, int | None]:
    """Most bytes alive at once, and the event after which they are; None before the first."""
    events = np.concatenate([lower, upper])
    change = np.concatenate([size, -size])
    when, at = np.unique(events, return_inverse=True)
    if not len(when):
        return 0, None
    total = np.zeros(len(when), np.int64)
    np.add.at(total, at, change)
    alive = np.cumsum(total)
    best = int(alive.argmax())
    return int(alive[best]), int(when[best]) if when[best] >= 0 else None


def pack(lower: Ints, upper: Ints, size: Ints) -> int:
    """Height of the lowest of three greedy layouts; blocks live in [lower, upper) and never move."""
    chosen = (size > 0) & (upper > lower)
    lower, upper, size = lower[chosen], upper[chosen], size[chosen]
    least = peak(lower, upper, size)[0]
    height: int | None = None
    for weight in (size, upper - lower, size.astype(np.float64) * (upper - lower)):
        order = np.lexsort((lower, -size, -weight))
        found = _layout(lower[order], upper[order], size[order])
        height = found if height is None else min(height, found)
        if height == least:
            break
    return height or 0


def _layout(lower: Ints, upper: Ints, size: Ints) -> int:
    """Lay the blocks one after the other, each into the smallest gap that fits, else on top."""
    n = len(size)
    start, end = np.zeros(n, np.int64), np.zeros(n, np.int64)  # in bytes, by the order of `start`
    first, last = np.zeros(n, np.int64), np.zeros(n, np.int64)  # lifetimes of those
    height = 0
    for i in range(n):
        alive = np.flatnonzero((first[:i] < upper[i]) & (last[:i] > lower[i]))
        top = np.maximum.accumulate(end[alive])
        floor = np.concatenate([[0], top])
        gap = start[alive] - floor[:-1]
        fits = np.flatnonzero(gap >= size[i])
        at = int(floor[fits[gap[fits].argmin()]]) if len(fits) else int(floor[-1])
        where = int(np.searchsorted(start[:i], at))
        for column, value in ((start, at), (end, at + size[i]), (first, lower[i]), (last, upper[i])):
            column[where + 1 : i + 1] = column[where:i]
            column[where] = value
        height = max(height, at + int(size[i]))
    return height
