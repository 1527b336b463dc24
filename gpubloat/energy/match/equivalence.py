"""Are two tensors equal up to a permutation of axes and a reshape? Found by samples, confirmed value by value.

Statistics cannot tell: means and spectra take x for -x and shuffled rows for the same. So every layout that the shapes
allow is tried on a few elements, and the one that fits is compared on all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite, sqrt
from typing import Any

import numpy as np

from gpubloat.energy.match.fingerprint import BLOCK, Fingerprint, fingerprint, flat_parts, is_ambiguous, may_equal
from gpubloat.energy.match.layouts import Layout, agree, fitting, positions
from gpubloat.energy.match.repeats import equal, flat, packed, together
from gpubloat.energy.match.tolerance import ELEMENT, name_of, tolerance_of

Array = np.ndarray[Any, Any]
_OUTSTANDING = 1e4  # times what is usual: the least number of a type as a mask, not one of the values
_USUAL_SAMPLES = 1024  # of which a hundredth is ordinary, even where most is masked


@dataclass(frozen=True)
class Equivalence:
    """y is `layout` of x.

    how : "same" (shape too), "reshape" (same order of elements) or "permute".
    error : ||x - y|| / max(||x||, ||y||), over elements that are finite. worst : greatest |x - y| over the root mean
    square. is_ambiguous : few elements or all the same: other tensors would be equal too.
    """

    how: str
    error: float
    worst: float
    is_ambiguous: bool
    layout: Layout

    def __str__(self) -> str:
        if self.how == "same":
            return "same"
        if self.how == "reshape":
            return f"reshape to {self.layout.shape}"
        return f"reshape to {self.layout.atoms}, permute {self.layout.axes}, reshape to {self.layout.shape}"


def equivalent(
    x: Array,
    y: Array,
    tolerance: float | None = None,
    *,
    prints: tuple[Fingerprint, Fingerprint] | None = None,
) -> Equivalence | None:
    """How y is x with axes split, permuted and merged; None if it is not.

    x, y : arrays of any shape and type. Integers and booleans are equal exactly, across their types; they are never
    equal to real numbers, nor real to complex ones. NaN equals NaN, infinity the same infinity.
    tolerance : relative Frobenius error that is allowed; None: `tolerance_of` both types. No element may be off by more
    than ten tolerances of its own size plus the root mean square. Of bf16 values in fp32 arrays, say it.
    prints : of x and y, where they are known.
    """
    if x.size != y.size:
        return None
    print_x, print_y = prints or (fingerprint(x), fingerprint(y))
    allowed = allowed_error(x, y, tolerance)
    if not may_equal(print_x, print_y, allowed):
        return None
    x, y = packed(x), packed(y)
    weak = is_ambiguous(print_x, allowed) or is_ambiguous(print_y, allowed)
    floor = _ordinary_size(y, print_y) if allowed else 0.0
    read_x, read_y = flat(x).__getitem__, flat(y).__getitem__
    for layout in fitting(x.shape, read_x, y.shape, read_y, ELEMENT * allowed, floor):
        errors = difference(layout.permuted(x), y, allowed, outstanding=_OUTSTANDING * floor)
        if errors is not None:
            how = "permute" if not layout.is_ordered else "same" if x.shape == y.shape else "reshape"
            return Equivalence(how, *errors, weak, layout)
    return None


def reshaped(how: Equivalence, x: tuple[int, ...], y: tuple[int, ...]) -> Equivalence:
    """The same between arrays of other shapes with the same elements in the same order."""
    kind = "permute" if not how.layout.is_ordered else "same" if x == y else "reshape"
    return replace(how, how=kind, layout=replace(how.layout, shape=y))


def allowed_error(x: Array, y: Array, tolerance: float | None) -> float:
    """`tolerance`, or that of both types; 0.0 for integers and booleans, whatever it is."""
    by_type = tolerance_of(name_of(x.dtype), name_of(y.dtype))
    return by_type if tolerance is None or not by_type else tolerance


def _ordinary_size(y: Array, known: Fingerprint) -> float:
    """The root mean square, unless a few elements stand out so far that they hide all others: then the others' median.

    A masked score is often the least number of its type. Beside 1e38, a wrong score would be no error at all.
    """
    sample = np.abs(flat(y)[positions(y.size, _USUAL_SAMPLES)])
    sample = np.sort(sample[np.isfinite(sample) & (sample > 0)].astype(np.float64))
    if not sample.size or known.largest <= _OUTSTANDING * (low := float(sample[sample.size // 100])):
        return known.rms
    return float(np.median(sample[sample <= _OUTSTANDING * low]))


def difference(x: Array, y: Array, tolerance: float, *, outstanding: float = np.inf) -> tuple[float, float] | None:
    """(relative Frobenius error, worst error over the root mean square) of arrays of one size; None if not equal,
    or too large to be compared as they repeat.

    Elements correspond in row-major order. outstanding : elements at least so great are compared each on its own and
    left out of the norms.
    """
    both = together(x, y)
    if both is None:
        return None
    a, b = map(flat_parts, both)
    if equal(a, b):  # weights and copies: most of what is compared at all
        return 0.0, 0.0
    if not tolerance:
        return None
    if not (_largest(a) < np.inf and _largest(b) < outstanding):
        a, b = a.astype(np.float64), b.astype(np.float64)
        odd = ~(np.isfinite(a) & np.isfinite(b)) | (np.abs(a) >= outstanding) | (np.abs(b) >= outstanding)
        if not agree(a[odd], b[odd], ELEMENT * tolerance, 0.0).all():
            return None
        a[odd] = b[odd] = 0.0
    return _norms(a, b, tolerance)


def _largest(a: Array) -> float:
    """Greatest magnitude; NaN if there is one."""
    return float(np.maximum(-a.min(), a.max()))


def _norms(a: Array, b: Array, tolerance: float) -> tuple[float, float] | None:
    """Of finite parts. Leaves as soon as they are too far apart; temporary arrays stay in the cache."""
    if a.dtype == np.float64 and a.size and (most := float(np.abs(b).max())) > 1e150:
        a, b = a / most, b / most  # their squares would overflow
    squares = of_a = of_b = worst = 0.0
    pieces = []
    buffers = np.empty((3, min(BLOCK, a.size)))
    for begin in range(0, a.size, BLOCK):
        piece = slice(begin, begin + BLOCK)
        wide_a, wide_b, apart = buffers[:, : a[piece].size]
        wide_a[...] = a[piece]
        wide_b[...] = b[piece]
        np.subtract(wide_a, wide_b, out=apart)
        of_a += float(np.dot(wide_a, wide_a))
        of_b += float(np.dot(wide_b, wide_b))
        squares += float(np.dot(apart, apart))
        most = float(np.abs(apart, out=apart).max())
        worst = max(worst, most)
        pieces.append((piece, most))
    norm, apart_norm = sqrt(max(of_a, of_b)), sqrt(squares)
    if not isfinite(apart_norm) or apart_norm > tolerance * norm:
        return None
    rms = norm / sqrt(max(a.size, 1))
    for piece, most in pieces:
        if most > ELEMENT * tolerance * rms:
            here = b[piece].astype(np.float64)
            if (np.abs(a[piece] - here) > ELEMENT * tolerance * (rms + np.abs(here))).any():
                return None
    return (apart_norm / norm, worst / rms) if norm else (0.0, 0.0)
