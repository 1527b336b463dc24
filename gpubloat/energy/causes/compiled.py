"""Compiled code on one side: which kernels it runs in place of those of the other side's operators.

Compiled code dispatches no operators, so its kernels are known by their names alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpubloat.energy.causes import hosts, names
from gpubloat.energy.causes.findings import Finding
from gpubloat.energy.causes.sides import Side, in_time
from gpubloat.energy.timing import Kernel

_LIBRARY = ("product", "convolution", "attention")  # families that compilers leave to libraries
_FUSED = "triton_"  # how Inductor begins the names of kernels that it writes


def found(slow: Side, fast: Side) -> list[Finding]:
    """An unfused chain, or another choice of library kernels: what more of the time goes to."""
    if not (slow.has_kernels and fast.has_kernels) or not fast.capture.is_compiled or slow.capture.is_compiled:
        return []
    of_slow, of_fast = _first_repeat(slow), _first_repeat(fast)
    known = {kernel.name for kernel in of_fast}
    gone = [op for op in slow.works if any(kernel.name not in known for kernel in slow.of(op))]
    if not gone:
        return []
    fused = [kernel for kernel in of_fast if kernel.name.startswith(_FUSED)]
    known_slow = {kernel.name for kernel in of_slow}
    new = [kernel for kernel in of_fast if kernel.name not in known_slow and not kernel.name.startswith(_FUSED)]
    heavy = [op for op in gone if names.family(op.name) in _LIBRARY]
    light = [op for op in gone if names.family(op.name) not in _LIBRARY]
    is_fused = not heavy or (bool(light) and slow.us(light) - _us(fused) >= slow.us(heavy) - _us(new))
    own, instead = (light, fused) if is_fused else (heavy, new)
    worst = max(own, key=lambda op: slow.us([op]))
    evidence = (
        f"{fast.letter} is compiled and runs {len(of_fast)} kernels a call ({in_time(_us(of_fast))}), {slow.letter} "
        f"{len(of_slow)} ({in_time(_us(of_slow))}); {len(own)} operators of {slow.letter} "
        f"({in_time(slow.us(own))}) ran kernels that {fast.letter} has not, most time {worst.name} with "
        f"{_longest(slow.of(worst))}; {fast.letter} has {len(instead)} {'fused ones' if is_fused else 'others'} "
        f"instead ({in_time(_us(instead))})"
    )
    if instead:
        evidence += f", the longest {_longest(instead)}"
    waits = hosts.waits_told(slow, fast)
    evidence += f"; {waits}" if waits else ""
    kind = "unfused chain" if is_fused else "kernel choice"
    remedy = f"compile the function with torch.compile, as {fast.letter} does"
    us = max(0.0, _us(of_slow) - _us(of_fast))
    return [Finding(kind, evidence, remedy, worst, None, us, 0.7)]


def _first_repeat(side: Side) -> list[Kernel]:
    assert side.timing is not None
    return [kernel for kernel in side.timing.kernels if kernel.repeat == 0]


def _us(kernels: Iterable[Kernel]) -> float:
    return sum(kernel.us for kernel in kernels)


def _longest(kernels: Iterable[Kernel]) -> str:
    longest = max(kernels, key=lambda kernel: kernel.us)
    return f"{names.short(longest.name)} ({in_time(longest.us)})"
