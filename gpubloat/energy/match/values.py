"""The values of a capture, read when needed, and their fingerprints; on a second input too if there is one."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from gpubloat.energy.capture.records import Capture
from gpubloat.energy.match.fingerprint import Fingerprint, fingerprint
from gpubloat.energy.match.repeats import once, packed
from gpubloat.energy.match.tolerance import tolerance_of
from gpubloat.errors import GpubloatError

Array = np.ndarray[Any, Any]
_CACHE_BYTES = 512 << 20
_THREADS = min(8, os.cpu_count() or 1)


class Values:
    """Arrays of one capture by tensor id; the last ones read stay in memory. again : id -> id on the second input."""

    def __init__(self, capture: Capture, second: Capture | None = None, side: str = "A") -> None:
        self.capture = capture
        self.second = second
        self.again = {} if second is None else same_order(capture, second, side)
        self.prints: dict[int, Fingerprint] = {}
        self._cache: OrderedDict[tuple[int, bool], Array] = OrderedDict()
        self._bytes = 0

    def array(self, tensor: int, second: bool = False) -> Array | None:
        """A value, or that of the second input; None if not kept."""
        if (tensor, second) in self._cache:
            self._cache.move_to_end((tensor, second))
            return self._cache[tensor, second]
        array = self._read(tensor, second)
        if array is not None:
            array = packed(array)
            self._cache[tensor, second] = array
            self._bytes += once(array).nbytes
            while self._bytes > _CACHE_BYTES and len(self._cache) > 1:
                self._bytes -= once(self._cache.popitem(last=False)[1]).nbytes
        return array

    def _read(self, tensor: int, second: bool) -> Array | None:
        if not second:
            return self.capture.value(tensor)
        other = self.again.get(tensor)
        return None if self.second is None or other is None else self.second.value(other)

    def measure(self, tensors: Iterable[int]) -> int:
        """Fill `prints`; how many of the tensors were not kept."""
        missing = 0
        wanted = [t for t in tensors if t not in self.prints]
        with ThreadPoolExecutor(_THREADS) as pool:
            for tensor, found in zip(wanted, pool.map(self._print, wanted)):
                if found is None:
                    missing += 1
                else:
                    self.prints[tensor] = found
        return missing

    def _print(self, tensor: int) -> Fingerprint | None:
        array = self.capture.value(tensor)
        return None if array is None else fingerprint(array)

    def has_second(self, tensor: int) -> bool:
        """Whether the value on the second input is there too."""
        other = self.again.get(tensor)
        return self.second is not None and other is not None and self.second.tensors[other].is_kept

    def dtype(self, tensor: int) -> str:
        return self.capture.tensors[tensor].dtype


def allowed(a: Values, x: int, b: Values, y: int, tolerance: float | None) -> float:
    """Between tensor x of a and tensor y of b; of bf16, too, that is an fp32 array here."""
    by_type = tolerance_of(a.dtype(x), b.dtype(y))
    return by_type if tolerance is None or not by_type else tolerance


def same_order(first: Capture, second: Capture, side: str) -> dict[int, int]:
    """Tensor id of one pass -> id of the same tensor in another pass over the same function.

    GpubloatError if the passes did not run the same operators.
    """
    names = [op.name for op in first.ops]
    others = [op.name for op in second.ops]
    if names != others or len(first.outputs) != len(second.outputs):
        place = next((i for i, (x, y) in enumerate(zip(names, others)) if x != y), min(len(names), len(others)))
        raise GpubloatError(
            f"the second pass over {side} ran other operators than the first, from operator {place} on",
            "the second input may only have other values: the same shapes, no branch that depends on values",
        )
    found = dict(zip(first.outputs, second.outputs)) | dict(zip(first.inputs, second.inputs))
    for one, other in zip(first.ops, second.ops):
        found |= dict(zip(one.outputs, other.outputs))
        for x, y in zip(one.inputs, other.inputs):
            found.setdefault(x, y)
    return found
