"""Which value a tensor of PyTorch holds: memory, the window on it, and the writes that it has seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from gpubloat.energy.capture.records import TensorInfo
from gpubloat.energy.capture.store import NAMES, Array, Store, holds
from gpubloat.optional import torch_module


def dtype_name(dtype: Any) -> str:
    """``torch.float32`` -> "fp32"."""
    name = str(dtype).removeprefix("torch.")
    return NAMES.get(name, name)


def torch_dtype(name: str) -> Any:
    """The inverse of `dtype_name`."""
    torch = torch_module()
    return getattr(torch, {ours: theirs for theirs, ours in NAMES.items()}.get(name, name))


def tensors_in(thing: Any) -> Iterator[Any]:
    """The tensors in a value, in order: in lists, mappings, dataclasses, and inside tensors that wrap others."""
    tensor_class = torch_module().Tensor
    met: set[int] = set()

    def walk(thing: Any) -> Iterator[Any]:
        if isinstance(thing, tensor_class):
            inner = thing.__tensor_flatten__()[0] if _wraps(thing) else None
            if inner is None:
                yield thing
            else:
                for name in inner:
                    yield from walk(getattr(thing, name))
        elif isinstance(thing, (Mapping, list, tuple, set, frozenset)) or (
            dataclasses.is_dataclass(thing) and not isinstance(thing, type)
        ):
            if id(thing) in met:
                return
            met.add(id(thing))
            if isinstance(thing, Mapping):
                thing = list(thing.values())
            elif dataclasses.is_dataclass(thing):
                thing = [getattr(thing, f.name, None) for f in dataclasses.fields(thing)]
            for part in thing:
                yield from walk(part)

    yield from walk(thing)


def _wraps(tensor: Any) -> bool:
    return hasattr(type(tensor), "__tensor_flatten__")


@dataclass
class _Memory:
    """A storage. number : ours. alive : PyTorch's weak reference, so that its address is given to no other.

    writes : of each, operator index and the bytes [first, past the last) that it may have touched.
    """

    number: int
    alive: Any
    writes: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class _Seen:
    """A value that was met. n_writes : to its memory by then."""

    id: int
    window: tuple[Any, ...]
    n_writes: int


class Values:
    """Gives every value an id, keeps it in the store.

    A tensor is known by its Python object, and else by its window on memory: PyTorch makes new objects for the same
    value without an operator (saved tensors in a backward pass, ``.data``). After a write, what overlaps it is a new
    value. ``stale`` : (operator index, id) of values that a write made and that another view of the memory showed.
    """

    def __init__(self, store: Store) -> None:
        torch = torch_module()
        self.torch = torch
        self.weak_storage = import_module("torch.multiprocessing.reductions").StorageWeakRef
        self.no_modes = import_module("torch.utils._python_dispatch")._disable_current_modes
        self.store = store
        self.infos: dict[int, TensorInfo] = {}
        self.stale: list[tuple[int, int]] = []
        self._memories: dict[int, _Memory] = {}
        self._objects: Any = import_module("torch.utils.weak").WeakTensorKeyDictionary()
        self._windows: dict[tuple[Any, ...], _Seen] = {}
        self._runs: dict[tuple[int, int, int], _Seen] = {}  # memory, first byte, bytes: of contiguous tensors

    def find(self, tensor: Any) -> tuple[int, bool]:
        """The id of a tensor's value, and whether it was known. One that was not is kept."""
        window = self._window(tensor)
        seen = self._objects.get(tensor)
        known = [s for s in (seen, self._windows.get(window)) if s is not None and s.window == window]
        for seen in known:
            if self._written_since(tensor, seen) is None:
                self._objects[tensor] = seen
                return seen.id, True
        # A view of memory that was written meanwhile, or that shows memory that was: the write made this value.
        writer = self._written_since(tensor, known[0] if known else _Seen(-1, window, 0))
        new = self.new(tensor)
        if writer is not None:
            self.stale.append((writer, new))
        return new, writer is not None

    def new(self, tensor: Any) -> int:
        """A new id for what a tensor holds now."""
        number = len(self.infos)
        memory = self._memory(tensor)
        window = self._window(tensor)
        seen = _Seen(number, window, len(memory.writes) if memory else 0)
        self._objects[tensor] = seen
        if memory is not None:
            self._windows[window] = seen
        is_grid = tensor.layout == self.torch.strided
        self.infos[number] = TensorInfo(
            id=number,
            shape=tuple(int(n) for n in tensor.shape),
            strides=tuple(int(n) for n in tensor.stride()) if is_grid else None,
            dtype=dtype_name(tensor.dtype),
            device=str(tensor.device),
            storage=memory.number if memory else -1 - number,
            offset=int(tensor.storage_offset()) if memory else 0,
            n_bytes=tensor.numel() * tensor.element_size(),
            is_kept=self._keep(number, tensor, seen),
        )
        return number

    def write(self, tensor: Any, op: int) -> None:
        """Operator `op` wrote into a tensor."""
        memory = self._memory(tensor)
        if memory is not None:
            memory.writes.append((op, *_extent(tensor)))

    def _written_since(self, tensor: Any, seen: _Seen) -> int | None:
        """The last operator that wrote into a tensor since; None: what was seen is still there."""
        memory = self._memory(tensor)
        if memory is None or len(memory.writes) == seen.n_writes:
            return None
        first, past = _extent(tensor)
        for op, start, end in reversed(memory.writes[seen.n_writes :]):
            if start < past and first < end:
                return op
        seen.n_writes = len(memory.writes)
        return None

    def _memory(self, tensor: Any) -> _Memory | None:
        """None for tensors without one storage, such as sparse ones."""
        if tensor.layout != self.torch.strided:
            return None
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # of other devices
            return None
        key = storage._cdata
        if key not in self._memories:
            self._memories[key] = _Memory(len(self._memories), self.weak_storage(storage))
        return self._memories[key]

    def _window(self, tensor: Any) -> tuple[Any, ...]:
        memory = self._memory(tensor)
        if memory is None:
            return ("no memory", id(tensor))
        return (
            memory.number, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype,
            tensor.is_conj(), tensor.is_neg(),
        )  # fmt: skip

    def _shown_before(self, tensor: Any, seen: _Seen) -> int | None:
        """The value whose bytes a contiguous tensor shows again: they need not be read and hashed once more."""
        memory = self._memory(tensor)
        if memory is None or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        run = (memory.number, *_extent(tensor))
        before = self._runs.get(run)
        self._runs[run] = seen
        return None if before is None or self._written_since(tensor, before) is not None else before.id

    def _keep(self, number: int, tensor: Any, seen: _Seen) -> bool:
        torch = self.torch
        dtype = dtype_name(tensor.dtype)
        shape = tuple(int(n) for n in tensor.shape)
        before = self._shown_before(tensor, seen)
        if before is not None and holds(dtype) and self.store.put_again(number, before, dtype, shape):
            return True
        if tensor.layout != torch.strided:
            return self.store.refuse(f"{str(tensor.layout).removeprefix('torch.')} layout")
        if tensor.device.type == "meta" or tensor.is_quantized or not holds(dtype):
            return self.store.refuse(f"{dtype} on {tensor.device.type} cannot be read")
        if tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self.store.refuse("inside the capture of a CUDA graph")
        try:
            with self.no_modes():
                words, is_ours = content_of(tensor)
        except (RuntimeError, TypeError) as error:  # no memory left on the device, or a tensor that has none
            return self.store.refuse(f"reading failed: {str(error).strip().splitlines()[0]}")
        return self.store.put(number, words, dtype, shape, is_ours)


def content_of(tensor: Any) -> tuple[Array, bool]:
    """The elements of a strided tensor as words of their size; expanded axes have length 1. Whether they are a copy."""
    torch = torch_module()
    with torch.no_grad():
        plain = tensor.detach()
        for axis, (length, stride) in enumerate(zip(plain.shape, plain.stride())):
            if stride == 0 and length > 1:  # the same element again and again
                plain = plain.narrow(axis, 0, 1)
        stored = tuple(plain.shape)
        plain = plain.resolve_conj().resolve_neg().contiguous()
        # Not by `reshape`: the stride of an axis of length 1 may be anything, and `view` minds it.
        flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).cpu()
        is_copy = flat.untyped_storage()._cdata != tensor.untyped_storage()._cdata
    words: Array = flat.numpy().view(f"V{tensor.element_size()}").reshape(stored)
    return words, is_copy


def _extent(tensor: Any) -> tuple[int, int]:
    """The bytes of its storage that a tensor spans: first, past the last."""
    width = tensor.element_size()
    start = tensor.storage_offset() * width
    if tensor.numel() == 0:
        return start, start
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    return start, start + (last + 1) * width
