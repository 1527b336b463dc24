"""Where a step's joules go, what a difference saves, and what the card's signals say. Tables in, tables out.

What was not measured is empty here, too, and never 0. Intervals are of 95 %; an `error` is half of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from gpubloat.errors import GpubloatError
from gpubloat.tables.energy import VERDICTS

STEP = ["subject", "side"]
OPERATOR, UNMEASURED, REMAINDER, NO_KERNEL = "operator", "not measured", "remainder", "no kernel"  # kinds of rows
CLAIM = 0.05  # of which signals may differ, and that a difference must save to be called waste
SIGNALS = {"slope_w": "counter, slope", "instant_w": "instant", "average_w": "1-s mean"}
SAVED = ["saved_frac", "low_frac", "high_frac"]
# The 97.5 % quantile of Student's t for 1, 2, ... degrees of freedom, as printed everywhere; 1.96 for many.
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
PAPER_COLUMNS = [
    "case", "paper_case", "paper_printed", "paper_diagnosed", "paper_frac", "paper_least_frac", "part_frac",
    "paper_notes",
]  # fmt: skip
# Case of ours -> what the paper calls the same public reports.
PAPER_CASES = {
    "D1": ("hf-39073",), "D1-fp32": ("hf-39073",), "D2": ("pytorch-141822",), "D3": ("hf-14450", "pytorch-153195"),
    "D4": ("pytorch-76012",), "D5": ("pytorch-157334", "tf-96396"), "D6": ("hf-38977",), "D7": ("megatron-543",),
    "D11": ("vllm-10811",), "D13": ("diffusers-12131",), "D14": ("jax-29875",), "D15": ("jax-9239",),
    "D16": ("jax-28614",), "T1": ("pytorch-141210",), "T2": ("hf-34570",), "T3": ("pytorch-28224",),
    "T6": ("sglang-5128",),
}  # fmt: skip
# Where the paper and its artifacts say different things, or less than one would need.
CONTRADICTIONS = {
    "hf-14450": "the table says layout transforms, the public issue and the artifact are about TF32",
    "hf-34570": "its artifact has 121 mJ for the slow solver, which runs on the CPU, and 1,421 mJ for the fast one: by "
    "GPU energy alone the fault would be an improvement",
    "sglang-5128": "Table 1 says that its top-k uses inefficient interfaces; the issue itself was not found",
    "vllm-10811": "Table 1 says decode, the artifact shows prefill",
    "pytorch-76012": "the efficient side is 3 % slower in its artifact, over the paper's own limit of 1 %",
    "pytorch-141822": "its artifact has 6.71 J against 0.12 J, and a second page of it 7.37 J against 0.024 J",
    "pytorch-141210": "the axis of Figure 2 is in J where the artifact has 2.41 J in all: it must be mJ",
    "pytorch-28224": "missed by the paper: it costs time of the CPU, and hardly any energy of the GPU",
    "jax-9239": "its artifact saves 10 to 14 % of the call itself",
}


def by_operator(operators: pd.DataFrame, closure: pd.DataFrame) -> pd.DataFrame:
    """Operators of each step by energy, those that were not measured, and the remainder: together, exactly the step.

    Columns: subject, side, kind (operator; not measured; no kernel: views and the like, without energy; remainder),
    name, module, line, n_same, call_time_s, call_j, step_time_s, step_j, error_j (of step_j), step_frac, error_frac (of
    step_frac, with the step's own error), method, notes. The
    remainder is what was measured of the step and of no operator, and is negative where operators take more alone than
    inside the step. GpubloatError if the step of an operator is not in `closure`.
    """
    steps = set(closure[STEP].itertuples(index=False, name=None))
    for step in operators[STEP].itertuples(index=False, name=None):
        if step not in steps:
            raise GpubloatError(f"the step of {step[0]}, side {step[1]}, was not measured", "give its row of `closure`")
    parts = [_closed(operators, step) for step in closure.to_dict("records")]
    names = [*STEP, "kind", "name", "module", "line", "n_same", "call_time_s", "call_j", "step_time_s", "step_j",
             "error_j", "step_frac", "error_frac", "method", "notes"]  # fmt: skip
    return pd.concat(parts, ignore_index=True)[names] if parts else pd.DataFrame(columns=names)


def _closed(operators: pd.DataFrame, step: dict[Any, Any]) -> pd.DataFrame:
    """The rows of one step."""
    mine = operators[(operators["subject"] == step["subject"]) & (operators["side"] == step["side"])].copy()
    mine["error_j"] = mine["n_same"] * mine["error_j"]
    is_idle = (mine["method"] == NO_KERNEL).to_numpy(bool)
    mine["kind"] = np.where(mine["step_j"].notna(), OPERATOR, np.where(is_idle, NO_KERNEL, UNMEASURED))
    mine["order"] = mine["kind"].map({OPERATOR: 0, UNMEASURED: 1, NO_KERNEL: 2})
    mine = mine.sort_values(["order", "step_j", "step_time_s", "name"], ascending=[True, False, False, True])
    known = mine[mine["step_j"].notna()]
    taken_j, error_j = _total(known["step_j"]), _root_sum(known["error_j"])
    whole_j = float(step["step_j"])
    last: dict[str, Any] = {**{n: step[n] for n in STEP}, "kind": REMAINDER, "name": "not in kernels", "module": ""}
    last |= {"line": "", "n_same": 1, "step_j": whole_j - taken_j, "method": "step less its operators"}
    last["error_j"] = math.hypot(error_j, float(step["error_j"]))
    notes = ["the step was not measured"] if math.isnan(whole_j) else []
    if pd.notna(step["waiting_j"]) and step["waiting_j"] > 0:
        notes.append(f"an idle GPU takes about {step['waiting_j'] / whole_j:.1%} of the step while no kernel runs")
    if last["step_j"] < 0:
        notes.append("operators take more alone than inside the step")
    n_missing = int(mine.loc[mine["kind"] == UNMEASURED, "n_same"].sum())
    if n_missing:
        last["name"] = "not in kernels, or not measured"
        notes.append(f"with {n_missing} operators that were not measured{_of_time(step)}")
    last["notes"] = "; ".join(notes)
    table = pd.concat([mine, pd.DataFrame([last])], ignore_index=True) if len(mine) else pd.DataFrame([last])
    missing = [name for name in ("call_time_s", "call_j", "step_time_s") if name not in table]
    table = table.reindex(columns=[*table.columns, *missing])
    return _shares(table, whole_j, float(step["error_j"]))


def _shares(table: pd.DataFrame, whole_j: float, whole_error_j: float) -> pd.DataFrame:
    """With step_frac and error_frac; the step's error weighs on a part by its share, on the rest by that of parts."""
    whole_j = whole_j if whole_j > 0 else math.nan
    part = table["step_j"].astype(float) / whole_j
    is_rest = table["kind"] == REMAINDER
    weight_j = np.where(is_rest, 1 - part, part) * whole_error_j
    own_j = table["error_j"].to_numpy(float)
    # The remainder's own error holds the step's already: without it, that of the operators is left.
    own_j = np.where(is_rest, np.sqrt(np.clip(own_j**2 - whole_error_j**2, 0, None)), own_j)
    return table.assign(step_frac=part, error_frac=np.hypot(own_j, weight_j) / whole_j)


def _of_time(step: dict[Any, Any]) -> str:
    share = step["not_measured_time_frac"]
    return "" if pd.isna(share) else f", {share:.1%} of the step's time"


def _total(values: pd.Series) -> float:
    return math.fsum(values.astype(float))


def _root_sum(values: pd.Series) -> float:
    return math.sqrt(math.fsum(values.astype(float) ** 2))


def by_name(operators: pd.DataFrame, closure: pd.DataFrame) -> pd.DataFrame:
    """`by_operator`, operators of one name together, without those that run no kernel.

    Columns: subject, side, kind, name, n_operators, n_not_measured (of these), step_j (of those measured; empty if none
    was), error_j, step_frac, error_frac. The remainder is a row of its own; a step's rows sum to it.
    """
    return _grouped(by_operator(operators, closure), closure)


def by_module(operators: pd.DataFrame, closure: pd.DataFrame, depth: int | None = None) -> pd.DataFrame:
    """`by_operator` by module, layers of a model together: columns of `by_name`, `name` being the module.

    Identical operators were measured once and stand under the module of the first, so numbers of layers are written
    as `*`. depth : how many parts of a module's path to keep; default, all.
    """
    table = by_operator(operators, closure)
    parts = table["module"].astype(str).str.replace(r"(?<![^.])\d+(?![^.])", "*", regex=True).str.split(".")
    path = parts.map(lambda names: ".".join(names[:depth]) or "(no module)")
    return _grouped(table.assign(name=table["name"].where(table["kind"] == REMAINDER, path)), closure)


def _grouped(table: pd.DataFrame, closure: pd.DataFrame) -> pd.DataFrame:
    names = [*STEP, "kind", "name", "n_operators", "n_not_measured", "step_j", "error_j", "step_frac", "error_frac"]
    parts = []
    table = table[table["kind"] != NO_KERNEL]
    for step in closure.to_dict("records"):
        mine = table[(table["subject"] == step["subject"]) & (table["side"] == step["side"])]
        rows = []
        for (is_rest, name), group in mine.groupby([mine["kind"] == REMAINDER, "name"], sort=False):
            known = group[group["step_j"].notna()]
            row: dict[str, Any] = {
                **{n: step[n] for n in STEP},
                "name": name,
                "n_operators": int(group["n_same"].sum()),
            }
            row["n_not_measured"] = 0 if is_rest else row["n_operators"] - int(known["n_same"].sum())
            row["kind"] = REMAINDER if is_rest else OPERATOR if len(known) else UNMEASURED
            row["step_j"] = _total(known["step_j"]) if len(known) else math.nan
            rows.append(row | {"error_j": _root_sum(known["error_j"]) if len(known) else math.nan})
        grouped = _shares(pd.DataFrame(rows), float(step["step_j"]), float(step["error_j"]))
        order = grouped["kind"].map({OPERATOR: 0, UNMEASURED: 1, REMAINDER: 2})
        grouped = grouped.assign(order=order).sort_values(["order", "step_j", "name"], ascending=[True, False, True])
        parts.append(grouped[names])
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=names)


