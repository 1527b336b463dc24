"""Readings kept in a file and read again, and a card made of formulas: meters for machines without a GPU."""

from __future__ import annotations

import bisect
import contextlib
import heapq
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gpubloat.energy.meter import NAMES, Reading, Samples
from gpubloat.energy.sampler import SHORTEST_S, Clock
from gpubloat.errors import DeviceError, FormatError, GpubloatError
from gpubloat.run import replacing_file


def save(file: str | os.PathLike[str], samples: Samples, *, force: bool = False) -> None:
    """Write readings as parquet or, by the name, as CSV. GpubloatError if the file exists and `force` is not set."""
    path = Path(file)
    frame = to_frame(samples)
    with replacing_file(path, force) as opened:
        if path.suffix == ".csv":
            opened.write(frame.to_csv(index=False).encode())
        else:
            frame.to_parquet(opened, index=False)


def load(file: str | os.PathLike[str]) -> Samples:
    """Readings that `save` wrote. FormatError if it holds something else."""
    path = Path(file)
    try:
        frame = pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
        return from_frame(frame)
    except OSError as error:
        raise GpubloatError(f"{path} cannot be read: {error.strerror or error}", "give what `save` wrote") from None
    except (ValueError, KeyError, TypeError) as error:  # ArrowInvalid is a ValueError
        raise FormatError(str(path), 0, f"holds no readings: {error}") from None


def to_frame(samples: Samples) -> pd.DataFrame:
    """One row per reading, NaN where a signal did not answer."""
    return pd.DataFrame({name: getattr(samples, name) for name in NAMES})


def from_frame(frame: pd.DataFrame) -> Samples:
    """Readings of one part of table `samples`. KeyError without a column, ValueError if time goes backwards."""
    columns = [frame[name].to_numpy(dtype=np.float64, na_value=np.nan) for name in NAMES]
    t_s = columns[0]
    if not np.isfinite(t_s).all() or (np.diff(t_s) < 0).any():
        raise ValueError("times are not in order")
    return Samples(*columns)


class VirtualClock:
    """Time that passes only in `sleep`. What is done in the background then happens in order, at its own times."""

    def __init__(self) -> None:
        self._now = 0.0
        self._inside: float | None = None  # time within a step of the background
        self._order = itertools.count()
        self._steps: list[tuple[float, int, Callable[[], float]]] = []

    def now(self) -> float:
        return self._now if self._inside is None else self._inside

    def sleep(self, seconds: float) -> None:
        if self._inside is not None:
            self._inside += seconds
            return
        end = self._now + max(0.0, seconds)
        while self._steps and self._steps[0][0] <= end:
            due, number, step = heapq.heappop(self._steps)
            self._inside = due
            try:
                wait = step()
                again = max(self._inside + wait, due + 1e-9)  # time goes on, whatever a step says
            finally:
                self._inside = None
            heapq.heappush(self._steps, (again, number, step))
        self._now = end

    @contextlib.contextmanager
    def background(self, step: Callable[[], float]) -> Iterator[None]:
        number = next(self._order)
        heapq.heappush(self._steps, (self._now, number, step))
        try:
            yield
        finally:
            self._steps = [entry for entry in self._steps if entry[1] != number]
            heapq.heapify(self._steps)


class Steps:
    """Power over time, constant between steps: W from `watts` on, changed by `draw`. Its energy is exact.

    Before the first step the power was `watts` too.
    """

    def __init__(self, watts: float) -> None:
        self._t = [0.0]
        self._w = [float(watts)]
        self._j = [0.0]  # energy up to each step

    def draw(self, watts: float, at_s: float) -> None:
        """From `at_s` on, which is not before an earlier step."""
        self._j.append(self.energy_j(at_s))
        self._t.append(at_s)
        self._w.append(float(watts))

    def energy_j(self, t_s: float) -> float:
        """Since time 0; negative before."""
        i = max(bisect.bisect_right(self._t, t_s) - 1, 0)
        return self._j[i] + self._w[i] * (t_s - self._t[i])

    def mean_w(self, start_s: float, end_s: float) -> float:
        return (self.energy_j(end_s) - self.energy_j(start_s)) / (end_s - start_s)


