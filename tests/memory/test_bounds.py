"""Bounds: against MiniMalloc's problems, whose least height is known to be at most 1 MiB, and against brute force."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gpubloat import memory
from gpubloat.memory.bounds import pack, peak
from tests.build import snapshot
from tests.build.snapshot import MIB, block, event, segment
from tests.memory.test_real_traces import EXACT, TRACES, needs_traces

BASE = 0x7F00_0000_0000


def of(path: Path) -> dict[str, tuple[int, str]]:
    table = memory.bounds(path)["bounds"]
    return {row["bound"]: (int(row["peak_reserved_bytes"]), row["side"]) for _, row in table.iterrows()}


@needs_traces
@pytest.mark.parametrize("letter", "ABCDEFGHIJK")
def test_problems_whose_capacity_is_known(letter: str) -> None:
    found = of(TRACES / "minimalloc" / "benchmarks" / "challenging" / f"{letter}.1048576.csv")
    live, height = found["live"], found["packing"]
    assert live[0] <= 1 << 20  # nothing needs more than what is known to be enough
    assert live[0] > 0.9 * (1 << 20)
    assert live[0] <= height[0] <= 1.5 * (1 << 20)
    assert (live[1], height[1]) == ("lower", "exact" if height[0] == live[0] else "upper")


@needs_traces
def test_the_example_of_minimalloc() -> None:
    assert of(TRACES / "minimalloc" / "benchmarks" / "examples" / "input.12.csv")["packing"] == (12, "exact")


@needs_traces
@pytest.mark.parametrize("name", EXACT)
def test_real_traces(name: str) -> None:
    run = memory.load(TRACES / name)
    found = memory.bounds(run)["bounds"].set_index("bound")["peak_reserved_bytes"]
    native = memory.replay(run, "native")["replays"].iloc[0]
    assert found["live"] == native["peak_requested_bytes"]
    assert found["live"] <= found["packing"] <= 1.02 * found["live"]
    assert found["live"] <= found["chunks"] <= 1.01 * found["live"]
    stitched = memory.replay(run, "stitching")["replays"].iloc[0]
    assert found["chunks"] <= stitched["peak_reserved_bytes"] <= 1.01 * found["chunks"]


def test_blocks_from_before_the_trace(tmp_path: Path) -> None:
    """One is freed at once, one stays, and one is allocated."""
    trace = [event("free_completed", BASE, 2 * MIB), event("alloc", BASE, 2 * MIB + 1)]
    end = [segment(BASE, [block(20 * MIB, "active_allocated", 2 * MIB + 1, address=BASE)])]
    other = segment(1 << 40, [block(20 * MIB, "active_allocated", 4 * MIB, address=1 << 40)])
    path = snapshot.write(tmp_path / "s.pickle", snapshot.snapshot([*end, other], trace))
    table = memory.bounds(path)["bounds"].set_index("bound")
    assert table["peak_reserved_bytes"].tolist() == [6 * MIB + 1, 8 * MIB, 6 * MIB + 1]
    assert table["n_blocks"].tolist() == [3, 3, 3]
    assert table["event"].tolist()[:2] == [1, 1]
    path = snapshot.write(tmp_path / "s.pickle", snapshot.snapshot([*end, other], [trace[0]]))
    table = memory.bounds(path)["bounds"].set_index("bound")
    assert table["peak_reserved_bytes"].tolist()[0] == 6 * MIB
    assert table["event"].isna().all()  # before the first event


blocks = st.lists(st.tuples(st.integers(-1, 8), st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=6)


@given(blocks)
@hypothesis_settings(max_examples=150, deadline=None)
def test_peaks_and_layouts_by_brute_force(given: list[tuple[int, int, int]]) -> None:
    lower = np.array([a for a, _, _ in given], np.int64)
    upper = np.array([a + n for a, n, _ in given], np.int64)
    size = np.array([s for _, _, s in given], np.int64)
    alive = {t: int(size[(lower <= t) & (upper > t)].sum()) for t in range(-1, 15)}
    most, when = peak(lower, upper, size)
    assert most == max(alive.values())
    assert alive[-1 if when is None else when] == most
    least = min(height_in_order(lower, upper, size, order) for order in permutations(range(len(size))))
    assert most <= least <= pack(lower, upper, size) <= size.sum()


def height_in_order(lower: np.ndarray, upper: np.ndarray, size: np.ndarray, order: tuple[int, ...]) -> int:
    """Each at the lowest place that is free; the best of all orders is the least height there is."""
    placed: list[tuple[int, int]] = []
    for i in order:
        near = sorted((at, at + int(size[j])) for j, at in placed if lower[j] < upper[i] and upper[j] > lower[i])
        at = 0
        for start, end in near:
            if start - at >= size[i]:
                break
            at = max(at, end)
        placed.append((i, at))
    return max(at + int(size[i]) for i, at in placed)


def test_the_layout_is_found_where_the_largest_first_finds_it() -> None:
    lower, upper, size = (np.array(v, np.int64) for v in ([0, 0, 3], [2, 5, 5], [4, 2, 4]))
    assert pack(lower, upper, size) == 6
