"""Product and sum in one call, and in two.

Sources: PyTorch issue 141210. Times are equal and energies were not, with one version of cuBLAS; it may have gone.
Shapes are those of the report but smaller, since all values are kept to be matched; all exceed the L2 cache.
"""

from __future__ import annotations

from typing import Any

import common
import torch

ID = "T1"
EXPECTED = "energy only"  # class of the cause, or what a trap must be called


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    n, k, m = (16, 32, 24) if small else (4096, 12288, 12288)
    x, w = common.normal(seed, (n, k), torch.float16), common.normal(seed + 1, (k, m), torch.float16) / k**0.5
    return common.normal(seed + 2, (m,), torch.float16), x, w


def slow(b: Any, x: Any, w: Any) -> Any:
    return torch.addmm(b, x, w)


def fast(b: Any, x: Any, w: Any) -> Any:
    return b + torch.mm(x, w)
