"""Match two captures: equal tensors, and the smallest regions of operators between them.

1. Values of A and B that are equal are found by their elements (`search`), those too common to tell by what made them.
2. Operators that all data flows through, with equal outputs, anchor the one order in the other (`cuts`); a pair that
   contradicts it is a coincidence.
3. Between equal values, operators fall into regions (`components`): branches between two anchors, each on its own,
   and what one side prepares for many regions, such as a mask for all layers.
4. In regions that differ, values that one side has repeated or padded count as equal too (`refine`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

from gpubloat.energy.capture.records import Capture, Op
from gpubloat.energy.match.classes import Classes, aligned, weak_pairs
from gpubloat.energy.match.components import parts
from gpubloat.energy.match.cuts import Between, between, chain, fits, preparations
from gpubloat.energy.match.equivalence import reshaped
from gpubloat.energy.match.fingerprint import is_ambiguous
from gpubloat.energy.match.graph import Graph, cuts, graph
from gpubloat.energy.match.outputs import Outputs, outputs
from gpubloat.energy.match.refine import Pair, Refined, refine
from gpubloat.energy.match.search import Found, compared, confirmed, search
from gpubloat.energy.match.values import Values, allowed


@dataclass(frozen=True)
class Region:
    """Operators that make equal values from equal values and from preparations, as few as possible.

    a_ops, b_ops : indexes, in order; one side is empty where the other does in addition what its partner need not.
    a_inputs, a_outputs, b_inputs, b_outputs : tensors that enter from outside, and that are used outside.
    is_same : both run the same operators on the same shapes, strides and types; views do not count, they run nothing.
    is_preparation : one side alone makes something, without equal on the other, that several regions use; there, the
    other side may do what it makes up for.
    """

    a_ops: tuple[int, ...]
    b_ops: tuple[int, ...]
    a_inputs: tuple[int, ...]
    a_outputs: tuple[int, ...]
    b_inputs: tuple[int, ...]
    b_outputs: tuple[int, ...]
    is_same: bool
    is_preparation: bool = False

    @property
    def kind(self) -> str:
        return "same operators" if self.is_same else "different"


@dataclass(frozen=True)
class Matching:
    """Each operator of A is in the `a_ops` of one region or in `a_rest`, each of B likewise.

    pairs : equal tensors that correspond. anchors : operators (of A, of B) that all data passes through.
    n_dropped : pairs that were equal on the first input only. n_crossed : pairs that contradicted the anchors.
    notes : what else there is to say, a sentence each.
    """

    pairs: tuple[Pair, ...]
    regions: tuple[Region, ...]
    a_rest: tuple[int, ...]
    b_rest: tuple[int, ...]
    outputs: Outputs
    anchors: tuple[tuple[int, int], ...]
    n_dropped: int
    n_crossed: int
    notes: tuple[str, ...]

    @property
    def outputs_equal(self) -> bool:
        return self.outputs.are_equal


def match(
    a: Capture, b: Capture, again: tuple[Capture, Capture] | None = None, tolerance: float | None = None
) -> Matching:
    """What corresponds in two captures of programs that should compute the same.

    again : captures of both on another random input; what is equal by coincidence is not equal there.
    tolerance : relative error allowed between real tensors; None: by the coarser of their types (`tolerance_of`).

    Raises
    ------
    GpubloatError : a capture of `again` ran other operators than its first.
    """
    sides = Values(a, again and again[0], "A"), Values(b, again and again[1], "B")
    flows = graph(a), graph(b)
    values = [list(dict.fromkeys(flow.value.values())) for flow in flows]
    missing = [side.measure(own) for side, own in zip(sides, values)]
    found = search(sides[0], sides[1], values[0], values[1], tolerance)
    anchors, n_crossed = _anchored(flows, found)
    results = outputs(*sides, tolerance)
    classes = _classes(flows, sides, found, results, tolerance)
    prepared = preparations(flows[0], [i for i, _ in anchors]), preparations(flows[1], [j for _, j in anchors])
    whole = parts(flows, classes, _corresponding(flows, classes), prepared)
    refined = refine(flows, sides, classes, whole, tolerance)
    if refined.is_changed:
        whole = parts(flows, classes, _corresponding(flows, classes), prepared)
    pairs = _pairs(flows, sides, classes, found, refined, tolerance)
    regions = tuple(_region(flows, classes, ops) for ops in whole.groups)
    notes = _notes(missing, results, pairs, refined)
    return Matching(pairs, regions, *whole.rest, results, anchors, found.n_dropped, n_crossed, notes)


def _anchored(flows: tuple[Graph, Graph], found: Found) -> tuple[tuple[tuple[int, int], ...], int]:
    """Anchors, after the pairs that contradict them were taken out of `found`; and how many those were."""
    place = [{op: i for i, op in enumerate(cuts(flow))} for flow in flows]
    makers = [_makers(flow, twins) for flow, twins in zip(flows, found.twins)]
    weights: dict[tuple[int, int], int] = {}
    for x, y in found.pairs:
        one, other = (flow.capture.tensors[value] for flow, value in zip(flows, (x, y)))
        # Of many chains with as many anchors, the one whose ends are most alike: a cast equals what it was made from.
        weight = 8 + (one.shape == other.shape) + (one.dtype == other.dtype)
        for i in makers[0][x]:
            for j in makers[1][y]:
                if i in place[0] and j in place[1]:
                    at = place[0][i], place[1][j]
                    weights[at] = max(weights.get(at, 0), weight)
    chosen = chain((i, j, weight) for (i, j), weight in weights.items())
    order = [list(p) for p in place]
    anchors = tuple((order[0][i], order[1][j]) for i, j in chosen)
    spans = between(flows[0], [i for i, _ in anchors]), between(flows[1], [j for _, j in anchors])
    crossed = 0
    for x, y in list(found.pairs):
        if not _is_possible(makers[0][x], makers[1][y], spans):
            del found.pairs[x, y]
            crossed += 1
    return anchors, crossed


def _makers(flow: Graph, twins: dict[int, int]) -> dict[int, list[int]]:
    """First of values with the same bits -> the operators that made them; -1 for an input."""
    found: dict[int, list[int]] = {}
    for value, first in twins.items():
        found.setdefault(first, []).append(flow.makers.get(value, -1))
    return found


def _is_possible(of_a: list[int], of_b: list[int], spans: tuple[Between, Between]) -> bool:
    return any(
        i < 0 or j < 0 or fits((spans[0].after[i], spans[0].until[i]), (spans[1].after[j], spans[1].until[j]))
        for i in of_a
        for j in of_b
    )


def _classes(
    flows: tuple[Graph, Graph], sides: tuple[Values, Values], found: Found, results: Outputs, tolerance: float | None
) -> Classes:
    classes = Classes()
    for x, y in found.pairs:
        classes.add((0, x), (1, y))
    for side, twins in enumerate(found.twins):
        for value, first in twins.items():
            if (side, first) in classes:
                classes.add((side, value), (side, first))
    for pair in results.pairs:
        if pair.is_equal:  # even if it is one number, its place says what it is
            x, y = (flow.value[flow.capture.outputs[i]] for flow, i in zip(flows, (pair.a, pair.b)))
            classes.add((0, x), (1, y))

    def content(side: int, value: int) -> Hashable | None:
        known = sides[side].prints.get(value)
        if known is None or not is_ambiguous(known, allowed(sides[side], value, sides[side], value, tolerance)):
            return None
        return known.n, known.kind, f"{known.least:.3g}", f"{known.greatest:.3g}"

    def equal(x: int, y: int) -> bool:
        how = compared(sides[0], x, sides[1], y, tolerance)
        return how is not None and confirmed(sides[0], x, sides[1], y, tolerance, how)

    for x, y in weak_pairs(flows, classes, content, equal):
        classes.add((0, x), (1, y))
    return classes


def _corresponding(flows: tuple[Graph, Graph], classes: Classes) -> list[tuple[int, int]]:
    return [pair for of_a, of_b in classes.members().values() for pair in aligned(flows, of_a, of_b)]


def _pairs(
    flows: tuple[Graph, Graph],
    sides: tuple[Values, Values],
    classes: Classes,
    found: Found,
    refined: Refined,
    tolerance: float | None,
) -> tuple[Pair, ...]:
    pairs = list(refined.pairs)
    known = {(pair.a, pair.b) for pair in pairs}
    for x, y in sorted(_corresponding(flows, classes)):
        if ((x,), (y,)) in known:
            continue
        first = found.twins[0].get(x, x), found.twins[1].get(y, y)
        how = found.pairs.get(first)
        if how is not None and first != (x, y):
            how = reshaped(how, *(flow.capture.tensors[v].shape for flow, v in zip(flows, (x, y))))
        elif how is None:  # in one class by way of a third value
            how = compared(sides[0], x, sides[1], y, tolerance)
            if how is None or not confirmed(sides[0], x, sides[1], y, tolerance, how):
                continue
        is_confirmed = True if sides[0].has_second(x) and sides[1].has_second(y) else None
        pairs.append(Pair((x,), (y,), how, "", is_confirmed))
    return tuple(pairs)


def _region(flows: tuple[Graph, Graph], classes: Classes, ops: tuple[tuple[int, ...], tuple[int, ...]]) -> Region:
    (a_in, a_out), (b_in, b_out) = (_border(flow, own) for flow, own in zip(flows, ops))
    a_kinds, b_kinds = (Counter(_kind(flow.capture, flow.capture.ops[i]) for i in own) for flow, own in zip(flows, ops))
    a_kinds.pop(None, None)
    b_kinds.pop(None, None)
    side = 0 if ops[0] else 1
    values = (flows[side].value[t] for t in (a_out, b_out)[side])
    is_alone = not all(ops) and any((side, v) not in classes and flows[side].makers.get(v) in ops[side] for v in values)
    return Region(*ops, a_in, a_out, b_in, b_out, a_kinds == b_kinds, is_alone)


def _border(flow: Graph, own: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    inside = set(own)
    made = dict.fromkeys(t for i in own for t in flow.capture.ops[i].outputs)
    read = dict.fromkeys(t for i in own for t in flow.capture.ops[i].inputs)
    returned = set(flow.capture.outputs)
    outputs = tuple(t for t in made if t in returned or not inside.issuperset(flow.readers([t])))
    return tuple(t for t in read if t not in made), outputs


def _kind(capture: Capture, op: Op) -> tuple[object, ...] | None:
    """What makes two operators the same; None for views, which run nothing."""
    if op.is_view:
        return None
    infos = [[capture.tensors[t] for t in side] for side in (op.inputs, op.outputs)]
    return (op.name, *(tuple((t.shape, t.strides, t.dtype) for t in side) for side in infos))


def _notes(missing: list[int], results: Outputs, pairs: tuple[Pair, ...], refined: Refined) -> tuple[str, ...]:
    notes = [f"values of {side} that were not kept, so not compared: {n}" for n, side in zip(missing, "AB") if n]
    if not pairs:
        notes.append("no tensor of A equals one of B")
    if not any(pair.is_equal for pair in results.pairs):
        notes.append("A and B return no tensor in common")
    elif not results.are_equal:
        wrong = ", ".join(f"{p.a} of A and {p.b} of B" for p in results.pairs if not p.is_equal)
        notes.append(f"outputs differ: {wrong}")
    moved = ", ".join(f"{p.a} of A is {p.b} of B" for p in results.pairs if p.is_equal and p.a != p.b)
    if moved:
        notes.append(f"outputs come in another order: {moved}")
    turned = ", ".join(str(p.a) for p in results.pairs if p.how is not None and p.how.how == "permute")
    if turned:
        notes.append(f"outputs of A that have their axes in another order in B: {turned}")
    for only, side, other in ((results.only_a, "A", "B"), (results.only_b, "B", "A")):
        if only:
            notes.append(f"{side} returns more outputs than {other}: {', '.join(map(str, only))}")
    if refined.n_skipped:
        notes.append(f"regions too large to be searched for slices, repeats and padding: {refined.n_skipped}")
    return tuple(notes)
