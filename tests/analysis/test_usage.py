"""Sets of what runs used: hand-worked answers, and laws that hold for any sets."""

from __future__ import annotations

from itertools import combinations, permutations
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gpubloat.analysis import usage as analysis
from gpubloat.errors import GpubloatError
from gpubloat.tables.usage import TABLES

MATRICES = st.tuples(st.integers(0, 12), st.integers(1, 5)).flatmap(lambda shape: arrays(bool, shape))


def frame(matrix: Any) -> pd.DataFrame:
    matrix = np.asarray(matrix, bool)
    index = pd.MultiIndex.from_product([["a.so"], range(len(matrix))], names=["library", "offset_bytes"])
    return pd.DataFrame(matrix, index=index, columns=[f"w{i}" for i in range(matrix.shape[1])])


def functions(*offsets: int, library: str = "a.so") -> pd.DataFrame:
    rows = pd.DataFrame(
        {
            "library": library, "function": "", "address": offsets, "offset_bytes": offsets,
            "size_bytes": [10 * n for n in offsets], "n_processes": 1,
        }
    )  # fmt: skip
    return TABLES["used_functions"].check(rows, "used_functions")


def evidence(*rows: tuple[str, int, str]) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=["library", "element", "source"]).assign(region=0, n_events=1)
    return TABLES["evidence"].check(table, "evidence")


def test_presence_and_jaccard_by_hand() -> None:
    uses = {"a": functions(1, 2, 3), "b": functions(2, 3, 4), "c": functions(9), "none": functions()}
    used = analysis.presence(uses, analysis.FUNCTIONS)
    assert used.index.tolist() == [("a.so", n) for n in (1, 2, 3, 4, 9)]
    assert used.sum().tolist() == [3, 3, 1, 0]
    square = analysis.jaccard(used)
    assert square.loc["a", "b"] == pytest.approx(2 / 4)
    assert square.loc["a", "c"] == 0
    assert square.loc["none", "c"] == 0
    assert np.isnan(square.loc["none", "none"])
    assert np.diag(square)[:3].tolist() == [1, 1, 1]
    assert analysis.unmet(used).loc["a"].tolist() == [0, 1, 1, 0]


def test_presence_of_one_library_and_of_names() -> None:
    kernels = pd.DataFrame(
        {"library": ["a", "a", "", "b"], "kernel": ["k", "k", "jit", "k"], "element": [1, 2, None, 1]}
    )
    assert analysis.presence({"w": kernels}, analysis.KERNELS).index.tolist() == [("", "jit"), ("a", "k"), ("b", "k")]
    assert len(analysis.presence({"w": kernels, "v": kernels[:0]}, analysis.KERNELS, "a")) == 1


def test_evidence_of_several_kinds_is_one_use() -> None:
    used = analysis.presence(
        {"w": evidence(("a", 0, "content"), ("a", 0, "page"), ("a", 3, "page"))}, analysis.ELEMENTS
    )
    assert used.index.tolist() == [("a", 0, 0), ("a", 0, 3)]


def test_tables_4_and_9_have_functions_below_and_kernels_above() -> None:
    below = pd.DataFrame([[1, 0.8], [0.8, 1]], index=["x", "y"], columns=["x", "y"])
    above = pd.DataFrame([[1, 0.2], [0.2, 1]], index=["x", "y"], columns=["x", "y"])
    square = analysis.triangles(below, above)
    assert square.loc["y", "x"] == 0.8
    assert square.loc["x", "y"] == 0.2
    assert np.isnan(np.diag(square)).all()
    assert analysis.pairs(below).iloc[0].tolist() == ["x", "y", 0.8]
    with pytest.raises(GpubloatError, match="different workloads"):
        analysis.triangles(below, above.loc[["x"], ["x"]])


def test_triangles_keep_what_is_not_known() -> None:
    unknown = pd.DataFrame([[np.nan, np.nan], [np.nan, 1]], index=["x", "y"], columns=["x", "y"])
    known = pd.DataFrame([[1, 0.2], [0.2, 1]], index=["x", "y"], columns=["x", "y"])
    square = analysis.triangles(unknown, known)
    assert np.isnan(square.loc["y", "x"])
    assert square.loc["x", "y"] == 0.2


@given(MATRICES)
def test_jaccard_is_symmetric_bounded_and_one_with_itself(matrix: Any) -> None:
    square = analysis.jaccard(frame(matrix)).to_numpy()
    np.testing.assert_array_equal(square, square.T)
    known = square[~np.isnan(square)]
    assert ((known >= 0) & (known <= 1)).all()
    any_used = matrix.any(axis=0)
    np.testing.assert_array_equal(np.diag(square)[any_used], 1)
    np.testing.assert_array_equal(np.isnan(square), ~(any_used[:, None] | any_used[None, :]))