def two_systems(operators: pd.DataFrame, closure: pd.DataFrame, by: str = "name") -> pd.DataFrame:
    """Two sides of one subject side by side, by `name` of operators or by `module`; largest differences first.

    Columns: subject, kind, name, a_n, b_n (operators), a_step_j, b_step_j, a_error_j, b_error_j, a_frac, b_frac (of its
    step), more_j (A less B). A side that has no such operator has 0 J and `n` 0; one that has, and of which none was
    measured, is empty. Each side's column sums to its step. GpubloatError for another `by`.
    """
    groupings: dict[str, Callable[[pd.DataFrame, pd.DataFrame], pd.DataFrame]] = {"name": by_name, "module": by_module}
    if by not in groupings:
        raise GpubloatError(f"steps are not grouped by {by!r}", f"known: {', '.join(groupings)}")
    table = groupings[by](operators, closure)
    table["is_rest"] = table["kind"] == REMAINDER
    rest = table.loc[table["is_rest"], "name"]
    table["name"] = table["name"].mask(
        table["is_rest"], max(rest, key=len, default="")
    )  # of both sides: the fuller one
    keys = ["subject", "is_rest", "name"]
    short = {"n_operators": "n", "step_j": "step_j", "error_j": "error_j", "step_frac": "frac"}
    sides = []
    for side in ("A", "B"):
        mine = table.loc[table["side"] == side, [*keys, *short]]
        sides.append(mine.rename(columns={name: f"{side.lower()}_{to}" for name, to in short.items()}))
    both = sides[0].merge(sides[1], on=keys, how="outer")
    for side in ("a", "b"):
        is_absent = both[f"{side}_n"].isna()
        for name in ("n", "step_j", "error_j", "frac"):
            both[f"{side}_{name}"] = both[f"{side}_{name}"].astype(float).mask(is_absent, 0.0)
        both[f"{side}_n"] = both[f"{side}_n"].astype("int64")
    both["more_j"] = both["a_step_j"] - both["b_step_j"]
    both["kind"] = np.where(both["is_rest"], REMAINDER, np.where(both["more_j"].isna(), UNMEASURED, OPERATOR))
    both["size"] = -both["more_j"].abs()
    both = both.sort_values(["subject", "is_rest", "size", "name"], ignore_index=True)
    return both[["subject", "kind", "name", *(f"{s}_{n}" for n in ("n", "step_j", "error_j", "frac") for s in "ab"),
                 "more_j"]]  # fmt: skip


