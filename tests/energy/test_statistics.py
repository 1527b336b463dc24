"""Intervals against published tables and simulations, symmetry under swapping the sides, and every verdict."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubloat.energy.meter import NotMeasured
from gpubloat.energy.statistics import (
    NO_DIFFERENCE,
    TRADE_OFF,
    UNKNOWN,
    WASTE,
    Saved,
    log_ratios,
    null_band,
    saved,
    t_cdf,
    t_quantile,
    verdict,
)

# NIST/SEMATECH e-Handbook of Statistical Methods, table 1.3.6.7.2, upper critical values of Student's t.
PUBLISHED = {
    0.90: {1: 3.078, 2: 1.886, 3: 1.638, 5: 1.476, 10: 1.372, 30: 1.310, 100: 1.290},
    0.95: {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 7: 1.895, 10: 1.812, 20: 1.725, 100: 1.660},
    0.975: {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
            11: 2.201, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 100: 1.984},
    0.99: {1: 31.821, 2: 6.965, 3: 4.541, 5: 3.365, 10: 2.764, 30: 2.457},
    0.995: {1: 63.657, 2: 9.925, 3: 5.841, 5: 4.032, 10: 3.169, 30: 2.750},
}  # fmt: skip
logs = st.floats(-3, 3, allow_nan=False)
blocks = st.lists(logs, min_size=3, max_size=12)


@pytest.mark.parametrize("probability", PUBLISHED)
def test_quantiles_are_those_of_a_published_table(probability: float) -> None:
    for degrees, value in PUBLISHED[probability].items():
        # the table of NIST has 31.821 and 63.657, others 31.820 and 63.656
        assert t_quantile(probability, degrees) == pytest.approx(value, abs=0.0011)


@given(st.floats(0, 50), st.integers(1, 60))
def test_one_and_two_degrees_have_closed_forms_and_the_tail_is_symmetric(t: float, degrees: int) -> None:
    assert t_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi)
    assert t_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)))
    assert t_cdf(t, degrees) + t_cdf(-t, degrees) == pytest.approx(1)


@given(st.floats(0.51, 0.9999), st.integers(1, 60))
def test_the_quantile_inverts_the_distribution(probability: float, degrees: int) -> None:
    assert t_cdf(t_quantile(probability, degrees), degrees) == pytest.approx(probability, abs=1e-9)


@pytest.mark.parametrize("n_blocks", [3, 6])
def test_the_interval_covers_the_truth_95_times_in_100(n_blocks: int) -> None:
    rng = np.random.default_rng(20261129)
    truth, n_trials = 0.08, 4000
    hits = 0
    for _ in range(n_trials):
        found = saved(rng.normal(truth, 0.01, n_blocks))
        assert isinstance(found, Saved)
        hits += abs(found.log_ratio - truth) <= found.half_width
    # four standard deviations of the binomial
    assert hits / n_trials == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / n_trials))


@given(blocks)
def test_swapping_the_sides_changes_the_name_of_the_wasteful_one_only(ratios: list[float]) -> None:
    one, other = saved(ratios), saved([-r for r in ratios])
    assert isinstance(one, Saved)
    assert isinstance(other, Saved)
    assert (one.saved_frac, one.low_frac, one.high_frac) == (other.saved_frac, other.low_frac, other.high_frac)
    assert one.log_ratio == -other.log_ratio
    assert one.log_ratio == 0 or {one.wasteful, other.wasteful} == {"A", "B"}
    assert one.low_frac <= one.saved_frac <= one.high_frac < 1
    assert one.saved_frac >= 0


@given(st.lists(st.floats(0.001, 1e4), min_size=12, max_size=12))
def test_swapping_the_sides_of_the_measurements(energies: list[float]) -> None:
    straight = log_ratios("ABBA" * 3, energies)
    swapped = log_ratios("BAAB" * 3, energies)
    assert isinstance(straight, np.ndarray)
    assert isinstance(swapped, np.ndarray)
    assert straight == pytest.approx(-swapped)


@given(st.floats(-0.02, 0.02), logs, st.floats(0.1, 1000))
def test_a_linear_drift_cancels(drift: float, ratio: float, energy: float) -> None:
    """Each measurement is `drift` above the one before, in the logarithm."""
    sides = "ABBA" * 3
    energies = [energy * math.exp(drift * place + (ratio if side == "A" else 0.0)) for place, side in enumerate(sides)]
    assert log_ratios(sides, energies) == pytest.approx([ratio] * 3, abs=1e-9)


def test_a_drift_of_watts_cancels_nearly() -> None:
    """A card that warms up: 1 W more with each of 12 measurements of 600 W, which A B A B would show as 0.17 %."""
    found = saved(log_ratios("ABBA" * 3, [600.0 + place for place in range(12)]))
    assert isinstance(found, Saved)
    assert found.saved_frac < 1e-5


def test_the_share_saved_worked_by_hand() -> None:
    """A takes 100, 100 and B 75, 75 in each block: a quarter is saved."""
    found = saved(log_ratios("ABBA" * 3, [100, 75, 75, 100] * 3))
    assert isinstance(found, Saved)
    assert (found.saved_frac, found.low_frac, found.high_frac) == pytest.approx((0.25, 0.25, 0.25))
    assert (found.wasteful, found.n_blocks) == ("A", 3)


@pytest.mark.parametrize(
    ("sides", "energies", "reason"),
    [
        ("ABBA", [1.0, math.nan, 1.0, 1.0], "a block has no energy"),
        ("ABBA", [1.0, 0.0, 1.0, 1.0], "a block has no energy"),
        ("ABAB", [1.0] * 4, "is not A B B A"),
        ("ABB", [1.0] * 3, "no whole number of blocks"),
    ],
)
def test_what_is_no_block(sides: str, energies: list[float], reason: str) -> None:
    found = saved(log_ratios(sides, energies))
    assert isinstance(found, NotMeasured)
    assert reason in found.reason


def test_two_blocks_are_too_few() -> None:
    assert "2 blocks were measured, and 3 are needed" in str(saved([0.1, 0.1]))


def around(share: float, half: float = 0.01) -> Saved:
    """A share saved whose interval is `half` wide to each side, in the logarithm."""
    size = -math.log1p(-share)
    return Saved(share, -math.expm1(half - size), -math.expm1(-size - half), "A", size, half, 6)


@pytest.mark.parametrize(
    ("share", "time_ratio", "outputs", "band", "expected"),
    [
        (0.20, 0.8, True, 0.01, WASTE),
        (0.20, 1.01, True, 0.01, WASTE),
        (0.20, 1.011, True, 0.01, TRADE_OFF),
        (0.20, 0.8, False, 0.01, TRADE_OFF),
        (0.20, 0.8, None, 0.01, TRADE_OFF),
        (0.055, 0.9, True, 0.01, NO_DIFFERENCE),  # its lower end is 4.5 %
        (0.065, 0.9, True, 0.01, WASTE),
        (0.03, 0.9, False, 0.01, NO_DIFFERENCE),
        (0.20, 0.8, True, 0.25, NO_DIFFERENCE),  # A against A differs by as much
        (0.0, 1.0, True, 0.01, NO_DIFFERENCE),
        (0.20, math.nan, True, 0.01, UNKNOWN),
    ],
)
def test_verdicts(share: float, time_ratio: float, outputs: bool | None, band: float, expected: str) -> None:
    found = verdict(around(share), time_ratio, outputs, band)
    assert found.verdict == expected
    assert found.reason


def test_nothing_is_said_without_energies_or_without_the_same_against_the_same() -> None:
    missing = NotMeasured("the energy counter stood still")
    assert verdict(missing, 0.9, True, 0.01).verdict == UNKNOWN
    found = verdict(around(0.3), 0.9, True, null_band(missing))
    assert (found.verdict, found.reason) == (UNKNOWN, "A against A: the energy counter stood still")


def test_the_band_is_half_the_interval_of_the_same_against_the_same() -> None:
    same = saved([0.001, -0.002, 0.0005])
    assert isinstance(same, Saved)
    half = PUBLISHED[0.975][2] * np.std([0.001, -0.002, 0.0005], ddof=1) / math.sqrt(3)
    assert null_band(same) == pytest.approx(half, rel=0.01)


def test_the_same_against_the_same_is_seldom_called_waste() -> None:
    rng = np.random.default_rng(5)
    found = [verdict(saved(rng.normal(0, 0.005, 3)), 1.0, True, 0.01).verdict for _ in range(500)]
    assert found.count(WASTE) == 0
