"""LayerNorm over the channels of an NCHW tensor copies twice; stored channels last, not at all.

Sources: PyTorch issues 76012 and 71465. Known to be close to energy alone. Shapes are those of the report but
smaller, since all values are kept to be matched; all exceed the L2 cache.
"""

from __future__ import annotations

from typing import Any

import common
import torch
from torch.nn import functional

ID = "D4"
EXPECTED = "extra copy"  # class of the cause, or what a trap must be called


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    shape = (2, 8, 6, 4) if small else (4, 256, 256, 128)
    affine = [common.normal(seed + k, shape[1:2], torch.float32) for k in (1, 2)]
    return common.normal(seed, shape, torch.float32), *affine


def slow(x: Any, weight: Any, bias: Any) -> Any:
    normal = functional.layer_norm(x.permute(0, 2, 3, 1).contiguous(), weight.shape, weight, bias)
    return normal.permute(0, 3, 1, 2).contiguous()


def fast(x: Any, weight: Any, bias: Any) -> Any:
    return functional.layer_norm(x.permute(0, 2, 3, 1), weight.shape, weight, bias).permute(0, 3, 1, 2)
