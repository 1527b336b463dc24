"""Joules of a stretch of time, for notebooks: ``with window() as w: ...`` and then `w`."""

from __future__ import annotations

import contextlib
import html
import sys
from types import TracebackType

import numpy as np

from gpubloat.energy.host import HostEnergy, cpu_seconds
from gpubloat.energy.meter import Meter, NoDevice, NotMeasured, Samples, open_meter
from gpubloat.energy.sampler import Clock, WallClock, sampled
from gpubloat.energy.slope import MOST_DISAGREEMENT, Tick, disagreement, is_steady, mean_w, next_tick

SHARE = 0.005  # of the time, in calls of the counter while the window is open
EVERY_S = 0.5  # readings while it is open: at most one in this time
HOST_S = 60.0  # in which no counter of a processor wraps around
COUNTER_J = 0.002  # two steps of the counter
RISE_S = 0.2  # after which the instant power is that of the block
SETTLED_S = 1.1  # after which the 1-s mean has forgotten what was before


class Window:
    """The energy of one GPU while a ``with`` block ran. It may be entered again; results are those of the last time.

    Entering waits for a tick of the counter, up to 0.1 s. Leaving waits until PyTorch's work on the GPU is done, if
    PyTorch is in use, and then for three more ticks, up to 0.3 s: the first may still be of the block, the second ends
    the measurement, the third says what the GPU draws after it. In between the counter is read twice a second, or as
    seldom as it takes to spend 0.5 % of the time in such calls (3.5 ms each on an H200).

    What was drawn between the ticks and the block is taken off. `error_j` covers the times of the ticks (one call each)
    and how far the power after the block is from that before it; not the gain of the card's sensor, which no vendor
    states. A block whose work is not finished when it ends, as with JAX without `block_until_ready`, is cut off.

    Attributes
    ----------
    energy_j, error_j, mean_w : energy of the board, how far off it may be, mean power; None if not measured.
    reason : "not measured: ..." then, else None.
    seconds : length of the block.
    cpu_s : CPU seconds of this process and of its children that ended in the block.
    host_j, host_reason : joules of the processors, or why they are not known.
    samples : readings from the tick before the block to the last one after it.
    """

    def __init__(
        self, meter: Meter | None = None, *, clock: Clock | None = None, host: HostEnergy | None = None
    ) -> None:
        self._given = meter
        self._clock = clock or WallClock()
        self._given_host = host
        self._reading = contextlib.ExitStack()
        self._owned = contextlib.ExitStack()
        self._clear("the window was not entered")

    def _clear(self, reason: str) -> None:
        self.energy_j: float | None = None
        self.error_j: float | None = None
        self.mean_w: float | None = None
        self.reason: str | None = str(NotMeasured(reason))
        self.seconds: float | None = None
        self.cpu_s: float | None = None
        self.host_j: float | None = None
        self.host_reason: str | None = None
        self.samples: Samples | None = None

    def __enter__(self) -> Window:
        self._close()  # of a block that was never left, as when a notebook's cell is interrupted
        self._clear("the window is still open")
        try:
            self._start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._end()
            else:
                self.reason = str(NotMeasured(f"the block raised {kind.__name__}"))
        finally:
            self._close()

    def _close(self) -> None:
        self._reading.close()
        self._owned.close()

    def _start(self) -> None:
        meter = open_meter() if self._given is None else self._given
        self._host = self._given_host or HostEnergy()
        self._host_start_j = self._host.joules()
        if isinstance(meter, NoDevice):
            self._before: Tick | NotMeasured = NotMeasured(meter.reason)
        else:
            if self._given is None:
                self._owned.callback(meter.close)
            self._meter = meter
            self._before = next_tick(meter, self._clock)
            if isinstance(self._before, Tick):
                period_s = max(EVERY_S, self._before.call_s / SHARE)
                self._sampling = self._reading.enter_context(sampled(meter, period_s, clock=self._clock))
        if self._host.reason is None:
            self._reading.enter_context(self._clock.background(self._look_at_host))
        self._start_cpu_s = cpu_seconds()
        self._start_s = self._clock.now()

    def _look_at_host(self) -> float:
        self._host.joules()
        return HOST_S

    def _end(self) -> None:
        if isinstance(self._before, Tick):
            _wait_for_torch()
        end_s = self._clock.now()
        self._reading.close()
        self.seconds = end_s - self._start_s
        self.cpu_s = cpu_seconds() - self._start_cpu_s
        host_j = self._host.joules()
        self.host_j = None if host_j is None or self._host_start_j is None else host_j - self._host_start_j
        self.host_reason = self._host.reason
        found = self._before if isinstance(self._before, NotMeasured) else self._energy(self._before, end_s)
        if isinstance(found, NotMeasured):
            self.reason = str(found)
        else:
            self.energy_j, self.error_j = found
            self.mean_w = self.energy_j / self.seconds
            self.reason = None

    def _energy(self, before: Tick, end_s: float) -> tuple[float, float] | NotMeasured:
        """Joules and their error."""
        self.samples = samples = self._sampling.samples()
        if self._sampling.reason is not None:
            return NotMeasured(f"reading ended before the block: {self._sampling.reason}")
        if end_s <= self._start_s:
            return NotMeasured("the block took no time")
        next_tick(self._meter, self._clock)
        end, later = next_tick(self._meter, self._clock), next_tick(self._meter, self._clock)
        if isinstance(end, NotMeasured):
            return end
        if isinstance(later, NotMeasured):
            return later
        inside = samples.counter_mj[~np.isnan(samples.counter_mj)]
        change = np.diff([before.counter_mj, *inside, end.counter_mj, later.counter_mj])
        if (change < 0).any():
            return NotMeasured("the energy counter went backwards: it wrapped or the driver was loaded again")
        period_s = later.t_s - end.t_s
        after_w = (later.counter_mj - end.counter_mj) / 1000 / period_s
        before_w = after_w if before.instant_w is None else before.instant_w
        head_s, tail_s = self._start_s - before.t_s, end.t_s - end_s
        energy_j = (end.counter_mj - before.counter_mj) / 1000 - before_w * head_s - after_w * tail_s
        error_j = (
            before_w * before.half_s
            + after_w * end.half_s
            + after_w * tail_s * (end.half_s + later.half_s) / period_s
            + abs(after_w - before_w) * tail_s / 2
            + COUNTER_J
        )
        if energy_j <= 0:
            return NotMeasured(f"the block took less energy than can be told from none, {error_j:.2g} J")
        refused = self._refused(energy_j / (end_s - self._start_s), end_s)
        return NotMeasured(refused) if refused else (energy_j, error_j)

    def _refused(self, power_w: float, end_s: float) -> str | None:
        """Why the joules are not believed: the load was steady and the card's own power says something else."""
        samples = self._sampling.samples()
        start_s = self._start_s + SETTLED_S
        late, risen = samples.between(start_s, end_s), samples.between(self._start_s + RISE_S, end_s)
        if not is_steady(late) or not is_steady(risen):
            return None
        powers = [mean_w(late, name, start_s, end_s) for name in ("instant_w", "average_w")]
        worst, reason = disagreement(power_w, *powers)
        # What was drawn before the first reading nobody saw: it may explain as much of the difference.
        unseen_frac = (risen.t_s[0] - self._start_s) / (end_s - self._start_s)
        return reason if worst is not None and worst > MOST_DISAGREEMENT + unseen_frac else None

    def __repr__(self) -> str:
        if self.energy_j is None or self.seconds is None or self.mean_w is None:
            return f"<window: {self.reason}>"
        return f"<window: {self.energy_j:.4g} ± {self.error_j:.2g} J in {self.seconds:.3f} s, {self.mean_w:.1f} W>"

    def _repr_html_(self) -> str:
        def shown(value: float | None, unit: str, reason: str | None) -> str:
            return html.escape(f"{value:,.4g} {unit}" if value is not None else str(reason))

        error = "" if self.error_j is None else f" ± {self.error_j:.2g} J"
        host = f"not measured: {self.host_reason}" if self.host_reason else self.reason
        rows = {
            "GPU energy": shown(self.energy_j, "J", self.reason) + error,
            "mean power": shown(self.mean_w, "W", self.reason),
            "time": shown(self.seconds, "s", self.reason),
            "CPU time": shown(self.cpu_s, "s", self.reason),
            "processor energy": shown(self.host_j, "J", host),
        }
        cells = (f"<tr><th style='text-align:left'>{name}</th><td>{text}</td></tr>" for name, text in rows.items())
        return f"<b>energy window</b><table>{''.join(cells)}</table>"


def _wait_for_torch() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def window(meter: Meter | None = None) -> Window:
    """A context manager that measures the energy of its block; see `Window`. Without a meter, that of GPU 0."""
    return Window(meter)
