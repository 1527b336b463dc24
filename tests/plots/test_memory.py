"""Figures of memory are tested by their artists, not by their pixels."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from gpubloat import memory, published
from gpubloat.analysis import memory as analysis
from gpubloat.analysis import pinning, training, whatif
from gpubloat.errors import GpubloatError
from gpubloat.plots import memory as plots
from gpubloat.plots import style
from gpubloat.plots import training as charts
from gpubloat.tables.training import DriverSteps, Training, VmmCosts
from tests.analysis.test_memory import replays, small_case, usage
from tests.analysis.test_training import runs
from tests.build import snapshot
from tests.memory.test_real_traces import TRACES, needs_traces
from tests.plots.drawn import legend, texts, ticks


def events(**at: int) -> pd.DataFrame:
    table = pd.DataFrame({"event": range(4), "action": "alloc", "time_us": pd.array([0, 1e6, None, 3e6], "Int64")})
    for action, event in at.items():
        table.loc[event, "action"] = action
    return table


def test_the_timeline_shades_what_is_unused(ax: Any) -> None:
    table = usage([1_000_000_000, 2_000_000_000, 2_000_000_000, 2_000_000_000], [5, 10, 1_500_000_000, 20])
    assert plots.timeline(table, events(oom=2, snapshot=3), ax=ax) is ax
    assert legend(ax) == ["unused", "active", "reserved", "out of memory", "snapshot"]
    assert ax.lines[0].get_ydata().tolist() == [1, 2, 2, 2]
    assert [line.get_xdata().tolist() for line in ax.lines[1:]] == [[2], [3]]
    gap = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert (gap.min(), gap.max()) == (pytest.approx(5e-9), 2)
    assert ax.get_xlabel() == "event"


def test_the_timeline_by_the_clock(ax: Any) -> None:
    plots.timeline(usage([1, 2, 2, 2], [1, 1, 1, 1]), events(), by="time", ax=ax)
    assert ax.lines[0].get_xdata().tolist() == [0, 1, 1, 3]
    assert ax.get_xlabel() == "time (s)"


def test_long_timelines_keep_their_peaks(ax: Any) -> None:
    n = 100_000
    active = np.zeros(n, int)
    active[77_777] = 9_000_000_000
    reserved = np.full(n, 9_000_000_000)
    reserved[:10] = 1
    plots.timeline(usage(reserved.tolist(), active.tolist()), ax=ax)
    assert len(ax.lines[0].get_xdata()) < 3 * plots.MAX_POINTS
    assert ax.collections[1].get_paths()[0].vertices[:, 1].max() == 9
    assert {9, 10} <= set(ax.lines[0].get_xdata().tolist())


def test_the_map_has_a_row_per_segment(ax: Any, tmp_path: Any) -> None:
    run = memory.load(snapshot.write(tmp_path / "a.pickle", small_case()))
    table = pinning.by_segment(run["segments"], run["blocks"])
    plots.address_map(table, run["blocks"], ax=ax)
    assert legend(ax) == ["held", "free, pinned", "free, releasable"]
    n_boxes = [len(c.get_paths()) for c in ax.collections]
    assert n_boxes == [4, 0, 4, 1]  # held, waiting, pinned, releasable
    assert sum(n_boxes) == len(run["blocks"])
    widths = [p.vertices[:, 0].max() - p.vertices[:, 0].min() for c in ax.collections for p in c.get_paths()]
    assert sum(widths) * 1e6 == pytest.approx(table["size_bytes"].sum())
    assert ax.get_title(loc="left") == "4 segments, 0.08 GB"
    assert texts(ax) == ["5 MB"]
    figure, other = plt.subplots()
    plots.address_map(table, run["blocks"], rows=2, ax=other)
    assert other.get_title(loc="left").startswith("2 of 4 segments")
    plt.close(figure)


def test_what_if_bars_mark_the_recorded_one_and_failures(ax: Any) -> None:
    table = whatif.what_if(
        replays(("caching", "", 4_000_000_000, 3_000_000_000, 0), ("expandable", "", 3_600_000_000, 3_000_000_000, 0),
                ("stitching", "", 1_000_000_000, 900_000_000, 1)),
        bounds=pd.DataFrame({"device": [0], "bound": ["live"], "peak_reserved_bytes": [2_900_000_000]}),
    )  # fmt: skip
    plots.what_if_bars(table, ax=ax)
    assert ticks(ax) == ["caching *", "expandable", "stitching", "bound: live"]
    minus = "\N{MINUS SIGN}"
    assert texts(ax) == ["75% used", f"{minus}10.0%, 83% used", "out of memory", f"{minus}27.5%"]
    assert [p.get_width() for p in ax.patches] == [4, 3, 3.6, 3, 1, 0.9, 2.9]


def test_bars_of_the_paper_and_ours(ax: Any) -> None:
    table = training.beside(runs({}, {"allocator": "stitching"}), published.load("gmlake"), "chart strategies")
    with pytest.raises(GpubloatError, match="several rows for one bar by strategy"):
        charts.group_bars(table, ax=ax)
    charts.group_bars(table[table["model"] == "OPT-1.3B"], ax=ax)
    assert ticks(ax, "x") == ["N", "R", "LR", "RO", "LRO"]
    assert legend(ax) == ["caching, published", "stitching, published", "caching, measured", "stitching, measured"]
    assert len(ax.patches) == 12
    assert [p.get_height() for p in ax.patches[10:]] == [40, 40]
    figure, other = plt.subplots()
    charts.group_bars(table[table["model"] == "OPT-1.3B"], "utilisation_frac", ax=other)
    assert other.patches[0].get_height() == pytest.approx(92.8)
    plt.close(figure)


def test_failed_bars_and_platforms_are_named(ax: Any) -> None:
    table = training.charts(published.load("gmlake"))
    batch = table[(table["item"] == "chart batch size") & (table["model"] == "OPT-13B")]
    charts.group_bars(batch, by="batch", ax=ax)
    assert texts(ax) == ["OOM"]
    figure, other = plt.subplots()
    charts.group_bars(table[table["item"] == "chart platforms"], by="platform", ax=other)
    assert ticks(other, "x")[0] == "Colossal-AI\nGPT-2"
    plt.close(figure)


def test_throughput_is_relative(ax: Any) -> None:
    table = training.throughput(runs({}, {"allocator": "stitching", "step_s": 4.0}, {"batch": 9, "allocator": "bfc"}))
    charts.throughput_bars(table, ax=ax)
    assert [p.get_height() for p in ax.patches] == [1, 0.5]
    assert texts(ax) == ["1.00", "0.50"]
    assert ax.lines[0].get_ydata() == [0.98, 0.98]
    assert ticks(ax, "x") == ["OPT-1.3B LR\nbatch 8"]
    rounds = runs({"step_s": 1.0}, {"step_s": 4.0})  # of a bar at 2 s: twice, and half
    figure, other = plt.subplots()
    charts.throughput_bars(training.throughput(runs({"step_s": 2.0})), rounds, ax=other)
    assert other.lines[0].get_ydata().tolist() == [2, 0.5]
    plt.close(figure)


def test_convergence_shows_zero(ax: Any) -> None:
    steps = pd.DataFrame(
        {"allocator": ["stitching"] * 3 + ["caching"], "step": [1, 0, 2, 0], "n_driver_calls": [5, 90, 0, 7]}
    )
    charts.convergence(steps, ax=ax)
    assert legend(ax) == ["caching", "stitching"]
    assert ax.lines[1].get_ydata().tolist() == [90, 5, 0]
    assert ax.get_ylim()[0] == 0


def test_costs_are_lines_by_call(ax: Any) -> None:
    table = training.vmm_table(
        pd.DataFrame(
            [("map", 2 << 20, 1024, 2 << 30, False, 0, 1024, 5000.0),
             ("map", 4 << 20, 512, 2 << 30, False, 0, 512, 2500.0),
             ("malloc", 2 << 30, 1, 2 << 30, False, 0, 1, 900.0)], columns=list(VmmCosts.none()),
        )
    )  # fmt: skip
    charts.vmm_lines(table, ax=ax)
    assert sorted(legend(ax)) == ["malloc of the whole", "map"]
    line = next(line for line in ax.lines if line.get_label() == "map")
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([2, 4], [5, 2.5])
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")


def test_batches_end_in_a_cross(ax: Any) -> None:
    table = runs({"batch": 8}, {"batch": 16, "is_oom": True}, {"allocator": "stitching", "batch": 16})
    charts.batch_pareto(table, capacity_bytes=80e9, ax=ax)
    assert legend(ax) == ["caching", "stitching", "memory of the GPU", "out of memory"]
    crosses = [line for line in ax.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert [c.get_xdata().tolist() for c in crosses] == [[16]]
    assert ax.get_ylim()[1] > 80


def test_nothing_to_draw_is_an_empty_figure() -> None:
    from gpubloat.tables.memory import Blocks, Segments, Usage

    none = whatif.what_if(replays())
    pinned = pinning.by_segment(Segments.none(), Blocks.none())
    drawings = [
        lambda ax: plots.timeline(Usage.none(), ax=ax),
        lambda ax: plots.address_map(pinned, Blocks.none(), ax=ax),
        lambda ax: plots.what_if_bars(none, ax=ax),
        lambda ax: charts.group_bars(training.measured(Training.none()), ax=ax),
        lambda ax: charts.throughput_bars(training.throughput(Training.none()), ax=ax),
        lambda ax: charts.convergence(DriverSteps.none(), ax=ax),
        lambda ax: charts.vmm_lines(training.vmm_table(VmmCosts.none()), ax=ax),
        lambda ax: charts.batch_pareto(Training.none(), ax=ax),
    ]
    for draw in drawings:
        with style.paper("column") as size:
            figure, axes = plt.subplots(**size)
            assert draw(axes) is axes
            figure.canvas.draw()
            plt.close(figure)


@needs_traces
def test_a_real_trace_fits_its_figure() -> None:
    """No label is cut off: everything lies inside the page."""
    run = memory.load(TRACES / "cs336_wedsonlin" / "medium_1024_inference_memory_snapshot.pickle")
    history = analysis.history(run["events"], run["segments"], run["blocks"])
    pinned = pinning.by_segment(run["segments"], run["blocks"])
    played = whatif.what_if(pd.concat([memory.replay(run, a)["replays"] for a in ("caching", "expandable")]))
    for draw in (
        lambda ax: plots.timeline(history, run["events"], ax=ax),
        lambda ax: plots.address_map(pinned, run["blocks"], ax=ax),
        lambda ax: plots.what_if_bars(played, ax=ax),
    ):
        with style.paper("text") as size:
            figure, axes = plt.subplots(**size)
            draw(axes)
            figure.canvas.draw()
            box = figure.get_tightbbox()
            assert box.x0 >= -0.02
            assert box.x1 <= size["figsize"][0] + 0.02
            plt.close(figure)
