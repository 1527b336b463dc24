"""Figures of the `tensors` instrument: a table of `analysis.tensors` and an Axes in, the Axes out."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from gpubloat.plots.style import GREY, MAGNITUDE, PALETTE, listed

METHODS = {"paper": ("packed, as in the paper", PALETTE[0]), "always": ("packed, constant bits left out", PALETTE[4])}
# Bound -> label, marker.
BOUNDS = {
    "marginal_bound_frac": ("each bit alone", "|"),
    "exponent_bound_frac": ("exponents coded", "^"),
    "joint_bound_frac": ("16 bits together", "o"),
}
SHORT = {"sign": "s"}  # one cell is narrow
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def invariance_map(
    table: pd.DataFrame, *, meaning: str = "agreement within a column (mean)", ax: Axes | None = None
) -> Axes:
    """A row of cells per tensor, the most significant bit at the left, coloured by how alike the bit is; a dot where it
    never changes. Lines part sign, exponent and mantissa.

    Parameters
    ----------
    table : `analysis.tensors.bit_map`. meaning : what its value is; agreements are between 0.5 and 1, others from 0.
    """
    ax = plt.gca() if ax is None else ax
    row = table.groupby(["file", "tensor"], sort=False).ngroup().to_numpy()
    position = table["position"].to_numpy(int)
    n, width = (int(v.max(initial=-1)) + 1 for v in (row, position))
    cells = np.full((max(n, 1), max(width, 1)), np.nan)
    cells[row, position] = table["value"].to_numpy(float)
    least = 0.5 if "agreement" in meaning else 0.0
    image = ax.imshow(cells, aspect="auto", cmap=MAGNITUDE, vmin=least, vmax=1, interpolation="nearest")
    still = table["is_invariant"].to_numpy(bool)
    ax.plot(position[still], row[still], ".", color="black", markersize=4, markeredgewidth=0)
    fields = table["field"].to_numpy(object)
    ends = np.flatnonzero((row[1:] == row[:-1]) & (fields[1:] != fields[:-1]))
    ax.vlines(position[ends] + 0.5, row[ends] - 0.5, row[ends] + 0.5, color="white", linewidth=1.6)
    ax.hlines(np.arange(1, n) - 0.5, -0.5, width - 0.5, color="white", linewidth=0.6)
    first = table[row == 0]
    for field, bits in first.groupby("field", sort=False)["position"]:
        middle = (bits.min() + bits.max()) / 2
        ax.text(middle, -0.65, SHORT.get(str(field), str(field)), ha="center", va="bottom", fontsize=7)
    labels = table["label"].groupby(row).first()
    ax.set_yticks(range(n), labels, fontsize=6.5)
    if table.groupby(row)["position"].max().nunique() > 1:  # no bit number that holds for all rows
        ax.set_xticks(range(0, width, 8))
        ax.set_xlabel("bits below the most significant (dots: never changes)")
    else:
        ticks = [p for p in range(width) if p == 0 or (width - 1 - p) % 8 == 0]
        ax.set_xticks(ticks, [str(width - 1 - p) for p in ticks])
        ax.set_xlabel("bit (dots: never changes)")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.03, pad=0.02, label=meaning)
    bar.outline.set_visible(False)  # type: ignore[operator]
    return ax


def savings_bars(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """What packing saves of each tensor, a bar per method, and markers for what no code of some kind does better than.

    A marker is hollow where the bound is too great because of too few elements.

    Parameters
    ----------
    table : `analysis.tensors.against_bounds`.
    """
    ax = plt.gca() if ax is None else ax
    methods = [m for m in METHODS if table[f"{m}_frac"].notna().any()]
    height = 0.72 / max(len(methods), 1)
    y = np.arange(len(table))
    for i, method in enumerate(methods):
        label, color = METHODS[method]
        at = y + (i - (len(methods) - 1) / 2) * height
        ax.barh(at, table[f"{method}_frac"].to_numpy(float) * 100, height * 0.92, color=color, label=label)
    handles: list[Any] = list(ax.get_legend_handles_labels()[0])
    is_biased = table["is_biased"].to_numpy(bool)
    for name, (label, marker) in BOUNDS.items():
        value = table[name].to_numpy(float) * 100
        size = 9 if marker == "|" else 4
        for biased in (False, True):
            mine = is_biased == biased if name == "joint_bound_frac" else np.full(len(table), not biased)
            face = "white" if biased else "black"
            ax.plot(value[mine], y[mine], marker, color="black", markersize=size, markerfacecolor=face, zorder=3)
        handles.append(Line2D([], [], linestyle="", marker=marker, color="black", markersize=size, label=label))
    if is_biased.any():
        label = "16 bits together, few elements"
        handles.append(
            Line2D([], [], linestyle="", marker="o", color="black", markersize=4, markerfacecolor="white", label=label)
        )
    ax.set_yticks(y, table["label"])
    ax.axvline(0, color="black", linewidth=0.6)
    listed(ax, len(table), "saved (%)")
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def threshold_curves(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Saving of each tensor against the agreement that a bit needs; at the right, with the best bits of each column.

    Parameters
    ----------
    table : `analysis.tensors.by_threshold`.
    """
    ax = plt.gca() if ax is None else ax
    looks = zip(cycle(PALETTE), cycle(MARKERS))
    right = float(table["threshold"].max()) + 0.08 if len(table) else 1.0
    widths = table["chunk_bits"].unique()
    for (_, rows), (color, marker) in zip(table.groupby(["file", "tensor"], sort=False), looks):
        rows = rows.sort_values("threshold")
        label = rows["label"].iloc[0] + ("" if len(widths) == 1 else f", {rows['chunk_bits'].iloc[0]} bits")
        saved = rows["saving_frac"].to_numpy(float) * 100
        ax.plot(rows["threshold"], saved, color=color, marker=marker, markersize=3, linewidth=1, label=label)
        free = float(rows["by_column_frac"].iloc[0]) * 100
        ax.plot([right], [free], marker, color=color, markersize=4, clip_on=False)
    ax.axvline(right - 0.045, color=GREY, linewidth=0.6)
    ticks = [
        t for t in np.arange(0.5, 1.001, 0.1) if len(table) and table["threshold"].min() - 0.051 <= t < right - 0.06
    ]
    ax.set_xticks([*ticks, right], [*(f"{t:.1f}" for t in ticks), "by\ncolumn"])
    ax.axhline(0, color="black", linewidth=0.6)
    if len(widths) == 1:
        ax.set_title(f"chunks of {widths[0]} bits", loc="left")
    ax.set_xlabel("agreement needed")
    ax.set_ylabel("saved (%)")
    ax.grid(axis="y")
    if len(table):
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def effective_saving(table: pd.DataFrame, rows: pd.DataFrame | None = None, *, ax: Axes | None = None) -> Axes:
    """What is left of savings where rows are read in whole pieces, against the size of a row.

    Parameters
    ----------
    table : `analysis.tensors.granularity`: a line per saving and piece.
    rows : `analysis.tensors.effective`: real tensors, from the saving (a bar) down to what is left of it.
    """
    ax = plt.gca() if ax is None else ax
    styles: dict[Any, Any] = {32: "-", 128: "--"}
    groups = table.groupby("saving_frac", sort=True)
    colors = dict(zip(groups.groups, cycle(PALETTE)))
    for saving, of_saving in groups:
        color = colors[saving]
        for piece, line in of_saving.groupby("piece_bytes"):
            y = line["effective_frac"].to_numpy(float) * 100
            ax.plot(line["row_bytes"], y, styles.get(piece, ":"), color=color, marker=".", markersize=4, linewidth=1)
    handles: list[Any] = [Line2D([], [], color=colors[s], label=f"{s:.0%} of every row") for s in groups.groups]
    pieces = sorted(set(table["piece_bytes"]))
    handles += [Line2D([], [], color="black", linestyle=styles.get(p, ":"), label=f"read by {p} B") for p in pieces]
    if rows is not None and len(rows):
        x = rows["row_bytes"].to_numpy(float)
        marks = (("saving_frac", "_", 8), ("effective_32_frac", "o", 3.5), ("effective_128_frac", "s", 3.5))
        shown = rows[[name for name, _, _ in marks]].to_numpy(float) * 100
        ax.vlines(x, shown.min(axis=1), shown.max(axis=1), color=GREY, linewidth=0.8, zorder=1)
        for (_, marker, size), y, label in zip(
            marks, shown.T, ("tensor, saved", "tensor, by 32 B", "tensor, by 128 B")
        ):
            ax.plot(x, y, marker, color="black", markersize=size, markerfacecolor="white", linestyle="")
            handles.append(Line2D([], [], linestyle="", marker=marker, color="black", markersize=size, label=label,
                                  markerfacecolor="white"))  # fmt: skip
    ax.set_xscale("log", base=2)
    sizes = sorted(set(table["row_bytes"]))
    ax.xaxis.set_major_locator(FixedLocator(sizes))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}" if v < 1024 else f"{v / 1024:g}K"))
    ax.set_xlabel("row (bytes)")
    ax.set_ylabel("saved of what is read (%)")
    ax.grid(axis="y")
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1))
    return ax