class Simulated:
    """A card whose power is known: its counter and power signals change at ticks, as those of an H200 do.

    Parameters
    ----------
    power : what it draws, and has drawn by the time of each reading.
    clock : passes by `call_s` with every reading; the counter's value is that of the start of the call.
    counter_period_s : distance of ticks, of all signals; the first is at `phase_s`.
    average_window_s, instant_window_s : each power signal is the mean over this time before the last tick.
    """

    def __init__(
        self,
        power: Steps,
        clock: Clock,
        *,
        counter_period_s: float = 0.1,
        average_window_s: float = 1.0,
        instant_window_s: float = 0.025,
        call_s: float = 0.0035,
        phase_s: float = 0.0,
    ) -> None:
        self._power = power
        self._clock = clock
        self._period_s = counter_period_s
        self._average_s = average_window_s
        self._instant_s = instant_window_s
        self._call_s = call_s
        self._phase_s = phase_s

    def describe(self) -> dict[str, Any]:
        return {"meter": "simulated", "name": "simulated card"}

    def read(self) -> Reading:
        start = self._clock.now()
        tick = self._tick(start)
        self._clock.sleep(self._call_s)
        return Reading(
            start + self._call_s / 2,
            self._call_s,
            self._counter(tick),
            instant_w=self._power.mean_w(tick - self._instant_s, tick),
            average_w=self._power.mean_w(tick - self._average_s, tick),
        )

    def signals(self) -> Mapping[str, Callable[[], float]]:
        def slow() -> float:
            counter = self._counter(self._tick(self._clock.now()))
            self._clock.sleep(self._call_s)
            return counter

        def mean(window_s: float) -> float:
            tick = self._tick(self._clock.now())
            return self._power.mean_w(tick - window_s, tick)

        return {"counter": slow, "instant": lambda: mean(self._instant_s), "average": lambda: mean(self._average_s)}

    def close(self) -> None:
        pass

    def _tick(self, t_s: float) -> float:
        return math.floor((t_s - self._phase_s) / self._period_s + 1e-9) * self._period_s + self._phase_s

    def _counter(self, tick_s: float) -> float:
        return float(math.floor(1000 * self._power.energy_j(tick_s) + 1e9))  # a driver loaded long ago


class Recorded:
    """A meter that gives a recording again: at each time, the last reading that had been taken by then.

    clock : the recording begins now on it. Default, a virtual one, as `clock` of this object.
    Times of readings are on this clock. `read` raises DeviceError once the recording has ended.
    """

    def __init__(self, samples: Samples, clock: Clock | None = None) -> None:
        if not len(samples):
            raise GpubloatError("the recording holds no readings", "record for longer")
        self.clock = clock or VirtualClock()
        self._samples = samples
        self._later_s = self.clock.now() - float(samples.t_s[0])

    def describe(self) -> dict[str, Any]:
        return {"meter": "recorded", "name": f"recording of {len(self._samples)} readings"}

    def read(self) -> Reading:
        t_s = self.clock.now() - self._later_s + 1e-9
        if t_s > float(self._samples.t_s[-1]) + SHORTEST_S:
            raise DeviceError("absent", "the recording has ended", "record for longer")
        row = max(int(np.searchsorted(self._samples.t_s, t_s, side="right")) - 1, 0)
        values = [float(getattr(self._samples, name)[row]) for name in NAMES]
        _, call_s, *signals = (None if math.isnan(value) else value for value in values)
        return Reading(float(self._samples.t_s[row]) + self._later_s, call_s or 0.0, *signals)

    def close(self) -> None:
        pass
