"""Each way to read a card errs as an independent simulation says: 115 W, then 600 W, ticks 100 ms apart, 200 phases.

Source of the numbers: own error simulation, written apart from this package, with random phases; here they are even.
"""

from __future__ import annotations

import numpy as np
import pytest

from gpubloat.energy.recording import Simulated, Steps, VirtualClock
from gpubloat.energy.slope import Slope, slope
from tests.energy.cards import readings

LOW_W, HIGH_W, PERIOD_S = 115.0, 600.0, 0.1
START_S = 2.0
# window in s -> bias, standard deviation, worst error, in percent
DIFFERENCE = {0.2: (-18.61, 12.18, 40.31), 0.5: (-7.73, 4.65, 16.16), 1.0: (-3.92, 2.17, 8.04),
              2.0: (-2.05, 1.17, 4.02), 5.0: (-0.78, 0.44, 1.62), 10.0: (-0.42, 0.24, 0.81)}  # fmt: skip
POLLED_MEAN = {0.2: -76.46, 0.5: -64.73, 1.0: -44.66, 2.0: -22.42, 5.0: -8.97, 10.0: -4.49}
N_RANDOM = 200  # phases of the source, which is as uncertain as that


def step() -> Steps:
    power = Steps(LOW_W)
    power.draw(HIGH_W, START_S)
    return power


def phases(n: int) -> np.ndarray:
    return (np.arange(n) + 0.5) / n * PERIOD_S


@pytest.mark.parametrize("window_s", DIFFERENCE)
def test_plain_difference_of_the_counter(window_s: float) -> None:
    errors = []
    for phase_s in phases(200):
        clock = VirtualClock()
        card = Simulated(step(), clock, phase_s=phase_s, call_s=0.0)
        clock.sleep(START_S)
        first = card.read().counter_mj
        clock.sleep(window_s)
        last = card.read().counter_mj
        assert first is not None
        assert last is not None
        errors.append(100 * ((last - first) / 1000 / (HIGH_W * window_s) - 1))
    bias, deviation, worst = DIFFERENCE[window_s]
    assert np.mean(errors) == pytest.approx(bias, abs=3 * deviation / np.sqrt(N_RANDOM))
    assert np.std(errors) == pytest.approx(deviation, rel=0.15)
    assert np.max(np.abs(errors)) == pytest.approx(worst, rel=0.02)


@pytest.mark.parametrize("window_s", POLLED_MEAN)
def test_polled_one_second_mean(window_s: float) -> None:
    errors = []
    for phase_s in phases(5):
        seen = readings(step(), window_s, start_s=START_S, period_s=0.01, phase_s=phase_s, call_s=0.0)
        errors.append(100 * (seen.average_w.mean() / HIGH_W - 1))
    assert np.mean(errors) == pytest.approx(POLLED_MEAN[window_s], abs=1.0)


@pytest.mark.parametrize("window_s", [1.0, 2.0, 5.0])
def test_slope_between_ticks_has_no_bias(window_s: float) -> None:
    for phase_s in phases(7):
        seen = readings(step(), window_s, start_s=START_S, phase_s=phase_s, call_s=0.0)
        found = slope(seen, START_S + 0.5)
        assert isinstance(found, Slope)
        assert found.power_w == pytest.approx(HIGH_W, rel=0.002)


@pytest.mark.parametrize("window_s", [0.2, 0.5, 0.9])
def test_slope_refuses_windows_with_too_few_ticks(window_s: float) -> None:
    found = slope(readings(step(), window_s, start_s=START_S, call_s=0.0), START_S + 0.5)
    assert not found
    assert "5 are needed" in str(found) or "nothing was read" in str(found)
