"""Tables of `memory` -> fragmentation over time, peaks, live bytes by call stack.

Utilisation is active over reserved bytes and fragmentation is 1 less that, here and in the GMLake paper; always both.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from gpubloat.errors import GpubloatError
from gpubloat.tables.memory import Usage

SMALL_SEGMENT = 2 << 20  # of blocks up to 1 MiB
GRAIN = 512  # bytes that PyTorch rounds a request up to
HELD = ("active_allocated", "active_pending_free", "unknown")
RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
LIVE = ["device", "address", "event", "time_us", "size_bytes", "stack"]


def history(events: pd.DataFrame, segments: pd.DataFrame, blocks: pd.DataFrame) -> pd.DataFrame:
    """Bytes after each event as the recording allocator had them, worked out backwards from the snapshot at the end.

    Parameters
    ----------
    events, segments, blocks : tables of `gpubloat.memory.load`. Without segments (a log of RMM) there is nothing to
        count back from: the bytes begin at zero.

    Returns
    -------
    Table `usage`, one row per event. `reserved_bytes` is exact. `active_bytes` rounds requests up to 512 bytes; what
    a block keeps beyond that is known, and counted, only where the snapshot still has the block.
    """
    tables = [_history(device, *_of(device, events, segments, blocks)) for device in sorted(events["device"].unique())]
    return Usage.check(pd.concat(tables, ignore_index=True), "usage") if tables else Usage.none()


def _of(device: int, *tables: pd.DataFrame) -> list[pd.DataFrame]:
    return [table[table["device"] == device] for table in tables]


def _history(device: int, events: pd.DataFrame, segments: pd.DataFrame, blocks: pd.DataFrame) -> pd.DataFrame:
    action = events["action"]
    size = events["size_bytes"].to_numpy(np.int64)
    held = blocks[blocks["state"].isin(HELD)]
    real = -(-np.maximum(size, 1) // GRAIN) * GRAIN
    last = events.loc[action == "alloc", "address"].drop_duplicates(keep="last")
    known = last.map(held.drop_duplicates("address").set_index("address")["size_bytes"]).dropna()
    real[events.index.get_indexer(known.index)] = known.to_numpy(np.int64)
    sign = action.map({"alloc": 1, "free_completed": -1}).fillna(0).to_numpy(np.int64)
    steps = {
        "reserved_bytes": (action.map(RESERVES).fillna(0).to_numpy(np.int64) * size, segments["size_bytes"].sum()),
        "active_bytes": (sign * real, held["size_bytes"].sum()),
        "requested_bytes": (sign * size, held["requested_bytes"].sum()),
    }
    found = {name: _anchored(step, int(end) if len(segments) else None) for name, (step, end) in steps.items()}
    if not len(segments):  # a log of a memory resource: nothing is kept back
        found["reserved_bytes"] = found["active_bytes"] = found["requested_bytes"]
    found["active_bytes"] = np.minimum(found["active_bytes"], found["reserved_bytes"])
    found["requested_bytes"] = np.minimum(found["requested_bytes"], found["active_bytes"])
    free = found["reserved_bytes"] - found["active_bytes"]
    return pd.DataFrame({"device": device, "event": events["event"].to_numpy(), **found, "free_bytes": free})


def _anchored(step: np.ndarray, end: int | None) -> np.ndarray:
    """Running sum that ends at `end`, or starts at 0. Never negative: a trace that is at odds with its end counts 0."""
    total = np.cumsum(step)
    if end is not None and len(total):
        total += end - total[-1]
    counted: np.ndarray = np.maximum(total, 0)
    return counted


def fragmentation(usage: pd.DataFrame) -> pd.DataFrame:
    """`usage` (of a replay, or of `history`) with utilisation_frac and fragmentation_frac; both empty at 0 reserved."""
    reserved = usage["reserved_bytes"].astype(float)
    utilisation = usage["active_bytes"].astype(float) / reserved.where(reserved > 0)
    return usage.assign(utilisation_frac=utilisation, fragmentation_frac=1 - utilisation)


def peaks(usage: pd.DataFrame) -> pd.DataFrame:
    """The peak of reserved bytes and of active bytes, one row per device.

    Columns: device, n_events, peak_reserved_event (the first), peak_reserved_bytes, active_at_peak_bytes (at that
    event), utilisation_at_peak_frac, peak_active_event, peak_active_bytes, peak_requested_bytes, utilisation_frac
    (peak active over peak reserved: the paper's number), fragmentation_frac, and end_reserved_bytes,
    end_active_bytes, end_fragmentation_frac after the last event.
    """
    rows = []
    for device, table in usage.groupby("device", sort=True):
        top = table.iloc[int(table["reserved_bytes"].to_numpy(np.uint64).argmax())]
        active = table.iloc[int(table["active_bytes"].to_numpy(np.uint64).argmax())]
        end = table.iloc[-1]
        reserved, most = int(top["reserved_bytes"]), int(active["active_bytes"])
        at_peak = _share(int(top["active_bytes"]), reserved)
        rows.append(
            {
                "device": device,
                "n_events": len(table),
                "peak_reserved_event": int(top["event"]),
                "peak_reserved_bytes": reserved,
                "active_at_peak_bytes": int(top["active_bytes"]),
                "utilisation_at_peak_frac": at_peak,
                "peak_active_event": int(active["event"]),
                "peak_active_bytes": most,
                "peak_requested_bytes": int(table["requested_bytes"].max()),
                "utilisation_frac": _share(most, reserved),
                "fragmentation_frac": 1 - _share(most, reserved),
                "end_reserved_bytes": int(end["reserved_bytes"]),
                "end_active_bytes": int(end["active_bytes"]),
                "end_fragmentation_frac": 1 - _share(int(end["active_bytes"]), int(end["reserved_bytes"])),
            }
        )
    return pd.DataFrame(rows)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")


def now(segments: pd.DataFrame) -> pd.DataFrame:
    """The state at the end by device: reserved, active, free bytes and both fractions; needs no history."""
    names = {"reserved_bytes": "size_bytes", "active_bytes": "active_bytes", "free_bytes": "free_bytes"}
    parts = {new: segments.groupby("device")[old].sum() for new, old in names.items()}
    table = pd.DataFrame(parts | {"n_segments": segments.groupby("device").size()})
    return fragmentation(table.reset_index().assign(**{n: table[n].astype("uint64").to_numpy() for n in names}))


def live(events: pd.DataFrame, blocks: pd.DataFrame, event: Mapping[int, int] | None = None) -> pd.DataFrame:
    """Blocks that were held after one event: what the peak was made of.

    Parameters
    ----------
    events, blocks : as in `history`.
    event : by device, the event after which to look; default, the end of the trace.

    Returns
    -------
    One row per block: device, address, event (of its allocation; empty before the trace), time_us, size_bytes
    (requested), stack (of the allocation; empty if unknown).
    """
    found = []
    for device in sorted({*events["device"], *blocks["device"]}):
        mine, held = _of(device, events, blocks)
        mine = mine[mine["action"].isin(["alloc", "free_completed"])]
        until = mine["event"] <= (np.inf if event is None else event.get(device, np.inf))
        before = mine[until].drop_duplicates("address", keep="last")
        after = mine[~until].drop_duplicates("address")
        found.append(before[before["action"] == "alloc"])
        # Held all along: freed later, or there at the end, with no event about it until then.
        old = after[(after["action"] == "free_completed") & ~after["address"].isin(before["address"])]
        found.append(old.assign(event=None, time_us=None, stack=None))
        rest = held[held["state"].isin(HELD) & ~held["address"].isin(mine["address"])]
        found.append(rest.assign(event=None, time_us=None, size_bytes=rest["requested_bytes"]))
    table = pd.concat([f[LIVE] for f in found], ignore_index=True) if found else pd.DataFrame(columns=LIVE)
    kinds = {"event": "Int64", "time_us": "Int64", "stack": "Int64", "size_bytes": "uint64", "address": "uint64"}
    return table.astype(kinds)


def rewound(
    events: pd.DataFrame, segments: pd.DataFrame, blocks: pd.DataFrame, event: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Segments and blocks of one GPU after an earlier event, for `pinning` and the address map of that moment.

    Parameters
    ----------
    events, segments, blocks : as in `history`, of one GPU.
    event : after which to look.

    Returns
    -------
    Both tables with the columns that `analysis.pinning` reads. Held blocks have their requests rounded up to 512
    bytes: what a block kept beyond that is known only of those that are still there at the end, and counts as free.

    Raises
    ------
    GpubloatError : segments that grow or shrink (expandable segments) after the event, or a trace of several GPUs.
    """
    if events["device"].nunique() > 1:
        raise GpubloatError("the trace of several GPUs cannot be wound back at once", "choose the rows of one device")
    later = events[events["event"] > event]
    if later["action"].isin(["segment_map", "segment_unmap"]).any():
        raise GpubloatError("expandable segments cannot be wound back", "look at the end of the trace instead")
    names = ["device", "address", "stream", "pool", "size_bytes", "kind", "is_expandable"]
    there = {row["address"]: row for row in segments[names].to_dict("records")}
    for row in later[later["action"].isin(["segment_alloc", "segment_free"])].iloc[::-1].to_dict("records"):
        if row["action"] == "segment_alloc":
            there.pop(row["address"], None)
        else:
            kind = "small" if row["size_bytes"] == SMALL_SEGMENT else "large"
            there[row["address"]] = {**row, "kind": kind, "is_expandable": False}
    table = pd.DataFrame([there[address] for address in sorted(there)], columns=names)
    table.insert(1, "segment", np.arange(len(table)))
    held = live(events, blocks, dict.fromkeys(events["device"].unique(), event)).sort_values("address")
    at, asked = (held[name].to_numpy("uint64").astype(np.int64) for name in ("address", "size_bytes"))
    # Blocks that nothing was allocated in place of: they are there at the end with their real size, or are not.
    last = events.loc[events["action"] == "alloc"].drop_duplicates("address", keep="last").set_index("address")["event"]
    is_last = held["event"].astype("Int64").fillna(-1) == held["address"].map(last).astype("Int64").fillna(-1)
    real = blocks[blocks["state"].isin(HELD)].drop_duplicates("address").set_index("address")["size_bytes"]
    rounded = pd.Series(-(-np.maximum(asked, 1) // GRAIN) * GRAIN, held.index)
    size = held["address"].map(real).astype("Int64").where(is_last).fillna(rounded).to_numpy(np.int64)
    rows = []
    for number, low, length in table[["segment", "address", "size_bytes"]].astype("int64").itertuples(index=False):
        end = low
        for i in np.flatnonzero((at >= low) & (at < low + length)):
            if at[i] > end:
                rows.append((number, end, at[i] - end, 0, "inactive", None))
            rows.append((number, at[i], size[i], asked[i], "active_allocated", held["stack"].iloc[i]))
            end = at[i] + size[i]
        if end < low + length:
            rows.append((number, end, low + length - end, 0, "inactive", None))
    columns = ["segment", "address", "size_bytes", "requested_bytes", "state", "stack"]
    found = pd.DataFrame(rows, columns=columns)
    found.insert(0, "device", table["device"].iloc[0] if len(table) else 0)
    found.insert(2, "block", np.arange(len(found)))
    kinds = {"address": "uint64", "size_bytes": "uint64", "requested_bytes": "uint64", "stack": "Int64"}
    return table.astype({"address": "uint64", "size_bytes": "uint64"}), found.astype(kinds)
