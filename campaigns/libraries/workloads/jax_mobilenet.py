"""MobileNetV2 in JAX (Flax, Optax), random weights, synthetic images: training or inference. Prints one number.

python jax_mobilenet.py train|infer [--steps N] [--batch N] [--size PIXELS]

The shapes of torchvision's: 1000 classes, 224 x 224 pixels. Runs on what JAX finds, a GPU if there is one.
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

# Expansion, channels, blocks, stride of the first block: table 2 of "MobileNetV2: Inverted Residuals".
STAGES = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]


class ConvNorm(nn.Module):
    """Convolution and batch normalization, then ReLU6 unless `is_linear`."""

    channels: int
    kernel: int = 1
    stride: int = 1
    groups: int = 1
    is_linear: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, is_training: bool) -> jax.Array:
        x = nn.Conv(
            self.channels, (self.kernel, self.kernel), self.stride, padding=self.kernel // 2, use_bias=False,
            feature_group_count=self.groups,
        )(x)  # fmt: skip
        x = nn.BatchNorm(use_running_average=not is_training, momentum=0.9)(x)
        return x if self.is_linear else nn.relu6(x)


class MobileNet(nn.Module):
    classes: int = 1000

    @nn.compact
    def __call__(self, x: jax.Array, is_training: bool) -> jax.Array:
        x = ConvNorm(32, 3, 2)(x, is_training)
        for expansion, channels, blocks, stride in STAGES:
            for block in range(blocks):
                inside = x.shape[-1] * expansion
                y = ConvNorm(inside)(x, is_training) if expansion > 1 else x
                y = ConvNorm(inside, 3, stride if block == 0 else 1, groups=inside)(y, is_training)
                y = ConvNorm(channels, is_linear=True)(y, is_training)
                x = x + y if x.shape == y.shape else y
        x = ConvNorm(1280)(x, is_training).mean(axis=(1, 2))
        x = nn.Dropout(0.2, deterministic=not is_training)(x)
        return nn.Dense(self.classes)(x)


parser = arguments(steps=20, batch=32)
parser.add_argument("--size", type=int, default=224)
given = parser.parse_args()

rng = np.random.default_rng(0)
model = MobileNet()
images = rng.standard_normal((given.batch, given.size, given.size, 3), np.float32)
labels = rng.integers(0, model.classes, given.batch, np.int32)
variables = drawn(jax.eval_shape(lambda: model.init(jax.random.key(0), images, is_training=False)), seed=0)
optimizer = optax.sgd(0.01, momentum=0.9)


@jax.jit
def update(weights: Any, statistics: Any, state: Any, step: int) -> tuple[tuple[Any, Any, Any], jax.Array]:
    key = jax.random.fold_in(jax.random.key(1), step)

    def loss(weights: Any) -> tuple[jax.Array, Any]:
        logits, changed = model.apply(
            {"params": weights, "batch_stats": statistics}, images, is_training=True, rngs={"dropout": key},
            mutable=["batch_stats"],
        )  # fmt: skip
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), changed["batch_stats"]

    (value, statistics), gradient = jax.value_and_grad(loss, has_aux=True)(weights)
    updates, state = optimizer.update(gradient, state)
    return (optax.apply_updates(weights, updates), statistics, state), value


def train(step: int) -> jax.Array:
    state[:], value = update(*state, step)
    return value


@jax.jit
def forward(variables: Any) -> jax.Array:
    return model.apply(variables, images, is_training=False).sum()


def infer(_: int) -> jax.Array:
    return forward(variables)


weights = variables["params"]
state = [weights, variables["batch_stats"], jax.jit(optimizer.init)(weights)] if given.mode == "train" else []
run(train if given.mode == "train" else infer, given.steps, float)
