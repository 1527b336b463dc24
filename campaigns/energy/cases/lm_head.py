"""A language model's head for all tokens of the prompt, and for the last alone.

Sources: transformers issue 38977. Shapes are those of the report but smaller, since all values are kept to be
matched; all exceed the L2 cache.
"""

from __future__ import annotations

from typing import Any

import common
import torch
from torch.nn import functional

ID = "D6"
EXPECTED = "redundant rows"  # class of the cause, or what a trap must be called


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    tokens, width, words = (16, 32, 100) if small else (2048, 4096, 32000)
    hidden = common.normal(seed, (1, tokens, width), torch.bfloat16)
    return hidden, common.normal(seed + 1, (words, width), torch.bfloat16)


def slow(hidden: Any, weight: Any) -> Any:
    logits = functional.linear(hidden, weight)
    return logits[:, -1:]


def fast(hidden: Any, weight: Any) -> Any:
    return functional.linear(hidden[:, -1:], weight)
