"""Figures of debloating: a table of `analysis.debloat` or `analysis.usage` and an Axes in, the Axes out.

The paper's Figure 6 for one workload is `plots.libraries.pareto`.
"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gpubloat.plots.libraries import MB, short
from gpubloat.plots.style import GREY, HATCHES, MAGNITUDE, PALETTE

# part of `distributions` -> label, colour
PARTS = {
    "cpu_code": ("CPU code", PALETTE[1]),
    "gpu_code": ("GPU code", PALETTE[0]),
    "function": ("functions", PALETTE[1]),
    "element": ("elements", PALETTE[0]),
}
REASONS = {
    "other_architecture": ("I: for other GPUs", PALETTE[0], HATCHES[0]),
    "unused_element": ("II: unused in these runs", PALETTE[1], HATCHES[1]),
}
# quantity of `before_after` -> axis label, unit of its columns, divisor
QUANTITIES = {
    "peak_rss": ("peak CPU memory (GB)", "bytes", 1e9),
    "peak_gpu": ("peak GPU memory (GB)", "bytes", 1e9),
    "wall": ("time (s)", "s", 1.0),
}
VARIANTS = {"original": (GREY, HATCHES[0]), "debloated": (PALETTE[0], HATCHES[0])}
BAR = 0.38
LINES = [color for color in PALETTE if color != "#F0E442"]  # yellow is lost on white


def violins(table: pd.DataFrame, *, by: str = "part", ax: Axes | None = None) -> Axes:
    """Reductions of single libraries (Figure 5): one violin per part or workload, medians written beside them.

    Parameters
    ----------
    table : rows of `analysis.debloat.distributions`, such as those of cpu_code and gpu_code (Figure 5a).
    by : ``"part"`` or ``"workload"``, what has a violin each; every dot is a library.
    """
    ax = plt.gca() if ax is None else ax
    draw = np.random.default_rng(0)
    names = list(dict.fromkeys(table[by]))
    for at, name in enumerate(names):
        rows = table[table[by] == name]
        values = rows["reduction_frac"].dropna().to_numpy(float) * 100
        color = PARTS[rows["part"].iloc[0]][1]
        if len(np.unique(values)) > 2:  # fewer have no density
            body: Any = ax.violinplot(values, [at], widths=0.75, showextrema=False)["bodies"]
            body[0].set(facecolor=color, edgecolor=color, alpha=0.35, linewidth=0.8)
            body[0].set_clip_box(ax.bbox)
            # The kernel smears beyond the data: no library can lose more than all.
            vertices = body[0].get_paths()[0].vertices
            vertices[:, 1] = np.clip(vertices[:, 1], values.min(), values.max())
        ax.scatter(at + draw.uniform(-0.07, 0.07, len(values)), values, s=3, color=color, linewidth=0, alpha=0.8)
        if len(values):
            middle = float(np.median(values))
            ax.plot([at - 0.22, at + 0.22], [middle, middle], color="black", linewidth=1.2)
            ax.text(at + 0.4, middle, f"{middle:.3g}", va="center", fontsize=7)
    counts = [int(table.loc[table[by] == name, "reduction_frac"].notna().sum()) for name in names]
    if by == "part":
        ax.set_xticks(range(len(names)), [f"{PARTS[name][0]}\n({n})" for name, n in zip(names, counts, strict=True)])
    else:
        labels = [f"{name} ({n})" for name, n in zip(names, counts, strict=True)]
        ax.set_xticks(range(len(names)), labels, rotation=25, ha="right", rotation_mode="anchor")
    ax.set_xlim(-0.6, max(len(names), 1) - 0.3)
    ax.set_ylim(min(0.0, float(table["reduction_frac"].min() * 100) if len(table) else 0.0) - 3, 103)
    ax.set_ylabel("reduction of a library (%)")
    return ax


def savings_curves(curves: pd.DataFrame, *, ax: Axes | None = None, level: float = 0.9) -> Axes:
    """Figure 6 of several workloads: running share of the saved bytes over the rank of the library, logarithmic.

    `curves`: rows of `analysis.debloat.savings` with a column workload. The legend has the fewest libraries that give
    `level` of what is saved.
    """
    ax = plt.gca() if ax is None else ax
    styles = ("-", "--", "-.", ":")
    groups = curves.groupby("workload", sort=False)
    for i, (workload, curve) in enumerate(groups):
        share = curve["cumulative_frac"].to_numpy(float)
        enough = curve.loc[share >= level - 1e-12, "rank"]
        note = f" ({int(enough.iloc[0])} of {len(curve)})" if len(enough) else ""
        color, line = LINES[i % len(LINES)], styles[i % len(styles)]
        width = 1.2 + 0.2 * (len(groups) - 1 - i)  # the first are the widest: they show where others cover them
        ax.plot(curve["rank"], share * 100, color=color, linestyle=line, linewidth=width, label=f"{workload}{note}")
    ax.axhline(level * 100, color=GREY, linewidth=0.8, zorder=0)
    longest = max(int(curves["rank"].max()) if len(curves) else 1, 2)
    ax.set_xscale("log")
    ax.set_xlim(1, longest)
    ticks = [n * 10**power for power in range(6) for n in (1, 2, 5) if n * 10**power <= longest]
    ax.set_xticks(ticks, [f"{n}" for n in ticks])
    ax.minorticks_off()
    ax.set_ylim(0, 103)
    ax.set_xlabel("libraries, largest saving first")
    ax.set_ylabel("share of the saved bytes (%)")
    if len(curves):
        title = f"libraries for {level:.0%}"
        place: Any = {"loc": "upper left", "bbox_to_anchor": (1, 1), "alignment": "left"}
        ax.legend(**place, title=title, title_fontsize=7, handlelength=3)
    return ax


def reasons_bars(
    reasons: pd.DataFrame, *, by: str = "workload", in_bytes: bool = False, ax: Axes | None = None
) -> Axes:
    """Removed elements by reason (Figure 7), one bar of 100 % per workload or library; counts or MB inside the bars."""
    ax = plt.gca() if ax is None else ax
    value = "removed_bytes" if in_bytes else "n_removed"
    wide = reasons.pivot_table(index=by, columns="reason", values=value, aggfunc="sum", sort=False)
    wide = wide.reindex(columns=list(REASONS)).fillna(0)
    share = wide.div(wide.sum(axis=1).where(lambda total: total > 0), axis=0).fillna(0) * 100
    left = np.zeros(len(wide))
    inch = 100 / (0.7 * ax.bbox.width / ax.figure.dpi)  # in percent; the labels will take the rest
    for reason, (label, color, hatch) in REASONS.items():
        width = share[reason].to_numpy(float)
        ax.barh(
            range(len(wide)), width, left=left, color=color, hatch=hatch, edgecolor="white", linewidth=0.4, label=label
        )
        ink = "white" if reason == "other_architecture" else "black"
        for y, (start, length, n) in enumerate(zip(left, width, wide[reason], strict=True)):
            text = f"{n / MB:,.{0 if n >= 10 * MB else 1}f} MB" if in_bytes else f"{n:,.0f}"
            if length >= inch * 0.06 * len(text):  # else it does not fit
                box = {"facecolor": color, "edgecolor": "none", "pad": 0.8}
                ax.text(start + length / 2, y, text, ha="center", va="center", fontsize=6.5, color=ink, bbox=box)
        left += width
    ax.set_yticks(range(len(wide)), [short(n, 27) if by == "library" else n for n in wide.index])
    ax.set_ylim(max(len(wide), 1) - 0.4, -0.6)
    ax.set_xlim(0, 100)
    ax.set_xlabel(f"share of the removed {'bytes' if in_bytes else 'elements'} (%)")
    _legend_above(ax, 2)
    return ax


def jaccard_heatmap(
    square: pd.DataFrame, *, below: str = "functions", above: str = "kernels", ax: Axes | None = None
) -> Axes:
    """Tables 4 and 9 as a picture: `analysis.usage.triangles` with the index in every cell."""
    ax = plt.gca() if ax is None else ax
    image = _cells(ax, square, square.to_numpy(float), lambda value: f"{value:.2f}", 1.0)
    ax.set_xlabel(f"above the diagonal: {above}; below: {below}", loc="right")
    ax.figure.colorbar(image, ax=ax, fraction=0.046, pad=0.03).set_label("Jaccard index")
    return ax


def transfer_heatmap(
    table: pd.DataFrame, *, value: str = "n_misses", of: str = "misses", ax: Axes | None = None
) -> Axes:
    """Misses of each workload (columns) on copies made from another one's run (rows): `analysis.usage.transfer`.

    Colours are logarithmic; a pair that was not run stays empty.
    """
    ax = plt.gca() if ax is None else ax
    names = list(dict.fromkeys([*table["copies"], *table["workload"]]))
    wide = table.pivot(index="copies", columns="workload", values=value).reindex(index=names, columns=names)
    values = wide.to_numpy(float)
    top = float(np.log10(1 + np.nanmax(values))) if np.isfinite(values).any() else 1.0
    scaled = np.log10(1 + values) / max(top, 1e-9)
    number = wide.map(lambda n: "" if pd.isna(n) else _thousands(n))
    _cells(ax, wide, scaled, None, 1.0, number.to_numpy())
    ax.set_xlabel(f"workload that ran (number: {of})", loc="right")
    ax.set_ylabel("copies made from the run of")
    return ax


def before_after_bars(table: pd.DataFrame, quantity: str, *, ax: Axes | None = None) -> Axes:
    """Tables 5 and 7 as bars: median of the originals and of the copies; lines from the smallest to the largest round.

    One round each says nothing about time, so there "one round" stands for the change.

    Parameters
    ----------
    table : `analysis.debloat.before_after`; one pair of bars per workload and loading mode.
    quantity : peak_rss, peak_gpu or wall.
    """
    ax = plt.gca() if ax is None else ax
    label, unit, divisor = QUANTITIES[quantity]
    columns = {part: f"{quantity}{suffix}_{unit}" for part, suffix in (("mid", ""), ("low", "_min"), ("high", "_max"))}
    table = table[table[columns["mid"]].notna()]
    groups = list(dict.fromkeys(zip(table["workload"], table["loading"], strict=True)))
    is_one_mode = table["loading"].nunique() <= 1
    top = float(table[columns["high"]].max() / divisor) if len(table) else 1.0
    rows = table.set_index(["workload", "loading", "variant"])
    for y, group in enumerate(groups):
        ends = {}
        for variant, (color, hatch) in VARIANTS.items():
            if (*group, variant) not in rows.index:
                continue
            mid, low, high = (float(rows.loc[(*group, variant), columns[part]]) / divisor for part in columns)
            at = y + (BAR / 2 if variant == "debloated" else -BAR / 2)
            ax.barh(at, mid, BAR, color=color, hatch=hatch, label=variant if y == 0 else None)
            ax.plot(
                [low, high], [at, at], color="black", linewidth=0.9, marker="|", markersize=3.5, markeredgewidth=0.9
            )
            ends[variant] = (mid, high)
        if len(ends) == 2 and ends["original"][0] > 0:
            is_once = min(int(rows.loc[(*group, variant), "n_repeats"]) for variant in VARIANTS) < 2
            text = (
                "one round"
                if is_once and quantity == "wall"
                else _percent(ends["debloated"][0] / ends["original"][0] - 1)
            )
            at = max(ends["debloated"])
            ax.text(at + top * 0.03, y + BAR / 2, text, va="center", fontsize=6.5)
    ax.set_yticks(range(len(groups)), [workload if is_one_mode else f"{workload}, {mode}" for workload, mode in groups])
    ax.set_ylim(max(len(groups), 1) - 0.4, -0.6)
    ax.set_xlim(0, top * 1.25)
    ax.set_xlabel(label)
    ax.tick_params(axis="y", length=0)
    if groups:
        _legend_above(ax, 2)
    return ax


def saturation_curve(
    curve: pd.DataFrame, *, of: str, in_bytes: bool = False, label: str | None = None, ax: Axes | None = None
) -> Axes:
    """The union over more and more workloads: mean over all orders, with the band from the smallest to the largest.

    `curve` is `analysis.usage.saturation`; `of` names what is counted. Can be drawn several times into one Axes, with
    a `label` each.
    """
    ax = plt.gca() if ax is None else ax
    name = "union_{}_bytes" if in_bytes else "n_union_{}"
    mean, low, high = (
        curve[name.format(part)].to_numpy(float) / (MB if in_bytes else 1) for part in ("mean", "min", "max")
    )
    color = PALETTE[len(ax.lines) % len(PALETTE)]
    at = curve["n_workloads"].to_numpy()
    ax.fill_between(at, low, high, color=color, alpha=0.2, linewidth=0)
    ax.plot(at, mean, color=color, marker="o", markersize=3, linewidth=1.2, label=label)
    longest = max(len(np.asarray(line.get_xdata())) for line in ax.lines)
    ax.set_xticks(range(1, longest + 1))
    ax.margins(y=0.08)
    ax.autoscale(axis="y")  # off since the curve before
    ax.set_ylim(bottom=0)
    ax.set_xlabel("workloads traced")
    ax.set_ylabel(f"{of} used by any{' (MB)' if in_bytes else ''}")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if max([0.0, *high]) >= 10 else f"{value:g}")
    if label is not None:
        ax.legend(loc="best")
    return ax


def agreement_bars(
    table: pd.DataFrame, *, first: str = "driver calls", second: str = "page touches", ax: Axes | None = None
) -> Axes:
    """Elements that both sources named, and those that only one did: `analysis.usage.agreement`, one bar per library.

    Beside each bar: recall and precision of the second source against the first.
    """
    ax = plt.gca() if ax is None else ax
    parts = (
        ("n_both", "both", PALETTE[2], HATCHES[0]),
        ("n_only_first", f"only {first}", PALETTE[0], HATCHES[1]),
        ("n_only_second", f"only {second}", PALETTE[1], HATCHES[2]),
    )
    left = np.zeros(len(table))
    for column, label, color, hatch in parts:
        width = table[column].to_numpy(float)
        ax.barh(
            range(len(table)), width, left=left, color=color, hatch=hatch, edgecolor="white", linewidth=0.4, label=label
        )
        left += width
    top = left.max() if len(left) else 1.0
    for y, (end, recall, precision) in enumerate(zip(left, table["recall_frac"], table["precision_frac"], strict=True)):
        numbers = " / ".join("-" if pd.isna(x) else f"{x:.0%}" for x in (recall, precision))
        ax.text(end + top * 0.015, y, numbers, va="center", fontsize=6.5)
    ax.set_yticks(range(len(table)), [short(n, 27) for n in table["library"]])
    ax.set_ylim(max(len(table), 1) - 0.4, -0.6)
    ax.set_xlim(0, top * 1.35)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel(f"used elements (recall / precision of {second})", loc="right")
    _legend_above(ax, 3)
    return ax


def _legend_above(ax: Axes, columns: int) -> None:
    """Right-aligned over the axes: it may run over the tick labels' side, not over the data or out of the figure."""
    space = {"borderaxespad": 0.2, "handlelength": 1.4, "handletextpad": 0.5, "columnspacing": 1.0}
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1.0), ncols=columns, **space)


