"""Any trace through any model of an allocator: addresses, bytes over time, driver calls, and where memory ends."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from gpubloat.errors import GpubloatError
from gpubloat.memory.allocators import Allocator, Caching, Driver, Expandable, choose, make
from gpubloat.memory.allocators.settings import Settings, number
from gpubloat.memory.start import Start, infer
from gpubloat.memory.trace import Trace, opened, traces
from gpubloat.run import Run, RunWriter, provenance

NAMES = ("usage", "allocations", "calls", "replays")
Held = dict[int, tuple[int, int]]  # recorded address -> the model's address, requested bytes
METHOD = {
    "replay": "each alloc and free_completed of the trace in its order, on the recorded stream and in its pool",
    "start": "recorded: from the state worked out backwards from the snapshot; packed: blocks that were held before "
    "the trace are allocated first, by address; auto: recorded for the allocator that made the trace, else packed",
    "oom": "an allocation that finds no memory is left out, and so is its free",
}


@dataclass(slots=True)
class Played:
    """What a replay gives. Bytes are those before the first event, and after each event of `at`."""

    at: list[int]  # events that are an alloc or free_completed
    reserved: list[int]
    active: list[int]
    requested: list[int]
    addresses: list[int]  # per allocation; -1 where there was no memory
    oom: list[int]  # events of those


def replay(
    trace: Run | str | os.PathLike[str],
    allocator: str = "caching",
    *,
    limit_bytes: int | None = None,
    start: str = "auto",
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    **settings: Any,
) -> Run:
    """Replay a trace through the model of an allocator.

    Parameters
    ----------
    trace : a Run of `load`, its folder, or a file that `load` reads.
    allocator : ``native``, ``caching``, ``expandable``.
    limit_bytes : memory of the device; default, no limit. Each GPU of the trace has as much.
    start : ``recorded``, ``packed`` or ``auto``: what the allocator holds before the first event; see METHOD.
    out, force : as in `load`.
    settings : ``max_split_size_mb``, ``roundup_power2_divisions``, ``garbage_collection_threshold``,
        ``large_segment_size_mb``, ``max_non_split_rounding_mb``. Without any, those of the trace.

    Returns
    -------
    Run with usage, allocations, calls, replays (one row per GPU).

    Raises
    ------
    GpubloatError : unknown allocator or setting, or a trace without events.
    """
    name, chosen = choose(allocator, settings)
    if start not in ("auto", "recorded", "packed"):
        raise GpubloatError(f"no start {start!r}", "known: auto, recorded, packed")
    limit = None if limit_bytes is None else int(number("limit_bytes", limit_bytes))
    if limit is not None and limit < 0:
        raise GpubloatError(f"limit_bytes={limit}: less than nothing")
    run = opened(trace)
    rows = []
    with RunWriter("memory", list(NAMES), out, force) as writer:
        for one in traces(run):
            if not settings and name != "native" and one.settings.expandable_segments == chosen.expandable_segments:
                chosen = one.settings
            model = make(name, Driver(limit), chosen)
            before = begin(one)
            same = name != "native" and chosen == one.settings
            if start == "recorded" or (start == "auto" and same and before.segments + before.ranges):
                if not isinstance(model, Caching):
                    raise GpubloatError("native cannot start from the recorded segments", "use start='packed'")
                held = adopt(model, before)
            else:
                held = pack(model, before)
            played = play(one, model, held)
            for table, frame in _tables(one, model, played).items():
                writer.append(table, frame)
            rows.append(_row(one, model, chosen if name != "native" else Settings(), before, played))
        writer.append("replays", pd.DataFrame(rows))
        record = provenance("gpubloat.memory.replay", METHOD, run.provenance.get("inputs", []))
        return writer.finish(record | {"empty": {"calls": "the allocator needed no call to the driver"}})


def begin(trace: Trace) -> Start:
    """The state before the first event of a trace, by its own allocator's rules."""
    return infer(trace, Caching(Driver(), trace.settings).round)


