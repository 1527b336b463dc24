"""Ticks are followed at a stated cost, readings are counted, and reading ends whatever happens."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from gpubloat.energy.meter import Reading
from gpubloat.energy.recording import Simulated, Steps, VirtualClock
from gpubloat.energy.sampler import WallClock, sampled
from gpubloat.energy.slope import Slope, slope, ticks
from gpubloat.errors import DeviceError
from tests.energy.cards import Changed, no_counter, readings


@pytest.mark.parametrize("phase_s", [0.0, 0.037, 0.0999])
@pytest.mark.parametrize(("period_s", "most"), [(0.1, 0.15), (0.02, 0.15), (0.103, 0.15), (0.1, 0.01)])
def test_following_ticks_costs_no_more_than_its_share(phase_s: float, period_s: float, most: float) -> None:
    seen = readings(Steps(300.0), 40.0, share=most, counter_period_s=period_s, phase_s=phase_s)
    later = seen.between(5.0, 40.0)
    assert later.call_s.sum() / 35.0 <= 1.1 * most
    assert len(later) > 10


@pytest.mark.parametrize("phase_s", [0.0, 0.037, 0.0999])
def test_every_tick_of_an_h200_is_located_to_about_a_call(phase_s: float) -> None:
    found = ticks(readings(Steps(300.0), 10.0, phase_s=phase_s))
    half_s = found.half_s  # type: ignore[union-attr]
    assert len(half_s) >= 98
    assert np.quantile(half_s, 0.95) < 0.0055


def test_ticks_that_wander_are_still_followed() -> None:
    """Ticks 97 to 102 ms apart, as seen on an H200."""
    rng = np.random.default_rng(1)
    at = np.cumsum(rng.uniform(0.097, 0.102, 400))

    class Wandering(Simulated):
        def _tick(self, t_s: float) -> float:
            return float(at[max(np.searchsorted(at, t_s, side="right") - 1, 0)])

    clock = VirtualClock()
    with sampled(Wandering(Steps(300.0), clock), clock=clock) as sampling:
        clock.sleep(20.0)
    found = slope(sampling.samples(), 0.5)
    assert isinstance(found, Slope)
    assert abs(found.power_w - 300.0) <= found.error_w < 3.0
    assert sampling.samples().call_s.sum() < 0.2 * 20


def test_a_counter_that_stands_still_does_not_take_a_thread() -> None:
    clock = VirtualClock()
    power = Steps(0.0)
    with sampled(Simulated(power, clock), clock=clock) as sampling:
        clock.sleep(30.0)
        power.draw(100.0, 30.0)
        clock.sleep(5.0)
    assert sampling.samples().between(5.0, 30.0).call_s.sum() < 0.05 * 25
    moving = slope(sampling.samples(), 30.5)
    assert isinstance(moving, Slope)
    assert abs(moving.power_w - 100.0) <= moving.error_w < 2.0


def test_fixed_distance_counts_readings_that_were_due_too_early() -> None:
    assert len(readings(Steps(100.0), 1.005, period_s=0.01)) == 101
    clock = VirtualClock()
    with sampled(Simulated(Steps(100.0), clock, call_s=0.0035), 0.001, clock=clock) as sampling:
        clock.sleep(1.0)
    n = len(sampling.samples())
    assert 250 < n < 300
    assert sampling.lost == pytest.approx(1000 - n, abs=5)


def test_a_reading_without_its_counter_is_counted() -> None:
    answers = iter([True] * 5 + [False] * 3 + [True] * 100)

    def change(reading: Reading) -> Reading:
        return reading if next(answers) else no_counter(reading)

    clock = VirtualClock()
    with sampled(Changed(Simulated(Steps(100.0), clock), change), 0.1, clock=clock) as sampling:
        clock.sleep(2.0)
    assert sampling.lost == 3
    assert np.isnan(sampling.samples().counter_mj).sum() == 3


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DeviceError("absent", "the GPU is gone: GPU is lost"), "the GPU is gone: GPU is lost"),
        (RuntimeError("odd"), "the meter failed: RuntimeError: odd"),
    ],
)
@pytest.mark.parametrize("period_s", [None, 0.01])
def test_reading_that_ends_by_itself_says_why(error: Exception, reason: str, period_s: float | None) -> None:
    def change(reading: Reading) -> Reading:
        if reading.t_s > 1.0:
            raise error
        return reading

    clock = VirtualClock()
    meter = Changed(Simulated(Steps(100.0), clock), change)
    with sampled(meter, period_s, clock=clock) as sampling:
        clock.sleep(5.0)
    assert sampling.reason == reason
    assert 0.8 < sampling.samples().t_s[-1] <= 1.0
    n = meter.n_reads
    assert sampling.take() is None
    assert meter.n_reads == n


def test_a_step_that_fails_says_so() -> None:
    clock = VirtualClock()

    def change(reading: Reading) -> Reading:
        return dataclasses.replace(reading, t_s="noon")  # type: ignore[arg-type]

    odd = Changed(Simulated(Steps(100.0), clock), change)
    with sampled(odd, clock=clock) as sampling:
        clock.sleep(1.0)
    assert "reading failed: ValueError" in str(sampling.reason)


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name == "gpubloat-energy"]


class Counting:
    """A meter without a clock: each reading is one more."""

    def __init__(self, enough: threading.Event) -> None:
        self.n = 0
        self.enough = enough

    def describe(self) -> dict[str, object]:
        return {}

    def read(self) -> Reading:
        self.n += 1
        if self.n == 10:
            self.enough.set()
        return Reading(time.perf_counter(), 0.0, float(self.n))

    def close(self) -> None:
        pass


@pytest.mark.usefixtures("no_thread_is_left")
@pytest.mark.parametrize("period_s", [None, 0.0005])
def test_the_thread_reads_and_ends_also_when_the_block_raises(period_s: float | None) -> None:
    enough = threading.Event()
    meter = Counting(enough)

    def block() -> None:
        with sampled(meter, period_s, clock=WallClock()):
            assert enough.wait(30)
            raise KeyError("of the block")

    with pytest.raises(KeyError, match="of the block"):
        block()


@pytest.mark.usefixtures("no_thread_is_left")
def test_an_empty_block_has_a_reading() -> None:
    with sampled(Counting(threading.Event()), 0.01) as sampling:
        pass
    assert len(sampling.samples()) >= 1


def test_steps_of_the_virtual_clock_happen_in_order() -> None:
    clock = VirtualClock()
    happened = []

    def every(name: str, seconds: float) -> object:
        def step() -> float:
            happened.append((clock.now(), name))
            clock.sleep(0.001)
            return seconds - 0.001

        return step

    with clock.background(every("a", 0.25)), clock.background(every("b", 0.4)):  # type: ignore[arg-type]
        clock.sleep(1.0)
        happened.append((clock.now(), "end"))
    clock.sleep(1.0)
    assert [name for _, name in happened] == ["a", "b", "a", "b", "a", "a", "b", "a", "end"]
    assert [t for t, _ in happened] == pytest.approx([0.0, 0.0, 0.25, 0.4, 0.5, 0.75, 0.8, 1.0, 1.0])
