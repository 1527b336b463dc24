"""Figures of the `libraries` instrument: a table of `analysis.libraries` and an Axes in, the Axes out."""

from __future__ import annotations

from pathlib import PurePosixPath

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from gpubloat.plots.style import GREY, HATCHES, MAGNITUDE, PALETTE

MB = 1e6
CODE_PARTS = (
    ("gpu_code_bytes", "GPU code", PALETTE[0], HATCHES[0]),
    ("cpu_code_bytes", "CPU code", PALETTE[1], HATCHES[1]),
    ("other_bytes", "other", GREY, HATCHES[0]),
)
LABEL_COLORS = {
    "gpu_code": PALETTE[0],
    "cpu_code": PALETTE[1],
    "read_only_data": PALETTE[2],
    "data": PALETTE[4],
    "symbols": PALETTE[3],
    "relocations": PALETTE[5],
    "unwind": PALETTE[6],
    "debug": "#882255",
    "notes": "#666666",
    "headers": "#999999",
    "padding": "#DDDDDD",
    "unattributed": PALETTE[7],
}


def short(name: str, limit: int = 34) -> str:
    """The last part of a path, without the version of a wheel's file name, cut to `limit` characters."""
    last = PurePosixPath(name).name
    if last.endswith(".whl"):
        parts = last.split("-")
        last = f"{parts[0]} {parts[1]}" if len(parts) > 1 else last
    return last if len(last) <= limit else last[: limit - 1] + "…"


def code_bars(shares: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Stacked bars of GPU code, CPU code and the rest, one per library (the paper's Figure 1), in MB."""
    ax = plt.gca() if ax is None else ax
    at = np.arange(len(shares))
    left = np.zeros(len(shares))
    for column, label, color, hatch in CODE_PARTS:
        width = shares[column].to_numpy() / MB
        ax.barh(at, width, left=left, color=color, hatch=hatch, edgecolor="white", linewidth=0.4, label=label)
        left += width
    for y, (total, share) in enumerate(zip(left, shares["gpu_code_frac"], strict=True)):
        if share >= 0.005:
            ax.text(total + left.max() * 0.01, y, f"{share:.0%} GPU", va="center", fontsize=6.5)
    ax.set_yticks(at, [short(n) for n in shares["library"]])
    ax.set_ylim(len(shares) - 0.4, -0.6)
    ax.set_xlim(0, left.max() * 1.12 if len(left) else 1)
    ax.set_xlabel("file size (MB)")
    ax.legend(loc="lower right")
    return ax


def label_bars(labels: pd.DataFrame, *, ax: Axes | None = None, min_frac: float = 0.001) -> Axes:
    """Stacked bars of all labels, one bar per library, as shares of the file; each bar is 100 %."""
    ax = plt.gca() if ax is None else ax
    wide = labels.pivot_table(index="library", columns="label", values="size_bytes", aggfunc="sum", fill_value=0)
    wide = wide.loc[wide.sum(axis=1).sort_values(ascending=False).index]
    share = wide.div(wide.sum(axis=1), axis=0) * 100
    left = np.zeros(len(share))
    for label, color in LABEL_COLORS.items():
        if label not in share or (share[label] < min_frac * 100).all():
            continue
        values = share[label].to_numpy()
        ax.barh(range(len(share)), values, left=left, color=color, edgecolor="white", linewidth=0.3, label=label)
        left += values
    ax.set_yticks(range(len(share)), [short(n) for n in share.index])
    ax.set_ylim(len(share) - 0.4, -0.6)
    ax.set_xlim(0, 100)
    ax.set_xlabel("share of the file (%)")
    handles, labels_shown = ax.get_legend_handles_labels()
    names = [t.replace("gpu_code", "GPU code").replace("cpu_code", "CPU code").replace("_", " ") for t in labels_shown]
    ax.legend(handles, names, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def target_heatmap(by_target: pd.DataFrame, *, ax: Axes | None = None, value: str = "stored_bytes") -> Axes:
    """Bytes by library (rows) and target (columns), logarithmic colours, MB written into the cells.

    Cubins have a column per target; PTX and LTO-IR, which are no GPU's own code, have one each.
    """
    ax = plt.gca() if ax is None else ax
    table = by_target[by_target["target"] != ""]
    names = table["target"].mask(table["kind"].isin(["ptx", "relocatable_ptx"]), "PTX")
    table = table.assign(column=names.mask(table["kind"] == "lto_ir", "LTO-IR"))
    wide = table.pivot_table(index="library", columns="column", values=value, aggfunc="sum")
    columns = sorted(set(table["column"]), key=_number)
    wide = wide[columns]
    wide = wide.loc[wide.sum(axis=1).sort_values(ascending=False).index] / MB
    return _heatmap(ax, wide, "MB")


def loadable_heatmap(loadable: pd.DataFrame, *, name: str = "library", ax: Axes | None = None) -> Axes:
    """MB that each GPU (columns) could be given, by library or wheel (rows); colour is the share of its GPU code."""
    ax = plt.gca() if ax is None else ax
    order = loadable.groupby(name)["stored_bytes"].max().sort_values(ascending=False).index
    wide = loadable.pivot(index=name, columns="gpu", values="loadable_bytes")
    total = loadable.pivot(index=name, columns="gpu", values="stored_bytes")
    columns = sorted(set(loadable["gpu"]), key=_number)
    wide, total = wide.loc[order, columns], total.loc[order, columns]
    share = (wide / total.clip(lower=1)).to_numpy(float)
    image = ax.imshow(share, cmap=MAGNITUDE, vmin=0, vmax=1, aspect="auto")
    _write_cells(ax, wide.to_numpy(float) / MB, share > 0.6)
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(order)), [f"{short(n)} ({total.loc[n].iloc[0] / MB:,.0f} MB)" for n in order])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.04, pad=0.02)
    bar.set_label("colour: share of the stored GPU code; number: MB")
    return ax


