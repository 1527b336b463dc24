"""One pass over a function of JAX: it is traced to a jaxpr, whose equations are evaluated one by one.

Calls (``jit``, ``closed_call``, ``custom_jvp``, ``custom_vjp``, ``checkpoint``) are entered, so that equations are
those of the innermost functions. Loops and branches (``scan``, ``while``, ``cond``) and ``shard_map`` are one opaque
operator each. Equations that run alone are not fused: they compare with each other, not with compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from gpubloat.energy.capture import lines
from gpubloat.energy.capture.records import Call, Capture, Line, Op, Ref, TensorInfo
from gpubloat.energy.capture.store import KEEP_BYTES, NAMES, SPILL_BYTES, Store, holds
from gpubloat.errors import GpubloatError, MissingToolError

# Primitives that do no more than call a function, and the parameter that holds its jaxpr.
_CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat": "jaxpr",
    "remat2": "jaxpr", "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr", "custom_lin": "call_jaxpr",
}  # fmt: skip
_LONGEST = 2000  # of the printed arguments
Held = tuple[int, Any]  # id and array


def capture(
    fn: Callable[..., Any],
    *args: Any,
    keep_bytes: int = KEEP_BYTES,
    spill_bytes: int = SPILL_BYTES,
    folder: str | Path | None = None,
) -> Capture:
    """Trace ``fn(*args)`` and evaluate its equations, recording each.

    Arrays among the arguments are traced; numbers, texts and other leaves are constants of the function.

    Raises
    ------
    GpubloatError : it cannot be traced, returns no array, or an equation failed; the message names the primitive.
    MissingToolError : JAX is not installed.
    """
    try:
        jax = import_module("jax")
    except ImportError:
        raise MissingToolError("JAX", "pip install jax") from None
    if not callable(fn):
        raise GpubloatError(f"a {type(fn).__name__} cannot be called", "give a function of arrays")
    leaves, tree = jax.tree_util.tree_flatten(args)
    arrays = [leaf for leaf in leaves if isinstance(leaf, (jax.Array, np.ndarray))]

    def of_arrays(*traced: Any) -> Any:
        those = iter(traced)
        filled = [next(those) if isinstance(leaf, (jax.Array, np.ndarray)) else leaf for leaf in leaves]
        return fn(*jax.tree_util.tree_unflatten(tree, filled))

    try:
        closed = jax.make_jaxpr(of_arrays)(*arrays)
    except Exception as error:
        said = str(error).strip().split("\n")[0].rstrip(".")
        where = lines.raised_at(error)
        raise GpubloatError(f"the function cannot be traced{where}: {type(error).__name__}: {said}") from error
    if not closed.jaxpr.outvars:
        raise GpubloatError("the function returns no tensor", "return what it computes, such as the loss")
    with Store.owned(keep_bytes, spill_bytes, folder) as store:
        evaluation = _Evaluation(store)
        given = [evaluation.source(value) for value in (*arrays, *closed.consts)]
        made = evaluation.run(closed.jaxpr, given[len(arrays) :], given[: len(arrays)], (), "")
        return Capture(
            "jax", evaluation.ops, evaluation.infos, evaluation.inputs, [number for number, _ in made], store,
            notes=[*evaluation.notes, *store.notes()], calls=evaluation.calls,
        )  # fmt: skip


class _Evaluation:
    """Collects equations. A value goes with its id."""

    def __init__(self, store: Store) -> None:
        self.core = import_module("jax.extend.core")
        self.store = store
        self.ops: list[Op] = []
        self.calls: list[Call] = []
        self.infos: dict[int, TensorInfo] = {}
        self.inputs: list[int] = []
        self.notes: dict[str, None] = {}

    def source(self, value: Any) -> Held:
        """An array that no equation made."""
        number = self._new(value)
        self.inputs.append(number)
        return number, value

    def run(
        self, jaxpr: Any, consts: list[Held], given: list[Held], called_from: tuple[Line, ...], scope: str
    ) -> list[Held]:
        """Evaluate a jaxpr; values in, values out. They are let go after the last equation that reads them."""
        held: dict[Any, Held] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *given)))
        last = {atom: n for n, equation in enumerate(jaxpr.eqns) for atom in _variables(self.core, equation.invars)}
        last |= dict.fromkeys(_variables(self.core, jaxpr.outvars), len(jaxpr.eqns))

        def read(atom: Any) -> Held:
            return self.source(atom.val) if isinstance(atom, self.core.Literal) else held[atom]

        for n, equation in enumerate(jaxpr.eqns):
            where = _lines(equation) or called_from
            inside = ".".join(filter(None, (scope, str(equation.source_info.name_stack).replace("/", "."))))
            used = [read(atom) for atom in equation.invars]
            inner = equation.params.get(_CALLS.get(equation.primitive.name, ""))
            if inner is not None:
                body, inner_consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
                made = self.run(body, [self.source(value) for value in inner_consts], used, where, inside)
            else:
                made = self._one(equation, used, where, inside)
            held.update(zip(equation.outvars, made))
            for atom in {*_variables(self.core, equation.invars), *equation.outvars}:
                if last.get(atom, n) <= n:
                    held.pop(atom, None)
        return [read(atom) for atom in jaxpr.outvars]

    def _one(self, equation: Any, used: list[Held], where: tuple[Line, ...], scope: str) -> list[Held]:
        primitive = equation.primitive
        ids = tuple(number for number, _ in used)
        bound = primitive.get_bind_params(equation.params)
        functions, params = bound if isinstance(bound, tuple) else ((), bound)  # a pair up to JAX 0.9
        try:
            with equation.ctx.manager:
                result = primitive.bind(*functions, *(value for _, value in used), **params)
        except Exception as error:
            place = f" at {where[0].file}:{where[0].line}" if where else ""
            said = str(error).strip().split("\n")[0].rstrip(".")
            raise GpubloatError(
                f"the function failed in jax::{primitive.name}{place}: {type(error).__name__}: {said}"
            ) from error
        if primitive.name in ("scan", "while", "cond", "shard_map"):
            self.notes[f"jax::{primitive.name} is one operator: what runs inside it was not taken apart"] = None
        made = [(self._new(value), value) for value in (result if primitive.multiple_results else [result])]
        outputs = tuple(number for number, _ in made)
        printed = ", ".join([*(f"%{n}" for n in ids), *(f"{k}={v}" for k, v in equation.params.items())])
        if len(printed) > _LONGEST:
            printed = printed[:_LONGEST] + "..."
        self.ops.append(
            Op(
                index=len(self.ops),
                name=f"jax::{primitive.name}",
                inputs=ids,
                outputs=outputs,
                arguments=" ".join(printed.split()),
                lines=where,
                module=scope,
                is_view=False,
                writes=(),
            )
        )
        self.calls.append(Call(None, tuple(map(Ref, ids)), dict(equation.params), outputs))
        return made

    def _new(self, value: Any) -> int:
        jax = import_module("jax")
        number = len(self.infos)
        if not hasattr(value, "shape"):  # a Python number
            value = np.asarray(value)
        dtype = str(value.dtype)
        name = NAMES.get(dtype, dtype)
        kept = False
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            kept = self.store.refuse("spread over several processes")
        elif not holds(name):
            kept = self.store.refuse(f"{name} cannot be read")
        else:
            content = np.asarray(value)
            is_ours = isinstance(value, jax.Array)  # nobody changes one
            kept = self.store.put(number, content.view(f"V{content.itemsize}"), name, is_ours=is_ours)
        devices = sorted(map(_device, value.devices())) if isinstance(value, jax.Array) else ["cpu"]
        self.infos[number] = TensorInfo(
            id=number,
            shape=tuple(value.shape),
            strides=None,
            dtype=name,
            device=",".join(devices),
            storage=number,
            offset=0,
            n_bytes=int(value.nbytes),
            is_kept=kept,
        )
        return number


def _variables(core: Any, atoms: Any) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def _device(device: Any) -> str:
    return "cpu" if device.platform == "cpu" else f"cuda:{device.local_hardware_id}"


def _lines(equation: Any) -> tuple[Line, ...]:
    """The user's frames in which an equation was traced, innermost first."""
    traceback = equation.source_info.traceback
    found = []
    for frame in traceback.frames if traceback is not None else ():
        if frame.file_name == __file__:
            break  # what called `capture`
        if lines.shown(frame.file_name) is not None:
            found.append(lines.at(frame.file_name, frame.line_num, frame.function_name.rpartition(".")[2]))
    return tuple(found)
