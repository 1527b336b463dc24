"""Plots of debloating are tested by their artists, not by their pixels."""

from __future__ import annotations

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from gpubloat.analysis import debloat, usage
from gpubloat.plots import debloat as plots
from gpubloat.plots import style
from gpubloat.tables.removal import REASONS, TABLES

mpl.use("Agg")
NAN = float("nan")


@pytest.fixture
def ax():
    figure, axes = plt.subplots()
    yield axes
    figure.canvas.draw()
    plt.close(figure)


def texts(ax) -> list[str]:
    return [t.get_text() for t in ax.texts]


def ticks(ax, axis: str = "y") -> list[str]:
    return [t.get_text() for t in getattr(ax, f"get_{axis}ticklabels")()]


def distributions(part: str, *values: float, workload: str = "w") -> pd.DataFrame:
    names = [f"lib{i}.so" for i in range(len(values))]
    return pd.DataFrame({"workload": workload, "library": names, "part": part, "reduction_frac": values})


def test_violins_stay_inside_the_data(ax) -> None:
    table = pd.concat([distributions("cpu_code", 0.1, 0.2, 0.3, 0.9), distributions("gpu_code", 0.8, 0.8, 1.0, NAN)])
    assert plots.violins(table, ax=ax) is ax
    assert ticks(ax, "x") == ["CPU code\n(4)", "GPU code\n(3)"]
    assert texts(ax) == ["25", "80"]
    body, dots = ax.collections[0], ax.collections[1]
    heights = body.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (pytest.approx(10), pytest.approx(90))
    assert sorted(dots.get_offsets()[:, 1]) == pytest.approx([10, 20, 30, 90])


def test_few_values_have_no_violin_but_dots(ax) -> None:
    table = pd.concat([distributions("element", 1.0, 1.0, 1.0), distributions("element", 0.5, workload="v")])
    plots.violins(table, by="workload", ax=ax)
    assert ticks(ax, "x") == ["w (3)", "v (1)"]
    assert texts(ax) == ["100", "50"]
    assert len(ax.collections) == 2


def test_growth_is_seen(ax) -> None:
    plots.violins(distributions("cpu_code", -0.5, 0.2), ax=ax)
    assert ax.get_ylim()[0] < -50


def test_savings_curves_say_how_few_libraries_give_most(ax) -> None:
    curve = pd.DataFrame({"rank": [1, 2, 3], "cumulative_frac": [0.6, 0.9, 1.0]})
    curves = pd.concat([curve.assign(workload="x"), curve.assign(workload="y", cumulative_frac=[0.95, 1.0, 1.0])])
    plots.savings_curves(curves, ax=ax)
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["x (2 of 3)", "y (1 of 3)"]
    np.testing.assert_allclose(ax.lines[1].get_ydata(), [95, 100, 100])
    assert ax.lines[0].get_linewidth() > ax.lines[1].get_linewidth()
    assert ticks(ax, "x") == ["1", "2"]


def test_reasons_are_bars_of_a_hundred_percent(ax) -> None:
    reasons = pd.DataFrame(
        {
            "workload": ["w", "w", "v", "v", "none", "none"], "library": "x/a.so",
            "reason": ["other_architecture", "unused_element"] * 3, "n_removed": [900, 100, 50, 50, 0, 0],
            "removed_bytes": [3e6, 9e6, 5e6, 5e6, 0, 0],
        }
    )  # fmt: skip
    plots.reasons_bars(reasons, ax=ax)
    widths = [p.get_width() for p in ax.patches]
    assert widths == pytest.approx([90, 50, 0, 10, 50, 0])
    assert ticks(ax) == ["w", "v", "none"]
    assert texts(ax) == ["900", "50", "100", "50"]
    figure, other = plt.subplots()
    plots.reasons_bars(reasons, by="library", in_bytes=True, ax=other)
    assert ticks(other) == ["a.so"]
    assert texts(other) == ["8.0 MB", "14 MB"]
    plt.close(figure)


