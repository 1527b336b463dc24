"""Named ways in which one tensor is in a larger one: repeated, padded, as a slice; and several that make up one.

A fused query-key-value product holds three tensors as slices, grouped heads are repeated, a padded batch has constant
borders. Axes, start and stop are those of the larger tensor. The smaller one may be permuted and reshaped besides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import hypot, isclose, isfinite, isqrt, prod, sqrt
from operator import mul
from typing import Any

import numpy as np

from gpubloat.energy.match.equivalence import Equivalence, allowed_error, equivalent
from gpubloat.energy.match.fingerprint import Fingerprint, fingerprint, is_ambiguous, kind_of
from gpubloat.energy.match.layouts import agree, fitting, positions
from gpubloat.energy.match.repeats import MOST, atoms, flat, once, packed
from gpubloat.energy.match.tolerance import ELEMENT

Array = np.ndarray[Any, Any]
_MOST_STARTS = 1 << 17  # places that a slice can begin at
_MOST_STEPS = 16  # of them, if the slice may be permuted


@dataclass(frozen=True)
class Extension:
    """How a large tensor holds a smaller one.

    how : "expand" (each `block` of elements along `axis` comes `times` times in a row), "padding" (start to stop of
    `axis`, the rest is `fill`; `boxes` has start and stop of every axis, and `axis` is None if several are padded) or
    "slice" (start to stop of `axis`, the rest is something else).
    inner : how the small tensor became that part.
    """

    how: str
    inner: Equivalence
    axis: int | None = None
    start: int | None = None
    stop: int | None = None
    times: int | None = None
    block: int | None = None
    fill: complex | None = None
    boxes: tuple[tuple[int, int], ...] = ()

    @property
    def error(self) -> float:
        return self.inner.error

    @property
    def is_ambiguous(self) -> bool:
        return self.inner.is_ambiguous

    @property
    def place(self) -> tuple[object, ...]:
        """All but values: the same on another input."""
        return (self.how, self.axis, self.start, self.stop, self.times, self.block, self.boxes)

    @property
    def is_whole(self) -> bool:
        """Each of the two tensors can be made from the other."""
        return self.how != "slice"

    def __str__(self) -> str:
        if self.how == "expand":
            return f"expand axis {self.axis} {self.times} times, in blocks of {self.block}"
        if self.how == "slice":
            return f"slice {self.start}:{self.stop} of axis {self.axis}"
        return "padding around " + ", ".join(f"{a}:{b}" for a, b in self.boxes) + f" with {self.fill}"


@dataclass(frozen=True)
class Concatenation:
    """A tensor made of others. parts : (which, start, stop) along `axis`, in order, without gap or overlap."""

    axis: int
    parts: tuple[tuple[int, int, int], ...]
    error: float

    @property
    def how(self) -> str:
        return "concatenation"

    def __str__(self) -> str:
        return f"concatenation along axis {self.axis} of " + ", ".join(f"#{i} {a}:{b}" for i, a, b in self.parts)


def extended(
    small: Array,
    large: Array,
    tolerance: float | None = None,
    *,
    prints: tuple[Fingerprint, Fingerprint] | None = None,
) -> Extension | None:
    """How `large` holds `small`: expand, padding or slice, whichever fits first; None if it does not.

    None too where `small` is ambiguous (a few elements, or all the same): it would be found everywhere.
    prints : of small and large, where they are known.
    """
    if not 0 < small.size < large.size or kind_of(small) != kind_of(large):
        return None
    known, whole = prints or (fingerprint(small), fingerprint(large))
    allowed = allowed_error(small, large, tolerance)
    if is_ambiguous(known, allowed):
        return None
    large = packed(large)
    room = (1 + 2 * ELEMENT * allowed) * (1 + 1e-9)
    beyond = ELEMENT * allowed * (known.rms + whole.largest)
    if known.norm > whole.norm * room or known.least < whole.least - beyond or known.greatest > whole.greatest + beyond:
        return None
    found = None
    if isclose(whole.norm, known.norm * sqrt(large.size / small.size), rel_tol=2 * allowed + 1e-9):
        found = _repeated(small, large, tolerance)
    if found is None:
        for fill in dict.fromkeys((flat(large)[-1].item(), flat(large)[0].item())):
            if found is None and _may_fill(fill, known, whole, allowed):
                found = _padded(small, large, fill, tolerance)
    return found or next(slices(small, large, tolerance, rms=known.rms), None)


def _may_fill(fill: complex, small: Fingerprint, large: Fingerprint, allowed: float) -> bool:
    """Whether all that is in the larger one besides may have this value."""
    rest = large.n - small.n
    if not isfinite(abs(fill)):
        others = [getattr(large, name) - getattr(small, name) for name in ("n_nan", "n_plus", "n_minus")]
        return bool(max(others) >= rest)
    wanted = hypot(small.norm, abs(fill) * sqrt(rest))
    return isclose(wanted, large.norm, rel_tol=2 * allowed + 1e-9)


def slices(
    small: Array, large: Array, tolerance: float | None = None, *, rms: float | None = None
) -> Iterator[Extension]:
    """Every place of `large` where `small` lies along one axis. rms : of `small`, where it is known."""
    allowed = allowed_error(small, large, tolerance)
    small = packed(small)
    slack, floor = ELEMENT * allowed, fingerprint(small).rms if rms is None else rms
    for axis, length in enumerate(large.shape):
        width, rest = divmod(small.size * length, large.size)
        if rest or not 0 < width < length or length - width + 1 > _MOST_STARTS:
            continue
        for start in _starts(small, large, axis, width, slack, floor):
            inner = equivalent(small, large[_along(axis, start, start + width)], tolerance)
            if inner is not None:
                yield Extension("slice", inner, axis, start, start + width)


def _along(axis: int, start: int, stop: int) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, slice(start, stop))


def _starts(small: Array, large: Array, axis: int, width: int, slack: float, floor: float) -> Iterator[int]:
    """Where a slice that may equal `small` begins, by samples.

    In the order of `small` itself, its elements are looked up at every place at once. Permuted, only whole steps are
    tried, as chunks and heads are cut.
    """
    length, inner = large.shape[axis], prod(large.shape[axis + 1 :])
    flat_small, flat_large = flat(small), flat(large)

    def part(start: Array | int, index: Array) -> Array:
        """Elements of a slice by their flat index in it."""
        outer, rest = np.divmod(index, width * inner)
        return np.asarray(flat_large[(outer * length + start) * inner + rest])

    where = positions(small.size, 16)
    begins = np.arange(length - width + 1)
    fits = agree(part(begins[:, None], where), flat_small[where], slack, floor).all(axis=1)
    yield from (int(i) for i in begins[fits])
    steps = range(0, length - width + 1, width)
    if fits.any() or len(steps) > _MOST_STEPS:
        return
    box = (*large.shape[:axis], width, *large.shape[axis + 1 :])
    for start in steps:
        read = partial(part, start)
        if (
            next(fitting(small.shape, flat_small.__getitem__, box, read, slack, floor, is_splitting=False), None)
            is not None
        ):
            yield start


def _repeated(small: Array, large: Array, tolerance: float | None) -> Extension | None:
    times, rest = divmod(large.size, small.size)
    if rest:
        return None
    allowed = allowed_error(small, large, tolerance)
    for axis, before, block, shape in _repetitions(large.shape, times):
        first = _first_copy(large, before, times, allowed)
        if first is None:
            continue
        inner = equivalent(small, packed(first).reshape(shape), tolerance)
        if inner is not None:
            return Extension("expand", inner, axis, times=times, block=block)
    return None


def _repetitions(shape: tuple[int, ...], times: int) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
    """(axis, elements before the copies, block, shape without them) that a shape allows. (before, times, after): the
    copies of an element are `after` elements apart."""
    for axis, length in enumerate(shape):
        before = prod(shape[:axis])
        own, rest = divmod(length, times)
        if not rest:
            less = (*shape[:axis], own, *shape[axis + 1 :])
            small = [n for n in range(1, isqrt(own) + 1) if own % n == 0]
            for block in sorted({*small, *(own // n for n in small)}):  # divisors
                yield axis, before * (own // block), block, less
        elif length > 1 and times % length == 0 and prod(shape[axis:]) % times == 0:
            # Over this axis and the next ones, as a mask over batch and heads.
            yield axis, before, 1, (before, prod(shape[axis:]) // times)


def _first_copy(large: Array, before: int, times: int, allowed: float) -> Array | None:
    """large[:, 0] where `large` has shape (before, times, after); None if the others are not the same as it."""
    shape = before, times, large.size // (before * times)
    where = positions(large.size, 256)
    outer, inner = np.divmod(where, times * shape[2])
    if not _equals_first(flat(large)[where], flat(large)[outer * times * shape[2] + inner % shape[2]], allowed):
        return None
    fine = atoms(large.shape, shape)  # in which nothing that repeats is copied
    if fine is None and large.size > MOST and not all(large.strides):
        return None
    fine = fine or shape
    pieces = large.reshape(fine)
    ahead = accumulate(fine[:-1], mul, initial=1)  # elements before each axis
    first = pieces[tuple(slice(1) if before <= n < before * times else slice(None) for n in ahead)]
    return first if _equals_first(once(pieces), once(first), allowed) else None


def _equals_first(pieces: Array, first: Array, allowed: float) -> bool:
    """Exactly or within rounding."""
    if allowed:
        with np.errstate(invalid="ignore"):
            near = np.abs(pieces - first) <= allowed * np.abs(first)
        return bool((near | (pieces == first) | (np.isnan(pieces) & np.isnan(first))).all())
    return bool((pieces == first).all())


def _padded(small: Array, large: Array, fill: Any, tolerance: float | None) -> Extension | None:
    """What is left when the outermost rows of nothing but `fill` are taken off each axis."""
    own = once(large)
    boxes = _box(own == own if fill != fill else own != fill, large.shape)
    if boxes is None or prod(b - a for a, b in boxes) != small.size:
        return None
    inner = equivalent(small, large[tuple(slice(a, b) for a, b in boxes)], tolerance)
    if inner is None:
        return None
    padded = [i for i, (a, b) in enumerate(boxes) if b - a < large.shape[i]]
    axis, start, stop = (padded[0], *boxes[padded[0]]) if len(padded) == 1 else (None, None, None)
    return Extension("padding", inner, axis, start, stop, fill=fill, boxes=boxes)


def _box(inside: Array, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
    """inside : of each axis that repeats, one element."""
    boxes = []
    for axis, length in enumerate(shape):
        used = np.flatnonzero(inside.any(axis=tuple(i for i in range(inside.ndim) if i != axis)))
        if not used.size:
            return None
        boxes.append((int(used[0]), int(used[-1]) + 1) if inside.shape[axis] == length else (0, length))
    return tuple(boxes)


def concatenation(parts: Sequence[Array], whole: Array, tolerance: float | None = None) -> Concatenation | None:
    """How `whole` is put together from all or some of `parts`, each used once; None if they leave a gap."""
    whole = packed(whole)
    for axis, length in enumerate(whole.shape):
        places: dict[int, tuple[int, int, float]] = {}  # start -> (part, stop, error)
        for i, part in enumerate(parts):
            if not 0 < part.size < whole.size or kind_of(part) != kind_of(whole):
                continue
            for found in slices(part, whole, tolerance):
                if found.axis == axis and found.start is not None and found.stop is not None:
                    places.setdefault(found.start, (i, found.stop, found.error))
        chain, at, used = [], 0, set()
        while at in places and places[at][0] not in used:
            which, stop, error = places[at]
            chain.append((which, at, stop, error))
            used.add(which)
            at = stop
        if at == length and len(chain) > 1:
            return Concatenation(axis, tuple(c[:3] for c in chain), max(c[3] for c in chain))
    return None
