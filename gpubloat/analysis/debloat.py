"""What was removed and what that saves: Tables 2, 3, 5-8, 10 and Figures 5-7 of Negativa-ML (MLSys 2025).

Arguments are tables of debloated and verified runs, by workload. Reductions are shares of what was there before: 0.55
is "-55 %", a negative one is growth, an empty one says that there was nothing to reduce. "Unused" always means unused
in these runs. `analysis.usage` has what the runs used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from gpubloat.analysis.libraries import folded, pareto
from gpubloat.errors import GpubloatError
from gpubloat.tables.removal import Reduction

Tables = Mapping[str, pd.DataFrame]  # by workload

# reduction -> (before, removed), and (before, after) for the three sizes of a file
REMOVED = {
    "cpu_code": ("cpu_code_bytes", "cpu_removed_bytes"),
    "function": ("n_functions", "n_functions_removed"),
    "gpu_code": ("gpu_code_bytes", "gpu_removed_bytes"),
    "element": ("n_elements", "n_elements_removed"),
}
SIZES = ("file", "allocated", "zstd")
REASONS = ("other_architecture", "unused_element")  # I and II
# quantity of a verdict -> unit
RUNTIME = {"peak_rss": "bytes", "peak_gpu": "bytes", "wall": "s"}


def by_workload(reductions: Tables) -> pd.DataFrame:
    """Table 2 (and 6 and 10, with other workloads): one row per workload, summed over its libraries.

    `reductions` are tables `reduction`. Columns: workload, n_libraries, then sizes and counts before debloating, each
    with its reduction: file_bytes (logical), allocated_bytes (blocks on disk), zstd_bytes (compressed; empty if not
    known of every library), cpu_code_bytes, n_functions, n_functions_unknown (kept), gpu_code_bytes, n_elements; and
    file_, allocated_, zstd_, cpu_code_, function_, gpu_code_, element_reduction_frac.
    """
    rows = []
    for workload, table in reductions.items():
        numbers = table.drop(columns="library").astype("Float64").sum(skipna=False)
        rows.append({"workload": workload, "n_libraries": len(table), **numbers})
    empty = Reduction.none().rename(columns={"library": "workload"}).assign(n_libraries=0)
    return _reduced(pd.DataFrame(rows) if rows else empty)


def by_library(reduction: pd.DataFrame) -> pd.DataFrame:
    """The same columns as `by_workload` for the libraries of one workload, one row each, the largest first."""
    return _reduced(reduction).sort_values(["file_bytes", "library"], ascending=[False, True], ignore_index=True)


def overview(reduction: pd.DataFrame, top: int = 20) -> pd.DataFrame:
    """One row per library, the most removed first, then the other libraries, then the total, if several.

    Columns: library, file_bytes, on_disk_bytes (of the copy: holes take none), then cpu_code_bytes, n_functions,
    gpu_code_bytes, n_elements, each followed by the share that was removed: cpu_code_removed_frac and so on.
    """
    columns = ["file_bytes", "on_disk_bytes", *(c for pair in REMOVED.values() for c in pair)]
    removed = reduction["cpu_removed_bytes"] + reduction["gpu_removed_bytes"]
    order = removed.sort_values(ascending=False, kind="stable").index
    table = reduction.rename(columns={"allocated_bytes_after": "on_disk_bytes"}).loc[order, ["library", *columns]]
    table = folded(table, top)
    for part, (before, gone) in REMOVED.items():
        table[gone] = table[gone] / table[before].replace(0, np.nan)
        table = table.rename(columns={gone: f"{part}_removed_frac"})
    return table


def largest(reductions: Tables) -> pd.DataFrame:
    """Table 3: the largest library of each workload. Columns: workload, library, then as `by_workload`."""
    tables = [by_library(table).head(1).assign(workload=workload) for workload, table in reductions.items()]
    table = pd.concat(tables, ignore_index=True) if tables else by_library(Reduction.none()).assign(workload="")
    return table[["workload", *(c for c in table.columns if c != "workload")]]


def distributions(reductions: Tables) -> pd.DataFrame:
    """Figure 5: reductions of single libraries, long; the sizes and the counts.

    Columns: workload, library, part (cpu_code and gpu_code: bytes; function and element: counts), reduction_frac. A
    library without GPU code is in no row of gpu_code.
    """
    tables = []
    for workload, table in reductions.items():
        for part, (before, removed) in REMOVED.items():
            rows = table.loc[table[before] > 0, ["library"]]
            share = table[removed] / table[before].where(table[before] > 0)
            tables.append(rows.assign(workload=workload, part=part, reduction_frac=share.astype(float)))
    columns = ["workload", "library", "part", "reduction_frac"]
    return pd.concat(tables, ignore_index=True)[columns] if tables else pd.DataFrame(columns=columns)


def quartiles(table: pd.DataFrame, by: Sequence[str] = ("part",)) -> pd.DataFrame:
    """Figure 5 in numbers. One row per group of `distributions`: n_libraries, min_frac, lower_frac (quartile),
    median_frac, upper_frac (quartile), max_frac, and above_80_frac: share of its libraries reduced by more than 80 %.
    """
    groups = table.groupby(list(by), sort=False)["reduction_frac"]
    result = groups.agg(
        n_libraries="size",
        min_frac="min",
        lower_frac=lambda x: x.quantile(0.25),
        median_frac="median",
        upper_frac=lambda x: x.quantile(0.75),
        max_frac="max",
        above_80_frac=lambda x: (x > 0.8).mean(),
    )
    return result.reset_index()


def savings(reduction: pd.DataFrame, of: str = "allocated") -> pd.DataFrame:
    """Figure 6: bytes saved per library, the most first, with running shares.

    `of` is file, allocated or zstd. Columns: library, saved_bytes, rank, rank_frac, cumulative_frac.
    """
    saved = (reduction[f"{of}_bytes"] - reduction[f"{of}_bytes_after"]).astype("Float64")
    if saved.isna().any():
        raise GpubloatError(f"the {of} size is not known of every library", "debloat again and ask for it")
    return pareto(reduction[["library"]].assign(saved_bytes=saved.astype("int64")), "saved_bytes")


def concentration(reductions: Tables, of: str = "allocated", *, level: float = 0.9, top: float = 0.1) -> pd.DataFrame:
    """Figure 6 in numbers: one row per workload.

    Columns: workload, n_libraries, saved_bytes, n_for_level (fewest libraries that give `level` of it), top_share_frac
    (what the `top` share of the libraries, rounded up, gives of it). Empty where nothing was saved.
    """
    rows = []
    for workload, reduction in reductions.items():
        curve = savings(reduction, of)
        saved = int(curve["saved_bytes"].sum())
        enough = curve.loc[curve["cumulative_frac"] >= level - 1e-12, "rank"]
        first = math.ceil(top * len(curve) - 1e-9)
        share = float(curve["cumulative_frac"].iloc[first - 1]) if saved > 0 and first else np.nan
        n = int(enough.iloc[0]) if saved > 0 and len(enough) else None
        rows.append((workload, len(curve), saved, n, share))
    columns = ["workload", "n_libraries", "saved_bytes", "n_for_level", "top_share_frac"]
    return pd.DataFrame(rows, columns=columns).astype({"n_for_level": "Int64"})


def reasons(removed: Tables, by: Sequence[str] = ("workload", "library")) -> pd.DataFrame:
    """Figure 7: removed elements by reason. I: other_architecture; II: unused_element, in these runs.

    `removed` are tables `removed`; functions in them do not count here. Columns: `by`, reason, n_removed,
    removed_bytes, share_frac and bytes_share_frac (of the removed elements of the group). Both reasons have a row in
    each group that has one; shares of bytes are empty where all of them are 0.
    """
    keys = list(by)
    tables = [table[table["what"] == "element"].assign(workload=name) for name, table in removed.items()]
    columns = [*keys, "reason", "n_removed", "removed_bytes", "share_frac", "bytes_share_frac"]
    if not any(len(table) for table in tables):
        return pd.DataFrame(columns=columns)
    rows = pd.concat(tables, ignore_index=True)
    groups = rows[keys].drop_duplicates().merge(pd.DataFrame({"reason": REASONS}), how="cross")
    counts = rows.groupby([*keys, "reason"], as_index=False).agg(
        n_removed=("size_bytes", "size"), removed_bytes=("size_bytes", "sum")
    )
    result = groups.merge(counts, on=[*keys, "reason"], how="left")
    result = result.fillna({"n_removed": 0, "removed_bytes": 0}).astype({"n_removed": int, "removed_bytes": int})
    totals = result.groupby(keys)[["n_removed", "removed_bytes"]].transform("sum")
    result["share_frac"] = result["n_removed"] / totals["n_removed"]
    result["bytes_share_frac"] = result["removed_bytes"] / totals["removed_bytes"].where(totals["removed_bytes"] > 0)
    return result[columns]


def runtime(verdicts: Tables) -> pd.DataFrame:
    """Tables 5 and 7: medians before and after, and absolute and relative reductions. One row per workload and loading.

    `verdicts` are tables `verdicts`. Columns: workload, loading, n_repeats, verdict; for peak_rss and peak_gpu:
    _bytes, _bytes_after, _reduction_bytes, _reduction_frac; for wall: _s, _s_after, _reduction_s, _reduction_frac,
    _spread_s, _spread_s_after (largest minus smallest), and is_wall_beyond_spread: the difference is larger than both
    spreads together, so no run of the one was as fast as any run of the other; empty after one round, which has none.
    """
    tables = [table.assign(workload=workload) for workload, table in verdicts.items() if len(table)]
    columns = ["workload", "loading", "n_repeats", "verdict"]
    for name, unit in RUNTIME.items():
        parts = [f"_{unit}", f"_{unit}_after", f"_reduction_{unit}", "_reduction_frac"]
        columns += [name + part for part in parts]
    columns += ["wall_spread_s", "wall_spread_s_after", "is_wall_beyond_spread"]
    if not tables:
        return pd.DataFrame(columns=columns)
    table = pd.concat(tables, ignore_index=True)
    for name, unit in RUNTIME.items():
        before = table[f"{name}_{unit}"].astype("Float64")
        less = before - table[f"{name}_{unit}_after"].astype("Float64")
        table[f"{name}_reduction_{unit}"] = less.astype("Int64" if unit == "bytes" else float)
        table[f"{name}_reduction_frac"] = _share(less, before)
    spread = table["wall_spread_s"] + table["wall_spread_s_after"]
    is_beyond = (table["wall_reduction_s"].abs() > spread).astype("boolean")
    table["is_wall_beyond_spread"] = is_beyond.where(table["n_repeats"] > 1)
    return table[columns]


def before_after(repeats: Tables) -> pd.DataFrame:
    """Tables 5 and 7 with the spread of every quantity. One row per workload, loading and variant.

    `repeats` are tables `repeats`; runs that ended unlike the first original one are left out (a run that crashes
    early needs little memory). Columns: workload, loading, variant, n_repeats, and for peak_rss, peak_gpu (bytes) and
    wall (s) the median, the smallest and the largest: peak_rss_bytes, peak_rss_min_bytes, ... wall_max_s.
    """
    columns = ["workload", "loading", "variant", "n_repeats"]
    columns += [f"{name}{part}_{unit}" for name, unit in RUNTIME.items() for part in ("", "_min", "_max")]
    tables = []
    for workload, table in repeats.items():
        originals = (
            table[table["variant"] == "original"].sort_values("repeat").groupby("loading")["exit_status"].first()
        )
        kept = table[table["exit_status"] == table["loading"].map(originals)]
        kept = kept.assign(peak_gpu_bytes=kept["peak_gpu_bytes"].astype("Float64").astype(float))
        groups = kept.groupby(["loading", "variant"], as_index=False)
        if not len(kept):
            continue
        parts = {
            f"{name}{part}_{unit}": (f"{name}_{unit}", how)
            for name, unit in RUNTIME.items()
            for part, how in (("", "median"), ("_min", "min"), ("_max", "max"))
        }
        found = groups.agg(n_repeats=("repeat", "size"), **parts)
        found["order"] = found["variant"] != "original"
        tables.append(found.sort_values(["loading", "order"]).assign(workload=workload))
    return pd.concat(tables, ignore_index=True)[columns] if tables else pd.DataFrame(columns=columns)


def image(sizes: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Bytes of a whole folder of packages with each set of copies in it. One row per set; the first is without.

    `sizes`: `sizes` in the provenance of a run "image". Columns: copies, n_files, n_replaced, and for logical,
    allocated, tar and zstd (of the tar): _bytes and _reduction_frac, against the first row.
    """
    table = pd.DataFrame(sizes)
    result = table[["copies", "n_files", "n_replaced"]].copy()
    for name in ("logical", "allocated", "tar", "zstd"):
        after = table[f"{name}_bytes"]
        result[f"{name}_bytes"] = after
        result[f"{name}_reduction_frac"] = 1 - after / after.iloc[0]
    return result