def _percent(change: float) -> str:
    text = f"{change:+.0%}"
    return "0%" if text in ("+0%", "-0%") else text.replace("-", "\N{MINUS SIGN}")


def _thousands(n: float) -> str:
    """At most four characters: 999, 9.9k, 999k."""
    if n < 1000:
        return f"{n:.0f}"
    return f"{n / 1000:.1f}k" if n < 9950 else f"{n / 1000:.0f}k"


def _cells(ax: Axes, labels: pd.DataFrame, scaled: np.ndarray, form: Any, top: float, texts: Any = None) -> Any:
    """A square of colours 0..`top` with a text in every cell that is known; the labels are the table's."""
    image = ax.imshow(scaled if scaled.size else np.full((1, 1), np.nan), cmap=MAGNITUDE, vmin=0, vmax=top)
    size = 7 if len(labels) <= 6 else 6
    for (y, x), value in np.ndenumerate(scaled):
        if np.isfinite(value):
            text = form(value) if texts is None else texts[y, x]
            ax.text(x, y, text, ha="center", va="center", fontsize=size, color="black" if value > 0.6 else "white")
    ax.set_xticks(range(len(labels.columns)), labels.columns, rotation=40, ha="right", rotation_mode="anchor")
    ax.set_yticks(range(len(labels.index)), labels.index)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_facecolor("#EEEEEE")
    return image
