"""Classes of values that are equal across two captures, and which members of a class correspond.

A value and its copies are one class: in A a tensor, the same transposed, the same made contiguous; in B the tensor.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable

from gpubloat.energy.match.graph import Graph

Member = tuple[int, int]  # side (0: A, 1: B), value


class Classes:
    """Union of pairs. `add` joins; `of` gives a member's class or None; only members of pairs have one."""

    def __init__(self) -> None:
        self._parent: dict[Member, Member] = {}

    def add(self, one: Member, other: Member) -> None:
        self._parent.setdefault(one, one)
        self._parent.setdefault(other, other)
        a, b = self._root(one), self._root(other)
        self._parent[max(a, b)] = min(a, b)

    def of(self, member: Member) -> Member | None:
        return self._root(member) if member in self._parent else None

    def __contains__(self, member: Member) -> bool:
        return member in self._parent

    def members(self) -> dict[Member, tuple[list[int], list[int]]]:
        """Class -> its values of A, its values of B."""
        found: dict[Member, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for member in self._parent:
            found[self._root(member)][member[0]].append(member[1])
        return dict(found)

    def _root(self, member: Member) -> Member:
        while self._parent[member] != member:
            self._parent[member] = self._parent[self._parent[member]]
            member = self._parent[member]
        return member


def weak_pairs(
    flows: tuple[Graph, Graph],
    classes: Classes,
    content: Callable[[int, int], Hashable | None],
    equal: Callable[[int, int], bool],
) -> list[tuple[int, int]]:
    """Ambiguous values that correspond by what made them: the same operator of corresponding inputs, the k-th such.

    classes : of the other values. content(side, value) : roughly what is in an ambiguous value, None for others.
    equal(value of A, value of B) has the last word.
    """
    numbers: dict[tuple[object, ...], int] = {}
    by_origin: list[dict[int, list[int]]] = []
    for side, flow in enumerate(flows):
        found: dict[int, list[int]] = defaultdict(list)
        origin: dict[int, int] = {}  # weak value -> number of what made it
        seen: Counter[int] = Counter()
        for value in (flow.value[t] for t in flow.capture.inputs):
            if (side, value) not in classes and value not in origin:
                known_content = content(side, value)
                if known_content is not None:
                    _note(value, ("input", known_content), numbers, seen, origin, found)
        for op in flow.capture.ops:
            inputs = [flow.value[t] for t in op.inputs]
            known = [classes.of((side, v)) or origin.get(v) for v in inputs]
            if None in known:
                continue
            for place, value in enumerate(flow.made(op.index)):
                if (side, value) not in classes and content(side, value) is not None:
                    _note(value, (op.name, *known, place), numbers, seen, origin, found)
        by_origin.append(found)
    return [
        (x, y)
        for number, values in by_origin[0].items()
        for x, y in zip(values, by_origin[1].get(number, ()))
        if equal(x, y)
    ]


def _note(
    value: int,
    key: tuple[object, ...],
    numbers: dict[tuple[object, ...], int],
    seen: Counter[int],
    origin: dict[int, int],
    found: dict[int, list[int]],
) -> None:
    number = numbers.setdefault(key, len(numbers))
    origin[value] = numbers.setdefault((number, seen[number]), len(numbers))
    seen[number] += 1
    found[number].append(value)


def aligned(flows: tuple[Graph, Graph], of_a: Iterable[int], of_b: Iterable[int]) -> list[tuple[int, int]]:
    """Which members of a class correspond, one to one and in the order they were made; the others are copies.

    As many as there are, then those made by operators of the same name, then the earlier ones: a later one may have the
    shape of its partner and be but a copy of what was computed.
    """
    members = [sorted(v, key=lambda t, f=flow: (f.makers.get(t, -1), t)) for flow, v in zip(flows, (of_a, of_b))]  # type: ignore[misc]
    xs, ys = members
    if len(xs) == len(ys) == 1:
        return [(xs[0], ys[0])]
    likeness = [[_likeness(flows, x, y) for y in ys] for x in xs]
    # best[i][j] : of the members from i and from j on. Going backwards, ties leave the earlier pair first.
    best = [[0] * (len(ys) + 1) for _ in range(len(xs) + 1)]
    for i in reversed(range(len(xs))):
        for j in reversed(range(len(ys))):
            best[i][j] = max(likeness[i][j] + best[i + 1][j + 1], best[i + 1][j], best[i][j + 1])
    found = []
    i = j = 0
    while i < len(xs) and j < len(ys):
        if best[i][j] == likeness[i][j] + best[i + 1][j + 1]:
            found.append((xs[i], ys[j]))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return found


def _likeness(flows: tuple[Graph, Graph], x: int, y: int) -> int:
    makers = [flow.makers.get(value) for flow, value in zip(flows, (x, y))]
    names = [None if m is None else flow.capture.ops[m].name for flow, m in zip(flows, makers)]
    return 2 + (names[0] == names[1])
