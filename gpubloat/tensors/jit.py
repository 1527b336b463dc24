"""Compiled loops over rows, and how their work is spread over threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar, cast

from numba import njit  # type: ignore[import-untyped]
from numba.core import event  # type: ignore[import-untyped]

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")

_MOST_THREADS = 16  # more wait for memory


def _cores() -> int:
    """Cores that this process may use: fewer than the machine has in a container or under taskset."""
    mine = getattr(os, "sched_getaffinity", None)  # of Linux
    return len(mine(0)) if mine is not None else os.cpu_count() or 1


THREADS = min(_cores(), _MOST_THREADS)
_ENOUGH_BYTES = 1 << 20  # for a second thread: starting one takes as long as the work on fewer


def compiled(function: F) -> F:
    """`function` as machine code that runs without the interpreter's lock; compiled once per machine and type."""
    try:
        return cast(F, njit(cache=True, nogil=True)(function))
    except RuntimeError:  # no folder that can be written to keep it in: compile in every process
        return cast(F, njit(nogil=True)(function))


class _First(event.Listener):  # type: ignore[misc]
    def __init__(self, tell: Callable[[], None]) -> None:
        self.tell: Callable[[], None] | None = tell

    def on_start(self, _: object) -> None:
        tell, self.tell = self.tell, None
        if tell is not None:
            tell()

    def on_end(self, _: object) -> None:
        pass


@contextmanager
def compiling(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` when the first loop of the block is compiled, which takes seconds; never if all are kept already."""
    with event.install_listener("numba:compile", _First(tell)):
        yield


def in_blocks(work: Callable[[int, int], T], n_rows: int, n_bytes: int, threads: int = THREADS) -> list[T]:
    """What ``work(begin, end)`` returns for each of at most `threads` blocks that cover ``range(n_rows)``.

    `n_bytes` : size of all rows together.
    """
    threads = max(1, min(threads, n_rows)) if n_bytes >= _ENOUGH_BYTES else 1
    ends = [n_rows * i // threads for i in range(threads + 1)]
    if threads == 1:
        return [work(0, n_rows)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, ends[:-1], ends[1:]))
