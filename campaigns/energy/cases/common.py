"""What the cases share: inputs by seed, on the GPU if there is one, and switches of the libraries."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPIN, BLOCK = 1, 4  # CU_CTX_SCHED_SPIN and CU_CTX_SCHED_BLOCKING_SYNC


def generator(seed: int) -> Any:
    return torch.Generator(DEVICE).manual_seed(seed)


def normal(seed: int, shape: tuple[int, ...], dtype: Any) -> Any:
    return torch.randn(shape, generator=generator(seed), device=DEVICE, dtype=dtype)


def integers(seed: int, end: int, shape: tuple[int, ...]) -> Any:
    return torch.randint(end, shape, generator=generator(seed), device=DEVICE)


def shuffled(seed: int, n: int) -> Any:
    """0 to n - 1 as fp32 in random order: no two are equal, so the largest are the same however they are found."""
    return torch.randperm(n, generator=generator(seed), device=DEVICE).float()


def with_tf32(allowed: bool, act: Callable[[], Any]) -> Any:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        return act()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def schedule(flags: int) -> None:
    """How the host waits for the GPU from now on, in PyTorch's context. Nothing without a GPU."""
    if DEVICE == "cuda":
        torch.cuda.current_stream()
        status = ctypes.CDLL("libcuda.so.1").cuCtxSetFlags(flags)
        if status:
            raise RuntimeError(f"cuCtxSetFlags failed: {status}")
