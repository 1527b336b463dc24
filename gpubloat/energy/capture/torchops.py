"""One pass over a function of PyTorch: every operator below autograd, in order, with its values and its source line.

A dispatch mode sees what reaches the dispatcher in this thread and in the threads of its backward pass: operators that
are made of others are seen as those. It does not see other threads, nor kernels that bypass the dispatcher. Functions
of ``torch.compile`` run uncompiled, as PyTorch does under a dispatch mode anyhow; that is said in `notes`.
"""

from __future__ import annotations

import inspect
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from gpubloat.energy.capture import lines
from gpubloat.energy.capture.records import UNCOMPILED, Call, Capture, Line, Op, Ref
from gpubloat.energy.capture.store import KEEP_BYTES, SPILL_BYTES, Store
from gpubloat.energy.capture.torchmodules import modules_watched
from gpubloat.energy.capture.torchvalues import Values, dtype_name, tensors_in
from gpubloat.energy.workload import kinds
from gpubloat.errors import GpubloatError, sentence
from gpubloat.optional import torch_module

# Operators that write into arguments although their signature does not say so: arguments 3 and 4 if 5 is true.
_RUNNING_MEANS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
_LONGEST = 2000  # of the printed arguments


def capture(
    fn: Callable[..., Any],
    *args: Any,
    keep_bytes: int = KEEP_BYTES,
    spill_bytes: int = SPILL_BYTES,
    folder: str | Path | None = None,
) -> Capture:
    """Run ``fn(*args)`` once and record its operators. The states of random generators are as before afterwards.

    What the function changes stays changed: a step of training has then been made.

    Parameters
    ----------
    fn : a function or module that returns tensors, in whatever lists, mappings or dataclasses.
    keep_bytes, spill_bytes : values kept in memory, and in files below `folder` (default: the system's temporary
        folder). Further values are not kept; `Capture.notes` counts them.

    Raises
    ------
    GpubloatError : it returns no tensor, is no function, or raised; the message names the operator and the line.
    """
    _refuse_unfit(fn)
    with Store.owned(keep_bytes, spill_bytes, folder) as store:
        recorder = _Recorder(store)
        for tensor in tensors_in(args):
            recorder.source(tensor)
        with uncompiled(), randomness_restored(), modules_watched(fn) as modules, recorder.mode(modules):
            result = _called(fn, args, recorder)
        if inspect.isgenerator(result) or inspect.iscoroutine(result):
            raise GpubloatError(
                "the function returns a generator, which has not run yet", "capture `lambda: list(function())`"
            )
        outputs = [recorder.outcome(tensor) for tensor in tensors_in(result)]
        if not outputs:
            if kinds((result,)) & {"jax", "jaxlib"}:
                raise GpubloatError("the function returns arrays of JAX", "give it arrays of JAX as arguments")
            raise GpubloatError("the function returns no tensor", "return what it computes, such as the loss")
        return recorder.finish(outputs)


def _refuse_unfit(fn: Any) -> None:
    if not callable(fn):
        raise GpubloatError(f"a {type(fn).__name__} cannot be called", "give a function or a module")
    if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
        raise GpubloatError("generators and coroutines run only when asked", "capture `lambda: list(function())`")


def _called(fn: Callable[..., Any], args: tuple[Any, ...], recorder: _Recorder) -> Any:
    try:
        return fn(*args)
    except (Exception, SystemExit) as error:
        raise GpubloatError(f"the function failed {recorder.place(error)}: {sentence(error)}") from error


_OUTERMOST = _called.__code__


