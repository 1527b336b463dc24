"""Plots are tested by their artists, not by their pixels."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from gpubloat.plots import libraries as plots
from gpubloat.plots import style

mpl.use("Agg")


@pytest.fixture
def ax():
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


def test_code_bars_are_the_file_sizes(ax) -> None:
    shares = pd.DataFrame(
        {
            "library": ["dir/a.so", "b.so"], "gpu_code_bytes": [3e6, 0.0], "cpu_code_bytes": [1e6, 2e6],
            "other_bytes": [2e6, 2e6], "gpu_code_frac": [0.5, 0.0],
        }
    )  # fmt: skip
    assert plots.code_bars(shares, ax=ax) is ax
    ends = [
        max(p.get_x() + p.get_width() for p in ax.patches if round(p.get_y() + p.get_height() / 2) == y) for y in (0, 1)
    ]
    assert ends == pytest.approx([6, 4])
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a.so", "b.so"]
    assert [t.get_text() for t in ax.texts] == ["50% GPU"]
    assert "MB" in ax.get_xlabel()


def test_label_bars_are_whole(ax) -> None:
    labels = pd.DataFrame(
        {"library": ["a", "a", "b"], "label": ["cpu_code", "gpu_code", "data"], "size_bytes": [1, 3, 5]}
    )
    plots.label_bars(labels, ax=ax)
    assert max(p.get_x() + p.get_width() for p in ax.patches) == pytest.approx(100)
    assert {t.get_text() for t in ax.get_legend().get_texts()} == {"CPU code", "GPU code", "data"}


def test_every_label_has_a_colour() -> None:
    from gpubloat.tables.libraries import LABELS

    assert set(plots.LABEL_COLORS) == set(LABELS)


def test_heatmaps_show_what_the_table_says(ax) -> None:
    loadable = pd.DataFrame(
        {
            "library": ["a", "a", "b", "b"], "gpu": ["sm_90", "sm_80"] * 2, "stored_bytes": [4e6, 4e6, 9e6, 9e6],
            "loadable_bytes": [1e6, 2e6, 0.0, 9e6],
        }
    )  # fmt: skip
    plots.loadable_heatmap(loadable, ax=ax)
    np.testing.assert_allclose(ax.images[0].get_array(), [[1, 0], [0.5, 0.25]])
    assert [t.get_text() for t in ax.get_xticklabels()] == ["sm_80", "sm_90"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["b (9 MB)", "a (4 MB)"]
    assert [t.get_text() for t in ax.texts] == ["9.0", "0", "2.0", "1.0"]


def test_target_heatmap_has_one_column_for_ptx(ax) -> None:
    table = pd.DataFrame(
        {
            "library": "a", "kind": ["cubin", "ptx", "ptx", "concat"],
            "target": ["sm_90", "compute_80", "compute_90", ""], "stored_bytes": [1e6, 1e6, 2e6, 7e6],
        }
    )  # fmt: skip
    plots.target_heatmap(table, ax=ax)
    assert [t.get_text() for t in ax.get_xticklabels()] == ["sm_90", "PTX"]
    assert [t.get_text() for t in ax.texts] == ["1.0", "3.0"]


def test_pareto_marks_the_level(ax) -> None:
    curve = pd.DataFrame({"rank": [1, 2, 3], "cumulative_frac": [0.6, 0.9, 1.0]})
    plots.pareto(curve, of="bytes", ax=ax)
    assert ax.texts[0].get_text() == "2 of 3 give 90%"


def test_saved_figures_are_the_same_every_day(tmp_path: Path) -> None:
    for place in ("a", "b"):
        with style.paper("column") as size:
            figure, axes = plt.subplots(**size)
            axes.plot([1, 2])
        style.save(figure, "libraries-x", pd.DataFrame({"x": [1 / 3]}), folder=tmp_path / place, source="run")
        plt.close(figure)
    for kind in ("pdf", "png", "csv", "json"):
        assert (tmp_path / "a" / f"libraries-x.{kind}").read_bytes() == (
            tmp_path / "b" / f"libraries-x.{kind}"
        ).read_bytes()
    assert json.loads((tmp_path / "a" / "libraries-x.json").read_text())["source"] == "run"
    assert (tmp_path / "a" / "libraries-x.csv").read_text() == "x\n0.333333\n"


def test_style_changes_nothing_outside_its_block_and_keeps_what_others_set() -> None:
    before = dict(mpl.rcParams)
    with style.paper():
        assert mpl.rcParams["pdf.fonttype"] == 42
        mpl.rcParams["interactive"] = not before["interactive"]  # as a notebook's backend does on first use
    assert dict(mpl.rcParams) == before | {"interactive": not before["interactive"]}
    mpl.rcParams["interactive"] = before["interactive"]


def test_palette_is_told_apart_with_deuteranopia() -> None:
    # Vienot, Brettel and Mollon 1999: linear RGB as a deuteranope sees it.
    matrix = np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]])

    def seen(color: str) -> np.ndarray:
        linear = np.array(to_rgb(color)) ** 2.2
        return np.clip(matrix @ linear, 0, 1) ** (1 / 2.2)

    distances = [np.linalg.norm(seen(a) - seen(b)) for a, b in combinations(style.PALETTE, 2)]
    assert min(distances) > 0.1


def test_short_names() -> None:
    assert plots.short("nvidia/cu13/lib/libcublas.so.13") == "libcublas.so.13"
    assert plots.short("torch-2.14.1-cp311-cp311-manylinux_2_28_x86_64.whl") == "torch 2.14.1"
    assert len(plots.short("x" * 80)) == 34
