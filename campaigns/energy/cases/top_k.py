"""The largest of many numbers by topk, and by sorting all.

Sources: PyTorch issue 22812, pull request 68632.
"""

from __future__ import annotations

from typing import Any

import common

ID = "T6"
EXPECTED = "kernel choice"  # class of the cause, or what a trap must be called


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    n = 2000 if small else 2_000_000
    return (common.shuffled(seed, n),)


def slow(x: Any) -> Any:
    return x.sort(descending=True).values[: x.numel() // 2000]


def fast(x: Any) -> Any:
    return x.topk(x.numel() // 2000).values
