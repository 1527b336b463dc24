"""Figures of the `energy` instrument: a table of `analysis.energy` and an Axes in, the Axes out.

What was not measured is a word, never a bar or a mark at 0. Whiskers are 95 % intervals where nothing else is said.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from gpubloat.analysis.energy import CLAIM, OPERATOR, REMAINDER, SIGNALS, UNMEASURED, mean_power
from gpubloat.errors import GpubloatError
from gpubloat.plots.style import GREY, PALETTE, listed
from gpubloat.tables.energy import VERDICTS

NOT_MEASURED = "not measured"
SIDES = {"A": PALETTE[1], "B": PALETTE[0], "fix": PALETTE[2]}
VERDICT_COLORS = dict(zip(VERDICTS, (PALETTE[5], PALETTE[1], PALETTE[0], GREY)))
SIGNAL_LOOKS = dict(zip(SIGNALS.values(), ((PALETTE[7], "o"), (PALETTE[4], "s"), (PALETTE[5], "^"))))
UNITS = ((1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ"), (1e-9, "nJ"))
NARROW_IN = 4.5  # figures narrower than this have shorter labels
WHISKER: dict[str, Any] = {"fmt": "none", "ecolor": "black", "elinewidth": 0.8, "capsize": 1.5, "zorder": 3}
SMALL = 6.5


def shortened(name: str, longest: int = 40) -> str:
    """A name without what all operators share, its middle left out if it is too long."""
    name = name.removeprefix("aten::").removeprefix("jax::").removesuffix(".default")
    if len(name) <= longest:
        return name
    head = longest // 2
    return f"{name[:head]}…{name[len(name) - (longest - head - 1) :]}"


def _fitting(ax: Axes, wide: int, narrow: int) -> int:
    """Letters of a label, or columns of a legend, by the width of the figure; the table has names whole."""
    return narrow if _width_in(ax) < NARROW_IN else wide


def _width_in(ax: Axes) -> float:
    """Width of the figure, or of the part of one, that holds the axes."""
    return float(ax.figure.bbox.width / ax.figure.dpi)


def _unit(joules: Any) -> tuple[float, str]:
    """The unit in which the largest value is 1 or more."""
    values = np.abs(np.asarray(joules, float))
    top = float(np.nanmax(values)) if np.isfinite(values).any() else 1.0
    return next(((size, unit) for size, unit in UNITS if top >= size), UNITS[-1])


def operators(table: pd.DataFrame, *, rows: int = 15, ax: Axes | None = None) -> Axes:
    """Joules of one step by operator, the largest first, with its share of the step; the remainder is hatched.

    The bars sum to the step: those after the first `rows` are one bar.

    Parameters
    ----------
    table : `analysis.energy.by_operator`, `by_name` or `by_module`, of one step. GpubloatError if it has several.
    """
    ax = plt.gca() if ax is None else ax
    if len(table[["subject", "side"]].drop_duplicates()) > 1:
        raise GpubloatError("the table has several steps", "choose one subject and one side")
    n_same = table["n_same" if "n_same" in table else "n_operators"]
    table = table.assign(times=n_same.astype("int64"))
    drawn = _folded(table, rows)
    size, unit = _unit(drawn["step_j"].to_numpy(float))
    width = drawn["step_j"].to_numpy(float) / size
    error = drawn["error_j"].to_numpy(float) / size
    y = np.arange(len(drawn))
    is_rest = (drawn["kind"] == REMAINDER).to_numpy(bool)
    known = ~np.isnan(width)
    for mine, color, hatch in ((~is_rest & known, PALETTE[0], ""), (is_rest & known, "white", "////")):
        ax.barh(
            y[mine], width[mine], 0.72, color=color, hatch=hatch, edgecolor="black" if hatch else color, linewidth=0.5
        )
    sure = known & ~np.isnan(error)
    ax.errorbar(width[sure], y[sure], xerr=error[sure], **WHISKER)
    ends = np.maximum(width, 0) + np.nan_to_num(error)
    top = float(np.nanmax(ends)) if known.any() else 1.0
    for at, row in enumerate(drawn.to_dict("records")):
        share = "" if pd.isna(row["step_frac"]) else f"{row['step_frac']:.1%}".replace("-", "\N{MINUS SIGN}")
        text, x = (share, ends[at]) if known[at] else (NOT_MEASURED, 0.0)
        ax.text(x + top * 0.025, at, text, va="center", fontsize=SMALL, color="black" if known[at] else "dimgrey")
    letters = _fitting(ax, 40, 22)
    ax.set_yticks(y, [_named(row, letters) for row in drawn.to_dict("records")], fontsize=SMALL, linespacing=0.8)
    low = float(np.nanmin(np.append(width[known] - np.nan_to_num(error[known]), 0.0)))
    ax.set_xlim(low * 1.1, max(top, 1e-12) * 1.18)
    if low < 0:
        ax.axvline(0, color="black", linewidth=0.6)
    listed(ax, len(drawn), f"energy of a step ({unit})")
    return ax


def _named(row: dict[Any, Any], letters: int) -> str:
    if row["kind"] == REMAINDER:
        return "\n".join(textwrap.wrap(str(row["name"]), letters))
    name = shortened(str(row["name"]), letters)
    return name if row.get("times", 1) == 1 else f"{name}  \N{MULTIPLICATION SIGN}{row['times']}"


def _folded(table: pd.DataFrame, rows: int) -> pd.DataFrame:
    """The first rows, the others of each kind as one, and the remainder."""

    def joined(others: pd.DataFrame) -> dict[str, Any]:
        return {"times": 1, **{n: others[n].sum(min_count=1) for n in ("step_j", "step_frac")},
                "error_j": _root_sum(others["error_j"])}  # fmt: skip

    return _by_kind(table[["kind", "name", "times", "step_j", "error_j", "step_frac"]], rows, 3, joined)


def _by_kind(
    table: pd.DataFrame, rows: int, unmeasured: int, joined: Callable[[pd.DataFrame], dict[str, Any]]
) -> pd.DataFrame:
    """The first rows that were measured, the first that were not, those left of each as one, and the remainder."""
    parts = []
    for kind, most in ((OPERATOR, rows), (UNMEASURED, unmeasured)):
        mine = table[table["kind"] == kind]
        cut = most if len(mine) <= most else most - 1
        parts.append(mine.head(cut))
        others = mine.iloc[cut:]
        if len(others):
            parts.append(pd.DataFrame([{"kind": kind, "name": f"{len(others)} other rows", **joined(others)}]))
    parts.append(table[table["kind"] == REMAINDER])
    shown = [part for part in parts if len(part)]
    return pd.concat(shown, ignore_index=True) if shown else table.head(0)


def _root_sum(errors: pd.Series) -> float:
    return float(np.sqrt((errors.astype(float) ** 2).sum(min_count=1)))


def two_systems(
    table: pd.DataFrame, *, names: Sequence[str] = ("A", "B"), rows: int = 15, ax: Axes | None = None
) -> Axes:
    """Joules of two sides by operator or module, the largest differences first; the remainders are hatched.

    Parameters
    ----------
    table : `analysis.energy.two_systems` of one subject; rows after the first `rows` are one pair of bars. names : what
        to call the two sides.
    """
    ax = plt.gca() if ax is None else ax
    if table["subject"].nunique() > 1:
        raise GpubloatError("the table has several subjects", "choose one")
    drawn = _folded_pairs(table, rows)
    size, unit = _unit(drawn[["a_step_j", "b_step_j"]].to_numpy(float))
    known = drawn[["a_step_j", "b_step_j"]].to_numpy(float) / size
    top = float(np.nanmax(known)) if not np.isnan(known).all() else 1.0
    is_rest = (drawn["kind"] == REMAINDER).to_numpy(bool)
    y = np.arange(len(drawn))
    lowest, highest = 0.0, top
    for side, offset in (("a", -0.19), ("b", 0.19)):
        width, error = (drawn[f"{side}_{name}"].to_numpy(float) / size for name in ("step_j", "error_j"))
        color = SIDES[side.upper()]
        for mine, hatch in ((~is_rest, ""), (is_rest, "////")):
            mine = mine & ~np.isnan(width)
            ax.barh(y[mine] + offset, width[mine], 0.36, color="white" if hatch else color, hatch=hatch,
                    edgecolor=color, linewidth=0.5)  # fmt: skip
        sure = ~np.isnan(width) & ~np.isnan(error) & (drawn[f"{side}_n"].to_numpy(float) > 0)
        ax.errorbar(width[sure], y[sure] + offset, xerr=error[sure], **WHISKER)
        lowest = min(lowest, float(np.nanmin(width - np.nan_to_num(error), initial=0.0)))
        highest = max(highest, float(np.nanmax(width + np.nan_to_num(error), initial=0.0)))
        for at in np.flatnonzero(np.isnan(width)):
            ax.text(top * 0.01, at + offset, NOT_MEASURED, va="center", fontsize=5.5, color="dimgrey")
    letters = _fitting(ax, 40, 22)
    ax.set_yticks(y, [_named(row, letters) for row in drawn.to_dict("records")], fontsize=SMALL, linespacing=0.8)
    ax.set_xlim(lowest * 1.1, max(highest, 1e-12) * 1.06)
    ax.axvline(0, color="black", linewidth=0.6)
    listed(ax, len(drawn), f"energy of a step ({unit})")
    handles = [Patch(facecolor=SIDES[side], label=name) for side, name in zip("AB", names)]
    _legend_above(ax, handles, 2)
    return ax


def _folded_pairs(table: pd.DataFrame, rows: int) -> pd.DataFrame:
    """As `_folded`, of both sides. A side of which not all was measured has no sum."""

    def joined(others: pd.DataFrame) -> dict[str, Any]:
        row: dict[str, Any] = {f"{side}_n": int(others[f"{side}_n"].sum()) for side in "ab"}
        for side in "ab":
            known = bool(others[f"{side}_step_j"].notna().all())
            row[f"{side}_step_j"] = float(others[f"{side}_step_j"].sum()) if known else np.nan
            row[f"{side}_error_j"] = _root_sum(others[f"{side}_error_j"]) if known else np.nan
        return row

    return _by_kind(table, rows, 2, joined)


def _legend_above(ax: Axes, handles: list[Any], columns: int) -> None:
    """Above the axes, up to their right end: a narrow figure keeps its width for what it shows."""
    if handles:
        ax.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=columns, borderaxespad=0.2,
                  handlelength=1.2, columnspacing=1.2, handletextpad=0.5)  # fmt: skip


def cases(table: pd.DataFrame, *, with_cause: bool = True, ax: Axes | None = None) -> Axes:
    """Share of energy saved in each case, with its interval, coloured by verdict.

    The dashed line is the least share that is called waste, the grey band what A differs from A by. Diamonds are the
    paper's values end to end, with a line to the least that it may mean; triangles are its artifact's or text's for the
    operator alone. They are of other inputs, and hollow.

    Parameters
    ----------
    table : `analysis.energy.cases`. with_cause : write the cause at the right, and where it is B that takes more; needs
        a wide figure.
    """
    ax = plt.gca() if ax is None else ax
    ours = table.drop_duplicates(["subject", "case"]).reset_index(drop=True)
    place = {key: at for at, key in enumerate(zip(ours["subject"], ours["case"]))}
    band = 100 * ours["band_frac"].to_numpy(float)
    y = np.arange(len(ours))
    ax.barh(y[band > 0], 2 * band[band > 0], 1.0, left=-band[band > 0], color="#DDDDDD", linewidth=0, zorder=0)
    ax.axvline(0, color="black", linewidth=0.6, zorder=1)
    ax.axvline(100 * CLAIM, color="black", linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
    for at, row in enumerate(ours.to_dict("records")):
        color = VERDICT_COLORS[row["verdict"]]
        if pd.isna(row["saved_frac"]):
            ax.text(100 * CLAIM + 1.5, at - 0.2, NOT_MEASURED, va="center", fontsize=6, color="dimgrey")
            continue
        ax.plot([100 * row["low_frac"], 100 * row["high_frac"]], [at, at], color=color, linewidth=1.4, zorder=3)
        ax.plot([100 * row["saved_frac"]], [at], "o", color=color, markersize=4, markeredgewidth=0, zorder=4)
    used = [verdict for verdict in VERDICTS if (ours["verdict"] == verdict).any()]
    handles: list[Any] = [
        Line2D([], [], color=VERDICT_COLORS[v], marker="o", markersize=4, linewidth=1.4, label=v)
        for v in used if ours.loc[ours["verdict"] == v, "saved_frac"].notna().any()
    ]  # fmt: skip
    handles.append(Line2D([], [], color="black", linewidth=0.8, linestyle=(0, (4, 2)), label=f"{CLAIM:.0%}"))
    if (band > 0).any():
        handles.append(Patch(facecolor="#DDDDDD", label="A against A"))
    handles += _papers(table, place, ax)
    ax.set_yticks(y, [_case(row, _fitting(ax, 26, 20)) for row in ours.to_dict("records")], fontsize=SMALL)
    least = np.concatenate([[-2.0], 100 * ours["low_frac"].to_numpy(float), -band])
    ax.set_xlim(max(float(np.nanmin(least)) * 1.1, -40.0), 102)
    listed(ax, len(ours), "energy saved (%)")
    if with_cause:
        is_b = (ours["wasteful"] == "B") & (ours["low_frac"].astype(float) > 0)
        for at, (cause, other) in enumerate(zip(ours["cause"], is_b)):
            told = ", ".join(filter(None, [str(cause), "B takes more" if other else ""]))
            ax.text(1.02, at, told, transform=ax.get_yaxis_transform(), va="center", fontsize=SMALL)
    _legend_above(ax, handles, _fitting(ax, 4, 2))
    return ax


def _case(row: dict[Any, Any], letters: int) -> str:
    file = str(row["a"]).split(":")[0].rpartition("/")[2].removesuffix(".py")
    return shortened("  ".join(filter(None, [str(row["case"]), file.replace("_", " ")])), letters)


def _papers(table: pd.DataFrame, place: dict[Any, int], ax: Axes) -> list[Any]:
    """Marks of the paper's values; what to write of them in the legend."""
    looks = {"paper_frac": ("D", "paper, end to end"), "part_frac": ("^", "paper, operator alone")}
    for row in table.to_dict("records"):
        at = place[(row["subject"], row["case"])] + 0.22
        least, most = (100 * float(row[name]) for name in ("paper_least_frac", "paper_frac"))
        if not np.isnan(least):
            ax.plot([least, most], [at, at], color="black", linewidth=0.6, zorder=5)
        for name, (marker, _) in looks.items():
            if not pd.isna(row[name]):
                ax.plot([100 * row[name]], [at], marker, color="black", markerfacecolor="white", markersize=3.2,
                        markeredgewidth=0.7, zorder=6)  # fmt: skip
    return [
        Line2D([], [], linestyle="", marker=marker, color="black", markerfacecolor="white", markersize=3.2, label=label)
        for name, (marker, label) in looks.items() if table[name].notna().any()
    ]  # fmt: skip


