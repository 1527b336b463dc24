"""Captures of PyTorch itself: strides, views and in-place writes as it really records them."""

from __future__ import annotations

from typing import Any

import pytest

from gpubloat.energy.capture.records import Capture
from gpubloat.energy.match.regions import Matching, match

torch = pytest.importorskip("torch")
torchops = pytest.importorskip("gpubloat.energy.capture.torchops")


def matched(one: Any, other: Any, *inputs: Any) -> tuple[Capture, Capture, Matching]:
    a, b = torchops.capture(one, *inputs), torchops.capture(other, *inputs)
    again = [torch.randn_like(x) if x.is_floating_point() else x for x in inputs]
    found = match(a, b, again=(torchops.capture(one, *again), torchops.capture(other, *again)))
    for side, capture in ((0, a), (1, b)):
        own = [i for r in found.regions for i in (r.a_ops, r.b_ops)[side]] + list((found.a_rest, found.b_rest)[side])
        assert sorted(own) == list(range(len(capture.ops)))
    return a, b, found


def different(a: Capture, b: Capture, found: Matching) -> list[tuple[list[str], list[str]]]:
    """Operators of regions that differ, without views."""

    def names(capture: Capture, ops: tuple[int, ...]) -> list[str]:
        return [capture.ops[i].name.split("::")[1] for i in ops if not capture.ops[i].is_view]

    return [(names(a, r.a_ops), names(b, r.b_ops)) for r in found.regions if not r.is_same]


def test_gelu_of_eight_operators() -> None:
    linear = torch.nn.Linear(16, 32)

    def written_out(x: Any) -> Any:
        x = linear(x)
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))

    a, b, found = matched(
        written_out, lambda x: torch.nn.functional.gelu(linear(x), approximate="tanh"), torch.randn(5, 7, 16)
    )
    assert found.outputs_equal
    ((one, other),) = different(a, b, found)
    assert len(one) == 8
    assert other == ["gelu.default"]
    assert all(pair.is_confirmed for pair in found.pairs)


def test_a_copy_of_the_keys_is_the_only_difference() -> None:
    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    a, b, found = matched(
        lambda q, k, v: attend(q, k.repeat_interleave(1, dim=1), v), lambda q, k, v: attend(q, k, v), q, k, v
    )
    assert found.outputs_equal
    ((one, other),) = different(a, b, found)
    assert one
    assert all("attention" not in name for name in one)
    assert other == []


def test_heads_repeated_for_grouped_queries() -> None:
    q, k, v = torch.randn(1, 8, 6, 4), torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4)

    def repeated(t: Any) -> Any:
        return t[:, :, None].expand(1, 2, 4, 6, 4).reshape(1, 8, 6, 4)

    attend = torch.nn.functional.scaled_dot_product_attention
    a, b, found = matched(
        lambda q, k, v: attend(q, repeated(k), repeated(v)).exp(),
        lambda q, k, v: attend(q, k, v, enable_gqa=True).exp(),
        q, k, v,
    )  # fmt: skip
    assert found.outputs_equal
    assert a.ops
    assert b.ops
    assert found.regions[-1].is_same


def test_writing_through_a_view_and_a_buffer() -> None:
    def into_buffer(x: Any, y: Any) -> Any:
        buffer = torch.empty(4, 6)
        buffer[:2] = x.sin()
        buffer[2:].copy_(y.cos())
        return buffer * 2

    _, _, found = matched(
        into_buffer, lambda x, y: torch.cat([x.sin(), y.cos()]) * 2, torch.randn(2, 6), torch.randn(2, 6)
    )
    assert found.outputs_equal
    assert not found.b_rest


def test_a_wrong_scale_is_not_equal() -> None:
    x = torch.randn(4, 16)
    a, b, found = matched(lambda x: (x * 0.5).tanh(), lambda x: (x * 0.5001).tanh(), x)
    assert not found.outputs_equal
    assert len(found.a_rest) == len(a.ops)
    assert len(found.b_rest) == len(b.ops)


def test_norms_of_values_that_differ_in_the_last_bits_are_the_same_operators() -> None:
    """Inside, fp32 of bf16 that differs is not equal; a cast equals what it was made from and is not its partner."""
    torch.manual_seed(0)
    w, x = (torch.randn(64, 64, dtype=torch.bfloat16) for _ in range(2))

    def norm(h: Any) -> Any:
        wide = h.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return torch.ones(64, dtype=torch.bfloat16) * wide.to(torch.bfloat16)

    a, b, found = matched(
        lambda x: norm(x + (x.float() @ w.float()).to(torch.bfloat16)),
        lambda x: norm(x + x[:, :32] @ w[:32] + x[:, 32:] @ w[32:]),
        x,
    )
    assert found.outputs_equal
    assert {name for one, other in different(a, b, found) for name in (*one, *other)} == {
        "_to_copy.default", "mm.default", "add.Tensor",
    }  # fmt: skip
