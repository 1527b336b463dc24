"""PyTorch's profiler without the lines that it writes to stderr each time it starts and ends."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

_MARK = b"USDT:"  # how those lines begin, as of PyTorch 2.13
_STDERR = 2
T = TypeVar("T")


@contextlib.contextmanager
def unmarked(profiler: AbstractContextManager[T]) -> Iterator[T]:
    """Enter and leave it; what is written to stderr inside the block goes there at once, and untouched."""
    with _held_back():
        made = profiler.__enter__()
    try:
        yield made
    finally:
        with _held_back():
            profiler.__exit__(*sys.exc_info())


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """Hold back what the process writes to stderr; afterwards all of it follows but the marks.

    They are written past Python's `sys.stderr`, so it is the file descriptor that is turned aside.
    """
    try:
        before = os.dup(_STDERR)
    except OSError:  # stderr is closed
        yield
        return
    with tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), _STDERR)
        try:
            yield
        finally:
            os.dup2(before, _STDERR)
            os.close(before)
            aside.seek(0)
            kept = b"".join(line for line in aside if not line.startswith(_MARK))
            if kept:
                os.write(_STDERR, kept)
