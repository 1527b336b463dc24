"""Grouped-query attention on keys and values written out once per head, and on shared ones.

Sources: transformers pull request 39412.
"""

from __future__ import annotations

from typing import Any

import common
import torch
from torch.nn import functional

ID = "D9"
EXPECTED = "extra copy"  # class of the cause, or what a trap must be called


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    batch, tokens, heads, groups, width = (2, 16, 4, 2, 8) if small else (8, 2048, 32, 8, 128)
    q = common.normal(seed, (batch, heads, tokens, width), torch.bfloat16)
    return q, *(common.normal(seed + i, (batch, groups, tokens, width), torch.bfloat16) for i in (1, 2))


def repeated(x: Any, times: int) -> Any:
    batch, groups, tokens, width = x.shape
    return x[:, :, None].expand(batch, groups, times, tokens, width).reshape(batch, groups * times, tokens, width)


def slow(q: Any, k: Any, v: Any) -> Any:
    times = q.shape[1] // k.shape[1]
    return functional.scaled_dot_product_attention(q, repeated(k, times), repeated(v, times), is_causal=True)


def fast(q: Any, k: Any, v: Any) -> Any:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