def test_reasons_of_elements_are_those_of_the_table() -> None:
    assert set(plots.REASONS) == set(debloat.REASONS) == {r for r in REASONS if "function" not in r}
    assert set(plots.PARTS) == set(debloat.REMOVED)
    assert {name: q[1] for name, q in plots.QUANTITIES.items()} == debloat.RUNTIME


def test_jaccard_heatmap_writes_every_known_cell(ax) -> None:
    names = ["x", "y", "z"]
    below = pd.DataFrame([[1, 0.8, 0.7], [0.8, 1, NAN], [0.7, NAN, 1]], index=names, columns=names)
    above = pd.DataFrame(0.25, index=names, columns=names)
    plots.jaccard_heatmap(usage.triangles(below, above), ax=ax)
    at = {(t.get_position()[1], t.get_position()[0]): t.get_text() for t in ax.texts}
    assert at == {(0, 1): "0.25", (0, 2): "0.25", (1, 2): "0.25", (1, 0): "0.80", (2, 0): "0.70"}
    assert ax.images[0].get_clim() == (0, 1)
    assert "kernels" in ax.get_xlabel().split("below")[0]


def test_transfer_heatmap_leaves_pairs_that_were_not_run_empty(ax) -> None:
    table = pd.DataFrame(
        {"copies": ["x", "x", "y"], "workload": ["x", "y", "y"], "n_misses": [0, 12_345, 0], "n_functions": [0, 1, 0]}
    )
    plots.transfer_heatmap(table, ax=ax)
    assert {(t.get_position()[1], t.get_position()[0]): t.get_text() for t in ax.texts} == {
        (0, 0): "0", (0, 1): "12k", (1, 1): "0",
    }  # fmt: skip
    assert ticks(ax) == ticks(ax, "x") == ["x", "y"]


