"""Regions of two captures: every operator in one, as small as they can be, and never around a wrong rewrite."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubloat.energy.capture.records import Capture
from gpubloat.energy.match import equivalence
from gpubloat.energy.match.regions import Matching, match
from gpubloat.errors import GpubloatError
from tests.energy.captures import Array, Program

T, H, D = 6, 4, 8


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def names(capture: Capture, ops: tuple[int, ...]) -> list[str]:
    return [capture.ops[i].name for i in ops]


def different(a: Capture, b: Capture, found: Matching) -> list[tuple[list[str], list[str]]]:
    """Operators of the regions that differ, without views."""
    pairs = [(working(a, r.a_ops), working(b, r.b_ops)) for r in found.regions if not r.is_same]
    return [(names(a, one), names(b, other)) for one, other in pairs]


def working(capture: Capture, ops: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(i for i in ops if not capture.ops[i].is_view)


def assert_conserved(a: Capture, b: Capture, found: Matching) -> None:
    """Each operator is in one place; regions come in an order that the data flow of both sides allows."""
    for side, capture in (("a", a), ("b", b)):
        own = [getattr(region, f"{side}_ops") for region in found.regions]
        everything = [i for ops in own for i in ops] + list(getattr(found, f"{side}_rest"))
        assert sorted(everything) == list(range(len(capture.ops)))
        assert all(ops == tuple(sorted(ops)) for ops in own)
        place = {i: n for n, ops in enumerate(own) for i in ops if not capture.ops[i].is_view}
        for reader in place:
            for tensor in capture.ops[reader].inputs:
                maker = capture.producer.get(tensor)
                if maker is not None and maker in place:
                    assert place[maker] <= place[reader]
        for region in found.regions:
            inside = set(getattr(region, f"{side}_ops"))
            made = {t for i in inside for t in capture.ops[i].outputs}
            assert made.issuperset(getattr(region, f"{side}_outputs"))
            assert not made.intersection(getattr(region, f"{side}_inputs"))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attend(q: Array, k: Array, v: Array) -> Array:
    """(H, T, D) each; heads of k and v may be fewer."""
    k, v = (np.repeat(t, len(q) // len(t), 0) for t in (k, v))
    return softmax(q @ k.transpose(0, 2, 1) / D**0.5) @ v


def heads(x: Array) -> Array:
    return x.reshape(T, -1, D).transpose(1, 0, 2)


def attention(
    branch: Callable[[Program, str, int], int] = lambda _, __, x: x, seed: int = 0, kv_heads: int = H
) -> Capture:
    """Query, key and value products of one input, attention, output product. branch : done to each of the three."""
    program = Program()
    x = program.op("norm", np.tanh, program.input(normal(T, H * D, seed=seed)))
    three = []
    for i, name in enumerate("qkv"):
        width = (H if name == "q" else kv_heads) * D
        product = program.op("mm", np.matmul, x, program.input(normal(H * D, width, seed=10 + i)))
        three.append(branch(program, name, program.view("permute", heads, product)))
    out = program.op("sdpa", attend, *three)
    merged = program.op("clone", lambda o: o.transpose(1, 0, 2).reshape(T, -1), out)
    return program.finish(program.op("mm", np.matmul, merged, program.input(normal(H * D, H * D, seed=20))))


def test_a_capture_matches_itself_operator_by_operator() -> None:
    a, b = attention(), attention()
    found = match(a, b)
    assert_conserved(a, b, found)
    assert found.outputs_equal
    assert all(region.is_same for region in found.regions)
    assert all(names(a, r.a_ops)[-1] == names(b, r.b_ops)[-1] for r in found.regions)
    assert len(found.regions) == 7
    assert not found.notes


def test_only_the_key_branch_differs_and_only_it_is_told() -> None:
    a, b = attention(lambda p, name, x: p.op("repeat_interleave", np.copy, x) if name == "k" else x), attention()
    found = match(a, b)
    assert_conserved(a, b, found)
    # The copy is contiguous, what it was made of is not: attention reads other memory.
    assert different(a, b, found) == [(["repeat_interleave"], []), (["sdpa"], ["sdpa"])]
    assert len([r for r in found.regions if r.is_same]) == 6


def test_repeated_heads_are_a_region_of_their_own_for_key_and_value() -> None:
    def repeat(program: Program, name: str, x: int) -> int:
        if name == "q":
            return x
        wide = program.view("expand", lambda k: np.broadcast_to(k[:, None], (2, 2, T, D)), x)
        return program.view("view", lambda k: k.reshape(H, T, D), program.op("clone", np.copy, wide))

    a, b = attention(repeat, kv_heads=2), attention(kv_heads=2)
    found = match(a, b)
    assert_conserved(a, b, found)
    assert different(a, b, found) == [(["clone"], []), (["clone"], []), (["sdpa"], ["sdpa"])]
    assert {str(p.how) for p in found.pairs if p.larger == "a"} == {"expand axis 1 2 times, in blocks of 1"}


def fused(seed: int = 0) -> Capture:
    program = Program()
    x = program.op("norm", np.tanh, program.input(normal(T, H * D, seed=seed)))
    weight = program.input(np.concatenate([normal(H * D, H * D, seed=10 + i) for i in range(3)], 1))
    product = program.op("mm", np.matmul, x, weight)
    three = program.views("split", lambda y: tuple(np.split(y, 3, 1)), product)
    out = program.op("sdpa", attend, *(program.view("permute", heads, t) for t in three))
    merged = program.op("clone", lambda o: o.transpose(1, 0, 2).reshape(T, -1), out)
    return program.finish(program.op("mm", np.matmul, merged, program.input(normal(H * D, H * D, seed=20))))


def test_a_fused_product_matches_three_and_is_told_as_their_concatenation() -> None:
    a, b = fused(), attention()
    found = match(a, b)
    assert_conserved(a, b, found)
    # Their permuted views have other strides, so attention reads other memory: that is said too.
    assert different(a, b, found) == [(["mm"], ["mm", "mm", "mm"]), (["sdpa"], ["sdpa"])]
    wholes = [p for p in found.pairs if p.how.how == "concatenation"]
    assert [str(p.how) for p in wholes] == ["concatenation along axis 1 of #0 0:32, #1 32:64, #2 64:96"]
    assert [len(p.b) for p in wholes] == [3]


def chained(kind: str, seed: int = 0, factor: float = 0.044715) -> Capture:
    """A product, GELU of eight operators or of one, a product."""
    program = Program()
    x = program.op("mm", np.matmul, program.input(normal(T, D, seed=seed)), program.input(normal(D, D, seed=1)))

    def whole(v: Array) -> Array:
        return 0.5 * v * (1 + np.tanh(0.7978845608 * (v + factor * v**3)))

    if kind == "fused":
        y = program.op("gelu", whole, x)
    else:
        inner = program.op("mul", lambda v: factor * v, program.op("pow", lambda v: v**3, x))
        inner = program.op("mul", lambda v: 0.7978845608 * v, program.op("add", np.add, x, inner))
        inner = program.op("add", lambda v: v + 1, program.op("tanh", np.tanh, inner))
        y = program.op("mul", np.multiply, program.op("mul", lambda v: 0.5 * v, x), inner)
    return program.finish(program.op("mm", np.matmul, y, program.input(normal(D, D, seed=2))))


def test_an_unfused_chain_is_one_region() -> None:
    a, b = chained("eight"), chained("fused")
    found = match(a, b)
    assert_conserved(a, b, found)
    ((one, other),) = different(a, b, found)
    assert sorted(one) == sorted(["pow", "mul", "add", "mul", "tanh", "add", "mul", "mul"])
    assert other == ["gelu"]


def test_a_wrong_formula_leaves_a_remainder_and_says_so() -> None:
    a, b = chained("eight", factor=0.05), chained("fused")
    found = match(a, b)
    assert_conserved(a, b, found)
    assert not found.outputs_equal
    assert found.outputs.pairs[0].error > 1e-5
    assert names(b, found.b_rest) == ["gelu", "mm"]
    assert len(found.a_rest) == 9
    assert "A and B return no tensor in common" in found.notes


def test_a_graph_without_equal_tensors_inside_is_one_region() -> None:
    def small(order: int) -> Capture:
        program = Program()
        x, y, z = (program.input(normal(T, D, seed=i)) for i in range(3))
        if order == 0:
            s = program.op("add", np.add, program.op("add", np.add, x, y), z)
            return program.finish(program.op("mul", lambda v: 2 * v, s))
        parts = [program.op("mul", lambda v: 2 * v, v) for v in (x, y, z)]
        return program.finish(program.op("add", np.add, parts[0], program.op("add", np.add, *parts[1:])))

    a, b = small(0), small(1)
    found = match(a, b)
    assert [(r.a_ops, r.b_ops) for r in found.regions] == [((0, 1, 2), (0, 1, 2, 3, 4))]
    assert found.outputs_equal


def test_outputs_in_another_order_and_more_of_them() -> None:
    def returning(*order: int) -> Capture:
        program = Program()
        x = program.input(normal(T, D))
        made = [program.op(n, f, x) for n, f in (("tanh", np.tanh), ("exp", np.exp), ("sum", np.sum))]
        return program.finish(*(made[i] for i in order))

    a, b = returning(0, 1), returning(1, 0, 2)
    found = match(a, b)
    assert found.outputs_equal
    assert [(p.a, p.b) for p in found.outputs.pairs] == [(0, 1), (1, 0)]
    assert found.notes == (
        "outputs come in another order: 0 of A is 1 of B, 1 of A is 0 of B", "B returns more outputs than A: 2",
    )  # fmt: skip
    found = match(returning(0, 2), returning(1, 2))
    assert not found.outputs_equal
    assert [p.is_equal for p in found.outputs.pairs] == [False, True]
    assert found.notes == ("outputs differ: 0 of A and 0 of B",)


def test_a_loss_is_one_number_and_still_matched_by_its_place() -> None:
    def loss(name: str) -> Capture:
        program = Program()
        x = program.op("mm", np.matmul, program.input(normal(T, D)), program.input(normal(D, D, seed=1)))
        mean = program.op("div", lambda s: s / (T * D), program.op("sum", np.sum, x)) if name == "two" else None
        return program.finish(program.op("mean", np.mean, x) if mean is None else mean)

    a, b = loss("two"), loss("one")
    found = match(a, b)
    assert found.outputs_equal
    assert different(a, b, found) == [(["sum", "div"], ["mean"])]


def test_constants_that_are_everywhere_are_matched_by_what_made_them() -> None:
    def masked(extra: bool) -> Capture:
        program = Program()
        x = program.input(normal(T, D))
        for _ in range(3):
            zeros = program.op("zeros", lambda: np.zeros((T, D)))
            if extra:
                program.op("ones", lambda: np.ones((T, D)))
            x = program.op("maximum", np.maximum, zeros, program.op("sin", np.sin, x))
        return program.finish(x)

    a, b = masked(extra=True), masked(extra=False)
    found = match(a, b)
    assert_conserved(a, b, found)
    assert different(a, b, found) == []
    assert names(a, found.a_rest) == ["ones"] * 3
    assert [(names(a, r.a_ops), names(b, r.b_ops)) for r in found.regions][:3] == [
        (["zeros"], ["zeros"]), (["sin"], ["sin"]), (["maximum"], ["maximum"]),
    ]  # fmt: skip


def test_numbers_as_inputs_are_told_by_their_value_whatever_their_order_and_integer_type() -> None:
    def program_of(order: int, integer: type) -> Capture:
        program = Program()
        numbers = {n: program.input(np.array(n, integer)) for n in (2, 3)[::order]}
        x = program.input(normal(T, D))
        a, b = program.op("mul", np.multiply, numbers[2], numbers[3]), program.op("neg", np.negative, numbers[3])
        return program.finish(program.op("add", lambda *v: v[0] * v[1] + v[2], x, a, b))

    a, b = program_of(1, np.int64), program_of(-1, np.int32)
    found = match(a, b)
    assert [(names(a, r.a_ops), names(b, r.b_ops)) for r in found.regions] == [
        ([n], [n]) for n in ("mul", "neg", "add")
    ]


def test_padding_is_a_region_of_its_own() -> None:
    def program_of(padded: bool) -> Capture:
        program = Program()
        x = program.op("exp", np.exp, program.input(normal(T, D)))
        if padded:
            x = program.op("pad", lambda v: np.pad(v, ((0, 2), (0, 0))), x)
        y = program.op("tanh", np.tanh, x)
        if padded:
            y = program.view("slice", lambda v: v[:T], y)
        return program.finish(program.op("sin", np.sin, y))

    a, b = program_of(padded=True), program_of(padded=False)
    found = match(a, b)
    assert_conserved(a, b, found)
    assert found.outputs_equal
    assert different(a, b, found) == [(["pad"], []), (["tanh"], ["tanh"])]
    assert {str(p.how) for p in found.pairs if p.larger == "a"} == {"padding around 0:6, 0:8 with 0.0"}


def test_a_coincidence_is_dropped_on_a_second_input() -> None:
    def program_of(name: str, sign: float) -> Capture:
        program = Program()
        x = program.input(sign * np.abs(normal(T, D)))
        y = program.op(name, np.abs if name == "abs" else lambda v: v * 1, x)  # equal where nothing is negative
        return program.finish(program.op("exp", np.exp, y))

    a, b = program_of("abs", 1.0), program_of("mul", 1.0)
    assert match(a, b).outputs_equal
    found = match(a, b, again=(program_of("abs", -1.0), program_of("mul", -1.0)))
    assert not found.outputs_equal
    assert found.n_dropped >= 1
    assert names(a, found.a_rest) == ["abs", "exp"]
    confirmed = match(a, a, again=(program_of("abs", -1.0), program_of("abs", -1.0)))
    assert all(pair.is_confirmed for pair in confirmed.pairs)


def test_a_second_pass_over_something_else_is_refused() -> None:
    a = chained("eight")
    with pytest.raises(
        GpubloatError, match="second pass over B ran other operators than the first, from operator 1 on"
    ):
        match(a, a, again=(chained("eight", seed=3), chained("fused", seed=3)))


def test_torch_against_jax_without_strides_in_other_layouts() -> None:
    def of(framework: str) -> Capture:
        program = Program(framework)
        x = program.input(normal(T, H * D))
        weight = program.input(normal(H * D, H * D, seed=1).astype(np.float64))
        y = program.op("aten::mm" if framework == "torch" else "jax::dot_general", np.matmul, x, weight)
        if framework == "torch":
            y = program.view("aten::permute", heads, y)
        else:
            y = program.op("jax::transpose", heads, program.op("jax::reshape", np.copy, y))
        return program.finish(program.op("exp", np.exp, y))

    a, b = of("torch"), of("jax")
    found = match(a, b)
    assert_conserved(a, b, found)
    assert found.outputs_equal
    assert (["aten::mm"], ["jax::dot_general"]) in different(a, b, found)
    assert ([], ["jax::reshape", "jax::transpose"]) in different(a, b, found)


def test_bf16_values_are_compared_as_such_and_the_nearer_of_two_wins() -> None:
    def residual(noise: int) -> Capture:
        rng = np.random.default_rng(noise)
        program = Program(dtype="bf16")
        x = program.input(normal(32, 32).astype(np.float32))
        for i in range(4):  # each step is within the tolerance of bf16
            step = program.op("step", lambda v, i=i: (5e-3 * np.sin(v * (i + 2))).astype(np.float32), x)
            x = program.op(
                "add", lambda v, s: (v + s) * (1 + 1e-4 * rng.standard_normal(v.shape).astype("f4")), x, step
            )
        return program.finish(x)

    a, b = residual(1), residual(2)
    found = match(a, b)
    assert_conserved(a, b, found)
    assert [(r.a_ops, r.b_ops) for r in found.regions] == [((i,), (i,)) for i in range(8)]


def test_values_that_were_not_kept_are_said_and_make_regions_larger() -> None:
    def program_of(*missing: int) -> Capture:
        program = Program()
        x = program.input(normal(T, D))
        y = program.op("exp", np.exp, x)
        return program.finish(program.op("tanh", np.tanh, y), without=[t for t, i in ((y, 1),) if i in missing])

    a, b = program_of(1), program_of()
    found = match(a, b)
    assert [(r.a_ops, r.b_ops) for r in found.regions] == [((0, 1), (0, 1))]
    assert found.notes == ("values of A that were not kept, so not compared: 1",)


def test_work_done_twice_is_one_region_on_one_side() -> None:
    def program_of(times: int) -> Capture:
        program = Program()
        x = program.input(normal(T, D))
        made = [program.op("tanh", np.tanh, program.op("exp", np.exp, x)) for _ in range(times)]
        return program.finish(program.op("add", lambda *t: t[0] + t[-1], *made))

    a, b = program_of(2), program_of(1)
    found = match(a, b)
    assert_conserved(a, b, found)
    assert (["exp", "tanh"], []) in different(a, b, found)


def test_a_product_is_compared_with_a_product_and_not_with_a_copy_in_its_shape() -> None:
    def program_of(kind: str) -> Capture:
        program = Program()
        x, weight = program.input(normal(T, D)), program.input(normal(D, H * D, seed=1))
        if kind == "two":
            out = program.op("clone", heads, program.op("mm", np.matmul, x, weight))
        else:
            out = program.op("bmm", lambda v, w: np.stack(np.split(v @ w, H, 1)), x, weight)
        return program.finish(program.op("tanh", np.tanh, out))

    a, b = program_of("two"), program_of("one")
    found = match(a, b)
    assert_conserved(a, b, found)
    assert different(a, b, found) == [(["mm"], ["bmm"]), (["clone"], [])]


def test_branches_in_another_order_still_match() -> None:
    def program_of(order: tuple[int, int]) -> Capture:
        program = Program()
        x = program.op("tanh", np.tanh, program.input(normal(T, D)))
        made = {i: program.op(("sin", "cos")[i], (np.sin, np.cos)[i], x) for i in order}
        return program.finish(program.op("add", np.add, made[0], made[1]))

    a, b = program_of((0, 1)), program_of((1, 0))
    found = match(a, b)
    assert_conserved(a, b, found)
    assert different(a, b, found) == []
    assert len(found.regions) == 4


def test_values_that_each_side_makes_from_the_other_are_one_region() -> None:
    def program_of(first: float) -> Capture:
        program = Program()
        x = program.op("tanh", np.tanh, program.input(normal(T, D)))
        one = program.op("mul", lambda v: v * first, x)
        other = program.op("mul", lambda v: v * (6 / first / first), one)  # 2 then 3 times x, or 3 then 2 times
        return program.finish(program.op("add", lambda v, w: v + 5 * w if first == 2 else w + 5 * v, one, other))

    a, b = program_of(2.0), program_of(3.0)
    found = match(a, b)
    assert_conserved(a, b, found)
    assert found.outputs_equal
    assert [(r.a_ops, r.b_ops) for r in found.regions] == [((0,), (0,)), ((1, 2), (1, 2)), ((3,), (3,))]


def test_in_place_and_out_of_place_match() -> None:
    def program_of(in_place: bool) -> Capture:
        program = Program()
        x = program.op("exp", np.exp, program.input(normal(T, D)))
        if in_place:
            y = program.write("add_", lambda v: v + 1, x)
            return program.finish(program.op("tanh", np.tanh, y))
        return program.finish(program.op("tanh", np.tanh, program.op("add", lambda v: v + 1, x)))

    a, b = program_of(True), program_of(False)
    found = match(a, b)
    assert_conserved(a, b, found)
    assert different(a, b, found) == [(["add_"], ["add"])]


OPERATORS: list[tuple[str, Callable[..., Array], int]] = [
    ("sin", np.sin, 1),
    ("cos", np.cos, 1),
    ("tanh", np.tanh, 1),
    ("scale", lambda v: 1.5 * v, 1),
    ("add", lambda v, w: v + w, 2),
    ("mul", lambda v, w: v * w, 2),
    ("mm", lambda v, w: v @ w.T / 3, 2),
]
recipes = st.lists(
    st.tuples(st.integers(0, len(OPERATORS) - 1), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=14
)
REWRITES = ("none", "copy", "there and back", "transposed", "split")


def built(recipe: list[tuple[int, int, int]], rewrites: list[str], wrong: int = -1, seed: int = 0) -> Capture:
    """A random program over square matrices. rewrites : what is done to each result without a change of its value."""
    program = Program()
    values = [program.input(normal(8, 8, seed=seed + i)) for i in range(2)]
    for place, (which, i, j) in enumerate(recipe):
        name, function, arity = OPERATORS[which]
        if place == wrong:
            name, function = "wrong", lambda *v, f=function: f(*v) + 1e-3 * np.cos(7 * v[0])
        inputs = [values[i % len(values)], values[j % len(values)]][:arity]
        rewrite = rewrites[place % len(rewrites)]
        if rewrite == "split":
            top = program.op(f"{name} top", lambda *v, f=function: f(*v)[:3], *inputs)
            low = program.op(f"{name} low", lambda *v, f=function: f(*v)[3:], *inputs)
            out = program.op("cat", lambda *v: np.concatenate(v), top, low)
        else:
            out = program.op(name, function, *inputs)
        if rewrite == "copy":
            out = program.op("clone", np.copy, out)
        elif rewrite == "there and back":
            turned = program.op("contiguous", np.copy, program.view("t", np.transpose, out))
            out = program.view("t", np.transpose, turned)
        elif rewrite == "transposed":
            out = program.view("t", np.transpose, program.op("t copy", lambda v: v.T, out))
        values.append(out)
    return program.finish(*values[-2:])


@given(recipes, st.lists(st.sampled_from(REWRITES), min_size=1, max_size=5), st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_rewrites_that_change_no_value_keep_all_outputs_and_all_operators(
    recipe: list[tuple[int, int, int]], rewrites: list[str], seed: int
) -> None:
    a, b = built(recipe, ["none"], seed=seed), built(recipe, rewrites, seed=seed)
    for found, one, other in ((match(a, b), a, b), (match(b, a), b, a)):
        assert_conserved(one, other, found)
        assert found.outputs_equal
        assert all(pair.error < 1e-12 for pair in found.pairs)
    found = match(a, b, again=(built(recipe, ["none"], seed=5), built(recipe, rewrites, seed=5)))
    assert found.outputs_equal
    if set(rewrites) == {"none"}:
        assert all(region.is_same for region in found.regions)


@given(recipes, st.lists(st.sampled_from(REWRITES), min_size=1, max_size=5), st.data())
@settings(max_examples=30, deadline=None)
def test_a_wrong_rewrite_is_never_matched(
    recipe: list[tuple[int, int, int]], rewrites: list[str], data: st.DataObject
) -> None:
    wrong = data.draw(st.integers(0, len(recipe) - 1))
    a, b = built(recipe, ["none"]), built(recipe, rewrites, wrong=wrong)
    found = match(a, b)
    assert_conserved(a, b, found)
    for pair in found.pairs:  # by an oracle of its own: the same sorted values
        if len(pair.a) == len(pair.b) == 1 and not pair.larger:
            one, other = np.sort(a.value(pair.a[0]), None), np.sort(b.value(pair.b[0]), None)  # type: ignore[arg-type]
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)
    true = [np.sort(a.value(t), None) for t in a.outputs]  # type: ignore[arg-type]
    false = [np.sort(b.value(t), None) for t in b.outputs]  # type: ignore[arg-type]
    if not all(np.allclose(x, y, rtol=1e-9, atol=1e-9) for x, y in zip(true, false)):
        assert not found.outputs_equal


def gpt2(layers: int, kind: str, width: int = 8, tokens: int = 6) -> Capture:
    """As many operators as a GPT-2: attention and an MLP per layer, of parts or fused."""
    program = Program()
    x = program.op("embedding", lambda w: w[np.arange(tokens) % 5], program.input(normal(5, width)))
    for layer in range(layers):
        weights = [normal(width, n * width, seed=100 * layer + n) / width**0.5 for n in (3, 1, 4)]
        last = normal(4 * width, width, seed=100 * layer + 9) / width**0.5
        for half in ("attention", "mlp"):
            y = norm(program, x, kind)
            if half == "attention":
                y = multi_head(program, y, weights[0], kind, width, tokens)
                y = linear(program, y, weights[1])
            else:
                y = linear(program, y, weights[2])
                y = linear(program, gelu(program, y, kind), last)
            x = program.op("add", np.add, x, y)
    return program.finish(norm(program, x, kind))


def linear(program: Program, x: int, weight: Array) -> int:
    turned = program.view("t", np.transpose, program.input(weight.T.copy()))
    return program.view(
        "view", lambda v: v[None], program.op("addmm", lambda v, w: (v @ w).reshape(-1, w.shape[1]), x, turned)
    )


def norm(program: Program, x: int, kind: str) -> int:
    def whole(v: Array) -> Array:
        return (v - v.mean(-1, keepdims=True)) / np.sqrt(v.var(-1, keepdims=True) + 1e-5)

    if kind == "fused":
        return program.op("layer_norm", whole, x)
    centred = program.op("sub", np.subtract, x, program.op("mean", lambda v: v.mean(-1, keepdims=True), x))
    variance = program.op("mean", lambda v: (v * v).mean(-1, keepdims=True), centred)
    return program.op("div", lambda v, s: v / np.sqrt(s + 1e-5), centred, variance)


def gelu(program: Program, x: int, kind: str) -> int:
    def whole(v: Array) -> Array:
        return 0.5 * v * (1 + np.tanh(0.8 * (v + 0.05 * v**3)))

    if kind == "fused":
        return program.op("gelu", whole, x)
    inner = program.op("tanh", lambda v, c: np.tanh(0.8 * (v + 0.05 * c)), x, program.op("pow", lambda v: v**3, x))
    return program.op("mul", lambda v, t: 0.5 * v * (1 + t), x, inner)


def multi_head(program: Program, x: int, weight: Array, kind: str, width: int, tokens: int) -> int:
    def divided(v: Array) -> Array:
        return v.reshape(tokens, 2, width // 2).transpose(1, 0, 2)

    if kind == "fused":
        three = [linear(program, x, part) for part in np.split(weight, 3, 1)]
        q, k, v = (program.view("view", divided, t) for t in three)
        out = program.op("sdpa", lambda q, k, v: softmax(q @ k.transpose(0, 2, 1)) @ v, q, k, v)
    else:
        product = linear(program, x, weight)
        three = list(program.views("split", lambda v: tuple(np.split(v[0], 3, 1)), product))
        q, k, v = (program.op("clone", np.copy, program.view("view", divided, t)) for t in three)
        scores = program.op("bmm", np.matmul, q, program.view("t", lambda m: m.transpose(0, 2, 1), k))
        out = program.op("bmm", np.matmul, program.op("softmax", softmax, scores), v)
    return program.op("clone", lambda o: o.transpose(1, 0, 2).reshape(tokens, width), out)


def test_a_network_of_hundreds_of_operators_takes_few_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = gpt2(20, "parts"), gpt2(20, "fused")
    assert len(a.ops) > 730
    assert len(b.ops) > 408
    counted = []
    original = equivalence.difference
    monkeypatch.setattr(equivalence, "difference", lambda *x, **y: counted.append(1) or original(*x, **y))
    found = match(a, b)
    assert_conserved(a, b, found)
    assert found.outputs_equal
    assert len(counted) < 2 * (len(a.ops) + len(b.ops))  # of a quarter of a million pairs
    assert len(found.anchors) >= 2 * 20
    assert not found.n_crossed
    assert not found.a_rest
    assert not found.b_rest
    assert max(len(r.a_ops) for r in found.regions) < 20


def test_an_expanded_weight_is_compared_as_it_is_stored() -> None:
    """A batch of small products from one weight: 8 PiB if its copies were made, or looked at one by one."""
    times = 1 << 44

    def written(kind: str, seed: int = 0) -> Capture:
        p = Program()
        x, w = p.input(normal(T, D, seed=seed)), p.input(normal(D, D, seed=seed + 10))
        if kind == "batched":
            wide = p.view("expand", lambda a: np.broadcast_to(a, (times, D, D)), w)
            wide = p.view("view", lambda a: a.reshape(times // 2, 2, D, D), wide)
            out = p.op("bmm", lambda x, w: x @ w[0, 0], x, wide)
        else:
            out = p.op("mm", np.matmul, x, w)
        out = p.op("relu", np.abs if kind == "wrong" else lambda o: o.clip(0), out)
        return p.finish(out, p.view("expand", lambda a: np.broadcast_to(a, (times, T, D)), out))

    a, b = written("batched"), written("flat")
    found = match(a, b, again=(written("batched", 2), written("flat", 2)))
    assert_conserved(a, b, found)
    assert found.outputs_equal
    ways = {str(pair.how) for pair in found.pairs}
    assert ways == {"same", f"expand axis 0 {times} times, in blocks of 1"}
    wrong = match(a, written("wrong"))
    assert not wrong.outputs_equal
    assert all(0.1 < pair.error < 2 for pair in wrong.outputs.pairs)
