"""Random weights for a model of Flax, drawn by NumPy: made on the GPU, XLA would compile a program for each shape."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np


def drawn(shapes: Any, seed: int) -> Any:
    """Arrays for a tree of shapes, as `jax.eval_shape` of `init` gives it.

    By name: embeddings of deviation 1, kernels of 1 / sqrt(inputs of an output), scales and variances 1, the rest 0.
    """
    rng = np.random.default_rng(seed)

    def one(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        name = path[-1].key
        if name in ("embedding", "kernel"):
            # A Flax kernel of attention is (inputs, heads, width), or (heads, width, outputs) where heads are joined.
            outputs = leaf.shape[-2:] if path[-2].key in ("query", "key", "value") else leaf.shape[-1:]
            scale = 1.0 if name == "embedding" else math.sqrt(math.prod(outputs) / leaf.size)
            return scale * rng.standard_normal(leaf.shape, leaf.dtype)
        return np.full(leaf.shape, 1.0 if name in ("scale", "var") else 0.0, leaf.dtype)

    return jax.device_put(jax.tree_util.tree_map_with_path(one, shapes))
