"""PyTorch's caching allocator: where each block goes, what is split, merged, kept and given back.

The rules are those of c10/cuda/CUDACachingAllocator.cpp, 2.9 to 2.15: sizes in multiples of 512 bytes; best fit by
(size, address) in a pool of one stream, small or large; the low part of a split block is given out; free neighbours
merge; segments of 2 MiB, 20 MiB or a multiple of 2 MiB; only wholly free segments go back to the driver.

Private pools (graphs, MemPool) are served apart and never given back here: a trace does not say when their owner goes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterator

from gpubloat.memory.allocators.base import DEFAULT_POOL, MIB, Driver, Segment
from gpubloat.memory.allocators.blocks import LOW, Block, Pool
from gpubloat.memory.allocators.settings import NO_LIMIT, Settings

MIN_BLOCK = 512
SMALL = MIB  # a request of at most this many bytes is small
SMALL_SEGMENT = 2 * MIB
MIN_LARGE = 10 * MIB  # below, segments of `large_segment_size`
ROUND_LARGE = 2 * MIB


class Caching:
    """The model. Bytes everywhere; see `gpubloat.memory.allocators.base.Allocator`."""

    name = "caching"
    largest_small = SMALL

    def __init__(self, driver: Driver, settings: Settings | None = None) -> None:
        self.driver = driver
        self.settings = settings or Settings()
        self.active = 0
        self.counts: dict[str, int] = {}
        self.blocks: dict[int, Block] = {}
        self.pools: dict[tuple[str, int, bool], Pool] = {}
        self._collects = self.settings.garbage_collection_threshold > 0 and driver.limit is not None
        self._is_limited = self.settings.max_split_size != NO_LIMIT
        self._is_plain = not (self._is_limited or self._collects or self.settings.expandable_segments)
        self._rounds = any(d > 1 for d in self.settings.roundup_power2_divisions)

    def malloc(self, size: int, stream: int = 0, pool: str = DEFAULT_POOL) -> int | None:
        rounded = self.round(size) if self._rounds or size < MIN_BLOCK else (size + 511) & ~511
        is_small = rounded <= self.largest_small
        home = self.pools.get((pool, stream, is_small)) or self.pool(pool, stream, is_small)
        if self._is_plain:  # what `_find` does where no setting is in its way
            free = home.free
            at = bisect_left(free, rounded << 64)
            block = self.blocks[free.pop(at) & LOW] if at < len(free) else self._grow(home, rounded)
        else:
            block = self._find(home, rounded) or self._grow(home, rounded)
        if block is None:
            return None
        size = block.size
        if size != rounded and self._splits(block, rounded):
            rest = Block(block.address + rounded, size - rounded, home)
            rest.space = block.space
            self.blocks[rest.address] = rest
            block.size = size = rounded
            rest.previous, rest.next, block.next = block, block.next, rest
            if rest.next is not None:
                rest.next.previous = rest
            self._keep(rest)
        block.is_free = False
        self.active += size
        return block.address

    def free(self, address: int) -> None:
        block = self.blocks[address]
        if block.is_free:
            raise KeyError(address)
        self.active -= block.size
        before, after = block.previous, block.next
        if (before is not None and before.is_free) or (after is not None and after.is_free):
            block = self._merged(block)
        pool = block.pool  # as `_keep` does
        block.is_free = True
        block.born = pool.n_looks
        insort(pool.free, block.size << 64 | block.address)

    def release(self, pools: Container[str] = (DEFAULT_POOL,)) -> None:
        for pool in sorted(self.pools.values(), key=lambda p: (p.is_small, p.stream)):
            if pool.id in pools:
                self._release_pool(pool)

    def segments(self) -> Iterator[Segment]:
        for address in sorted(self.blocks):
            first = self.blocks[address]
            if not first.is_mapped or (first.previous is not None and first.previous.is_mapped):
                continue
            pool = first.pool
            found = Segment(address, 0, pool.stream, pool.id, pool.is_small, first.space is not None)
            block: Block | None = first
            while block is not None and block.is_mapped:
                found.blocks.append((block.address, block.size, not block.is_free))
                found.size += block.size
                block = block.next
            yield found

    def round(self, size: int) -> int:
        """The size of a block for a request of `size` bytes."""
        if size < MIN_BLOCK:
            return MIN_BLOCK
        log = size.bit_length() - 1
        divided = self.settings.roundup_power2_divisions
        d = divided[min(max(log - 20, 0), len(divided) - 1)]
        if d > 1 and size > MIN_BLOCK * d:
            step = (1 << log) >> (d.bit_length() - 1)
            return 2 << log if step == 0 else -(-size // step) * step
        return -(-size // MIN_BLOCK) * MIN_BLOCK

    def segment_size(self, rounded: int) -> int:
        """Bytes asked of the driver for a block of `rounded` bytes."""
        if rounded <= SMALL:
            return SMALL_SEGMENT
        if rounded < MIN_LARGE:
            return self.settings.large_segment_size
        return -(-rounded // ROUND_LARGE) * ROUND_LARGE

    def pool(self, id: str, stream: int, is_small: bool) -> Pool:
        return self.pools.setdefault((id, stream, is_small), Pool(id, stream, is_small))

    def adopt(self, segment: Segment) -> None:
        """Begin with a segment that is there already."""
        pool = self.pool(segment.pool, segment.stream, segment.is_small)
        last: Block | None = None
        for address, size, is_held in segment.blocks:
            block = Block(address, size, pool)
            block.previous = last
            if last is not None:
                last.next = block
            self.blocks[address] = last = block
            if is_held:
                self.active += size
            else:
                self._keep(block)
        self.driver.used += segment.size

    def releasable(self) -> dict[int, str]:
        """Address -> pool id of the segments that are wholly free."""
        free = ((key & LOW, pool.id) for pool in self.pools.values() for key in pool.free)
        return {address: id for address, id in free if self._is_whole(self.blocks[address])}

    def put_back(self, address: int) -> None:
        """Return one wholly free segment to the driver."""
        block = self.blocks.pop(address)
        del block.pool.free[bisect_left(block.pool.free, block.size << 64 | address)]
        self.driver.free(address, block.size)

    def _release_pool(self, pool: Pool) -> None:
        for address in [key & LOW for key in pool.free]:
            if self._is_whole(self.blocks[address]):
                self.put_back(address)

    def _is_whole(self, block: Block) -> bool:
        return block.space is None and block.previous is None and block.next is None

    def _splits(self, block: Block, rounded: int) -> bool:
        rest = block.size - rounded
        if block.pool.is_small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK
        return rest > SMALL and rounded < self.settings.max_split_size

    def _find(self, pool: Pool, rounded: int) -> Block | None:
        """The best fit, taken out of the pool."""
        pool.n_looks += self._collects
        free = pool.free
        at = bisect_left(free, rounded << 64)
        if at == len(free):
            return None
        if self._is_limited:
            return self._take(pool, at, rounded)
        return self.blocks[free.pop(at) & LOW]

    def _take(self, pool: Pool, at: int, rounded: int) -> Block | None:
        """Free block number `at`, unless it is too large to be given to this request."""
        limit = self.settings.max_split_size
        if limit != NO_LIMIT:
            size = pool.free[at] >> 64
            if rounded < limit <= size or (rounded >= limit and size >= rounded + self.settings.max_non_split_rounding):
                return None
        return self.blocks[pool.free.pop(at) & LOW]

    def _keep(self, block: Block) -> None:
        """Put a free block into its pool."""
        pool = block.pool
        block.is_free = True
        block.born = pool.n_looks
        insort(pool.free, block.size << 64 | block.address)

    def _merged(self, block: Block) -> Block:
        """`block` together with its free neighbours of the same kind, which leave their pool."""
        other = block.previous
        if other is not None and other.is_free and other.is_mapped == block.is_mapped:
            self._leave(other)
            del self.blocks[block.address]
            block.address = other.address
            block.size += other.size
            block.previous = other.previous
            if block.previous is not None:
                block.previous.next = block
            self.blocks[block.address] = block
        other = block.next
        if other is not None and other.is_free and other.is_mapped == block.is_mapped:
            self._leave(other)
            del self.blocks[other.address]
            block.size += other.size
            block.next = other.next
            if block.next is not None:
                block.next.previous = block
        return block

    def _leave(self, block: Block) -> None:
        if block.is_mapped:
            free = block.pool.free
            del free[bisect_left(free, block.size << 64 | block.address)]
        else:
            unmapped = block.pool.unmapped
            del unmapped[bisect_left(unmapped, block.address)]

    def _grow(self, pool: Pool, rounded: int) -> Block | None:
        """A new block from the driver, giving back what is cached where the driver has no more."""
        if self._collects:
            self._collect()
        block = self._from_driver(pool, rounded)
        if block is None and self._release_available(pool, rounded):
            block = self._from_driver(pool, rounded)
        if block is None:
            self.release()
            block = self._from_driver(pool, rounded)
        return block

    def _from_driver(self, pool: Pool, rounded: int) -> Block | None:
        size = self.segment_size(rounded)
        address = self.driver.malloc(size)
        if address is None:
            return None
        block = self.blocks[address] = Block(address, size, pool)
        return block

    def _release_available(self, pool: Pool, rounded: int) -> bool:
        """With max_split_size: give back one oversize block that is large enough, or several from the largest."""
        limit = self.settings.max_split_size
        if limit == NO_LIMIT:
            return False
        wanted = max(rounded, limit)
        whole = [key for key in pool.free if key >> 64 >= limit and self._is_whole(self.blocks[key & LOW])]
        fit = [key for key in whole if key >> 64 >= wanted][:1]
        released = 0
        for key in fit or reversed(whole):
            if released >= wanted:
                break
            released += key >> 64
            self.put_back(key & LOW)
        return released >= wanted

    def _collect(self) -> None:
        """Above the threshold: give back large blocks that were not used for as long as the average."""
        limit = self.driver.limit or 0
        target = self.driver.used - int(self.settings.garbage_collection_threshold * limit)
        large = [p for p in self.pools.values() if p.id == DEFAULT_POOL and not p.is_small]
        ages = {
            key & LOW: pool.n_looks - self.blocks[key & LOW].born
            for pool in large
            for key in pool.free
            if self._is_whole(self.blocks[key & LOW])
        }
        while target > 0 and ages:
            mean = sum(ages.values()) / len(ages)
            for address in [a for a, age in ages.items() if age >= mean]:
                target -= self.blocks[address].size
                del ages[address]
                self.put_back(address)
