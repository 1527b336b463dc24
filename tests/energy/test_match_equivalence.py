"""Which tensors are equal: the rows of the published experiment, layouts, types, and what must not be equal."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubloat.energy.match.equivalence import equivalent
from gpubloat.energy.match.fingerprint import fingerprint, may_equal
from gpubloat.energy.match.tolerance import FP32, TF32, tolerance_of

BF16 = tolerance_of("bf16", "fp32")
T, H, D = 64, 16, 64
TRIALS = range(5)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def layer_norm(x: np.ndarray) -> np.ndarray:
    return ((x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)).astype(np.float32)


def bf16(x: np.ndarray) -> np.ndarray:
    """Rounded to nearest; ties go up, which does not matter here."""
    return ((x.view(np.uint32) + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def noisy(rng: np.random.Generator, x: np.ndarray, size: float) -> np.ndarray:
    return (x * (1 + size * rng.standard_normal(x.shape))).astype(np.float32)


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


# The pairs of the experiment: (x, y from a generator), tolerance, truly equal.
CASES = {
    "same tensor, fp32 reassociation noise 1e-6": (lambda r, x: (x, noisy(r, x, 1e-6)), FP32, True),
    "same tensor, bf16 rounding vs fp32": (lambda _, x: (x, bf16(x)), BF16, True),
    "same tensor, tf32-like 3e-4 noise": (lambda r, x: (x, noisy(r, x, 3e-4)), TF32, True),
    "LayerNorm output, fp32 noise 1e-6": (lambda r, x: (layer_norm(x), noisy(r, layer_norm(x), 1e-6)), FP32, True),
    "permute NHD->HND (rank 4)": (
        lambda r, x: (x.reshape(1, T, H, D), noisy(r, x, 1e-6).reshape(1, T, H, D).transpose(0, 2, 1, 3)), FP32, True,
    ),
    "reshape [1,T,H,d]->[T,H*d]": (lambda r, x: (x.reshape(1, T, H, D), noisy(r, x, 1e-6)), FP32, True),
    "permute then merge heads [H,T,d] vs [T,H*d]": (
        lambda r, x: (x.reshape(T, H, D).transpose(1, 0, 2), noisy(r, x, 1e-6)), FP32, True,
    ),
    "Q vs K, random weights": (
        lambda r, x: (x @ normal(r, H * D, H * D) / 32, x @ normal(r, H * D, H * D) / 32), FP32, False,
    ),
    "two LayerNorm outputs of different tensors": (
        lambda r, x: (layer_norm(x), layer_norm(normal(r, *x.shape))), FP32, False,
    ),
    "x vs -x": (lambda _, x: (x, -x), FP32, False),
    "row-shuffled tensor (rows permuted)": (lambda r, x: (x, x[r.permutation(T)]), FP32, False),
    "GELU vs SiLU of same input": (lambda _, x: (gelu(x), silu(x)), FP32, False),
    "residual before/after tiny update (1e-3)": (lambda r, x: (x, x + 1e-3 * normal(r, *x.shape)), FP32, False),
}  # fmt: skip


@pytest.mark.parametrize("trial", TRIALS)
@pytest.mark.parametrize("name", CASES)
def test_every_row_of_the_experiment_comes_out_as_it_is(name: str, trial: int) -> None:
    make, tolerance, truth = CASES[name]
    rng = np.random.default_rng(trial)
    x, y = make(rng, normal(rng, T, H * D))
    for one, other in ((x, y), (y, x)):
        found = equivalent(one, other, tolerance)
        assert (found is not None) is truth
        if found is not None:
            assert found.error <= tolerance
            assert not found.is_ambiguous
            np.testing.assert_allclose(found.layout(one), other, atol=10 * tolerance * 4)


@pytest.mark.parametrize("name", [name for name, (*_, truth) in CASES.items() if not truth and "tiny" not in name])
def test_what_differs_differs_at_the_widest_tolerance_too(name: str) -> None:
    rng = np.random.default_rng(9)
    x, y = CASES[name][0](rng, normal(rng, T, H * D))
    assert equivalent(x, y, BF16) is None


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).filter(lambda s: prod(s) >= 16)


@given(shapes, st.data(), st.integers(0, 2**32 - 1))
@settings(max_examples=120, deadline=None)
def test_any_permutation_and_any_reshape_is_found(shape: list[int], data: st.DataObject, seed: int) -> None:
    x = normal(np.random.default_rng(seed), *shape)
    y = x.transpose(data.draw(st.permutations(range(x.ndim))))
    keep = data.draw(st.integers(0, y.ndim))
    y = y.reshape(*y.shape[:keep], -1)  # merges the last axes
    for one, other in ((x, y), (y, x)):
        found = equivalent(one, other)
        assert found is not None
        assert found.error == 0
        assert np.array_equal(found.layout(one), other)


@given(shapes, st.data(), st.integers(0, 2**32 - 1))
@settings(max_examples=120, deadline=None)
def test_one_wrong_element_is_enough_and_a_fingerprint_turns_no_equal_away(
    shape: list[int], data: st.DataObject, seed: int
) -> None:
    x = normal(np.random.default_rng(seed), *shape)
    y = noisy(np.random.default_rng(seed + 1), x, 1e-6).transpose(data.draw(st.permutations(range(x.ndim)))).copy()
    assert may_equal(fingerprint(x), fingerprint(y), FP32)
    y.reshape(-1)[data.draw(st.integers(0, y.size - 1))] += 0.01
    assert equivalent(x, y) is None


def test_axes_split_and_merged_at_once() -> None:
    x = np.random.default_rng(0).standard_normal((8, 12 * 16))
    y = x.reshape(8, 12, 16).transpose(1, 0, 2).reshape(12 * 8, 16)  # neither shape has all three axes
    found = equivalent(x, y)
    assert found is not None
    assert np.array_equal(found.layout(x), y)
    assert found.how == "permute"


def test_a_single_wrong_element_among_many_is_seen_at_bf16() -> None:
    x = normal(np.random.default_rng(0), 1000, 1000)
    y = x.copy()
    y[500, 500] += 3  # 3e-3 of the norm, which is within the tolerance
    assert np.linalg.norm(x - y) < BF16 * np.linalg.norm(x)
    assert equivalent(x, y, BF16) is None


@pytest.mark.parametrize("masked", [-np.inf, np.finfo(np.float32).min, -1e9])
@pytest.mark.parametrize("diagonal", [1, -22], ids=["causal", "mostly masked"])
def test_masked_scores_are_compared_beside_the_mask(masked: float, diagonal: int) -> None:
    rng = np.random.default_rng(0)
    x = normal(rng, 4, 32, 32)
    where = np.broadcast_to(np.triu(np.ones((32, 32), bool), diagonal), x.shape)
    y = noisy(rng, x, 1e-6)
    x[where] = y[where] = masked
    assert equivalent(x, y) is not None
    wrong = x.copy()
    wrong[1, 31, 1] *= 1.01
    assert equivalent(x, wrong) is None
    wrong = x.copy()
    wrong[0, 0, 31] = 0.5  # a place that should be masked
    assert equivalent(x, wrong) is None


def test_nan_and_infinities_have_to_be_at_the_same_places() -> None:
    x = normal(np.random.default_rng(0), 8, 8)
    x[1, 2], x[3, 4], x[5, 6] = np.nan, np.inf, -np.inf
    assert equivalent(x, x.T) is not None
    for wrong in (np.inf, 0.0):
        y = x.copy()
        y[1, 2] = wrong
        assert equivalent(x, y) is None
    y = x.copy()
    y[3, 4], y[5, 6] = -np.inf, np.inf
    assert equivalent(x, y) is None
    y = x.copy()
    y[1, 2], y[1, 3] = y[1, 3], y[1, 2]
    assert equivalent(x, y) is None


def test_integers_are_equal_exactly_across_their_types_and_never_to_real_numbers() -> None:
    x = np.random.default_rng(0).integers(0, 1000, (5, 7))
    assert equivalent(x, x.astype(np.int32).T) is not None
    assert equivalent(x, x.astype(np.float64)) is None
    y = x.copy()
    y[2, 3] += 1
    assert equivalent(x, y, 0.5) is None
    flags = x % 2 == 0
    assert equivalent(flags, flags.astype(np.uint8)) is not None
    assert equivalent(flags, ~flags) is None


def test_complex_numbers_and_their_conjugates_differ() -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((6, 9)) + 1j * rng.standard_normal((6, 9))).astype(np.complex64)
    assert equivalent(x, x.T * np.float32(1 + 1e-7)) is not None
    assert equivalent(x, x.conj()) is None
    assert equivalent(x, np.abs(x)) is None
    assert equivalent(x, x.imag + 1j * x.real) is None


def test_fp64_is_compared_as_fp64_and_does_not_overflow() -> None:
    x = np.random.default_rng(0).standard_normal((16, 16))
    assert equivalent(x, x * (1 + 1e-9)) is None
    assert equivalent(x, x * (1 + 1e-9), 1e-8) is not None
    assert equivalent(x, (x * (1 + 1e-9)).astype(np.float32)) is not None
    assert equivalent(x * 1e300, x.T * 1e300) is not None
    assert equivalent(x * 1e300, x * 1.1e300) is None
    assert equivalent(x * 1e-300, x * 1.1e-300) is None


@pytest.mark.parametrize(
    "x",
    [np.zeros((9, 9)), np.full((5, 5), 3), np.ones((4, 8), bool), np.array(2.5), np.arange(5.0), np.zeros((0, 3))],
    ids=["zeros", "constant", "true", "scalar", "few", "empty"],
)
def test_what_says_little_is_equal_but_ambiguous(x: np.ndarray) -> None:
    found = equivalent(x, x.copy())
    assert found is not None
    assert found.is_ambiguous


def test_zeros_equal_only_zeros() -> None:
    zeros = np.zeros((8, 8), np.float32)
    assert equivalent(zeros, normal(np.random.default_rng(0), 8, 8) * 1e-3) is None
    assert equivalent(zeros, zeros + 1e-30) is None


def test_half_of_the_exponent_range_is_no_trouble() -> None:
    x = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float16)
    assert equivalent(x, x.T.astype(np.float32)) is not None
    assert equivalent(x, -x) is None


def test_tolerances_are_those_of_the_coarser_type() -> None:
    assert tolerance_of("fp32", "fp32") == FP32
    assert tolerance_of("fp32", "bf16") == tolerance_of("fp16") == 1e-2
    assert tolerance_of("fp64", "fp32") == FP32
    assert tolerance_of("int64", "bool") == 0
    assert tolerance_of("fp8_e4m3", "bf16") > 1e-2