def pareto(curve: pd.DataFrame, *, of: str, ax: Axes | None = None, level: float = 0.9) -> Axes:
    """Running share of `of` over rank (the paper's Figure 6), with the rank that reaches `level` marked."""
    ax = plt.gca() if ax is None else ax
    rank = np.concatenate([[0], curve["rank"].to_numpy()])
    share = np.concatenate([[0.0], curve["cumulative_frac"].to_numpy() * 100])
    ax.plot(rank, share, marker="o", markersize=2.5, linewidth=1.2, color=PALETTE[0])
    if (curve["cumulative_frac"] >= level).any():
        reached = int(curve.loc[curve["cumulative_frac"] >= level, "rank"].iloc[0])
        ax.axhline(level * 100, color=GREY, linewidth=0.8, zorder=0)
        ax.annotate(
            f"{reached} of {len(curve)} give {level:.0%}",
            (reached, share[reached]),
            xytext=(12, -24),
            textcoords="offset points",
            arrowprops={"arrowstyle": "-", "linewidth": 0.6},
        )
    ax.set_xlim(0, max(len(curve), 1))
    ax.set_ylim(0, 103)
    ax.set_xlabel("libraries, largest first")
    ax.set_ylabel(f"share of {of} (%)")
    return ax


def _number(text: str) -> tuple[int, str]:
    """Sort key of a target name."""
    digits = "".join(c for c in text if c.isdigit())
    return (int(digits) if digits else 10**6, text)  # PTX and LTO-IR last


def _heatmap(ax: Axes, wide: pd.DataFrame, unit: str) -> Axes:
    values = wide.to_numpy(float)
    shown = np.log10(np.where(values > 0, np.maximum(values, 0.01), np.nan))
    top = float(np.nanmax(shown)) if np.isfinite(shown).any() else 0.0
    image = ax.imshow(shown, cmap=MAGNITUDE, aspect="auto", vmin=-2, vmax=top)
    _write_cells(ax, values, (shown + 2) / (top + 2) > 0.6)
    ax.set_xticks(range(wide.shape[1]), wide.columns, rotation=60, ha="right", rotation_mode="anchor")
    ax.set_yticks(range(wide.shape[0]), [short(n) for n in wide.index])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ticks = np.arange(-2, np.floor(top) + 1)
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.03, pad=0.02, ticks=ticks)
    bar.ax.set_yticklabels([f"{10.0**t:g}" for t in ticks])
    bar.set_label(unit)
    return ax


def _write_cells(ax: Axes, values: np.ndarray, is_bright: np.ndarray) -> None:
    """Numbers in the cells, dark on bright colours and bright on dark ones; empty cells stay empty."""
    size = 6.0 if values.shape[1] <= 14 else 5.0
    for (y, x), value in np.ndenumerate(values):
        if np.isfinite(value):
            color = "black" if is_bright[y, x] else "white"
            ax.text(x, y, _short_number(value), ha="center", va="center", fontsize=size, color=color)


def _short_number(value: float) -> str:
    """Two or three characters: 12, 1.2, <.1 or 0."""
    if value >= 9.95:
        return f"{value:,.0f}"
    if value >= 0.05:
        return f"{value:.1f}"
    return "<.1" if value else "0"
