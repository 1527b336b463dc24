"""RMSNorm spelled out, and as one operator.

Sources: vLLM pull request 16.
"""

from __future__ import annotations

from typing import Any

import common
import torch
from torch.nn import functional

ID = "D12"
EXPECTED = "unfused chain"  # class of the cause, or what a trap must be called


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    shape = (8, 16, 64) if small else (8, 2048, 4096)
    return common.normal(seed, shape, torch.bfloat16), common.normal(seed + 1, shape[-1:], torch.bfloat16)


def slow(x: Any, weight: Any) -> Any:
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * scaled.to(x.dtype)


def fast(x: Any, weight: Any) -> Any:
    return functional.rms_norm(x, weight.shape, weight, 1e-6)
