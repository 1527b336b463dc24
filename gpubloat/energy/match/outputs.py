"""Do two captures return the same? By position, and where that fails, whatever equals."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

import numpy as np

from gpubloat.energy.match.equivalence import Equivalence
from gpubloat.energy.match.repeats import together
from gpubloat.energy.match.search import compared, confirmed
from gpubloat.energy.match.values import Values


@dataclass(frozen=True)
class OutputPair:
    """a, b : positions among the outputs. how : None if they are not equal.

    error : relative Frobenius error; NaN where they cannot be compared (other number of elements, value not kept).
    """

    a: int
    b: int
    how: Equivalence | None
    error: float

    @property
    def is_equal(self) -> bool:
        return self.how is not None


@dataclass(frozen=True)
class Outputs:
    """pairs : one for each output of the side that has fewer. only_a, only_b : positions without a partner."""

    pairs: tuple[OutputPair, ...]
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]

    @property
    def are_equal(self) -> bool:
        """Whether each output of the side that has fewer is one of the other's; False if there is none."""
        return bool(self.pairs) and all(pair.is_equal for pair in self.pairs)


def outputs(a: Values, b: Values, tolerance: float | None) -> Outputs:
    """Pair the outputs of two captures."""
    left, right = a.capture.outputs, b.capture.outputs
    found: dict[int, OutputPair] = {}
    free = list(range(len(right)))
    places = [(i, i) for i in range(min(len(left), len(right)))]
    places += [(i, j) for i in range(len(left)) for j in range(len(right)) if i != j]
    for i, j in places:
        if i in found or j not in free:
            continue
        how = compared(a, left[i], b, right[j], tolerance)
        if how is not None and confirmed(a, left[i], b, right[j], tolerance, how):
            found[i] = OutputPair(i, j, how, how.error)
            free.remove(j)
    unpaired = [i for i in range(len(left)) if i not in found]
    for i, j in zip(list(unpaired), list(free)):
        found[i] = OutputPair(i, j, None, _error(a, left[i], b, right[j]))
        unpaired.remove(i)
        free.remove(j)
    return Outputs(tuple(found[i] for i in sorted(found)), tuple(unpaired), tuple(free))


def _error(a: Values, x: int, b: Values, y: int) -> float:
    """Of two outputs in the order of their elements, the greater on two inputs."""
    worst = nan
    for second in (False, True):
        one, other = a.array(x, second), b.array(y, second)
        if one is None or other is None or one.size != other.size:
            continue
        kind = np.complex128 if "c" in (one.dtype.kind, other.dtype.kind) else np.float64
        both = together(one, other)
        if both is None:
            continue
        one, other = (array.astype(kind) for array in both)
        apart = float(np.linalg.norm(one - other))
        norm = max(float(np.linalg.norm(one)), float(np.linalg.norm(other)))
        error = apart / norm if norm else apart
        worst = error if worst != worst else max(worst, error)
    return worst
