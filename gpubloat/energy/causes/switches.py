"""Settings of PyTorch and JAX that change kernels and not code; each is put back after use."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from gpubloat.energy.capture.torchvalues import tensors_in
from gpubloat.energy.causes import names
from gpubloat.optional import torch_module


@dataclass(frozen=True)
class Switch:
    """A setting. name : of its state in records of operators. setting : as the user writes it.

    families : of the operators that it may change (`names.family`). dtypes : of their inputs; any if empty.
    changes_values : results are not the same to the accuracy of their type. setter : makes the context in which it is
    set, from the arguments of the workload; None: it cannot be set while the program runs, so it is advice.
    """

    name: str
    setting: str
    families: frozenset[str]
    changes_values: bool
    dtypes: frozenset[str] = frozenset()
    setter: Callable[[tuple[Any, ...]], AbstractContextManager[None]] | None = field(default=None, compare=False)

    def on(self, *args: Any) -> AbstractContextManager[None]:
        """A context in which it is set, for a workload with these arguments. ValueError for advice."""
        if self.setter is None:
            raise ValueError(f"{self.setting} can only be set before the program starts")
        return self.setter(args)


def sweep(
    run: Callable[[], float], switches: Iterable[Switch], args: tuple[Any, ...] = ()
) -> list[tuple[Switch, float]]:
    """Measure under each switch; the lowest result first. What refuses to run under a switch counts as infinite.

    run : measures the workload and returns joules or seconds. args : of the workload; their memory format is changed
    and restored by one of the switches. Advice is left out.
    """
    found = []
    for switch in switches:
        if switch.setter is None:
            continue
        try:
            with switch.on(*args):
                result = float(run())
        except RuntimeError:  # of PyTorch: no backend can do this, or the build lacks it
            result = math.inf
        found.append((switch, result))
    return sorted(found, key=lambda pair: pair[1])


def closing(results: Sequence[tuple[Switch, float]], slow: float, fast: float, least: float = 0.5) -> Switch | None:
    """The switch with the lowest result, if it closes at least the part `least` of the gap between both sides."""
    best = min(results, key=lambda pair: pair[1], default=None)
    if best is None or slow <= fast or slow - best[1] < least * (slow - fast):
        return None
    return best[0]


def applying(operators: Iterable[str], dtypes: Collection[str] = ()) -> list[Switch]:
    """Those that may change one of these operators, named as in a capture; of JAX, advice.

    dtypes : of their inputs, if known: settings of other types are left out.
    """
    own = list(operators)
    families = {names.family(name) for name in own}
    is_jax = any(name.startswith("jax::") for name in own)
    known = JAX if is_jax else TORCH
    return [
        switch
        for switch in known
        if switch.families & families and (not dtypes or not switch.dtypes or switch.dtypes & {*dtypes})
    ]


def named(name: str) -> Switch:
    """The one of this name. KeyError."""
    return {switch.name: switch for switch in (*TORCH, *JAX)}[name]


def parsed(flags: str) -> dict[str, str]:
    """State of the switches as it is recorded with an operator: ``name=value, name=value``."""
    return dict(part.strip().partition("=")[::2] for part in flags.split(",") if "=" in part)


@contextmanager
def _attribute(path: str, name: str, value: Any) -> Iterator[None]:
    owner = _owner(path)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _tf32(path: str, value: bool) -> Iterator[None]:
    """PyTorch has an old and a new setting for the same. A program that used the new one cannot read the old one."""
    owner = _owner(path)
    new = getattr(owner, "fp32_precision", None)
    try:
        old = owner.allow_tf32
    except RuntimeError:
        old = None
    try:
        if old is None:
            owner.fp32_precision = "tf32" if value else "ieee"
        else:
            owner.allow_tf32 = value
        yield
    finally:
        if old is not None:
            owner.allow_tf32 = old
        if new is not None:
            owner.fp32_precision = new  # last: setting the old one leaves "ieee" where "none" was


def _owner(path: str) -> Any:
    owner = torch_module()
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner


@contextmanager
def _attention(backend: str) -> Iterator[None]:
    module = import_module("torch.nn.attention")
    with module.sdpa_kernel([getattr(module.SDPBackend, backend)]):
        yield


@contextmanager
def _linalg(library: str) -> Iterator[None]:
    choose = torch_module().backends.cuda.preferred_linalg_library
    before = choose()
    try:
        choose(library)
        yield
    finally:
        choose(before)


@contextmanager
def _channels_last(args: tuple[Any, ...]) -> Iterator[None]:
    """Arguments of 4 axes, and parameters of modules among them, lie channels last; the same tensors, other memory."""
    torch = torch_module()
    modules = [arg for arg in args if isinstance(arg, torch.nn.Module)]
    tensors = [*tensors_in(args), *(p for m in modules for p in (*m.parameters(), *m.buffers()))]
    images = [t for t in tensors if t.dim() == 4 and t.is_floating_point()]
    before = [(t, t.data) for t in images]
    try:
        for tensor, data in before:
            tensor.data = data.contiguous(memory_format=torch.channels_last)
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


def _plain(make: Callable[..., AbstractContextManager[None]], *how: Any) -> Callable[[tuple[Any, ...]], Any]:
    return lambda args: make(*how)  # noqa: ARG005


def _of(*words: str) -> frozenset[str]:
    return frozenset(words)


_MATMUL, _CUDNN = "backends.cuda.matmul", "backends.cudnn"
TORCH = (
    Switch(
        "matmul.allow_tf32", "torch.backends.cuda.matmul.allow_tf32 = True", _of("product"), True,
        _of("fp32"), _plain(_tf32, _MATMUL, True),
    ),
    Switch(
        "cudnn.allow_tf32", "torch.backends.cudnn.allow_tf32 = True", _of("convolution"), True,
        _of("fp32"), _plain(_attribute, _CUDNN, "allow_tf32", True),
    ),
    Switch(
        "cudnn.benchmark", "torch.backends.cudnn.benchmark = True", _of("convolution"), False,
        _of(), _plain(_attribute, _CUDNN, "benchmark", True),
    ),
    Switch(
        "channels_last", "x.to(memory_format=torch.channels_last), also for weights", _of("convolution", "norm"), False,
        _of(), _channels_last,
    ),
    Switch(
        "matmul.allow_bf16_reduced_precision_reduction",
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False", _of("product"), False,
        _of("bf16"), _plain(_attribute, _MATMUL, "allow_bf16_reduced_precision_reduction", False),
    ),
    *(
        Switch(
            f"sdpa.{backend.lower()}", f"with sdpa_kernel(SDPBackend.{backend})", _of("attention"), False,
            _of(), _plain(_attention, backend),
        )
        for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
    ),
    *(
        Switch(
            f"linalg.{library}", f'torch.backends.cuda.preferred_linalg_library("{library}")', _of("eigenvalues"),
            False, _of(), _plain(_linalg, library),
        )
        for library in ("cusolver", "magma")
    ),
)  # fmt: skip
JAX = (
    Switch(
        "jax.matmul", 'jax.default_matmul_precision("tensorfloat32")', _of("product", "convolution"), True, _of("fp32")
    ),
    Switch("jax.autotune", "XLA_FLAGS=--xla_gpu_autotune_level=4", _of("product", "convolution"), False),
)