def costs(times: pd.DataFrame) -> pd.DataFrame:
    """Table 8 and the detector's overhead of section 4.6: what tracing and debloating cost. One row per workload.

    `times`: workload, run_s (the untraced run), trace_s (the traced one), debloat_s, and locate_s if it was timed
    apart; from the runs' provenance. Adds end_to_end_s (all steps but the untraced run; empty if one is not known),
    trace_overhead_frac (0.41: 41 % longer than untraced) and per_run_ratio (end to end over the untraced run).
    """
    steps = [c for c in ("trace_s", "locate_s", "debloat_s") if c in times]
    result = times.copy()
    result["end_to_end_s"] = result[steps].astype(float).sum(axis=1, skipna=False)
    run = result["run_s"].astype(float)
    result["trace_overhead_frac"] = result["trace_s"] / run.where(run > 0) - 1
    result["per_run_ratio"] = result["end_to_end_s"] / run.where(run > 0)
    return result


def as_measured(table: pd.DataFrame, names: Mapping[str, str], subject: str = "workload") -> pd.DataFrame:
    """Rows for `analysis.compare.beside`: columns of `table` under the names of published quantities, units kept.

    `names`: column -> quantity with its unit suffix; ``{"wall_reduction_frac": "execution_time_reduction_frac"}``.
    Columns: subject, quantity, value, unit (empty: the suffix says it).
    """
    wide = table[[subject, *names]].rename(columns={subject: "subject", **names})
    return wide.melt("subject", var_name="quantity").astype({"value": float}).assign(unit="")


def _share(part: pd.Series, whole: pd.Series) -> pd.Series:
    return (part.astype("Float64") / whole.astype("Float64").where(whole > 0)).astype(float)


def _reduced(table: pd.DataFrame) -> pd.DataFrame:
    """Keys, sizes and counts before, each followed by its reduction."""
    result = table[[c for c in ("workload", "library", "n_libraries") if c in table]].copy()
    for name in SIZES:
        before = table[f"{name}_bytes"]
        result[f"{name}_bytes"] = before.astype("Int64" if name == "zstd" else "int64")
        result[f"{name}_reduction_frac"] = _share(before - table[f"{name}_bytes_after"], before)
    for name, (before_name, removed) in REMOVED.items():
        result[before_name] = table[before_name].astype("int64")
        result[f"{name}_reduction_frac"] = _share(table[removed], table[before_name])
        if name == "function":
            result["n_functions_unknown"] = table["n_functions_unknown"].astype("int64")
    return result
