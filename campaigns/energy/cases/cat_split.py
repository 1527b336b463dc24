"""Two streams of tokens joined and parted in every block, and joined once.

Sources: diffusers issues 12071 and 12131. Shapes are those of the report but smaller, since all values are kept to be
matched; all exceed the L2 cache.
"""

from __future__ import annotations

from typing import Any

import common
import torch
from torch.nn import functional

ID = "D13"
EXPECTED = "extra copy"  # class of the cause, or what a trap must be called

BLOCKS = 8


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    image, text, width = (16, 4, 32) if small else (4096, 512, 3072)
    streams = (common.normal(seed + i, (1, n, width), torch.bfloat16) for i, n in enumerate((image, text)))
    return *streams, common.normal(seed + 2, (width, width), torch.bfloat16) / width**0.5


def slow(image: Any, text: Any, weight: Any) -> Any:
    n = text.shape[1]
    for _ in range(BLOCKS):
        joined = torch.cat([text, image], dim=1)
        joined = functional.linear(joined, weight)
        text, image = joined[:, :n], joined[:, n:]
    return torch.cat([text, image], dim=1)


def fast(image: Any, text: Any, weight: Any) -> Any:
    joined = torch.cat([text, image], dim=1)
    for _ in range(BLOCKS):
        joined = functional.linear(joined, weight)
    return joined