def before_after(**columns: list[float]) -> pd.DataFrame:
    n = len(next(iter(columns.values())))
    base = {"workload": ["w"] * n, "loading": ["eager"] * n, "variant": ["original", "debloated"] * (n // 2)}
    base["n_repeats"] = [3] * n
    return pd.DataFrame(base | columns)


def test_before_and_after_with_the_spread(ax) -> None:
    table = before_after(peak_rss_bytes=[4e9, 1e9], peak_rss_min_bytes=[3e9, 0.9e9], peak_rss_max_bytes=[5e9, 1.2e9])
    plots.before_after_bars(table, "peak_rss", ax=ax)
    assert [p.get_width() for p in ax.patches] == [4, 1]
    assert [line.get_xdata().tolist() for line in ax.lines] == [[3, 5], [0.9, 1.2]]
    assert texts(ax) == ["−75%"]  # noqa: RUF001
    assert ticks(ax) == ["w"]
    assert "GB" in ax.get_xlabel()


def test_one_round_has_memory_but_no_change_of_time(ax) -> None:
    parts = {f"{name}_bytes": [4e9, 1e9] for name in ("peak_rss", "peak_rss_min", "peak_rss_max")}
    table = before_after(wall_s=[10, 5], wall_min_s=[10, 5], wall_max_s=[10, 5], n_repeats=[1, 1], **parts)
    plots.before_after_bars(table, "wall", ax=ax)
    assert texts(ax) == ["one round"]
    figure, other = plt.subplots()
    assert texts(plots.before_after_bars(table, "peak_rss", ax=other)) == ["−75%"]  # noqa: RUF001
    plt.close(figure)


def test_two_loading_modes_are_named_and_unknown_memory_is_left_out(ax) -> None:
    table = before_after(wall_s=[10, 10.01, 5, 6], wall_min_s=[9, 9, 5, 6], wall_max_s=[11, 11, 5, 6])
    table["loading"] = ["eager", "eager", "lazy", "lazy"]
    for column in ("peak_gpu_bytes", "peak_gpu_min_bytes", "peak_gpu_max_bytes"):
        table[column] = NAN
    plots.before_after_bars(table, "wall", ax=ax)
    assert ticks(ax) == ["w, eager", "w, lazy"]
    assert texts(ax) == ["0%", "+20%"]
    figure, other = plt.subplots()
    assert not plots.before_after_bars(table, "peak_gpu", ax=other).patches
    plt.close(figure)


def test_saturation_curves_share_an_axes(ax) -> None:
    used = pd.DataFrame([[1, 0], [1, 1], [0, 1], [0, 1]], columns=["x", "y"]).astype(bool)
    curve = usage.saturation(used, pd.Series([1e6, 2e6, 3e6, 4e6]))
    plots.saturation_curve(curve, of="functions", label="all", ax=ax)
    plots.saturation_curve(curve, of="functions", label="again", ax=ax)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [2.5, 4])
    assert ax.lines[0].get_color() != ax.lines[1].get_color()
    assert ax.get_ylim()[0] == 0
    # A later, higher curve fits, and a shorter one leaves the ticks.
    plots.saturation_curve(curve.assign(n_union_max=9), of="functions", label="high", ax=ax)
    plots.saturation_curve(curve.head(1), of="functions", label="short", ax=ax)
    assert ax.get_ylim()[1] > 9
    assert ticks(ax, "x") == ["1", "2"]
    figure, other = plt.subplots()
    plots.saturation_curve(curve, of="code", in_bytes=True, ax=other)
    np.testing.assert_allclose(other.lines[0].get_ydata(), [6, 10])
    assert "(MB)" in other.get_ylabel()
    plt.close(figure)


def test_agreement_bars(ax) -> None:
    table = pd.DataFrame(
        {
            "library": ["x/a.so", "b.so"], "n_both": [8, 0], "n_only_first": [2, 3], "n_only_second": [0, 0],
            "recall_frac": [0.8, 0.0], "precision_frac": [1.0, NAN],
        }
    )  # fmt: skip
    plots.agreement_bars(table, ax=ax)
    assert max(p.get_x() + p.get_width() for p in ax.patches) == 10
    assert texts(ax) == ["80% / 100%", "0% / -"]
    assert ticks(ax) == ["a.so", "b.so"]


def test_numbers_in_cells_are_short() -> None:
    assert [plots._thousands(n) for n in (0, 999, 1000, 9949, 9950, 123_456)] == [
        "0",
        "999",
        "1.0k",
        "9.9k",
        "10k",
        "123k",
    ]


def test_nothing_to_draw_is_an_empty_figure() -> None:
    none = {name: {"w": TABLES[name].none()} for name in ("reduction", "removed", "repeats")}
    used = pd.DataFrame(np.zeros((0, 0), bool))
    square = usage.triangles(usage.jaccard(used), usage.jaccard(used))
    drawings = [
        lambda ax: plots.violins(debloat.distributions(none["reduction"]), ax=ax),
        lambda ax: plots.savings_curves(debloat.savings(none["reduction"]["w"]).assign(workload="w"), ax=ax),
        lambda ax: plots.reasons_bars(debloat.reasons(none["removed"]), ax=ax),
        lambda ax: plots.jaccard_heatmap(square, ax=ax),
        lambda ax: plots.transfer_heatmap(usage.transfer({}), ax=ax),
        lambda ax: plots.before_after_bars(debloat.before_after(none["repeats"]), "wall", ax=ax),
        lambda ax: plots.saturation_curve(usage.saturation(used), of="functions", ax=ax),
        lambda ax: plots.agreement_bars(
            usage.agreement(pd.DataFrame(columns=["library", "region", "element", "source"])), ax=ax
        ),
    ]
    for draw in drawings:
        with style.paper("column") as size:
            figure, axes = plt.subplots(**size)
            assert draw(axes) is axes
            figure.canvas.draw()
            plt.close(figure)


def test_one_workload_draws_everywhere() -> None:
    used = pd.DataFrame([[True], [True]], columns=["w"])
    square = usage.jaccard(used)
    for draw in (
        lambda ax: plots.jaccard_heatmap(usage.triangles(square, square), ax=ax),
        lambda ax: plots.saturation_curve(usage.saturation(used), of="functions", ax=ax),
    ):
        figure, axes = plt.subplots()
        draw(axes)
        figure.canvas.draw()
        plt.close(figure)
