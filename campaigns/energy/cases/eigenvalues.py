"""Eigenvalues by a solver that runs on the CPU, and by one that runs on the GPU.

Sources: transformers issue 34570. Where the GPU only waits, the slow side takes fewer of its joules, and host time
alone tells; PyTorch 2.11 computes a part on the GPU, and takes more.
"""

from __future__ import annotations

from typing import Any

import common
import torch

ID = "T2"
EXPECTED = "host fallback"  # class of the cause, or what a trap must be called


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    n = 16 if small else 1024
    x = common.normal(seed, (n, n), torch.float32)
    return (x @ x.T / n,)


def slow(x: Any) -> Any:
    return torch.linalg.eigvals(x).real.sort().values


def fast(x: Any) -> Any:
    return torch.linalg.eigvalsh(x)
