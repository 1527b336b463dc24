"""Figures of rates are tested by their artists, not by their pixels."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import pytest

from gpubloat.analysis import rates as analysis
from gpubloat.plots import rates as plots
from gpubloat.tables.tensors import Rates
from tests.analysis.test_rates import CODECS, DENSE, NO_TIME, SPARSE, WORK, codec, rates, workload
from tests.plots.drawn import legend, texts, ticks


def test_the_link_has_a_line_per_memory_and_order(ax: Any) -> None:
    rows = [
        {"part": "link", "way": f"read, {order}", "memory_bytes": size, "row_bytes": n, "median_s": took * 1024 / n}
        for size, took in ((1 << 26, 0.02), (1 << 33, 0.1))
        for order in ("sorted", "random")
        for n in (512, 1024)
    ]
    copies = [{"part": "link", "way": "copy", "memory_bytes": 1 << k, "median_s": 1 / k} for k in (33, 26)]
    assert plots.link_lines(analysis.link_rates(rates(*rows, *copies)), ax=ax) is ax
    assert legend(ax) == [
        "64 MiB of memory", "8 GiB of memory", "rows in sorted order", "rows in random order", "copy engine (8 GiB)",
    ]  # fmt: skip
    assert ax.lines[0].get_xydata().tolist() == [pytest.approx([512, 25]), pytest.approx([1024, 50])]
    assert [line.get_linestyle() for line in ax.lines] == ["--", "-", "--", "-", ":"]
    assert ax.lines[0].get_color() == ax.lines[1].get_color() != ax.lines[2].get_color()
    assert list(ax.lines[4].get_ydata()) == pytest.approx([33, 33])  # of the greatest memory
    assert ticks(ax, "x") == ["512", "1K"]


def test_dots_lie_where_the_bytes_arrive(ax: Any) -> None:
    table = analysis.decode_rates(rates(*codec("sparse", SPARSE), *codec("dense", DENSE)))
    plots.decode_dots(table, ax=ax)
    lines = {line.get_label(): line.get_xdata().tolist() for line in ax.lines}
    assert lines["plain rows"] == pytest.approx([50, 50])
    assert lines["packed rows"] == pytest.approx([60, 300])
    assert lines["bound: plain / (1 - saving)"] == pytest.approx([50 / 0.75, 500])
    assert ticks(ax) == ["dense bf16, 1,000 B", "sparse bf16, 1,000 B"]
    assert ax.get_xlim()[0] == 0


def test_codecs_have_a_dot_per_matrix_and_the_fastest_is_first(ax: Any) -> None:
    table = analysis.beside_codecs(rates(*codec("dense", DENSE), *CODECS))
    plots.codec_dots(table[table["items"] == "whole"], ax=ax)
    assert ticks(ax) == ["ANS", "packing", "ANS typed", "no codec"]  # one that failed has no line
    dots = [line.get_xdata().tolist() for line in ax.lines[::2]]
    assert dots == [pytest.approx([x]) for x in (55 / 0.7, 70, 55 / 0.9, 55)]


def test_bars_are_labelled_with_their_speed_up(ax: Any) -> None:
    given = rates(*WORK[:4], *WORK[7:])
    table = analysis.workloads(given)
    plots.workload_bars(table, analysis.speedups(given), ax=ax)
    assert len(ax.patches) == len(table)
    assert [round(p.get_width()) for p in ax.patches[:4]] == [500, 2000, 1900, 8000]
    assert texts(ax)[:2] == ["500 ms, 4.00x vs nothing saved", "2000 ms, 4.00x vs CPU"]
    assert "vs" not in texts(ax)[3]
    assert "words\nfetch" in ticks(ax)


def test_what_failed_has_no_bar(ax: Any) -> None:
    given = rates(*workload("gnn", "words, fetch", packed=0.002, raw=NO_TIME))
    plots.workload_bars(analysis.workloads(given), analysis.speedups(given), ax=ax)
    assert texts(ax) == ["2.00 ms"]
    assert len(ax.patches) == 1


def test_nothing_can_be_drawn() -> None:
    none = Rates.none()
    for draw in (
        lambda axes: plots.link_lines(analysis.link_rates(none), ax=axes),
        lambda axes: plots.decode_dots(analysis.decode_rates(none), ax=axes),
        lambda axes: plots.codec_dots(analysis.beside_codecs(none), ax=axes),
        lambda axes: plots.workload_bars(analysis.workloads(none), analysis.speedups(none), ax=axes),
    ):
        figure, axes = plt.subplots()
        draw(axes)
        figure.canvas.draw()
        plt.close(figure)
