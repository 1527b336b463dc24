"""Any trace through any model of an allocator: addresses, bytes over time, driver calls, and where memory ends."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from gpubloat.errors import GpubloatError
from gpubloat.memory import costs as costs_of
from gpubloat.memory.allocators import Allocator, AnySettings, Caching, Driver, Expandable, choose, lint, make
from gpubloat.memory.allocators.base import EACH
from gpubloat.memory.allocators.settings import NO_LIMIT, Settings, number
from gpubloat.memory.costs import Costs
from gpubloat.memory.start import Start, infer
from gpubloat.memory.trace import Trace, opened, traces
from gpubloat.run import Run, RunWriter, provenance
from gpubloat.tables.memory import CALLS, STEPS

NAMES = ("usage", "allocations", "calls", "replays")
Held = dict[int, tuple[int, int]]  # recorded address -> the model's address, requested bytes
METHOD = {
    "replay": "each alloc and free_completed of the trace in its order, on the recorded stream and in its pool",
    "start": "recorded: from the state worked out backwards from the snapshot; packed: blocks that were held before "
    "the trace are allocated first, by address; auto: recorded for the allocator that made the trace, if it fits into "
    "the limit, else packed",
    "release": "where the trace gives segments or pages back, for empty_cache or because the driver had no more, the "
    "model gives back all that it can; not where the recorded allocator may have given back less (garbage "
    "collection, max_split_size)",
    "oom": "an allocation that finds no memory is left out, and so is its free; blocks from before the trace count as "
    "event 0",
    "driver_s": "the sum of the modelled costs of the calls: what is fixed and what is per handle, by `costs`",
    "stitching": "active bytes of stitching and gmlake count requests in multiples of 512 bytes, as caching does: what "
    "they lose by rounding to chunks is free memory",
}


@dataclass(slots=True)
class Played:
    """What a replay gives. Bytes are those before the first event, and after each event of `at`."""

    at: list[int]  # events that are an alloc or free_completed, or at which everything was released
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
    costs: pd.DataFrame | None = None,
    **settings: Any,
) -> Run:
    """Replay a trace through the model of an allocator.

    Parameters
    ----------
    trace : a Run of `load`, its folder, or a file that `load` reads.
    allocator : ``native``, ``bfc``, ``caching``, ``expandable``, ``stitching`` (GMLake's paper), ``gmlake`` (its code).
    limit_bytes : memory of the device; default, no limit. Each GPU of the trace has as much.
    start : ``recorded``, ``packed`` or ``auto``: what the allocator holds before the first event; see METHOD.
    out, force : as in `load`.
    costs : a table of measured calls, see `gpubloat.memory.costs.fit`; default, `gpubloat.memory.costs.CONSTANTS`.
    settings : of ``caching`` and ``expandable``, PyTorch's names: ``max_split_size_mb``, ``roundup_power2_divisions``,
        ``garbage_collection_threshold``, ``large_segment_size_mb``, ``max_non_split_rounding_mb``; without any, those
        of the trace. ``bfc``: ``allow_growth``, ``fragmentation_fraction``, ``memory_limit_bytes``,
        ``garbage_collection``. ``stitching``: ``chunk_bytes``, ``stitch_min_bytes``, ``stitch_limit_bytes``.
        ``gmlake``: ``fragmentation_limit_mb``, ``reuse_limit``, ``defrag_level``, ``auto_gc_gb``.

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
    known = costs_of.CONSTANTS if costs is None else costs_of.fit(costs)
    make(name, Driver(limit), chosen)  # refuses settings and a limit that do not go together
    run = opened(trace)
    rows = []
    with RunWriter("memory", list(NAMES), out, force) as writer:
        for one in traces(run):
            chosen = _of_trace(one, chosen) if not settings else chosen
            model = make(name, Driver(limit), chosen)
            before = begin(one)
            same = name in ("caching", "expandable") and chosen == one.settings and _fits(before, limit)
            if start == "recorded" or (start == "auto" and same):
                if name not in ("caching", "expandable") or not isinstance(model, Caching):
                    raise GpubloatError(f"{name} cannot start from the recorded segments", "use start='packed'")
                held, n_left_out = adopt(model, before), 0
            else:
                held = pack(model, before)
                n_left_out = len(before.held) - len(held)
            played = play(one, model, held)
            tables = _tables(one, model, played, known)
            for table, frame in tables.items():
                writer.append(table, frame)
            rows.append(_row(one, model, chosen, before, played, n_left_out) | _calls(tables["calls"], model))
        writer.append("replays", pd.DataFrame(rows))
        record = provenance("gpubloat.memory.replay", METHOD, run.provenance.get("inputs", []))
        record |= {"lint": lint(chosen) if isinstance(chosen, Settings) else [], "costs": known.record()}
        record |= {"empty": {"calls": "the allocator needed no call to the driver"}}
        return writer.finish(record)


def _of_trace(trace: Trace, chosen: AnySettings) -> AnySettings:
    """The trace's own settings, if its allocator is the one that was asked for."""
    same = isinstance(chosen, Settings) and trace.settings.expandable_segments == chosen.expandable_segments
    return trace.settings if same else chosen


def _fits(before: Start, limit: int | None) -> bool:
    """Whether there are recorded segments, and they fit into the memory that is asked about."""
    size = sum(segment.size for segment in [*before.segments, *(part for _, parts in before.ranges for part in parts)])
    return size > 0 and (limit is None or size <= limit)


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
    """Run the events through the model, which holds `held` already. More than half a million events a second."""
    releases = _releases(trace)
    at = [i for i, action in enumerate(trace.actions) if action == "alloc" or action == "free_completed"]
    if releases:
        at = sorted([*at, *releases])
    requested = sum(size for _, size in held.values())
    driver, malloc, free = model.driver, model.malloc, model.free
    played = Played(at, [driver.used], [model.active], [requested], [], [])
    reserved, active, asked = played.reserved.append, played.active.append, played.requested.append
    placed = played.addresses.append
    actions, addresses, sizes, streams, pools = trace.actions, trace.addresses, trace.sizes, trace.streams, trace.pools
    for event in at:
        address = addresses[event]
        driver.event = event
        if releases and event in releases:
            model.release()
            address = -1
        old = held.pop(address, None)
        if old is not None:  # before an alloc: its free is not in the trace
            free(old[0])
            requested -= old[1]
        if actions[event] == "alloc":
            size = sizes[event]
            found = malloc(size, streams[event], pools[event])
            if found is None:
                played.oom.append(event)
                placed(-1)
            else:
                held[address] = found, size
                requested += size
                placed(found)
        reserved(driver.used)
        active(model.active)
        asked(requested)
    return played


def _releases(trace: Trace) -> set[int]:
    """Events at which all that was wholly free went back: the first of those that give back between two blocks'."""
    if trace.settings.garbage_collection_threshold or trace.settings.max_split_size != NO_LIMIT:
        return set()
    found, is_first = set(), True
    for event, action in enumerate(trace.actions):
        if action == "segment_free" or action == "segment_unmap":
            if is_first:
                found.add(event)
            is_first = False
        elif action == "alloc" or action == "free_completed":
            is_first = True
    return found


def _tables(trace: Trace, model: Allocator, played: Played, costs: Costs) -> dict[str, pd.DataFrame]:
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
    calls["cost_us"] = costs.of(calls["call"], calls["n_handles"])
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


def _row(
    trace: Trace, model: Allocator, settings: AnySettings, before: Start, played: Played, n_left_out: int
) -> dict[str, Any]:
    reserved, active = max(played.reserved), max(played.active)
    return {
        "device": trace.device,
        "allocator": model.name,
        "settings": settings.changed() if model.name != "native" else "",
        "limit_bytes": model.driver.limit,
        "n_events": len(trace.actions),
        "n_allocations": len(played.addresses),
        "n_preexisting": len(before.held),
        "n_oom": len(played.oom) + n_left_out,
        "oom_event": 0 if n_left_out else played.oom[0] if played.oom else None,
        "peak_reserved_bytes": reserved,
        "peak_active_bytes": active,
        "peak_requested_bytes": max(played.requested),
        "utilisation_frac": active / reserved if reserved else None,
    }


def _calls(calls: pd.DataFrame, model: Allocator) -> dict[str, Any]:
    """The columns of a row of `replays` about the driver, and those that only some models fill."""
    n = calls["n_handles"].where(calls["call"].isin(EACH), 1).groupby(calls["call"]).sum()
    n = n.rename({"set_access_each": "set_access"}).groupby(level=0).sum()
    kinds = [kind for kind in CALLS if kind != "set_access_each"]
    return {
        "n_calls": int(n.sum()),
        **{f"n_{kind}": int(n.get(kind, 0)) for kind in kinds},
        "last_call_event": int(calls["event"].max()) if len(calls) else None,
        "driver_s": float(calls["cost_us"].sum()) / 1e6,
        **{name: model.counts.get(name) for name in STEPS},
    }
