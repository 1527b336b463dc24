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
    events: pd.DataFrame,
    segments: pd.DataFrame,
    blocks: pd.DataFrame,
    calls: pd.DataFrame,
    frames: pd.DataFrame,
    is_at_peak: bool = False,
) -> dict[str, pd.DataFrame]:
    """By the names of `TITLES`, from the tables events, segments, blocks, stacks and frames of `memory.load`.

    `is_at_peak` : pinned, owners and blocks are of the moment at which most was reserved, instead of the end. Raises
    GpubloatError for expandable segments then.
    """
    blocks = stacks.of_blocks(events, blocks)
    peaks = memory.peaks(memory.history(events, segments, blocks))
    at = dict(zip(peaks["device"], peaks["peak_active_event"])) if len(peaks) else {}
    live = memory.live(events, blocks, at)
    now = memory.now(segments)
    if is_at_peak and len(peaks):
        segments, blocks = _at_peaks(events, segments, blocks, peaks)
    return {
        "now": now,
        "peaks": peaks,
        "pinned": pinning.totals(pinning.by_segment(segments, blocks)),
        "owners": pinning.by_owner(segments, blocks, calls, frames, by="place"),
        "blocks": pinning.by_block(events, segments, blocks, calls, frames),
        "live": stacks.by_stack(live, calls, frames, by="place"),
    }


def _at_peaks(
    events: pd.DataFrame, segments: pd.DataFrame, blocks: pd.DataFrame, peaks: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Segments and blocks of each GPU when it had most reserved."""
    parts, n_before = [], 0
    for device, event in zip(peaks["device"], peaks["peak_reserved_event"]):
        mine = (table[table["device"] == device] for table in (events, segments, blocks))
        a, b, c = mine
        for found in (pair := memory.rewound(a, b, c, event)):
            found["segment"] += n_before
        n_before += len(pair[0])
        parts.append(pair)
    return pd.concat([p[0] for p in parts], ignore_index=True), pd.concat([p[1] for p in parts], ignore_index=True)


def summary(tables: dict[str, pd.DataFrame]) -> list[str]:
    """One sentence for each GPU with a history: how much of what was reserved at its peak was ever in use."""
    said: list[str] = []
    if not len(tables["peaks"]):
        return said
    names = ("device", "peak_reserved_bytes", "peak_active_bytes")
    for device, reserved, active in zip(*(tables["peaks"][name].tolist() for name in names)):
        if reserved:
            said.append(
                f"GPU {device}: {reserved / 1e9:.2f} GB were reserved at the peak, and never more than "
                f"{active / 1e9:.2f} GB of them were active ({active / reserved:.0%})"
            )
    return said
