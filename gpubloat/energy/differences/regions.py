"""Regions whose operators differ: measured on both sides, or on the one that has any, and why they differ."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from gpubloat.energy import blocks as measured
from gpubloat.energy.causes import Cause, causes
from gpubloat.energy.compare import Comparison
from gpubloat.energy.differences.blame import blamed, slow_in, slow_side
from gpubloat.energy.differences.pair import Pair
from gpubloat.energy.engines import Work, of_replay
from gpubloat.energy.match.regions import Region
from gpubloat.energy.operators import identity
from gpubloat.energy.replay import Refused, replayable
from gpubloat.energy.statistics import TRADE_OFF, UNKNOWN, WASTE, Verdict, verdict
from gpubloat.errors import DeviceError, sentence


@dataclass(frozen=True)
class Alone:
    """Work of one side where the other does nothing. side : 0 or 1. call_j : None if not measured."""

    side: int
    call_j: float | None


@dataclass(frozen=True)
class Found:
    """Of one region that differs. comparison, alone : None if it was not measured so. note : why neither is there.

    cause : None where neither side surely takes longer, and times are all that is known.
    n_same : regions that run the same, this one with them.
    """

    region: Region
    comparison: Comparison | None
    alone: Alone | None
    said: Verdict
    cause: Cause | None
    note: str
    n_same: int = 1


def alike(pair: Pair, regions: list[Region]) -> list[list[Region]]:
    """Regions that run the same on both sides, as the layers of a model do, together.

    Those with most difference in time first, summed up; without times, those with most operators.
    """
    groups: dict[object, list[Region]] = defaultdict(list)
    for region in regions:
        groups[_signature(pair, region)].append(region)

    def size(group: list[Region]) -> tuple[float, int]:
        n_ops = sum(len(region.a_ops) + len(region.b_ops) for region in group)
        return abs(sum(_apart_s(pair, region) for region in group)), n_ops

    return sorted(groups.values(), key=size, reverse=True)


def _signature(pair: Pair, region: Region) -> object:
    sides = zip(pair.captures, (region.a_ops, region.b_ops))
    return region.is_preparation, *(tuple(identity(capture.ops[i], capture) for i in ops) for capture, ops in sides)


def _apart_s(pair: Pair, region: Region) -> float:
    times = [region_s(pair, side, region) for side in (0, 1)]
    return times[0] - times[1] if times[0] is not None and times[1] is not None else 0.0


def weight(pair: Pair, found: Found) -> tuple[bool, bool, float, float]:
    """How much of the difference a region has, with all that run the same, for `sorted`: energy if measured, else time.

    A region in which the better side takes more explains nothing, however much it is. Where only times are known, a
    layout that another side's copy has made comes behind the copy.
    """
    apart_j = 0.0
    if found.alone is not None:
        alone_j = found.alone.call_j or 0.0
        apart_j = _excess(pair, alone_j, 0.0) if found.alone.side == 0 else _excess(pair, 0.0, alone_j)
    elif found.comparison is not None and found.comparison.a.call_j and found.comparison.b.call_j:
        apart_j = _excess(pair, found.comparison.a.call_j, found.comparison.b.call_j)
    times = [region_s(pair, side, found.region) or 0.0 for side in (0, 1)]
    kind = "unknown" if found.cause is None else found.cause.kind
    is_known = kind != "unknown"
    is_first = bool(apart_j) or kind != "layout"
    return is_known, is_first, found.n_same * apart_j, found.n_same * _excess(pair, *times)


def _excess(pair: Pair, a: float, b: float) -> float:
    """What the side that takes more as a whole takes more here; the difference if that is not known."""
    slow = slow_side(pair.whole)
    return abs(a - b) if not slow else a - b if slow == "a" else b - a


def parted(pair: Pair) -> Cause:
    """Where functions begin to compute something else: the first operators whose results have no equal partners."""
    firsts = [
        next((capture.ops[i] for i in sorted(rest) if capture.ops[i].outputs and not capture.ops[i].is_view), None)
        for capture, rest in zip(pair.captures, (pair.matching.a_rest, pair.matching.b_rest))
    ]
    told = [
        f"{op.name} of {letter}" + (f" ({op.lines[0].file}:{op.lines[0].line})" if op.lines else "")
        for letter, op in zip("AB", firsts)
        if op is not None
    ]
    what = (
        f"the functions part at {' and '.join(told)}: what they compute from there on is not equal"
        if told
        else "the functions return what is not equal, and it is not known where they part"
    )
    a_line, b_line = (op.lines[0] if op is not None and op.lines else None for op in firsts)
    return Cause(
        "unknown", what, a_line, b_line,
        "make the outputs equal first, or allow their difference by a tolerance",
    )  # fmt: skip


def region_s(pair: Pair, side: int, region: Region) -> float | None:
    """Seconds of one side's operators in a call, by the timing pass."""
    timing = pair.timings[side]
    ops = region.a_ops if side == 0 else region.b_ops
    return None if timing is None else sum(timing.op_us.get(op, 0.0) for op in ops) / 1e6


