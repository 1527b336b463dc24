"""Cross entropy over permuted logits reads with a stride; over reshaped ones it does not.

Sources: PyTorch issue 141822. The wasteful side is slow at low power.
"""

from __future__ import annotations

from typing import Any

import common
import torch
from torch.nn import functional

ID = "D2"
EXPECTED = "layout"  # class of the cause, or what a trap must be called


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    batch, tokens, words = (2, 8, 50) if small else (2, 512, 50257)
    logits = common.normal(seed, (batch, tokens, words), torch.float32)
    return logits, common.integers(seed + 1, words, (batch, tokens))


def slow(logits: Any, labels: Any) -> Any:
    return functional.cross_entropy(logits.permute(0, 2, 1), labels, reduction="none")


def fast(logits: Any, labels: Any) -> Any:
    flat = functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="none")
    return flat.view(labels.shape)
