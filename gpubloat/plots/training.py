"""Figures of training runs under several allocators, and of what the driver's calls cost: `analysis.training`."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gpubloat.analysis.training import RUN
from gpubloat.errors import GpubloatError
from gpubloat.plots.style import GREY, PALETTE

GB = 1e9
STRATEGIES = ("N", "R", "L", "O", "LR", "RO", "LO", "LRO")


def group_bars(
    table: pd.DataFrame, value: str = "reserved_bytes", *, by: str = "strategy", ax: Axes | None = None
) -> Axes:
    """The paper's charts: bars of each allocator in groups, published ones pale and hatched, ours full.

    Parameters
    ----------
    table : rows of `analysis.training.beside`, `charts` or `measured`, of one model.
    value : ``reserved_bytes`` or ``utilisation_frac``. by : strategy, gpus, platform or batch. Raises GpubloatError
        where several rows would be one bar.
    """
    ax = plt.gca() if ax is None else ax
    if table.duplicated([by, "allocator", "source"]).any():
        raise GpubloatError(f"several rows for one bar by {by}", "draw one model, and one row per configuration")
    groups = _sorted(table[by].dropna().unique())
    kinds = list(dict.fromkeys(zip(table["allocator"], table["source"])))
    kinds.sort(key=lambda kind: (kind[1] != "published", _rank(kind[0])))
    scale = GB if value.endswith("_bytes") else 0.01
    width = 0.8 / max(len(kinds), 1)
    drawn = set(zip(table[by], table["allocator"], table["source"]))
    own = {g: [kind for kind in kinds if (g, *kind) in drawn] for g in groups}  # no gap for a bar that is not there
    for allocator, source in kinds:
        rows = table[(table["allocator"] == allocator) & (table["source"] == source) & table[by].notna()]
        place = [own[g].index((allocator, source)) - (len(own[g]) - 1) / 2 for g in rows[by]]
        at = np.array([groups.index(g) for g in rows[by]]) + np.array(place) * width
        height = rows[value].astype("Float64").to_numpy(float, na_value=np.nan) / scale
        is_paper = source == "published"
        color = _color(allocator)
        ax.bar(
            at, height, width * 0.92, color=color, alpha=0.45 if is_paper else 1.0, hatch="////" if is_paper else "",
            edgecolor="white" if not is_paper else color, linewidth=0.3, label=f"{allocator}, {source}",
        )  # fmt: skip
        for x, h, is_oom in zip(at, height, rows["is_oom"].astype(bool)):
            if is_oom and np.isfinite(h):
                ax.text(x, h, "OOM", rotation=90, ha="center", va="bottom", fontsize=5.5)
    models = dict(zip(table[by], table["model"])) if by == "platform" else {}  # there, each has a model of its own
    ax.set_xticks(range(len(groups)), [f"{g}\n{models[g]}" if models else str(g) for g in groups])
    ax.set_xlim(-0.6, max(len(groups), 1) - 0.4)
    ax.set_xlabel({"gpus": "GPUs", "batch": "batch size"}.get(by, by))
    ax.set_ylabel("reserved memory (GB)" if value.endswith("_bytes") else "utilisation (%)")
    if not value.endswith("_bytes"):
        ax.set_ylim(0, 103)
    if kinds:
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def _sorted(values: Any) -> list[Any]:
    known = [v for v in STRATEGIES if v in set(values)]
    return known + sorted(set(values) - set(known))


def _rank(allocator: str) -> int:
    order = ("native", "bfc", "caching", "expandable", "gmlake", "stitching")
    return order.index(allocator) if allocator in order else len(order)


def _marker(allocator: str) -> str:
    markers = dict(zip(("caching", "expandable", "stitching", "native", "bfc", "gmlake"), "osD^v*"))
    return markers.get(allocator, "P")


def _color(allocator: str) -> str:
    colors = dict(zip(("caching", "expandable", "stitching", "native", "bfc", "gmlake"), PALETTE))
    return colors.get(allocator, GREY)


def throughput_bars(
    table: pd.DataFrame, rounds: pd.DataFrame | None = None, *, level: float = 0.98, ax: Axes | None = None
) -> Axes:
    """Throughput relative to the caching allocator, one group of bars per configuration, with a line at `level`.

    `table` : `analysis.training.throughput`; configurations without a relative throughput are left out. `rounds` : the
    rows that it is the median of; drawn as dots.
    """
    ax = plt.gca() if ax is None else ax
    rows = table[table["relative_ratio"].notna()]
    keys = rows[["model", "strategy", "batch", "n_gpus"]].itertuples(index=False)
    config = np.array([f"{m} {s}\nbatch {b}" + (f", {n} GPUs" if n > 1 else "") for m, s, b, n in keys], object)
    groups = list(dict.fromkeys(config))
    kinds = sorted(rows["allocator"].unique(), key=_rank)
    width = 0.8 / max(len(kinds), 1)
    for i, allocator in enumerate(kinds):
        mine = (rows["allocator"] == allocator).to_numpy(bool)
        at = np.array([groups.index(g) for g in config[mine]]) + (i - (len(kinds) - 1) / 2) * width
        ratio = rows["relative_ratio"].to_numpy(float)[mine]
        ax.bar(at, ratio, width * 0.92, color=_color(allocator), label=allocator)
        for x, row in zip(at, rows[mine].to_dict("records")):
            _dots(row, rounds, x, ax)
        for x, r in zip(at, ratio):
            ax.text(x, 0.03, f"{r:.2f}", rotation=90, ha="center", va="bottom", fontsize=6, color="white")
    ax.axhline(level, color="black", linewidth=0.7, linestyle="--", zorder=3)
    ax.set_xticks(range(len(groups)), groups, rotation=30 if len(groups) > 4 else 0, rotation_mode="anchor",
                  ha="right" if len(groups) > 4 else "center")  # fmt: skip
    ax.set_xlim(-0.6, max(len(groups), 1) - 0.4)
    ax.set_ylim(0, max(1.0, float(rows["relative_ratio"].max()) if len(rows) else 1.0) * 1.2)
    ax.set_ylabel("throughput, caching = 1")
    if kinds:
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def _dots(row: dict[Any, Any], rounds: pd.DataFrame | None, x: float, ax: Axes) -> None:
    """Each round of a bar, against the same throughput as the bar."""
    if rounds is None:
        return
    mine = rounds[
        (rounds[RUN].astype(object).fillna("") == [("" if pd.isna(row[n]) else row[n]) for n in RUN]).all(axis=1)
    ]
    ratio = row["relative_ratio"] * row["step_s"] / mine["step_s"].astype(float)
    ax.plot([x] * len(ratio), ratio, "o", color="black", markersize=2, zorder=3)


def convergence(steps: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Driver calls of each step, one line per allocator: table `driver_steps` of one configuration."""
    ax = plt.gca() if ax is None else ax
    kinds = sorted(steps["allocator"].unique(), key=_rank)
    for i, allocator in enumerate(kinds):
        rows = steps[steps["allocator"] == allocator].sort_values("step")
        more = len(kinds) - i  # the first one wider: where two lie on each other, both are seen
        ax.plot(rows["step"], rows["n_driver_calls"], marker=_marker(allocator), markersize=1.5 + more, clip_on=False,
                linewidth=0.6 + 0.4 * more, color=_color(allocator), label=allocator)  # fmt: skip
    ax.set_yscale("symlog", linthresh=1)
    ax.set_ylim(0, max(float(steps["n_driver_calls"].max()) if len(steps) else 1.0, 1.0) * 1.5)
    ax.set_xlim(left=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("step")
    ax.set_ylabel("calls to the driver")
    if kinds:
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return ax


# What is done, and what undoes it or does it in another way, in one colour; the second dashed.
CALLS = (
    ("malloc", "free", "#000000", ""),
    ("set_access", "set_access_each", PALETTE[5], "s"),
    ("create", "release", PALETTE[2], "o"),
    ("map", "unmap", PALETTE[0], "D"),
    ("reserve", "address_free", PALETTE[3], "^"),
)


def vmm_lines(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Time of each driver call per 2 GiB over the size of a chunk, both logarithmic: `analysis.training.vmm_table`."""
    ax = plt.gca() if ax is None else ax
    styles = {}
    for first, second, color, marker in CALLS:
        styles[first], styles[second] = (color, marker, "-", color), (color, marker, "--", "white")
    calls = [call for call in styles if (table["call"] == call).any()]
    calls += [call for call in dict.fromkeys(table["call"]) if call not in styles]
    for call in calls:
        rows = table[table["call"] == call].sort_values("chunk_bytes")
        x, y = rows["chunk_bytes"].to_numpy(float) / (1 << 20), rows["time_per_2gib_us"].to_numpy(float) / 1e3
        color, marker, line, face = styles.get(call, (GREY, "x", "-", GREY))
        if call in ("malloc", "free"):  # of the whole: no chunk
            ax.axhline(float(np.median(y)), color=color, linewidth=1, linestyle=line, label=f"{call} of the whole")
        else:
            ax.plot(x, y, marker=marker, markersize=3, linewidth=1, color=color, linestyle=line, markerfacecolor=face,
                    markeredgewidth=0.8, label=call.replace("_", " "))  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    chunks = table[~table["call"].isin(["malloc", "free"])]
    sizes = np.unique(chunks["chunk_bytes"].to_numpy(float) / (1 << 20)) if len(chunks) else np.array([2.0])
    ticks = sizes if len(sizes) <= 8 else sizes[::2]
    ax.set_xticks(ticks, [f"{s:g}" if s < 1024 else f"{s / 1024:g} Gi" for s in ticks])
    ax.minorticks_off()
    ax.set_xlabel("chunk size (MiB)")
    ax.set_ylabel("time per 2 GiB (ms)")
    if calls:
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def batch_pareto(
    training: pd.DataFrame,
    *,
    capacity_bytes: float | None = None,
    capacity: str = "memory of the GPU",
    ax: Axes | None = None,
) -> Axes:
    """Reserved memory over batch size, one line per allocator; a cross where memory ran out: the largest batch that
    fits is the last dot of a line. `training` : rows of one model and strategy; `capacity` : what the limit is called.
    """
    ax = plt.gca() if ax is None else ax
    kinds = sorted(training["allocator"].unique(), key=_rank)
    top = (capacity_bytes or 0) / GB
    peak = training["reserved_peak_bytes"].astype("Float64").to_numpy(float, na_value=np.nan) / GB
    top = max(top, float(np.nanmax(peak)) if np.isfinite(peak).any() else 1.0)
    for i, allocator in enumerate(kinds):
        mine = (training["allocator"] == allocator).to_numpy(bool)
        rows = training[mine].assign(peak=peak[mine]).sort_values("batch")
        failed = rows["is_oom"].astype(bool)
        ran = rows[~failed]
        ax.plot(ran["batch"], ran["peak"], marker=_marker(allocator), markersize=3, linewidth=1, label=allocator,
                color=_color(allocator))  # fmt: skip
        # Beside each other: several allocators fail at the same batch.
        height = top * (1.04 + 0.05 * i)
        ax.plot(rows.loc[failed, "batch"], [height] * int(failed.sum()), "x", color=_color(allocator), markersize=4.5)
    if capacity_bytes is not None:
        ax.axhline(capacity_bytes / GB, color="black", linewidth=0.7, linestyle="--", label=capacity)
    if training["is_oom"].astype(bool).any():
        ax.plot([], [], "x", color="black", markersize=4.5, linestyle="none", label="out of memory")
    ax.set_ylim(0, top * (1.1 + 0.05 * max(len(kinds), 1)))
    sizes = sorted(training["batch"].unique())
    if sizes and sizes[0] <= sizes[-1] / 4:  # else most of the axis would be empty
        ax.set_xlim(left=0)
    if 0 < len(sizes) <= 10:
        ax.set_xticks(sizes)
    else:
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.set_xlabel("batch size")
    ax.set_ylabel("peak reserved (GB)")
    if kinds:
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return ax
