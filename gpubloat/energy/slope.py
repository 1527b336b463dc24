"""Power by the slope of the energy counter between its ticks, with a stated error; whether other signals agree.

A difference of two readings of the counter is wrong by up to a tick's energy at each end. At the instants at which it
changes it is exact, so only those are used. Own error simulation (a step from 115 to 600 W, ticks 100 ms apart, 200
phases), window of 2 s: plain difference -2.1 +- 1.2 %, slope between ticks after 0.5 s 0.0 %, polled 1-s mean -22 %.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpubloat.energy.meter import Meter, NotMeasured, Reading, Samples
from gpubloat.energy.sampler import SHORTEST_S, Clock
from gpubloat.energy.statistics import t_quantile
from gpubloat.errors import DeviceError

NO_COUNTER = "the GPU has no energy counter that answers, as many virtual GPUs"
LONGEST_WAIT_S = 1.0  # for a tick
LEAST_TICKS = 5
STILL_S = 0.5  # a counter that has not changed for this long has stopped: the longest period known is 0.1 s
MOST_DISAGREEMENT = 0.05
STEADY_FRAC = 0.03  # standard deviation of the instant power that a steady load does not exceed


@dataclass(frozen=True)
class Ticks:
    """Instants at which the counter changed: their times, how far off each may be (half a bracket), the new value."""

    t_s: np.ndarray
    half_s: np.ndarray
    counter_mj: np.ndarray


@dataclass(frozen=True)
class Slope:
    """Mean power while the load was steady.

    power_w : slope of the counter over time.
    error_w : 95 % half width. It adds, as squares, the most that the ticks' times can be off, all in the worst way
        (about 3 times half a bracket over `seconds`), and what the scatter about the line says.
    n_ticks : ticks used; seconds : from the first to the last one; period_s : median distance of them.
    """

    power_w: float
    error_w: float
    n_ticks: int
    seconds: float
    period_s: float


def ticks(samples: Samples) -> Ticks | NotMeasured:
    """The ticks between readings. A tick lies between the call that read the old value and the one that read the new.

    NotMeasured where the counter does not answer, went backwards, or stood still.
    """
    known = ~np.isnan(samples.counter_mj)
    t_s, call_s, counter = samples.t_s[known], samples.call_s[known], samples.counter_mj[known]
    if not len(samples):
        return NotMeasured("nothing was read")
    if not len(counter):
        return NotMeasured(NO_COUNTER)
    change = np.diff(counter)
    if (change < 0).any():
        at = int(np.argmax(change < 0))
        return NotMeasured(
            f"the energy counter went backwards, from {counter[at]:.0f} to {counter[at + 1]:.0f} mJ: "
            "it wrapped or the driver was loaded again"
        )
    rows = np.flatnonzero(change) + 1
    edges = t_s[np.concatenate(([0], rows, [len(t_s) - 1]))]
    longest = float(np.diff(edges).max())
    gaps_s = float(np.diff(t_s).max()) if len(t_s) > 1 else 0.0
    if longest > max(STILL_S, 2 * gaps_s):
        return NotMeasured(f"the energy counter stood still for {longest:.1f} s at {counter[-1]:.0f} mJ")
    gap_s = t_s[rows] - t_s[rows - 1]
    return Ticks((t_s[rows] + t_s[rows - 1]) / 2, (gap_s + (call_s[rows] + call_s[rows - 1]) / 2) / 2, counter[rows])


def slope(samples: Samples, start_s: float | None = None, end_s: float | None = None) -> Slope | NotMeasured:
    """Mean power of a steady load, by weighted least squares of the counter against time at its ticks.

    Parameters
    ----------
    samples : readings; those between `start_s` and `end_s` are used. Leave out the first 0.5 s of a load.

    Returns
    -------
    Slope; or NotMeasured: fewer than 5 ticks, readings that do not cover the time, or one of the reasons of `ticks`.
    Never a power of 0.
    """
    first = -np.inf if start_s is None else start_s
    last = np.inf if end_s is None else end_s
    part = samples.between(first, last)
    if len(part):
        most_s = max(STILL_S, 2 * float(np.diff(part.t_s, prepend=part.t_s[0]).max()))
        if part.t_s[0] > first + most_s > -np.inf:
            return NotMeasured(f"reading began {part.t_s[0] - first:.1f} s late")
        if part.t_s[-1] < last - most_s < np.inf:
            return NotMeasured(f"reading ended {last - part.t_s[-1]:.1f} s early")
    found = ticks(part)
    if isinstance(found, NotMeasured):
        return found
    n = len(found.t_s)
    if n < LEAST_TICKS:
        return NotMeasured(f"the energy counter changed {n} times, and {LEAST_TICKS} are needed")
    half_s = np.maximum(found.half_s, 1e-6)
    weight = half_s**-2.0 / np.sum(half_s**-2.0)
    time = found.t_s - np.sum(weight * found.t_s)
    share = weight * time / np.sum(weight * time**2)  # of each tick in the slope, 1/s
    joules = (found.counter_mj - found.counter_mj[0]) / 1000
    power_w = float(np.sum(share * joules))
    residual = joules - np.sum(weight * joules) - power_w * time
    by_time = power_w * float(np.sum(np.abs(share) * half_s)) + 0.001 * float(np.sum(np.abs(share)))
    scatter = np.sqrt(np.sum(weight * residual**2) / np.sum(weight * time**2) / (n - 2))
    error_w = float(np.hypot(by_time, t_quantile(0.975, n - 2) * scatter))
    return Slope(power_w, error_w, n, float(found.t_s[-1] - found.t_s[0]), float(np.median(np.diff(found.t_s))))


def mean_w(samples: Samples, signal: str, start_s: float, end_s: float) -> float | None:
    """Mean over time of `instant_w` or `average_w`: a reading holds until the next. None if it did not answer.

    For `average_w`, which looks back for about a second, begin 1.1 s after the load.
    """
    part = samples.between(start_s, end_s)
    values = getattr(part, signal)
    known = ~np.isnan(values)
    if not known.any():
        return None
    t_s, values = part.t_s[known], values[known]
    seconds = np.diff(t_s, append=max(end_s, t_s[-1])) if np.isfinite(end_s) else np.diff(t_s, append=t_s[-1])
    return float(np.average(values, weights=seconds)) if seconds.sum() > 0 else float(values.mean())


def is_steady(samples: Samples) -> bool:
    """Whether at least 5 readings of the card's own power scatter by no more than 3 % of their mean, which is over 0.

    That is the instant power; of cards without it, the 1-s mean.
    """
    instant_w = samples.instant_w[~np.isnan(samples.instant_w)]
    values = instant_w if len(instant_w) else samples.average_w[~np.isnan(samples.average_w)]
    return len(values) >= 5 and bool(values.mean() > 0 and values.std() <= STEADY_FRAC * values.mean())


def disagreement(power_w: float, instant_w: float | None, average_w: float | None) -> tuple[float | None, str | None]:
    """How far the counter's power is from the two means, and why joules are refused, if they are.

    Parameters
    ----------
    power_w : by the counter, in steady load. instant_w, average_w : means of the same time; None if not known.

    Returns
    -------
    Largest relative difference, None with nothing to compare; and the reason if it is over 5 %, else None.
    """
    others = {"instant power": instant_w, "1-s mean": average_w}
    found = {name: abs(power_w / watts - 1) for name, watts in others.items() if watts}
    if not found:
        return None, None
    worst = max(found, key=lambda name: found[name])
    if found[worst] <= MOST_DISAGREEMENT:
        return found[worst], None
    return found[worst], (
        f"the energy counter says {power_w:.1f} W and the {worst} {others[worst]:.1f} W in steady load: "
        f"they differ by {found[worst]:.0%}, and {MOST_DISAGREEMENT:.0%} is the most"
    )


@dataclass(frozen=True)
class Tick:
    """One tick that was waited for: t_s +- half_s, the counter's new value, the instant power then, cost of a call."""

    t_s: float
    half_s: float
    counter_mj: float
    instant_w: float | None
    call_s: float


def next_tick(meter: Meter, clock: Clock) -> Tick | NotMeasured:
    """Read closely until the counter changes; NotMeasured after a second without, or where it does not answer."""
    until_s = clock.now() + LONGEST_WAIT_S
    before: Reading | None = None
    while True:
        start_s = clock.now()
        try:
            reading = meter.read()
        except DeviceError as error:
            return NotMeasured(error.message)
        if reading.counter_mj is None:
            return NotMeasured(NO_COUNTER)
        if before is not None and before.counter_mj is not None and reading.counter_mj != before.counter_mj:
            half_s = (reading.t_s - before.t_s + (reading.call_s + before.call_s) / 2) / 2
            middle_s = (reading.t_s + before.t_s) / 2
            return Tick(middle_s, half_s, reading.counter_mj, reading.instant_w, reading.call_s)
        before = reading
        now = clock.now()
        if now > until_s:
            return NotMeasured(f"the energy counter stood still for {LONGEST_WAIT_S:.1f} s")
        clock.sleep(max(0.0, SHORTEST_S - (now - start_s)))
