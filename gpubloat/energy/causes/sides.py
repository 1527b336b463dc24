"""One side of a difference: the operators of a region, what they cost, who reads what, and who corresponds to whom."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from math import prod

from gpubloat.energy.capture.records import Capture, Line, Op, TensorInfo
from gpubloat.energy.causes import names
from gpubloat.energy.timing import Kernel, Timing

# Rates for ranking where nothing was timed: about those of an H200.
_BYTES_PER_US = 4e6
_FLOPS_PER_US = {"bf16": 6e8, "fp16": 6e8}
_OTHER_FLOPS_PER_US = 5e7
_MOST = 400  # operators that are aligned exactly; longer lists by the count of each family


@dataclass(frozen=True)
class Side:
    """letter : "A" or "B". ops : of the region, in order. timing : of the whole function, or None."""

    letter: str
    capture: Capture
    ops: tuple[Op, ...]
    timing: Timing | None

    @cached_property
    def works(self) -> tuple[Op, ...]:
        """Operators that run something: no views, no equations that are only another shape."""
        return tuple(op for op in self.ops if is_work(op))

    @cached_property
    def readers(self) -> dict[int, list[Op]]:
        """Tensor -> operators of the whole capture that read it, views too."""
        found: dict[int, list[Op]] = defaultdict(list)
        for op in self.capture.ops:
            for tensor in dict.fromkeys(op.inputs):
                found[tensor].append(op)
        return found

    @property
    def has_kernels(self) -> bool:
        return self.timing is not None and self.timing.source == "kernels"

    def info(self, tensor: int) -> TensorInfo:
        return self.capture.tensors[tensor]

    def infos(self, tensors: Iterable[int]) -> list[TensorInfo]:
        return [self.capture.tensors[t] for t in tensors]

    def us(self, ops: Iterable[Op]) -> float:
        """Microseconds: measured where the operators were timed on a GPU, else guessed from bytes and products."""
        total = 0.0
        for op in ops:
            measured = self.timing.op_us.get(op.index) if self.timing is not None and self.has_kernels else None
            total += self.guess(op) if measured is None else measured
        return total

    def of(self, op: Op) -> tuple[Kernel, ...]:
        """The kernels of an operator; none without a timing on a GPU."""
        return self.timing.of(op.index) if self.timing is not None and self.has_kernels else ()

    def guess(self, op: Op) -> float:
        """Microseconds that an operator would take at the rates above."""
        if not is_work(op):
            return 0.0
        moved = sum(distinct_bytes(t) for t in self.infos((*dict.fromkeys(op.inputs), *op.outputs)))
        rate = _FLOPS_PER_US.get(self.info(op.outputs[0]).dtype if op.outputs else "", _OTHER_FLOPS_PER_US)
        return max(moved / _BYTES_PER_US, self._flops(op) / rate)

    def _flops(self, op: Op) -> float:
        kind = names.family(op.name)
        matrices = [prod(t.shape) for t in self.infos(op.inputs) if len(t.shape) > 1]
        out = prod(self.info(op.outputs[0]).shape) if op.outputs else 0
        if kind == "product" and len(matrices) > 1 and out:
            # M K, K N and M N give K; of a batch, a little too much.
            return float(2 * out * (matrices[-1] * matrices[-2] / out) ** 0.5)
        if kind == "convolution" and len(matrices) > 1:
            return 2.0 * out * matrices[1] / max(self.info(op.inputs[1]).shape[0], 1)
        if kind == "attention" and len(matrices) > 1:
            return 4.0 * out * self.info(op.inputs[1]).shape[-2]
        return 0.0

    def sources(self, op: Op) -> list[int]:
        """What an operator reads, and what those are views of; not the old value of what it writes."""
        found: dict[int, None] = {}
        open_ = [t for t in op.inputs if t not in op.writes]
        while open_:
            tensor = open_.pop(0)
            if tensor not in found:
                found[tensor] = None
                maker = self.maker(tensor)
                if maker is not None and not is_work(maker):
                    open_ += maker.inputs
        return list(found)

    def maker(self, tensor: int) -> Op | None:
        index = self.capture.producer.get(tensor)
        return None if index is None else self.capture.ops[index]

    def users(self, tensors: Iterable[int]) -> list[Op]:
        """Operators that run something on these tensors or on views of them, in order."""
        found: dict[int, Op] = {}
        open_, seen = list(tensors), set()
        while open_:
            tensor = open_.pop()
            for op in self.readers.get(tensor, ()) if tensor not in seen else ():
                if is_work(op):
                    found[op.index] = op
                else:
                    open_ += op.outputs
            seen.add(tensor)
        return [found[i] for i in sorted(found)]


def is_work(op: Op) -> bool:
    return not op.is_view and not (op.name.startswith("jax::") and names.base(op.name) in names.FREE)


def distinct_bytes(tensor: TensorInfo) -> float:
    """Bytes of memory behind a tensor; an expanded axis is there once."""
    if tensor.strides is None:
        return tensor.n_bytes
    repeats = prod(n for n, stride in zip(tensor.shape, tensor.strides) if stride == 0)
    return tensor.n_bytes / repeats if repeats else 0.0


def key(side: Side, op: Op) -> tuple[object, ...]:
    """What makes two operators the same: name, arguments without ids, shapes, strides, types."""
    infos = [[(t.shape, t.strides, t.dtype, t.device) for t in side.infos(ids)] for ids in (op.inputs, op.outputs)]
    return (names.base(op.name), re.sub(r"%\d+", "%", op.arguments), *map(tuple, infos))


def leftover(slow: Side, fast: Side) -> tuple[list[Op], list[Op]]:
    """Operators of each side without a same one on the other."""
    counts = [Counter(key(side, op) for op in side.works) for side in (slow, fast)]
    both = counts[0] & counts[1]
    found = []
    for side in (slow, fast):
        left = Counter(both)
        own = []
        for op in side.works:
            k = key(side, op)
            if left[k]:
                left[k] -= 1
            else:
                own.append(op)
        found.append(own)
    return found[0], found[1]


def aligned(slow: Side, fast: Side) -> list[tuple[Op, Op]]:
    """Operators of one family that correspond, in order."""
    own, others = ([names.family(op.name) for op in side.works] for side in (slow, fast))
    if own == others:
        return list(zip(slow.works, fast.works))
    if max(len(own), len(others)) <= _MOST:
        blocks = SequenceMatcher(None, own, others, autojunk=False).get_matching_blocks()
        pairs = [(slow.works[m.a + i], fast.works[m.b + i]) for m in blocks for i in range(m.size)]
    else:
        pairs = []
    taken = [{pair[i].index for pair in pairs} for i in (0, 1)]
    waiting: dict[str, list[Op]] = defaultdict(list)
    for name, op in zip(others, fast.works):
        if op.index not in taken[1]:
            waiting[name].append(op)
    for name, op in zip(own, slow.works):
        if op.index not in taken[0] and waiting[name]:
            pairs.append((op, waiting[name].pop(0)))
    return sorted(pairs, key=lambda pair: pair[0].index)


def counterpart(slow: Side, fast: Side, op: Op) -> Op | None:
    """The operator of the other side that does without `op`: what uses its result there, else what made its input."""
    whole = [Side(s.letter, s.capture, s.capture.ops, s.timing) for s in (slow, fast)]
    partner = {one.index: other for one, other in aligned(whole[0], whole[1])}
    around = slow.users(op.outputs)
    around += [maker for t in slow.sources(op) if (maker := slow.maker(t)) is not None and is_work(maker)]
    found = next((partner[near.index] for near in around if near.index in partner), None)
    return found or next(iter(fast.works or fast.ops or fast.capture.ops), None)


def lines(one: Op | None, other: Op | None) -> tuple[Line | None, Line | None]:
    """The innermost frames in which two operators differ; the innermost ones if they came the same way."""
    left, right = (op.lines if op is not None else () for op in (one, other))
    for x, y in zip(left, right):
        if (x.file, x.line) != (y.file, y.line):
            return x, y
    return (left[0] if left else None), (right[0] if right else None)


def in_bytes(n: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"


def in_time(us: float) -> str:
    """2900.0 -> "2.9 ms"."""
    return f"{us:.3g} us" if us < 999.5 else f"{us / 1e3:.3g} ms" if us < 999.5e3 else f"{us / 1e6:.3g} s"


def named(ops: Iterable[Op], most: int = 4) -> str:
    """ "aten::clone.default x 2, aten::cat.default", in the order they come."""
    counts = Counter(op.name for op in ops)
    shown = [name if n == 1 else f"{name} x {n}" for name, n in list(counts.items())[:most]]
    return ", ".join(shown) + (", ..." if len(counts) > most else "")
