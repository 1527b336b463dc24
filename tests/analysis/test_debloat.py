"""Reductions, reasons and run times on small tables with answers worked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from gpubloat import published
from gpubloat.analysis import compare
from gpubloat.analysis import debloat as analysis
from gpubloat.errors import GpubloatError
from gpubloat.tables.removal import TABLES

NAN = float("nan")


def reduction(*rows: dict[str, Any]) -> pd.DataFrame:
    base = {
        "library": "a.so", "file_bytes": 1000, "file_bytes_after": 1000, "allocated_bytes": 1000,
        "allocated_bytes_after": 400, "zstd_bytes": 500, "zstd_bytes_after": 100, "cpu_code_bytes": 200,
        "cpu_removed_bytes": 150, "function_bytes": 180, "n_functions": 10, "n_functions_unknown": 1,
        "n_functions_removed": 8, "gpu_code_bytes": 600, "gpu_removed_bytes": 540, "n_elements": 20,
        "n_elements_removed": 19, "n_other_architecture": 15, "n_unused_element": 4, "debloat_s": 0.5,
    }  # fmt: skip
    return TABLES["reduction"].check(pd.DataFrame([base | row for row in rows]), "reduction")


CPU_ONLY = {
    "library": "b.so", "file_bytes": 3000, "file_bytes_after": 3000, "allocated_bytes": 3000,
    "allocated_bytes_after": 2600, "gpu_code_bytes": 0, "gpu_removed_bytes": 0, "n_elements": 0,
    "n_elements_removed": 0, "n_other_architecture": 0, "n_unused_element": 0, "cpu_code_bytes": 800,
    "cpu_removed_bytes": 400, "n_functions": 30, "n_functions_unknown": 0, "n_functions_removed": 10,
}  # fmt: skip


def removed(*rows: tuple[str, str, str, int]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=["library", "what", "reason", "size_bytes"])
    frame["offset_bytes"] = range(len(frame))
    frame["region"] = 0
    frame["element"] = frame["offset_bytes"]
    return TABLES["removed"].check(frame, "removed")


def verdicts(*rows: dict[str, Any]) -> pd.DataFrame:
    base = {
        "loading": "lazy", "n_repeats": 5, "is_deterministic": True, "is_equal": True, "wall_s": 10.0,
        "wall_s_after": 6.0, "wall_spread_s": 1.0, "wall_spread_s_after": 0.5, "peak_rss_bytes": 8000,
        "peak_rss_bytes_after": 2000, "peak_gpu_bytes": 400, "peak_gpu_bytes_after": 300, "verdict": "equal",
    }  # fmt: skip
    return TABLES["verdicts"].check(pd.DataFrame([base | row for row in rows]), "verdicts")


def repeats(*rows: dict[str, Any]) -> pd.DataFrame:
    base = {
        "variant": "original", "loading": "lazy", "repeat": 0, "exit_status": 0, "wall_s": 10.0,
        "peak_rss_bytes": 8000, "peak_gpu_bytes": 400, "stdout_sha256": "", "files_sha256": "", "is_equal": True,
    }  # fmt: skip
    return TABLES["repeats"].check(pd.DataFrame([base | row for row in rows]), "repeats")


def test_table_2_sums_the_libraries_of_a_workload() -> None:
    answer = analysis.by_workload({"train": reduction({}, CPU_ONLY), "infer": reduction({})}).set_index("workload")
    train = answer.loc["train"]
    assert train[["n_libraries", "file_bytes", "allocated_bytes", "zstd_bytes"]].tolist() == [2, 4000, 4000, 1000]
    assert train[["cpu_code_bytes", "n_functions", "n_functions_unknown"]].tolist() == [1000, 40, 1]
    assert train[["gpu_code_bytes", "n_elements"]].tolist() == [600, 20]
    fractions = {
        "file": 0.0, "allocated": 1000 / 4000, "zstd": 800 / 1000, "cpu_code": 550 / 1000, "function": 18 / 40,
        "gpu_code": 540 / 600, "element": 19 / 20,
    }  # fmt: skip
    for name, value in fractions.items():
        assert train[f"{name}_reduction_frac"] == pytest.approx(value)
    assert answer.loc["infer", "cpu_code_reduction_frac"] == pytest.approx(0.75)


def test_one_unknown_compressed_size_leaves_the_sum_unknown() -> None:
    answer = analysis.by_workload({"w": reduction({}, {"library": "b", "zstd_bytes": None, "zstd_bytes_after": None})})
    assert pd.isna(answer.loc[0, "zstd_bytes"])
    assert pd.isna(answer.loc[0, "zstd_reduction_frac"])
    assert answer.loc[0, "allocated_reduction_frac"] == pytest.approx(0.6)


def test_nothing_to_reduce_is_empty_not_zero() -> None:
    answer = analysis.by_workload({"cpu": reduction(CPU_ONLY), "none": TABLES["reduction"].none()}).set_index(
        "workload"
    )
    assert np.isnan(answer.loc["cpu", "gpu_code_reduction_frac"])
    assert np.isnan(answer.loc["cpu", "element_reduction_frac"])
    assert answer.loc["none", "n_libraries"] == 0
    assert np.isnan(answer.loc["none", "file_reduction_frac"])


def test_a_grown_copy_is_a_negative_reduction() -> None:
    answer = analysis.by_library(reduction({"zstd_bytes_after": 600}))
    assert answer["zstd_reduction_frac"].tolist() == pytest.approx([-0.2])


def test_table_3_is_the_largest_library() -> None:
    answer = analysis.largest({"x": reduction({}, CPU_ONLY), "y": reduction({"library": "d"}, {"library": "c"})})
    assert answer["workload"].tolist() == ["x", "y"]
    assert answer["library"].tolist() == ["b.so", "c"]
    assert list(answer.columns[2:]) == list(analysis.by_workload({"x": reduction({})}).columns[2:])


def test_figure_5_has_each_library_once_per_part_it_has() -> None:
    answer = analysis.distributions({"x": reduction({}, CPU_ONLY), "y": reduction({})})
    assert len(answer) == 4 + 2 + 4
    at = answer.set_index(["workload", "library", "part"])["reduction_frac"]
    assert at["x", "a.so", "gpu_code"] == pytest.approx(0.9)
    assert at["x", "b.so", "function"] == pytest.approx(1 / 3)
    assert ("x", "b.so", "gpu_code") not in at.index


def test_quartiles_by_hand() -> None:
    table = pd.DataFrame({"part": "element", "workload": "w", "reduction_frac": [0.0, 0.5, 0.8, 0.9, 1.0]})
    answer = analysis.quartiles(table).iloc[0]
    assert answer.tolist() == ["element", 5, 0.0, 0.5, 0.8, 0.9, 1.0, pytest.approx(0.4)]
    assert analysis.quartiles(table, ["workload", "part"]).columns[:2].tolist() == ["workload", "part"]


def test_figure_6_savings_close() -> None:
    table = reduction({}, CPU_ONLY, {"library": "c", "allocated_bytes_after": 1000})
    answer = analysis.savings(table)
    assert answer["library"].tolist() == ["a.so", "b.so", "c"]
    assert answer["saved_bytes"].tolist() == [600, 400, 0]
    assert answer["saved_bytes"].sum() == (table["allocated_bytes"] - table["allocated_bytes_after"]).sum()
    assert answer["cumulative_frac"].tolist() == pytest.approx([0.6, 1.0, 1.0])
    assert analysis.savings(table, "zstd")["saved_bytes"].tolist() == [400] * 3


def test_savings_refuse_sizes_that_are_not_known() -> None:
    with pytest.raises(GpubloatError, match="zstd"):
        analysis.savings(reduction({"zstd_bytes": None}), "zstd")


def test_few_libraries_give_most() -> None:
    # 20 libraries: 70, 20, then 18 that share 10; the top 10 % are two of them.
    after = [1000 - n for n in [70, 20, *[1] * 10, *[0] * 8]]
    table = reduction(*({"library": f"{i:02}", "allocated_bytes_after": n} for i, n in enumerate(after)))
    nothing = reduction({"allocated_bytes_after": 1000})
    answer = analysis.concentration({"w": table, "nothing": nothing, "empty": TABLES["reduction"].none()}).set_index(
        "workload"
    )
    assert answer.loc["w"].tolist() == [20, 100, 2, pytest.approx(0.9)]
    assert analysis.concentration({"w": table}, level=0.95)["n_for_level"].tolist() == [7]
    assert analysis.concentration({"w": table}, top=0.05)["top_share_frac"].tolist() == pytest.approx([0.7])
    for name, n in (("nothing", 1), ("empty", 0)):
        assert answer.loc[name, ["n_libraries", "saved_bytes"]].tolist() == [n, 0]
        assert answer.loc[name, ["n_for_level", "top_share_frac"]].isna().all()


def test_figure_7_counts_elements_by_reason() -> None:
    x = removed(
        ("a", "element", "other_architecture", 100), ("a", "element", "other_architecture", 200),
        ("a", "element", "unused_element", 700), ("b", "element", "unused_element", 0),
        ("a", "function", "unused_function", 5),
    )  # fmt: skip
    answer = analysis.reasons({"x": x, "y": removed()})
    assert answer["n_removed"].sum() == (x["what"] == "element").sum()
    assert answer["removed_bytes"].sum() == 1000
    at = answer.set_index(["workload", "library", "reason"])
    assert at.loc[("x", "a", "other_architecture")].tolist() == [2, 300, pytest.approx(2 / 3), pytest.approx(0.3)]
    assert at.loc[("x", "b", "other_architecture"), ["n_removed", "share_frac"]].tolist() == [0, 0.0]
    assert np.isnan(at.loc[("x", "b", "unused_element"), "bytes_share_frac"])
    whole = analysis.reasons({"x": x}, by=["workload"])
    assert whole["n_removed"].tolist() == [2, 2]
    assert whole["share_frac"].sum() == pytest.approx(1)


def test_tables_5_and_7_by_hand() -> None:
    no_gpu = {"loading": "default", "peak_gpu_bytes": None, "peak_gpu_bytes_after": None, "wall_s_after": 9.0}
    answer = analysis.runtime({"w": verdicts({}, no_gpu), "empty": TABLES["verdicts"].none()})
    lazy, default = answer.iloc[0], answer.iloc[1]
    assert lazy[["peak_rss_reduction_bytes", "peak_rss_reduction_frac"]].tolist() == [6000, 0.75]
    assert lazy[["peak_gpu_reduction_bytes", "peak_gpu_reduction_frac"]].tolist() == [100, 0.25]
    assert lazy[["wall_reduction_s", "wall_reduction_frac"]].tolist() == [4.0, pytest.approx(0.4)]
    assert default[["peak_gpu_reduction_bytes", "peak_gpu_reduction_frac"]].isna().all()
    # 4 s are more than both spreads (1.5 s), 1 s is not.
    assert answer["is_wall_beyond_spread"].tolist() == [True, False]
    assert answer["workload"].tolist() == ["w", "w"]
    once = analysis.runtime({"w": verdicts({"n_repeats": 1, "wall_spread_s": 0.0, "wall_spread_s_after": 0.0})})
    assert once["is_wall_beyond_spread"].isna().all()


def test_an_image_is_compared_with_itself_without_copies() -> None:
    bare = {
        "copies": "", "n_files": 9, "n_replaced": 0, "logical_bytes": 1000, "allocated_bytes": 1200, "tar_bytes": 1100,
        "zstd_bytes": 400, "wall_s": 1.0,
    }  # fmt: skip
    answer = analysis.image([bare, bare | {"copies": "w", "n_replaced": 2, "allocated_bytes": 900, "zstd_bytes": 100}])
    assert answer["copies"].tolist() == ["", "w"]
    fractions = ["logical_reduction_frac", "allocated_reduction_frac", "tar_reduction_frac", "zstd_reduction_frac"]
    assert answer.loc[0, fractions].tolist() == [0, 0, 0, 0]
    assert answer.loc[1, fractions].tolist() == [0, pytest.approx(0.25), 0, pytest.approx(0.75)]
    assert answer.loc[1, ["n_files", "n_replaced", "zstd_bytes"]].tolist() == [9, 2, 100]


def test_spread_over_the_rounds() -> None:
    table = repeats(
        {"wall_s": 10.0}, {"repeat": 1, "wall_s": 14.0}, {"repeat": 2, "wall_s": 11.0},
        {"variant": "debloated", "wall_s": 5.0, "peak_gpu_bytes": None},
        {"variant": "debloated", "repeat": 1, "wall_s": 1.0, "exit_status": -5, "peak_rss_bytes": 1},
        {"loading": "eager", "wall_s": 20.0, "exit_status": 3}, {"loading": "eager", "repeat": 1, "exit_status": 3},
    )  # fmt: skip
    answer = analysis.before_after({"w": table}).set_index(["loading", "variant"])
    original, after = answer.loc[("lazy", "original")], answer.loc[("lazy", "debloated")]
    assert original[["wall_s", "wall_min_s", "wall_max_s", "n_repeats"]].tolist() == [11.0, 10.0, 14.0, 3]
    assert original[["peak_gpu_bytes", "peak_gpu_min_bytes"]].tolist() == [400, 400]
    # the crashed round would have halved both
    assert after[["wall_s", "n_repeats", "peak_rss_min_bytes"]].tolist() == [5.0, 1, 8000]
    assert np.isnan(after["peak_gpu_bytes"])
    assert answer.loc[("eager", "original"), "n_repeats"] == 2
    assert answer.index.tolist() == [("eager", "original"), ("lazy", "original"), ("lazy", "debloated")]


def test_table_8_by_hand() -> None:
    times = pd.DataFrame(
        {
            "workload": ["a", "b", "c"], "run_s": [100.0, 0.0, 10.0], "trace_s": [141.0, 5.0, 12.0],
            "debloat_s": [30.0, 1.0, NAN],
        }
    )  # fmt: skip
    answer = analysis.costs(times)
    assert answer["end_to_end_s"].tolist() == pytest.approx([171.0, 6.0, NAN], nan_ok=True)
    assert answer["trace_overhead_frac"].tolist() == pytest.approx([0.41, NAN, 0.2], nan_ok=True)
    assert answer["per_run_ratio"].tolist() == pytest.approx([1.71, NAN, NAN], nan_ok=True)
    assert analysis.costs(times.assign(locate_s=[1.0, 1.0, 1.0]))["end_to_end_s"].iloc[0] == pytest.approx(172.0)
    assert list(times.columns) == ["workload", "run_s", "trace_s", "debloat_s"]


@pytest.mark.parametrize("empty", [{}, {"w": None}])
def test_empty_tables_keep_their_columns(empty: dict[str, Any]) -> None:
    tables = {
        name: {key: TABLES[name].none() for key in empty} for name in ("reduction", "removed", "verdicts", "repeats")
    }
    full = {"reduction": {"w": reduction({})}, "removed": {"w": removed(("a", "element", "unused_element", 1))},
            "verdicts": {"w": verdicts({})}, "repeats": {"w": repeats({})}}  # fmt: skip
    for function, name in (
        (analysis.by_workload, "reduction"), (analysis.largest, "reduction"), (analysis.distributions, "reduction"),
        (analysis.concentration, "reduction"), (analysis.reasons, "removed"), (analysis.runtime, "verdicts"),
        (analysis.before_after, "repeats"),
    ):  # fmt: skip
        answer = function(tables[name])
        assert list(answer.columns) == list(function(full[name]).columns)
        assert len(answer) == (len(empty) if function in (analysis.by_workload, analysis.concentration) else 0)
    assert analysis.quartiles(analysis.distributions(tables["reduction"])).empty


def test_measured_rows_meet_the_published_ones() -> None:
    name = "PyTorch/Train/MobileNetV2"
    table = analysis.by_workload({name: reduction({}, CPU_ONLY)})
    names = {
        "n_libraries": "n_libraries",
        "allocated_reduction_frac": "file_reduction_frac",
        "file_bytes": "total_file_bytes",
    }
    rows = compare.beside(
        analysis.as_measured(table, names), published.load("negativa_ml", "Table 2"), on=["subject", "quantity"],
        conditions="toy",
    )  # fmt: skip
    at = rows[rows["subject"] == name].set_index("quantity")["measured"]
    assert at[["n_libraries", "file_reduction", "total_file"]].tolist() == pytest.approx([2, 25.0, 0.004])
