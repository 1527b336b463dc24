"""Extra copies: operators that only move elements which were there before, and which the other side does without."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from gpubloat.energy.capture.records import Op
from gpubloat.energy.causes import names
from gpubloat.energy.causes.findings import Finding
from gpubloat.energy.causes.sides import Side, counterpart, distinct_bytes, in_bytes, is_work, named
from gpubloat.energy.match.equivalence import equivalent
from gpubloat.energy.match.extensions import extended
from gpubloat.energy.match.tolerance import tolerance_of

_FEW = 16  # elements: fewer are equal by chance, and cost nothing
_PART = 0.02  # of the time of a region: less explains nothing


@dataclass(frozen=True)
class Copy:
    """An operator that only moves. source : what it repeats, times : how often. n_bytes : read and written."""

    op: Op
    source: int
    times: int
    n_bytes: float


def found(slow: Side, fast: Side) -> list[Finding]:
    """At most one finding: all copies that the fast side has not."""
    own = copies(slow)
    extra = _without(own, copies(fast) if own else [], slow, fast)
    if not extra:
        return []
    ops = [copy.op for copy in extra]
    us = slow.us(ops)
    if us < _PART * slow.us(slow.works):
        return []
    moved = sum(copy.n_bytes for copy in extra)
    first = extra[0]
    many = max(copy.times for copy in extra)
    what = f", repeated up to {many} times" if many > 1 else ""
    evidence = (
        f"{len(ops)} operator{'s' if len(ops) > 1 else ''} of {slow.letter} ({named(ops)}) made nothing but copies of "
        f"what was there{what}: {in_bytes(moved)} read and written that {fast.letter} does not move"
    )
    is_jax = slow.capture.framework == "jax"
    if is_jax:
        evidence += "; equations as traced, which XLA may fuse into others"
    remedy = _remedy(slow, first)
    return [
        Finding("extra copy", evidence, remedy, first.op, counterpart(slow, fast, first.op), us, 0.3 if is_jax else 0.9)
    ]


def copies(side: Side) -> list[Copy]:
    """All operators of a side that only move elements."""
    return [copy for op in side.works if (copy := _as_copy(side, op)) is not None]


def _as_copy(side: Side, op: Op) -> Copy | None:
    own = names.base(op.name)
    if len(op.outputs) != 1 or (own not in names.MOVERS and own not in names.CASTS):
        return None
    out = side.info(op.outputs[0])
    n = prod(out.shape)
    sources = [t for t in side.sources(op) if side.info(t).dtype == out.dtype and prod(side.info(t).shape) >= _FEW]
    if n < _FEW or any(side.info(t).device != out.device for t in op.inputs if prod(side.info(t).shape) >= _FEW):
        return None
    if _is_needed(side, op, sources):
        return None
    whole = [t for t in sources if prod(side.info(t).shape) == n]
    if own in names.COPIES or own in names.CASTS:
        if not whole:
            return None
        # Of an expanded tensor, the memory behind it is what was there before.
        times = round(max(side.info(t).n_bytes / max(distinct_bytes(side.info(t)), 1) for t in whole))
        return Copy(op, whole[0], times, out.n_bytes / times + out.n_bytes)
    return _by_value(side, op, sources)


def _by_value(side: Side, op: Op, sources: list[int]) -> Copy | None:
    out = side.info(op.outputs[0])
    made = side.capture.value(out.id)
    for tensor in sources:
        info = side.info(tensor)
        value = side.capture.value(tensor)
        if made is None or value is None or made.size % max(value.size, 1):
            continue
        if value.size == made.size:
            is_same = np.array_equal(made.reshape(-1), value.reshape(-1))
            if is_same or equivalent(value, made, tolerance_of(out.dtype)) is not None:
                return Copy(op, tensor, 1, info.n_bytes + out.n_bytes)
        else:
            how = extended(value, made, tolerance_of(out.dtype))
            if how is not None and how.times is not None:
                return Copy(op, tensor, how.times, info.n_bytes + out.n_bytes)
    return _parted_again(side, op)


def _parted_again(side: Side, op: Op) -> Copy | None:
    """Tensors that are joined and then only read in the parts that they were."""
    if names.base(op.name) not in ("cat", "concatenate", "stack") or op.outputs[0] in side.capture.outputs:
        return None
    parts = [view.outputs[0] for view in side.readers.get(op.outputs[0], ()) if len(view.outputs) == 1]
    readers = side.readers.get(op.outputs[0], ())
    if not readers or len(parts) != len(readers) or any(is_work(reader) for reader in readers):
        return None
    given = [side.capture.value(t) for t in op.inputs]
    for part in parts:
        value = side.capture.value(part)
        if value is None or not any(
            g is not None and g.size == value.size and (g == value.reshape(g.shape)).all() for g in given
        ):
            return None
    n = side.info(op.outputs[0]).n_bytes
    return Copy(op, op.inputs[0], 1, 2 * n)


def _is_needed(side: Side, op: Op, sources: list[int]) -> bool:
    """The source is written over while the copy is still read: without it, the old value would be lost."""
    storages = {side.info(t).storage for t in sources} - {side.info(t).storage for t in op.outputs}
    readers = side.users(op.outputs)
    last = max([reader.index for reader in readers], default=-1)
    if set(op.outputs) & set(side.capture.outputs):
        last = len(side.capture.ops)
    return any(
        side.info(t).storage in storages for later in side.capture.ops[op.index + 1 : last + 1] for t in later.writes
    )


def _without(slow: list[Copy], fast: list[Copy], one: Side, other: Side) -> list[Copy]:
    """Copies of the slow side that the fast side has no equal of: as many bytes, by whatever operator.

    Where the slow side has more of one size, those of the same values are taken off first.
    """
    left = list(slow)
    more = []
    for copy in fast:
        alike = [c for c in left if _size(one, c) == _size(other, copy)]
        same = next((c for c in alike if _is_same(one, c, other, copy)), None)
        if same is not None:
            left.remove(same)
        else:
            more.append(copy)
    for copy in more:
        last = next((c for c in reversed(left) if _size(one, c) == _size(other, copy)), None)
        if last is not None:
            left.remove(last)
    return left


def _size(side: Side, copy: Copy) -> int:
    return side.info(copy.op.outputs[0]).n_bytes


def _is_same(one: Side, x: Copy, other: Side, y: Copy) -> bool:
    left, right = one.info(x.op.outputs[0]), other.info(y.op.outputs[0])
    value, partner = one.capture.value(left.id), other.capture.value(right.id)
    if value is None or partner is None:
        return False
    return equivalent(value, partner, tolerance_of(left.dtype, right.dtype)) is not None


def _remedy(side: Side, copy: Copy) -> str:
    own = names.base(copy.op.name)
    if own in ("cat", "concatenate", "stack"):
        return "keep the tensor joined, and part it once after the last block that works on all of it"
    if copy.times > 1 or own in ("repeat", "expand_copy", "broadcast_in_dim"):
        return "let the operator that follows read shared values (broadcasting, or enable_gqa=True of attention)"
    if copy.op.writes:
        return "use the result where it is, or have it written into the buffer by the operator that makes it (out=)"
    if own == "repeat_interleave":
        return "leave the repetition out where it repeats once"
    users = side.users(copy.op.outputs)
    reader = f"{users[0].name} reads" if users else "readers take"
    return f"leave the copy out: {reader} the tensor with the strides it has"
