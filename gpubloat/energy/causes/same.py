"""Input data: both sides do the same on other values."""

from __future__ import annotations

import numpy as np

from gpubloat.energy.causes.findings import Finding
from gpubloat.energy.causes.sides import Side, key


def are_same(a: Side, b: Side) -> bool:
    """Whether both ran the same operators in the same order, on the same shapes, strides and types."""
    return len(a.works) == len(b.works) and all(key(a, x) == key(b, y) for x, y in zip(a.works, b.works))


def data(a: Side, b: Side) -> list[Finding]:
    """Of two sides that run the same: an input from outside with other values, and results that differ."""
    made, others_made = ({t for op in side.ops for t in op.outputs} for side in (a, b))
    for one, other in zip(a.works, b.works):
        for t, u in zip(one.inputs, other.inputs):
            if t in made or u in others_made:  # of operands that only changed places, too
                continue
            x, y = a.capture.value(t), b.capture.value(u)
            if x is None or y is None or np.array_equal(x, y, equal_nan=x.dtype.kind in "fc"):
                continue
            evidence = (
                f"both ran the same {len(a.works)} operators, but {one.name} reads other values of shape {x.shape}: "
                f"root mean square {_rms(x):.3g} in A and {_rms(y):.3g} in B, {_zeros(x):.0%} and {_zeros(y):.0%} zeros"
            )
            remedy = "compare on equal inputs: power of a GPU depends on values, so this difference is no waste"
            return [Finding("input data", evidence, remedy, one, other, 0.0, 0.9)]
    return []


def _rms(x: np.ndarray) -> float:  # type: ignore[type-arg]
    return float(np.sqrt(np.mean(np.square(np.abs(x).astype(np.float64))))) if x.size else 0.0


def _zeros(x: np.ndarray) -> float:  # type: ignore[type-arg]
    return float(np.mean(x == 0)) if x.size else 0.0