@given(MATRICES)
def test_jaccard_is_what_sets_say(matrix: Any) -> None:
    square = analysis.jaccard(frame(matrix)).to_numpy()
    sets = [set(np.flatnonzero(column)) for column in matrix.T]
    for i, j in combinations(range(len(sets)), 2):
        if sets[i] | sets[j]:
            assert square[i, j] == pytest.approx(len(sets[i] & sets[j]) / len(sets[i] | sets[j]))


@given(MATRICES)
def test_unmet_is_a_difference_of_sets(matrix: Any) -> None:
    missing = analysis.unmet(frame(matrix)).to_numpy()
    sets = [set(np.flatnonzero(column)) for column in matrix.T]
    assert missing.tolist() == [[len(run - copies) for run in sets] for copies in sets]


def test_saturation_by_hand() -> None:
    # x uses 0 1 2, y uses 2 3, z uses 2
    used = frame([[1, 0, 0], [1, 0, 0], [1, 1, 1], [0, 1, 0]])
    sizes = pd.Series([100, 10, 1, 1000], index=used.index)
    answer = analysis.saturation(used, sizes)
    assert answer["n_workloads"].tolist() == [1, 2, 3]
    assert answer["n_union_mean"].tolist() == pytest.approx([2, (4 + 3 + 2) / 3, 4])
    assert answer["n_union_min"].tolist() == [1, 2, 4]
    assert answer["n_union_max"].tolist() == [3, 4, 4]
    assert answer["union_max_bytes"].tolist() == [1001, 1111, 1111]
    # the second of xy adds 1, of yx 2, of xz 0, of zx 2, of yz 0, of zy 1
    assert answer["n_added_mean"].tolist() == pytest.approx([2, 1, (0 + 1 + 2) / 3])
    assert answer["added_max_bytes"].tolist() == [1001, 1000 if 1000 > 110 else 110, 1000]


def test_shares_by_hand() -> None:
    used = frame([[1, 0, 0], [1, 0, 0], [1, 1, 1], [0, 1, 0]])
    sizes = pd.Series([100, 10, 1, 1000], index=used.index)
    answer = analysis.shares(used, sizes).set_index("workload")
    assert answer["n_used"].tolist() == [3, 2, 1]
    assert answer["n_only"].tolist() == [2, 1, 0]
    assert answer["n_new"].tolist() == [3, 1, 0]
    assert answer["new_bytes"].tolist() == [111, 1000, 0]
    assert "used_bytes" not in analysis.shares(used)


@given(MATRICES)
def test_shares_sum_to_the_union(matrix: Any) -> None:
    answer = analysis.shares(frame(matrix))
    assert answer["n_new"].sum() == matrix.any(axis=1).sum()
    assert (answer["n_only"] <= answer["n_new"]).all()
    assert (answer["n_new"] <= answer["n_used"]).all()


@given(MATRICES, st.randoms(use_true_random=False))
def test_saturation_grows_to_the_union_whatever_the_order(matrix: Any, random: Any) -> None:
    weights = np.array([random.randrange(1000) for _ in range(len(matrix))], np.int64)
    used = frame(matrix)
    answer = analysis.saturation(used, pd.Series(weights, index=used.index))
    for name in ("n_union_{}", "union_{}_bytes"):
        for part in ("mean", "min", "max"):
            assert (np.diff(answer[name.format(part)]) >= -1e-9).all()
    last = answer.iloc[-1]
    assert last["n_union_mean"] == last["n_union_min"] == last["n_union_max"] == matrix.any(axis=1).sum()
    assert last["union_mean_bytes"] == weights[matrix.any(axis=1)].sum()
    assert answer["n_added_mean"].sum() == pytest.approx(last["n_union_mean"])
    # on average each further workload adds no more than the one before
    assert (np.diff(answer["n_added_mean"]) <= 1e-9).all()
    shuffled = used.iloc[:, random.sample(range(matrix.shape[1]), matrix.shape[1])]
    pd.testing.assert_frame_equal(analysis.saturation(shuffled), analysis.saturation(used))


@settings(max_examples=30)
@given(arrays(bool, (8, 4)))
def test_subsets_are_all_orders(matrix: Any) -> None:
    weights = np.arange(1, 9)
    unions, added = analysis._by_subsets(matrix, weights)
    grown = np.array(
        [weights @ np.logical_or.accumulate(matrix[:, list(order)], axis=1) for order in permutations(range(4))]
    )
    steps = np.diff(grown, axis=1, prepend=0)
    for j in range(4):
        for exact, listed in ((unions[j], grown[:, j]), (added[j], steps[:, j])):
            assert np.mean(exact) == pytest.approx(np.mean(listed))
            assert (np.min(exact), np.max(exact)) == (listed.min(), listed.max())


