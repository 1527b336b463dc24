"""Ways in which the elements of one array can lie in another: axes split, permuted and merged again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations, product
from math import prod
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
Read = Callable[[Array], Array]
MOST_AXES = 6  # 720 permutations; arrays of more axes longer than 1 are compared in order only
_SPLIT_AXES = 5  # after axes were split: 120 permutations
_MOST_SPLITS = 64
_SAMPLES = 64
_FIRST = 4  # samples that most wrong layouts do not survive


@dataclass(frozen=True)
class Layout:
    """``x.reshape(atoms).transpose(axes).reshape(shape)`` is y."""

    atoms: Shape
    axes: tuple[int, ...]
    shape: Shape

    def __call__(self, x: Array) -> Array:
        return self.permuted(x).reshape(self.shape)

    def permuted(self, x: Array) -> Array:
        """The elements in the order of y, but not its shape: that may need a copy."""
        return x.reshape(self.atoms).transpose(self.axes)

    @property
    def is_ordered(self) -> bool:
        """Nothing is permuted: the elements come in the same order."""
        return self.axes == tuple(range(len(self.axes)))


def candidates(x: Shape, y: Shape, is_splitting: bool = True) -> Iterator[tuple[Shape, Shape | None]]:
    """Atoms to permute, simplest first: (of x, None) gives y's order, (of x, of y) x's order from atoms of y.

    1. the axes of x; 2. the axes of y; 3. if `is_splitting`, axes of x split by lengths of axes of y.
    """
    own, other = _long(x), _long(y)
    if len(own) <= MOST_AXES:
        yield own, None
    if sorted(own) == sorted(other):
        return  # splitting finds only what matters for repeated values
    if len(other) <= MOST_AXES:
        yield own, other
    for atoms in _splits(own, other) if is_splitting else ():
        yield atoms, None


def _long(shape: Shape) -> Shape:
    return tuple(n for n in shape if n != 1)


@lru_cache(4096)
def _splits(x: Shape, y: Shape) -> tuple[Shape, ...]:
    choices = []
    for n in x:
        pieces = {d for m in y for d in (m, n // m if m and n % m == 0 else 0) if 1 < d < n and n % d == 0}
        choices.append([(n,), *((d, n // d) for d in sorted(pieces))])
    if prod(len(c) for c in choices) > 4096:
        return ()
    whole = (sum(parts, ()) for parts in product(*choices))
    found = [atoms for atoms in whole if len(x) < len(atoms) <= _SPLIT_AXES]
    return tuple(sorted(found, key=len)[:_MOST_SPLITS])


@lru_cache(4096)
def positions(n: int, most: int = _SAMPLES) -> Array:
    """Where to look first among n elements: at all, or at some that never change."""
    if n <= most:
        return np.arange(n)
    return np.random.default_rng(n).integers(0, n, most)


@lru_cache(256)
def gathers(atoms: Shape) -> tuple[tuple[tuple[int, ...], ...], Array]:
    """All permutations of axes of lengths `atoms`, and for each the flat index of what lands on each of `positions`.

    Shapes: p tuples; (p, samples).
    """
    rank = len(atoms)
    orders = tuple(permutations(range(rank)))
    strides = np.array([prod(atoms[i + 1 :]) for i in range(rank)], np.int64)
    picked = np.array(orders, np.int64).reshape(len(orders), rank)
    lengths = np.array(atoms, np.int64)[picked]
    below = np.ones_like(lengths)
    for i in range(rank - 2, -1, -1):
        below[:, i] = below[:, i + 1] * lengths[:, i + 1]
    where = positions(prod(atoms))
    digits = where[None, None, :] // below[:, :, None] % lengths[:, :, None]
    return orders, (digits * strides[picked][:, :, None]).sum(axis=1)


def fitting(
    x_shape: Shape, x: Read, y_shape: Shape, y: Read, slack: float, floor: float, is_splitting: bool = True
) -> Iterator[Layout]:
    """Layouts of x that agree with y at the sampled positions; the caller compares everything.

    x, y : give the elements at flat indexes, of arrays of the same number of elements.
    |difference| <= slack x (floor + |y|) counts as agreement.
    """
    where = positions(prod(y_shape))
    first, wanted = x(where), y(where)
    if agree(first, wanted, slack, floor).all():
        yield Layout(x_shape, tuple(range(len(x_shape))), y_shape)
    for atoms, others in candidates(x_shape, y_shape, is_splitting):
        read, target = (x, wanted) if others is None else (y, first)
        orders, indexes = gathers(atoms if others is None else others)
        left = np.flatnonzero(agree(read(indexes[:, :_FIRST]), target[:_FIRST], slack, floor).all(axis=1))
        for i in left[agree(read(indexes[left]), target, slack, floor).all(axis=1)]:
            axes = orders[i]
            if axes == tuple(range(len(axes))):
                continue  # was the first
            if others is None:
                yield Layout(atoms, axes, y_shape)
            else:
                yield Layout(tuple(others[a] for a in axes), tuple(int(a) for a in np.argsort(axes)), y_shape)


def agree(x: Array, y: Array, slack: float, floor: float) -> Array:
    """Element by element. NaN agrees with NaN, infinity with the same infinity; exact types are equal exactly."""
    if not slack:
        return np.asarray(x == y)
    with np.errstate(invalid="ignore", over="ignore"):
        near = (np.abs(x - y) <= slack * (floor + np.abs(y))) & np.isfinite(y)
    return np.asarray(near | (x == y) | ((x != x) & (y != y)))
