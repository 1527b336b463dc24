"""A product that becomes a batch of small ones for an odd stride, and one that is flattened first.

Sources: PyTorch issue 186148. The issue is closed: it may no longer differ.
"""

from __future__ import annotations

from typing import Any

import common
import torch

ID = "D10"
EXPECTED = "kernel choice"  # class of the cause, or what a trap must be called


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    n, width = (6, 32) if small else (384, 4096)
    x = common.normal(seed, (n, width), torch.bfloat16).as_strided((n, 1, width), (width, n * width, 1))
    return x, common.normal(seed + 1, (width, width), torch.bfloat16)


def slow(x: Any, w: Any) -> Any:
    return x @ w


def fast(x: Any, w: Any) -> Any:
    return (x.flatten(0, 1) @ w).unsqueeze(1)
