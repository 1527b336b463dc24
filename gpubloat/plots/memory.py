"""Figures of the `memory` instrument: a table of `analysis.memory` and its neighbours and an Axes in, the Axes out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from gpubloat.analysis.memory import HELD
from gpubloat.analysis.whatif import name
from gpubloat.plots.style import GREY, PALETTE

MB, GB = 1e6, 1e9
# What a part of a segment is -> label, colour.
PARTS = {
    "held": ("held", PALETTE[0]),
    "waiting": ("waits for another stream", PALETTE[3]),
    "pinned": ("free, pinned", PALETTE[1]),
    "releasable": ("free, releasable", "#DDDDDD"),
}
MARKS = {"oom": ("out of memory", PALETTE[5], "x"), "snapshot": ("snapshot", PALETTE[7], "v")}
MAX_POINTS = 4000  # per line: more than a page has dots across


def timeline(
    usage: pd.DataFrame, events: pd.DataFrame | None = None, *, by: str = "event", ax: Axes | None = None
) -> Axes:
    """Reserved against active bytes over time; the gap between them, in which nothing lives, is shaded.

    Parameters
    ----------
    usage : `analysis.memory.history`, or the table `usage` of a replay, of one GPU.
    events : the table of that trace: marks out-of-memory errors and snapshots.
    by : ``"event"``, or ``"time"`` in seconds since the first event (needs `events` with times).
    """
    ax = plt.gca() if ax is None else ax
    at = usage["event"].to_numpy(float)
    when = None if events is None else events.set_index("event")["time_us"].reindex(usage["event"])
    is_timed = by == "time" and when is not None and bool(when.notna().any())
    if is_timed and when is not None:
        seconds = when.astype("Float64").ffill().bfill().to_numpy(float, na_value=np.nan) / 1e6
        at = seconds - seconds[0]
    reserved, active = (usage[n].to_numpy(float) / GB for n in ("reserved_bytes", "active_bytes"))
    keep = _extremes(active, reserved, MAX_POINTS)
    ax.fill_between(
        at[keep], active[keep], reserved[keep], step="post", color=PALETTE[1], alpha=0.35, linewidth=0, label="unused"
    )
    ax.fill_between(at[keep], 0, active[keep], step="post", color=PALETTE[0], alpha=0.85, linewidth=0, label="active")
    ax.step(at[keep], reserved[keep], where="post", color="black", linewidth=1, label="reserved")
    top = max(float(reserved.max(initial=0)), 1e-9)
    place = dict(zip(usage["event"], at))
    for action, (label, color, marker) in MARKS.items():
        found = _of(action, events, place)
        if found:
            ax.plot(found, [top * 1.05] * len(found), marker, color=color, markersize=4, label=label, clip_on=False)
    ax.set_ylim(0, top * 1.1)
    if len(at):
        ax.set_xlim(at[0], max(at[-1], at[0] + 1e-9))
    ax.set_xlabel("time (s)" if is_timed else "event")
    ax.set_ylabel("GPU memory (GB)")
    if not is_timed:
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def _of(action: str, events: pd.DataFrame | None, place: dict[Any, float]) -> list[float]:
    """Where events of this kind lie on the axis."""
    return [] if events is None else [place[e] for e in events.loc[events["action"] == action, "event"] if e in place]


def thinned(usage: pd.DataFrame, *, points: int = MAX_POINTS) -> pd.DataFrame:
    """Rows of `usage` of one GPU that a line of so many points shows: to draw them, and to keep what was drawn."""
    active, reserved = (usage[name].to_numpy(float) for name in ("active_bytes", "reserved_bytes"))
    return usage.iloc[_extremes(active, reserved, points)].reset_index(drop=True)


def _extremes(active: np.ndarray, reserved: np.ndarray, points: int) -> np.ndarray:
    """Rows to draw: of each run of rows the lowest and highest, and every change of the reserved bytes."""
    n = len(active)
    if n <= points:
        return np.arange(n)
    edges = np.linspace(0, n, points // 2 + 1).astype(int)
    chosen = {0, n - 1, *np.flatnonzero(np.diff(reserved))[:points].tolist()}
    chosen |= {i + 1 for i in np.flatnonzero(np.diff(reserved))[:points].tolist()}
    for low, high in pairwise(edges):
        chosen |= {low + int(active[low:high].argmin()), low + int(active[low:high].argmax())}
    return np.array(sorted(chosen))


def address_map(pinned: pd.DataFrame, blocks: pd.DataFrame, *, rows: int = 40, ax: Axes | None = None) -> Axes:
    """Segments as rows, the largest at the top; in each, its blocks by address, coloured by what keeps them.

    Parameters
    ----------
    pinned : `analysis.pinning.by_segment` of one GPU. blocks : its table.
    rows : segments to draw; those with most pinned bytes first, then the largest.
    """
    ax = plt.gca() if ax is None else ax
    chosen = pinned.sort_values(["pinned_bytes", "size_bytes"], ascending=False).head(rows)
    chosen = chosen.sort_values("size_bytes", ascending=False).reset_index(drop=True)
    row = dict(zip(chosen["segment"], chosen.index))
    start = chosen["address"].to_numpy("uint64")
    inside = blocks[blocks["segment"].isin(row)]
    y = inside["segment"].map(row).to_numpy(int)
    left = (inside["address"].to_numpy("uint64") - start[y]).astype(float) / MB if len(y) else np.array([])
    width = inside["size_bytes"].to_numpy(float) / MB
    state = inside["state"].to_numpy(object)
    is_pinned = chosen["pinned_bytes"].to_numpy(float) > 0
    free = np.where(is_pinned[y], "pinned", "releasable") if len(y) else np.array([], object)
    kind = np.where(state == "active_pending_free", "waiting", np.where(np.isin(state, HELD), "held", free))
    for part, (_, color) in PARTS.items():
        mine = kind == part
        boxes = [_box(x, w, at) for x, w, at in zip(left[mine], width[mine], y[mine])]
        ax.add_collection(PolyCollection(boxes, facecolor=color, edgecolor="white", linewidth=0.15))
    widest = float(chosen["size_bytes"].max()) / MB if len(chosen) else 1.0
    for at, size in enumerate(chosen["size_bytes"].to_numpy(float) / MB):
        ax.plot([0, size, size, 0, 0], np.array([-0.42, -0.42, 0.42, 0.42, -0.42]) + at, color="black", linewidth=0.4)
    ax.set_xlim(-widest * 0.01, widest * 1.02)
    ax.set_ylim(max(len(chosen), 1) + 1.4, -0.8)
    ax.set_yticks([])
    ax.set_xticks([])
    ax.spines[["left", "bottom"]].set_visible(False)
    _scale_bar(ax, widest, max(len(chosen), 1) + 0.4)
    drawn, size = (f"{table['size_bytes'].sum() / GB:.2f}" for table in (chosen, pinned))
    is_all = len(chosen) == len(pinned)
    title = f"{len(pinned)} segments, {size} GB"
    ax.set_title(title if is_all else f"{len(chosen)} of {len(pinned)} segments, {drawn} of {size} GB", loc="left")
    used = [part for part in PARTS if (kind == part).any()]
    handles = [Patch(facecolor=PARTS[part][1], label=PARTS[part][0]) for part in used]
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def _box(x: float, width: float, y: int) -> list[tuple[float, float]]:
    return [(x, y - 0.42), (x + width, y - 0.42), (x + width, y + 0.42), (x, y + 0.42)]


def _scale_bar(ax: Axes, widest: float, y: float) -> None:
    """A round length, about a fifth of the width, with its size in MB."""
    length = 10 ** np.floor(np.log10(max(widest / 5, 1e-6)))
    length = max(length * factor for factor in (1, 2, 5) if length * factor <= max(widest / 4, length))
    ax.plot([0, length], [y, y], color="black", linewidth=1.5, solid_capstyle="butt")
    text = f"{length:g} MB" if length < 1000 else f"{length / 1000:g} GB"
    ax.text(length + widest * 0.015, y, text, va="center", fontsize=7)


def what_if_bars(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Peak reserved bytes by allocator (`analysis.whatif.what_if` of one GPU), the active part darker; the recorded
    allocator is marked, and one that ran out of memory is hatched."""
    ax = plt.gca() if ax is None else ax
    labels = []
    top = float(table["peak_reserved_bytes"].max()) / GB if len(table) else 1.0
    for y, row in enumerate(table.to_dict("records")):
        reserved = float(row["peak_reserved_bytes"]) / GB
        is_bound = pd.isna(row["n_calls"])
        is_oom = not pd.isna(row["n_oom"]) and row["n_oom"] > 0
        face = GREY if is_bound else PALETTE[1]
        ax.barh(y, reserved, 0.7, color=face, alpha=0.6, hatch="///" if is_oom else "", edgecolor="white", linewidth=0)
        active = None if pd.isna(row["peak_active_bytes"]) else float(row["peak_active_bytes"]) / GB
        if active is not None:
            ax.barh(y, active, 0.7, color=PALETTE[0], alpha=0.85)
        saved = row["reserved_saved_frac"]
        use = "" if pd.isna(row["utilisation_frac"]) else f"{row['utilisation_frac']:.0%} used"
        if is_oom:
            text = "out of memory"
        elif row["is_recorded"] or pd.isna(saved):
            text = use
        else:
            text = ", ".join(filter(None, [f"{-saved:+.1%}".replace("-", "\N{MINUS SIGN}"), use]))
        ax.text(max(reserved, active or 0) + top * 0.015, y, text, va="center", fontsize=6.5)
        labels.append(_wrapped(name(row["allocator"], row["settings"])) + (" *" if row["is_recorded"] else ""))
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(max(len(labels), 1) - 0.4, -0.6)
    ax.set_xlim(0, top * 1.35)
    ax.set_xlabel("peak reserved, dark: active (GB); * recorded it")
    ax.tick_params(axis="y", length=0)
    return ax


def _wrapped(label: str) -> str:
    return label if len(label) <= 24 else label.replace(" (", "\n(", 1).replace(",", ",\n")
