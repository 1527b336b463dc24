"""Which held blocks keep which free bytes from going back to the driver, and whose they are.

A segment goes back only as a whole, and only if nothing in it is held; of an expandable segment, each page goes back
that has nothing held in it. So, per segment and in sum: reserved = held + pinned + releasable + unattributed.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from gpubloat.analysis.memory import HELD, live
from gpubloat.analysis.stacks import with_places

PAGE = 2 << 20  # of expandable segments with small blocks
LARGE_PAGE = 20 << 20  # of those with large ones, unless large_segment_size_mb says otherwise
KEYS = ("block", "stack", "place")


def by_segment(segments: pd.DataFrame, blocks: pd.DataFrame, *, large_page_bytes: int = LARGE_PAGE) -> pd.DataFrame:
    """What keeps each segment, at the end of the trace. `segments`, `blocks`: tables of `gpubloat.memory.load`.

    Returns
    -------
    One row per segment: device, segment, address, kind, stream, pool, is_expandable, size_bytes, held_bytes,
    pinned_bytes (free, and not releasable), releasable_bytes, unattributed_bytes, largest_free_bytes, n_held, n_free.
    Free bytes of a private pool count as pinned: they go back when the owner of the pool goes, not before.
    """
    names = ["device", "segment", "address", "kind", "stream", "pool", "is_expandable", "size_bytes"]
    table = segments[names].reset_index(drop=True)
    is_held = blocks["state"].isin(HELD)
    key = ["device", "segment"]
    sizes = blocks.assign(size_bytes=blocks["size_bytes"].astype("int64"))
    parts = {
        "held_bytes": sizes[is_held].groupby(key)["size_bytes"].sum(),
        "free_bytes": sizes[~is_held].groupby(key)["size_bytes"].sum(),
        "largest_free_bytes": sizes[~is_held].groupby(key)["size_bytes"].max(),
        "n_held": sizes[is_held].groupby(key).size(),
        "n_free": sizes[~is_held].groupby(key).size(),
    }
    at = pd.MultiIndex.from_frame(table[key])
    found = {name: part.reindex(at).fillna(0).to_numpy("int64") for name, part in parts.items()}
    units, touching = _units(table, blocks[is_held], large_page_bytes)
    idle = units[~units["unit"].isin(touching["unit"]) & ~units["is_private"]]
    gone = idle.groupby(key)["unit_bytes"].sum().reindex(at).fillna(0).to_numpy("int64")
    releasable = np.minimum(gone, found["free_bytes"])
    size = table["size_bytes"].to_numpy("int64")
    return table.assign(
        size_bytes=size,
        held_bytes=found["held_bytes"],
        pinned_bytes=found["free_bytes"] - releasable,
        releasable_bytes=releasable,
        unattributed_bytes=size - found["held_bytes"] - found["free_bytes"],
        largest_free_bytes=found["largest_free_bytes"],
        n_held=found["n_held"],
        n_free=found["n_free"],
    )


def totals(pinned: pd.DataFrame) -> pd.DataFrame:
    """Sums of `by_segment` by device: reserved_bytes = held + pinned + releasable + unattributed; n_segments."""
    groups = pinned.groupby("device", as_index=False)
    return groups.agg(
        reserved_bytes=("size_bytes", "sum"),
        held_bytes=("held_bytes", "sum"),
        pinned_bytes=("pinned_bytes", "sum"),
        releasable_bytes=("releasable_bytes", "sum"),
        unattributed_bytes=("unattributed_bytes", "sum"),
        largest_free_bytes=("largest_free_bytes", "max"),
        n_segments=("segment", "size"),
        n_pinned_segments=("pinned_bytes", lambda b: int((b > 0).sum())),
    )


def by_block(
    events: pd.DataFrame,
    segments: pd.DataFrame,
    blocks: pd.DataFrame,
    stacks: pd.DataFrame,
    frames: pd.DataFrame,
    *,
    large_page_bytes: int = LARGE_PAGE,
) -> pd.DataFrame:
    """Held blocks that keep free bytes from going back, those whose end would unlock most first.

    Returns
    -------
    One row per block: device, segment, block, address, size_bytes, age_events and age_us (since its allocation; empty
    where the trace does not hold it), stack, place (innermost user frame), pinned_bytes (free bytes of the segment or
    pages that it lies in; shared with other blocks there), freed_bytes (of the driver, if this block alone were gone).
    """
    table = _pinning(segments, blocks, large_page_bytes, "block")
    born = live(events, blocks)[["device", "address", "event", "time_us"]]
    ends = events.groupby("device").agg(last_event=("event", "max"), last_us=("time_us", "max"))
    table = table.merge(born, on=["device", "address"], how="left").merge(ends, on="device", how="left")
    table["age_events"] = (table["last_event"].astype("Int64") - table["event"].astype("Int64")).astype("Int64")
    table["age_us"] = (table["last_us"].astype("Int64") - table["time_us"].astype("Int64")).astype("Int64")
    columns = ["device", "segment", "block", "address", "size_bytes", "age_events", "age_us", "stack", "place"]
    table = with_places(table, stacks, frames)
    order = table.sort_values(["unlocked_bytes", "pinned_bytes", "size_bytes"], ascending=[False, False, True])
    return order[[*columns, "pinned_bytes", "unlocked_bytes", "freed_bytes"]].reset_index(drop=True)


def by_owner(
    segments: pd.DataFrame,
    blocks: pd.DataFrame,
    stacks: pd.DataFrame,
    frames: pd.DataFrame,
    *,
    by: str = "stack",
    large_page_bytes: int = LARGE_PAGE,
) -> pd.DataFrame:
    """Pinning blocks together by who allocated them: by call stack, or by its innermost user frame (``"place"``).

    Returns
    -------
    device, stack (only by stack), place, n_blocks, n_segments, held_bytes, pinned_bytes (free bytes of the segments or
    pages that they lie in; shared with other owners there), unlocked_bytes (of those, what would go back to the driver
    if all of this owner's blocks were gone), freed_bytes (the same with their own bytes). Most unlocked bytes first.
    """
    named = with_places(blocks, stacks, frames)
    return _pinning(segments, named, large_page_bytes, by)


def _pinning(segments: pd.DataFrame, blocks: pd.DataFrame, large_page: int, by: str) -> pd.DataFrame:
    held = blocks[blocks["state"].isin(HELD)].reset_index(drop=True)
    units, touching = _units(segments, held, large_page)
    # What nobody recorded is one group: it may be several owners, and is none that could be named.
    keys = held.index.to_numpy() if by == "block" else held[by].astype(object).fillna(-1).to_numpy()
    touching = touching.assign(key=keys[touching["row"]])
    used = touching.groupby("unit")["bytes"].sum()
    units = units.assign(free_bytes=units["unit_bytes"] - units["unit"].map(used).fillna(0).astype("int64"))
    pairs = touching.drop_duplicates(["unit", "key"]).merge(units, on="unit")
    alone = ~pairs.duplicated("unit", keep=False) & ~pairs["is_private"]
    pairs["freed_bytes"] = pairs["unit_bytes"].where(alone, 0)
    pairs["unlocked_bytes"] = pairs["free_bytes"].where(alone, 0)
    gains = pairs.groupby(["device", "key"]).agg(
        pinned_bytes=("free_bytes", "sum"), unlocked_bytes=("unlocked_bytes", "sum"), freed_bytes=("freed_bytes", "sum")
    )
    held = held.assign(key=keys, size_bytes=held["size_bytes"].astype("int64"))
    if by == "block":
        table = held.merge(gains.reset_index(), on=["device", "key"])
    else:
        names = ["device", "key", "place"] if by == "stack" else ["device", "key"]
        table = held.groupby(names, as_index=False).agg(
            n_blocks=("block", "size"), n_segments=("segment", "nunique"), held_bytes=("size_bytes", "sum")
        )
        table = table.merge(gains.reset_index(), on=["device", "key"])
        if by == "stack":
            stack = pd.to_numeric(table["key"]).astype("Int64")
            table.insert(1, "stack", stack.mask(stack < 0))
        else:
            table.insert(1, "place", table["key"])
        table = table.sort_values(["unlocked_bytes", "pinned_bytes", "held_bytes"], ascending=[False, False, True])
    return table[table["pinned_bytes"] > 0].drop(columns="key").reset_index(drop=True)


def _units(segments: pd.DataFrame, held: pd.DataFrame, large_page: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What can go back on its own (unit, device, segment, unit_bytes, is_private), and which held block (row of
    `held`) has how many bytes in which of them."""
    size = segments["size_bytes"].to_numpy("int64")
    page = np.where(segments["kind"] == "small", PAGE, large_page)
    page = np.where(size % page == 0, page, PAGE)
    page = np.where(segments["is_expandable"].to_numpy(bool), page, np.maximum(size, 1))
    n = np.maximum(-(-size // page), 1)
    first = np.cumsum(n) - n
    which = np.repeat(np.arange(len(segments)), n)
    index = np.arange(len(which)) - first[which] if len(which) else np.array([], int)
    units = pd.DataFrame(
        {
            "unit": np.arange(len(which)),
            "device": segments["device"].to_numpy()[which],
            "segment": segments["segment"].to_numpy()[which],
            "unit_bytes": np.minimum(page[which], size[which] - index * page[which]),
            "is_private": (segments["pool"] != "0.0").to_numpy()[which],
        }
    )
    key = ["device", "segment"]
    at = pd.MultiIndex.from_frame(segments[key]).get_indexer(pd.MultiIndex.from_frame(held[key]))
    start = held["address"].to_numpy("uint64") - segments["address"].to_numpy("uint64")[at]
    start = np.minimum(start, size[at].astype("uint64")).astype("int64")  # a damaged file may name any address
    end = np.minimum(start + held["size_bytes"].to_numpy("int64"), size[at])
    low = np.minimum(start // page[at], n[at] - 1)
    high = np.maximum(np.minimum(-(-end // page[at]), n[at]), low + 1)
    row = np.repeat(np.arange(len(held)), high - low)
    step = np.arange(len(row)) - np.repeat(np.cumsum(high - low) - (high - low), high - low)
    inside = low[row] + step
    begin, stop = inside * page[at][row], (inside + 1) * page[at][row]
    overlap = np.maximum(np.minimum(end[row], stop) - np.maximum(start[row], begin), 0)
    return units, pd.DataFrame({"unit": first[at][row] + inside, "row": row, "bytes": overlap})