def uncompiled() -> AbstractContextManager[Any]:
    """Functions of torch.compile run as they were written; ``fullgraph=True`` would fail under a dispatch mode."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and importing it takes seconds
        return nullcontext()
    stance: AbstractContextManager[Any] = import_module("torch.compiler").set_stance("force_eager")
    return stance


@contextmanager
def randomness_restored() -> Iterator[None]:
    """Afterwards the generators of PyTorch (CPU, GPUs in use), NumPy and Python are where they were."""
    torch = torch_module()
    of_python, of_numpy, of_cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        torch.set_rng_state(of_cpu)
        if of_gpus:
            torch.cuda.set_rng_state_all(of_gpus)


class _Recorder:
    """Collects operators. One lock: a backward pass over several GPUs runs in several threads."""

    def __init__(self, store: Store) -> None:
        self.torch = torch_module()
        self.autograd = import_module("torch.autograd")
        self.store = store
        self.values = Values(store)
        self.ops: list[Op] = []
        self.calls: list[Call] = []
        self.inputs: list[int] = []
        self.notes: dict[str, None] = {}  # in order, once
        self.forward: dict[int, dict[int, tuple[tuple[Line, ...], str]]] = {}  # sequence number -> thread -> where
        self.failed: tuple[BaseException, str] | None = None
        self.lock = threading.RLock()

    def mode(self, modules: Callable[[], str]) -> Any:
        """The dispatch mode, as a context manager. modules : gives the path of the module that runs in this thread."""
        recorder = self

        def dispatch(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(_has_own_dispatch(kind) and hasattr(kind, "__tensor_flatten__") for kind in types):
                recorder.notes["tensors of classes with a dispatch of their own were captured by their parts"] = None
                return NotImplemented  # the class unwraps them; its operators come here again
            if getattr(func, "namespace", "") == "profiler":  # marks, no work
                return func(*args, **(kwargs or {}))
            with recorder.lock:
                return recorder.op(func, args, kwargs or {}, modules)

        base = import_module("torch.utils._python_dispatch").TorchDispatchMode
        return type("Capturing", (base,), {"__torch_dispatch__": dispatch, "supports_higher_order_operators": True})()

    def source(self, tensor: Any) -> int:
        """The id of a tensor that is about to be used; one that no operator made is an input."""
        number, was_known = self.values.find(tensor)
        if not was_known:
            self.inputs.append(number)
        return number

    def outcome(self, tensor: Any) -> int:
        """The id of a tensor that the function returned."""
        number, was_known = self.values.find(tensor)
        if not was_known:
            self.inputs.append(number)
            self.notes[
                f"%{number}, which was returned, was made out of sight: in another thread, or beside the dispatcher"
            ] = None
        return number

    def op(self, func: Any, args: Any, kwargs: Any, modules: Callable[[], str]) -> Any:
        """Run one operator and record it."""
        used: list[tuple[int, Any]] = []  # id, tensor

        def referred(thing: Any) -> Any:
            if isinstance(thing, self.torch.Tensor):
                used.append((self.source(thing), thing))
                return Ref(used[-1][0])
            if isinstance(thing, (list, tuple)):
                parts = [referred(part) for part in thing]
                return tuple(parts) if isinstance(thing, tuple) else parts
            return {k: referred(v) for k, v in thing.items()} if isinstance(thing, dict) else thing

        name = _name(func)
        call_args, call_kwargs = referred(tuple(args)), referred(dict(kwargs))
        where, module = self._where(modules)
        written = list({number: (number, tensor) for number, tensor in _written(func, args, kwargs, used)}.values())
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            self.failed = (error, f"in {name}" + (f" at {where[0].file}:{where[0].line}" if where else ""))
            raise
        index = len(self.ops)
        for _, tensor in written:
            self.values.write(tensor, index)
        new = {number: self.values.new(tensor) for number, tensor in written}
        by_object = {id(tensor): new[number] for number, tensor in written}
        results = list(tensors_in(result))
        returned = tuple(by_object[id(t)] if id(t) in by_object else self.values.new(t) for t in results)
        inputs = tuple(number for number, _ in used)
        storages = {self.values.infos[number].storage for number in inputs}
        self.ops.append(
            Op(
                index=index,
                name=name,
                inputs=inputs,
                outputs=tuple(dict.fromkeys((*returned, *new.values()))),
                arguments=_printed(call_args, call_kwargs),
                lines=where,
                module=module,
                is_view=bool(returned) and not new and all(self.values.infos[n].storage in storages for n in returned),
                writes=tuple(new),
                flags=self._flags(),
            )
        )
        self.calls.append(Call(_target(func), call_args, call_kwargs, returned, new))
        return result

    def _where(self, modules: Callable[[], str]) -> tuple[tuple[Line, ...], str]:
        """The user's lines and the module of the operator that runs; those of its forward in a backward pass."""
        stack = lines.here(_OUTERMOST)
        if stack.is_compiled:
            self.notes[UNCOMPILED] = None
        module = modules()
        node = self.torch._C._current_autograd_node()
        if node is None or (stack.lines and not stack.is_backward):
            newest = self.autograd._get_sequence_nr() - 1  # of the node that this operator may belong to
            of_threads = self.forward.setdefault(newest, {})
            of_threads.setdefault(threading.get_ident(), (stack.lines, module))
            return stack.lines, module
        what = f"backward of {node.name().rpartition('::')[2]}"
        of_threads = self.forward.get(node._sequence_nr(), {})
        if len(of_threads) == 1:  # numbers count by thread: with several it is not known whose it was
            found, module = next(iter(of_threads.values()))
            if found:
                return (replace(found[0], function=f"{found[0].function} ({what})"), *found[1:]), module
        return (Line("", 0, what, ""),), ""

    def _flags(self) -> str:
        """Precision of products and convolutions. A program that used the new settings cannot read the old ones."""
        found = []
        for name in ("cuda.matmul", "cudnn"):
            owner, short = self.torch.backends, name.rpartition(".")[2]
            for part in name.split("."):
                owner = getattr(owner, part)
            try:
                found.append(f"{short}.allow_tf32={owner.allow_tf32}")
            except RuntimeError:
                found.append(f"{short}.fp32_precision={owner.fp32_precision}")
        return ", ".join(found)

    def place(self, error: BaseException) -> str:
        """Where an exception was raised."""
        seen: BaseException | None = error
        while seen is not None:
            if self.failed is not None and seen is self.failed[0]:
                return self.failed[1]
            seen = seen.__cause__ or seen.__context__
        when = f"after {self.ops[-1].name} (operator {len(self.ops) - 1})" if self.ops else "before its first operator"
        return when + lines.raised_at(error)

    def finish(self, outputs: list[int]) -> Capture:
        """Values that a write made and that were met later, through another view, are outputs of the write."""
        for op, number in self.values.stale:
            self.ops[op] = replace(self.ops[op], outputs=(*self.ops[op].outputs, number))
        return Capture(
            "torch", self.ops, self.values.infos, self.inputs, outputs, self.store,
            notes=[*self.notes, *self.store.notes()], calls=self.calls,
        )  # fmt: skip


