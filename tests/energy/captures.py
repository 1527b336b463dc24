"""Captures made by hand: arrays run through NumPy functions, each call an operator as PyTorch would record it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from gpubloat.energy.capture.records import Capture, Op, TensorInfo
from gpubloat.energy.capture.store import Store
from gpubloat.energy.match.repeats import once

Array = np.ndarray[Any, Any]
NAMES = {"float64": "fp64", "float32": "fp32", "float16": "fp16"}


class Program:
    """Write a capture down call by call. `dtype` : name of all floats, such as "bf16", whatever NumPy holds them in."""

    def __init__(self, framework: str = "torch", dtype: str | None = None) -> None:
        self.framework = framework
        self.dtype = dtype
        self.ops: list[Op] = []
        self.tensors: dict[int, TensorInfo] = {}
        self.arrays: dict[int, Array] = {}
        self.inputs: list[int] = []

    def input(self, array: Array) -> int:
        """A value that no operator made."""
        self.inputs.append(self._tensor(array))
        return self.inputs[-1]

    def op(self, name: str, function: Callable[..., Any], *inputs: int) -> int:
        """Run `function` on the arrays of `inputs`; its first or only output."""
        return self.ops_outputs(name, function, *inputs)[0]

    def ops_outputs(self, name: str, function: Callable[..., Any], *inputs: int) -> tuple[int, ...]:
        """The same, for all outputs of a function that returns a tuple."""
        result = function(*(self.arrays[i] for i in inputs))
        outputs = tuple(self._tensor(r) for r in (result if isinstance(result, tuple) else (result,)))
        return self._record(name, inputs, outputs)

    def view(self, name: str, function: Callable[[Array], Any], base: int) -> int:
        """Memory of `base` seen otherwise; `function` has to give NumPy views."""
        return self.views(name, function, base)[0]

    def views(self, name: str, function: Callable[[Array], Any], base: int) -> tuple[int, ...]:
        result = function(self.arrays[base])
        outputs = tuple(self._tensor(r, base) for r in (result if isinstance(result, tuple) else (result,)))
        return self._record(name, (base,), outputs, is_view=True)

    def write(self, name: str, function: Callable[..., Any], target: int, *inputs: int) -> int:
        """Write to `target` in place: its new value."""
        info = self.tensors[target]
        new = self._tensor(function(*(self.arrays[i] for i in (target, *inputs))))
        self.tensors[new] = replace(self.tensors[new], storage=info.storage, offset=info.offset, strides=info.strides)
        self._record(name, (target, *inputs), (new,), writes=(target,))
        return new

    def finish(self, *outputs: int, without: Iterable[int] = ()) -> Capture:
        """without : tensors whose values were not kept."""
        store = Store()
        missing = set(without)
        for number, array in self.arrays.items():
            name = NAMES.get(array.dtype.name, array.dtype.name)
            is_kept = number not in missing and store.put(number, once(array), name, array.shape)
            self.tensors[number] = replace(self.tensors[number], is_kept=is_kept)
        return Capture(self.framework, self.ops, self.tensors, self.inputs, outputs, store)

    def _tensor(self, array: Array, base: int | None = None) -> int:
        number = len(self.tensors)
        array = np.asarray(array)
        dtype = NAMES.get(array.dtype.name, array.dtype.name)
        if self.dtype is not None and array.dtype.kind == "f":
            dtype = self.dtype
        if base is None:
            array = array.copy() if self.framework == "jax" else np.array(array, order="C")
            storage, offset = number, 0
        else:
            memory = self.arrays[base]
            storage = self.tensors[base].storage
            step = array.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
            offset = self.tensors[base].offset + step // array.itemsize
        strides = None if self.framework == "jax" else tuple(s // array.itemsize for s in array.strides)
        self.arrays[number] = array
        self.tensors[number] = TensorInfo(
            number, array.shape, strides, dtype, "cpu", storage, offset, array.nbytes, is_kept=True
        )
        return number

    def _record(
        self,
        name: str,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        is_view: bool = False,
        writes: tuple[int, ...] = (),
    ) -> tuple[int, ...]:
        text = f"{name}({', '.join(f'%{i}' for i in inputs)})"
        self.ops.append(Op(len(self.ops), name, inputs, outputs, text, (), "", is_view, writes))
        return outputs
