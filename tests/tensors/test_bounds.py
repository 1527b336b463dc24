"""Entropies are those of the definition, and bounds are what codes really reach."""

from __future__ import annotations

from math import log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubloat.tensors import bounds, counting
from gpubloat.tensors.dtypes import DTYPES, named


def entropy(values: np.ndarray) -> float:
    """Of the values as they occur, by the definition."""
    _, counts = np.unique(values, return_counts=True)
    return -sum(c / values.size * log2(c / values.size) for c in counts.tolist())


def test_entropy_of_bits() -> None:
    assert bounds.of_bits(np.array([0, 1, 2, 4]), 4).tolist() == pytest.approx([0, 0.811278, 1, 0], abs=1e-6)
    assert not np.signbit(bounds.of_bits(np.array([0, 4]), 4)).any()
    assert bounds.of_bits(np.zeros((3, 8), np.int64), 1).shape == (3, 8)


def test_entropy_of_patterns() -> None:
    assert bounds.of_patterns(np.array([1, 1, 2, 0])) == pytest.approx(1.5)
    assert bounds.of_patterns(np.zeros(256, np.int64)) == 0
    assert bounds.of_patterns(np.full(65536, 3)) == pytest.approx(16)
    assert min(bounds.of_patterns(np.array([n])) for n in range(1, 2000)) == 0  # and not -4e-16


def test_marginal_bounds() -> None:
    counts = np.zeros((2, 8), np.int64)
    counts[0] = 4  # one column all ones, one all zeros: nothing is left by column, everything by position
    assert bounds.marginal_frac(counts, 4) == 1
    assert bounds.marginal_frac(counts, 4, per_column=False) == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 40), st.sampled_from(sorted(DTYPES)), st.integers(0, 99))
def test_one_code_for_all_columns_saves_no_more(n: int, m: int, name: str, seed: int) -> None:
    """Entropy is concave; and what a word says is no more than its bits say one by one."""
    words = np.random.default_rng(seed).integers(0, 1 << 20, (n, m)).astype(named(name).words)
    counts = counting.ones(words)
    alone = bounds.marginal_frac(counts, n, per_column=False)
    assert alone <= bounds.marginal_frac(counts, n) + 1e-12
    assert alone <= bounds.fields(bounds.pieces(words), named(name)).joint_bound_frac + 1e-12


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 500), st.sampled_from(sorted(DTYPES)), st.integers(0, 99), st.integers(0, 63))
def test_fields_are_those_of_the_definition(n: int, name: str, seed: int, shift: int) -> None:
    dtype = named(name)
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 1 << 63, n, np.uint64) >> np.uint64(shift)
    words = (words >> np.uint64(max(64 - dtype.bits - shift, 0))).astype(dtype.words)
    counts = bounds.pieces(words)
    assert (counts.sum(axis=1) == n).all()
    found = bounds.fields(counts, dtype)
    parts = [words] if dtype.bits <= 16 else [words >> np.uint8(i) & np.uint16(65535) for i in range(0, dtype.bits, 16)]
    joint = sum(entropy(part) for part in parts)
    assert found.joint_bits == pytest.approx(joint, abs=1e-9)
    assert found.joint_bound_frac == pytest.approx(1 - joint / dtype.bits, abs=1e-9)
    assert found.is_biased
    if not dtype.is_float:
        assert (found.sign_bits, found.exponent_bits, found.mantissa_bits, found.exponent_bound_frac) == (None,) * 4
        return
    exponents = words >> np.uint8(dtype.mantissa_bits) & words.dtype.type((1 << dtype.exponent_bits) - 1)
    assert found.sign_bits == pytest.approx(entropy(words >> np.uint8(dtype.bits - 1)), abs=1e-9)
    assert found.exponent_bits == pytest.approx(entropy(exponents), abs=1e-9)
    assert found.exponent_bound_frac == pytest.approx((dtype.exponent_bits - entropy(exponents)) / dtype.bits, abs=1e-9)
    mantissa = entropy(words & words.dtype.type((1 << dtype.mantissa_bits) - 1))
    if dtype.bits <= 16:
        assert found.mantissa_bits == pytest.approx(mantissa, abs=1e-9)
    else:
        assert found.mantissa_bits is not None
        assert found.mantissa_bits >= mantissa - 1e-9


def test_parts_of_a_tensor_add_up() -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, (64, 33), np.uint32)
    whole = bounds.pieces(words)
    np.testing.assert_array_equal(whole, bounds.pieces(words[:20]) + bounds.pieces(words[20:]))
    np.testing.assert_array_equal(whole[0], np.bincount(words.reshape(-1) >> 16, minlength=65536))
    np.testing.assert_array_equal(bounds.pieces(words[:, ::2])[1], np.bincount(
        words[:, ::2].reshape(-1) & 65535, minlength=65536
    ))  # fmt: skip


def test_enough_words_are_not_biased() -> None:
    assert bounds.fields(bounds.pieces(np.zeros(655_359, "u2")), named("bf16")).is_biased
    assert not bounds.fields(bounds.pieces(np.zeros(655_360, "u2")), named("bf16")).is_biased
    assert not bounds.fields(bounds.pieces(np.zeros(2560, "u1")), named("fp8_e4m3")).is_biased


def test_normal_weights_reach_the_known_ceiling() -> None:
    """Exponents of normally distributed numbers have 2.55 bits: bf16 can lose a third, fp32 a sixth."""
    weights = np.random.default_rng(0).standard_normal(1_000_000).astype(np.float32)
    bf16 = bounds.fields(bounds.pieces((weights.view(np.uint32) >> 16).astype(np.uint16)), named("bf16"))
    assert bf16.exponent_bits == pytest.approx(2.55, abs=0.02)
    assert bf16.exponent_bound_frac == pytest.approx(0.34, abs=0.005)
    assert bf16.joint_bound_frac == pytest.approx(0.345, abs=0.01)
    fp32 = bounds.fields(bounds.pieces(weights.view(np.uint32)), named("fp32"))
    assert fp32.exponent_bound_frac == pytest.approx(0.17, abs=0.003)
    assert fp32.sign_bits == pytest.approx(1, abs=1e-4)
