"""Which side is slow where energies are not known: the one that takes longer, by more than the run's own spread."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from gpubloat.energy.causes import Cause
from gpubloat.energy.compare import Comparison
from gpubloat.energy.differences.pair import Pair
from gpubloat.energy.match.regions import Region
from gpubloat.energy.meter import NotMeasured
from gpubloat.energy.statistics import CLAIM, Saved

_STEADIER = "let nothing run beside it, or set OMP_NUM_THREADS=1, which steadies short functions on a busy machine"


def slow_side(comparison: Comparison | None) -> str:
    """ "a" or "b", the side that takes more energy; if that is not known, surely over 5 % more time; "" if neither."""
    if comparison is None:
        return ""
    if isinstance(comparison.saved, Saved):
        return comparison.saved.wasteful.lower()
    times = comparison.times
    return times.wasteful.lower() if isinstance(times, Saved) and times.low_frac > CLAIM else ""


def slow_in(pair: Pair, region: Region, is_only: bool) -> str:
    """The side whose operators of a region take longer: the middle halves of their times are over 5 % apart.

    is_only : no other region differs, so that what a function takes longer is taken here. Then, and if the trace does
    not have the operators, as of JAX and of compiled code, the whole can tell, too.
    """
    halves = [_middle_half(pair, side, region) for side in (0, 1)]
    if halves[0] is None or halves[1] is None:
        return slow_side(pair.whole)
    (a_low, a_high), (b_low, b_high) = halves[0], halves[1]
    if b_high < (1 - CLAIM) * a_low:
        return "a"
    if a_high < (1 - CLAIM) * b_low:
        return "b"
    return slow_side(pair.whole) if is_only else ""


def _middle_half(pair: Pair, side: int, region: Region) -> tuple[float, float] | None:
    timing, ops = pair.timings[side], (region.a_ops, region.b_ops)[side]
    works = [op for op in ops if not pair.captures[side].ops[op].is_view]
    if timing is None or not set(works) <= set(timing.op_us):
        return None
    sums = [sum(one.get(op, 0.0) for op in works) for one in timing.repeats_us]
    low, high = np.quantile(sums, (0.25, 0.75))
    return float(low), float(high)


def is_fair(cause: Cause, slow: str) -> bool:
    """Whether a cause lays the difference to the slow side; or to neither, or to CPU time, which was measured."""
    return cause.kind in ("host wait", "input data") or (bool(slow) and cause.side == slow)


def blamed(cause: Cause, slow: str) -> Cause | None:
    """The likeliest cause in a region that is fair; None if neither side is surely slow. slow : of `slow_in`."""
    found = next((one for one in (cause, *cause.also) if is_fair(one, slow)), None)
    if found is not None or not slow:
        return found
    if cause.kind == "unknown":
        return replace(cause, side=slow)
    evidence = f"{slow.upper()} takes longer, and no known cause was found on its side"
    return Cause("unknown", evidence, cause.a_line, cause.b_line, "none known", side=slow)


def between_operators(slow: str) -> Cause:
    """Where functions differ in regions, and none of them takes the time."""
    evidence = f"{slow.upper()} takes longer, but none of its operators surely does: Python between them takes time"
    return Cause("unknown", evidence, None, None, "none known", side=slow)


def time_told(times: Saved | NotMeasured, is_on_gpu: bool) -> str:
    """How the times of both compare, as a clause; "" if they were not measured."""
    if not isinstance(times, Saved):
        return ""
    fast, slow = ("B", "A") if times.wasteful == "A" else ("A", "B")
    shares = [math.exp(sign * times.half_width - abs(times.log_ratio)) for sign in (0, -1, 1)]
    told = f"{fast} takes {shares[0]:.1%} of {slow}'s time ({shares[1]:.1%} to {shares[2]:.1%})"
    told += "" if is_on_gpu else ", on the CPU"
    return told if times.low_frac > CLAIM else f"{told}: neither surely takes over 5 % more"


def scatter_note(times: Saved | NotMeasured, is_on_gpu: bool) -> str:
    """What to do if times of the CPU say little; "" if they do not scatter."""
    if not isinstance(times, Saved) or is_on_gpu or times.half_width <= CLAIM:
        return ""
    return f"times of this run are uncertain by {math.expm1(times.half_width):.0%}: {_STEADIER}"
