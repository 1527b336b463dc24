"""GPT-2 in JAX, its logits; bf16, compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from weights import GPT2, HEAD, SMALL, drawn, n_layers


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    tokens, weights = drawn(seed, SMALL if small else GPT2)
    return jnp.asarray(tokens), {name: jnp.asarray(w, jnp.bfloat16) for name, w in weights.items()}


@jax.jit
def step(tokens: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    x = weights["words"][tokens] + weights["places"]
    for layer in range(n_layers(weights)):
        x = x + attention(norm(x, weights, f"{layer}.before"), weights, layer)
        h = jax.nn.gelu(linear(norm(x, weights, f"{layer}.between"), weights, f"{layer}.up"), approximate=True)
        x = x + linear(h, weights, f"{layer}.down")
    return norm(x, weights, "last") @ weights["words"].T


def attention(x: jax.Array, weights: dict[str, jax.Array], layer: int) -> jax.Array:
    q, k, v = (
        part.reshape(*x.shape[:2], -1, HEAD) for part in jnp.split(linear(x, weights, f"{layer}.qkv"), 3, axis=-1)
    )
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return linear(mixed.reshape(x.shape), weights, f"{layer}.out")


def linear(x: jax.Array, weights: dict[str, jax.Array], name: str) -> jax.Array:
    return x @ weights[name] + weights[f"{name}.bias"]


def norm(x: jax.Array, weights: dict[str, jax.Array], name: str) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
    return (wide * weights[name] + weights[f"{name}.bias"]).astype(x.dtype)