def test_many_workloads_are_sampled_the_same_way_each_time() -> None:
    draw = np.random.default_rng(1)
    used = frame(draw.random((200, 15)) < 0.2)
    answer = analysis.saturation(used, orders=300)
    pd.testing.assert_frame_equal(answer, analysis.saturation(used, orders=300))
    assert answer.iloc[-1][["n_union_min", "n_union_max"]].tolist() == [used.any(axis=1).sum()] * 2
    assert answer["n_union_mean"].is_monotonic_increasing
    few = used.iloc[:, :6]
    exact = analysis.saturation(few)
    unions, _ = analysis._by_orders(few.to_numpy(), np.ones(200, np.int64), 3000, 0)
    assert [np.mean(x) for x in unions] == pytest.approx(exact["n_union_mean"].tolist(), rel=0.01)


def test_one_workload_only() -> None:
    used = analysis.presence({"w": functions(1, 2)}, analysis.FUNCTIONS)
    assert analysis.jaccard(used).to_numpy().tolist() == [[1.0]]
    assert analysis.saturation(used)[["n_union_mean", "n_added_max"]].to_numpy().tolist() == [[2.0, 2]]
    assert analysis.pairs(analysis.jaccard(used)).empty
    assert np.isnan(analysis.triangles(analysis.jaccard(used), analysis.jaccard(used)).to_numpy()).all()


def test_nothing_at_all() -> None:
    for uses in ({}, {"w": functions()}):
        used = analysis.presence(uses, analysis.FUNCTIONS)
        assert used.shape == (0, len(uses))
        sizes = analysis.weigh(used, uses.values())
        assert analysis.saturation(used, sizes)["n_workloads"].tolist() == [1] * len(uses)
        assert analysis.shares(used, sizes)["new_bytes"].tolist() == [0] * len(uses)
    assert analysis.files({}).empty
    assert analysis.transfer({}).empty
    assert analysis.agreement(TABLES["evidence"].none()).empty
    assert analysis.agreement(TABLES["evidence"].none(), total=True)["n_both"].tolist() == [0]


def test_sizes_count_once_and_must_be_known() -> None:
    uses = {"a": functions(1, 2), "b": functions(2, 3)}
    used = analysis.presence(uses, analysis.FUNCTIONS)
    assert analysis.weigh(used, uses.values()).tolist() == [10, 20, 30]
    members = pd.DataFrame({"library": "a.so", "offset_bytes": [1, 1, 2, 3], "size_bytes": [7, 0, 1, 1]})
    assert analysis.weigh(used, [members]).tolist() == [7, 1, 1]
    with pytest.raises(GpubloatError, match="no size of"):
        analysis.weigh(used, [uses["a"]])
    with pytest.raises(GpubloatError, match="other rows"):
        analysis.saturation(used, analysis.weigh(used, uses.values()).iloc[::-1])


def test_files_tell_versions_apart() -> None:
    def loaded(*rows: tuple[str, str]) -> pd.DataFrame:
        return pd.DataFrame(rows, columns=["library", "sha256"]).assign(file_bytes=10)

    answer = analysis.files({"x": loaded(("a", "1"), ("b", "1")), "y": loaded(("a", "1"), ("b", "2"))})
    assert answer["library"].tolist() == ["a", "b", "b"]
    assert answer["workloads"].tolist() == ["x, y", "x", "y"]


def test_transfer_by_hand() -> None:
    rows = pd.DataFrame(
        {
            "library": "a", "what": ["function", "function", "element"], "function": "f", "offset_bytes": [1, 2, 3],
            "size_bytes": [10, 20, 500], "region": [None, None, 0], "element": [None, None, 1],
            "action": ["restored", "restored", "reported"], "n_processes": 1,
        }
    )  # fmt: skip
    misses = TABLES["misses"].check(rows, "misses")
    answer = analysis.transfer({("train", "infer"): misses, ("infer", "infer"): TABLES["misses"].none()})
    assert answer.iloc[0].tolist() == ["train", "infer", 3, 2, 30, 1, 500, 2]
    assert answer.iloc[1].tolist() == ["infer", "infer", 0, 0, 0, 0, 0, 0]


def test_agreement_by_hand() -> None:
    table = evidence(
        ("a", 0, "content"), ("a", 0, "page"), ("a", 1, "kernel"), ("a", 2, "page"), ("a", 3, "page_shared"),
        ("a", 4, "pointer"), ("a", 4, "page_shared"), ("b", 0, "page"), ("c", 0, "page_shared"),
    )  # fmt: skip
    answer = analysis.agreement(table, total=True).set_index("library")
    assert answer.index.tolist() == ["a", "b", "total"]
    assert answer.loc["a"].tolist() == [1, 2, 1, pytest.approx(1 / 3), pytest.approx(1 / 2)]
    assert answer.loc["b"].tolist() == [0, 0, 1, pytest.approx(np.nan, nan_ok=True), 0.0]
    assert answer.loc["total", ["n_both", "n_only_first", "n_only_second"]].tolist() == [1, 2, 2]
    shared = analysis.agreement(table, second=analysis.PAGES_SHARED).set_index("library")
    assert shared.loc["a"].tolist() == [2, 1, 2, pytest.approx(2 / 3), pytest.approx(2 / 4)]
