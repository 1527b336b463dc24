"""Attention on copies of transposed views, and on the views.

Sources: transformers pull request 40315.
"""

from __future__ import annotations

from typing import Any

import common
import torch
from torch.nn import functional

ID = "D8"
EXPECTED = "extra copy"  # class of the cause, or what a trap must be called


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    batch, tokens, heads, width = (2, 16, 4, 8) if small else (8, 2048, 32, 128)
    shape = (batch, tokens, heads, width)
    return tuple(common.normal(seed + i, shape, torch.bfloat16).transpose(1, 2) for i in range(3))


def slow(q: Any, k: Any, v: Any) -> Any:
    return functional.scaled_dot_product_attention(q.contiguous(), k.contiguous(), v.contiguous(), is_causal=True)


def fast(q: Any, k: Any, v: Any) -> Any:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
