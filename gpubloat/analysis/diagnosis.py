"""A snapshot in a few tables: the state at its end, its peaks, what pins its segments, what the peak was made of."""

from __future__ import annotations

import pandas as pd

from gpubloat.analysis import memory, pinning, stacks

TITLES = {
    "now": "memory at the end",
    "peaks": "peaks of the recorded history",
    "pinned": "reserved = held + pinned + releasable + unattributed",
    "owners": "who pins free memory (unlocked: what their end alone would give back)",
    "blocks": "blocks that pin most",
    "live": "what the peak was made of",
}


def tables(
    events: pd.DataFrame, segments: pd.DataFrame, blocks: pd.DataFrame, calls: pd.DataFrame, frames: pd.DataFrame
) -> dict[str, pd.DataFrame]:
    """By the names of `TITLES`, from the tables events, segments, blocks, stacks and frames of `memory.load`."""
    blocks = stacks.of_blocks(events, blocks)
    peaks = memory.peaks(memory.history(events, segments, blocks))
    at = dict(zip(peaks["device"], peaks["peak_active_event"])) if len(peaks) else {}
    live = memory.live(events, blocks, at)
    return {
        "now": memory.now(segments),
        "peaks": peaks,
        "pinned": pinning.totals(pinning.by_segment(segments, blocks)),
        "owners": pinning.by_owner(segments, blocks, calls, frames, by="place"),
        "blocks": pinning.by_block(events, segments, blocks, calls, frames),
        "live": stacks.by_stack(live, calls, frames, by="place"),
    }
