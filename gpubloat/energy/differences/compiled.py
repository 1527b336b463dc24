"""What compiled code returns, beside what the same function returned as it was captured, uncompiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpubloat.energy.capture import Capture
from gpubloat.energy.capture.torchops import capture, randomness_restored, uncompiled
from gpubloat.energy.capture.torchvalues import tensors_in
from gpubloat.energy.match.outputs import Outputs, outputs
from gpubloat.energy.match.values import Values
from gpubloat.optional import torch_module

_SEED = 20_977  # of random numbers that are not those of the capture


@dataclass(frozen=True)
class Returned:
    """are_equal : None if it cannot be told. errors : relative, of the outputs that could be compared."""

    are_equal: bool | None
    errors: tuple[float, ...]
    note: str


def returned(fn: Callable[[], Any], own: Capture, letter: str, tolerance: float | None) -> Returned:
    """own : capture of `fn`, one of torch.compile. Calls it twice, once uncompiled; raises what it raises.

    A function that returns something else when it is called once more, as one that draws random numbers does, or
    changes what it is given, cannot be judged: the compiler may draw others, and each call finds what the one before
    left.
    """
    with randomness_restored(), uncompiled():
        torch_module().manual_seed(_SEED)
        again = _beside(fn, own, tolerance)
    if not again.are_equal:
        why = "it returns something else in each call" if _are_known(again) else "not all of it can be compared"
        return Returned(None, (), f"what {letter} returns compiled was not compared: {why}")
    with randomness_restored():
        found = _beside(fn, own, tolerance)
    errors = tuple(pair.error for pair in found.pairs if not math.isnan(pair.error))
    return Returned(found.are_equal, errors, "" if found.are_equal else f"{letter} returns something else compiled")


def _beside(fn: Callable[[], Any], own: Capture, tolerance: float | None) -> Outputs:
    made = list(tensors_in(fn()))
    with capture(lambda *given: given, *made) as real:
        return outputs(Values(own), Values(real), tolerance)


def _are_known(found: Outputs) -> bool:
    return not any(pair.how is None and math.isnan(pair.error) for pair in found.pairs)
