"""Layout: the same operator, on tensors that lie otherwise in memory."""

from __future__ import annotations

import numpy as np

from gpubloat.energy.capture.records import Op, TensorInfo
from gpubloat.energy.causes import names
from gpubloat.energy.causes.findings import Finding
from gpubloat.energy.causes.sides import Side, aligned
from gpubloat.energy.causes.switches import Switch
from gpubloat.energy.causes.switches import named as switch_named
from gpubloat.energy.match.equivalence import Array, equivalent
from gpubloat.energy.match.layouts import positions

_MANY = 16  # elements: what is smaller may lie as it likes


def found(slow: Side, fast: Side) -> list[Finding]:
    """Pairs of one operator whose inputs have other orders of axes in memory, or around which a library transforms."""
    pairs = []
    for one, other in aligned(slow, fast):
        if names.essence(one.name) != names.essence(other.name):
            continue
        differing = _differing(slow, one, fast, other)
        transforms = _transforms(slow, one)
        if differing is not None or len(transforms) > len(_transforms(fast, other)):
            pairs.append((one, other, differing, transforms))
    if not pairs:
        return []
    one, other, differing, transforms = max(pairs, key=lambda pair: slow.us([pair[0]]) - fast.us([pair[1]]))
    said = []
    if differing is not None:
        x, y = differing
        said.append(f"read {_shown(x)} in {slow.letter} and {_shown(y)} in {fast.letter}")
    n_transforms = sum(len(t) for *_, t in pairs)
    if transforms:
        said.append(f"ran {n_transforms} kernels in {slow.letter} that only change the layout ({transforms[0]})")
    evidence = f"{one.name} {' and '.join(said)}"
    if len(pairs) > 1:
        evidence += f", and {len(pairs) - 1} more operators likewise"
    us = max(0.0, sum(slow.us([p[0]]) - fast.us([p[1]]) for p in pairs))
    switch = _switch(differing)
    what = switch.setting if switch is not None else f"strides {differing[1].strides}" if differing is not None else ""
    remedy = f"store the input of {one.name} as {fast.letter} has it{': ' + what if what else ''}"
    return [Finding("layout", evidence, remedy, one, other, us, 0.85 if transforms else 0.7, switch)]


def axes_order(tensor: TensorInfo) -> tuple[int, ...] | None:
    """Axes from the outermost in memory to the innermost; () if that is their order, None where it is not known.

    Axes of length 1 and expanded ones are left out, and axes that follow each other in memory count as one, so that
    a reshape of contiguous axes changes nothing.
    """
    if tensor.strides is None:
        return None
    axes = [(stride, n) for stride, n in zip(tensor.strides, tensor.shape) if n > 1 and stride != 0]
    merged: list[tuple[int, int]] = []
    for stride, n in axes:
        if merged and merged[-1][0] == stride * n:
            merged[-1] = (stride, merged[-1][1] * n)
        else:
            merged.append((stride, n))
    order = tuple(sorted(range(len(merged)), key=lambda i: -merged[i][0]))
    return () if order == tuple(range(len(order))) else order


def _differing(slow: Side, one: Op, fast: Side, other: Op) -> tuple[TensorInfo, TensorInfo] | None:
    """The first inputs at the same place that lie differently, or hold the same values in another order of axes."""
    given = [side.infos(op.inputs) for side, op in ((slow, one), (fast, other))]
    for x, y in zip(*given):
        orders = axes_order(x), axes_order(y)
        if x.n_bytes != y.n_bytes or None in orders or min(x.n_bytes, y.n_bytes) < _MANY:
            continue
        if orders[0] != orders[1] or _is_permuted(slow.capture.value(x.id), fast.capture.value(y.id)):
            return x, y
    return None


def _is_permuted(x: Array | None, y: Array | None) -> bool:
    if x is None or y is None or [n for n in x.shape if n > 1] == [n for n in y.shape if n > 1]:
        return False
    where = positions(x.size)
    if x.size != y.size or np.array_equal(x.reshape(-1)[where], y.reshape(-1)[where]):
        return False
    how = equivalent(x, y)
    return how is not None and how.how == "permute" and not how.is_ambiguous


def _transforms(side: Side, op: Op) -> list[str]:
    if names.base(op.name) in names.MOVERS | names.CASTS:
        return []
    return [names.short(kernel.name) for kernel in side.of(op) if names.is_transform(kernel.name)]


def _switch(differing: tuple[TensorInfo, TensorInfo] | None) -> Switch | None:
    if differing is None or len(differing[1].shape) != 4 or axes_order(differing[1]) is None:
        return None
    strides = differing[1].strides
    return switch_named("channels_last") if strides is not None and strides[1] == 1 else None


def _shown(tensor: TensorInfo) -> str:
    return f"{tensor.shape} with strides {tensor.strides}"
