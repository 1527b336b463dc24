"""Two functions, measured in turn: A B B A, again and again, so that what drifts linearly cancels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from gpubloat.energy import blocks as measured
from gpubloat.energy.blocks import Block, Net, net, trusted
from gpubloat.energy.engines import IN_A_GRAPH, Engine, Work
from gpubloat.energy.meter import Meter, NotMeasured
from gpubloat.energy.progress import Told, silent
from gpubloat.energy.slope import Slope
from gpubloat.energy.statistics import LEAST_BLOCKS, Saved, log_ratios, saved, t_quantile

HOST_S = 1.0  # of calls by which the host's CPU time is taken: it is counted in steps of 0.01 s
FAINT_W = 20.0  # over idle: below, active energies are too uncertain to compare
BEHIND = 1.1  # times as long as in a graph: the host cannot keep up
ORDER = ("A", "B", "B", "A")
_SPOKEN = {"whole": "the whole functions"}


@dataclass(frozen=True)
class Side:
    """One call of one side.

    call_s : geometric mean of its blocks. call_j, error_j : energy and half of its 95 % interval, None if not measured;
    active_j : the same without what an idle GPU takes in that time. host_s : CPU time of the process, as called; None
    for work that is no function. called_s : time as called, which is longer than call_s where blocks ran in a graph and
    the host cannot keep up.
    """

    call_s: float
    call_j: float | None
    error_j: float | None
    active_j: float | None
    host_s: float | None
    called_s: float | None
    how: str


@dataclass(frozen=True)
class Comparison:
    """saved, active : of the board's energy, and of that without idle power. times : the same of time.

    time_ratio : time of the side that takes less energy over that of the other; B over A if energies are not known.
    idle_w : power of the idle GPU with a context. joules : `is_trusted` and `reason`, as `blocks.trusted` gives them.
    """

    blocks: tuple[Block, ...]
    saved: Saved | NotMeasured
    active: Saved | NotMeasured
    times: Saved | NotMeasured
    time_ratio: float
    a: Side
    b: Side
    idle_w: float | None
    joules: dict[str, Any]
    notes: tuple[str, ...]

    def rows(self) -> pd.DataFrame:
        """Rows of table blocks."""
        return pd.DataFrame([block.row() for block in self.blocks])


def compare(
    a: Callable[[], Any] | Work,
    b: Callable[[], Any] | Work,
    meter: Meter | None,
    engine: Engine,
    *,
    subject: str = "function",
    n_blocks: int = LEAST_BLOCKS,
    seconds: float | None = None,
    most_s: float | None = None,
    idle: Block | None = None,
    as_graph: bool = True,
    told: Told = silent,
) -> Comparison:
    """Measure A and B in blocks A B B A.

    Both sides run in the same way: in CUDA graphs if both can be captured, else as called. Nothing is hooked into
    either. Takes 4 x `n_blocks` x (0.8 s + `seconds`), 34 s by default, and some seconds before for idle power and CPU
    time.

    Parameters
    ----------
    a, b : functions without arguments, or work such as `engines.of_replay` makes. Copies that restore its inputs are
        measured once for each side and taken off.
    meter : is not closed. None: times only.
    seconds : of a block; default, 2 s or 20 ticks of the counter.
    most_s : no further A B B A is begun after them, once there are 3.
    idle : of `blocks.idle`, measured before. Default, it is measured here.
    as_graph : False to run functions as called. told : hears which block is measured.

    Raises
    ------
    DeviceError : the meter died. What the functions raise.
    """
    if meter is not None and seconds is None:
        seconds = measured.window_s(meter, engine)
    seconds = seconds or measured.LEAST_S
    works = _prepared(a, b, engine, as_graph)
    hosts = {side: _host(fn, engine) for side, fn in (("A", a), ("B", b))}
    if idle is None and meter is not None:
        idle = measured.idle(meter, engine, seconds)
    copies = {
        side: measured.block(
            Work(work.restore, work.calls, work.how), meter, engine, seconds, f"{subject}: copies", side
        )
        for side, work in works.items()
        if work.restore is not None
    }
    found: list[Block] = []
    until_s = math.inf if most_s is None else engine.clock.now() + most_s
    for order, side in enumerate(ORDER * n_blocks):
        if order % len(ORDER) == 0 and order >= len(ORDER) * LEAST_BLOCKS and engine.clock.now() > until_s:
            break
        told(f"measuring {_SPOKEN.get(subject, subject)}: {side}, block {order + 1} of {len(ORDER) * n_blocks}")
        found.append(measured.block(works[side], meter, engine, seconds, subject, side, order))
    joules = trusted([*found, *copies.values(), *([idle] if idle is not None else [])])
    if not joules["is_trusted"] and meter is not None:
        found = [_without(one, joules["reason"]) for one in found]
    idle_w = idle.power.power_w if idle is not None and isinstance(idle.power, Slope) else None
    if not joules["is_trusted"]:
        idle_w = None
    return _compared(found, copies, works, hosts, idle_w, joules)


def null(work: Callable[[], Any] | Work, meter: Meter | None, engine: Engine, **options: Any) -> Comparison:
    """A against itself: `statistics.null_band` of its `saved` is the smallest share that may be claimed."""
    options = {"subject": "A against A"} | options
    prepared = work if isinstance(work, Work) else engine.prepared(work, options.get("as_graph", True))
    return compare(prepared, prepared, meter, engine, **options)


def _prepared(
    a: Callable[[], Any] | Work, b: Callable[[], Any] | Work, engine: Engine, as_graph: bool
) -> dict[str, Work]:
    given = {"A": a, "B": b}
    works = {side: fn if isinstance(fn, Work) else engine.prepared(fn, as_graph) for side, fn in given.items()}
    if all(work.how == IN_A_GRAPH for work in works.values()):
        return works
    for side, fn in given.items():
        if works[side].how == IN_A_GRAPH and not isinstance(fn, Work):
            other = works["B" if side == "A" else "A"].how
            works[side] = replace(engine.prepared(fn, False), how=f"as called, since the other side is: {other}")
    return works


def _host(fn: Callable[[], Any] | Work, engine: Engine) -> tuple[float, float] | None:
    """Time and CPU time of a call as it is called, with no meter beside it."""
    if isinstance(fn, Work):
        return None
    ran = engine.run(engine.prepared(fn, False), HOST_S)
    return ran.call_s, ran.cpu_s / ran.n_calls


def _without(block: Block, reason: str) -> Block:
    return (
        block if isinstance(block.power, NotMeasured) else block.without_energy(reason.removeprefix("not measured: "))
    )


def _compared(
    found: Sequence[Block],
    copies: dict[str, Block],
    works: dict[str, Work],
    hosts: dict[str, tuple[float, float] | None],
    idle_w: float | None,
    joules: dict[str, Any],
) -> Comparison:
    sides = [block.side for block in found]
    nets = [net(block, copies.get(block.side), idle_w) for block in found]
    why = next((one.notes for one in nets if one.notes), "").removeprefix("not measured: ")
    total = saved(NotMeasured(why) if why else log_ratios(sides, [one.call_j or math.nan for one in nets]))
    active = _active(sides, nets, idle_w, why)
    times = saved(log_ratios(sides, [one.call_s or math.nan for one in nets]))
    # B over A; the other way round if A takes less energy.
    ratio = math.nan if isinstance(times, NotMeasured) else math.exp(-times.log_ratio)
    if isinstance(total, Saved) and total.wasteful == "B":
        ratio = 1 / ratio
    made = {side: _side([n for n, s in zip(nets, sides) if s == side], works[side], hosts[side]) for side in "AB"}
    notes = [
        f"{side} takes {1e6 * one.called_s:.4g} us as called and {1e6 * one.call_s:.4g} us in a graph: "
        "the host cannot keep up, and what the GPU takes meanwhile is not counted"
        for side, one in made.items()
        if one.how == IN_A_GRAPH and one.called_s is not None and one.called_s > BEHIND * one.call_s
    ]
    return Comparison(tuple(found), total, active, times, ratio, made["A"], made["B"], idle_w, joules, tuple(notes))


def _active(sides: Sequence[str], nets: Sequence[Net], idle_w: float | None, why: str) -> Saved | NotMeasured:
    if why:
        return NotMeasured(why)
    if idle_w is None:
        return NotMeasured("idle power is not known")
    over_w = [one.active_j / one.call_s for one in nets if one.active_j is not None and one.call_s]
    if len(over_w) < len(nets) or min(over_w) < FAINT_W:
        return NotMeasured(f"a side draws under {FAINT_W:.0f} W more than the idle GPU")
    return saved(log_ratios(sides, [one.active_j or math.nan for one in nets]))


def _side(nets: Sequence[Net], work: Work, host: tuple[float, float] | None) -> Side:
    called_s, host_s = host if host is not None else (None, None)
    times = [one.call_s for one in nets if one.call_s is not None]
    call_s = math.exp(float(np.mean(np.log(times)))) if times else math.nan
    energies = [(one.call_j, one.error_j) for one in nets if one.call_j is not None and one.error_j is not None]
    if len(energies) < len(nets):
        return Side(call_s, None, None, None, host_s, called_s, work.how)
    values = np.array([energy for energy, _ in energies])
    call_j = math.exp(float(np.mean(np.log(values))))
    # What each block may be off by has the same causes in all of them: it does not shrink with their number.
    each = float(np.mean([error for _, error in energies]))
    scatter = t_quantile(0.975, len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    active = [one.active_j for one in nets if one.active_j is not None]
    active_j = float(np.mean(active)) if len(active) == len(nets) else None
    return Side(call_s, call_j, math.hypot(each, scatter), active_j, host_s, called_s, work.how)
