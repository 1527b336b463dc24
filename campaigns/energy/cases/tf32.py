"""An fp32 product on the CUDA cores, and on the tensor cores as TF32.

Sources: PyTorch issue 153195, transformers issue 14450. Outputs agree to the accuracy of TF32 only, so this is a
trade-off unless the caller allows that. Shapes are those of the report but smaller, since all values are kept to be
matched; all exceed the L2 cache.
"""

from __future__ import annotations

from typing import Any

import common
import torch

ID = "D3"
EXPECTED = "precision"  # class of the cause, or what a trap must be called


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    n = 64 if small else 6144
    return common.normal(seed, (n, n), torch.float32), common.normal(seed + 1, (n, n), torch.float32)


def slow(x: Any, w: Any) -> Any:
    return common.with_tf32(False, lambda: x @ w)


def fast(x: Any, w: Any) -> Any:
    return common.with_tf32(True, lambda: x @ w)
