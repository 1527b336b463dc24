"""Out of memory in a recorded trace: each `oom` event with its verdict, and which allocators would have served it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from gpubloat.errors import GpubloatError
from gpubloat.memory.allocators import NAMES
from gpubloat.memory.oom import Message, Verdict, diagnose
from gpubloat.memory.replay import replay
from gpubloat.run import Run, RunWriter
from gpubloat.tables.memory import TABLES

# What could be set instead. Allocators that this version does not model are left out.
CANDIDATES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("expandable", {}),
    ("stitching", {}),
    ("caching", {"max_split_size_mb": 128}),
    ("caching", {"max_split_size_mb": 512}),
)
_SIGN = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_FIRST_ADDRESS = (1 << 57) - (1 << 40)  # above what any device uses


def of_trace(run: Run, limit_bytes: int | None = None) -> dict[tuple[int, int], Verdict]:
    """The verdict on each `oom` event of a trace, by (device, event).

    `limit_bytes` : what the allocator was allowed to take (set_per_process_memory_fraction), which no trace records.
    Free bytes are what the driver said then; those that PyTorch held unused are counted back from the snapshot at the
    end of the trace, private pools left out as in PyTorch's own message.
    """
    events = run["events"]
    found = {}
    for device, number, size, free in events.loc[
        events["action"] == "oom", ["device", "event", "size_bytes", "address"]
    ].itertuples(index=False):
        reserved, active = _held(run, int(device), int(number))
        message = Message(
            backend="CUDA", gpu=int(device), request_bytes=int(size), capacity_bytes=None, free_bytes=int(free),
            allocated_bytes=active, unallocated_bytes=None if reserved is None else max(reserved - (active or 0), 0),
            reserved_bytes=reserved, private_bytes=None, process_bytes=None, other_processes_bytes=None,
            allowed_bytes=limit_bytes,
        )  # fmt: skip
        found[int(device), int(number)] = diagnose(message)
    return found


def _held(run: Run, device: int, event: int) -> tuple[int | None, int | None]:
    """Bytes reserved and active in the default pool after an event, counted back from the end; None if unknown."""
    segments, blocks, events = (run[name][run[name]["device"] == device] for name in ("segments", "blocks", "events"))
    if not len(segments):
        return None, None
    mine = segments[segments["pool"] == "0.0"]
    held = blocks[blocks["segment"].isin(mine["segment"]) & (blocks["state"] != "inactive")]
    later = events[(events["event"] > event) & (events["pool"] == "0.0")]
    sizes = later["size_bytes"].to_numpy(np.int64)
    reserved = int(mine["size_bytes"].sum()) - int((later["action"].map(_SIGN).fillna(0).to_numpy() * sizes).sum())
    rounded = -(-np.maximum(sizes, 1) // 512) * 512
    sign = later["action"].map({"alloc": 1, "free_completed": -1}).fillna(0).to_numpy()
    active = int(held["size_bytes"].sum()) - int((sign * rounded).sum())
    return max(reserved, 0), min(max(active, 0), max(reserved, 0))


def would_have_helped(
    run: Run,
    device: int,
    event: int,
    candidates: tuple[tuple[str, dict[str, Any]], ...] = CANDIDATES,
    limit_bytes: int | None = None,
) -> pd.DataFrame:
    """Replay a trace with the failed request in it, under other allocators and with the memory that there was.

    Parameters
    ----------
    run : what `load` gives. device, event : of the `oom` event.
    candidates : allocators with settings. limit_bytes : as in `of_trace`.

    Returns
    -------
    allocator, settings, is_served (the request got memory, and everything before it did), reserved_bytes after it,
    limit_bytes (held by PyTorch at that time, and free), spare_bytes (limit less reserved: by how much it helped;
    empty if it did not). Best first. GpubloatError if there is no such event, or no segments to count from.
    """
    events = run["events"]
    here = (events["device"] == device) & (events["event"] == event) & (events["action"] == "oom")
    if not here.any():
        raise GpubloatError(f"event {event} of GPU {device} is no out-of-memory event")
    reserved, _ = _held_everywhere(run, device, event)
    limit = reserved + int(events.loc[here, "address"].iloc[0])
    if limit_bytes is not None:
        limit = min(limit, limit_bytes)
    edited = _with_request(run, device, event)
    rows = []
    for name, settings in candidates:
        if name not in NAMES:
            continue
        played = replay(edited, name, limit_bytes=limit, **settings)
        usage, row = (played[t][played[t]["device"] == device] for t in ("usage", "replays"))
        failed = row["oom_event"].iloc[0]
        is_served = bool(pd.isna(failed) or failed > event)
        after = int(usage.loc[usage["event"] == event, "reserved_bytes"].iloc[0])
        rows.append((name, row["settings"].iloc[0], is_served, after, limit, limit - after if is_served else None))
    columns = ["allocator", "settings", "is_served", "reserved_bytes", "limit_bytes", "spare_bytes"]
    table = pd.DataFrame(rows, columns=columns).astype({"spare_bytes": "Int64"})
    return table.sort_values("spare_bytes", ascending=False, na_position="last", kind="stable").reset_index(drop=True)


def _held_everywhere(run: Run, device: int, event: int) -> tuple[int, int]:
    """Bytes reserved after an event in all pools, and the number of segment events that came later."""
    segments, events = (run[name][run[name]["device"] == device] for name in ("segments", "events"))
    if not len(segments):
        raise GpubloatError("the trace has no segments: how much was held is not known", "give a snapshot of PyTorch")
    later = events[(events["event"] > event) & events["action"].isin(list(_SIGN))]
    change = (later["action"].map(_SIGN).to_numpy(np.int64) * later["size_bytes"].to_numpy(np.int64)).sum()
    return max(int(segments["size_bytes"].sum()) - int(change), 0), len(later)


def _with_request(run: Run, device: int, event: int) -> Run:
    """The same trace, in which the request of the `oom` event is an allocation like any other."""
    events = run["events"].copy()
    here = (events["device"] == device) & (events["event"] == event)
    events.loc[here, "action"] = "alloc"
    events.loc[here, "address"] = np.uint64(_FIRST_ADDRESS)
    with RunWriter("memory", list(TABLES), None, False) as writer:
        for name in TABLES:
            writer.append(name, events if name == "events" else run[name])
        return writer.finish({key: value for key, value in run.provenance.items() if key != "tables"})
