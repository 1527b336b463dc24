"""No allocator at all: every allocation is a cudaMalloc, every free a cudaFree.

The driver gives whole pages of 2 MiB to requests of more than 1 MiB. How it packs smaller ones is not documented;
they are counted by the 512 bytes that an address is a multiple of at least. So `reserved` is what programs hold.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpubloat.memory.allocators.base import DEFAULT_POOL, MIB, Driver, Segment

GRAIN = 512
PAGE = 2 * MIB


class Native:
    """cudaMalloc and cudaFree, one call each."""

    name = "native"

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.active = 0
        self.counts: dict[str, int] = {}
        self._held: dict[int, tuple[int, int, str]] = {}

    def malloc(self, size: int, stream: int = 0, pool: str = DEFAULT_POOL) -> int | None:
        grain = PAGE if size > MIB else GRAIN
        rounded = max(-(-size // grain), 1) * grain
        address = self.driver.malloc(rounded)
        if address is not None:
            self._held[address] = (rounded, stream, pool)
            self.active += rounded
        return address

    def free(self, address: int) -> None:
        size = self._held.pop(address)[0]
        self.active -= size
        self.driver.free(address, size)

    def release(self) -> None:
        """Nothing is cached."""

    def segments(self) -> Iterator[Segment]:
        for address, (size, stream, pool) in sorted(self._held.items()):
            yield Segment(address, size, stream, pool, size <= MIB, False, [(address, size, True)])
