"""One pass over a function: its operators in order, their values, and the lines of code that they come from."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpubloat.energy.capture.records import Call, Capture, Line, Op, Ref, TensorInfo
from gpubloat.energy.capture.store import KEEP_BYTES, SPILL_BYTES, Store

__all__ = ["Call", "Capture", "Line", "Op", "Ref", "Store", "TensorInfo", "capture"]


def capture(
    fn: Callable[..., Any],
    *args: Any,
    keep_bytes: int = KEEP_BYTES,
    spill_bytes: int = SPILL_BYTES,
    folder: str | Path | None = None,
) -> Capture:
    """Run ``fn(*args)`` once and record its operators: see `torchops.capture` and `jaxops.capture`.

    It is taken for a function of JAX if an argument holds an array of JAX, or if PyTorch is not imported and JAX is.
    """
    from gpubloat.energy.capture import jaxops, torchops  # they import this package

    chosen = jaxops.capture if _is_jax(args) else torchops.capture
    return chosen(fn, *args, keep_bytes=keep_bytes, spill_bytes=spill_bytes, folder=folder)


def _is_jax(args: tuple[Any, ...]) -> bool:
    kinds = {type(leaf).__module__.partition(".")[0] for leaf in _leaves(args)}
    if "torch" in kinds:
        return False
    return bool(kinds & {"jax", "jaxlib"}) or ("jax" in sys.modules and "torch" not in sys.modules)


def _leaves(thing: Any) -> Iterator[Any]:
    if isinstance(thing, Mapping):
        thing = list(thing.values())
    if isinstance(thing, (list, tuple)):
        for part in thing:
            yield from _leaves(part)
    else:
        yield thing
