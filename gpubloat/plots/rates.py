"""Figures of rates on a GPU: a table of `analysis.rates` and an Axes in, the Axes out."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from gpubloat.analysis.rates import PACKING, PLAIN
from gpubloat.plots.style import GREY, PALETTE, listed

COPY_ENGINE = "copy engine"
ORDERS: dict[str, tuple[Any, str]] = {"sorted": ("-", "o"), "random": ("--", "s")}
# Column of `decode_rates` -> label, marker, colour.
WAYS = {
    "plain": ("plain rows", "s", "black"),
    "raw": ("the decoder, nothing saved", "x", PALETTE[1]),
    "packed": ("packed rows", "o", PALETTE[0]),
}
# Way of a workload -> label, colour.
BARS = {
    "packed": ("packed", PALETTE[0]),
    "raw": ("the decoder, nothing saved", PALETTE[4]),
    "plain": ("plain, read by the GPU", PALETTE[2]),
    "copied": ("plain, copied", "#888888"),
    "cpu_gather_copy": ("gathered by the CPU, copied", PALETTE[1]),
}
SHORT = {"raw": "vs nothing saved", "copied": "vs plain", "cpu_gather_copy": "vs CPU"}


def link_lines(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """GB/s against the length of rows, a colour per size of memory and a dash per order; the copy engine, of the
    greatest memory, is a line across.

    Parameters
    ----------
    table : `analysis.rates.link_rates`.
    """
    ax = plt.gca() if ax is None else ax
    table = table[table["gb_per_s"].notna()]
    read, copied = (table[(table["order"] == COPY_ENGINE) == is_copy] for is_copy in (False, True))
    sizes = sorted(set(read["memory_bytes"].dropna()))
    colors = dict(zip(sizes, PALETTE))
    for (size, order), line in read.groupby(["memory_bytes", "order"]):
        dash, marker = ORDERS.get(str(order), (":", "."))
        x, y = (line.sort_values("row_bytes")[name].to_numpy(float) for name in ("row_bytes", "gb_per_s"))
        face = colors[size] if dash == "-" else "white"
        ax.plot(x, y, dash, color=colors[size], marker=marker, markersize=3.5, markerfacecolor=face, linewidth=1.1)
    handles = [Line2D([], [], color=colors[size], label=f"{binary(size)} of memory") for size in sizes]
    for order, (dash, marker) in ORDERS.items():
        if (read["order"] == order).any():
            face = "black" if dash == "-" else "white"
            handles.append(Line2D([], [], color="black", linestyle=dash, marker=marker, markersize=3.5,
                                  markerfacecolor=face, label=f"rows in {order} order"))  # fmt: skip
    if len(copied):
        engine = copied.sort_values("memory_bytes").iloc[-1]
        ax.axhline(engine["gb_per_s"], color=PALETTE[5], linestyle=":", linewidth=1.2, zorder=1)
        label = f"{COPY_ENGINE} ({binary(engine['memory_bytes'])})"
        handles.append(Line2D([], [], color=PALETTE[5], linestyle=":", linewidth=1.2, label=label))
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(sorted({float(size) for size in read["row_bytes"]}) or [1]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}" if v < 1024 else f"{v / 1024:g}K"))
    ax.set_xlabel("row (bytes)")
    ax.set_ylabel("arrives (GB/s)")
    ax.set_ylim(bottom=0)
    ax.grid(axis="y")
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def decode_dots(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """What arrives per second of each matrix when rows are read by number: plain, by the decoder with nothing saved,
    and packed; a bar at the end of a line is where packed bytes at the rate of plain ones would be.

    Parameters
    ----------
    table : `analysis.rates.decode_rates`.
    """
    ax = plt.gca() if ax is None else ax
    y = np.arange(len(table))
    bound = table["bound_gb_per_s"].to_numpy(float)
    ax.hlines(y, table["plain_gb_per_s"].to_numpy(float), bound, color=GREY, linewidth=1, zorder=1)
    ax.plot(bound, y, "|", color="black", markersize=9, markeredgewidth=1.4, label="bound: plain / (1 - saving)")
    for way, (label, marker, color) in WAYS.items():
        face = "white" if way == "plain" else color
        ax.plot(table[f"{way}_gb_per_s"].to_numpy(float), y, marker, color=color, markersize=4.5,
                markerfacecolor=face, label=label)  # fmt: skip
    ax.set_yticks(y, [matrix(row) for row in table.to_dict("records")])
    ax.set_xlim(left=0)
    listed(ax, len(table), "arrives (GB/s)")
    return ax


def codec_dots(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """What arrives decoded per second by codec, a dot per matrix, a bar at the median; the fastest codec first.

    Parameters
    ----------
    table : `analysis.rates.beside_codecs`, of one kind of items. Codecs that failed on all matrices are left out.
    """
    ax = plt.gca() if ax is None else ax
    table = table[table["fetched_gb_per_s"].notna()]
    medians = table.groupby("codec")["fetched_gb_per_s"].median().sort_values(ascending=False)
    for y, (codec, median) in enumerate(medians.items()):
        color = {PACKING: PALETTE[0], PLAIN: "black"}.get(str(codec), GREY)
        x = table.loc[table["codec"] == codec, "fetched_gb_per_s"].to_numpy(float)
        ax.plot(x, np.full(len(x), y), "o", color=color, markersize=3.5, alpha=0.7, markeredgewidth=0)
        ax.plot([median], [y], "|", color=color, markersize=11, markeredgewidth=1.6)
    ax.set_yticks(range(len(medians)), [str(codec) for codec in medians.index])
    ax.set_xlim(left=0)
    listed(ax, len(medians), "arrives decoded (GB/s)")
    return ax


def workload_bars(workloads: pd.DataFrame, speedups: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Time of each workload, a bar per way, the packed one first; beside a bar, how many times as fast as its control.

    Parameters
    ----------
    workloads, speedups : of `analysis.rates`. A way with two controls is labelled with the first, which is the one that
        shows fewer bytes. A way that failed has no bar.
    """
    ax = plt.gca() if ax is None else ax
    told = {(row["subject"], row["way"]): row for row in reversed(speedups.to_dict("records"))}
    ticks, names, at, seen = [], [], 0.0, set()
    top = workloads["time_s"].max() * 1e3 if len(workloads) else 1.0
    for subject, rows in workloads.groupby("subject", sort=False):
        times = rows.set_index("way")["time_s"].dropna()
        ways = [way for way in BARS if way in times.index]
        for i, way in enumerate(ways):
            label, color = BARS[way]
            ms = float(times[way]) * 1e3
            ax.barh(at + i, ms, 0.86, color=color, label=None if way in seen else label)
            seen.add(way)
            pair = told.get((subject, way))
            note = f"{ms:.{max(0, 2 - int(np.floor(np.log10(max(ms, 0.001)))))}f} ms"  # three digits
            if pair is not None and np.isfinite(pair["speedup"]):
                note += f", {pair['speedup']:.2f}x {SHORT[pair['control']]}"
            ax.text(ms + top * 0.012, at + i, note, va="center", fontsize=6.5)
        ticks.append(at + (len(ways) - 1) / 2)
        names.append(str(subject).replace(", ", "\n", 1))
        at += len(ways) + 0.8
    ax.set_yticks(ticks, names)
    ax.set_xlim(0, top * 1.4)
    listed(ax, at - 0.8, "time (ms)")
    return ax


def matrix(row: dict[Any, Any]) -> str:
    """The name of a matrix with its type and the length of its rows."""
    size = row["row_bytes"]
    return f"{row['subject']} {row['dtype']}" + ("" if pd.isna(size) else f", {int(size):,} B")


def binary(size: float) -> str:
    """64 MiB, 8 GiB."""
    return f"{size / 2**30:g} GiB" if size >= 2**30 else f"{size / 2**20:g} MiB"
