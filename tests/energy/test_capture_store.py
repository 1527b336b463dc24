"""The store of values: exact, bounded, without a trace when closed. Oracles: NumPy and ml_dtypes."""

from __future__ import annotations

import gc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gpubloat.energy.capture.store import Store, decoded

SMALL = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "fp8_e8m0": ml_dtypes.float8_e8m0fnu,
}


@pytest.mark.parametrize("name", SMALL)
def test_all_values_of_small_floats(name: str) -> None:
    bits = np.arange(256, dtype=np.uint8)
    theirs = bits.view(SMALL[name]).astype(np.float32)
    ours = decoded(bits, name)
    assert ours.dtype == np.float32
    assert np.array_equal(ours, theirs, equal_nan=True)
    numbers = ~np.isnan(ours)
    assert np.array_equal(np.signbit(ours[numbers]), np.signbit(theirs[numbers]))


def test_all_values_of_bf16() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    ours = decoded(bits.view(np.uint8), "bf16")
    assert np.array_equal(ours, bits.view(ml_dtypes.bfloat16).astype(np.float32), equal_nan=True)


@given(arrays.arrays(np.float32, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)))
def test_what_is_put_comes_back(array: np.ndarray) -> None:
    store = Store()
    assert store.put(5, array.T, "fp32")
    value = store.value(5)
    assert value is not None
    assert value.tobytes() == array.T.tobytes()
    assert value.shape == array.T.shape
    assert store.value(6) is None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 64), st.integers(0, 64))
def test_limits_hold_and_equal_contents_count_once(contents: list[int], keep: int, spill: int) -> None:
    store = Store(keep, spill)
    kept = [store.put(n, np.full(4, content, np.int32), "int32") for n, content in enumerate(contents)]
    different = {content for content, is_kept in zip(contents, kept) if is_kept}
    assert store.kept_bytes <= keep
    assert store.spilled_bytes <= spill
    assert store.kept_bytes + store.spilled_bytes == 16 * len(different)
    assert len(different) == min(len(set(contents)), keep // 16 + spill // 16)
    assert sum(store.refused.values()) == kept.count(False)
    for n, content in enumerate(contents):
        value = store.value(n)
        assert (value is not None) == kept[n] == (content in different)
        if value is not None:
            assert value.tolist() == [content] * 4
    store.close()
    assert store.value(0) is None


def test_large_values_are_known_by_all_their_bytes() -> None:
    """Several threads hash pieces of them."""
    store = Store()
    large = np.arange(3 << 20, dtype=np.int32)
    other = large.copy()
    other[-1] += 1
    swapped = np.roll(large, 1 << 20)  # the same pieces in another order
    for number, array in enumerate((large, large.copy(), other, swapped, large[:-1])):
        assert store.put(number, array, "int32")
    assert [store.same(0, number) for number in range(5)] == [True, True, False, False, False]
    assert store.kept_bytes == 3 * large.nbytes + large[:-1].nbytes


def test_bytes_that_are_kept_have_another_shape_too() -> None:
    store = Store()
    store.put(0, np.arange(6, dtype=np.int32), "int32")
    assert store.put_again(1, 0, "fp32", (2, 3))
    assert not store.put_again(2, 9, "fp32", (2, 3))
    assert store.value(1).tobytes() == np.arange(6, dtype=np.int32).tobytes()  # type: ignore[union-attr]
    assert store.value(2) is None
    assert store.kept_bytes == 24


def test_later_writes_do_not_change_what_was_put() -> None:
    store = Store()
    array = np.zeros(3)
    store.put(0, array, "fp64")
    array += 1
    assert store.value(0).tolist() == [0, 0, 0]  # type: ignore[union-attr]


def test_expanded_axes_are_stored_once() -> None:
    store = Store()
    store.put(0, np.arange(3.0).reshape(3, 1), "fp64", (3, 1000))
    assert store.kept_bytes == 24
    assert np.array_equal(store.value(0), np.broadcast_to(np.arange(3.0)[:, None], (3, 1000)))


def test_same_means_type_and_shape_too() -> None:
    store = Store()
    store.put(0, np.zeros(4, np.int32), "int32")
    store.put(1, np.zeros(4, np.int32), "int32")
    store.put(2, np.zeros((2, 2), np.int32), "int32")
    store.put(3, np.zeros(4, np.float32), "fp32")
    assert store.same(0, 1)
    assert not any(store.same(0, other) for other in (2, 3, 9))
    assert store.kept_bytes == 16


def test_the_folder_goes_with_the_store(tmp_path: Path) -> None:
    store = Store(0, 1000, tmp_path)
    store.put(0, np.arange(5), "int64")
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o077 == 0  # nobody else's
    assert store.value(0).tolist() == [0, 1, 2, 3, 4]  # type: ignore[union-attr]
    del store
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    store = Store(0, 1000, tmp_path / "missing")
    assert not store.put(0, np.arange(5), "int64")
    assert store.notes() == ["1 tensor was not kept: spilling failed: No such file or directory"]
