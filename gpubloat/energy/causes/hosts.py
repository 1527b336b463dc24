"""Work of the host: operators on the CPU, transfers, waits for results; and time of the host alone."""

from __future__ import annotations

from math import prod

from gpubloat.energy.capture.records import Op
from gpubloat.energy.causes import names
from gpubloat.energy.causes.findings import Finding
from gpubloat.energy.causes.sides import Side, counterpart, in_bytes, in_time, named
from gpubloat.energy.causes.switches import applying

_IDLE = 0.5  # part of the time on the wall in which no kernel runs, from which on the GPU waits for the host
_GAP = 0.2  # relative difference of times of the host


def fallback(slow: Side, fast: Side) -> list[Finding]:
    """Operators that run on the host, or make it wait, of which the other side has fewer."""
    if not (_is_gpu(slow) or _is_gpu(fast)):
        return []
    kinds = [
        ("computed on the CPU although their tensors are on the GPU", _solvers, 0.95),
        ("ran on tensors of the CPU", _on_cpu, 0.9),
        ("carried tensors between GPU and host", _transfers, 0.9),
        ("made the host wait for a result of the GPU", _syncs, 0.75),
    ]
    waits = waits_told(slow, fast)
    for what, find, strength in kinds:
        ops, others = find(slow), find(fast)
        if len(ops) <= len(others):
            continue
        n_bytes = sum(slow.info(t).n_bytes for op in ops for t in op.outputs)
        evidence = f"{len(ops)} operator{'s' if len(ops) > 1 else ''} of {slow.letter} ({named(ops)}) {what}"
        evidence += f", {in_bytes(n_bytes)} of results; {fast.letter} has {len(others) or 'none'}"
        if waits:
            evidence += f"; {waits}"
        switch = next((s for s in applying(op.name for op in ops) if s.name.startswith("linalg")), None)
        remedy = _remedy(ops, fast)
        # How long the host takes cannot be seen in kernels: the strength says it all.
        strength = min(1.0, strength + 0.05) if waits else strength
        return [
            Finding(
                "host fallback", evidence, remedy, ops[0], counterpart(slow, fast, ops[0]), 0.0, strength, switch,
                is_host=True,
            )
        ]  # fmt: skip
    return []


def wait(a: Side, b: Side, host: tuple[float, float] | None) -> list[Finding]:
    """Operators and kernels are the same, CPU seconds are not. host : of A and of B, per call."""
    if host is None or not a.works or min(host) < 0 or abs(host[0] - host[1]) <= _GAP * max(host):
        return []
    more, less = (a, b) if host[0] > host[1] else (b, a)
    evidence = (
        f"both ran the same {len(a.works)} operators, and the host takes {in_time(max(host) * 1e6)} of CPU time a call "
        f"in {more.letter} against {in_time(min(host) * 1e6)} in {less.letter}"
    )
    remedy = "wait for the GPU by sleeping instead of spinning (cudaDeviceScheduleBlockingSync), or do less per call"
    one, other = (next(iter(side.works), None) for side in (more, less))
    return [Finding("host wait", evidence, remedy, one, other, 0.0, 0.9, is_host=True)]


def _is_gpu(side: Side) -> bool:
    return side.has_kernels or any(t.device.startswith("cuda") for t in side.capture.tensors.values())


def waits_told(slow: Side, fast: Side) -> str:
    """How long the GPU stood still in both, if that is much and differs."""
    shares = []
    for side in (slow, fast):
        timing = side.timing
        if timing is None or not side.has_kernels or not timing.wall_us:
            return ""
        shares.append((timing.busy_us, timing.wall_us, max(0.0, 1 - timing.busy_us / timing.wall_us)))
    (busy, wall, idle), (_, other, _) = shares
    if idle < _IDLE or wall <= other:
        return ""
    return f"the GPU is busy for {in_time(busy)} of {in_time(wall)}, and {fast.letter} takes {in_time(other)}"


def _solvers(side: Side) -> list[Op]:
    return [op for op in side.works if names.base(op.name) in names.HOST_SOLVERS]


def _on_cpu(side: Side) -> list[Op]:
    """On CPU tensors, in a program that has tensors on the GPU. Numbers (one element) are the host's anyway.

    What makes a tensor of the GPU from one of the CPU, such as a constant of a compiled program, ran on the GPU.
    """
    if not any(t.device.startswith("cuda") for t in side.capture.tensors.values()):
        return []
    found = []
    for op in side.works:
        large = [t.device for t in side.infos((*op.inputs, *op.outputs)) if prod(t.shape) > 1]
        if large and all(device == "cpu" for device in (*large, *(t.device for t in side.infos(op.outputs)))):
            found.append(op)
    return found


def _transfers(side: Side) -> list[Op]:
    found = []
    for op in side.works:
        given = {t.device for t in side.infos(op.inputs) if t.id not in op.writes and prod(t.shape) > 1}
        made = {t.device for t in side.infos(op.outputs) if prod(t.shape) > 1}
        own = names.base(op.name)
        if given and made and given != made and (own in names.CASTS or own in names.COPIES):
            found.append(op)
    return found


def _syncs(side: Side) -> list[Op]:
    found = []
    for op in side.works:
        own = names.essence(op.name)
        is_masked = own == "index" and any(t.dtype in ("bool", "uint8") for t in side.infos(op.inputs[1:]))
        if own in names.SYNCS or is_masked:
            found.append(op)
    return found


def _remedy(ops: list[Op], fast: Side) -> str:
    first = names.base(ops[0].name)
    if first in names.HOST_SOLVERS:
        other = next((op for op in fast.works if names.family(op.name) == names.family(ops[0].name)), None)
        instead = f" such as {other.name}" if other is not None else ""
        return f"use a solver that runs on the GPU{instead}, as far as the matrix allows it (symmetric: eigh)"
    if names.essence(ops[0].name) in names.SYNCS or first == "index":
        return "keep the result on the GPU: masks and where() instead of shapes and branches that depend on values"
    return "keep the tensors on the GPU: make them there, and move what has to move once"