def power_of_loads(loads: pd.DataFrame) -> pd.DataFrame:
    """Power of each load of a probe by each signal: its mean and range over repeats.

    Columns: load, signal, n (repeats that gave a value), mean_w, low_w, high_w (least and most), error_w (the median
    error of a repeat, of the slope alone). Rows in the order of the probe; empty where a signal gave nothing.
    """
    rows = []
    for load, group in loads.groupby("load", sort=False):
        for name, signal in SIGNALS.items():
            values = group[name].astype(float).dropna()
            error_w = float(group["slope_error_w"].astype(float).median()) if name == "slope_w" else math.nan
            rows.append((load, signal, len(values), values.mean(), values.min(), values.max(), error_w))
    return pd.DataFrame(rows, columns=["load", "signal", "n", "mean_w", "low_w", "high_w", "error_w"])


def agreement(loads: pd.DataFrame) -> pd.DataFrame:
    """How far the means of a card's own power lie from the slope of its counter.

    Columns: load, n_repeats, is_steady (all repeats), slope_w, instant_frac, average_frac (mean difference from the
    slope, relative to it, with its sign), worst_frac (largest of a repeat, without), agrees (worst within 5 %; empty
    where it was not measured).
    """
    rows = []
    for load, group in loads.groupby("load", sort=False):
        slope_w = group["slope_w"].astype(float)
        apart = [float((group[name].astype(float) / slope_w - 1).mean()) for name in ("instant_w", "average_w")]
        worst = float(group["agreement_frac"].astype(float).max())
        agrees = pd.NA if math.isnan(worst) else worst <= CLAIM
        rows.append((load, len(group), bool(group["is_steady"].all()), float(slope_w.mean()), *apart, worst, agrees))
    names = ["load", "n_repeats", "is_steady", "slope_w", "instant_frac", "average_frac", "worst_frac", "agrees"]
    return pd.DataFrame(rows, columns=names).astype({"agrees": "boolean"})


