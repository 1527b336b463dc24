"""Counts of bits and patterns are those of plain NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubloat.errors import GpubloatError
from gpubloat.tensors import counting

TYPES = ("u1", "<u2", "<u4", "<u8")


def plain(words: np.ndarray) -> np.ndarray:
    """Set bits by column and bit, by np.unpackbits."""
    n, m = words.shape
    width = words.dtype.itemsize * 8
    data = np.ascontiguousarray(words).view(np.uint8).reshape(n, m * width // 8)
    return np.unpackbits(data, axis=1, bitorder="little").sum(axis=0, dtype=np.int64).reshape(m, width)


def drawn(n: int, m: int, dtype: str, seed: int) -> np.ndarray:
    """Random words whose bits are set more or less often."""
    rng = np.random.default_rng(seed)
    top = np.iinfo(dtype).max
    words = rng.integers(0, top, (n, m), dtype, endpoint=True)
    return words & rng.integers(0, top, (1, m), dtype, endpoint=True) | rng.integers(0, top, (1, m), dtype) & 5


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 300), st.integers(0, 300), st.sampled_from(TYPES), st.integers(0, 1000), st.sampled_from((1, 2, 3))
)
def test_counts_are_those_of_unpackbits(n: int, m: int, dtype: str, seed: int, threads: int) -> None:
    words = drawn(n, m, dtype, seed)
    found = counting.ones(words, threads)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, plain(words))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 100), st.integers(1, 400), st.sampled_from(TYPES), st.integers(0, 1000))
def test_views_are_counted_as_they_are(data: st.DataObject, n: int, m: int, dtype: str, seed: int) -> None:
    """Columns of a larger matrix, every other row, backwards, transposed, not aligned."""
    words = drawn(n, m, dtype, seed)
    left = data.draw(st.integers(0, m - 1))
    right = data.draw(st.integers(left + 1, m))
    skew = np.zeros(words.nbytes + 1, np.uint8)
    skew[1:] = words.reshape(-1).view(np.uint8)
    views = [words[:, left:right], words[::2], words[::-1, left:], words.T, words[:, ::-1], words[:, ::3]]
    views += [skew[1:].view(dtype).reshape(n, m), np.broadcast_to(words[:1], (n, m))]
    for view in views:
        np.testing.assert_array_equal(counting.ones(view), plain(view))


@pytest.mark.parametrize("dtype", TYPES)
def test_long_matrices_fill_all_planes(dtype: str) -> None:
    """More rows than one task counts, and bits that are set in all of them."""
    words = np.full((200_003, 3), np.iinfo(dtype).max, dtype)
    words[7] = 0
    assert (counting.ones(words) == 200_002).all()
    wide = np.full((140_000, 512 // words.itemsize), np.iinfo(dtype).max, dtype)
    assert (counting.ones(wide) == 140_000).all()


def test_wide_rows_are_cut_into_strips() -> None:
    words = drawn(5, 300_001, "<u4", 1)
    np.testing.assert_array_equal(counting.ones(words), plain(words))
    words = drawn(40, 70_000, "<u8", 2)
    np.testing.assert_array_equal(counting.ones(words), plain(words))


def test_a_map_is_read_in_place(tmp_path: Path) -> None:
    words = drawn(3000, 100, "<u4", 3)
    np.save(tmp_path / "a.npy", words)
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    np.testing.assert_array_equal(counting.ones(mapped), plain(words))
    np.testing.assert_array_equal(counting.ones(mapped[:, 10:54]), plain(words[:, 10:54]))


def test_what_is_no_matrix_of_words_is_refused() -> None:
    for wrong in (np.zeros(3, "u1"), np.zeros((3, 3)), np.zeros((3, 3), "i4"), np.zeros((3, 3), ">u4")):
        with pytest.raises(GpubloatError, match="cannot be counted"):
            counting.ones(wrong)
    with pytest.raises(GpubloatError, match="patterns of uint32 cannot be counted"):
        counting.histogram(np.zeros(3, "u4"))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3000), st.sampled_from(TYPES[:2]), st.integers(1, 3), st.integers(0, 1000))
def test_patterns_are_those_of_bincount(n: int, dtype: str, step: int, seed: int) -> None:
    words = drawn(max(n, 1), 1, dtype, seed).reshape(-1)[:n:step]
    found = counting.histogram(words)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, np.bincount(words, minlength=256**words.dtype.itemsize))


def test_many_patterns_are_counted_in_parts() -> None:
    words = drawn(3000, 3500, "<u2", 4)
    np.testing.assert_array_equal(counting.histogram(words), np.bincount(words.reshape(-1), minlength=65536))
    np.testing.assert_array_equal(
        counting.histogram(words[:, ::2]), np.bincount(words[:, ::2].reshape(-1), minlength=65536)
    )
