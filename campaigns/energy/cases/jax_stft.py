"""Frames of a signal by a convolution, and by indexing.

Sources: JAX issue 28614.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

ID = "D16"
EXPECTED = "kernel choice"  # class of the cause
FRAMEWORK = "jax"

N_FFT = 2048


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    return (jax.random.normal(jax.random.key(seed), (4 if small else 256, 5000)),)


@jax.jit
def slow(x: Any) -> Any:
    return jax.vmap(lambda row: jax.scipy.signal.stft(row, nperseg=N_FFT, boundary=None, padded=False)[2])(x)


@jax.jit
def fast(x: Any) -> Any:
    hop = N_FFT // 2
    starts = jnp.arange(0, x.shape[-1] - N_FFT + 1, hop)
    window = 0.5 - 0.5 * jnp.cos(2 * jnp.pi * jnp.arange(N_FFT) / N_FFT)
    frames = x[:, starts[:, None] + jnp.arange(N_FFT)] * window
    return jnp.fft.rfft(frames).swapaxes(1, 2) / window.sum()
