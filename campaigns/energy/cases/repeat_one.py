"""Keys repeated once per group, which copies them, and not repeated.

Sources: Megatron-LM pull request 537, issue 543.
"""

from __future__ import annotations

from typing import Any

import common
import torch

ID = "D7"
EXPECTED = "extra copy"  # class of the cause, or what a trap must be called


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    tokens, batch, heads, width = (16, 2, 4, 8) if small else (4096, 4, 32, 128)
    shape = (tokens, batch, heads, width)
    return common.normal(seed, shape, torch.bfloat16), common.normal(seed + 1, shape, torch.bfloat16)


def slow(q: Any, k: Any) -> Any:
    repeated = k.repeat_interleave(1, dim=2)
    return q * repeated


def fast(q: Any, k: Any) -> Any:
    return q * k
