"""The matrix exponential with a Pade order chosen at run time for a batch, and with one fixed.

Sources: JAX issue 5647, pull request 9239. Under vmap a choice at run time computes all orders.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

ID = "D15"
EXPECTED = "redundant rows"  # class of the cause
FRAMEWORK = "jax"


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    batch, n = (2, 8) if small else (64, 256)
    return (jax.random.normal(jax.random.key(seed), (batch, n, n)) * 0.1 / n,)


@jax.jit
def slow(x: Any) -> Any:
    return jax.vmap(jax.scipy.linalg.expm)(x)


@jax.jit
def fast(x: Any) -> Any:
    """The [3/3] Pade approximant, which expm takes for these matrices, too: their norm is under 0.4."""
    identity = jnp.eye(x.shape[-1], dtype=x.dtype)
    with jax.default_matmul_precision("highest"):  # expm asks for it; else they are TF32's on a GPU
        square = x @ x
        odd = x @ (square + 60.0 * identity)
    even = 12.0 * square + 120.0 * identity
    return jnp.linalg.solve(even - odd, even + odd)
