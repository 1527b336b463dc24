"""Cards made of formulas, with what can be wrong about real ones, and the loads of the probe on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from gpubloat.energy.meter import Reading, Samples
from gpubloat.energy.recording import Simulated, Steps, VirtualClock
from gpubloat.energy.sampler import sampled

IDLE_W, PRODUCT_W, COPY_W = 126.0, 690.0, 470.0  # of an H200


class Changed:
    """A meter whose readings are changed by a function."""

    def __init__(self, meter: Simulated, change: Callable[[Reading], Reading]) -> None:
        self.meter = meter
        self.change = change
        self.n_reads = 0
        self.n_closed = 0

    def describe(self) -> dict[str, Any]:
        return self.meter.describe()

    def read(self) -> Reading:
        self.n_reads += 1
        return self.change(self.meter.read())

    def signals(self) -> Mapping[str, Callable[[], float]]:
        return self.meter.signals()

    def close(self) -> None:
        self.n_closed += 1


def no_counter(reading: Reading) -> Reading:
    return dataclasses.replace(reading, counter_mj=None)


def frozen(reading: Reading) -> Reading:
    return dataclasses.replace(reading, counter_mj=1e9)


class Loads:
    """The probe's loads: each call takes 5 ms of virtual time."""

    def __init__(self, power: Steps, clock: VirtualClock) -> None:
        self.power = power
        self.clock = clock

    def _for_a_while(self, watts: float) -> None:
        self.power.draw(watts, self.clock.now())
        self.clock.sleep(0.005)

    def product(self) -> None:
        self._for_a_while(PRODUCT_W)

    def copy(self) -> None:
        self._for_a_while(COPY_W)

    def idle(self) -> None:
        self._for_a_while(IDLE_W)


def readings(
    power: Steps,
    seconds: float,
    *,
    start_s: float = 0.0,
    period_s: float | None = None,
    share: float = 0.15,
    **card: Any,
) -> Samples:
    """What is read of a card, from `start_s` on."""
    clock = VirtualClock()
    clock.sleep(start_s)
    with sampled(Simulated(power, clock, **card), period_s, share=share, clock=clock) as sampling:
        clock.sleep(seconds)
    assert sampling.reason is None
    return sampling.samples()
