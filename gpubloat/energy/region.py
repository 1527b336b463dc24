"""Operators of a capture of PyTorch to run again: what is unfit, inputs laid out as they were, outputs compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpubloat.energy.capture.records import Call, Capture, Op, Ref, TensorInfo
from gpubloat.energy.capture.store import Array, decoded
from gpubloat.energy.capture.torchvalues import content_of, dtype_name, tensors_in, torch_dtype
from gpubloat.errors import GpubloatError
from gpubloat.optional import torch_module

_ALIGNED = 512  # bytes: of PyTorch's allocations, so that clones are aligned as the originals
# Relative error (of the norm) up to which an output is the recorded one: sums by atomics have no fixed order.
TOLERANCES = {"fp64": 1e-10, "complex128": 1e-10, "fp32": 1e-5, "complex64": 1e-5, "fp16": 1e-2, "bf16": 1e-2}
_SMALL_FLOAT_TOLERANCE = 0.1
_ALLOCATIONS = ("aten::empty", "aten::new_empty")
_CHANCES = ("dropout_p", "p", "dropout")  # arguments that are 0 where an operator uses no random numbers after all


class Mismatch(GpubloatError):
    """A replay does not give what was recorded."""


def unfit(ops: Sequence[Op], capture: Capture) -> str | None:
    """Why operators cannot be replayed, or None."""
    if capture.framework != "torch":
        return f"replay is built for PyTorch, not for {capture.framework}"
    if not ops:
        return "there is no operator"
    if all(op.is_view or op.name.startswith(_ALLOCATIONS) for op in ops):
        return "views and allocations run no kernel"
    for op in ops:
        reason = _unfit(op, capture.calls[op.index], capture)
        if reason is not None:
            return f"{op.name}: {reason}"
    made = {number for op in ops for number in op.outputs}
    given = {number for op in ops for number in capture.calls[op.index].returned} | {
        new for op in ops for new in capture.calls[op.index].written.values()
    }
    for op in ops:
        for number in op.inputs:
            if number in made - given:
                return f"%{number} is memory that another operator of the region wrote through another view"
            if number not in made and not capture.tensors[number].is_kept:
                return f"input %{number} was not kept"
    if not any(capture.tensors[number].is_kept for number in _outcomes(ops, capture)):
        return "no output was kept, so a replay cannot be checked"
    return None


def _unfit(op: Op, call: Call, capture: Capture) -> str | None:
    torch = torch_module()
    if call.target is None:
        return "it calls functions, which are not recorded"
    if op.name.startswith(("c10d", "_c10d")):
        return "it communicates"
    func = operator(call.target)
    tensors = [capture.tensors[number] for number in (*op.inputs, *op.outputs)]
    devices = {info.device for info in tensors if info.shape or info.device != "cpu"}
    if len(devices) > 1:
        return f"it moves data between devices ({', '.join(sorted(devices))})"
    if op.name.rpartition(".")[0] in ("aten::index", "aten::index_put_", "aten::index_put"):
        indices = [part for part in call.args[1] if isinstance(part, Ref)]
        if any(capture.tensors[part.id].dtype in ("bool", "uint8") for part in indices):
            return "it waits for the host: how much it selects depends on data"
    elif torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return "it waits for the host: its result depends on data"
    if torch.Tag.nondeterministic_seeded in func.tags and not _is_certain(func, call):
        return "it draws random numbers"
    return None if op.outputs else "it gives no tensor"


def _is_certain(func: Any, call: Call) -> bool:
    """Whether an operator that may draw random numbers has no need to."""
    values = {}
    for place, argument in enumerate(func._schema.arguments):
        given = call.args[place] if place < len(call.args) else call.kwargs.get(argument.name, argument.default_value)
        values[argument.name] = given
    if values.get("train") is False or values.get("training") is False:
        return True
    return any(values.get(name) == 0 for name in _CHANCES if name in values)


def operator(target: str) -> Any:
    """ "aten::add.Tensor" -> torch.ops.aten.add.Tensor. Mismatch if its library is not loaded."""
    space, _, rest = target.partition("::")
    name, _, overload = rest.rpartition(".")
    try:
        return getattr(getattr(getattr(torch_module().ops, space), name), overload)
    except AttributeError:
        raise Mismatch(f"{target} is not loaded") from None


def outer_inputs(ops: Sequence[Op]) -> list[int]:
    """Ids that the operators read and did not make themselves, in order."""
    made: set[int] = set()
    outer: dict[int, None] = {}
    for op in ops:
        outer |= dict.fromkeys(number for number in op.inputs if number not in made)
        made.update(op.outputs)
    return list(outer)


def _outcomes(ops: Sequence[Op], capture: Capture) -> list[int]:
    """What the operators give to the rest of the capture; all that they give if nothing uses it."""
    own = {op.index for op in ops}
    given = [
        number
        for op in ops
        for number in dict.fromkeys((*capture.calls[op.index].returned, *capture.calls[op.index].written.values()))
    ]
    used = {number for op in capture.ops if op.index not in own for number in op.inputs} | set(capture.outputs)
    return [number for number in given if number in used] or given


@dataclass
class Set:
    """One set of inputs. buffers : memory, bytes. tensors : id -> window on it."""

    buffers: list[Any]
    tensors: dict[int, Any]


class Inputs:
    """The recorded inputs, as clones. Those that shared memory share it again; what lies between them is zero.

    Raises Mismatch if one place in memory would have to hold two values: it was written in between.
    """

    def __init__(self, capture: Capture, numbers: Sequence[int]) -> None:
        torch = torch_module()
        groups: dict[tuple[int, str], list[TensorInfo]] = {}
        for number in numbers:
            info = capture.tensors[number]
            groups.setdefault((info.storage, info.device), []).append(info)
        self._members = list(groups.values())
        self._starts: list[int] = []
        self.buffers: list[Any] = []
        for members in self._members:
            content, start = _laid_out(members, capture)
            self._starts.append(start)
            self.buffers.append(torch.from_numpy(content).to(members[0].device))
        self.n_bytes = sum(buffer.numel() for buffer in self.buffers)

    def fresh(self) -> Set:
        """A new set."""
        buffers = [buffer.clone() for buffer in self.buffers]
        tensors = {}
        for buffer, members, start in zip(buffers, self._members, self._starts):
            for info in members:
                dtype = torch_dtype(info.dtype)
                typed = buffer.view(dtype)
                offset = info.offset - start // typed.element_size()
                tensors[info.id] = typed.as_strided(info.shape, info.strides, offset)
        return Set(buffers, tensors)

    def dtype(self, group: int) -> str:
        """The type of what a buffer holds."""
        return self._members[group][0].dtype

    def written(self, ops: Sequence[Op]) -> list[int]:
        """The buffers that operators write into."""
        written = {number for op in ops for number in op.writes}
        storages = {info.storage for members in self._members for info in members if info.id in written}
        return [n for n, members in enumerate(self._members) if members[0].storage in storages]


def _laid_out(members: Sequence[TensorInfo], capture: Capture) -> tuple[Array, int]:
    """Bytes that hold several values, and the byte of the storage that they begin at."""
    placed = []
    for info in members:
        bits = capture.store.bits(info.id)
        if bits is None or info.strides is None:
            raise Mismatch(f"%{info.id} was not kept")
        count = int(np.prod(info.shape))
        width = info.n_bytes // count if count else torch_dtype(info.dtype).itemsize
        extent = sum((n - 1) * s for n, s in zip(info.shape, info.strides)) + 1 if count else 0
        placed.append((info, bits, width, info.offset * width, (info.offset + extent) * width))
    start = min(first for *_, first, _ in placed) // _ALIGNED * _ALIGNED
    size = max(past for *_, past in placed) - start
    content = np.zeros(max(16, -(-size // 16) * 16), np.uint8)  # any type can be a view of it
    windows = []
    for info, (blob, stored), width, first, past in placed:
        if past == first:
            continue
        words = content[first - start : past - start].view(f"V{width}")
        strides = tuple(s * width for s in info.strides or ())
        window = np.lib.stride_tricks.as_strided(words, stored, strides)
        value = blob.view(f"V{width}").reshape(stored)
        window[...] = value
        windows.append((info, window, value))
    for info, window, value in windows:
        if window.tobytes() != value.tobytes():
            raise Mismatch(f"the memory of %{info.id} holds two values in turn")
    return content, start


class Region:
    """Operators in order. device : where they run."""

    def __init__(self, ops: Sequence[Op], capture: Capture) -> None:
        self.ops = ops
        self.capture = capture
        self.calls = [(operator(capture.calls[op.index].target or ""), capture.calls[op.index]) for op in ops]
        names = [capture.tensors[number].device for op in ops for number in (*op.outputs, *op.inputs)]
        self.device = torch_module().device(next((name for name in names if name != "cpu"), "cpu"))
        last = {number: place for place, op in enumerate(ops) for number in op.inputs}
        made = {number: place for place, op in enumerate(ops) for number in op.outputs}
        self._forget: list[list[int]] = [[] for _ in ops]  # after each operator: memory is reused as it was
        for number, place in made.items():
            self._forget[max(place, last.get(number, place))].append(number)

    def bound(self, given: Set) -> Callable[[], None]:
        """A function that makes the calls on a set of inputs, once each time."""
        if len(self.calls) == 1:
            func, call = self.calls[0]
            args, kwargs = _filled(call.args, given.tensors), _filled(dict(call.kwargs), given.tensors)

            def one() -> None:
                func(*args, **kwargs)

            return one

        def all_in_order() -> None:
            self._run(given, ())

        return all_in_order

    def check(self, given: Set) -> float:
        """Run once; the worst relative error of the outputs. Mismatch if one is not the recorded one."""
        wanted = [number for number in _outcomes(self.ops, self.capture) if self.capture.tensors[number].is_kept]
        found = self._run(given, wanted)
        worst = 0.0
        for number in wanted:
            error = _error(self.capture, number, found[number])
            if error > TOLERANCES.get(self.capture.tensors[number].dtype, _SMALL_FLOAT_TOLERANCE):
                raise Mismatch(f"replayed output %{number} is not the recorded one: relative error {error:.2g}")
            worst = max(worst, error)
        return worst

    def reads_what_it_changes(self, inputs: Inputs) -> bool:
        """Whether a call would compute something else after another on the same memory, so that it must be restored.

        Tried: what the first call changed is spoiled; a call that gives the same memory again has not read it.
        """
        torch = torch_module()
        first = inputs.fresh()
        self._run(first, ())
        changed = [n for n, (a, b) in enumerate(zip(inputs.buffers, first.buffers)) if not torch.equal(a, b)]
        if any(self._may_be_index(inputs.dtype(n)) for n in changed) or (changed and self._makes_indices()):
            return True  # a spoiled index could point anywhere
        second = inputs.fresh()
        for n in changed:
            before, after = inputs.buffers[n], first.buffers[n]
            second.buffers[n].copy_(torch.where(before != after, before ^ 255, before))
        self._run(second, ())
        return not all(torch.equal(a, b) for a, b in zip(first.buffers, second.buffers))

    def _makes_indices(self) -> bool:
        return any(self._may_be_index(self.capture.tensors[n].dtype) for op in self.ops for n in op.outputs)

    @staticmethod
    def _may_be_index(dtype: str) -> bool:
        return dtype.startswith(("int", "uint", "bool"))

    def _run(self, given: Set, wanted: Sequence[int]) -> dict[int, Any]:
        """Make the calls; clones of the wanted values as they were when they were made."""
        tensors = dict(given.tensors)
        found: dict[int, Any] = {}
        for op, (func, call), forget in zip(self.ops, self.calls, self._forget):
            result = func(*_filled(call.args, tensors), **_filled(dict(call.kwargs), tensors))
            tensors.update(zip(call.returned, tensors_in(result)))
            tensors.update((new, tensors[old]) for old, new in call.written.items())
            found.update((number, tensors[number].clone()) for number in op.outputs if number in wanted)
            for number in forget:
                tensors.pop(number, None)
        return found


def _filled(thing: Any, tensors: Mapping[int, Any]) -> Any:
    """Arguments with their tensors."""
    if isinstance(thing, Ref):
        return tensors[thing.id]
    if isinstance(thing, (list, tuple)):
        parts = [_filled(part, tensors) for part in thing]
        return tuple(parts) if isinstance(thing, tuple) else parts
    return {k: _filled(v, tensors) for k, v in thing.items()} if isinstance(thing, dict) else thing


def _error(capture: Capture, number: int, tensor: Any) -> float:
    """Relative error of the norm; infinite if shapes, types, or places of NaN and infinity differ."""
    info = capture.tensors[number]
    recorded = capture.value(number)
    if recorded is None or tuple(tensor.shape) != info.shape or dtype_name(tensor.dtype) != info.dtype:
        return float("inf")
    words, _ = content_of(tensor)
    flat = np.ascontiguousarray(words).reshape(-1).view(np.uint8)
    value = np.broadcast_to(decoded(flat, info.dtype).reshape(words.shape), info.shape)
    if recorded.dtype.kind not in "fc":
        return 0.0 if np.array_equal(value, recorded) else float("inf")
    if np.array_equal(value, recorded, equal_nan=True):
        return 0.0
    finite = np.isfinite(recorded)
    if not np.array_equal(finite, np.isfinite(value)) or not np.array_equal(
        value[~finite], recorded[~finite], equal_nan=True
    ):
        return float("inf")
    wide = np.complex128 if recorded.dtype.kind == "c" else np.float64
    a, b = recorded[finite].astype(wide), value[finite].astype(wide)
    scale = float(np.linalg.norm(a))
    error = float(np.linalg.norm(a - b))
    return error / scale if scale > 0 else (0.0 if error == 0 else float("inf"))
