"""Reading a meter again and again beside the program: at a fixed distance, or close around the counter's ticks."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from gpubloat.energy.meter import NAMES, Meter, Reading, Samples
from gpubloat.errors import DeviceError

SHORTEST_S = 0.001  # distance of readings that follow each other closely
STILL_S = 2.0  # of close reading without a tick, after which a counter is read ten times a second
PERIOD_S = 0.1  # of ticks, until two have been seen
GUARD_FRAC = 0.03  # of a period: how long before a tick reading becomes close, at least
JOIN_S = 5.0
ENDED_S = 1.0  # from step to step once reading has ended


class Clock(Protocol):
    """Time in seconds, waiting, and something done in the background. Tests use one that is not that of the wall."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...

    def background(self, step: Callable[[], float]) -> AbstractContextManager[None]:
        """While the block runs, call `step` again and again, each time after the seconds that it returned."""
        ...


class WallClock:
    """The time that meters stamp readings with, and threads. A thread that hangs in a call is left after 5 seconds."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @contextlib.contextmanager
    def background(self, step: Callable[[], float]) -> Iterator[None]:
        stop = threading.Event()

        def run() -> None:
            wait = 0.0
            while not stop.wait(wait):
                wait = step()

        thread = threading.Thread(target=run, name="gpubloat-energy", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(JOIN_S)


class Sampling:
    """What has been read so far.

    lost : readings in which a counter that had answered did not, and, at a fixed distance, those that were due while
        an earlier one still ran.
    reason : why reading ended by itself, None if it did not: the GPU is gone, or the thread died.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._columns = {name: array("d") for name in NAMES}
        self._has_counter = False
        self.lost = 0
        self.reason: str | None = None

    def take(self) -> Reading | None:
        """Read once more. None once reading has ended: whatever a meter raises ends it."""
        if self.reason is not None:
            return None
        try:
            reading = self._meter.read()
        except DeviceError as error:
            self.reason = error.message
            return None
        except Exception as error:
            self.reason = f"the meter failed: {type(error).__name__}: {error}"
            return None
        if reading.counter_mj is not None:
            self._has_counter = True
        elif self._has_counter:
            self.lost += 1
        for name, column in self._columns.items():
            value = getattr(reading, name)
            column.append(float("nan") if value is None else float(value))
        return reading

    def samples(self) -> Samples:
        """A copy of the readings; may be asked while reading goes on."""
        n = len(self._columns[NAMES[-1]])  # the last column to grow
        return Samples(*(np.array(self._columns[name][:n], dtype=np.float64) for name in NAMES))


@contextlib.contextmanager
def sampled(
    meter: Meter, period_s: float | None = None, *, share: float = 0.15, clock: Clock | None = None
) -> Iterator[Sampling]:
    """Read `meter` in a thread while the block runs.

    Parameters
    ----------
    meter : is not closed.
    period_s : seconds from reading to reading. Default: the counter's ticks are followed. Until two ticks were seen,
        readings follow each other closely; from then on the thread sleeps until shortly before a tick is due, and reads
        closely until the counter has changed. A tick is known to about one call of the counter.
    share : of the time, the most that may pass in calls of the meter when ticks are followed. Where following every
        tick would cost more, only every second, third... is. A call of 3.5 ms and ticks 100 ms apart take 0.10 to 0.14
        for every tick. The first two ticks come on top: up to 0.2 s of reading.
    clock : default, that of the wall, with a thread. The thread holds Python's lock only between calls of NVML.

    Yields
    ------
    Sampling. After the block it says what was read, what was lost, and why reading ended early, if it did.
    """
    clock = clock or WallClock()
    sampling = Sampling(meter)
    step: Callable[[], float] = (
        _Following(sampling, share, clock) if period_s is None else _regular(sampling, period_s, clock)
    )

    def guarded() -> float:
        try:
            return step()
        except Exception as error:  # a thread that dies says so
            sampling.reason = f"reading failed: {type(error).__name__}: {error}"
            return ENDED_S

    with clock.background(guarded):
        yield sampling
    if sampling.reason is None and period_s is not None and not len(sampling.samples()):
        sampling.take()  # a block shorter than the start of a thread


def _regular(sampling: Sampling, period_s: float, clock: Clock) -> Callable[[], float]:
    due = clock.now()

    def step() -> float:
        nonlocal due
        if sampling.take() is None:
            return ENDED_S
        due += period_s
        late = int(max(0.0, clock.now() - due) / period_s)
        sampling.lost += late
        due += late * period_s
        return max(0.0, due - clock.now())

    return step


class _Following:
    """The step that follows ticks.

    It knows when the last located tick was, and the period, from the first one to it. A *burst* is a run of close
    readings around a tick that is due. A change that the first reading of a burst sees tells no time: it came some time
    since the burst before.
    """

    def __init__(self, sampling: Sampling, share: float, clock: Clock) -> None:
        self._sampling = sampling
        self._share = share
        self._clock = clock
        self._before: Reading | None = None  # the reading before, of the same burst
        self._first_s: float | None = None
        self._tick_s = 0.0
        self._n_periods = 0  # from the first located tick to the last one
        self._period_s = PERIOD_S
        self._due_s = 0.0  # the tick that the burst is for
        self._spent_s = 0.0  # in calls of this burst
        self._widening = 1.0  # doubled when a tick was not where it was due

    def __call__(self) -> float:
        start = self._clock.now()
        reading = self._sampling.take()
        if reading is None:
            return ENDED_S
        if reading.counter_mj is None:
            self._before = None
            return PERIOD_S
        call_s = self._clock.now() - start
        self._spent_s += call_s
        before, self._before = self._before, reading
        is_still = not self._n_periods and self._spent_s > STILL_S
        if before is not None and before.counter_mj != reading.counter_mj:
            if is_still:
                self._spent_s = 0.0  # it moves again: read closely
                return 0.0
            is_locked = self._n_periods > 0
            self._located((before.t_s + reading.t_s) / 2)
            if self._n_periods:
                return self._until_next(call_s, self._spent_s if is_locked else 0.0)
        elif self._n_periods and self._clock.now() > self._due_s + self._guard_s(call_s):
            self._widening = min(2 * self._widening, 16.0)
            return self._until_next(call_s, self._spent_s)
        return PERIOD_S if is_still else max(0.0, SHORTEST_S - call_s)

    def _located(self, tick_s: float) -> None:
        if self._first_s is None:
            self._first_s = tick_s
        else:
            self._n_periods += max(1, round((tick_s - self._tick_s) / self._period_s)) if self._n_periods else 1
            self._period_s = (tick_s - self._first_s) / self._n_periods
        self._tick_s = tick_s
        self._widening = max(1.0, self._widening / 2)

    def _guard_s(self, call_s: float) -> float:
        """How long before and after a tick that is due readings are close."""
        return min(self._widening * max(2 * call_s, GUARD_FRAC * self._period_s), self._period_s / 2)

    def _until_next(self, call_s: float, spent_s: float) -> float:
        """Seconds to the next burst; the longer the last one took, the further."""
        now, guard_s = self._clock.now(), self._guard_s(call_s)
        ahead = math.ceil(spent_s / (self._share * self._period_s))
        ahead = max(1, min(ahead, self._n_periods))  # the period is not known better than to go as far ahead again
        passed = math.floor((now - self._tick_s) / self._period_s)
        self._due_s = self._tick_s + (passed + ahead) * self._period_s
        if self._due_s - guard_s < now:
            self._due_s += self._period_s
        self._before, self._spent_s = None, 0.0
        return self._due_s - guard_s - now
