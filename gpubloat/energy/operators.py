"""Energy by operator: groups of identical operators, each replayed and measured once, and what is left of the step.

Operators are replayed without a profiler; times in the step come from a pass of its own (`timing`). The largest groups
are measured first, until a deadline. A group costs its preparation and about 3 seconds, twice that if its inputs have
to be restored before each call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from gpubloat.energy import blocks as measured
from gpubloat.energy.blocks import Block, Net, net, why_not
from gpubloat.energy.capture.records import Capture, Op
from gpubloat.energy.engines import IN_A_GRAPH, Engine, Work, of_replay
from gpubloat.energy.meter import Meter
from gpubloat.energy.progress import Told, silent
from gpubloat.energy.replay import Refused, Replay, replayable
from gpubloat.energy.timing import Timing
from gpubloat.errors import DeviceError, sentence

NO_KERNEL = "no kernel"
_ALLOCATIONS = ("aten::empty", "aten::new_empty")
_LONGEST = 160  # of the printed arguments
_LONGEST_NAME, _MOST_NAMES = 60, 4
# Joules are rounded to this share of a power of two below the step's, 2e-13 of it: then their sums are exact.
_EXACT_BITS = 42


@dataclass(frozen=True)
class Group:
    """Identical operators. ops : their numbers. step_us : of all of them in a step, None if not known. kernels : of the
    first one, None if not known.
    """

    ops: tuple[int, ...]
    step_us: float | None
    kernels: tuple[str, ...] | None
    is_work: bool


@dataclass(frozen=True)
class Measured:
    """A group, what was measured of it, and how. block, copies : None if it was not replayed, or needs no copies."""

    group: Group
    method: str
    notes: str = ""
    block: Block | None = None
    copies: Block | None = None


def groups(capture: Capture, timing: Timing | None) -> list[Group]:
    """Identical operators together, those with most time first; without times, those with most bytes.

    Values are not looked at: those of the first are taken for all, and power can depend on them.
    """
    found: dict[Any, list[Op]] = {}
    for op in capture.ops:
        found.setdefault(identity(op, capture), []).append(op)
    made = [_group(ops, timing) for ops in found.values()]
    return sorted(made, key=lambda group: (-(group.step_us or 0.0), -_bytes(group, capture)))


def identity(op: Op, capture: Capture) -> Any:
    """Equal for identical operators: of one name, with arguments, shapes, strides, types and devices that are equal."""
    infos = [capture.tensors[number] for number in (*op.inputs, *op.outputs)]
    shapes = tuple((info.shape, info.strides, info.dtype, info.device) for info in infos)
    order = {number: n for n, number in enumerate(dict.fromkeys(op.inputs))}  # the same tensor twice is something else
    return op.name, re.sub(r"%\d+", "%", op.arguments), shapes, tuple(order[number] for number in op.inputs), op.is_view


def _group(ops: Sequence[Op], timing: Timing | None) -> Group:
    numbers = tuple(op.index for op in ops)
    is_work = not (ops[0].is_view or ops[0].name.startswith(_ALLOCATIONS))
    if timing is None:
        return Group(numbers, None, None, is_work)
    times = [timing.op_us[number] for number in numbers if number in timing.op_us]
    step_us = sum(times) / len(times) * len(numbers) if times else None
    if timing.source != "kernels":
        return Group(numbers, step_us, None, is_work)
    kernels = tuple(kernel.name for kernel in timing.of(numbers[0]))
    return Group(numbers, step_us, kernels, bool(step_us) or (step_us is None and is_work))


def _bytes(group: Group, capture: Capture) -> int:
    op = capture.ops[group.ops[0]]
    return len(group.ops) * sum(capture.tensors[number].n_bytes for number in (*op.inputs, *op.outputs))


def replayed(
    found: Sequence[Group],
    capture: Capture,
    meter: Meter,
    engine: Engine,
    *,
    seconds: float,
    until_s: float,
    prepare: Callable[[Op, Capture], Replay | Refused] = replayable,
    told: Told = silent,
) -> list[Measured]:
    """Measure groups one after the other, as long as another one ends before `until_s` on the engine's clock.

    Memory of each is released before the next. Where the memory of the GPU does not hold enough sets of inputs to
    exceed twice its cache, fewer are taken, and `notes` says so.

    Raises
    ------
    DeviceError : the meter died.
    """
    results = []
    slowest_s = 0.0  # preparation so far
    block_s = measured.SETTLE_S + seconds + measured.GAP_S
    for number, group in enumerate(found, 1):
        op = capture.ops[group.ops[0]]
        told(f"operators: {op.name}, group {number} of {len(found)}")
        if not group.is_work:
            results.append(Measured(group, NO_KERNEL))
            continue
        start_s = engine.clock.now()
        if start_s + slowest_s + block_s * (2 if op.writes else 1) > until_s:
            results.append(Measured(group, "not replayed: the deadline was reached"))
            continue
        replay: Replay | Refused | None = None
        try:
            replay = prepare(op, capture)
            slowest_s = max(slowest_s, engine.clock.now() - start_s)
            results.append(_measured(group, replay, op, meter, engine, seconds))
        except DeviceError:
            raise
        except Exception as error:  # of PyTorch, such as no memory left
            results.append(Measured(group, f"not replayed: it failed: {sentence(error)}"))
        replay = None
        engine.release()
    return results


def _measured(group: Group, replay: Replay | Refused, op: Op, meter: Meter, engine: Engine, seconds: float) -> Measured:
    if isinstance(replay, Refused):
        return Measured(group, f"not replayed: {replay.reason}")
    work, subject = of_replay(replay), f"{op.name}, operator {op.index}"
    copies = None
    if work.restore is not None:
        alone = Work(work.restore, work.calls, work.how)
        copies = measured.block(alone, meter, engine, seconds, f"{subject}: copies")
    block = measured.block(work, meter, engine, seconds, subject)
    method = "replayed in a graph" if work.how == IN_A_GRAPH else "replayed eagerly"
    return Measured(group, method, _told(replay), block, copies)


def _told(replay: Replay) -> str:
    notes = [] if replay.how == IN_A_GRAPH else [replay.how]
    if replay.set_bytes and not replay.is_cold:
        notes.append(
            f"inputs may lie in the cache: memory or calls allow {replay.n_sets} sets of {replay.set_bytes} bytes"
        )
    if replay.restored_bytes:
        notes.append(f"copies of {replay.restored_bytes} bytes before each call were taken off")
    return "; ".join(notes)


@dataclass(frozen=True)
class Account:
    """Energies of one step that sum up exactly. calls_j : of one call of each part, None if not measured."""

    step_j: float
    calls_j: tuple[float | None, ...]
    operators_j: float
    remainder_j: float


def conserved(step_j: float, parts: Sequence[tuple[int, float | None]]) -> Account:
    """The remainder, so that the sum of n x call_j and it is the step, in floating point, in any order of summation.

    parts : how often, and energy of one call. All are rounded to multiples of one power of two, 2e-13 of the step: such
    sums are exact up to 1,000 times the step.
    """
    unit = math.ldexp(1.0, math.frexp(step_j)[1] - _EXACT_BITS)
    calls = tuple(None if call_j is None else max(1, round(call_j / unit)) * unit for _, call_j in parts)
    total = math.fsum(n * call_j for (n, _), call_j in zip(parts, calls) if call_j is not None)
    whole = round(step_j / unit) * unit
    return Account(whole, calls, total, whole - total)


def tables(
    subject: str,
    capture: Capture,
    timing: Timing | None,
    found: Sequence[Measured],
    steps: Sequence[Block],
    idle_w: float | None,
    notes: Sequence[str] = (),
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tables operators and closure.

    Parameters
    ----------
    steps : the whole step, measured once or more: their mean counts, and half of their range is part of its error.
    notes : of the closure, after why its energy was not measured.
    """
    nets = [
        net(one.block, one.copies, idle_w) if one.block is not None else Net(None, None, None, None, "")
        for one in found
    ]
    step_j, step_error_j = _step(steps)
    account = None if step_j is None else conserved(step_j, [(len(m.group.ops), n.call_j) for m, n in zip(found, nets)])
    rows = [
        _row(subject, capture, one, of_call, None if account is None else (account.step_j, account.calls_j[n]))
        for n, (one, of_call) in enumerate(zip(found, nets))
    ]
    works = [(one, row["call_j"]) for one, row in zip(found, rows) if one.group.is_work]
    is_closed = account is not None and any(row["call_j"] is not None for row in rows)
    told = [*(why_not(block.power) for block in steps[:1] if step_j is None), *notes]
    step_s = sum(block.call_s for block in steps) / len(steps)
    closure = {
        "subject": subject,
        "side": "A",
        "step_time_s": step_s,
        "step_j": None if account is None else account.step_j,
        "error_j": step_error_j,
        "operators_j": account.operators_j if is_closed and account is not None else None,
        "remainder_j": account.remainder_j if is_closed and account is not None else None,
        "waiting_j": _waiting(timing, step_s, idle_w) if is_closed else None,
        "n_operators": sum(len(one.group.ops) for one, _ in works),
        "n_not_measured": sum(len(one.group.ops) for one, call_j in works if call_j is None),
        "not_measured_time_frac": _not_measured(timing, works),
        "idle_w": idle_w,
        "notes": "; ".join(dict.fromkeys(told)),
    }
    return pd.DataFrame(rows), pd.DataFrame([closure])


