"""What is made once and used everywhere: masks, tables, casts. It joins no regions, and the regions still replay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubloat.energy.capture.records import Capture
from gpubloat.energy.differences.regions import Alone, _said
from gpubloat.energy.match.cuts import preparations
from gpubloat.energy.match.graph import cuts, data_free, graph
from gpubloat.energy.match.regions import Matching, match
from gpubloat.energy.statistics import TRADE_OFF, WASTE
from tests.energy.captures import Array, Program
from tests.energy.test_match_regions import D, T, assert_conserved, different, names, normal, softmax

LAYERS = 4
CAUSAL = np.triu(np.full((T, T), -np.inf), 1)


def layered(program: Program, tokens: int, attend: Any) -> Capture:
    """x = x + attend(x) W for each layer. attend : (program, x, layer) -> tensor."""
    x = program.op("embedding", lambda i: normal(9, D, seed=1)[i], tokens)
    for layer in range(LAYERS):
        mixed = attend(program, x, layer)
        weight = program.input(normal(D, D, seed=10 + layer) / D)
        x = program.op("add", np.add, x, program.op("mm", np.matmul, mixed, weight))
    return program.finish(x)


def tokens(program: Program, seed: int = 0) -> int:
    return program.input(np.random.default_rng(seed).integers(0, 9, T))


def causal(kind: str, steps: int = 1) -> Capture:
    """Attention of parts with one mask for all layers, which takes some steps to make; or fused."""
    program = Program()
    given_ = tokens(program)
    if kind == "parts":
        mask = program.op("full", lambda: np.full((T, T), -np.inf))
        for _ in range(steps):
            mask = program.op("triu", lambda m: np.triu(m, 1), mask)
        mask = program.view("unsqueeze", lambda m: m[None], mask)

    def attend(program: Program, x: int, _: int) -> int:
        if kind == "fused":
            return program.op("sdpa", lambda x: softmax(x @ x.T + CAUSAL) @ x, x)
        scores = program.op("mm", lambda x: x @ x.T, x)
        scores = program.op("add", lambda s, m: s + m[0], scores, mask)
        return program.op("bmm", np.matmul, program.op("softmax", softmax, scores), x)

    return layered(program, given_, attend)


ATTENTION = (["mm", "add", "softmax", "bmm"], ["sdpa"])


@pytest.mark.parametrize("steps", [1, 20])
def test_a_mask_that_one_side_makes_for_all_layers_joins_none(steps: int) -> None:
    a, b = causal("parts", steps), causal("fused")
    for one, other in ((a, b), (b, a)):
        found = match(one, other)
        assert_conserved(one, other, found)
        assert found.outputs_equal
        assert not found.a_rest
        assert not found.b_rest
        mask = (["full"] + ["triu"] * steps, [])
        expected = [mask] + [ATTENTION] * LAYERS
        assert different(one, other, found) == (expected if one is a else [pair[::-1] for pair in expected])
        # The embedding and what no mask reaches, whatever the mask's own way to the output.
        assert len(found.anchors) >= LAYERS + 1
        assert [r.is_preparation for r in found.regions].count(True) == 1


def test_a_mask_joins_no_branches_of_one_layer_either() -> None:
    def program_of(kind: str) -> Capture:
        program = Program()
        x = program.op("tanh", np.tanh, program.input(normal(T, D)))
        mask = program.op("triu", lambda: CAUSAL) if kind == "parts" else x
        branches = []
        for i in (0, 1):
            own = program.op("mm", np.matmul, x, program.input(normal(D, D, seed=i)))
            if kind == "fused":
                branches.append(program.op("sdpa", lambda x: softmax(x @ x.T + CAUSAL) @ x, own))
                continue
            scores = program.op("add", lambda x, m: x @ x.T + m, own, mask)
            branches.append(program.op("bmm", np.matmul, program.op("softmax", softmax, scores), own))
        return program.finish(program.op("cat", lambda *v: np.concatenate(v), *branches))

    a, b = program_of("parts"), program_of("fused")
    found = match(a, b)
    assert_conserved(a, b, found)
    assert different(a, b, found) == [(["triu"], [])] + [(["add", "softmax", "bmm"], ["sdpa"])] * 2


def test_work_done_twice_with_what_is_shared_is_told_in_each_layer() -> None:
    def program_of(times: int) -> Capture:
        program = Program()
        given_ = tokens(program)
        table = program.op("sin", lambda: np.sin(np.arange(D))) if times == 2 else given_
        if times == 2:
            table = program.view("unsqueeze", lambda t: t[None], table)  # it goes where it is read first

        def attend(program: Program, x: int, _: int) -> int:
            made = [program.op("mul", lambda x, _: x * np.sin(np.arange(D)), x, table) for _ in range(times)]
            return program.op("mean", lambda *v: v[0], *made)

        return layered(program, given_, attend)

    a, b = program_of(2), program_of(1)
    found = match(a, b)
    assert_conserved(a, b, found)
    assert sum(pair == (["mul"], []) for pair in different(a, b, found)) == LAYERS
    assert max(len(r.b_ops) for r in found.regions) == 1
    assert [names(a, r.a_ops) for r in found.regions if r.is_preparation] == [["sin"]]


def test_a_mask_for_one_layer_is_part_of_it() -> None:
    def program_of(kind: str) -> Capture:
        program = Program()
        x = program.op("tanh", np.tanh, program.input(normal(T, D)))
        if kind == "fused":
            return program.finish(program.op("sdpa", lambda x: softmax(x @ x.T + CAUSAL) @ x, x))
        mask = program.op("triu", lambda: CAUSAL)
        scores = program.op("add", lambda x, m: x @ x.T + m, x, mask)
        return program.finish(program.op("bmm", np.matmul, program.op("softmax", softmax, scores), x))

    a, b = program_of("parts"), program_of("fused")
    found = match(a, b)
    assert_conserved(a, b, found)
    assert different(a, b, found) == [(["triu", "add", "softmax", "bmm"], ["sdpa"])]


def rotary(kind: str) -> Capture:
    """Queries and keys turned by angles: tables of cosines and sines, or of complex numbers, from a range."""
    program = Program()
    given_ = tokens(program)
    angles = np.outer(np.arange(T), 1e-2 ** np.linspace(0, 1, D // 2))
    range_ = program.op("arange", lambda: np.arange(T))
    if kind == "real":
        table = program.op("outer", lambda r: np.concatenate([np.outer(r, angles[1])] * 2, -1), range_)
        tables = [program.op("cos", np.cos, table), program.op("sin", np.sin, table)]
    else:
        tables = [program.op("polar", lambda r: np.exp(1j * np.outer(r, angles[1])), range_)]

    def halves(x: Array) -> Array:
        return np.concatenate([-x[:, D // 2 :], x[:, : D // 2]], -1)

    def complexly(x: Array, c: Array) -> Array:
        y = (x[:, : D // 2] + 1j * x[:, D // 2 :]) * c
        return np.concatenate([y.real, y.imag], -1)

    def turned(x: int) -> int:
        if kind == "complex":
            return program.op("mul", complexly, x, *tables)
        scaled = program.op("mul", np.multiply, x, tables[0])
        return program.op("add", np.add, scaled, program.op("mul", lambda x, s: halves(x) * s, x, tables[1]))

    def attend(program: Program, x: int, layer: int) -> int:
        q, k = (
            turned(program.op("mm", np.matmul, x, program.input(normal(D, D, seed=40 + 2 * layer + i)))) for i in (0, 1)
        )
        return program.op("sdpa", lambda q, k, x: softmax(q @ k.T) @ x, q, k, x)

    return layered(program, given_, attend)


def test_tables_that_both_sides_make_in_their_own_way_are_one_region() -> None:
    a, b = rotary("real"), rotary("complex")
    found = match(a, b)
    assert_conserved(a, b, found)
    assert found.outputs_equal
    turns = (["mul", "mul", "add"], ["mul"])
    told = different(a, b, found)
    assert sorted(told) == sorted([(["outer", "cos", "sin"], ["polar"])] + [turns] * 2 * LAYERS)
    assert not any(region.is_preparation for region in found.regions)  # the other side does so, too


def scaled(kind: str, seed: int = 0) -> Capture:
    """Scores less a bias by an input of integers: cast once for all layers, or inside each."""
    program = Program()
    given_, distance = tokens(program, seed), program.input(np.random.default_rng(seed).integers(0, 9, (T, T)))
    bias = program.op("to", lambda d: -0.1 * d, distance) if kind == "once" else distance

    def attend(program: Program, x: int, _: int) -> int:
        if kind == "fused":
            return program.op("sdpa", lambda x, d: softmax(x @ x.T - 0.1 * d) @ x, x, bias)
        scores = program.op("mm", lambda x, b: x @ x.T + b, x, bias)
        return program.op("bmm", np.matmul, program.op("softmax", softmax, scores), x)

    return layered(program, given_, attend)


def test_an_input_that_one_side_casts_once_for_all_layers_joins_none() -> None:
    a, b = scaled("once"), scaled("fused")
    found = match(a, b, again=(scaled("once", 1), scaled("fused", 1)))
    assert_conserved(a, b, found)
    assert found.outputs_equal
    assert different(a, b, found) == [(["to"], [])] + [(["mm", "softmax", "bmm"], ["sdpa"])] * LAYERS


def keys(kind: str) -> Capture:
    """Keys of all layers from another sequence: one product and its slices, or a product for each layer."""
    program = Program()
    given_, memory = tokens(program), program.input(normal(T, D, seed=2))
    weights = [normal(D, D, seed=60 + i) for i in range(LAYERS)]
    if kind == "one":
        whole = program.op("mm", np.matmul, memory, program.input(np.concatenate(weights, 1)))

    def attend(program: Program, x: int, layer: int) -> int:
        if kind == "one":
            key = program.view("slice", lambda k: k[:, layer * D : (layer + 1) * D], whole)
        else:
            key = program.op("mm", np.matmul, memory, program.input(weights[layer]))
        return program.op("sdpa", lambda x, k: softmax(x @ k.T) @ x, x, key)

    return layered(program, given_, attend)


def test_one_product_for_all_layers_is_compared_with_those_of_each() -> None:
    a, b = keys("one"), keys("each")
    found = match(a, b)
    assert_conserved(a, b, found)
    assert (["mm"], ["mm"] * LAYERS) in different(a, b, found)
    assert not any(region.is_preparation for region in found.regions)


def test_what_is_data_free_and_what_several_stages_need() -> None:
    program = Program()
    x = program.op("exp", np.exp, program.input(normal(T, D)))
    bias = program.op("to", np.abs, program.input(normal(T, D, seed=1)))
    twice = program.op("mul", lambda v: 2 * v, bias)
    table = program.op("cos", np.cos, program.view("t", np.transpose, program.op("arange", lambda: normal(D, T))))
    x = program.op("add 1", np.add, x, bias)
    x = program.op("add 2", lambda *v: sum(v), x, twice, table)
    capture = program.finish(program.op("tanh", np.tanh, x), program.op("cache", np.sin, bias))
    flow = graph(capture)
    assert names(capture, tuple(sorted(data_free(flow)))) == ["arange", "t", "cos"]
    anchors = cuts(flow)
    assert names(capture, tuple(anchors)) == ["exp", "add 1", "add 2", "tanh"]
    prepared = preparations(flow, anchors)
    assert names(capture, tuple(sorted(prepared))) == ["to", "arange", "t", "cos"]
    assert preparations(flow, []) == data_free(flow)


def test_a_cache_is_no_stage() -> None:
    program = Program()
    key = program.op("key", np.sin, program.input(normal(T, D)))
    x = program.op("add 1", np.exp, key)
    later = program.op("key", np.sin, x)
    x = program.op("add 2", np.exp, later)
    capture = program.finish(x, program.op("stack", lambda *v: np.stack(v), key, later))
    assert preparations(graph(capture), [1, 3]) == set()


def test_a_function_that_reads_nothing_has_cuts_too() -> None:
    program = Program()
    x = program.op("arange", lambda: np.arange(20.0))
    capture = program.finish(program.op("tanh", np.tanh, program.op("sin", np.sin, x)))
    assert cuts(graph(capture)) == [0, 1, 2]
    found = match(capture, capture)
    assert [(r.a_ops, r.b_ops) for r in found.regions] == [((i,), (i,)) for i in range(3)]


steps = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99)), min_size=1, max_size=12)


def woven(recipe: list[tuple[int, int]], is_fused: bool, seed: int = 0) -> Capture:
    """Steps that use a table of no data, one of an input, or both; or that make them again in each step."""
    program = Program()
    values = [program.input(normal(T, T, seed=seed)), program.input(normal(T, T, seed=seed + 1))]
    given_ = program.input(np.random.default_rng(seed).integers(-9, 9, (T, T)))
    if not is_fused:
        tables = [program.op("table", lambda: np.sin(CAUSAL == 0)), program.op("to", lambda g: g / 9, given_)]
    for which, i in recipe:
        x = values[i % len(values)]
        if is_fused:
            bias = (lambda _: np.sin(CAUSAL == 0), lambda g: g / 9, lambda g: np.sin(CAUSAL == 0) + g / 9)[which]
            values.append(program.op("fused", lambda v, g, bias=bias: np.tanh(v + bias(g)), x, given_))
            continue
        for table in tables if which == 2 else [tables[which]]:
            x = program.op("add", np.add, x, table)
        values.append(program.op("tanh", np.tanh, x))
    return program.finish(values[-1], values[-1 - len(recipe) // 2])


@given(steps, st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_whatever_uses_them_operators_are_in_one_place_and_outputs_equal(
    recipe: list[tuple[int, int]], seed: int
) -> None:
    a, b = woven(recipe, False, seed), woven(recipe, True, seed)
    for one, other in ((a, b), (b, a), (a, a)):
        found = match(one, other)
        assert_conserved(one, other, found)
        assert found.outputs_equal


class Equal:
    """Of a pair, what `_said` asks for."""

    outputs_equal = True


def test_a_preparation_is_no_waste_and_a_copy_is(torch: Any) -> None:
    from gpubloat.energy.capture import capture
    from gpubloat.energy.replay import Replay, replayable

    weights = [torch.randn(8, 8) / 8 for _ in range(LAYERS)]

    def of_parts(x: Any, keep: Any) -> Any:
        mask = torch.full((6, 6), float("-inf")).triu(1)
        mask = mask + keep.float() * -0.1
        for weight in weights:
            y = torch.softmax(x @ x.T + mask, -1) @ x.T.contiguous().T
            x = x + y @ weight
        return x

    def fused(x: Any, keep: Any) -> Any:
        for weight in weights:
            mask = torch.full((6, 6), float("-inf")).triu(1)
            y = torch.softmax((x @ x.T).addcmul(keep.float(), torch.tensor(-0.1)) + mask, -1) @ x
            x = x + y @ weight
        return x

    inputs = torch.randn(6, 8), torch.randint(0, 9, (6, 6))
    with capture(of_parts, *inputs) as a, capture(fused, *inputs) as b:
        found: Matching = match(a, b)
        assert found.outputs_equal
        assert max(len(region.a_ops) for region in found.regions) < 9
        (prepared,) = (region for region in found.regions if region.is_preparation)
        assert [a.ops[i].name.split("::")[1].split(".")[0] for i in prepared.a_ops][-1] == "add"
        made = set(prepared.a_outputs)
        users = [region for region in found.regions if made & set(region.a_inputs)]
        assert len(users) == LAYERS
        for region in (prepared, *users):  # from recorded values, those of one side too
            replay = replayable([a.ops[i] for i in region.a_ops], a, target_s=1e-4)
            assert isinstance(replay, Replay), replay
            assert replay.worst_error == 0
        copies = next(r for r in found.regions if not r.b_ops and not r.is_preparation)
        verdicts = [_said(Equal, region, None, Alone(0, 1.0), "").verdict for region in (prepared, copies)]  # type: ignore[arg-type]
        assert verdicts == [TRADE_OFF, WASTE]
