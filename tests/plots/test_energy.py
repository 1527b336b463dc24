"""Figures of energy are tested by their artists, not by their pixels: above all, what was not measured has none."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from gpubloat import published, report
from gpubloat.analysis import energy as analysis
from gpubloat.errors import GpubloatError
from gpubloat.plots import energy as plots
from gpubloat.plots import style
from gpubloat.run import RunWriter, provenance
from gpubloat.tables.energy import VERDICTS, Blocks, Closure, Comparisons, Loads, Operators, Regions
from tests.analysis.test_energy import closure, comparisons, loads, operators, samples
from tests.plots.drawn import legend, texts, ticks

NAN = math.nan
MINUS = "\N{MINUS SIGN}"
MISSING = {"call_j": NAN, "error_j": NAN}
TIMES = "\N{MULTIPLICATION SIGN}"


def widths(ax: Any) -> list[float]:
    return [round(p.get_width(), 6) for p in ax.patches]


def overlapping(labels: list[Any]) -> list[tuple[str, str]]:
    """Neighbours whose texts meet; a pixel of shared margin is none."""
    boxes = [(label.get_text(), label.get_window_extent()) for label in labels if label.get_text()]
    return [(a, b) for (a, one), (b, two) in pairwise(boxes) if one.y0 < two.y1 - 1 and two.y0 < one.y1 - 1]


def test_bars_of_operators_sum_to_the_step(ax: Any) -> None:
    given = operators({"n_same": 4}, {"name": "aten::gelu.default", "call_j": 0.3}, {"name": "aten::rand"} | MISSING)
    assert plots.operators(analysis.by_operator(given, closure({})), ax=ax) is ax
    assert ticks(ax) == [f"mm  {TIMES}4", "gelu", "rand", "not in kernels, or not measured"]
    assert sum(widths(ax)) == pytest.approx(1000)
    assert len(ax.patches) == 3  # none for what was not measured
    assert [p.get_hatch() for p in ax.patches] == ["", "", "////"]
    assert texts(ax) == ["40.0%", "30.0%", "not measured", "30.0%"]
    whiskers = ax.collections[0].get_segments()
    assert tuple(whiskers[0][:, 0]) == pytest.approx((360, 440))
    assert len(whiskers) == 3
    assert ax.get_xlabel() == "energy of a step (mJ)"


def test_many_operators_are_folded(ax: Any) -> None:
    many = [{"name": f"op{i}", "call_j": 0.01} for i in range(30)] + [{"name": f"lost{i}"} | MISSING for i in range(9)]
    plots.operators(analysis.by_operator(operators(*many), closure({})), rows=6, ax=ax)
    assert ticks(ax)[5:] == ["25 other rows", "lost0", "lost1", "7 other rows", "not in kernels, or not measured"]
    assert sum(widths(ax)) == pytest.approx(1000)
    assert texts(ax).count("not measured") == 3


def test_a_negative_remainder_is_drawn(ax: Any) -> None:
    plots.operators(analysis.by_name(operators({"call_j": 1.5}), closure({})), ax=ax)
    assert widths(ax) == [1.5, -0.5]
    assert texts(ax) == ["150.0%", f"{MINUS}50.0%"]
    assert ax.get_xlim()[0] < -0.5


def test_only_one_step_is_drawn(ax: Any) -> None:
    table = analysis.by_operator(Operators.none(), closure({}, {"side": "B"}))
    with pytest.raises(GpubloatError, match="several steps"):
        plots.operators(table, ax=ax)


def test_two_systems_side_by_side(ax: Any) -> None:
    given = operators({}, {"side": "B", "call_j": 0.2}, {"name": "gelu", "side": "B"} | MISSING)
    table = analysis.two_systems(given, closure({}, {"side": "B"}))
    plots.two_systems(table, names=("left", "right"), ax=ax)
    assert ticks(ax) == ["mm", "gelu", "not in kernels, or not measured"]
    assert legend(ax) == ["left", "right"]
    assert texts(ax) == ["not measured"]
    assert [w for w in widths(ax) if w] == [100, 900, 200, 800]  # mJ: A's two, then B's two
    folded = pd.concat([table.head(1)] * 9 + [table.tail(1)], ignore_index=True)
    figure, other = plt.subplots()
    plots.two_systems(folded, rows=4, ax=other)
    assert ticks(other)[3:] == ["6 other rows", "not in kernels, or not measured"]
    assert sum(p.get_width() for p in other.patches) == pytest.approx(9 * 0.3 + 0.9 + 0.8)  # J
    plt.close(figure)


def unlike(number: int, **given: Any) -> dict[str, Any]:
    return {"case": f"X{number}", "subject": f"X{number}", "a": f"cases/a_long_name_of_a_case_{number}.py:slow"} | given


def test_cases_are_a_forest(ax: Any) -> None:
    given = comparisons(
        {"case": "D3", "wasteful": "B"},
        {"case": "T4", "verdict": "no difference", "saved_frac": 0.01, "low_frac": -0.02, "wasteful": "B"},
        unlike(1, verdict="not measured", saved_frac=None, low_frac=None, high_frac=None, band_frac=None),
    )  # fmt: skip
    plots.cases(analysis.cases(given, published.load("magneton")), ax=ax)
    assert [label.split()[0] for label in ticks(ax)] == ["D3", "T4", "X1"]
    points = [line for line in ax.lines if line.get_marker() == "o" and len(line.get_xdata()) == 1]
    assert [(p.get_xdata()[0], p.get_color()) for p in points] == [
        (50, plots.VERDICT_COLORS["waste"]), (1, plots.VERDICT_COLORS["no difference"])
    ]  # fmt: skip
    assert "not measured" in texts(ax)
    diamonds = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "D"]
    assert diamonds == pytest.approx([58.8])
    assert [text.endswith("B takes more") for text in texts(ax)[-3:]] == [True, False, False]
    assert widths(ax) == [2, 2]  # the bands of two cases, from -1 to 1 %
    assert legend(ax) == ["waste", "no difference", "5%", "A against A", "paper, end to end"]
    assert ax.get_xlim()[0] < -2


def test_every_verdict_has_a_colour() -> None:
    assert list(plots.VERDICT_COLORS) == list(VERDICTS)
    assert len(set(plots.VERDICT_COLORS.values())) == len(VERDICTS)


@pytest.mark.parametrize("width", list(style.WIDTHS))
def test_26_cases_and_long_names_fit(width: str) -> None:
    given = comparisons(*(unlike(n, saved_frac=0.9 - n / 40, low_frac=0.2, high_frac=0.95) for n in range(26)))
    long = operators(
        *({"name": f"aten::_a_very_long_name_of_an_operator_{n}_with_overload.default"} for n in range(20))
    )
    with style.paper(width, 5.6) as size:
        figure, (left, right) = plt.subplots(2, figsize=(size["figsize"][0], 11))
        plots.cases(analysis.cases(given), with_cause=width != "column", ax=left)
        plots.operators(analysis.by_operator(long, closure({})), ax=right)
        figure.canvas.draw()
        for axes in (left, right):
            labels = axes.get_yticklabels()
            assert not overlapping(labels)
            assert min(label.get_window_extent().x0 for label in labels) >= 0
            assert axes.get_tightbbox().x1 <= figure.bbox.width + 1
            assert axes.get_window_extent().width > 0.3 * figure.bbox.width
        plt.close(figure)


def test_short_names_stay_as_they_are() -> None:
    assert plots.shortened("aten::addmm.default") == "addmm"
    short = plots.shortened("aten::a_name_of_many_more_letters_than_twenty", 20)
    assert (len(short), short[:5], short[-6:]) == (20, "a_nam", "twenty")


def test_comparisons_of_a_function_with_itself(ax: Any) -> None:
    known = {"n_blocks": 3, "least_frac": -0.001, "most_frac": 0.003, "call_j": 0.1, "notes": ""}
    table = pd.DataFrame([
        known | {"subject": "product 0", "mean_frac": 0.001, "band_frac": 0.004},
        {"subject": "copy 1", "n_blocks": 0, "mean_frac": NAN, "band_frac": NAN, "notes": "a block has no energy"},
    ])  # fmt: skip
    assert plots.against_itself(table, ax=ax) is ax
    assert ticks(ax) == ["product 0", "copy 1"]
    assert texts(ax) == ["not measured"]
    line, dot = ax.lines[1:]
    assert tuple(line.get_xdata()) == pytest.approx((-0.3, 0.5))
    assert tuple(dot.get_xdata()) == pytest.approx((0.1,))
    low, high = ax.get_xlim()
    assert -low == high > 0.5


def test_loads_by_signal(ax: Any) -> None:
    table = analysis.power_of_loads(
        loads({}, {"repeat": 1, "slope_w": 620.0}, {"load": "idle", "average_w": None, "slope_w": 112.0})
    )
    plots.loads(table, ax=ax)
    assert legend(ax) == ["counter, slope", "instant", "1-s mean"]
    assert ticks(ax) == ["product", "idle"]
    assert ax.lines[0].get_xdata().tolist() == [610, 112]
    assert tuple(ax.collections[0].get_segments()[0][:, 0]) == (600, 620)
    assert texts(ax) == ["1-s mean: not measured"]
    assert np.isnan(ax.lines[2].get_xdata()).tolist() == [False, True]
    assert ax.get_xlim()[0] == 0


def test_the_mean_over_a_second_is_behind(ax: Any) -> None:
    table = analysis.power_over_time(samples(), "product, 0")
    plots.samples(table, ax=ax)
    assert legend(ax) == ["counter, slope", "instant", "1-s mean"]
    title = ax.get_title(loc="right")
    assert title.startswith(f"mean to 2 s: 1-s mean {MINUS}")
    # Of the window from the first tick on: from 0.1 to 1 s it is behind by 485 W x (1 s - t), in steps of a tick.
    told = float(title.split(MINUS)[1].split("%")[0])
    assert told == pytest.approx(100 * 485 * 0.1 * sum(i / 10 for i in range(1, 10)) / (600 * 1.9), abs=1.5)
    figure, other = plt.subplots()
    plots.samples(table[table["signal"] != "1-s mean"], ax=other)
    assert (legend(other), other.get_title(loc="right")) == (["counter, slope", "instant"], "")
    plt.close(figure)


def test_a_story_has_three_bars(ax: Any) -> None:
    plots.story(analysis.story(comparisons({"case": "D1"}), Regions.none(), "D1"), ax=ax)
    assert widths(ax) == [10, 5, 5.1]
    assert texts(ax) == ["10 mJ", f"5 mJ, {MINUS}50.0%", f"5.1 mJ, {MINUS}49.0%"]
    assert [tuple(s[:, 0].round(6)) for s in ax.collections[0].get_segments()] == [(4.8, 5.2), (4.9, 5.3)]
    assert [label.split("\n")[0] for label in ticks(ax)] == ["A", "B", "fix"]
    assert "unfused chain" in ax.get_title(loc="left")
    assert "gelu.py:23 slow" in ax.get_title(loc="left")


def test_a_fix_that_was_not_measured_has_no_bar(ax: Any) -> None:
    given = comparisons({"case": "D1", "fix_saved_frac": None, "fix_low_frac": None, "fix_high_frac": None})
    plots.story(analysis.story(given, Regions.none(), "D1"), ax=ax)
    assert widths(ax) == [10, 5]
    assert texts(ax)[2] == "not measured"


def test_nothing_to_draw_is_an_empty_figure() -> None:
    pair = (Operators.none(), Closure.none())
    story = analysis.story(comparisons({"case": "D1"}), Regions.none(), "D1").head(0)
    over_time = analysis.power_over_time(samples(0.05), "product, 0").head(0)
    drawings = [
        lambda ax: plots.operators(analysis.by_operator(*pair), ax=ax),
        lambda ax: plots.operators(analysis.by_name(*pair), ax=ax),
        lambda ax: plots.two_systems(analysis.two_systems(*pair), ax=ax),
        lambda ax: plots.cases(analysis.cases(Comparisons.none()), ax=ax),
        lambda ax: plots.against_itself(analysis.null_band(Blocks.none()), ax=ax),
        lambda ax: plots.loads(analysis.power_of_loads(Loads.none()), ax=ax),
        lambda ax: plots.samples(over_time, ax=ax),
        lambda ax: plots.story(story, ax=ax),
    ]
    for draw in drawings:
        with style.paper("column") as size:
            figure, axes = plt.subplots(**size)
            assert draw(axes) is axes
            assert not [p for p in axes.patches if p.get_width()]
            figure.canvas.draw()
            plt.close(figure)


def test_a_run_has_a_page(tmp_path: Path) -> None:
    regions = Regions.none()
    tables = {
        "loads": loads({}), "samples": samples(3.0), "comparisons": comparisons({"case": "D1"}), "regions": regions,
        "operators": operators({"call_j": 1e-6}), "closure": closure({}),
    }  # fmt: skip
    with RunWriter("energy", list(tables), None, False) as writer:
        for name, table in tables.items():
            writer.append(name, table)
        told = {"is_trusted": False, "reason": "the counter & the card differ"}
        run = writer.finish(provenance("test", {}, []) | {"joules": told})
    report.write(run, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert page.count("<img") == 4
    assert "No joules: the counter &amp; the card differ." in page
    assert "1e-06" in page  # a microjoule is not 0.000
    assert "not in kernels" in page
