"""GMLake's stitching allocator as its paper describes it: free pieces of memory become one range of addresses.

Memory is made of chunks of 2 MiB, one driver handle each. A *piece* (pBlock) is a part of one mapping that was made
for it; it is split without any driver call, and never merged again. A *range* (sBlock) is a stretch of addresses over
pieces: the range of a piece that was split, or one that was stitched, that is, handles of several pieces mapped once
more, in order, into new addresses. A range is free where all of its chunks are. Requests of 2 MiB or more, as n chunks:

S1  a free piece of exactly n chunks, else a free range of n chunks; of several, the one at the lowest address.
S2  the smallest larger free piece is split; its low part is given.
S3  free pieces from the largest down, the last one split, are stitched.
S4  all of them are too little: new memory for what is missing, stitched behind them (or alone, where there are none).
S5  the driver refuses: all that is free goes back to it, and S3 or S4 is tried once more; then there is no memory.

The order by address never changes, so a program that repeats itself finds the same ranges in the same places; with the
last used range first, training of GPT-2 stitched in each of its steps. Frees call nothing. Where stitched ranges span
more than `stitch_limit_bytes` of addresses, free ones go, the least recently used first.
`active` counts requests in multiples of 512 bytes: what is lost to chunks is free memory that nobody can
use. Streams and pools do not share pieces; but what is free in any stream goes back where the driver refuses.
Private pools (graphs, MemPool) are served apart and never given back: a graph that runs again writes to free blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from gpubloat.memory.allocators.base import DEFAULT_POOL, Driver, Segment
from gpubloat.memory.allocators.blocks import LOW
from gpubloat.memory.allocators.pieces import MOST_CHUNKS, Home, Mapping, Piece, Range, StitchingSettings
from gpubloat.memory.allocators.small import LARGE, SmallBlocks

STITCHED_PER_MEMORY = 8  # addresses of stitched ranges, over the memory of the device


class Stitching:
    """The model; see `gpubloat.memory.allocators.base.Allocator`.

    `counts`: n_s1 to n_s5, requests by the step that served them (S5: that came to it, and then S3, S4 or none);
    n_stitchable, large requests; n_stitched, ranges that were stitched.
    """

    name = "stitching"

    def __init__(self, driver: Driver, settings: StitchingSettings | None = None) -> None:
        self.driver = driver
        self.settings = settings or StitchingSettings()
        self.active = 0
        self.counts = dict.fromkeys(("n_s1", "n_s2", "n_s3", "n_s4", "n_s5", "n_stitchable", "n_stitched"), 0)
        self.chunk = self.settings.chunk_bytes
        self.small = SmallBlocks(driver, self.chunk)
        self.homes: dict[tuple[int, str], Home] = {}
        self.pieces: dict[int, Piece] = {}  # by address
        self.mappings: dict[int, Mapping] = {}
        self.stitched: dict[Range, None] = {}  # the least recently used first
        self.stitched_bytes = 0
        limit = self.settings.stitch_limit_bytes
        if limit is None and driver.limit is not None:
            limit = STITCHED_PER_MEMORY * driver.limit
        self._stitch_limit = limit
        self._fewest = -(-self.settings.stitch_min_bytes // self.chunk)
        self._held: dict[int, tuple[Piece | Range, int]] = {}  # by address; with the rounded request

    def malloc(self, size: int, stream: int = 0, pool: str = DEFAULT_POOL) -> int | None:
        rounded = (size + 511) & ~511 or 512
        if rounded < LARGE:
            address = self.small.malloc(size, stream, pool)
            if address is None:
                self.release()
                address = self.small.malloc(size, stream, pool)
            if address is not None:
                self.active += rounded
            return address
        home = self.homes.get((stream, pool))
        if home is None:
            home = self.homes[stream, pool] = Home(stream, pool, self.pieces)
        self.counts["n_stitchable"] += 1
        found = self._find(home, -(-rounded // self.chunk))
        if found is None:
            return None
        self.active += rounded
        self._held[found.address] = found, rounded
        return found.address

    def free(self, address: int) -> None:
        held = self._held.pop(address, None)
        if held is None:
            before = self.small.active
            self.small.free(address)
            self.active += self.small.active - before
            return
        block, rounded = held
        self.active -= rounded
        if isinstance(block, Piece):
            block.home.put(block)
            return
        for piece in self._over(block):
            piece.home.put(piece)
        insort(block.home.ranges.setdefault(block.n, []), block.key)

    def release(self) -> None:
        """Free pieces go, after the ranges over them, and wholly free small segments; not those of private pools."""
        streams = {pool.stream for pool in self.small.pools.values()} | {stream for stream, _ in self.homes}
        for stream in sorted(streams):
            home = self.homes.get((stream, DEFAULT_POOL))
            if home is not None:
                free = [found for found in home.all_ranges() if self._touches_free(found)]
                for found in sorted(free, key=lambda r: (r.address, r.n)):
                    self._destroy(found)
                for mapping in sorted(
                    {self.pieces[LOW - (key & LOW)].mapping for key in home.free}, key=attrgetter("address")
                ):
                    self._hand_back(mapping)
            self.small.release_stream(stream)

    def segments(self) -> Iterator[Segment]:
        """By address; the bytes that a request leaves of its last chunk are a free block behind it."""
        slack: dict[int, int] = {}  # address of a piece -> free bytes at its end
        for block, rounded in self._held.values():
            last = block if isinstance(block, Piece) else self._over(block)[-1]
            slack[last.address] = block.n * self.chunk - rounded
        found = [*self.small.segments()]
        for mapping in self.mappings.values():
            segment: Segment | None = None
            for piece in self._in(mapping, 0, mapping.n):
                if segment is None or segment.address + segment.size < piece.address:
                    segment = Segment(piece.address, 0, piece.home.stream, piece.home.pool, False, False)
                    found.append(segment)
                size = piece.n * self.chunk
                segment.size += size
                if not mapping.state[piece.start]:
                    segment.blocks.append((piece.address, size, False))
                    continue
                free = slack.get(piece.address, 0)
                segment.blocks.append((piece.address, size - free, True))
                if free:
                    segment.blocks.append((piece.address + size - free, free, False))
        yield from sorted(found, key=lambda s: s.address)

    def _find(self, home: Home, n: int) -> Piece | Range | None:
        """A block of n chunks, held."""
        piece = home.take_exact(n)
        if piece is not None:
            self.counts["n_s1"] += 1
            return piece
        found = self._free_range(home, n)
        if found is not None:
            self.counts["n_s1"] += 1
            return found
        piece = home.larger(n)
        if piece is not None:
            self.counts["n_s2"] += 1
            self._split(piece, n)
            return home.take(piece)
        made = self._stitch_or_grow(home, n)
        if made is None:
            self.counts["n_s5"] += 1
            self.release()
            made = self._stitch_or_grow(home, n)
        return made

    def _free_range(self, home: Home, n: int) -> Range | None:
        """The free range of n chunks at the lowest address, held."""
        ranges = home.ranges.get(n, ())
        for at, (_, found) in enumerate(ranges):
            if found.is_free():
                del home.ranges[n][at]
                self._hold(found)
                return found
        return None

    def _hold(self, found: Range) -> None:
        for piece in self._over(found):
            piece.home.take(piece)
        if found in self.stitched:
            del self.stitched[found]
            self.stitched[found] = None

    def _stitch_or_grow(self, home: Home, n: int) -> Piece | Range | None:
        """S3, or S4; None where the driver refuses."""
        chosen, total = [], 0
        for key in reversed(home.free):
            size = key >> 64
            if size < self._fewest or total >= n:
                break
            chosen.append(self.pieces[LOW - (key & LOW)])
            total += size
        if total >= n:
            self.counts["n_s3"] += 1
            if total > n:
                self._split(chosen[-1], chosen[-1].n - (total - n))
            return self._stitch(home, chosen, n)
        new = self._create(home, n - total)
        if new is None:
            return None
        self.counts["n_s4"] += 1
        return self._stitch(home, [*chosen, new], n) if chosen else home.take(new)

    def _create(self, home: Home, n: int) -> Piece | None:
        """A new mapping of n chunks as one free piece."""
        size = n * self.chunk
        address = self.driver.reserve(size) if n <= MOST_CHUNKS else None
        if address is None:
            return None
        if not self.driver.map(address, size, n):
            self.driver.address_free(address, size)
            return None
        mapping = self.mappings[address] = Mapping(address, n)
        piece = self.pieces[address] = Piece(home, mapping, 0, n, address)
        home.put(piece)
        return piece

    def _split(self, piece: Piece, n: int) -> None:
        """A free piece keeps its first n chunks; the rest is a free piece, and both are a range."""
        home, mapping = piece.home, piece.mapping
        whole = Range(home, piece.address, [(mapping, piece.start, piece.start + piece.n)], piece.n)
        insort(home.ranges.setdefault(whole.n, []), whole.key)
        home.take(piece)
        rest = Piece(home, mapping, piece.start + n, piece.n - n, piece.address + n * self.chunk)
        self.pieces[rest.address] = rest
        piece.n = n
        home.put(piece)
        home.put(rest)

    def _stitch(self, home: Home, chosen: list[Piece], n: int) -> Range | None:
        """Free pieces of n chunks together, mapped once more in this order; held."""
        size = n * self.chunk
        address = self.driver.reserve(size)
        if address is None:
            return None
        self.driver.alias(address, size, n)
        made = Range(home, address, [(p.mapping, p.start, p.start + p.n) for p in chosen], n)
        self.stitched[made] = None
        self.stitched_bytes += size
        self.counts["n_stitched"] += 1
        self._hold(made)
        if self._stitch_limit is not None and self.stitched_bytes > self._stitch_limit:
            for found in [r for r in self.stitched if r.is_free() and r.home.pool == DEFAULT_POOL]:
                if self.stitched_bytes <= self._stitch_limit:
                    break
                self._destroy(found)
        return made

    def _destroy(self, found: Range) -> None:
        """A range that is not held goes; its pieces stay."""
        ranges = found.home.ranges[found.n]
        del ranges[bisect_left(ranges, found.key)]
        if found in self.stitched:
            del self.stitched[found]
            size = found.n * self.chunk
            self.stitched_bytes -= size
            self.driver.unalias(found.address, size, found.n)
            self.driver.address_free(found.address, size)

    def _touches_free(self, found: Range) -> bool:
        return any(mapping.state.find(0, start, stop) >= 0 for mapping, start, stop in found.parts)

    def _hand_back(self, mapping: Mapping) -> None:
        """The free pieces of a mapping go, neighbours in one call; its addresses with the last of them."""
        run, end = 0, -1
        for piece in [p for p in self._in(mapping, 0, mapping.n) if not mapping.state[p.start]]:
            piece.home.take(piece)
            del self.pieces[piece.address]
            if piece.start != end:
                self._unmap(mapping, run, end)
                run = piece.start
            end = piece.start + piece.n
        self._unmap(mapping, run, end)
        if mapping.state.count(2) == mapping.n:
            self.driver.address_free(mapping.address, mapping.n * self.chunk)
            del self.mappings[mapping.address]

    def _unmap(self, mapping: Mapping, start: int, stop: int) -> None:
        if stop > start:
            n = stop - start
            mapping.state[start:stop] = b"\2" * n
            self.driver.unmap(mapping.address + start * self.chunk, n * self.chunk, n)

    def _over(self, found: Range) -> list[Piece]:
        """The pieces of a range, in order."""
        return [p for mapping, start, stop in found.parts for p in self._in(mapping, start, stop)]

    def _in(self, mapping: Mapping, start: int, stop: int) -> Iterator[Piece]:
        """The pieces between two chunks of a mapping, without those that are gone."""
        while start < stop:
            if mapping.state[start] == 2:
                start += 1
                continue
            piece = self.pieces[mapping.address + start * self.chunk]
            yield piece
            start += piece.n
