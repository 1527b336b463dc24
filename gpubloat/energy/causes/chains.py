"""Unfused chains: light operators one after the other whose intermediate results nobody else reads."""

from __future__ import annotations

from gpubloat.energy.capture.records import Op
from gpubloat.energy.causes import names
from gpubloat.energy.causes.findings import Finding
from gpubloat.energy.causes.sides import Side, counterpart, in_bytes, leftover, named

_HEAVY = ("product", "softmax")  # what else attention and fused layers are spelled out in


def found(slow: Side, fast: Side) -> list[Finding]:
    """All chains of operators that the other side has not, if that has at most half as many of its own instead."""
    own, others = leftover(slow, fast)
    is_attention = any(names.family(op.name) == "attention" for op in others)
    light = [op for op in own if names.is_light(op.name) or (is_attention and names.family(op.name) in _HEAVY)]
    chains = [chain for chain in _connected(slow, light) if len(chain) > 1 and _computes(chain)]
    rest = [op for op in others if names.is_light(op.name) or names.family(op.name) not in ("product", "convolution")]
    ops = [op for chain in chains for op in chain]
    if len(rest) > len(ops) / 2 or len(ops) - len(rest) < 2:
        return []
    inner, n_bytes = _inner(slow, chains)
    us = max(0.0, slow.us(ops) - fast.us(rest))
    evidence = (
        f"{len(ops)} operators of {slow.letter} ({named(ops)}) passed {inner} intermediate "
        f"tensor{'s' if inner > 1 else ''} through memory, {in_bytes(n_bytes)} written and read, "
        f"where {fast.letter} ran {named(rest) if rest else 'none'}"
    )
    kernels = sum(len(slow.of(op)) for op in ops)
    if kernels:
        evidence += f"; {kernels} kernels"
    is_jax = slow.capture.framework == "jax"
    if is_jax:
        evidence += "; equations as traced, which XLA fuses: what the compiled program runs is not seen here"
    single = rest[0].name if rest and all(op.name == rest[0].name for op in rest) else "one operator"
    remedy = f"use {single} that does it in one pass over memory, or torch.compile for the function"
    if is_jax:
        remedy = "look at the compiled program (jax.jit(f).lower(...).compile().as_text()) for what was not fused"
    other = rest[0] if rest else counterpart(slow, fast, chains[0][-1])
    return [Finding("unfused chain", evidence, remedy, chains[0][0], other, us, 0.25 if is_jax else 0.8)]


def _computes(chain: list[Op]) -> bool:
    """More than casts, which are a matter of precision."""
    return any(names.base(op.name) not in names.CASTS for op in chain)


def _connected(side: Side, ops: list[Op]) -> list[list[Op]]:
    """Operators that hang together by tensors that are read by these operators only."""
    inside = {op.index: op for op in ops}
    parent = {i: i for i in inside}

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for op in ops:
        if set(op.outputs) & set(side.capture.outputs):
            continue
        users = [user.index for user in side.users(op.outputs)]
        if users and all(user in inside for user in users):
            for user in users:
                one, other = sorted((root(op.index), root(user)))
                parent[other] = one
    groups: dict[int, list[Op]] = {}
    for i in sorted(inside):
        groups.setdefault(root(i), []).append(inside[i])
    return list(groups.values())


def _inner(side: Side, chains: list[list[Op]]) -> tuple[int, float]:
    """How many tensors are made and read inside one chain only, and the bytes of writing and reading them."""
    count, n_bytes = 0, 0.0
    for chain in chains:
        inside = {op.index for op in chain}
        for tensor in (t for op in chain for t in op.outputs):
            users = side.users([tensor])
            if users and all(user.index in inside for user in users) and tensor not in side.capture.outputs:
                count += 1
                n_bytes += side.info(tensor).n_bytes * (1 + len(users))
    return count, n_bytes