def _waiting(timing: Timing | None, step_s: float, idle_w: float | None) -> float | None:
    """What an idle GPU takes while no kernel runs; 0 where kernels took more under the profiler than the step does."""
    if timing is None or timing.source != "kernels" or idle_w is None:
        return None
    return idle_w * max(0.0, step_s - timing.busy_us / 1e6)


def _step(steps: Sequence[Block]) -> tuple[float | None, float | None]:
    known = [(b.call_j, b.error_j) for b in steps if b.call_j is not None and b.error_j is not None]
    if len(known) < len(steps) or not known:
        return None, None
    energies = [energy for energy, _ in known]
    apart = (max(energies) - min(energies)) / 2
    return sum(energies) / len(known), math.hypot(max(error for _, error in known), apart)


def _not_measured(timing: Timing | None, works: Sequence[tuple[Measured, float | None]]) -> float | None:
    if timing is None or timing.work_us <= 0:
        return None
    known_us = sum(one.group.step_us or 0.0 for one, call_j in works if call_j is not None)
    return min(1.0, max(0.0, 1 - known_us / timing.work_us))


def _row(
    subject: str, capture: Capture, one: Measured, of_call: Net, energies: tuple[float, float | None] | None
) -> dict[str, Any]:
    group, op = one.group, capture.ops[one.group.ops[0]]
    step_us = group.step_us
    call_s = of_call.call_s if one.block is not None else None if step_us is None else step_us / len(group.ops) / 1e6
    step_j, call_j = energies if energies is not None else (None, of_call.call_j)
    of_step_j = None if call_j is None else len(group.ops) * call_j
    return {
        "subject": subject,
        "side": "A",
        "operator": op.index,
        "name": op.name,
        "arguments": _shown(op, capture),
        "module": op.module,
        "line": str(op.lines[0]) if op.lines else "",
        "n_same": len(group.ops),
        "kernels": short_kernels(group.kernels or ()),
        "call_time_s": call_s,
        "step_time_s": None if step_us is None else step_us / 1e6,
        "call_j": call_j,
        "error_j": of_call.error_j,
        "active_j": of_call.active_j,
        "step_j": of_step_j,
        "step_frac": None if of_step_j is None or step_j is None else of_step_j / step_j,
        "method": one.method,
        "notes": "; ".join(filter(None, (one.notes, of_call.notes))),
    }


def _shown(op: Op, capture: Capture) -> str:
    """The arguments, tensors as fp32[2,3]."""

    def tensor(match: re.Match[str]) -> str:
        info = capture.tensors.get(int(match[1]))
        return match[0] if info is None else f"{info.dtype}[{','.join(map(str, info.shape))}]"

    text = re.sub(r"%(\d+)", tensor, op.arguments)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def short_kernels(names: Sequence[str]) -> str:
    """Names without their types and arguments; a name that follows itself once, with how often."""
    short = [re.split(r"[<(]", name.removeprefix("void "))[0].strip()[-_LONGEST_NAME:] or name[:40] for name in names]
    counted: list[tuple[str, int]] = []
    for name in short:
        if counted and counted[-1][0] == name:
            counted[-1] = (name, counted[-1][1] + 1)
        else:
            counted.append((name, 1))
    told = [name if n == 1 else f"{n} x {name}" for name, n in counted]
    more = [f"{len(told) - _MOST_NAMES} more"] if len(told) > _MOST_NAMES else []
    return " + ".join([*told[:_MOST_NAMES], *more])
