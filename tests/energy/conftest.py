"""PyTorch for tests that measure nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def torch() -> Iterator[Any]:
    """With one thread: small operators on a busy machine wait for the second one."""
    found = pytest.importorskip("torch")
    threads = found.get_num_threads()
    found.set_num_threads(1)
    yield found
    found.set_num_threads(threads)
