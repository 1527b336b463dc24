"""Slices, repeats, padding and concatenations are named with their places; what merely looks so is not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubloat.energy.match.equivalence import equivalent
from gpubloat.energy.match.extensions import concatenation, extended
from gpubloat.energy.match.fingerprint import fingerprint, may_equal
from gpubloat.energy.match.repeats import equal

T, H, D = 10, 6, 8


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@given(st.integers(0, 2), st.integers(0, 5), st.integers(1, 4), st.integers(0, 999))
@settings(max_examples=60, deadline=None)
def test_a_slice_is_found_where_it_was_cut(axis: int, start: int, width: int, seed: int) -> None:
    large = normal(6, 7, 8, seed=seed)
    stop = min(start + width, large.shape[axis])
    small = large[(*(slice(None),) * axis, slice(start, stop))]
    found = extended(small, large)
    assert found is not None
    assert (found.how, found.axis, found.start, found.stop) == ("slice", axis, start, stop)
    wrong = small.copy()
    wrong.reshape(-1)[-1] += 0.5
    assert extended(wrong, large) is None


def test_heads_of_a_fused_product_are_slices_though_permuted() -> None:
    fused = normal(T, 3 * H * D)
    key = fused[:, H * D : 2 * H * D].reshape(T, H, D).transpose(1, 0, 2)
    found = extended(key, fused)
    assert found is not None
    assert str(found) == "slice 48:96 of axis 1"
    assert not found.is_whole
    assert extended(-key, fused) is None


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_repeats_of_elements_of_blocks_and_of_a_whole_axis(axis: int) -> None:
    small = normal(4, 4, 4)
    pairs = np.split(small, 2, axis)
    for block, large in (
        (1, np.repeat(small, 3, axis)),
        (2, np.concatenate([pairs[0]] * 3 + [pairs[1]] * 3, axis)),
        (4, np.concatenate([small] * 3, axis)),
    ):
        found = extended(small, large)
        assert found is not None
        assert (found.how, found.axis, found.times, found.block) == ("expand", axis, 3, block)
        broken = large.copy()
        broken[-1, -1, -1] += 0.1
        assert getattr(extended(small, broken), "how", None) != "expand"


def test_grouped_heads_and_masks() -> None:
    key = normal(1, 2, T, D)
    found = extended(key, np.broadcast_to(key[:, :, None], (1, 2, 4, T, D)))
    assert found is not None
    assert (found.how, found.axis, found.times, found.is_whole) == ("expand", 2, 4, True)
    found = extended(key, np.repeat(key, 4, 1).transpose(0, 2, 1, 3).reshape(T, -1))
    assert found is not None
    assert (found.how, found.axis, found.times, found.block) == ("expand", 1, 4, D)
    mask = np.tril(np.ones((T, T), bool))
    found = extended(mask, np.broadcast_to(mask, (2, 3, T, T)))
    assert found is not None
    assert (found.how, found.times) == ("expand", 6)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data(), st.integers(0, 999))
@settings(max_examples=150, deadline=None)
def test_what_repeats_without_a_copy_is_the_same_as_its_copy(shape: list[int], data: st.DataObject, seed: int) -> None:
    """Axes of stride 0 at any place, on one side or on both: each answer is that of contiguous arrays."""

    def lazy(base: np.ndarray) -> np.ndarray:
        array = base.transpose(data.draw(st.permutations(range(base.ndim))))
        for _ in range(data.draw(st.integers(0, 2))):
            at = data.draw(st.integers(0, array.ndim))
            wide = np.expand_dims(array, at)
            array = np.broadcast_to(wide, (*wide.shape[:at], data.draw(st.integers(2, 4)), *wide.shape[at + 1 :]))
        return array

    base = normal(6, *shape, seed=seed)
    if data.draw(st.booleans()):
        base[base > 1] = data.draw(st.sampled_from([np.nan, np.inf]))
    x, y = lazy(base), lazy(base)
    copies = np.array(x), np.array(y)
    assert may_equal(fingerprint(x), fingerprint(copies[0]), 0.0)
    if x.size == y.size:
        assert equal(x, y) == equal(*copies)
    for function in (equivalent, extended):
        found = [function(*pair) for pair in ((x, y), (copies[0], y), (x, copies[1]), copies)]
        assert len({None if how is None else str(how) for how in found}) == 1
    part = x[tuple(slice(1, None) if n > 2 else slice(None) for n in x.shape)]
    assert str(extended(part, x)) == str(extended(np.array(part), copies[0]))
    padded = np.pad(base, [(1, 2)] * base.ndim)
    wide = np.broadcast_to(padded, (3, *padded.shape))
    assert str(extended(y, wide)) == str(extended(copies[1], np.array(wide)))


def test_logical_elements_are_not_counted_one_by_one() -> None:
    """No machine has memory for, or time to walk, what is repeated here: 2^50 elements."""
    small = normal(32, 32)
    large = np.broadcast_to(small, (1 << 40, 32, 32))
    heads = np.broadcast_to(small[:, None], (32, 1 << 40, 32))
    for repeated, axis in ((large, 0), (heads, 1)):
        found = extended(small, repeated)
        assert found is not None
        assert (found.how, found.axis, found.times, found.block) == ("expand", axis, 1 << 40, 1)
        assert extended(-small, repeated) is None
        found = extended(repeated, np.broadcast_to(repeated, (3, *repeated.shape)))
        assert found is not None
        assert (found.how, found.axis, found.times) == ("expand", 0, 3)
    turned = equivalent(large, heads)
    assert turned is not None
    assert turned.layout.axes == (1, 0, 2)
    assert equivalent(large, np.broadcast_to(small[::-1], large.shape)) is None
    # Axes of which neither divides the other: not compared in row-major order, but found as a permutation.
    turned = equivalent(np.broadcast_to(small, (6, 1 << 30, 32, 32)), np.broadcast_to(small, (1 << 30, 6, 32, 32)))
    assert turned is not None
    assert turned.layout.axes == (1, 0, 2, 3)
    row = np.arange(49.0)
    assert extended(row, np.broadcast_to(np.tile(row, 4).reshape(14, 14), (1 << 40, 14, 14))) is None
    padded = np.pad(small, 1)
    found = extended(large, np.broadcast_to(padded, (1 << 40, *padded.shape)))
    assert found is not None
    assert (found.how, found.boxes) == ("padding", ((0, 1 << 40), (1, 33), (1, 33)))


@pytest.mark.parametrize("fill", [0.0, 7.0, -np.inf, np.nan])
def test_padding_is_a_box_in_a_constant(fill: float) -> None:
    small = normal(2, 3, 5, 5)
    found = extended(small, np.pad(small, ((0, 0), (0, 0), (1, 1), (2, 0)), constant_values=fill))
    assert found is not None
    assert (found.how, found.boxes) == ("padding", ((0, 2), (0, 3), (1, 6), (2, 7)))
    assert np.array_equal(found.fill, fill, equal_nan=True)
    found = extended(small, np.pad(small, ((0, 6), (0, 0), (0, 0), (0, 0)), constant_values=fill))
    assert found is not None
    assert (found.how, found.axis, found.start, found.stop) == ("padding", 0, 0, 2)


def test_what_says_little_is_in_nothing() -> None:
    assert extended(np.zeros((4, 4)), np.zeros((8, 8))) is None
    assert extended(np.float32(1.0), np.ones((8, 8), np.float32)) is None
    assert extended(normal(4, 4), normal(4, 4)) is None  # the same size
    assert extended(np.arange(16), np.arange(32.0)) is None


@given(st.permutations(range(3)), st.integers(0, 2), st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_parts_make_up_a_whole_in_their_order(order: list[int], axis: int, seed: int) -> None:
    shape = [4, 5, 6]
    parts = []
    for i in range(3):
        shape[axis] = i + 1
        parts.append(normal(*shape, seed=seed + i))
    whole = np.concatenate([parts[i] for i in order], axis)
    found = concatenation(parts, whole)
    assert found is not None
    assert found.axis == axis
    assert [i for i, *_ in found.parts] == order
    assert [b - a for _, a, b in found.parts] == [i + 1 for i in order]
    assert concatenation([part for i, part in enumerate(parts) if i != order[1]], whole) is None


def test_a_stack_is_a_concatenation() -> None:
    x, y = normal(5, 7), normal(5, 7, seed=1)
    found = concatenation([x, y], np.stack([y, x], 1))
    assert found is not None
    assert str(found) == "concatenation along axis 1 of #1 0:1, #0 1:2"