def _has_own_dispatch(kind: Any) -> bool:
    torch = torch_module()
    plain = (torch._C._disabled_torch_dispatch_impl, torch.Tensor.__torch_dispatch__)
    return getattr(kind, "__torch_dispatch__", plain[0]) not in plain


def _name(func: Any) -> str:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return f"higher_order::{func.__name__}"
    return f"{schema.name}.{schema.overload_name or 'default'}"


def _target(func: Any) -> str | None:
    return None if getattr(func, "_schema", None) is None else _name(func)


def _written(func: Any, args: Any, kwargs: Any, used: list[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Those of the tensors used that the operator writes into, by its signature."""
    schema = getattr(func, "_schema", None)
    if schema is None or torch_module().Tag.inplace_view in func.tags:  # t_() and the like: no element is written
        return
    if schema.name in _RUNNING_MEANS:
        touched = [args[3], args[4]] if len(args) > 5 and args[5] else []
    else:
        touched = []
        for place, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                touched.append(args[place] if place < len(args) else kwargs.get(argument.name))
    objects = {id(tensor) for tensor in tensors_in(touched)}
    for number, tensor in used:
        if id(tensor) in objects:
            yield number, tensor


def _printed(args: Any, kwargs: Any) -> str:
    text = ", ".join([*map(_text, args), *(f"{name}={_text(value)}" for name, value in kwargs.items())])
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def _text(value: Any) -> str:
    if isinstance(value, Ref):
        return f"%{value.id}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_text(v)}" for k, v in value.items()) + "}"
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    torch = torch_module()
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
        return str(value).removeprefix("torch.")
    return f"<{type(value).__name__}>"
