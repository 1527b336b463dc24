"""PyTorch's expandable segments: memory is mapped page by page into one large range per stream and size class.

A range of 9/8 of the device's memory is reserved; pages are 2 MiB (small) or `large_segment_size`. A block that does
not fit grows into the unmapped part behind it. Giving memory back unmaps the pages that lie wholly inside free blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from gpubloat.memory.allocators.base import Driver, Segment
from gpubloat.memory.allocators.blocks import LOW, Block, Pool
from gpubloat.memory.allocators.caching import SMALL_SEGMENT, Caching
from gpubloat.memory.allocators.settings import Settings

DEVICE_BYTES = 80 << 30  # where neither a limit nor the device's memory is known


class Expandable(Caching):
    """The caching allocator with expandable_segments:True."""

    name = "expandable"

    def __init__(self, driver: Driver, settings: Settings | None = None, device_bytes: int | None = None) -> None:
        super().__init__(driver, settings or Settings(expandable_segments=True))
        self.device_bytes = device_bytes or driver.limit or DEVICE_BYTES

    def page(self, pool: Pool) -> int:
        return SMALL_SEGMENT if pool.is_small else self.settings.large_segment_size

    def range_size(self, pool: Pool) -> int:
        """Bytes of address space that one range reserves."""
        page = self.page(pool)
        return -(-(self.device_bytes + self.device_bytes // 8) // page) * page

    def adopt_range(self, start: int, segments: Sequence[Segment]) -> None:
        """Begin with a range whose mapped parts are `segments`, by address; the rest of it is unmapped."""
        pool = self.pool(segments[0].pool, segments[0].stream, segments[0].is_small)
        end = max(start + self.range_size(pool), segments[-1].address + segments[-1].size)
        space = (start, end - start)
        at, last = start, None
        for segment in [*segments, Segment(end, 0, 0, "", False, True)]:
            parts = [(address, size, held, True) for address, size, held in segment.blocks]
            if segment.address > at:
                parts.insert(0, (at, segment.address - at, False, False))
            for address, size, is_held, is_mapped in parts:
                block = Block(address, size, pool)
                block.space, block.is_mapped, block.is_free = space, is_mapped, not is_held
                block.previous = last
                if last is not None:
                    last.next = block
                self.blocks[address] = last = block
                self.active += size if is_held else 0
                if not is_mapped:
                    insort(pool.unmapped, address)
                elif not is_held:
                    self._keep(block)
            at = segment.address + segment.size
            self.driver.used += segment.size

    def _find(self, pool: Pool, rounded: int) -> Block | None:
        pool.n_looks += self._collects
        free, blocks = pool.free, self.blocks
        at = bisect_left(free, rounded << 64)
        if at == len(free):
            return None
        block = blocks[free[at] & LOW]
        # The best fit is the one that can grow least: its size is the size it could have.
        while block.space is not None and at + 1 < len(free):
            following = blocks[free[at + 1] & LOW]
            if _could_have(following) >= _could_have(block):
                break
            at, block = at + 1, following
        return self._take(pool, at, rounded)

    def _from_driver(self, pool: Pool, rounded: int) -> Block | None:
        block = self._with_room(pool, rounded)
        if block is None:
            return None
        if not block.is_mapped and not self._map(block, min(block.size, rounded)):
            return None
        while block.size < rounded:
            room = block.next
            if room is None or not self._map(room, min(rounded - block.size, room.size)):
                return None
            block = room  # which has merged with what was before it
        self._leave(block)
        return block

    def _with_room(self, pool: Pool, rounded: int) -> Block | None:
        """The first free or unmapped block, by address, that could become as large as `rounded`."""
        for address in pool.unmapped:
            block = self.blocks[address]
            if block.previous is not None and block.previous.is_free:
                block = block.previous
            size = 0
            follow: Block | None = block
            while size < rounded and follow is not None and follow.is_free:
                size += follow.size
                follow = follow.next
            if size >= rounded:
                return block
        size = self.range_size(pool)
        start = self.driver.reserve(size)
        if start is None or size < rounded:
            return None
        block = self.blocks[start] = Block(start, size, pool)
        block.is_free, block.is_mapped, block.space = True, False, (start, size)
        insort(pool.unmapped, start)
        return block

    def _map(self, block: Block, wanted: int) -> bool:
        """Map the first pages of an unmapped block; it becomes a free one, merged with its free neighbours."""
        page = self.page(block.pool)
        pages = -(-wanted // page)
        size = min(pages * page, block.size)
        if not self.driver.map(block.address, size, pages):
            return False
        self._leave(block)
        block.is_mapped = True
        if size < block.size:
            rest = Block(block.address + size, block.size - size, block.pool)
            rest.is_free, rest.is_mapped, rest.space = True, False, block.space
            self._splice(block, rest, block.next)
            insort(block.pool.unmapped, rest.address)
            block.size = size
        self._keep(self._merged(block))
        return True

    def _release_pool(self, pool: Pool) -> None:
        free = [key & LOW for key in pool.free]
        for address in free:
            if self._is_whole(self.blocks[address]):
                self.put_back(address)
        for address in free:
            block = self.blocks.get(address)
            if block is not None and block.space is not None and block.is_free and block.is_mapped:
                self.unmap(block, block.address, block.address + block.size)

    def unmap(self, block: Block, start: int, end: int) -> None:
        """Unmap the pages of a free block that lie wholly in [start, end)."""
        page = self.page(block.pool)
        base = block.space[0] if block.space else 0
        start = base + -(-(start - base) // page) * page
        end = base + (end - base) // page * page
        if start >= end:
            return
        self._leave(block)
        if start > block.address:
            before = Block(block.address, start - block.address, block.pool)
            before.space = block.space
            self._splice(block.previous, before, block)
            self._keep(before)
        if end < block.address + block.size:
            after = Block(end, block.address + block.size - end, block.pool)
            after.space = block.space
            self._splice(block, after, block.next)
            self._keep(after)
        block.address, block.size, block.is_mapped = start, end - start, False
        self.blocks[start] = block
        self.driver.unmap(start, end - start, (end - start) // page)
        block = self._merged(block)
        block.is_free = True
        insort(block.pool.unmapped, block.address)
        if block.previous is None and block.next is None:  # the whole range: its addresses are given back too
            block.pool.unmapped.remove(block.address)
            del self.blocks[block.address]
            if block.space is not None:
                self.driver.address_free(*block.space)

    def _splice(self, previous: Block | None, block: Block, following: Block | None) -> None:
        """Put a new block between two neighbours."""
        self.blocks[block.address] = block
        block.previous, block.next = previous, following
        if previous is not None:
            previous.next = block
        if following is not None:
            following.previous = block


def _could_have(block: Block) -> int:
    room = block.next
    return block.size + (room.size if room is not None and not room.is_mapped else 0)
