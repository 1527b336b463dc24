"""Redundant rows: results that are computed and then cut away, repeated, or never chosen."""

from __future__ import annotations

from math import prod
from weakref import WeakKeyDictionary

import numpy as np

from gpubloat.energy.capture.records import Capture, Op
from gpubloat.energy.causes import names
from gpubloat.energy.causes.findings import Finding
from gpubloat.energy.causes.sides import Side, aligned, counterpart, is_work, named
from gpubloat.energy.match.extensions import Extension, extended, slices
from gpubloat.energy.match.tolerance import tolerance_of

_PART = 0.05  # of the time of a side: less explains nothing
_FEW = 16


def found(slow: Side, fast: Side) -> list[Finding]:
    return [*_larger(slow, fast), *_unused(slow, fast)]


def _larger(slow: Side, fast: Side) -> list[Finding]:
    """Operators whose result holds that of the other side as a part of it."""
    pairs = []
    for one, other in aligned(slow, fast):
        if names.base(one.name) in names.MOVERS or not one.outputs or not other.outputs:
            continue
        if _made(slow, names.family(one.name)) <= _made(fast, names.family(one.name)):
            continue  # in several operators where this side has one
        how = _holds(slow, one.outputs[0], fast, other.outputs[0])
        if how is not None:
            pairs.append((one, other, how))
    if not pairs:
        return []
    one, other, how = max(pairs, key=lambda pair: slow.us([pair[0]]))
    large, small = slow.info(one.outputs[0]), fast.info(other.outputs[0])
    many = prod(large.shape) / prod(small.shape)
    evidence = (
        f"{one.name} of {slow.letter} computed {large.shape} where {other.name} of {fast.letter} computed "
        f"{small.shape} ({many:.3g} times the elements): {_said(how)}"
    )
    us = max(0.0, sum(slow.us([x]) - fast.us([y]) for x, y, _ in pairs))
    remedy = {
        "slice": "take the rows that are needed before computing, not after",
        "padding": "compute without the padding, or pad less",
    }.get(how, "compute once and repeat the result")
    return [Finding("redundant rows", evidence, remedy, one, other, us, 0.85)]


def _made(side: Side, family: str) -> int:
    """Elements that the operators of a family computed."""
    return sum(
        prod(side.info(op.outputs[0]).shape) for op in side.works if op.outputs and names.family(op.name) == family
    )


def _said(how: str) -> str:
    return {
        "slice": "the result is a part of it",
        "padding": "the rest is padding",
        "": "the rest is cut away afterwards",
    }.get(how, "the same rows are computed several times")


def _holds(slow: Side, large: int, fast: Side, small: int) -> str | None:
    """How the result of the slow side holds the other: "slice", "padding", "expand", "tile"; "" by shapes alone."""
    one, other = slow.info(large), fast.info(small)
    n, m = prod(one.shape), prod(other.shape)
    if not _FEW <= m < n:
        return None
    x, y = slow.capture.value(large), fast.capture.value(small)
    if x is None or y is None:
        differing = [i for i, (p, q) in enumerate(zip(one.shape, other.shape)) if p != q]
        is_cut = len(one.shape) == len(other.shape) and len(differing) == 1 and _only_sliced(slow, large)
        return "" if is_cut else None
    limit = tolerance_of(one.dtype, other.dtype)
    if x.dtype.kind != y.dtype.kind:
        return None
    how: Extension | None = next(slices(y, np.ascontiguousarray(x), limit), None) or extended(y, x, limit)
    return None if how is None or how.is_ambiguous else how.how


def _only_sliced(side: Side, tensor: int) -> bool:
    """All that reads a tensor takes a part of it, or sees it in another shape first."""
    if tensor in side.capture.outputs:
        return False
    readers = side.readers.get(tensor, ())
    n = prod(side.info(tensor).shape)
    return bool(readers) and all(
        not is_work(op) and (prod(side.info(op.outputs[0]).shape) < n or _only_sliced(side, op.outputs[0]))
        for op in readers
    )


def _unused(slow: Side, fast: Side) -> list[Finding]:
    """Operators whose results reach no output: nobody reads them, or a choice never takes them."""
    dead = _dead(slow)
    us = slow.us(dead) - fast.us(_dead(fast))
    if not dead or us < _PART * slow.us(slow.works):
        return []
    dead.sort(key=slow.guess, reverse=True)
    is_chosen = len(_dead(slow, are_choices_known=False)) < len(dead)
    why = "a choice on the values takes none of them" if is_chosen else "no result depends on them"
    evidence = (
        f"{len(dead)} of {len(slow.works)} operators of {slow.letter} ({named(dead)}) computed what is not used: {why}"
    )
    remedy = "compute only the case that is taken: choose before, or fix the choice where it is known"
    if not is_chosen:
        remedy = "leave out what is not used"
    return [
        Finding(
            "redundant rows",
            evidence,
            remedy,
            dead[0],
            counterpart(slow, fast, dead[0]),
            us,
            0.85 if is_chosen else 0.6,
        )
    ]


def _dead(side: Side, are_choices_known: bool = True) -> list[Op]:
    """Operators of the region that lead to no output, nor to a write into what came from outside.

    are_choices_known : what a choice never took is dead too.
    """
    found = _alive.setdefault(side.capture, {})
    if are_choices_known not in found:
        found[are_choices_known] = _leading(side, are_choices_known)
    return [op for op in side.works if op.index not in found[are_choices_known]]


# Of whole captures, and asked for each region: choices read all of their values.
_alive: WeakKeyDictionary[Capture, dict[bool, set[int]]] = WeakKeyDictionary()


def _leading(side: Side, are_choices_known: bool) -> set[int]:
    """Operators of the capture that are not dead; gradients are kept by PyTorch without being outputs."""
    capture = side.capture
    outside = {side.info(t).storage for t in capture.inputs}
    needed = set(capture.outputs)
    alive = set()
    for op in reversed(capture.ops):
        writes = any(side.info(t).storage in outside for t in op.writes)
        is_backward = bool(op.lines) and "backward of" in op.lines[0].function
        if writes or is_backward or needed.intersection(op.outputs):
            alive.add(op.index)
            needed.update(_taken(side, op) if are_choices_known else op.inputs)
            # Memory that is written later has to be there.
            needed.update(op.writes)
    return alive


def _taken(side: Side, op: Op) -> tuple[int, ...]:
    """The inputs that an operator needed; of a choice that always takes the same case, no other."""
    own = names.base(op.name)
    if own not in ("where", "select_n") or len(op.inputs) < 3:
        return op.inputs
    made = side.capture.value(op.outputs[0])
    if made is None or made.size < _FEW:
        return op.inputs
    for case in op.inputs[1:]:
        value = side.capture.value(case)
        if (
            value is not None
            and value.shape == made.shape
            and np.array_equal(value, made, equal_nan=made.dtype.kind in "fc")
        ):
            return (op.inputs[0], case)
    return op.inputs
