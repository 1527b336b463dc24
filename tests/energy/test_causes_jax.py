"""Causes of JAX's cases, from their equations."""

from __future__ import annotations

from typing import Any

import pytest

from gpubloat.energy.capture import jaxops
from gpubloat.energy.causes import Cause, causes

from . import causes_cases as cases

jax = pytest.importorskip("jax")


def of_case(name: str) -> tuple[Any, Cause]:
    case = cases.load(name)
    args = case.inputs(1, small=True)
    with jaxops.capture(case.slow, *args) as a, jaxops.capture(case.fast, *args) as b:
        return case, causes(a, b, None, slow="a")


def test_depthwise() -> None:
    case, found = of_case("jax_depthwise")
    assert found.kind == case.EXPECTED == "kernel choice"
    assert "conv_general_dilated" in found.evidence
    assert "kernels of the compiled program are not seen" in found.evidence
    assert "conv_general_dilated" in found.a_line.code
    assert "sum(padded" in found.b_line.code


def test_stft() -> None:
    case, found = of_case("jax_stft")
    assert found.kind == case.EXPECTED == "kernel choice"
    assert "gather" in found.evidence


@pytest.mark.slow
def test_expm_computes_all_orders() -> None:
    """Both sides ask for products that are not rounded to TF32."""
    case, found = of_case("jax_expm")
    assert found.kind == case.EXPECTED == "redundant rows"
    assert "dot_general" in found.evidence
    assert "expm" in found.a_line.code
    assert "precision" not in [other.kind for other in found.also]


def test_same_program_twice() -> None:
    jnp = jax.numpy
    x = jnp.arange(64.0).reshape(8, 8)
    with jaxops.capture(lambda x: jnp.tanh(x @ x), x) as a, jaxops.capture(lambda x: jnp.tanh(x @ x), x) as b:
        found = causes(a, b, None)
    assert found.kind == "unknown"
    assert "what XLA fuses" in found.evidence


def test_precision_that_was_asked_for() -> None:
    jnp = jax.numpy
    x = jax.random.normal(jax.random.key(0), (16, 16))
    with (
        jaxops.capture(lambda x: jnp.matmul(x, x, precision="highest"), x) as a,
        jaxops.capture(lambda x: jnp.matmul(x, x), x) as b,
    ):
        found = causes(a, b, None)
    assert (found.kind, found.side) == ("precision", "a")
    assert found.switch is not None
    assert found.switch.setter is None


def test_chain_is_not_believed() -> None:
    """Equations are not kernels: XLA fuses element-wise ones, and says so is all that can be done."""
    jnp = jax.numpy
    x = jax.random.normal(jax.random.key(0), (16, 16))
    with (
        jaxops.capture(lambda x: jnp.exp(jnp.sin(jnp.cos(x) + 1) * 2), x) as a,
        jaxops.capture(lambda x: jax.nn.sigmoid(x), x) as b,
    ):
        found = causes(a, b, None, slow="a")
    chains = [c for c in (found, *found.also) if c.kind == "unfused chain" and c.side == "a"]
    assert len(chains) == 1
    assert chains[0].confidence < 0.3
    assert "XLA" in chains[0].evidence