def adopt(model: Caching, before: Start) -> Held:
    """Give a model the recorded segments; blocks stay at their addresses."""
    for segment in before.segments:
        model.adopt(segment)
    for start, parts in before.ranges:
        if isinstance(model, Expandable):
            model.adopt_range(start, parts)
        else:
            for part in parts:
                model.adopt(part)
    blocks = model.blocks
    return {a: (a, size) for a, (_, size) in before.held.items() if a in blocks and not blocks[a].is_free}


def pack(model: Allocator, before: Start) -> Held:
    """Allocate what was held before the trace, by address; the driver's record of calls begins after that."""
    held = {}
    for address in sorted(before.held):
        size = before.held[address][1]
        placed = model.malloc(size, *before.streams[address])
        if placed is not None:
            held[address] = (placed, size)
    model.driver.calls.clear()
    return held


def play(trace: Trace, model: Allocator, held: Held) -> Played:
    """Run the events through the model, which holds `held` already. About half a million events a second."""
    at = [i for i, action in enumerate(trace.actions) if action == "alloc" or action == "free_completed"]
    requested = sum(size for _, size in held.values())
    driver, malloc, free = model.driver, model.malloc, model.free
    played = Played(at, [driver.used], [model.active], [requested], [], [])
    reserved, active, asked = played.reserved.append, played.active.append, played.requested.append
    actions, addresses, sizes, streams, pools = trace.actions, trace.addresses, trace.sizes, trace.streams, trace.pools
    for event in at:
        address = addresses[event]
        driver.event = event
        if address in held:  # before an alloc: its free is not in the trace
            placed, size = held.pop(address)
            free(placed)
            requested -= size
        if actions[event] == "alloc":
            size = sizes[event]
            found = malloc(size, streams[event], pools[event])
            if found is None:
                played.oom.append(event)
                played.addresses.append(-1)
            else:
                held[address] = (found, size)
                requested += size
                played.addresses.append(found)
        reserved(driver.used)
        active(model.active)
        asked(requested)
    return played


def _tables(trace: Trace, model: Allocator, played: Played) -> dict[str, pd.DataFrame]:
    n = len(trace.actions)
    row = np.searchsorted(np.array(played.at, np.int64), np.arange(n), "right")
    reserved, active, requested = (
        np.array(values, np.int64)[row] for values in (played.reserved, played.active, played.requested)
    )
    usage = pd.DataFrame(
        {
            "device": trace.device,
            "event": np.arange(n),
            "reserved_bytes": reserved,
            "active_bytes": active,
            "free_bytes": reserved - active,
            "requested_bytes": requested,
        }
    )
    calls = pd.DataFrame(model.driver.calls, columns=["event", "call", "address", "size_bytes", "n_handles"])
    calls.insert(0, "device", trace.device)
    return {"usage": usage, "allocations": allocations(trace, played.addresses), "calls": calls}


def allocations(trace: Trace, replayed: list[int]) -> pd.DataFrame:
    """The table allocations; -1 in `replayed` stands for no memory."""
    chosen = [i for i, action in enumerate(trace.actions) if action == "alloc"]
    return pd.DataFrame(
        {
            "device": trace.device,
            "event": np.array(chosen, np.int64),
            "size_bytes": np.array([trace.sizes[i] for i in chosen], np.uint64),
            "address": np.array([trace.addresses[i] for i in chosen], np.uint64),
            "replayed": pd.array([None if a < 0 else a for a in replayed], dtype="UInt64"),
        }
    )


def _row(trace: Trace, model: Allocator, settings: Settings, before: Start, played: Played) -> dict[str, Any]:
    reserved, active = max(played.reserved), max(played.active)
    return {
        "device": trace.device,
        "allocator": model.name,
        "settings": settings.changed(),
        "limit_bytes": model.driver.limit,
        "n_events": len(trace.actions),
        "n_allocations": len(played.addresses),
        "n_preexisting": len(before.held),
        "n_calls": sum(call[1] != "reserve" for call in model.driver.calls),
        "n_oom": len(played.oom),
        "oom_event": played.oom[0] if played.oom else None,
        "peak_reserved_bytes": reserved,
        "peak_active_bytes": active,
        "peak_requested_bytes": max(played.requested),
        "utilisation_frac": active / reserved if reserved else None,
    }
