"""Waiting for the GPU by asking again and again, and by sleeping.

Sources: PyTorch issue 28224. The GPU's energy is the same; the host's processor time is not.
"""

from __future__ import annotations

from typing import Any

import common
import torch

ID = "T3"
EXPECTED = "no difference"  # class of the cause, or what a trap must be called


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    n = 64 if small else 4096
    return (common.normal(seed, (n, n), torch.bfloat16) / n**0.5,)


def waited(x: Any, flags: int) -> Any:
    common.schedule(flags)
    y = x
    for _ in range(20):
        y = y @ x
    if y.is_cuda:
        torch.cuda.synchronize()
    return y


def slow(x: Any) -> Any:
    return waited(x, common.SPIN)


def fast(x: Any) -> Any:
    return waited(x, common.BLOCK)
