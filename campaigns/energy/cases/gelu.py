"""GELU spelled out in eight element-wise operators, and as one.

Sources: transformers issues 39073 and 21344, pull request 40048.
"""

from __future__ import annotations

from typing import Any

import common
import torch
from torch.nn import functional

ID = "D1"
EXPECTED = "unfused chain"  # class of the cause, or what a trap must be called


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    return (common.normal(seed, (2, 16, 48) if small else (16, 512, 3072), torch.bfloat16),)


def slow(x: Any) -> Any:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


def fast(x: Any) -> Any:
    return functional.gelu(x, approximate="tanh")
