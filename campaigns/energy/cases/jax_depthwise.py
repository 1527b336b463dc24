"""A depthwise convolution over time by the library, and by shifted sums of products.

Sources: JAX issue 29875.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

ID = "D14"
EXPECTED = "kernel choice"  # class of the cause
FRAMEWORK = "jax"


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    batch, time, channels = (2, 16, 8) if small else (128, 512, 256)
    one, two = jax.random.split(jax.random.key(seed))
    return jax.random.normal(one, (batch, time, channels)), jax.random.normal(two, (4, 1, channels))


@jax.jit
def slow(x: Any, w: Any) -> Any:
    return jax.lax.conv_general_dilated(
        x, w, (1,), [(w.shape[0] - 1, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=x.shape[2]
    )


@jax.jit
def fast(x: Any, w: Any) -> Any:
    taps = w.shape[0]
    padded = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
    return sum(padded[:, k : k + x.shape[1]] * w[k, 0] for k in range(taps))
