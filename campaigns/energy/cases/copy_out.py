"""Attention's result copied to a buffer, and used where it is.

Sources: vLLM pull request 10811, SGLang pull request 21985.
"""

from __future__ import annotations

from typing import Any

import common
import torch
from torch.nn import functional

ID = "D11"
EXPECTED = "extra copy"  # class of the cause, or what a trap must be called


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    tokens, heads, width = (16, 2, 8) if small else (7168, 32, 128)
    q, k, v = (common.normal(seed + i, (1, heads, tokens, width), torch.bfloat16) for i in range(3))
    return q, k, v, torch.empty_like(q)


def slow(q: Any, k: Any, v: Any, out: Any) -> Any:
    out.copy_(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    return out


def fast(q: Any, k: Any, v: Any, _: Any) -> Any:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
