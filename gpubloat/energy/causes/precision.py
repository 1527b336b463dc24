"""Precision: the same operator on other types, on other cores, or around which values are cast."""

from __future__ import annotations

import re

import numpy as np

from gpubloat.energy.capture.records import Op
from gpubloat.energy.causes import names
from gpubloat.energy.causes.findings import Finding
from gpubloat.energy.causes.sides import Side, aligned, in_bytes, in_time, leftover, named
from gpubloat.energy.causes.switches import JAX, Switch, parsed
from gpubloat.energy.causes.switches import named as switch_named
from gpubloat.energy.match.tolerance import FP32, TF32

_SIZES = {"fp64": 8, "complex128": 16, "fp32": 4, "complex64": 8, "bf16": 2, "fp16": 2}
_HEAVY = ("product", "convolution", "attention", "fft")
_COARSE = "the results agree only to the accuracy of the coarser type"


def found(slow: Side, fast: Side) -> list[Finding]:
    """The first of: other types, other cores, other settings, results apart as far as TF32; else casts.

    Else the types of light operators, if those are all that differs.
    """
    pairs = [(x, y) for x, y in aligned(slow, fast) if names.family(x.name) == names.family(y.name)]
    for one, other in pairs:
        if names.family(one.name) not in _HEAVY:
            continue
        for says in (_by_type, _by_cores, _by_flags, _by_results):
            said = says(slow, one, fast, other)
            if said is not None:
                evidence, strength = said
                alike = [p for p in pairs if names.family(p[0].name) == names.family(one.name)]
                us = max(0.0, sum(slow.us([p[0]]) - fast.us([p[1]]) for p in alike))
                switch = None if says is _by_type else _switch(slow, one)
                how = (
                    switch.setting if switch is not None else f"compute {one.name} in the type that {fast.letter} uses"
                )
                remedy = f"{how}, if the accuracy is enough: {_COARSE}"
                return [Finding("precision", f"{one.name} {evidence}", remedy, one, other, us, strength, switch)]
    return _casts(slow, fast) or _other_types(slow, fast)


def _floats(side: Side, op: Op) -> list[str]:
    return [t.dtype for t in side.infos(op.inputs) if t.dtype in _SIZES or t.dtype.startswith("fp8")]


def _by_type(slow: Side, one: Op, fast: Side, other: Op) -> tuple[str, float] | None:
    x, y = _floats(slow, one), _floats(fast, other)
    if not x or not y:
        return None
    wide, narrow = max(x, key=_size), max(y, key=_size)
    if _size(wide) <= _size(narrow):
        return None
    return f"computed in {wide} in {slow.letter} and in {narrow} in {fast.letter}", 0.85


def _size(dtype: str) -> int:
    return _SIZES.get(dtype, 1)


def _by_cores(slow: Side, one: Op, fast: Side, other: Op) -> tuple[str, float] | None:
    own, others = (
        [(c, k) for k in side.of(op) if (c := names.cores(k.name))] for side, op in ((slow, one), (fast, other))
    )
    if not own or not others or (own[0][0], others[0][0]) != ("CUDA", "tensor"):
        return None
    kernel, partner = own[0][1], others[0][1]
    return (
        f"ran on CUDA cores in {slow.letter} ({names.short(kernel.name)}, {in_time(kernel.us)}) and on tensor cores in "
        f"{fast.letter} ({names.short(partner.name)}, {in_time(partner.us)})"
    ), 0.95


def _by_flags(slow: Side, one: Op, fast: Side, other: Op) -> tuple[str, float] | None:
    if "fp32" not in _floats(slow, one):
        return None
    x, y = ({**parsed(op.flags), **_asked(op)} for op in (one, other))
    foreign = "matmul." if names.family(one.name) == "convolution" else "cudnn."
    known = sorted(n for n in x.keys() & y.keys() if not n.startswith(foreign))
    differing = [n for n in known if _is_strict(n, x[n]) and not _is_strict(n, y[n])]
    if not differing:
        return None
    name = differing[0]
    return f"ran with {name} {x[name]} in {slow.letter} and {y[name]} in {fast.letter}", 0.95


