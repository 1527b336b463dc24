"""The small blocks of the stitching allocator: below 2 MiB, best fit in segments that are made of chunks."""

from __future__ import annotations

from gpubloat.memory.allocators.base import DEFAULT_POOL, MIB, Driver
from gpubloat.memory.allocators.blocks import LOW, Block, Pool
from gpubloat.memory.allocators.caching import MIN_BLOCK, SMALL, SMALL_SEGMENT, Caching

LARGE = 2 * MIB  # a request of as much, in multiples of 512 bytes, is large
LARGER_SEGMENT = 20 * MIB  # for requests of more than 1 MiB


class SmallBlocks(Caching):
    """PyTorch's rules for its small pool, up to 2 MiB. It never gives anything back to make room: its owner does."""

    largest_small = LARGE - MIN_BLOCK

    def __init__(self, driver: Driver, chunk: int) -> None:
        super().__init__(driver)
        self.chunk = chunk

    def segment_size(self, rounded: int) -> int:
        size = SMALL_SEGMENT if rounded <= SMALL else LARGER_SEGMENT
        return -(-size // self.chunk) * self.chunk

    def release_stream(self, stream: int) -> None:
        """Every wholly free segment of the default pool of one stream goes, by address."""
        free = [key & LOW for key in self.pool(DEFAULT_POOL, stream, True).free]
        for address in sorted(a for a in free if self._is_whole(self.blocks[a])):
            self.put_back(address)

    def put_back(self, address: int) -> None:
        size = self.blocks[address].size
        block = self.blocks.pop(address)
        block.pool.free.remove(size << 64 | address)
        self.driver.unmap(address, size, size // self.chunk)
        self.driver.address_free(address, size)

    def _grow(self, pool: Pool, rounded: int) -> Block | None:
        size = self.segment_size(rounded)
        address = self.driver.reserve(size)
        if address is None:
            return None
        if not self.driver.map(address, size, size // self.chunk):
            self.driver.address_free(address, size)
            return None
        block = self.blocks[address] = Block(address, size, pool)
        return block
