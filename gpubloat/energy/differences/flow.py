"""Two functions that should compute the same: which takes more energy, in which operators, why, and what saves it.

Both are captured and matched; then both are measured in turn (`compare`), whole and in the regions whose operators
differ. A cause is sought by what both did, not by what they are called; the fix that it names is measured, too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from gpubloat.energy import blocks as measured
from gpubloat.energy.capture import Capture, capture
from gpubloat.energy.causes import Cause, causes
from gpubloat.energy.compare import Comparison
from gpubloat.energy.differences.blame import between_operators, is_fair, scatter_note, slow_side, time_told
from gpubloat.energy.differences.fix import fix
from gpubloat.energy.differences.pair import Pair
from gpubloat.energy.differences.regions import Found, alike, measured_group, parted, weight
from gpubloat.energy.differences.rows import comparison_row, region_row
from gpubloat.energy.engines import Engine, engine_for
from gpubloat.energy.match.regions import match
from gpubloat.energy.measuring import failure_named, opened_meter, used_device
from gpubloat.energy.meter import Meter, NotMeasured
from gpubloat.energy.progress import Told, shown
from gpubloat.energy.statistics import LEAST_BLOCKS, NO_DIFFERENCE, TRADE_OFF, WASTE, Saved, Verdict, null_band, verdict
from gpubloat.energy.timing import Timing
from gpubloat.energy.timing import time as timed
from gpubloat.errors import GpubloatError, sentence
from gpubloat.run import Run, RunWriter, provenance, refuse_overwrite

DEADLINE_S = 300.0
TABLES = ["comparisons", "regions", "blocks"]
_CHANGE_OUTPUTS = ("precision", "input data")  # causes that come with other outputs
_TIMES_S, _TIMES_BLOCKS = 0.15, 10  # where only times are taken: 6 s in all; many blocks tell their spread
METHOD = {
    "match": "tensors of both are equal if their elements are, up to the order of axes, on two inputs if there are two",
    "energy": "blocks A B B A, power by the slope of the energy counter between ticks, of the whole board; "
    "Student's t interval of the log ratios",
    "saved": "1 - E_fast / E_slow",
    "verdict": "waste: the lower end of the share saved is over 5 % and over what A against A differs by, outputs are "
    "equal, and the time is at most 1 % longer",
    "time": "where energies are not known, the side that takes longer is to blame, if surely by over 5 % in blocks "
    "A B B A; in a region, if the middle halves of its repeats are so far apart",
    "cause": "rules on operators, strides, types, values and kernels of both sides; none knows what it is looking at",
}


def diff(
    a: Callable[..., Any],
    b: Callable[..., Any],
    *args: Any,
    b_args: tuple[Any, ...] | None = None,
    again: tuple[tuple[Any, ...], tuple[Any, ...]] | None = None,
    tolerance: float | None = None,
    meter: Meter | None = None,
    engine: Engine | None = None,
    n_blocks: int | None = None,
    seconds: float | None = None,
    deadline_s: float = DEADLINE_S,
    band: float | None = None,
    times_only: bool = False,
    names: tuple[str, str] | None = None,
    subject: str | None = None,
    case: str = "",
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: bool = False,
    command: str = "gpubloat.energy.diff",
) -> Run:
    """Compare ``a(*args)`` with ``b(*args)``.

    Takes 34 s for the whole functions, as much for A against itself, for each region that differs (of those that run
    the same, as layers do, for one; most difference in time first, until the deadline) and for the fix. Without
    energies, 10 s or a little more: then times say which side is slow, if one takes surely over 5 % more, and why.

    Parameters
    ----------
    b_args : arguments of B if they are not those of A, as for another framework: PyTorch and JAX are measured in one
        process, both as called. Then XLA_PYTHON_CLIENT_PREALLOCATE=false leaves PyTorch memory.
    again : arguments of both sides of a second run, with other values: what is equal on one input by coincidence is not
        equal on two.
    tolerance : relative error allowed between real outputs; default, by their types.
    meter, engine, seconds, times_only, out, force : as in `measure`.
    n_blocks : of `compare`; default 3, and 10 if only times are taken.
    band : what A against A differed by, measured before in this session; default, it is measured here.
    names, subject, case : what the tables call both sides, and the pair. progress : say on stderr what is being done.

    Returns
    -------
    Run with comparisons (one row), regions and blocks. Its provenance has `verdict`, `joules`, `idle_w`, `meter`.

    Raises
    ------
    As `measure`.
    """
    if out is not None:
        refuse_overwrite(Path(out), force)
    if n_blocks is None:
        n_blocks = _TIMES_BLOCKS if times_only else LEAST_BLOCKS
    if not deadline_s > 0 or n_blocks < LEAST_BLOCKS or (seconds is not None and not seconds > 0):
        raise GpubloatError(f"times have to be greater than 0, and there are {LEAST_BLOCKS} blocks at least")
    if band is not None and not 0 <= band < 1:
        raise GpubloatError(f"band is {band}", "the share that A against A differs by: 0 to 1")
    sides = (args, args if b_args is None else b_args)
    names = names or tuple(str(getattr(fn, "__qualname__", type(fn).__name__)) for fn in (a, b))  # type: ignore[assignment]
    assert names is not None
    with contextlib.ExitStack() as held:
        opened = None if times_only else opened_meter(meter, 0, held)
        told = held.enter_context(shown(progress))
        captures = _captured((a, b), sides, held, told)
        second = None if again is None else _captured((a, b), again, held, told, "on another input")
        device, other = map(used_device, captures)
        frameworks = [one.framework for one in captures]
        if len({*frameworks}) > 1 and device != other:
            raise GpubloatError(f"A runs on {device} and B on {other}", "let both use the same device")
        if opened is not None and engine is None and not device.startswith("cuda") and "torch" in frameworks:
            raise GpubloatError("the function uses no GPU", "move its tensors to the GPU, or take times only")
        engine = engine or engine_for(device, *frameworks)
        until_s = engine.clock.now() + deadline_s
        told("matching the tensors of A and B")
        with failure_named("matched"):
            matching = match(*captures, second, tolerance)
        for one in second or ():
            one.close()
        if seconds is None:
            seconds = _TIMES_S if opened is None else measured.window_s(opened, engine)
        fns = (lambda: a(*sides[0]), lambda: b(*sides[1]))
        pair = Pair(fns, sides, captures, matching, engine, opened, seconds, n_blocks, until_s, told, tolerance)
        pair.notes += [*matching.notes, *captures[0].notes, *captures[1].notes]
        pair.notes += [
            f"{letter} changes what it is given: each call finds what the one before left"
            for side, letter in enumerate("AB")
            if pair.changes_inputs(side)
        ]
        if again is None:
            pair.notes.append("tensors were matched on one input only")
        with failure_named("run compiled"):
            pair.notes += [found.note for found in pair.compiled if found.note]
        with RunWriter("energy", TABLES, out, force) as writer:
            row, regions, comparison = _all(pair, band, names, subject or " | ".join(names), case)
            record = provenance(command, METHOD, [])
            card = None if opened is None else opened.describe()
            record |= {"gpus": [] if card is None else [card.get("name")], "meter": card, "joules": comparison.joules}
            record |= {"idle_w": comparison.idle_w, "verdict": row["verdict"], "framework": captures[0].framework}
            record |= {"notes": pair.notes}
            writer.append("comparisons", pd.DataFrame([row]))
            writer.append("regions", pd.DataFrame(regions))
            rows = [block.row() | {"order": order} for order, block in enumerate(pair.blocks)]
            writer.append("blocks", pd.DataFrame(rows))
            return writer.finish(record)


def _captured(
    fns: tuple[Callable[..., Any], Callable[..., Any]],
    args: tuple[tuple[Any, ...], tuple[Any, ...]],
    held: contextlib.ExitStack,
    told: Told,
    how: str = "and keeping its values",
) -> tuple[Capture, Capture]:
    found = []
    for side, fn, given in zip("AB", fns, args):
        told(f"running {side} once {how}")
        try:
            found.append(held.enter_context(capture(fn, *given)))
        except GpubloatError as error:
            raise GpubloatError(f"{side}: {error.message}", error.hint) from error
    return found[0], found[1]


def _all(
    pair: Pair, band: float | None, names: tuple[str, str], subject: str, case: str
) -> tuple[dict[str, Any], list[dict[str, Any]], Comparison]:
    """The row of comparisons, those of regions, and the comparison of the whole functions."""
    if pair.meter is not None:
        pair.told("power of the idle GPU")
        pair.idle = measured.idle(pair.meter, pair.engine, pair.seconds)
    with failure_named("measured"):
        pair.whole = whole = pair.compare(*pair.fns, "whole")
        pair.band = _band(pair, band)
    # After the profiler, launches can be slower for good: nothing but replays is measured behind it, and the fix.
    pair.told("times by operator")
    pair.timings = (_timed(pair, 0), _timed(pair, 1))
    pair.notes += whole.notes
    pair.said = _said(pair, whole)
    only = {"A": pair.matching.outputs.only_a, "B": pair.matching.outputs.only_b}
    if pair.said.verdict == WASTE and isinstance(whole.saved, Saved) and only[whole.saved.wasteful]:
        pair.said = Verdict(TRADE_OFF, f"{whole.saved.wasteful} returns more: the other may have computed less")
    differing = [region for region in pair.matching.regions if not region.is_same]
    found = [one for group in alike(pair, differing) for one in measured_group(pair, group, len(differing) == 1)]
    cause = _cause(pair, found)
    with failure_named("measured with its fix"):
        fixed = fix(pair, cause)
    by_region = {id(one.region): one for one in found}
    rows = [
        region_row(subject, number, pair, region, by_region.get(id(region)))
        for number, region in enumerate(pair.matching.regions)
    ]
    row = comparison_row(pair, whole, cause, names) | {"subject": subject, "case": case} | fixed.row()
    return row | {"notes": "; ".join(dict.fromkeys([*pair.notes, *fixed.notes]))}, rows, whole


def _said(pair: Pair, whole: Comparison) -> Verdict:
    said = verdict(whole.saved, whole.time_ratio, pair.outputs_equal, pair.band)
    told = time_told(whole.times, pair.is_on_gpu)
    if not pair.is_by_time or not told:
        return said
    pair.notes[:0] = filter(None, [scatter_note(whole.times, pair.is_on_gpu)])
    return Verdict(said.verdict, f"{told}; energy was not measured: {said.reason}")


def _timed(pair: Pair, side: int) -> Timing | None:
    if pair.captures[side].framework != "torch":
        return None
    try:
        return timed(pair.fns[side], capture=pair.captures[side])
    except Exception as error:  # of the function, or of a profiler that another one keeps out
        pair.notes.append(f"{'AB'[side]}: times by operator were not taken: {sentence(error)}")
        return None


def _band(pair: Pair, given: float | None) -> float | NotMeasured:
    if given is not None:
        return given
    return NotMeasured("only times were asked for") if pair.meter is None else null_band(pair.null().saved)


def _cause(pair: Pair, found: list[Found]) -> Cause | None:
    """Why the functions differ as wholes: the cause of the region with most of the difference.

    Where times have to tell, only the side that is surely slow is blamed. If energies do not differ, only what concerns
    the host is told: its time may. If outputs differ, and not by what the cause itself is about, the functions do not
    compute the same: then it is told where they part, and no remedy.
    """
    ranked = sorted(found, key=lambda one: weight(pair, one), reverse=True)
    causes_ = [one.cause for one in ranked if one.cause is not None]
    slow = slow_side(pair.whole)
    if not found:
        causes_ = [causes(*pair.captures, None, *pair.timings, pair.hosts, slow=slow)]
    if pair.said.verdict == NO_DIFFERENCE:
        return next((cause for cause in causes_ if cause.kind.startswith("host")), None)
    if not found:
        causes_ = [cause for cause in causes_ if cause.kind != "unknown"]
    if pair.is_by_time:
        causes_ = [cause for cause in causes_ if is_fair(cause, slow)]
        if found and slow and not causes_:
            causes_ = [between_operators(slow)]
    best = next((cause for cause in causes_ if cause.kind != "unknown"), next(iter(causes_), None))
    if pair.outputs_equal is not False or (best is not None and best.kind in _CHANGE_OUTPUTS):
        return best
    return parted(pair)
