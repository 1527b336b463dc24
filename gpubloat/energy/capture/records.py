"""What a capture holds: operators in the order they ran, and the values that went in and out of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np

from gpubloat.energy.capture.store import Store


@dataclass(frozen=True)
class Line:
    """A line of the user's code. file : relative to the working folder or to site-packages where it lies there."""

    file: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}" if self.file else self.function


@dataclass(frozen=True)
class TensorInfo:
    """A value. One that is written in place gets a new id: ids are versions.

    shape : elements. strides : elements; None for JAX, and where memory is no grid (sparse).
    storage : same number = same memory; unique per tensor for JAX. offset : elements from the start of the storage.
    n_bytes : elements x size of one, whatever the strides. is_kept : `Capture.value` gives it.
    """

    id: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    device: str
    storage: int
    offset: int
    n_bytes: int
    is_kept: bool


@dataclass(frozen=True)
class Op:
    """An operator that ran. index : its place in the order.

    inputs, outputs : tensor ids; inputs in the order of the arguments.
    arguments : the call as text, tensors as %id. lines : the user's frames, innermost first.
    module : path of the module it ran in. is_view : outputs share memory with an input, nothing was written.
    writes : the input ids that it wrote in place; their new values are among `outputs`.
    flags : settings that products and convolutions run under, ``name=value, name=value``; may be empty.
    """

    index: int
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    arguments: str
    lines: tuple[Line, ...]
    module: str
    is_view: bool
    writes: tuple[int, ...]
    flags: str = ""


@dataclass(frozen=True)
class Ref:
    """A tensor in the arguments of a `Call`."""

    id: int


@dataclass(frozen=True)
class Call:
    """The call of an operator, to make it again. target : name under torch.ops, or None for what has none.

    args, kwargs : as they were, with a `Ref` for each tensor. returned : ids of the tensors that it returned, in order.
    written : input id -> id of its new value.
    """

    target: str | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    returned: tuple[int, ...]
    written: Mapping[int, int] = field(default_factory=dict)


# A note of a capture.
UNCOMPILED = "a function of torch.compile was captured uncompiled: no operator is dispatched in compiled code"


class Capture:
    """One pass over a function. Use as a context manager or call `close`: spilled values are files.

    framework : "torch" or "jax". inputs : ids of all values that no operator made: arguments first, then parameters,
    buffers and constants as they were met. outputs : ids of what the function returned.
    producer : tensor id -> index of the operator that made it.
    calls : by operator index, what is needed to run it again. notes : what is missing or was seen only in part, a
    sentence each.
    """

    def __init__(
        self,
        framework: str,
        ops: Iterable[Op],
        tensors: Mapping[int, TensorInfo],
        inputs: Iterable[int],
        outputs: Iterable[int],
        store: Store,
        *,
        notes: Iterable[str] = (),
        calls: Iterable[Call] = (),
    ) -> None:
        self.framework = framework
        self.ops = tuple(ops)
        self.tensors = dict(tensors)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.producer = {tensor: op.index for op in self.ops for tensor in op.outputs}
        self.store = store
        self.notes = list(notes)
        self.calls = tuple(calls)

    @property
    def is_compiled(self) -> bool:
        """Whether code of torch.compile runs in place of these operators, or of some."""
        return UNCOMPILED in self.notes

    def value(self, tensor: int) -> np.ndarray[Any, Any] | None:
        """The value as it was then, read-only; bf16 and fp8 as fp32. None if it was not kept."""
        return self.store.value(tensor)

    def close(self) -> None:
        """Forget the values, and remove the files that some were spilled to."""
        self.store.close()

    def __enter__(self) -> Capture:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        kept = sum(t.is_kept for t in self.tensors.values())
        return f"<Capture {self.framework}: {len(self.ops)} operators, {len(self.tensors)} tensors, {kept} kept>"
