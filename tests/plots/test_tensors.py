"""Figures of tensors are tested by their artists, not by their pixels."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest

from gpubloat.analysis import tensors as analysis
from gpubloat.plots import tensors as plots
from gpubloat.tables.tensors import Bits, Savings, Tensors
from tests.analysis.test_tensors import SWEPT, bits, savings, tensors
from tests.plots.drawn import legend, texts, ticks


def test_the_map_has_a_cell_per_bit(ax: Any) -> None:
    table = analysis.bit_map(bits(tensors({}, {})))
    assert plots.invariance_map(table, ax=ax) is ax
    cells = ax.images[0].get_array()
    assert cells.shape == (2, 32)
    np.testing.assert_allclose(cells[0], table["value"][:32])
    assert ax.images[0].get_clim() == (0.5, 1)
    assert ticks(ax) == ["t0", "t1"]
    assert ticks(ax, "x") == ["31", "24", "16", "8", "0"]
    assert texts(ax) == ["s", "exponent", "mantissa"]
    assert ax.lines[0].get_xydata().tolist() == [[0, 0], [0, 1]]  # the sign never changes
    edges = sorted({tuple(path.vertices[:, 0]) for path in ax.collections[0].get_paths()})
    assert edges == [(0.5, 0.5), (8.5, 8.5)]


def test_the_map_of_several_widths_begins_at_the_left(ax: Any) -> None:
    table = analysis.bit_map(bits(tensors({"dtype": "bf16"}, {}, {"dtype": "uint8"})), "ones_frac")
    plots.invariance_map(table, meaning="share of ones", ax=ax)
    cells = np.ma.masked_invalid(ax.images[0].get_array())
    assert cells.count(axis=1).tolist() == [16, 32, 8]
    assert not cells[:, :8].mask.any()
    assert ticks(ax, "x") == ["0", "8", "16", "24"]
    assert ax.images[0].get_clim() == (0, 1)


def test_bars_stand_beside_their_bounds(ax: Any) -> None:
    table = analysis.against_bounds(tensors({}, {"is_biased": True}), savings(*SWEPT))
    plots.savings_bars(table, ax=ax)
    assert [round(p.get_width(), 6) for p in ax.patches] == [26, 2, 30, 2]
    assert ticks(ax) == ["t0", "t1"]
    assert legend(ax)[:2] == ["packed, as in the paper", "packed, constant bits left out"]
    assert legend(ax)[2:] == ["each bit alone", "exponents coded", "16 bits together", "16 bits together, few elements"]
    marked = {line.get_marker(): line for line in ax.lines if len(line.get_xdata()) == 2}
    assert marked["|"].get_xdata().tolist() == pytest.approx([20, 20])
    assert marked["^"].get_xdata().tolist() == pytest.approx([30, 30])
    joint = [line for line in ax.lines if line.get_marker() == "o"]
    assert [(line.get_markerfacecolor(), line.get_ydata().tolist()) for line in joint] == [
        ("black", [0]),
        ("white", [1]),
    ]


def test_a_method_that_was_not_tried_has_no_bars(ax: Any) -> None:
    plots.savings_bars(analysis.against_bounds(tensors({}), savings(SWEPT[0])), ax=ax)
    assert len(ax.patches) == 1
    assert "packed, constant bits left out" not in legend(ax)
    assert "16 bits together, few elements" not in legend(ax)


def test_curves_end_with_the_best_by_column(ax: Any) -> None:
    plots.threshold_curves(analysis.by_threshold(savings(*SWEPT)), ax=ax)
    assert legend(ax) == ["t0, 16 bits", "t1, 32 bits"]
    lines = [line.get_xydata().tolist() for line in ax.lines[:4]]
    assert lines[0] == [pytest.approx([0.7, 25]), pytest.approx([0.9, 20])]
    assert lines[1] == [pytest.approx([0.98, 26])]
    assert lines[3][0][1] == pytest.approx(2)
    assert ticks(ax, "x") == ["0.7", "0.8", "0.9", "by\ncolumn"]


def test_curves_of_one_width_say_so_once(ax: Any) -> None:
    plots.threshold_curves(analysis.by_threshold(savings(*SWEPT), chunk_bits=32), ax=ax)
    assert legend(ax) == ["t0", "t1"]
    assert ax.get_title(loc="left") == "chunks of 32 bits"


def test_effective_savings_against_rows(ax: Any) -> None:
    table = analysis.granularity([0.08, 0.25])
    plots.effective_saving(table, analysis.effective(savings(*SWEPT)), ax=ax)
    assert legend(ax) == [
        "8% of every row", "25% of every row", "read by 32 B", "read by 128 B", "tensor, saved", "tensor, by 32 B",
        "tensor, by 128 B",
    ]  # fmt: skip
    assert ax.lines[0].get_ydata().tolist() == pytest.approx(
        (table[(table["saving_frac"] == 0.08) & (table["piece_bytes"] == 32)]["effective_frac"] * 100).tolist()
    )
    assert [line.get_linestyle() for line in ax.lines[:4]] == ["-", "--", "-", "--"]
    assert ax.lines[4].get_xydata().tolist() == [pytest.approx([200, 30]), pytest.approx([200, 2])]
    assert ticks(ax, "x")[:5] == ["64", "128", "256", "512", "1K"]


def test_nothing_can_be_drawn() -> None:
    empty = {
        plots.invariance_map: analysis.bit_map(Bits.none()),
        plots.savings_bars: analysis.against_bounds(Tensors.none(), Savings.none()),
        plots.threshold_curves: analysis.by_threshold(Savings.none()),
        plots.effective_saving: analysis.granularity([]),
    }
    for plot, table in empty.items():
        figure, axes = plt.subplots()
        plot(table, ax=axes)  # type: ignore[operator]
        figure.canvas.draw()
        plt.close(figure)
