"""Data flow, dominators by their definition, anchors by trying all."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubloat.energy.match.cuts import between, chain, fits
from gpubloat.energy.match.graph import cuts, dominators, graph
from tests.energy.captures import Program

dags = st.integers(1, 14).flatmap(
    lambda n: st.tuples(
        *[st.sets(st.integers(0, max(i - 1, 0)), max_size=3) if i else st.just(set()) for i in range(n)]
    )
)


def reached(before: list[set[int]], root: int, without: int | None = None) -> set[int]:
    """Nodes that `root` reaches when one node is taken out."""
    found = {root} - {without}
    for node in range(root + 1, len(before)):
        if node != without and before[node] & found:
            found.add(node)
    return found


@given(dags)
@settings(max_examples=200, deadline=None)
def test_dominators_are_the_nodes_without_which_a_node_is_not_reached(before: list[set[int]]) -> None:
    parent = dominators([sorted(b) for b in before], 0)
    everything = reached(before, 0)
    for node in range(len(before)):
        if node not in everything:
            assert parent[node] is None
            continue
        expected = {d for d in everything if d == node or node not in reached(before, 0, without=d)}
        found = {node}
        while node != 0:
            node = parent[node]  # type: ignore[assignment]
            found.add(node)
        assert found == expected


@given(dags)
@settings(max_examples=100, deadline=None)
def test_backwards_they_are_the_post_dominators(before: list[set[int]]) -> None:
    last = len(before) - 1
    turned: list[list[int]] = [[] for _ in before]
    for node, sources in enumerate(before):
        for source in sources:
            turned[last - source].append(last - node)
    parent = dominators([sorted(b) for b in turned], 0)
    for node in range(len(before)):
        above = parent[last - node]
        assert (above is None) == (last not in reached(before, node))
        if above is not None and node != last:
            assert last not in reached(before, node, without=last - above)


def transformer(layers: int) -> tuple[Program, int]:
    """x = x + branch(x), each with a weight of its own that is used as a view."""
    rng = np.random.default_rng(0)
    program = Program()
    x = program.op("embed", np.tanh, program.input(rng.standard_normal((4, 8))))
    for _ in range(layers):
        weight = program.view("aten::t", np.transpose, program.input(rng.standard_normal((8, 8))))
        branch = program.op("mm", np.matmul, x, weight)
        program.op("statistics", np.mean, branch)  # nobody reads it
        x = program.op("add", np.add, x, branch)
    return program, x


def test_all_flow_passes_the_residuals_whatever_weights_enter_and_caches_leave() -> None:
    program, x = transformer(3)
    caches = [op.outputs[0] for op in program.ops if op.name == "mm"]
    for outputs in ((x,), (x, *caches), (*caches, x)):
        capture = program.finish(*outputs)
        assert [capture.ops[i].name for i in cuts(graph(capture))] == ["embed", "add", "add", "add"]


def test_a_capture_that_returns_its_input_has_no_cuts() -> None:
    program, _ = transformer(1)
    assert cuts(graph(program.finish(program.inputs[0]))) == []


def test_views_of_all_elements_are_the_same_value_and_others_are_not() -> None:
    program = Program()
    x = program.op("relu", np.abs, program.input(np.arange(24.0).reshape(2, 3, 4)))
    turned = program.view("permute", lambda v: v.transpose(2, 0, 1), x)
    flat = program.view("view", lambda v: v.reshape(-1), x)
    first, second = program.views("split", lambda v: (v[:, :, :1], v[:, :, 1:]), x)
    part = program.view("view", lambda v: v.transpose(1, 0, 2), second)
    wide = program.view("expand", lambda v: np.broadcast_to(v[None], (5, 24)), flat)
    conjugate = program.view("aten::_conj", lambda v: v[:], flat)
    reader = program.op("add", lambda a, b: a.sum() + b.sum(), turned, part)
    flow = graph(program.finish(reader))
    assert flow.value[turned] == flow.value[flat] == x
    assert flow.value[part] == second
    assert {flow.value[t] for t in (first, second, wide, conjugate)} == {first, second, wide, conjugate}
    free = [op.name for op, is_free in zip(flow.capture.ops, flow.is_free) if is_free]
    assert free == ["permute", "view", "view"]
    assert flow.before(flow.capture.producer[reader]) == [0, flow.capture.producer[first]]  # past free views


def test_who_reads_memory_depends_on_who_wrote_it_through_another_tensor() -> None:
    program = Program()
    x = program.op("empty", np.copy, program.input(np.zeros((4, 4))))
    row = program.view("select", lambda v: v[1], x)
    program.write("copy_", lambda _, source: source, row, program.input(np.ones(4)))
    again = program.op("sum", np.sum, x)
    flow = graph(program.finish(again))
    assert [flow.capture.ops[i].name for i in flow.before(flow.capture.producer[again])] == ["empty", "copy_"]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 5)), max_size=9))
@settings(max_examples=200, deadline=None)
def test_a_chain_is_the_heaviest_of_all(pairs: list[tuple[int, int, int]]) -> None:
    found = chain(pairs)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(found))
    best = 0
    for n in range(len(pairs) + 1):
        for some in combinations(sorted(pairs), n):
            if all(p[0] < q[0] and p[1] < q[1] for p, q in pairwise(some)):
                best = max(best, sum(p[2] for p in some))
    weight = {(a, b): max(p[2] for p in pairs if p[:2] == (a, b)) for a, b in found}
    assert sum(weight.values()) == best


def test_of_equal_chains_the_earlier_ends_are_taken() -> None:
    assert chain([(0, 0, 1), (0, 1, 1), (1, 0, 1)]) == [(0, 0)]
    assert chain([(0, 2, 1), (1, 0, 1), (2, 1, 1)]) == [(1, 0), (2, 1)]
    assert chain([(0, 5, 3), (1, 0, 1), (2, 1, 1)]) == [(0, 5)]
    assert chain([]) == []


def test_places_between_anchors() -> None:
    program, x = transformer(3)
    capture = program.finish(x)
    flow = graph(capture)
    spans = between(flow, cuts(flow)[:3])  # embed, add, add
    places = {i: (spans.after[i], spans.until[i]) for i in range(flow.n)}
    by_name = [(capture.ops[i].name, place) for i, place in places.items() if capture.ops[i].name in ("mm", "add")]
    assert by_name == [
        ("mm", (1, 2)), ("add", (2, 2)), ("mm", (2, 3)), ("add", (3, 3)), ("mm", (3, 4)), ("add", (3, 4)),
    ]  # fmt: skip
    assert fits((1, 2), (1, 2))
    assert fits((0, 4), (2, 3))  # may be made early
    assert fits((2, 2), (2, 3))  # a copy of the anchor
    assert not fits((1, 2), (2, 3))
    assert not fits((3, 3), (2, 2))
