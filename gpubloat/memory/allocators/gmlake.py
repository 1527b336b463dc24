"""GMLake as its repository has it (antgroup/glake, GMLake/src/CUDACachingAllocator.cpp), which is not its paper.

PyTorch's caching allocator with chunks of 2 MiB below its large blocks; requests of more than 1 MiB are multiples of
2 MiB. A large request is served by, in this order:

1. the best fit among free blocks, split where 2 MiB or more are left (also where a fused range would fit exactly);
2. the smallest fused range that is free and not larger than `reuse_limit` times the request;
3. with `defrag_level` 0, fusing: free blocks from the largest down, at least two exist, the last split, their handles
   mapped and made accessible one by one at new addresses; only for requests of at least `fragmentation_limit_mb`;
4. new memory for the whole request: 20 MiB below 10 MiB, else as large as it is;
5. fusing, with `defrag_level` 0 or 1;
6. new memory once more, after every wholly free segment went back;
7. fusing. Then there is no memory.

Only the chunks that a request needs of a fused range are held. Neighbours merge when they are free. Where fused ranges
span more than `auto_gc_gb` of addresses, all that are not held go. Every request's event is taken to be over: what the
GPU still runs is not in a trace. `active` counts requests in multiples of 512 bytes, as `stitching` does.

Not modelled: the undocumented `reAlloc`, failures of address reservation, and fusing across pools.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from gpubloat.errors import GpubloatError
from gpubloat.memory.allocators.base import DEFAULT_POOL, MIB, Driver, Segment
from gpubloat.memory.allocators.blocks import LOW, Block, Pool
from gpubloat.memory.allocators.caching import Caching
from gpubloat.memory.allocators.pieces import CHUNK, MOST_CHUNKS
from gpubloat.memory.allocators.settings import changed, number


@dataclass(frozen=True, slots=True)
class GmlakeSettings:
    """The environment variables fragLimit, reuseLimit, defragLevel and autoGC; see `settings`."""

    fragmentation_limit_mb: float = 512.0
    reuse_limit: float = 10.0
    defrag_level: int = 0
    auto_gc_gb: float = 1000.0

    def changed(self) -> str:
        return changed(self)


def settings(
    *, fragmentation_limit_mb: float = 512, reuse_limit: float = 10, defrag_level: int = 0, auto_gc_gb: float = 1000
) -> GmlakeSettings:
    """Settings of GMLake's repository, by its defaults. Raises GpubloatError.

    Parameters
    ----------
    fragmentation_limit_mb : MiB; smaller requests are never served by fusing.
    reuse_limit : how many times the request a free fused range may be.
    defrag_level : 0, fuse before new memory is asked for; 1, after the driver refused; 2, as the last thing.
    auto_gc_gb : GiB of addresses of fused ranges from which on they are collected.
    """
    limit = number("fragmentation_limit_mb", fragmentation_limit_mb)
    reuse = number("reuse_limit", reuse_limit)
    level = number("defrag_level", defrag_level)
    collected = number("auto_gc_gb", auto_gc_gb)
    if limit < 0 or collected < 0:
        raise GpubloatError("fragmentation_limit_mb and auto_gc_gb: no fewer than 0 are wanted")
    if reuse < 1:
        raise GpubloatError(f"reuse_limit={reuse_limit}: at least 1 is wanted")
    if level not in (0, 1, 2):
        raise GpubloatError(f"defrag_level={defrag_level}: 0, 1 or 2 is wanted")
    return GmlakeSettings(limit, reuse, int(level), collected)


@dataclass(slots=True, eq=False)
class Fused:
    """A range of addresses; `parts` are (start of the segment, first chunk, chunk behind the last), in order."""

    address: int
    size: int
    parts: list[tuple[int, int, int]]
    pool: Pool
    is_gone: bool = False  # some of its chunks went back to the driver while others were held


class Gmlake(Caching):
    """The model. `counts`: n_stitchable, requests above the limit; n_stitched, ranges that were fused."""

    name = "gmlake"

    def __init__(self, driver: Driver, settings: GmlakeSettings | None = None) -> None:
        super().__init__(driver)
        self.given = settings or GmlakeSettings()
        self.counts = {"n_stitchable": 0, "n_stitched": 0}
        self.limit_bytes = int(self.given.fragmentation_limit_mb * MIB)
        self.busy: dict[int, bytearray] = {}  # by start of a segment of chunks: 1 where a chunk is held
        self.fused: dict[Pool, list[int]] = {}  # those not held, as size << 64 | address
        self.ranges: dict[int, Fused] = {}  # all, by address
        self.fused_bytes = 0
        self._held: dict[int, tuple[list[Block], int, int]] = {}  # by address: blocks, rounded to chunks, to 512

    def malloc(self, size: int, stream: int = 0, pool: str = DEFAULT_POOL) -> int | None:
        asked = (size + 511) & ~511 or 512
        if asked <= MIB:
            return super().malloc(size, stream, pool)
        rounded = -(-asked // CHUNK) * CHUNK
        home = self.pools.get((pool, stream, False)) or self.pool(pool, stream, False)
        can_fuse = rounded >= self.limit_bytes
        self.counts["n_stitchable"] += can_fuse
        level = self.given.defrag_level if can_fuse else 3
        found = self._best(home, rounded) or self._reuse(home, rounded) or (level == 0 and self._fuse(home, rounded))
        found = found or self._new(home, rounded) or (level <= 1 and self._fuse(home, rounded))
        if not found:
            self.release()
            found = self._new(home, rounded) or (level <= 2 and self._fuse(home, rounded))
        if not found:
            return None
        address, blocks = found
        self._held[address] = blocks, rounded, asked
        self.active += asked
        return address

    def free(self, address: int) -> None:
        if address not in self._held:
            if not self.blocks[address].pool.is_small:  # a part of what was given out at another address
                raise KeyError(address)
            super().free(address)
            return
        blocks, _, asked = self._held.pop(address)
        self.active -= asked
        for block in blocks:
            self._mark(block, 0)
        for block in blocks:
            self._keep(self._merged(block))
        fused = self.ranges.get(address)
        if fused is not None and fused.is_gone:
            self._unmap(fused)
        elif fused is not None:
            insort(self.fused[fused.pool], fused.size << 64 | address)

    def put_back(self, address: int) -> None:
        block = self.blocks[address]
        if address not in self.busy:
            super().put_back(address)
            return
        for fused in [f for f in self.ranges.values() if any(part[0] == address for part in f.parts)]:
            if fused.address in self._held:
                fused.is_gone = True
            else:
                self._destroy(fused)
        self._leave(block)
        del self.blocks[address], self.busy[address]
        self.driver.unmap(address, block.size, block.size // CHUNK)
        self.driver.address_free(address, block.size)

    def segments(self) -> Iterator[Segment]:
        """By address; the bytes that a request leaves of its last chunk are a free block behind it."""
        slack: dict[int, int] = {}  # end of a block -> free bytes before it
        for blocks, rounded, asked in self._held.values():
            slack[blocks[-1].address + blocks[-1].size] = rounded - asked
        for segment in super().segments():
            cut = []
            for address, size, is_held in segment.blocks:
                free = slack.get(address + size, 0) if is_held else 0
                cut.append((address, size - free, is_held))
                if free:
                    cut.append((address + size - free, free, False))
            segment.blocks = cut
            yield segment

    def _best(self, home: Pool, rounded: int) -> tuple[int, list[Block]] | None:
        """Step 1: the best fit; its low part is held."""
        block = self._find(home, rounded)
        if block is None:
            return None
        self._cut(block, rounded)
        return block.address, [self._hold(block)]

    def _reuse(self, home: Pool, rounded: int) -> tuple[int, list[Block]] | None:
        """Step 2: the smallest fused range that is free."""
        keys = self.fused.get(home, [])
        most = int(rounded * self.given.reuse_limit)
        at = bisect_left(keys, rounded << 64)
        while at < len(keys) and keys[at] >> 64 <= most:
            fused = self.ranges[keys[at] & LOW]
            if all(self.busy[base].find(1, start, stop) < 0 for base, start, stop in fused.parts):
                del keys[at]
                return fused.address, self._carve(fused, rounded // CHUNK)
            at += 1
        return None

    def _fuse(self, home: Pool, rounded: int) -> tuple[int, list[Block]] | None:
        """Steps 3, 5, 7."""
        chosen, total = [], 0
        for key in reversed(home.free if len(home.free) > 1 else ()):
            if total >= rounded:
                break
            chosen.append(self.blocks[key & LOW])
            total += key >> 64
        if total < rounded:
            return None
        address = self.driver.reserve(rounded)
        if address is None:
            return None
        for block in chosen:
            self._leave(block)
        self._cut(chosen[-1], chosen[-1].size - (total - rounded))
        self.driver.alias(address, rounded, rounded // CHUNK, "set_access_each")
        parts = [self._part(block) for block in chosen]
        self.ranges[address] = Fused(address, rounded, parts, home)
        self.fused.setdefault(home, [])
        blocks = [self._hold(block) for block in chosen]
        self.counts["n_stitched"] += 1
        self.fused_bytes += rounded
        if self.fused_bytes > self.given.auto_gc_gb * (1 << 30):
            for keys in self.fused.values():
                for key in list(keys):
                    self._destroy(self.ranges[key & LOW])
        return address, blocks

    def _new(self, home: Pool, rounded: int) -> tuple[int, list[Block]] | None:
        """Steps 4 and 6: a new segment for the whole request; its low part is held."""
        size = self.segment_size(rounded)
        address = self.driver.reserve(size) if size // CHUNK <= MOST_CHUNKS else None
        if address is None:
            return None
        if not self.driver.create(address, size, size // CHUNK):
            self.driver.address_free(address, size)
            return None
        self.driver.alias(address, size, size // CHUNK, "set_access_each")
        block = self.blocks[address] = Block(address, size, home)
        self.busy[address] = bytearray(size // CHUNK)
        self._cut(block, rounded)
        return address, [self._hold(block)]

    def _carve(self, fused: Fused, n: int) -> list[Block]:
        """Hold the first n chunks of a free fused range: the blocks that they lie in are cut there."""
        found = []
        for base, start, stop in fused.parts:
            stop = min(stop, start + n)
            n -= stop - start
            at, end = base + start * CHUNK, base + stop * CHUNK
            block = self.blocks[base]
            while at < end:
                while block.address + block.size <= at:
                    assert block.next is not None
                    block = block.next
                self._leave(block)
                if block.address < at:
                    block = self._cut(block, at - block.address, keep=True)
                self._cut(block, min(end - at, block.size))
                found.append(self._hold(block))
                at += block.size
        return found

    def _cut(self, block: Block, size: int, *, keep: bool = False) -> Block:
        """A block that is in no pool keeps `size` bytes; the rest is a free block, or with `keep` that one is."""
        if size >= block.size:
            return block
        rest = Block(block.address + size, block.size - size, block.pool)
        rest.previous, rest.next = block, block.next
        if rest.next is not None:
            rest.next.previous = rest
        block.next, block.size = rest, size
        self.blocks[rest.address] = rest
        self._keep(block if keep else rest)
        return rest if keep else block

    def _hold(self, block: Block) -> Block:
        block.is_free = False
        self._mark(block, 1)
        return block

    def _part(self, block: Block) -> tuple[int, int, int]:
        """Where a block lies: start of its segment, first chunk, chunk behind the last."""
        first = block
        while first.previous is not None:
            first = first.previous
        start = (block.address - first.address) // CHUNK
        return first.address, start, start + block.size // CHUNK

    def _mark(self, block: Block, value: int) -> None:
        base, start, stop = self._part(block)
        self.busy[base][start:stop] = bytes((value,)) * (stop - start)

    def _destroy(self, fused: Fused) -> None:
        """A fused range that is not held goes."""
        keys = self.fused[fused.pool]
        del keys[bisect_left(keys, fused.size << 64 | fused.address)]
        self._unmap(fused)

    def _unmap(self, fused: Fused) -> None:
        del self.ranges[fused.address]
        self.fused_bytes -= fused.size
        self.driver.unalias(fused.address, fused.size, fused.size // CHUNK)
        self.driver.address_free(fused.address, fused.size)
