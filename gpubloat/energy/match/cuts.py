"""Anchors: cuts of A and B with equal tensors, in the same order on both sides; which other pairs fit between.

Between two anchors is a stage. What several stages need was not made by the data that passes through the anchors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpubloat.energy.match.graph import Graph, data_free


@dataclass(frozen=True)
class Between:
    """By operator: the number of the last anchor that it depends on (0: none), and of the first that needs it.

    An anchor has its own number in both. Anchors count from 1.
    """

    after: tuple[int, ...]
    until: tuple[int, ...]


def chain(pairs: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """The heaviest choice of (place in A, place in B, weight) in which both places grow, ends at the earliest places.

    O(n log n): a Pareto front of (last place in B, weight) is kept, places of A come in order.
    """
    ordered = sorted(pairs, key=lambda p: (p[0], -p[1]))  # of one place in A, only one can be taken
    lasts: list[int] = []
    weights: list[int] = []
    heads: list[int] = []  # index into ordered
    previous: list[int] = []
    for index, (_, place, weight) in enumerate(ordered):
        at = bisect_right(lasts, place - 1)
        total = weight + (weights[at - 1] if at else 0)
        previous.append(heads[at - 1] if at else -1)
        if at < len(lasts) and lasts[at] == place and weights[at] >= total:
            continue  # as good a one that ends earlier in A
        end = at
        while end < len(lasts) and weights[end] <= total:
            end += 1
        lasts[at:end], weights[at:end], heads[at:end] = [place], [total], [index]
    found = []
    at = heads[-1] if heads else -1
    while at >= 0:
        found.append(ordered[at][:2])
        at = previous[at]
    return found[::-1]


def between(flow: Graph, anchors: Sequence[int]) -> Between:
    """anchors : operators of one side, each dependent on the one before."""
    number = {op: i + 1 for i, op in enumerate(anchors)}
    after = [0] * flow.n
    until = [len(anchors) + 1] * flow.n
    for op in range(flow.n):
        after[op] = number.get(op) or max((after[e.maker] for e in flow.edges_in[op]), default=0)
    for op in reversed(range(flow.n)):
        until[op] = number.get(op) or min((until[e.reader] for e in flow.edges_out[op]), default=len(anchors) + 1)
    return Between(tuple(after), tuple(until))


def preparations(flow: Graph, anchors: Sequence[int]) -> set[int]:
    """Operators beside the data that passes through the anchors: data-free ones, and those that several stages need.

    A mask, cast once for all layers, is one of them. What depends on an anchor never is: it reaches later stages
    through later anchors only.
    """
    spans = between(flow, anchors)
    last = [0] * flow.n  # stage that needs an operator directly, or by way of others before the anchors
    for op in reversed(range(flow.n)):
        if not spans.after[op]:
            last[op] = max((last[e.reader] for e in flow.edges_out[op]), default=0)
        elif spans.until[op] <= len(anchors):  # otherwise it leaves for an output of its own, such as a cache
            last[op] = spans.until[op]
    shared = {op for op in range(flow.n) if last[op] > spans.until[op]}
    free = data_free(flow)
    return shared | free if free.isdisjoint(anchors) else shared


def fits(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether a value of A, made (after, until) those anchors, can be one of B: not behind an anchor that it precedes.

    What equals an anchor may come right before or behind it: it is the same, or a copy.
    """
    if a[0] == a[1] or b[0] == b[1]:
        return a[0] <= b[1] and b[0] <= a[1]
    return a[0] < b[1] and b[0] < a[1]
