"""Captures of JAX against JAX itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpubloat.energy.capture import Capture, capture
from gpubloat.errors import GpubloatError

jax = pytest.importorskip("jax")
jnp = jax.numpy


def names(found: Capture) -> list[str]:
    return [op.name.removeprefix("jax::") for op in found.ops]


def check_order(found: Capture) -> None:
    made = set(found.inputs)
    for n, op in enumerate(found.ops):
        assert op.index == n
        assert set(op.inputs) <= made
        assert not set(op.outputs) & made
        made.update(op.outputs)
    assert set(found.outputs) <= made == set(found.tensors)


def test_values_and_order() -> None:
    def fn(w: Any, x: Any) -> Any:
        return {"y": jnp.tanh(x @ w) + 1, "x": x}

    w, x = jnp.ones((4, 3)), jnp.arange(8.0).reshape(2, 4)
    found = capture(fn, w, x)
    check_order(found)
    assert found.framework == "jax"
    assert names(found) == ["dot_general", "tanh", "add"]
    assert found.inputs[:2] == (0, 1)
    assert found.outputs[0] == 1
    assert np.array_equal(found.value(0), w)
    assert np.allclose(found.value(found.outputs[1]), fn(w, x)["y"])
    info = found.tensors[found.ops[0].outputs[0]]
    assert (info.shape, info.strides, info.dtype, info.device, info.n_bytes) == ((2, 3), None, "fp32", "cpu", 24)
    assert found.ops[0].arguments.startswith("%1, %0, dimension_numbers=")
    line = found.ops[0].lines[0]
    assert line.file.endswith("test_capture_jax.py")
    assert not line.file.startswith("/")
    assert line.code == 'return {"y": jnp.tanh(x @ w) + 1, "x": x}'
    assert line.function == "fn"
    assert {t.storage for t in found.tensors.values()} == set(found.tensors)


@jax.custom_jvp
def cube(x: Any) -> Any:
    return x * x * x


cube.defjvps(lambda t, _, x: 3 * x * x * t)


@jax.custom_vjp
def halved(x: Any) -> Any:
    return x / 2


halved.defvjp(lambda x: (x / 2, None), lambda _, t: (t * 0.5,))


def test_calls_are_entered() -> None:
    @jax.jit
    def inner(x: Any) -> Any:
        return jnp.sin(x)

    def fn(x: Any) -> Any:
        with jax.named_scope("net"):
            y = inner(x)
        return halved(cube(jax.checkpoint(jnp.cos)(y))).sum()

    x = jnp.arange(3.0)
    found = capture(fn, x)
    check_order(found)
    assert names(found) == ["sin", "cos", "mul", "mul", "div", "reduce_sum"]
    assert found.ops[0].module == "net"
    assert np.allclose(found.value(found.outputs[0]), fn(x))
    back = capture(jax.grad(fn), x)
    check_order(back)
    assert not {"jit", "pjit", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"} & set(names(back))
    assert np.allclose(back.value(back.outputs[0]), jax.grad(fn)(x), rtol=1e-6)


def test_loops_and_branches_are_one_operator() -> None:
    def fn(x: Any) -> Any:
        y = jax.lax.scan(lambda c, t: (c + t, c * t), x[0], x)[1]
        y = jax.lax.while_loop(lambda v: v.sum() < 100, lambda v: v + 1, y)
        return jax.lax.cond(y.sum() > 0, jnp.sin, jnp.cos, y)

    x = jnp.arange(6.0).reshape(3, 2)
    found = capture(fn, x)
    check_order(found)
    assert {"scan", "while", "cond"} <= set(names(found))
    assert len(found.notes) == 3
    assert np.allclose(found.value(found.outputs[0]), fn(x))


def test_random_keys_and_small_types() -> None:
    def fn(x: Any) -> Any:
        return jax.random.normal(jax.random.key(3), (5,)).astype(jnp.bfloat16) + x

    x = jnp.ones(5, jnp.bfloat16)
    found, again = capture(fn, x), capture(fn, x)
    assert found.tensors[found.outputs[0]].dtype == "bf16"
    assert np.array_equal(found.value(found.outputs[0]), np.asarray(fn(x), np.float32))
    assert np.array_equal(found.value(found.outputs[0]), again.value(again.outputs[0]))
    assert any("key" in note for note in found.notes)


def test_numbers_and_texts_are_constants() -> None:
    def fn(x: Any, times: int, how: str) -> Any:
        for _ in range(times):
            x = getattr(jnp, how)(x)
        return x

    assert names(capture(fn, jnp.ones(2), 3, "sin")) == ["sin"] * 3


def test_what_cannot_be_captured() -> None:
    def branches(x: Any) -> Any:
        return x if x.sum() > 0 else -x

    with pytest.raises(GpubloatError, match=r"cannot be traced at .*test_capture_jax.py:\d+: TracerBool") as info:
        capture(branches, jnp.ones(2))
    assert info.value.__cause__ is not None
    with pytest.raises(GpubloatError, match="returns no tensor"):
        capture(lambda _: None, jnp.ones(2))

    def checked(x: Any) -> Any:
        def fails(_: Any) -> Any:
            raise ValueError("mine")

        return jax.pure_callback(fails, x, x)

    with pytest.raises(GpubloatError, match="in jax::pure_callback"):
        capture(lambda x: checked(jnp.sin(x)), jnp.ones(2))


def test_limits() -> None:
    found = capture(lambda x: jnp.sin(x).sum(), jnp.arange(100.0), keep_bytes=400, spill_bytes=0)
    assert [t.is_kept for t in found.tensors.values()] == [True, False, False]
    assert found.value(1) is None
