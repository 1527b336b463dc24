"""Power from ticks: true within its error for any phase and call, and never a number where nothing was measured."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubloat.energy.meter import NAMES, NotMeasured, Samples
from gpubloat.energy.recording import Steps
from gpubloat.energy.slope import Slope, disagreement, is_steady, mean_w, slope, ticks
from tests.energy.cards import readings


def samples(t_s: np.ndarray, counter_mj: np.ndarray, **more: np.ndarray) -> Samples:
    columns = {name: np.full(len(t_s), np.nan) for name in NAMES}
    return Samples(**(columns | {"t_s": t_s, "call_s": np.zeros(len(t_s)), "counter_mj": counter_mj} | more))


STEADY = readings(Steps(400.0), 3.0)


@settings(deadline=None, max_examples=60)
@given(
    watts=st.floats(20, 1200),
    phase_s=st.floats(0, 0.1),
    call_s=st.floats(0, 0.01),
    tick_s=st.floats(0.02, 0.12),
    seconds=st.floats(1.5, 6),
    period_s=st.one_of(st.none(), st.floats(0.001, 0.05)),
)
def test_the_true_power_is_within_the_error(
    watts: float, phase_s: float, call_s: float, tick_s: float, seconds: float, period_s: float | None
) -> None:
    seen = readings(
        Steps(watts), seconds, period_s=period_s, share=1.0, counter_period_s=tick_s, phase_s=phase_s, call_s=call_s
    )
    found = slope(seen)
    assert isinstance(found, Slope)
    assert abs(found.power_w - watts) <= found.error_w
    assert found.error_w < 0.12 * watts + 1


@settings(deadline=None, max_examples=40)
@given(late=st.lists(st.floats(0, 0.99), min_size=40, max_size=40), watts=st.floats(50, 1000))
def test_wherever_in_the_call_the_counter_is_read(late: list[float], watts: float) -> None:
    """Calls of 4 ms back to back, the value taken at any instant of each."""
    call_s = 0.004
    starts = np.arange(40 * 13) * call_s
    taken = starts + call_s * np.resize(late, len(starts))
    counter = np.floor(1000 * watts * np.floor(taken / 0.1) * 0.1)
    seen = samples(starts + call_s / 2, counter, call_s=np.full(len(starts), call_s))
    found = slope(seen)
    assert isinstance(found, Slope)
    assert abs(found.power_w - watts) <= found.error_w


def test_the_error_of_two_seconds_is_half_a_percent_with_the_calls_of_an_h200() -> None:
    found = slope(readings(Steps(600.0), 2.5), 0.5)
    assert isinstance(found, Slope)
    assert 0.002 < found.error_w / found.power_w < 0.01
    assert found.n_ticks >= 18
    assert found.period_s == pytest.approx(0.1, abs=0.004)


def test_a_load_that_changes_widens_the_error() -> None:
    power = Steps(300.0)
    for at in range(1, 10):
        power.draw(200.0 + 400 * (at % 2), 0.3 * at)
    still, moving = slope(readings(Steps(400.0), 3.0)), slope(readings(power, 3.0))
    assert isinstance(still, Slope)
    assert isinstance(moving, Slope)
    assert moving.error_w > 2 * still.error_w


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: np.full(len(c), np.nan), "has no energy counter that answers"),
        (lambda c: np.zeros(len(c)), "stood still for 3.0 s at 0 mJ"),
        (lambda c: np.minimum(c, c[len(c) // 2]), "stood still for"),
        (lambda c: c[::-1], "went backwards"),
        (lambda c: np.where(np.arange(len(c)) < 50, c, c - c[-1] + 100), "wrapped"),
    ],
)
def test_a_counter_that_is_not_one(change: object, reason: str) -> None:
    broken = dataclasses.replace(STEADY, counter_mj=change(STEADY.counter_mj))  # type: ignore[operator]
    found = slope(broken)
    assert isinstance(found, NotMeasured)
    assert reason in found.reason
    assert str(found).startswith("not measured: ")


def test_too_few_ticks_and_no_readings() -> None:
    assert "changed 4 times, and 5 are needed" in str(slope(STEADY, 0.35, 0.75))
    assert "nothing was read" in str(slope(STEADY, 10.0))


def test_readings_that_do_not_cover_the_time() -> None:
    """As when the thread that reads has died."""
    assert "reading ended 1.5 s early" in str(slope(STEADY.between(0, 1.5), 0.0, 3.0))
    assert "reading began 1.5 s late" in str(slope(STEADY.between(1.5, 3.0), 0.0, 3.0))
    assert slope(STEADY, 0.0, 3.0)


def test_a_reading_that_failed_does_not_end_it() -> None:
    counter = STEADY.counter_mj.copy()
    counter[::7] = np.nan
    found = slope(dataclasses.replace(STEADY, counter_mj=counter))
    assert isinstance(found, Slope)
    assert abs(found.power_w - 400.0) <= found.error_w


def test_ticks_lie_in_their_brackets() -> None:
    found = ticks(readings(Steps(100.0), 2.0, phase_s=0.0321))
    assert not isinstance(found, NotMeasured)
    true = np.round((found.t_s - 0.0321) / 0.1) * 0.1 + 0.0321
    assert (np.abs(found.t_s - true) <= found.half_s).all()


def test_means_weigh_readings_by_their_time() -> None:
    seen = samples(np.array([0.0, 1.0, 1.1]), np.zeros(3), instant_w=np.array([100.0, 200.0, 300.0]))
    assert mean_w(seen, "instant_w", 0.0, 2.0) == pytest.approx((100 * 1 + 200 * 0.1 + 300 * 0.9) / 2)
    assert mean_w(seen, "average_w", 0.0, 2.0) is None


@pytest.mark.parametrize(
    ("instant", "average", "apart", "is_refused"),
    [
        (100.0, 100.0, 0.0, False),
        (103.0, None, 3 / 103, False),
        (100.0, 107.0, 7 / 107, True),
        (57.2, None, 42.8 / 57.2, True),
        (None, None, None, False),
    ],
)
def test_joules_are_refused_where_signals_disagree(
    instant: float | None, average: float | None, apart: float | None, is_refused: bool
) -> None:
    found, reason = disagreement(100.0, instant, average)
    assert found == (None if apart is None else pytest.approx(apart))
    assert (reason is not None) is is_refused


def test_idle_of_a_public_report_is_refused() -> None:
    """187.4 J by the counter and 326.9 J by polled power in the same 5 s (ml-energy/zeus, issue 181)."""
    apart, reason = disagreement(187.4 / 5, 326.9 / 5, None)
    assert apart == pytest.approx(0.427, abs=0.001)
    assert reason is not None
    assert "37.5 W and the instant power 65.4 W" in reason


def test_what_is_steady() -> None:
    rng = np.random.default_rng(0)
    t_s = np.arange(100) / 10
    assert is_steady(samples(t_s, t_s, instant_w=rng.normal(600, 6, 100)))
    assert not is_steady(samples(t_s, t_s, instant_w=rng.normal(600, 60, 100)))
    assert not is_steady(samples(t_s, t_s))
