"""A 65 M-parameter encoder-decoder Transformer in JAX (Flax, Optax), random tokens. Prints one number.

python jax_transformer.py train|infer [--steps N] [--batch N] [--length N] [--blocks N]

The shapes of transformer.py. Runs on what JAX finds, a GPU if there is one.
"""

from __future__ import annotations

from typing import Any

import jax_settings  # noqa: F401, isort: skip
import jax
import numpy as np
import optax
from common import arguments, run
from flax import linen as nn
from jax_weights import drawn

VOCABULARY, WIDTH, HEADS, INSIDE = 37000, 512, 8, 2048


class Block(nn.Module):
    """Attention to itself, to `memory` if there is one, and two dense layers; normalized after each."""

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array | None, mask: jax.Array | None, is_training: bool) -> jax.Array:
        def attend(x: jax.Array, to: jax.Array, mask: jax.Array | None) -> jax.Array:
            layer = nn.MultiHeadDotProductAttention(HEADS, dropout_rate=0.1, deterministic=not is_training)
            return layer(x, to, mask=mask)

        def add(x: jax.Array, y: jax.Array) -> jax.Array:
            return nn.LayerNorm(epsilon=1e-5)(x + nn.Dropout(0.1, deterministic=not is_training)(y))

        x = add(x, attend(x, x, mask))
        if memory is not None:
            x = add(x, attend(x, memory, None))
        y = nn.Dropout(0.1, deterministic=not is_training)(nn.relu(nn.Dense(INSIDE)(x)))
        return add(x, nn.Dense(WIDTH)(y))


class Translator(nn.Module):
    blocks: int = 6

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array, is_training: bool) -> jax.Array:
        embed = nn.Embed(VOCABULARY, WIDTH)
        memory, x = embed(source), embed(target)
        for _ in range(self.blocks):
            memory = Block()(memory, None, None, is_training)
        memory = nn.LayerNorm(epsilon=1e-5)(memory)
        mask = nn.make_causal_mask(target)
        for _ in range(self.blocks):
            x = Block()(x, memory, mask, is_training)
        return embed.attend(nn.LayerNorm(epsilon=1e-5)(x))  # weights shared with the embedding, as in the paper


parser = arguments(steps=10, batch=16)
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--blocks", type=int, default=6)
given = parser.parse_args()

rng = np.random.default_rng(0)
model = Translator(given.blocks)
source, target = (rng.integers(0, VOCABULARY, (given.batch, given.length), np.int32) for _ in range(2))
weights = drawn(jax.eval_shape(lambda: model.init(jax.random.key(0), source, target, is_training=False)), seed=0)
optimizer = optax.adam(1e-4, b1=0.9, b2=0.98)


@jax.jit
def update(weights: Any, state: Any, step: int) -> tuple[tuple[Any, Any], jax.Array]:
    key = jax.random.fold_in(jax.random.key(1), step)

    def loss(weights: Any) -> jax.Array:
        logits = model.apply(weights, source, target[:, :-1], is_training=True, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, target[:, 1:]).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    updates, state = optimizer.update(gradient, state)
    return (optax.apply_updates(weights, updates), state), value


def train(step: int) -> jax.Array:
    state[:], value = update(*state, step)
    return value


@jax.jit
def forward(weights: Any) -> jax.Array:
    return model.apply(weights, source, target, is_training=False).sum()


def infer(_: int) -> jax.Array:
    return forward(weights)


state = [weights, jax.jit(optimizer.init)(weights)] if given.mode == "train" else []
run(train if given.mode == "train" else infer, given.steps, float)
