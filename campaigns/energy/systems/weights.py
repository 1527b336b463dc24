"""Random weights and tokens of GPT-2, the same for every framework: NumPy draws them by seed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Sizes(NamedTuple):
    batch: int
    tokens: int
    layers: int
    width: int
    words: int


GPT2 = Sizes(8, 128, 12, 768, 50257)
SMALL = Sizes(2, 16, 2, 128, 300)
HEAD = 64  # width of a head


def drawn(seed: int, sizes: Sizes) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Tokens (batch, tokens), and weights by name in float32: matrices as (inner, outer), scales and biases."""
    rng = np.random.default_rng(seed)
    width = sizes.width

    def matrix(*shape: int) -> np.ndarray:
        return 0.02 * rng.standard_normal(shape, np.float32)

    weights = {"words": matrix(sizes.words, width), "places": matrix(sizes.tokens, width)}
    for layer in range(sizes.layers):
        for name, shape in {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width),
                            "down": (4 * width, width)}.items():  # fmt: skip
            weights |= {f"{layer}.{name}": matrix(*shape), f"{layer}.{name}.bias": matrix(shape[1])}
        for name in ("before", "between"):
            weights |= {f"{layer}.{name}": 1 + matrix(width), f"{layer}.{name}.bias": matrix(width)}
    weights |= {"last": 1 + matrix(width), "last.bias": matrix(width)}
    return rng.integers(0, sizes.words, (sizes.batch, sizes.tokens), np.int32), weights


def n_layers(weights: dict[str, object]) -> int:
    return sum(name.endswith(".qkv") for name in weights)