def power_over_time(samples: pd.DataFrame, part: str) -> pd.DataFrame:
    """Stretches of one part of a recording in which a signal has one value; the counter's is that between two ticks.

    Columns: signal, start_s, end_s (from the part's first reading), power_w. GpubloatError if there is no such part.
    """
    mine = samples[samples["part"] == part]
    if mine.empty:
        known = ", ".join(samples["part"].astype(str).unique()) or "none"
        raise GpubloatError(f"no part {part!r} was recorded", f"known: {known}")
    t_s = mine["t_s"].to_numpy(float) - float(mine["t_s"].iloc[0])
    frames = []
    for name, signal in (("counter_mj", SIGNALS["slope_w"]), ("instant_w", "instant"), ("average_w", "1-s mean")):
        values = mine[name].to_numpy(float)
        t, values = t_s[~np.isnan(values)], values[~np.isnan(values)]
        changes = np.flatnonzero(np.diff(values)) + 1
        if name == "counter_mj":
            start, end = t[changes[:-1]], t[changes[1:]]
            power = np.diff(values[changes]) / 1000 / (end - start)
        else:
            at = np.concatenate([[0], changes]) if len(values) else changes
            start, end, power = t[at], np.append(t[at[1:]], t[-1:]), values[at]
        frames.append(pd.DataFrame({"signal": signal, "start_s": start, "end_s": end, "power_w": power}))
    table = pd.concat(frames, ignore_index=True)
    return table[(table["end_s"] > table["start_s"]) & (table["power_w"] >= 0)].reset_index(drop=True)


def mean_power(over_time: pd.DataFrame, signal: str, start_s: float, end_s: float) -> float:
    """W, mean over a window of `power_over_time`; NaN where the signal covers under nine tenths of it."""
    mine = over_time[over_time["signal"] == signal]
    inside = mine["end_s"].clip(upper=end_s) - mine["start_s"].clip(lower=start_s)
    inside = inside.clip(lower=0).astype(float)
    covered = float(inside.sum())
    return float((inside * mine["power_w"]).sum()) / covered if covered >= 0.9 * (end_s - start_s) > 0 else math.nan


