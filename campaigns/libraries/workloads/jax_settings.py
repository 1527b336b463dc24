"""Settings of XLA that make a run of JAX repeatable and its memory comparable; import it before jax.

Training scatters gradients into the embedding, which adds in no fixed order without the first flag. Autotuning picks a
kernel by its time, so two runs could use different ones; level 0 takes the defaults. JAX would reserve three quarters
of the GPU at its start, and then no saving of GPU memory could be seen.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
