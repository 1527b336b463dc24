"""The same product of random numbers, and of zeros.

Sources: arXiv 2409.18324 and 2212.08805: inputs change power. No difference of code: outputs differ, so nothing may
be called waste.
"""

from __future__ import annotations

from typing import Any

import common
import torch

ID = "T5"
EXPECTED = "inputs differ"  # class of the cause, or what a trap must be called


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    n = 64 if small else 6144
    x = common.normal(seed, (n, n), torch.bfloat16)
    return x, torch.zeros_like(x)


def slow(x: Any, _: Any) -> Any:
    return x @ x


def fast(_: Any, zeros: Any) -> Any:
    return zeros @ zeros