def _is_strict(name: str, value: str) -> bool:
    """Whether a setting asks for products of fp32 that are not rounded to TF32."""
    return ("tf32" in name or "precision" in name) and any(w in value.lower() for w in ("false", "ieee", "highest"))


def _asked(op: Op) -> dict[str, str]:
    """The precision that an equation of JAX was asked for."""
    asked = re.search(r"\bprecision=(\([^)]*\)|[^,]*)", op.arguments) if op.name.startswith("jax::") else None
    return {"precision": asked[1]} if asked else {}


def _by_results(slow: Side, one: Op, fast: Side, other: Op) -> tuple[str, float] | None:
    """fp32 results that are further apart than rounding, of equal inputs."""
    if {*_floats(slow, one), *_floats(fast, other)} != {"fp32"} or one.name != other.name:
        return None
    for t, u in zip(one.inputs, other.inputs):
        x, y = slow.capture.value(t), fast.capture.value(u)
        if x is None or y is None or x.shape != y.shape or not np.array_equal(x, y):
            return None
    x, y = slow.capture.value(one.outputs[0]), fast.capture.value(other.outputs[0])
    if x is None or y is None or x.shape != y.shape or np.array_equal(x, y):
        return None
    apart, norm = (float(np.sqrt(np.square(v.astype(np.float64)).sum())) for v in (x - y, y))
    error = apart / norm if norm else 0.0
    if not FP32 < error <= TF32:
        return None
    return f"gave fp32 results that differ by {error:.1e} of equal inputs, as TF32 and fp32 do", 0.7


def _switch(side: Side, op: Op) -> Switch:
    if side.capture.framework == "jax":
        return JAX[0]
    return switch_named("cudnn.allow_tf32" if names.family(op.name) == "convolution" else "matmul.allow_tf32")


def _casts(slow: Side, fast: Side) -> list[Finding]:
    """Casts between real types that the other side has not."""
    own, others = leftover(slow, fast)
    casts = [op for op in own if _is_cast(slow, op)]
    if len(casts) <= sum(_is_cast(fast, op) for op in others):
        return []
    n_bytes = sum(t.n_bytes for op in casts for t in slow.infos((*op.inputs, *op.outputs)))
    evidence = (
        f"{len(casts)} operator{'s' if len(casts) > 1 else ''} of {slow.letter} ({named(casts)}) did nothing but cast "
        f"between types, {in_bytes(n_bytes)} read and written that {fast.letter} does not move"
    )
    other = next(iter(others or fast.works), None)
    return [
        Finding(
            "precision", evidence, "compute in the type that the values have", casts[0], other, slow.us(casts), 0.75
        )
    ]


def _is_cast(side: Side, op: Op) -> bool:
    if names.base(op.name) not in names.CASTS or len(op.outputs) != 1 or not op.inputs:
        return False
    given, made = side.info(op.inputs[0]), side.info(op.outputs[0])
    return given.dtype != made.dtype and _size(given.dtype) > 1 and _size(made.dtype) > 1 and bool(made.shape)


def _other_types(slow: Side, fast: Side) -> list[Finding]:
    """The same operators in the same order, on wider types."""
    if [op.name for op in slow.works] != [op.name for op in fast.works]:
        return []
    told = [(x, y, how[0]) for x, y in zip(slow.works, fast.works) if (how := _by_type(slow, x, fast, y)) is not None]
    if not told:
        return []
    one, other, said = told[0]
    ops = [x for x, _, _ in told]
    us = max(0.0, slow.us(ops) - fast.us(y for _, y, _ in told))
    remedy = f"compute {named(ops)} in the type that {fast.letter} uses, if the accuracy is enough: {_COARSE}"
    return [Finding("precision", f"{named(ops)} {said}", remedy, one, other, us, 0.85)]
