"""Small arrays stand for large ones: their rows, too, are shared between threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpubloat.tensors import jit


@pytest.fixture(autouse=True, scope="package")
def threads_for_all() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "_ENOUGH_BYTES", 0)
        yield
