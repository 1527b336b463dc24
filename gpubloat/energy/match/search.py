"""All pairs of equal values of two captures: by fingerprint, then by samples, then value by value, then once more."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from gpubloat.energy.match.equivalence import Equivalence, difference, equivalent
from gpubloat.energy.match.fingerprint import is_ambiguous, may_equal
from gpubloat.energy.match.repeats import equal
from gpubloat.energy.match.tolerance import FP8
from gpubloat.energy.match.values import Values, allowed

# A value that equals two others is the one that is nearer: at 1e-2, a residual equals the one a layer later. Errors
# count as alike up to a factor, and below a part of the tolerance.
_ALIKE_FACTOR = 3.0
_ALIKE_PART = 0.01


@dataclass
class Found:
    """pairs : (value of A, value of B) -> how they are equal.

    twins : for A and for B, value -> first value with the same bits.
    n_dropped : pairs that were equal on the first input and not on the second.
    """

    pairs: dict[tuple[int, int], Equivalence]
    twins: tuple[dict[int, int], dict[int, int]] = field(default_factory=lambda: ({}, {}))
    n_dropped: int = 0


def search(a: Values, b: Values, of_a: Iterable[int], of_b: Iterable[int], tolerance: float | None) -> Found:
    """Pairs among values with fingerprints. Ambiguous values are left out: they would equal too many.

    Only the first of values with the same bits is compared; `twins` says which one stands for the others.
    """
    twins = _twins(a, of_a, tolerance), _twins(b, of_b, tolerance)
    errors: dict[tuple[int, int], Equivalence] = {}
    dropped = 0
    for x, y in _alike(a, b, set(twins[0].values()), set(twins[1].values()), tolerance):
        found = compared(a, x, b, y, tolerance)
        if found is None:
            continue
        if confirmed(a, x, b, y, tolerance, found):
            errors[x, y] = found
        else:
            dropped += 1
    return Found(_nearest(a, b, errors, tolerance), twins, dropped)


def compared(a: Values, x: int, b: Values, y: int, tolerance: float | None) -> Equivalence | None:
    """How value y of b is x of a; None if it is not, or one was not kept."""
    one, other = a.array(x), b.array(y)
    if one is None or other is None:
        return None
    prints = (a.prints[x], b.prints[y]) if x in a.prints and y in b.prints else None
    return equivalent(one, other, allowed(a, x, b, y, tolerance), prints=prints)


def confirmed(a: Values, x: int, b: Values, y: int, tolerance: float | None, found: Equivalence) -> bool:
    """Whether the same layout makes x into y on the second input too; True where there is none, or it was not kept."""
    one, other = a.array(x, second=True), b.array(y, second=True)
    if one is None or other is None:
        return True
    if one.size != found_size(found) or other.size != one.size:
        return False
    limit = allowed(a, x, b, y, tolerance)
    return difference(found.layout.permuted(one), other, limit) is not None or (
        equivalent(one, other, limit) is not None
    )


def found_size(found: Equivalence) -> int:
    return int(np.prod(found.layout.shape, dtype=np.int64))


def _twins(side: Values, values: Iterable[int], tolerance: float | None) -> dict[int, int]:
    """Value -> the first one with the same elements in the same order, on both inputs; without ambiguous values."""
    first: dict[tuple[int, str, float, float], list[int]] = defaultdict(list)
    found = {}
    for value in values:
        known = side.prints.get(value)
        if known is None or is_ambiguous(known, allowed(side, value, side, value, tolerance)):
            continue
        # By what rounding cannot change: sums over what repeats are those over a copy of it only up to rounding.
        alike = first[known.n, known.kind, known.least, known.greatest]
        same = next((other for other in alike if _is_twin(side, value, other)), None)
        if same is None:
            alike.append(value)
        found[value] = value if same is None else same
    return found


def _is_twin(side: Values, x: int, y: int) -> bool:
    if not may_equal(side.prints[x], side.prints[y], 0.0):
        return False
    for second in (False, True):
        one, other = side.array(x, second), side.array(y, second)
        if one is None or other is None:
            continue
        if one.size != other.size or not equal(one, other):
            return False
    return True


def _alike(a: Values, b: Values, of_a: set[int], of_b: set[int], tolerance: float | None) -> Iterator[tuple[int, int]]:
    """Pairs that their fingerprints do not tell apart, by order in A; norms are looked up in a sorted list."""
    buckets: dict[tuple[int, str], list[tuple[float, int]]] = defaultdict(list)
    for y in of_b:
        buckets[b.prints[y].n, b.prints[y].kind].append((b.prints[y].norm, y))
    for bucket in buckets.values():
        bucket.sort()
    widest = FP8 if tolerance is None else tolerance
    for x in sorted(of_a):
        known = a.prints[x]
        bucket = buckets.get((known.n, known.kind), [])
        begin = bisect_left(bucket, known.norm * (1 - 2 * widest), key=lambda entry: entry[0])
        for norm, y in bucket[begin:]:
            if norm * (1 - 2 * widest) > known.norm:
                break
            if may_equal(known, b.prints[y], allowed(a, x, b, y, tolerance)):
                yield x, y


def _nearest(
    a: Values, b: Values, pairs: dict[tuple[int, int], Equivalence], tolerance: float | None
) -> dict[tuple[int, int], Equivalence]:
    least: dict[tuple[str, int], float] = {}
    for (x, y), found in pairs.items():
        for key in (("a", x), ("b", y)):
            least[key] = min(least.get(key, found.error), found.error)
    return {
        (x, y): found
        for (x, y), found in pairs.items()
        if found.error
        <= _ALIKE_FACTOR * min(least["a", x], least["b", y]) + _ALIKE_PART * allowed(a, x, b, y, tolerance)
    }
