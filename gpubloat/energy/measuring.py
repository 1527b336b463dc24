"""Energy of a function by operator: one entry that captures, times, replays, and accounts for the whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from gpubloat.energy import blocks as measured
from gpubloat.energy import meter as meters
from gpubloat.energy import operators
from gpubloat.energy.blocks import Block, trusted
from gpubloat.energy.capture import Capture, capture
from gpubloat.energy.capture.lines import raised_at
from gpubloat.energy.engines import Engine, engine_for
from gpubloat.energy.meter import Meter, NoDevice
from gpubloat.energy.operators import Group, Measured
from gpubloat.energy.progress import Told, shown
from gpubloat.energy.sampler import WallClock
from gpubloat.energy.slope import Slope
from gpubloat.energy.timing import Timing
from gpubloat.energy.timing import time as timed
from gpubloat.errors import DeviceError, GpubloatError, sentence
from gpubloat.run import Run, RunWriter, provenance, refuse_overwrite

DEADLINE_S = 120.0
TABLES = ["operators", "closure", "blocks"]
_REPEATS = 5  # of the timing pass, and the two that warm up and the ones without the profiler: 12 calls
_MOST_NOTES = 5  # of table closure; run.json has all
_TIMES_S = 1.0  # of a block that takes times only
METHOD = {
    "step": "the function as called, with no hook or profiler, before and after its operators; power by the slope of "
    "the energy counter between ticks",
    "operators": "identical ones once, on clones of the recorded inputs, in a CUDA graph where that works",
    "remainder": "step less the sum of the operators that were measured: what is not in kernels, what was not measured "
    "and what replays take more or less than the same operators in the step",
    "energy": "of the whole GPU board; active energy is without what an idle GPU with a context takes in that time",
}


@dataclass
class _Found:
    """What was measured so far."""

    steps: list[Block] = field(default_factory=list)
    idle: Block | None = None
    operators: list[Measured] = field(default_factory=list)

    def blocks(self) -> list[Block]:
        """All, in the order of measuring."""
        inner = [block for one in self.operators for block in (one.copies, one.block) if block is not None]
        return [*self.steps[:1], *([self.idle] if self.idle is not None else []), *inner, *self.steps[1:]]


def measure(
    fn: Callable[..., Any],
    *args: Any,
    meter: Meter | None = None,
    engine: Engine | None = None,
    seconds: float | None = None,
    deadline_s: float = DEADLINE_S,
    times_only: bool = False,
    subject: str | None = None,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: bool = False,
    command: str = "gpubloat.energy.measure",
) -> Run:
    """Measure the energy of ``fn(*args)``, and of each of its operators alone.

    What each pass costs: the capture is one call, slower by its records (8 us an operator, and a copy of every value);
    the timing pass is 12 calls, of which 5 under PyTorch's profiler; the step and the operators are measured with
    nothing hooked in, 2.8 s each: the operators with most time first, until the deadline. The function is called for
    seconds on end: a step of training trains.

    Parameters
    ----------
    fn : returns what it computes, tensors of PyTorch or arrays of JAX. JAX: the step only; its operators are listed.
    meter : is not closed. Default, that of the GPU that the function uses, by NVML.
    engine : default, that of the function's framework and device.
    seconds : of a block; default, 2 s or 20 ticks of the energy counter.
    deadline_s : for all together. The step is measured in any case, operators as far as there is time; what was not
        measured is said with its share of the time.
    times_only : no energies; works without a GPU, too.
    subject : name in the tables; default, that of the function.
    out, force, progress : keep the run in this folder, replacing what is there; say on stderr what is being done.

    Returns
    -------
    Run with operators, closure, blocks. Its provenance has `joules` (`is_trusted`, `reason`), `idle_w`, `meter`,
    `framework`, `notes`. Where joules are refused, since the energy counter differs from the card's own power by over
    5 % in a steady load or does not answer, the columns of energies are empty, and times are given.

    Raises
    ------
    DeviceError : there is no GPU that can be measured, or its meter died. GpubloatError : the function failed, returns
    nothing, or uses no GPU.
    """
    if out is not None:
        refuse_overwrite(Path(out), force)
    if deadline_s <= 0 or (seconds is not None and seconds <= 0):
        raise GpubloatError("times have to be greater than 0", "leave out seconds and deadline_s for their defaults")
    name = subject or str(getattr(fn, "__qualname__", type(fn).__name__))
    with contextlib.ExitStack() as held:
        opened = None if times_only else opened_meter(meter, 0, held)
        until_s = (WallClock() if engine is None else engine.clock).now() + deadline_s
        told = held.enter_context(shown(progress))
        told("running it once and keeping its values")
        with failure_named("captured"):
            captured = held.enter_context(capture(fn, *args))
        device = used_device(captured)
        if opened is not None and engine is None:
            opened = _of_device(opened, meter, device, held)
        if engine is None:
            engine = engine_for(device, captured.framework)
        found = _Found()

        def called() -> Any:
            return fn(*args)

        with RunWriter("energy", TABLES, out, force) as writer:
            timing, notes = _all(called, captured, opened, engine, seconds, until_s, name, found, told)
            record = provenance(command, METHOD, [])
            joules = _judged(found) if opened is not None else {"is_trusted": False, "reason": str(measured.NO_METER)}
            card = None if opened is None else opened.describe()
            idle_w = found.idle.power.power_w if found.idle and isinstance(found.idle.power, Slope) else None
            record |= {"gpus": [] if card is None else [card.get("name")], "meter": card, "joules": joules}
            record |= {"idle_w": idle_w, "framework": captured.framework, "deadline_s": deadline_s, "notes": notes}
            table, closure = operators.tables(
                name, captured, timing, found.operators, found.steps, idle_w, notes[:_MOST_NOTES]
            )
            writer.append("operators", table)
            writer.append("closure", closure)
            rows = [block.row() | {"order": order} for order, block in enumerate(found.blocks())]
            writer.append("blocks", pd.DataFrame(rows))
            return writer.finish(record)


def opened_meter(meter: Meter | None, index: int, held: contextlib.ExitStack) -> Meter:
    """The one that was given, or that of a GPU, which `held` closes. DeviceError if there is none."""
    if meter is not None:
        return meter
    found = meters.open_meter(index)
    if isinstance(found, NoDevice):
        error = found.error()
        raise DeviceError(error.reason, error.message, f"{error.hint}; without a GPU, take times only (--times-only)")
    held.callback(found.close)
    return found


def _of_device(opened: Meter, given: Meter | None, device: str, held: contextlib.ExitStack) -> Meter:
    """The meter of the device that the function uses."""
    if not device.startswith("cuda"):
        raise GpubloatError("the function uses no GPU", "move its tensors to the GPU, or take times only")
    index = int(device.partition(":")[2] or 0)
    return opened if given is not None or index == 0 else opened_meter(None, index, held)


def used_device(captured: Capture) -> str:
    """The first GPU that operators ran on, "cpu" if none did. That there are others is noted."""
    numbers = [number for op in captured.ops for number in (*op.outputs, *op.inputs)]
    devices = list(dict.fromkeys(captured.tensors[number].device for number in numbers))
    gpus = [device for device in devices if device != "cpu"]
    if len(gpus) > 1:
        captured.notes.append(f"the function uses {' and '.join(gpus)}: energy is that of {gpus[0]} alone")
    return gpus[0] if gpus else "cpu"


@contextlib.contextmanager
def failure_named(doing: str) -> Iterator[None]:
    """An exception of the function is told in one sentence, with the line where it was raised."""
    try:
        yield
    except GpubloatError:
        raise
    except Exception as error:
        where = raised_at(error)
        raise GpubloatError(f"the function failed{where} while it was {doing}: {sentence(error)}") from error


def _all(
    called: Callable[[], Any],
    captured: Capture,
    meter: Meter | None,
    engine: Engine,
    seconds: float | None,
    until_s: float,
    name: str,
    found: _Found,
    told: Told,
) -> tuple[Timing | None, list[str]]:
    """All measurements; what they give is added to `found`. Times by operator, and notes."""
    if seconds is None:
        seconds = _TIMES_S if meter is None else measured.window_s(meter, engine)
    told("the whole step")
    with failure_named("measured"):
        work = engine.prepared(called, as_graph=False)
        found.steps.append(measured.block(work, meter, engine, seconds, name))
    call_s = found.steps[0].call_s
    left_s = until_s - engine.clock.now()
    told("times by operator")
    timing, notes = _timed(called, captured, 1 if (_REPEATS * 2 + 2) * call_s > left_s / 4 else _REPEATS)
    groups = operators.groups(captured, timing)
    notes += captured.notes
    if meter is None:
        found.operators = [_not_replayed(group, "times only") for group in groups]
        return timing, notes
    told("power of the idle GPU")
    found.idle = measured.idle(meter, engine, seconds)
    refused = trusted([found.steps[0], found.idle])
    if not refused["is_trusted"]:
        found.operators = [_not_replayed(group, "joules are not to be believed") for group in groups]
        return timing, notes
    last_s = measured.SETTLE_S + measured.GAP_S + 2 * call_s + seconds
    engine.release()
    found.operators = operators.replayed(
        groups, captured, meter, engine, seconds=seconds, until_s=until_s - last_s, told=told
    )
    told("the whole step again")
    if engine.clock.now() + last_s <= until_s:
        with failure_named("measured again"):
            found.steps.append(measured.block(work, meter, engine, seconds, name))
    else:
        notes.append("the step was measured once, before its operators: the deadline was reached")
    return timing, notes


def _not_replayed(group: Group, reason: str) -> Measured:
    return Measured(group, f"not replayed: {reason}" if group.is_work else operators.NO_KERNEL)


def _timed(called: Callable[[], Any], captured: Capture, repeats: int) -> tuple[Timing | None, list[str]]:
    if captured.framework != "torch":
        return None, ["times by operator are taken with PyTorch only"]
    try:
        timing = timed(called, capture=captured, repeats=repeats)
    except Exception as error:  # of the function, or of a profiler that another one keeps out
        return None, [f"times by operator were not taken: {sentence(error)}"]
    return timing, [*timing.notes, *timing.mismatches]


def _judged(found: _Found) -> dict[str, Any]:
    """Whether joules may be said; if not, they are taken out of all blocks."""
    joules = trusted(found.blocks())
    if joules["is_trusted"]:
        return joules
    reason = str(joules["reason"]).removeprefix("not measured: ")
    found.steps = [block.without_energy(reason) for block in found.steps]
    found.idle = found.idle and found.idle.without_energy(reason)
    found.operators = [
        Measured(
            one.group, one.method, one.notes,
            one.block and one.block.without_energy(reason), one.copies and one.copies.without_energy(reason),
        )
        for one in found.operators
    ]  # fmt: skip
    return joules


def total(closure: pd.DataFrame, times: int, grid_g_per_kwh: float | None = None) -> dict[str, float | None]:
    """kwh and g_co2e of `times` steps; None if not measured, and without an intensity of the grid, grams per kWh."""
    step_j = closure["step_j"].iloc[0]
    if pd.isna(step_j):
        return {"kwh": None, "g_co2e": None}
    kwh = float(step_j) * times / 3.6e6
    return {"kwh": kwh, "g_co2e": None if grid_g_per_kwh is None else kwh * grid_g_per_kwh}


def closing(closure: pd.DataFrame) -> str:
    """The closure as one sentence."""
    row = closure.iloc[0]
    step = f"one step takes {_amount(row.step_time_s, 's')}"
    if pd.isna(row.step_j):
        return f"{step}; energy {row.notes.split('; ')[0]}"
    said = f"{step} and {_amount(row.step_j, 'J')} +- {_amount(row.error_j, 'J')}"
    if pd.isna(row.operators_j):
        return f"{said}; no operator was measured"
    share = row.operators_j / row.step_j
    said += f": operators {share:.1%}, the rest {1 - share:.1%} (not in kernels, or not measured)"
    if pd.notna(row.waiting_j) and row.waiting_j > 0:
        said += f", of which an idle GPU takes about {row.waiting_j / row.step_j:.1%} while no kernel runs"
    if row.n_not_measured:
        time = "" if pd.isna(row.not_measured_time_frac) else f", {row.not_measured_time_frac:.1%} of the kernels' time"
        said += f"; {row.n_not_measured} of {row.n_operators} operators were not measured{time}"
    return said


def _amount(value: float, unit: str) -> str:
    for factor, prefix in ((1.0, ""), (1e-3, "m"), (1e-6, "µ")):
        if abs(value) >= factor:
            return f"{value / factor:.4g} {prefix}{unit}"
    return f"{value / 1e-9:.3g} n{unit}"