def measured_group(pair: Pair, group: list[Region], is_only: bool) -> list[Found]:
    """Measure the first of regions that run the same, and find out why its sides differ: what is found is of all.

    is_only : no other region differs. If it has all work, it is the whole, which was measured.
    """
    first = replace(_measured_region(pair, group[0], is_only), n_same=len(group))
    if len(group) == 1:
        return [first]
    note = "; ".join(filter(None, [first.note, f"{len(group)} regions run the same, and the first stands for them"]))
    found, lines = [replace(first, note=note)], _lines(pair, group[0])
    for other in group[1:]:
        is_loop = _lines(pair, other) == lines  # else layers are written out, each on its own lines
        cause = first.cause if is_loop or first.cause is None else replace(first.cause, a_line=None, b_line=None)
        found.append(replace(first, region=other, cause=cause, note=note))
    return found


def _lines(pair: Pair, region: Region) -> list[object]:
    sides = zip(pair.captures, (region.a_ops, region.b_ops))
    return [capture.ops[i].lines[:1] for capture, ops in sides for i in ops]


def _measured_region(pair: Pair, region: Region, is_only: bool) -> Found:
    comparison, alone, note = pair.whole, None, ""
    said = pair.said
    if not (is_only and _is_all(pair, region)):
        comparison, alone, note = _measured(pair, region)
        said = _said(pair, region, comparison, alone, note)
    if pair.is_by_time:
        slow = slow_in(pair, region, is_only)
        cause = causes(*pair.captures, region, *pair.timings, pair.hosts, slow=slow or slow_side(pair.whole))
        return Found(region, comparison, alone, _by_time(said, slow), blamed(cause, slow), note)
    slow = slow_side(comparison) if alone is None else "ab"[alone.side]
    if not slow and None in pair.timings:  # as of JAX: nothing is known of the region but what the whole takes
        slow = slow_side(pair.whole)
    cause = causes(*pair.captures, region, *pair.timings, pair.hosts, slow=slow)
    return Found(region, comparison, alone, said, cause, note)


def _by_time(said: Verdict, slow: str) -> Verdict:
    told = f"{slow.upper()} surely takes longer" if slow else "neither side surely takes longer"
    return replace(said, reason=f"{told}; energy was not measured: {said.reason}")


def _said(pair: Pair, region: Region, comparison: Comparison | None, alone: Alone | None, note: str) -> Verdict:
    if comparison is not None:
        return verdict(comparison.saved, comparison.time_ratio, pair.outputs_equal, pair.band)
    if alone is None or alone.call_j is None:
        return Verdict(UNKNOWN, note.removeprefix("not measured: ") or "only times were asked for")
    if not pair.outputs_equal:
        return Verdict(UNKNOWN, "the other side does nothing here, and outputs differ")
    if region.is_preparation:
        return Verdict(TRADE_OFF, "the other side does nothing here, but may do more where this is used")
    return Verdict(WASTE, "the other side does nothing here")


def _measured(pair: Pair, region: Region) -> tuple[Comparison | None, Alone | None, str]:
    if pair.meter is None:
        return None, None, ""  # the timing pass has its times
    try:
        return _replayed(pair, region)
    except DeviceError:
        raise
    except Exception as error:  # of PyTorch, such as no memory left
        return None, None, f"not measured: it failed: {sentence(error)}"
    finally:
        pair.engine.release()


def _is_all(pair: Pair, region: Region) -> bool:
    """Whether a region has all operators that do work."""
    for side, ops in enumerate((region.a_ops, region.b_ops)):
        own = pair.captures[side].ops
        if any(not op.is_view and op.index not in ops for op in own):
            return False
    return True


def _replayed(pair: Pair, region: Region) -> tuple[Comparison | None, Alone | None, str]:
    """Both sides compared, replayed; or one side alone, if the other does nothing; or why neither was measured."""
    if not pair.has_time:
        return None, None, "not measured: the deadline was reached"
    works: list[Work | None] = []
    for letter, capture, numbers in zip("AB", pair.captures, (region.a_ops, region.b_ops)):
        ops = [capture.ops[i] for i in numbers]
        if all(op.is_view for op in ops):
            works.append(None)
            continue
        replay = replayable(ops, capture)
        if isinstance(replay, Refused):
            return None, None, f"not measured: {letter}: {replay.reason}"
        works.append(of_replay(replay))
    a, b = works
    if a is not None and b is not None:
        return pair.compare(a, b, f"region at {region.a_ops[0]} of A, {region.b_ops[0]} of B"), None, ""
    work = a or b
    if work is None:
        return None, None, "not measured: views run no kernel"
    side = 0 if a is not None else 1
    block = measured.block(work, pair.meter, pair.engine, pair.seconds, f"region of {'AB'[side]} alone", "AB"[side])
    pair.blocks.append(block)
    return None, Alone(side, block.call_j), ""