def paper_cases(published: pd.DataFrame) -> pd.DataFrame:
    """What the paper prints for each public case that we have, too, its shares as ours: saved by the wasteful side.

    Columns: case, paper_case, paper_printed (end to end, in percent), paper_diagnosed (yes, no, or empty: it is one of
    the new cases), paper_frac (end to end; where only a bound is printed, the bound), paper_least_frac (what it is at
    least, where it is not known which side was divided by, and 0 for a bound), part_frac (of the operator or region
    alone, where the artifact or the text has one that is no end-to-end run), paper_notes.
    """
    mine = published[published["paper"] == "magneton"]

    def row(item: str, subject: str, quantity: str) -> dict[Any, Any]:
        found = mine[(mine["item"] == item) & (mine["subject"] == subject) & (mine["quantity"] == quantity)]
        none = {"printed": "", "value": math.nan, "upper": math.nan, "status": "missing", "note": ""}
        return found.iloc[0].to_dict() if len(found) else none

    rows = []
    for case, names in PAPER_CASES.items():
        for name in names:
            whole = row("Table 2", name, "energy_difference")
            divided = str(row("artifact", name, "denominator_matching_table2")["printed"])
            # Where the artifact gives the table's number, it is of the same end-to-end run.
            part = row("artifact", name, "energy_reduction") if divided.startswith("neither") else row("", name, "")
            if whole["status"] == "missing":
                whole = row("text 6.3", f"case={name} | part=end to end", "energy_reduction")
                part = row("text 6.3", f"case={name} | part=GELU operator", "energy_reduction")
            share, least, notes = _as_ours(whole, divided)
            diagnosed = row("Table 2", name, "diagnosed")["printed"]
            rows.append((case, name, whole["printed"], diagnosed, share, least, float(part["value"]) / 100,
                         "; ".join(filter(None, [notes, CONTRADICTIONS.get(name, "")]))))  # fmt: skip
    return pd.DataFrame(rows, columns=PAPER_COLUMNS)


def _as_ours(whole: dict[Any, Any], divided: str) -> tuple[float, float, str]:
    """Share saved of the wasteful side, the least it may be, and what to know."""
    share = float(whole["value"]) / 100
    if whole["status"] == "missing":
        return math.nan, math.nan, "the paper gives no energy"
    if math.isnan(share):
        return float(whole["upper"]) / 100, 0.0, "only a bound is printed"
    if divided.startswith("excess"):
        return share / (1 + share), math.nan, "printed as a share of the efficient side"
    if divided.startswith("reduction") or str(whole.get("item", "")).startswith("text"):
        return share, math.nan, ""
    return share, share / (1 + share), "the table mixes shares of either side: this one is not known"


def cases(comparisons: pd.DataFrame, published: pd.DataFrame | None = None) -> pd.DataFrame:
    """Comparisons of cases, by verdict and share saved, beside what the paper prints for the same public reports.

    One row per comparison and case of the paper: one of ours that has two has two rows. Columns: subject, case,
    framework, a, b, verdict, reason, saved_frac, low_frac, high_frac, wasteful, time_ratio, band_frac, outputs_equal,
    cause, a_line, b_line, notes, and those of `paper_cases`, empty where the paper has no such case or `published` is
    not given. The paper's shares are end to end, of other inputs and another program; ours are of the functions.
    """
    names = ["subject", "case", "framework", "a", "b", "verdict", "reason", *SAVED, "wasteful", "time_ratio",
             "band_frac", "outputs_equal", "cause", "a_line", "b_line", "notes"]  # fmt: skip
    table = comparisons[names].copy()
    table["order"] = table["verdict"].map({verdict: i for i, verdict in enumerate(VERDICTS)})
    theirs = pd.DataFrame(columns=PAPER_COLUMNS) if published is None else paper_cases(published)
    table = table.merge(theirs.astype({"case": table["case"].dtype}), on="case", how="left")
    texts = ["paper_case", "paper_printed", "paper_diagnosed", "paper_notes"]
    table[texts] = table[texts].astype(object).fillna("")
    order = ["order", "saved_frac", "case", "paper_case"]
    table = table.sort_values(order, ascending=[True, False, True, True], ignore_index=True)
    return table.drop(columns="order")


def story(comparisons: pd.DataFrame, regions: pd.DataFrame, case: str) -> pd.DataFrame:
    """One case from the flag to the line and to the fix, measured again: a row per part, in this order.

    Columns: part (A, B, region, cause, fix), what, line, call_j, low_j, high_j, saved_frac, low_frac, high_frac. Shares
    of the efficient side and of the fix are against the wasteful side, and so are their intervals, on whose joules per
    call those of the others rest; it has none itself. GpubloatError if the case was not compared just once.
    """
    found = comparisons[comparisons["case"] == case]
    if len(found) != 1:
        known = ", ".join(sorted(comparisons["case"].astype(str).unique())) or "none"
        raise GpubloatError(f"case {case!r} was compared {len(found)} times, not once", f"known cases: {known}")
    row = found.iloc[0]
    wasteful = str(row["wasteful"])
    whole_j = float(row[f"{wasteful.lower()}_call_j"]) if wasteful in ("A", "B") else math.nan
    rows: list[dict[str, Any]] = []
    for side in ("A", "B"):
        is_less = side != wasteful
        shares = [float(row[n]) if is_less else math.nan for n in SAVED]
        own = {"call_j": float(row[f"{side.lower()}_call_j"])}
        rows.append({"part": side, "what": row[side.lower()], "line": row[f"{side.lower()}_line"]}
                    | _joules(whole_j, shares) | own)  # fmt: skip
    mine = regions[(regions["subject"] == row["subject"]) & ~regions["is_same"].astype(bool)]
    for region in mine.sort_values("a_time_s", ascending=False).to_dict("records"):
        what = f"{region['a_operators']} | {region['b_operators']}"
        saved = {name: float(region[name]) for name in SAVED}
        rows.append({"part": "region", "what": what, "line": region["a_line"], "call_j": region["a_call_j"]} | saved)
    told = ": ".join(filter(None, [str(row["cause"]), str(row["evidence"])]))
    rows.append({"part": "cause", "what": told, "line": row["b_line" if wasteful == "B" else "a_line"]})
    fix = _joules(whole_j, [float(row[f"fix_{name}"]) for name in SAVED])
    rows.append({"part": "fix", "what": row["fix"] or row["remedy"], "line": ""} | fix)
    return pd.DataFrame(rows, columns=["part", "what", "line", "call_j", "low_j", "high_j", *SAVED])


