"""The same function twice.

Sources: none: a control for false positives.
"""

from __future__ import annotations

from typing import Any

import common
import torch

ID = "T4"
EXPECTED = "no difference"  # class of the cause, or what a trap must be called


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    n = 64 if small else 4096
    return common.normal(seed, (n, n), torch.bfloat16), common.normal(seed + 1, (n, n), torch.bfloat16)


def slow(x: Any, w: Any) -> Any:
    return torch.tanh(x @ w)


def fast(x: Any, w: Any) -> Any:
    return torch.tanh(x @ w)
