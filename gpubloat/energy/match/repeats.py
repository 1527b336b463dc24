"""Arrays that repeat their elements along axes of stride 0, as expanded tensors do: work on what is stored.

A weight that is expanded for a batch may have a thousand times the elements that are in memory.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from gpubloat.energy.match.layouts import Shape, positions

Array = np.ndarray[Any, Any]

MOST = 1 << 28  # elements that are copied to compare arrays that repeat in different places


def once(array: Array) -> Array:
    """One element of each axis that repeats."""
    return array[tuple(slice(None) if step else slice(1) for step in array.strides)]


def packed(array: Array) -> Array:
    """What is stored, in row-major order; a copy where it is not. What repeats still does."""
    if all(array.strides):
        return np.ascontiguousarray(array)
    return np.broadcast_to(np.ascontiguousarray(once(array)), array.shape)


def flat(array: Array) -> Array | np.flatiter[Array]:
    """To read at indexes in row-major order, without a copy; of what is contiguous, fast."""
    return array.reshape(-1) if array.flags.c_contiguous else array.flat


def together(x: Array, y: Array) -> tuple[Array, Array] | None:
    """Two arrays of one size in row-major order, one axis each, without what both repeat in the same places.

    Relative errors are the same as with it. None if that would take a copy of more than `MOST` elements.
    """
    if x.size and not all(x.strides) and not all(y.strides):  # otherwise no copy exceeds what one of them stores
        shape = atoms(x.shape, y.shape)
        if shape is not None:
            x, y = x.reshape(shape), y.reshape(shape)
            both = tuple(slice(None) if one or other else slice(1) for one, other in zip(x.strides, y.strides))
            x, y = x[both], y[both]
        if x.size > MOST and not (all(x.strides) or all(y.strides)):
            return None
    return x.reshape(-1), y.reshape(-1)


def equal(x: Array, y: Array) -> bool:
    """Whether two arrays of one size have the same elements in row-major order; NaN equals NaN.

    Not known, and so False, where `together` gives none.
    """
    where = positions(x.size)
    if not np.array_equal(flat(x)[where], flat(y)[where], equal_nan=True):
        return False
    both = together(x, y)
    if both is None:
        return False
    x, y = both
    return np.array_equal(x, y) or np.array_equal(x, y, equal_nan=True)  # the second takes several passes


def atoms(x: Shape, y: Shape) -> Shape | None:
    """The longest axes that those of both shapes, of one size, can be split into: no copy is needed. None if none."""
    sizes = sorted({prod(shape[i:]) for shape in (x, y) for i in range(len(shape) + 1)}, reverse=True)
    if any(outer % inner for outer, inner in pairwise(sizes)):
        return None
    return tuple(outer // inner for outer, inner in pairwise(sizes))