def against_itself(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """What workloads differ from themselves by: each comparison's mean, and the 95 % interval of it.

    Parameters
    ----------
    table : `analysis.energy.null_band`.
    """
    ax = plt.gca() if ax is None else ax
    ax.axvline(0, color="black", linewidth=0.6, zorder=1)
    for at, row in enumerate(table.to_dict("records")):
        mean, band = 100 * float(row["mean_frac"]), 100 * float(row["band_frac"])
        if math.isnan(mean) or math.isnan(band):
            place = ax.get_yaxis_transform()
            ax.text(0.01, at, NOT_MEASURED, transform=place, va="center", fontsize=6, color="dimgrey")
            continue
        ax.plot([mean - band, mean + band], [at, at], color=PALETTE[0], linewidth=1.4, zorder=3)
        ax.plot([mean], [at], "o", color=PALETTE[0], markersize=4, markeredgewidth=0, zorder=4)
    ax.set_yticks(range(len(table)), table["subject"], fontsize=SMALL)
    reach = 100 * (np.abs(table["mean_frac"].to_numpy(float)) + table["band_frac"].to_numpy(float))
    most = 1.1 * float(np.nanmax(reach)) if np.isfinite(reach).any() else 1.0
    ax.set_xlim(-most, most)
    listed(ax, len(table), "energy of A over that of A again, less 1 (%)")
    return ax


def loads(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Power of each load of a probe by each signal: the mean over repeats, and lines from the least to the most.

    Parameters
    ----------
    table : `analysis.energy.power_of_loads`.
    """
    ax = plt.gca() if ax is None else ax
    names = list(dict.fromkeys(table["load"]))
    row = {name: at for at, name in enumerate(names)}
    for number, (signal, (color, marker)) in enumerate(SIGNAL_LOOKS.items()):
        mine = table[table["signal"] == signal]
        y = mine["load"].map(row).to_numpy(float) + (number - 1) * 0.24
        mean, low, high = (mine[name].to_numpy(float) for name in ("mean_w", "low_w", "high_w"))
        ax.hlines(y, low, high, color=color, linewidth=1.2)
        ax.plot(mean, y, marker, color=color, markersize=4, markeredgewidth=0, linestyle="", label=signal)
        for at in y[np.isnan(mean)]:
            ax.text(0.01, at, f"{signal}: {NOT_MEASURED}", transform=ax.get_yaxis_transform(), va="center", fontsize=6,
                    color="dimgrey")  # fmt: skip
    ax.set_yticks(range(len(names)), names)
    ax.hlines(np.arange(1, len(names)) - 0.5, 0, 1, transform=ax.get_yaxis_transform(), color="#EEEEEE", linewidth=0.6)
    ax.set_xlim(left=0)
    listed(ax, len(names), "power (W)")
    if len(table):
        _legend_above(ax, ax.get_legend_handles_labels()[0], 3)
    return ax


def samples(table: pd.DataFrame, *, window_s: float = 2.0, ax: Axes | None = None) -> Axes:
    """Power over time by each signal as a load begins; what the 1-s mean misses over the first seconds is shaded.

    The counter's power is between two of its ticks, and scatters with the times at which they were seen.

    Parameters
    ----------
    table : `analysis.energy.power_over_time`. window_s : for which the means are compared, in the title.
    """
    ax = plt.gca() if ax is None else ax
    steps = {}
    for signal, (color, _) in SIGNAL_LOOKS.items():
        mine = table[table["signal"] == signal]
        if mine.empty:
            continue
        start, end, power = (mine[name].to_numpy(float) for name in ("start_s", "end_s", "power_w"))
        steps[signal] = (np.append(start, end[-1]), np.append(power, power[-1]))
        width = 1.6 if signal == SIGNALS["average_w"] else 1.0
        ax.step(*steps[signal], where="post", color=color, linewidth=width, label=signal)
    counter, average = (steps.get(SIGNALS[name]) for name in ("slope_w", "average_w"))
    if counter is not None and average is not None:
        # The window begins with the counter's first tick: before it, there is nothing to compare with.
        start_s = max(float(counter[0][0]), float(average[0][0]))
        at = np.unique(np.concatenate([counter[0], average[0], [window_s]]))
        at = at[(at >= start_s) & (at <= window_s)]
        true, told = (w[np.clip(np.searchsorted(t, at, side="right") - 1, 0, None)] for t, w in (counter, average))
        ax.fill_between(at, true, told, where=(told < true).tolist(), step="post", color=PALETTE[5], alpha=0.2, lw=0)
        true_w, told_w = (mean_power(table, SIGNALS[n], start_s, window_s) for n in ("slope_w", "average_w"))
        if true_w > 0 and not np.isnan(told_w):
            apart = f"{told_w / true_w - 1:+.0%}".replace("-", "\N{MINUS SIGN}")
            title = f"mean to {window_s:g} s: 1-s mean {apart} against the counter"
            ax.set_title(title, loc="right", fontsize=7, pad=14)
    if len(table):
        ax.set_xlim(0, float(table["end_s"].max()))
        _legend_above(ax, ax.get_legend_handles_labels()[0], 3)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("time since the load began (s)")
    ax.set_ylabel("power (W)")
    ax.grid(axis="y")
    return ax


def story(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Joules per call of A, of B and of the fix, with their intervals; cause and line above.

    Parameters
    ----------
    table : `analysis.energy.story`. The wasteful side has no whisker: the others' are against it.
    """
    ax = plt.gca() if ax is None else ax
    bars = table[table["part"].isin(list(SIDES))].reset_index(drop=True)
    size, unit = _unit(bars["call_j"].to_numpy(float))
    value, low, high = (bars[name].to_numpy(float) / size for name in ("call_j", "low_j", "high_j"))
    y = np.arange(len(bars))
    known = ~np.isnan(value)
    ax.barh(y[known], value[known], 0.62, color=[SIDES[part] for part in bars["part"][known]])
    sure = known & ~np.isnan(low) & ~np.isnan(high)
    spread = np.clip(np.stack([value - low, high - value]), 0, None)
    ax.errorbar(value[sure], y[sure], xerr=spread[:, sure], **WHISKER)
    ends = np.where(sure, np.maximum(value, high), value)
    top = float(np.nanmax(ends)) if known.any() else 1.0
    for at, row in enumerate(bars.to_dict("records")):
        text = NOT_MEASURED if not known[at] else f"{value[at]:.3g} {unit}"
        if not pd.isna(row["saved_frac"]):
            text += f", {-row['saved_frac']:+.1%}".replace("-", "\N{MINUS SIGN}")
        ax.text((ends[at] if known[at] else 0) + top * 0.025, at, text, va="center", fontsize=SMALL)
    ax.set_yticks(y, [_side(row, _fitting(ax, 24, 16)) for row in bars.to_dict("records")], fontsize=SMALL)
    ax.set_xlim(0, max(top, 1e-12) * 1.4)
    listed(ax, len(bars), f"energy per call ({unit})")
    told = table[table["part"] == "cause"]
    if len(told):
        lines = [str(told["what"].iloc[0]), str(told["line"].iloc[0])]
        width = int(_width_in(ax) * 13)
        wrapped = [part for line in lines if line for part in textwrap.wrap(line, width, max_lines=3, placeholder="…")]
        ax.set_title("\n".join(wrapped), loc="left", fontsize=7)
    return ax


def _side(row: dict[Any, Any], letters: int) -> str:
    what = str(row["what"]).rpartition("/")[2]
    return "\n".join([row["part"], *textwrap.wrap(shortened(what, 2 * letters), letters)])
