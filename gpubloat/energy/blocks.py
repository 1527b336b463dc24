"""One measured block: work run for some seconds while the energy counter is read, and whether to believe what it says.

Nothing is hooked into the program meanwhile. Reading follows the counter's ticks in a thread: 10 to 25 % of the time of
one CPU on an H200, where a call takes 2.5 ms with the GPU idle and 5 ms under load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from gpubloat.energy.engines import Engine, Ran, Work
from gpubloat.energy.meter import Meter, NotMeasured, Samples
from gpubloat.energy.probing import any_bits
from gpubloat.energy.sampler import sampled
from gpubloat.energy.slope import Slope, disagreement, is_steady, mean_w, next_tick, slope
from gpubloat.errors import DeviceError

SETTLE_S = 0.5  # before a block: power rises to that of the load
IDLE_SETTLE_S = 1.5  # before power is that of an idle GPU
GAP_S = 0.3  # after each block
MEAN_S = 1.1  # after which the 1-s mean has forgotten what was before
LEAST_S, LEAST_TICKS = 2.0, 20  # of a block
SHARE = 0.5  # of a CPU's time that reading may take: a block is short, and each tick that is followed narrows its error
NO_METER = NotMeasured("only times were asked for")
T = TypeVar("T")


@dataclass(frozen=True)
class Block:
    """ran : the part that was measured. power : mean power in it.

    refused : why this power is not believed, None if it may be. is_checked : whether the load was steady, so that the
    counter could be held to the card's own power. has_signals : whether any power of the card's own answered.
    """

    subject: str
    side: str
    order: int
    ran: Ran
    how: str
    power: Slope | NotMeasured
    refused: str | None = None
    is_checked: bool = False
    has_signals: bool = False
    sm_mhz: float | None = None
    temperature_c: float | None = None
    throttle_bits: int | None = None

    @property
    def call_s(self) -> float:
        return self.ran.call_s

    @property
    def call_j(self) -> float | None:
        """Energy of one call; None if not measured."""
        return self.power.power_w * self.call_s if isinstance(self.power, Slope) and self.power.power_w > 0 else None

    @property
    def error_j(self) -> float | None:
        """Half of its 95 % interval."""
        return self.power.error_w * self.call_s if isinstance(self.power, Slope) and self.power.power_w > 0 else None

    def without_energy(self, reason: str) -> Block:
        """The same with times only."""
        return replace(self, power=NotMeasured(reason))

    def row(self) -> dict[str, Any]:
        """A row of table blocks."""
        is_known = self.call_j is not None and isinstance(self.power, Slope)
        seconds = self.ran.end_s - self.ran.start_s
        return {
            "subject": self.subject,
            "side": self.side,
            "order": self.order,
            "seconds_s": seconds,
            "n_calls": self.ran.n_calls,
            "energy_j": self.power.power_w * seconds if is_known else None,  # type: ignore[union-attr]
            "error_j": self.power.error_w * seconds if is_known else None,  # type: ignore[union-attr]
            "power_w": self.power.power_w if is_known else None,  # type: ignore[union-attr]
            "call_time_s": self.call_s,
            "sm_mhz": self.sm_mhz,
            "temperature_c": self.temperature_c,
            "throttle_bits": self.throttle_bits,
            "notes": "; ".join(filter(None, (self.how, "" if is_known else why_not(self.power)))),
        }


def why_not(power: Slope | NotMeasured) -> str:
    """Why a power is of no use."""
    return str(power) if isinstance(power, NotMeasured) else "not measured: the counter did not rise"


def window_s(meter: Meter, engine: Engine) -> float:
    """How long a block has to be: 2 s, or 20 ticks of the counter if that is longer. Waits for two ticks."""
    first = next_tick(meter, engine.clock)
    second = next_tick(meter, engine.clock)
    if isinstance(first, NotMeasured) or isinstance(second, NotMeasured):
        return LEAST_S
    return max(LEAST_S, LEAST_TICKS * (second.t_s - first.t_s))


def block(
    work: Work, meter: Meter | None, engine: Engine, seconds: float, subject: str, side: str = "A", order: int = 0
) -> Block:
    """Run `work` for half a second to settle, then for `seconds`, of which energy and time are taken; 0.3 s of nothing.

    Without a meter only times are taken, at once: there is no power to settle.

    Raises
    ------
    DeviceError : the meter died. What `work` raises.
    """

    if meter is None:
        return Block(subject, side, order, engine.run(work, seconds), work.how, NO_METER)

    def act() -> Ran:
        engine.run(work, SETTLE_S)
        return engine.run(work, seconds)

    found = _read(meter, engine, act, subject, side, order, work.how)
    engine.idle(GAP_S)
    return found


def idle(meter: Meter, engine: Engine, seconds: float) -> Block:
    """Power of the GPU with nothing to do; a context is there if the engine has run something. Raises as `block`."""

    def act() -> Ran:
        engine.idle(IDLE_SETTLE_S)
        start_s = engine.clock.now()
        engine.idle(seconds)
        return Ran(1, start_s, engine.clock.now(), 0.0)

    return _read(meter, engine, act, "idle", "A", 0, "idle")


def _read(meter: Meter, engine: Engine, act: Callable[[], Ran], subject: str, side: str, order: int, how: str) -> Block:
    with sampled(meter, share=SHARE, clock=engine.clock) as sampling:
        begun_s = engine.clock.now()
        ran = act()
    if sampling.reason is not None:
        raise DeviceError("absent", f"reading the GPU ended: {sampling.reason}", "look at nvidia-smi")
    samples = sampling.samples()
    inside = samples.between(ran.start_s, ran.end_s)
    power = slope(samples, ran.start_s, ran.end_s)
    instant_w = mean_w(samples, "instant_w", ran.start_s, ran.end_s)
    average_w = mean_w(samples, "average_w", max(ran.start_s, begun_s + MEAN_S), ran.end_s)
    refused = None
    is_checked = isinstance(power, Slope) and is_steady(inside)
    if isinstance(power, Slope) and is_checked:
        refused = disagreement(power.power_w, instant_w, average_w)[1]
    return Block(
        subject, side, order, ran, how, power, refused, is_checked, bool(instant_w or average_w),
        sm_mhz=_middle(inside, "sm_mhz"),
        temperature_c=_middle(inside, "temperature_c"),
        throttle_bits=any_bits(inside.throttle_bits),
    )  # fmt: skip


def _middle(samples: Samples, signal: str) -> float | None:
    values = getattr(samples, signal)
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None


def trusted(blocks: Sequence[Block]) -> dict[str, Any]:
    """Whether joules may be said, as `is_trusted`, and `reason`: why not, or None.

    They are refused where no block has a power, where in a steady load the counter differs by over 5 % from the card's
    own power, and where no such power answers. If no load was steady, there is a reason and they are trusted all the
    same: they were not checked.
    """
    refused = next((block.refused for block in blocks if block.refused is not None), None)
    if refused is not None:
        return {"is_trusted": False, "reason": f"refused: {refused}"}
    missing = next((block.power for block in blocks if isinstance(block.power, NotMeasured)), None)
    if missing is not None and all(isinstance(block.power, NotMeasured) for block in blocks):
        return {"is_trusted": False, "reason": str(missing)}
    if not any(block.has_signals for block in blocks):
        return {"is_trusted": False, "reason": "refused: no power signal answers that the counter could be held to"}
    if not any(block.is_checked for block in blocks):
        return {"is_trusted": True, "reason": "not checked: no load was steady enough"}
    return {"is_trusted": True, "reason": None}


def net(block: Block, copies: Block | None, idle_w: float | None) -> Net:
    """What one call takes, without the copies that restore its inputs."""
    call_s = block.call_s - (copies.call_s if copies is not None else 0.0)
    if call_s <= 0:
        return Net(None, None, None, None, "not measured: it takes no longer than the copies that restore its inputs")
    if block.call_j is None or block.error_j is None:
        return Net(call_s, None, None, None, why_not(block.power))
    call_j, error_j = block.call_j, block.error_j
    if copies is not None:
        if copies.call_j is None or copies.error_j is None:
            return Net(call_s, None, None, None, f"copies that restore its inputs: {why_not(copies.power)}")
        call_j, error_j = call_j - copies.call_j, float(np.hypot(error_j, copies.error_j))
    if call_j <= 0:
        return Net(call_s, None, None, None, "not measured: it takes no more than the copies that restore its inputs")
    return Net(call_s, call_j, error_j, None if idle_w is None else call_j - idle_w * call_s, "")


@dataclass(frozen=True)
class Net:
    """Of one call; None where not measured, and then `notes` says why."""

    call_s: float | None
    call_j: float | None
    error_j: float | None
    active_j: float | None
    notes: str