def _joules(whole_j: float, shares: list[float]) -> dict[str, float]:
    saved, low, high = shares
    joules = {"call_j": whole_j * (1 - saved), "low_j": whole_j * (1 - high), "high_j": whole_j * (1 - low)}
    return joules | dict(zip(SAVED, shares))


def null_band(blocks: pd.DataFrame) -> pd.DataFrame:
    """What a workload differs from itself by: blocks A B B A in which both sides were the same, by subject.

    Columns: subject, n_blocks (of four), mean_frac (A over B, less 1), least_frac, most_frac (of a block of four),
    band_frac (half the 95 % interval of the mean: the least that may be claimed), call_j (mean), notes (why the rest is
    empty). Give rows of comparisons of a workload with itself only.
    """
    rows = []
    for subject, group in blocks.groupby("subject", sort=False):
        ordered = group.sort_values("order")
        call_j = (ordered["energy_j"].astype(float) / ordered["n_calls"].clip(lower=1)).to_numpy()
        sides = "".join(ordered["side"])
        n = len(sides) // 4
        row: dict[str, Any] = {"subject": subject, "n_blocks": n, "notes": ""}
        if len(sides) % 4 or {sides[i : i + 4] for i in range(0, len(sides), 4)} - {"ABBA", "BAAB"}:
            row["notes"] = "the order of measurements is not A B B A"
        elif not (call_j > 0).all():
            row["notes"] = "a block has no energy"
        else:
            signs = np.where(ordered["side"] == "A", 0.5, -0.5)
            ratios = (signs * np.log(call_j)).reshape(-1, 4).sum(axis=1)
            low, mean, high = (math.expm1(v) for v in (ratios.min(), ratios.mean(), ratios.max()))
            row |= {"mean_frac": mean, "least_frac": low, "most_frac": high, "call_j": call_j.mean()}
            if n < 3:
                row["notes"] = f"{n} blocks were measured, and 3 are needed"
            else:
                t = T_QUANTILES[n - 2] if n - 2 < len(T_QUANTILES) else 1.96
                row["band_frac"] = math.expm1(t * ratios.std(ddof=1) / math.sqrt(n))
        rows.append(row)
    names = ["subject", "n_blocks", "mean_frac", "least_frac", "most_frac", "band_frac", "call_j", "notes"]
    return pd.DataFrame(rows, columns=names)


def footprint(joules: float, times: float, grid_g_per_kwh: float) -> dict[str, float]:
    """Energy and emissions of joules taken so many times: energy_kwh, emitted_gco2e; NaN if joules were not measured.

    grid_g_per_kwh : grams of CO2 equivalent per kWh of the grid at the place and time; it differs a hundredfold between
    grids, so there is no default. GpubloatError if it or `times` is not a number from 0 on.

    Examples
    --------
    >>> footprint(7.2, 1_000_000, grid_g_per_kwh=300)
    {'energy_kwh': 2.0, 'emitted_gco2e': 600.0}
    """
    for name, value in (("grid_g_per_kwh", grid_g_per_kwh), ("times", times)):
        if not (math.isfinite(value) and value >= 0):
            raise GpubloatError(f"{name} is {value}", "give a number, 0 or more")
    energy_kwh = joules * times / 3.6e6
    return {"energy_kwh": energy_kwh, "emitted_gco2e": energy_kwh * grid_g_per_kwh}
