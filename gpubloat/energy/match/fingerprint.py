"""What an array has in common with all its permutations, so that unrelated pairs are told apart at no cost.

Each number moves by no more than a known multiple of ||x - y|| when x becomes y (Cauchy and Schwarz), so `may_equal`
never turns away a pair that is equal within the tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import Any

import numpy as np

from gpubloat.energy.match.repeats import once
from gpubloat.energy.match.tolerance import ELEMENT

Array = np.ndarray[Any, Any]
TINY = 16  # elements: fewer are equal by chance
# Elements that stay in a near cache while all sums of them are taken. Fewer than BLAS starts threads for.
BLOCK = 1 << 13
_ROUNDING = 3e-13  # of the sums below, relative to what they sum


@dataclass(frozen=True)
class Fingerprint:
    """Of an array of n elements. kind : "exact" (integers, booleans), "real" or "complex".

    n_nan, n_plus, n_minus : elements that are no number or infinite (of a complex array: parts). The others are
    summed up: total, norm (square root of the sum of squares), least and greatest.
    """

    n: int
    kind: str
    n_nan: int
    n_plus: int
    n_minus: int
    total: float
    norm: float
    least: float
    greatest: float

    @property
    def rms(self) -> float:
        return self.norm / sqrt(max(self.n, 1))

    @property
    def largest(self) -> float:
        """Greatest magnitude."""
        return max(abs(self.least), abs(self.greatest)) if self.least <= self.greatest else 0.0

    @property
    def is_finite(self) -> bool:
        return not (self.n_nan or self.n_plus or self.n_minus)


def kind_of(array: Array) -> str:
    return {"b": "exact", "i": "exact", "u": "exact", "c": "complex"}.get(array.dtype.kind, "real")


@np.errstate(over="ignore", invalid="ignore")
def fingerprint(array: Array) -> Fingerprint:
    """One pass over what `array` stores, in blocks that fit into a cache; sums are in fp64."""
    own = once(array)
    parts, times = flat_parts(own), array.size // max(own.size, 1)
    total = squares = 0.0
    least, greatest = inf, -inf
    n_nan = n_plus = n_minus = 0
    buffer = np.empty(BLOCK)
    for begin in range(0, parts.size, BLOCK):
        block = parts[begin : begin + BLOCK]
        low, high = float(block.min()), float(block.max())  # NaN if there is one
        wide = buffer[: block.size]
        wide[...] = block
        if not isfinite(low) or not isfinite(high):
            n_nan += int(np.isnan(wide).sum())
            n_plus += int(np.isposinf(wide).sum())
            n_minus += int(np.isneginf(wide).sum())
            wide = wide[np.isfinite(wide)]
            if not wide.size:
                continue
            low, high = float(wide.min()), float(wide.max())
        least, greatest = min(least, low), max(greatest, high)
        total += float(wide.sum())
        squares += float(np.dot(wide, wide))  # infinite if it overflows
    counts = array.size, kind_of(array), times * n_nan, times * n_plus, times * n_minus
    return Fingerprint(*counts, times * total, sqrt(times * squares), least, greatest)


def flat_parts(array: Array) -> Array:
    """The elements in row-major order, of a complex array its parts. A copy where `array` is not contiguous."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat


def may_equal(x: Fingerprint, y: Fingerprint, tolerance: float) -> bool:
    """False if no permutation of x is y within a relative Frobenius error of `tolerance` and the element's bound."""
    if (x.n, x.kind, x.n_nan, x.n_plus, x.n_minus) != (y.n, y.kind, y.n_nan, y.n_plus, y.n_minus):
        return False
    norm = max(x.norm, y.norm)
    apart = 1.01 * tolerance * norm + _ROUNDING * norm
    spread = sqrt(2 * x.n if x.kind == "complex" else x.n)
    element = ELEMENT * tolerance * (max(x.rms, y.rms) + max(x.largest, y.largest)) * 1.01
    return not (
        abs(x.norm - y.norm) > apart
        or abs(x.total - y.total) > apart * spread
        or abs(x.least - y.least) > element
        or abs(x.greatest - y.greatest) > element
    )


def is_ambiguous(x: Fingerprint, tolerance: float) -> bool:
    """Too little in it to tell it from another: few elements, or the same everywhere as far as the tolerance sees."""
    numbers = x.greatest - x.least if x.least <= x.greatest else 0.0
    return (
        x.n < TINY
        or (numbers <= ELEMENT * tolerance * x.largest and x.is_finite)
        or x.n in (x.n_nan, x.n_plus, x.n_minus)
    )
