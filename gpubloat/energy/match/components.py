"""Operators of both sides between values that correspond: every operator is in exactly one region, or in none.

Each side falls apart where its tensors have equals on the other side. The parts that make corresponding values belong
together; parts that only make what the other side has already are work that one side does in addition.

A value that one side alone has joins what makes it and what reads it, as in a chain that the other side has fused. Not
so what is prepared for many: one mask would join all layers. Preparations are regions of their own, or belong to the
only region that uses them.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from gpubloat.energy.match.classes import Classes
from gpubloat.energy.match.graph import Graph

Node = tuple[int, int]  # side (0: A, 1: B), operator


@dataclass(frozen=True)
class Parts:
    """groups : operators of A and of B of each region, both in order; regions in an order that both sides agree with.

    rest : operators of A and of B that lead to no corresponding value.
    """

    groups: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    rest: tuple[tuple[int, ...], tuple[int, ...]]


def parts(
    flows: tuple[Graph, Graph],
    classes: Classes,
    pairs: Iterable[tuple[int, int]],
    prepared: tuple[Set[int], Set[int]] = (frozenset(), frozenset()),
) -> Parts:
    """pairs : corresponding values (of A, of B), all of which have a class. prepared : `cuts.preparations` of both."""
    union = _Union()
    live = [_live(flow, side, classes) for side, flow in enumerate(flows)]
    uses: list[tuple[Node, Node]] = []  # preparation, what reads it
    for side, flow in enumerate(flows):
        for reader in sorted(live[side]):
            for edge in flow.edges_in[reader]:
                if (side, flow.value[edge.tensor]) not in classes and edge.maker in live[side]:
                    ends = (side, edge.maker), (side, reader)
                    if edge.maker in prepared[side] and reader not in prepared[side]:
                        uses.append(ends)
                    else:
                        union.join(*ends)
    linked = set()
    for x, y in pairs:
        makers = [(side, flow.makers[v]) for side, (flow, v) in enumerate(zip(flows, (x, y))) if v in flow.makers]
        linked.update(makers)
        if len(makers) == 2:
            union.join(*makers)
    _join_preparations(flows, live, union, uses)
    apart = {union.root(maker) for maker, reader in uses if union.root(maker) != union.root(reader)}
    _join_extras(flows, live, union, linked, apart)
    _join_cycles(flows, live, union)
    return _collected(flows, live, union)


def _live(flow: Graph, side: int, classes: Classes) -> set[int]:
    """Operators that make a value with a class, or that are needed for one without another class in between."""
    live: set[int] = set()
    for op in reversed(range(flow.n)):
        if any((side, v) in classes for v in flow.made(op)) or any(
            edge.reader in live and (side, flow.value[edge.tensor]) not in classes for edge in flow.edges_out[op]
        ):
            live.add(op)
    return live


def _edges(flow: Graph, side: int, live: set[int], union: _Union) -> Iterator[tuple[Node, Node]]:
    """Between different groups, along the data flow of one side."""
    for op in live:
        reader = union.root((side, op))
        for edge in flow.edges_in[op]:
            if edge.maker in live and union.root((side, edge.maker)) != reader:
                yield union.root((side, edge.maker)), reader


def _join_preparations(
    flows: tuple[Graph, Graph], live: Sequence[set[int]], union: _Union, uses: list[tuple[Node, Node]]
) -> None:
    """To the region that uses it, if it is the only one, or if it does nothing but show a part; and both sides' to
    each other if a region uses both: they may be the same tables, made in other ways.
    """
    working = {
        (union.root((side, op)), side)
        for side, flow in enumerate(flows)
        for op in live[side]
        if not flow.capture.ops[op].is_view
    }
    users: dict[Node, dict[tuple[Node, int], None]] = defaultdict(dict)
    for maker, reader in uses:
        users[union.root(maker)][union.root(reader), reader[0]] = None
    for maker, regions in users.items():
        only = len({region for region, _ in regions}) == 1
        for region in regions:
            if only or region not in working:
                union.join(maker, region[0])
    used: dict[Node, tuple[list[Node], list[Node]]] = defaultdict(lambda: ([], []))
    for maker, reader in uses:
        if union.root(maker) != union.root(reader):
            used[union.root(reader)][maker[0]].append(maker)
    for of_a, of_b in used.values():
        for one in of_a if of_b else ():
            for other in of_b:
                union.join(one, other)


def _join_extras(
    flows: tuple[Graph, Graph], live: Sequence[set[int]], union: _Union, linked: set[Node], prepared: set[Node]
) -> None:
    """What only one side does is one region as far as it hangs together: repeating heads is a chain of copies.

    prepared : groups that hang together with many, and only join each other.
    """
    with_partner = {union.root(node) for node in linked}
    for side, flow in enumerate(flows):
        for maker, reader in list(_edges(flow, side, live[side], union)):
            ends = {union.root(maker), union.root(reader)}
            if ends.isdisjoint(with_partner) and len(ends & prepared) != 1:
                union.join(maker, reader)


def _join_cycles(flows: tuple[Graph, Graph], live: Sequence[set[int]], union: _Union) -> None:
    """Groups that need each other, one way in A and the other way in B, cannot be told apart: make them one."""
    after: dict[Node, set[Node]] = {union.root((side, op)): set() for side in (0, 1) for op in live[side]}
    for side, flow in enumerate(flows):
        for maker, reader in _edges(flow, side, live[side], union):
            after[maker].add(reader)
    for component in strong_components(after):
        for node in component[1:]:
            union.join(component[0], node)


def strong_components(after: Mapping[Node, Iterable[Node]]) -> list[list[Node]]:
    """Sets of nodes that reach each other: Tarjan, "Depth-first search and linear graph algorithms" (1972)."""
    number: dict[Node, int] = {}
    low: dict[Node, int] = {}
    open_nodes: list[Node] = []
    is_open: set[Node] = set()
    found = []
    for start in after:
        if start in number:
            continue
        work = [(start, iter(after[start]))]
        number[start] = low[start] = len(number)
        open_nodes.append(start)
        is_open.add(start)
        while work:
            node, rest = work[-1]
            child = next(rest, None)
            if child is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == number[node]:
                    component: list[Node] = []
                    while not component or component[-1] != node:
                        component.append(open_nodes.pop())
                        is_open.discard(component[-1])
                    found.append(component)
            elif child not in number:
                number[child] = low[child] = len(number)
                open_nodes.append(child)
                is_open.add(child)
                work.append((child, iter(after[child])))
            elif child in is_open:
                low[node] = min(low[node], number[child])
    return found


def _collected(flows: tuple[Graph, Graph], live: Sequence[set[int]], union: _Union) -> Parts:
    group_of: dict[Node, Node] = {(side, op): union.root((side, op)) for side in (0, 1) for op in live[side]}
    for side, flow in enumerate(flows):
        for op in reversed(range(flow.n)):  # readers first: a view goes where it is used
            if flow.is_free[op]:
                group = _home(flow, side, op, group_of)
                if group is not None:
                    group_of[side, op] = group
    members: dict[Node, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for (side, op), group in sorted(group_of.items()):
        members[group][side].append(op)
    after: dict[Node, set[Node]] = {group: set() for group in members}
    for side, flow in enumerate(flows):
        for maker, reader in _edges(flow, side, live[side], union):
            after[maker].add(reader)
    ordered = [members[group] for group in _in_order(after, members)]
    rest = [tuple(op for op in range(flow.n) if (side, op) not in group_of) for side, flow in enumerate(flows)]
    return Parts(tuple((tuple(a), tuple(b)) for a, b in ordered), (rest[0], rest[1]))


def _home(flow: Graph, side: int, op: int, group_of: Mapping[Node, Node]) -> Node | None:
    """The region of a free operator: of the first that reads its output, else of what made its value."""
    outputs = set(flow.capture.ops[op].outputs)
    value = flow.value[flow.capture.ops[op].outputs[0]]
    readers = flow.readers(outputs)
    for node in [*readers, flow.makers.get(value, -1)]:
        if (side, node) in group_of:
            return group_of[side, node]
    return None


def _in_order(after: Mapping[Node, set[Node]], members: Mapping[Node, tuple[list[int], list[int]]]) -> list[Node]:
    """Topological, otherwise by the first operator of A, then of B."""
    waits: dict[Node, int] = dict.fromkeys(after, 0)
    for readers in after.values():
        for reader in readers:
            waits[reader] += 1
    ready = [(*_first(members[group]), group) for group, n in waits.items() if not n]
    heapq.heapify(ready)
    found = []
    while ready:
        *_, group = heapq.heappop(ready)
        found.append(group)
        for reader in after[group]:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, (*_first(members[reader]), reader))
    return found


def _first(ops: tuple[list[int], list[int]]) -> tuple[int, int]:
    a, b = ops
    return (a[0] if a else -1, b[0] if b else -1)


class _Union:
    """Sets of nodes that are joined. Nodes that were not added stand alone."""

    def __init__(self) -> None:
        self._parent: dict[Node, Node] = {}

    def root(self, node: Node) -> Node:
        parent = self._parent
        while parent.get(node, node) != node:
            parent[node] = parent.get(parent[node], parent[node])
            node = parent[node]
        return node

    def join(self, one: Node, other: Node) -> None:
        a, b = self.root(one), self.root(other)
        self._parent[max(a, b)] = min(a, b)
