"""Compiled loops over rows, and how their work is spread over threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

from numba import njit  # type: ignore[import-untyped]

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")

THREADS = 2


def compiled(function: F) -> F:
    """`function` as machine code that runs without the interpreter's lock; compiled once per machine and type."""
    try:
        return cast(F, njit(cache=True, nogil=True)(function))
    except RuntimeError:  # no folder that can be written to keep it in: compile in every process
        return cast(F, njit(nogil=True)(function))


def in_blocks(work: Callable[[int, int], T], n_rows: int, threads: int = THREADS) -> list[T]:
    """What ``work(begin, end)`` returns for each of at most `threads` blocks of rows that cover ``range(n_rows)``."""
    threads = max(1, min(threads, n_rows))
    ends = [n_rows * i // threads for i in range(threads + 1)]
    if threads == 1:
        return [work(0, n_rows)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, ends[:-1], ends[1:]))
