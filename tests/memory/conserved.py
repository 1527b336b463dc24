"""What holds of any model after every operation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpubloat.memory.allocators import Allocator


def operated(model: Allocator, operations: Iterable[tuple[Any, ...]], held: dict[int, int]) -> Iterator[None]:
    """Carry out ("alloc", size, stream, ...), ("free", number of a held block) and ("empty_cache",), one at a time.

    `held` is kept to the requested bytes of the held blocks, by address. After each, what `conserved` says is checked.
    """
    for operation in operations:
        if operation[0] == "alloc":
            address = model.malloc(*operation[1:])
            assert address not in held
            if address is not None:
                held[address] = operation[1]
            else:
                assert model.driver.limit is not None
        elif operation[0] == "free" and held:
            address = sorted(held)[operation[1] % len(held)]
            del held[address]
            model.free(address)
        else:
            model.release()
        conserved(model, held)
        yield


def conserved(model: Allocator, held: Mapping[int, int]) -> None:
    """Reserved = active + free, also segment by segment; `held` are the requested bytes by address."""
    active = free = end = 0
    for segment in model.segments():
        assert segment.address >= end
        at = segment.address
        for address, size, is_held in segment.blocks:
            assert address == at
            assert size > 0
            active += size * is_held
            free += size * (not is_held)
            at += size
        end = segment.address + segment.size
        assert at == end
    assert model.active == active
    assert model.driver.used == active + free
    assert model.active >= sum(held.values())
    if model.driver.limit is not None:
        assert model.driver.used <= model.driver.limit
    made = {"malloc": 1, "create": 1, "free": -1, "release": -1}
    assert model.driver.used == sum(made.get(call, 0) * size for _, call, _, size, _ in model.driver.calls)
