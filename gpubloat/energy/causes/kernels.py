"""Kernel choice: equivalent operators, or the same ones, that run as other kernels."""

from __future__ import annotations

from gpubloat.energy.capture.records import Op
from gpubloat.energy.causes import names
from gpubloat.energy.causes.findings import Finding
from gpubloat.energy.causes.sides import Side, aligned, in_bytes, in_time, key, leftover, named
from gpubloat.energy.causes.switches import applying

_FRAMEWORKS = {"torch": "PyTorch", "jax": "JAX"}


def found(slow: Side, fast: Side) -> list[Finding]:
    """Same operators with other kernels; else what only one side has."""
    return _same_operators(slow, fast) or _other_operators(slow, fast)


def _names(side: Side, op: Op) -> tuple[str, ...]:
    """Names of an operator's kernels."""
    return tuple(kernel.name for kernel in side.of(op))


def _same_operators(slow: Side, fast: Side) -> list[Finding]:
    if not (slow.has_kernels and fast.has_kernels) or slow.capture.is_compiled or fast.capture.is_compiled:
        return []  # of compiled code it is not known which kernel is whose
    pairs = [
        (one, other)
        for one, other in aligned(slow, fast)
        if key(slow, one) == key(fast, other) and sorted(_names(slow, one)) != sorted(_names(fast, other))
    ]
    if not pairs:
        return []
    one, other = max(pairs, key=lambda pair: slow.us([pair[0]]) - fast.us([pair[1]]))
    evidence = (
        f"{one.name} ran as {_kernels(slow, one)} in {slow.letter} and as {_kernels(fast, other)} in {fast.letter}"
    )
    if len(pairs) > 1:
        evidence += f", and {len(pairs) - 1} more operators likewise"
    us = max(0.0, sum(slow.us([x]) - fast.us([y]) for x, y in pairs))
    switches = applying([one.name], {t.dtype for t in slow.infos(one.inputs)})
    remedy = "find the setting that chooses the kernel"
    if switches:
        remedy += ": try " + "; ".join(switch.setting for switch in switches[:4])
    return [Finding("kernel choice", evidence, remedy, one, other, us, 0.6, switches[0] if switches else None)]


def _other_operators(slow: Side, fast: Side) -> list[Finding]:
    own, others = leftover(slow, fast)
    if not own:
        return []
    heaviest = max(own, key=lambda op: slow.us([op]))
    partner = next((y for x, y in aligned(slow, fast) if x.index == heaviest.index), None)
    if partner is None and others:
        partner = max(others, key=lambda op: fast.us([op]))
    n_bytes = sum(t.n_bytes for op in own for t in slow.infos((*op.inputs, *op.outputs)))
    own.sort(key=lambda op: -slow.us([op]))
    others.sort(key=lambda op: -fast.us([op]))
    instead = _timed(fast, others) if others else "none"
    evidence = (
        f"{slow.letter} ran {_timed(slow, own)} where {fast.letter} ran {instead}: "
        f"{in_bytes(n_bytes)} of inputs and results in {slow.letter}"
    )
    is_renamed = {op.name for op in own} != {op.name for op in others}
    if not is_renamed and partner is not None:
        evidence += f"; shapes {_shapes(slow, heaviest)} and {_shapes(fast, partner)}"
    if slow.has_kernels and partner is not None and _names(slow, heaviest) != _names(fast, partner):
        evidence += f"; kernels {_kernels(slow, heaviest)}"
        evidence += f" and {_kernels(fast, partner)}" if fast.has_kernels else f" in {slow.letter}"
    if "jax" in (slow.capture.framework, fast.capture.framework):
        evidence += "; equations as traced, kernels of the compiled program are not seen here"
    if not others:
        remedy = f"leave out what only {slow.letter} runs"
    elif slow.capture.framework == fast.capture.framework:
        remedy = f"call {named(others)}, as {fast.letter} does"
    else:
        remedy = f"look for what does in {_FRAMEWORKS[slow.capture.framework]} what {named(others)} does"
    us = max(0.0, slow.us(own) - fast.us(others))
    return [Finding("kernel choice", evidence, remedy, heaviest, partner, us, 0.5 if is_renamed else 0.4)]


def _kernels(side: Side, op: Op) -> str:
    own = side.of(op)
    if not own:
        return "no kernel"
    return " + ".join(names.short(kernel.name) for kernel in own[:3]) + (
        f" ({in_time(sum(kernel.us for kernel in own))})"
    )


def _shapes(side: Side, op: Op) -> str:
    return " ".join(str(t.shape) for t in side.infos(op.inputs))


def _timed(side: Side, ops: list[Op]) -> str:
    return named(ops) + (f" ({in_time(side.us(ops))})" if side.has_kernels else "")
