"""Where regions differ: values that one side holds repeated, padded, as a slice of a larger one, or put together.

Repeats and padding say as much as what they were made of, so they divide regions further. A slice says less than the
whole; it is told, but divides nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from gpubloat.energy.match.classes import Classes
from gpubloat.energy.match.components import Parts
from gpubloat.energy.match.equivalence import Equivalence
from gpubloat.energy.match.extensions import Concatenation, Extension, concatenation, extended
from gpubloat.energy.match.graph import Graph
from gpubloat.energy.match.values import Values, allowed

_MOST_PAIRS = 1000  # compared in one region: 30 tensors on each side


@dataclass(frozen=True)
class Pair:
    """Equal tensors. a, b : tensor ids; several for a concatenation. larger : the side that holds the other's, or "".

    is_confirmed : equal on a second input too; None if there was none.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    how: Equivalence | Extension | Concatenation
    larger: str
    is_confirmed: bool | None

    @property
    def error(self) -> float:
        return self.how.error


@dataclass(frozen=True)
class Refined:
    """pairs : extensions that were found. is_changed : some joined the classes. n_skipped : regions too large."""

    pairs: tuple[Pair, ...]
    is_changed: bool
    n_skipped: int


def refine(
    flows: tuple[Graph, Graph], sides: tuple[Values, Values], classes: Classes, whole: Parts, tolerance: float | None
) -> Refined:
    """Search the regions in which both sides have operators; repeats and padding are added to `classes`."""
    found: list[Pair] = []
    is_changed = False
    skipped = 0
    for ops in whole.groups:
        if not ops[0] or not ops[1]:
            continue
        for side in (0, 1):
            other = 1 - side
            mine = [v for op in ops[side] for v in flows[side].made(op) if (side, v) not in classes]
            theirs = list(_touched(flows[other], ops[other]))
            if len(mine) * len(theirs) > _MOST_PAIRS:
                skipped += 1
                continue
            slices: dict[int, list[tuple[int, Extension]]] = defaultdict(
                list
            )  # larger value of `side` -> parts of other
            for value, partner, how, is_larger in _extensions(sides, side, mine, theirs, tolerance):
                if how.is_whole:
                    classes.add((side, value), (other, partner))
                    is_changed = True
                    found.append(_pair(sides, side, value, partner, how, is_larger))
                elif is_larger:
                    slices[value].append((partner, how))
                else:
                    found.append(_pair(sides, side, value, partner, how, is_larger))
            for value, parts in slices.items():
                found += _put_together(sides, side, value, parts, tolerance)
    return Refined(tuple(found), is_changed, skipped)


def _touched(flow: Graph, ops: tuple[int, ...]) -> dict[int, None]:
    """Values that operators read or make, each once."""
    return dict.fromkeys(
        flow.value[t] for i in ops for t in (*flow.capture.ops[i].inputs, *flow.capture.ops[i].outputs)
    )


def _extensions(
    sides: tuple[Values, Values], side: int, mine: list[int], theirs: list[int], tolerance: float | None
) -> Iterator[tuple[int, int, Extension, bool]]:
    """(value of `side`, value of the other, how the larger holds the smaller, whether the first is the larger)."""
    for value in mine:
        for partner in theirs:
            known = sides[side].prints.get(value), sides[1 - side].prints.get(partner)
            if known[0] is None or known[1] is None or known[0].n == known[1].n:
                continue
            is_larger = known[0].n > known[1].n
            small, large = ((1 - side, partner), (side, value)) if is_larger else ((side, value), (1 - side, partner))
            how = _extended(sides, small, large, tolerance)
            if how is not None:
                yield value, partner, how, is_larger
                if how.is_whole:
                    break


def _extended(
    sides: tuple[Values, Values], small: tuple[int, int], large: tuple[int, int], tolerance: float | None
) -> Extension | None:
    """small, large : (side, value). On both inputs, where there are two."""
    (of_small, x), (of_large, y) = (sides[small[0]], small[1]), (sides[large[0]], large[1])
    limit = allowed(of_small, x, of_large, y, tolerance)
    found = None
    for second in (False, True):
        one, other = of_small.array(x, second), of_large.array(y, second)
        if one is None or other is None:
            continue
        how = extended(one, other, limit, prints=None if second else (of_small.prints[x], of_large.prints[y]))
        if how is None or (found is not None and how.place != found.place):
            return None
        found = found or how
    return found


def _put_together(
    sides: tuple[Values, Values], side: int, value: int, parts: list[tuple[int, Extension]], tolerance: float | None
) -> list[Pair]:
    """A larger value as a concatenation of slices if they make it up, else the slices."""
    other = sides[1 - side]
    whole = sides[side].array(value)
    arrays = [other.array(partner) for partner, _ in parts]
    if whole is not None and len(parts) > 1 and all(array is not None for array in arrays):
        limit = max(allowed(sides[side], value, other, partner, tolerance) for partner, _ in parts)
        how = concatenation([array for array in arrays if array is not None], whole, limit)
        if how is not None:
            names = tuple(parts[i][0] for i, _, _ in how.parts)
            a, b = ((value,), names) if side == 0 else (names, (value,))
            return [Pair(a, b, how, "ab"[side], None)]
    return [_pair(sides, side, value, partner, how, True) for partner, how in parts]


def _pair(sides: tuple[Values, Values], side: int, value: int, partner: int, how: Extension, is_larger: bool) -> Pair:
    a, b = (value, partner) if side == 0 else (partner, value)
    larger = "ab"[side if is_larger else 1 - side]
    return Pair((a,), (b,), how, larger, True if sides[0].has_second(a) and sides[1].has_second(b) else None)
