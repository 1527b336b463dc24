"""A depthwise convolution of an NCHW tensor, and of one stored channels last.

Sources: PyTorch issue 157334, TensorFlow issue 96396. Which side saves energy is to be measured. Shapes are those of
the report but smaller, since all values are kept to be matched; all exceed the L2 cache.
"""

from __future__ import annotations

from typing import Any

import common
import torch
from torch.nn import functional

ID = "D5"
EXPECTED = "layout"  # class of the cause, or what a trap must be called


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    batch, channels, size = (2, 8, 12) if small else (8, 256, 124)
    x = common.normal(seed, (batch, channels, size, size), torch.float32)
    weight = common.normal(seed + 1, (channels, 1, 3, 3), torch.float32)
    return x, x.contiguous(memory_format=torch.channels_last), weight


def slow(x: Any, _: Any, weight: Any) -> Any:
    return functional.conv2d(x, weight, padding=1, groups=x.shape[1])


def fast(_: Any, x: Any, weight: Any) -> Any:
    return functional.conv2d(x, weight, padding=1, groups=x.shape[1])
