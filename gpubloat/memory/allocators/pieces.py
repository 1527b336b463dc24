"""What the stitching allocator is made of: mappings of chunks, pieces of them, ranges over pieces, and its settings."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpubloat.errors import GpubloatError
from gpubloat.memory.allocators.base import MIB
from gpubloat.memory.allocators.blocks import LOW
from gpubloat.memory.allocators.settings import changed, number

CHUNK = 2 * MIB
MOST_CHUNKS = 1 << 24  # of one mapping: more than any device has; a damaged trace may ask for more


@dataclass(frozen=True, slots=True)
class StitchingSettings:
    """Bytes; see `settings`."""

    chunk_bytes: int = CHUNK
    stitch_min_bytes: int = CHUNK
    stitch_limit_bytes: int | None = None

    def changed(self) -> str:
        return changed(self)


def settings(
    *, chunk_bytes: int = CHUNK, stitch_min_bytes: int | None = None, stitch_limit_bytes: int | None = None
) -> StitchingSettings:
    """Settings of the stitching allocator, checked. Raises GpubloatError.

    Parameters
    ----------
    chunk_bytes : size of a handle, a multiple of 2 MiB.
    stitch_min_bytes : the smallest piece that is stitched (the paper's fragmentation limit); default, one chunk.
    stitch_limit_bytes : most bytes of addresses of stitched ranges; default, 8 times the memory of the device.
    """
    chunk = int(number("chunk_bytes", chunk_bytes))
    if chunk < CHUNK or chunk % CHUNK:
        raise GpubloatError(f"chunk_bytes={chunk_bytes}: a multiple of 2 MiB is wanted")
    least = chunk if stitch_min_bytes is None else int(number("stitch_min_bytes", stitch_min_bytes))
    limit = None if stitch_limit_bytes is None else int(number("stitch_limit_bytes", stitch_limit_bytes))
    if least < 0 or (limit or 0) < 0:
        raise GpubloatError("stitch_min_bytes and stitch_limit_bytes: no fewer than 0 are wanted")
    return StitchingSettings(chunk, least, limit)


@dataclass(slots=True, eq=False)
class Mapping:
    """One reservation whose chunks were made for it. `state` of each chunk: 0 free, 1 held, 2 gone."""

    address: int
    n: int
    state: bytearray = field(init=False)

    def __post_init__(self) -> None:
        self.state = bytearray(self.n)


@dataclass(slots=True, eq=False)
class Piece:
    """pBlock: n chunks of a mapping from number `start` on."""

    home: Home
    mapping: Mapping
    start: int
    n: int
    address: int


@dataclass(slots=True, eq=False)
class Range:
    """sBlock: n chunks as one stretch of addresses; `parts` are (mapping, first chunk, chunk behind the last)."""

    home: Home
    address: int
    parts: list[tuple[Mapping, int, int]]
    n: int

    @property
    def key(self) -> tuple[int, Range]:
        """Sorts by address, which no two ranges of one size share."""
        return self.address, self

    def is_free(self) -> bool:
        """Whether nobody holds any of its chunks."""
        for mapping, start, stop in self.parts:  # noqa: SIM110 - a third faster than all()
            if mapping.state.find(1, start, stop) >= 0:
                return False
        return True


class Home:
    """What is free in one pool of one stream."""

    def __init__(self, stream: int, pool: str, pieces: dict[int, Piece]) -> None:
        self.pieces = pieces  # of the device, by address
        self.stream = stream
        self.pool = pool
        self.free: list[int] = []  # chunks << 64 | LOW - address: of one size, the lowest address is the last
        self.ranges: dict[int, list[tuple[int, Range]]] = {}  # by chunks; those that are not held themselves

    def exact(self, n: int) -> Piece | None:
        """The free piece of n chunks at the lowest address."""
        at = bisect_right(self.free, n << 64 | LOW) - 1
        key = self.free[at] if at >= 0 else 0
        return self.pieces[LOW - (key & LOW)] if key >> 64 == n else None

    def take_exact(self, n: int) -> Piece | None:
        """The same piece, held."""
        free = self.free
        at = bisect_right(free, n << 64 | LOW) - 1
        if at < 0 or free[at] >> 64 != n:
            return None
        piece = self.pieces[LOW - (free.pop(at) & LOW)]
        piece.mapping.state[piece.start : piece.start + n] = b"\1" * n
        return piece

    def larger(self, n: int) -> Piece | None:
        """The smallest free piece of more than n chunks; the lowest address of several."""
        at = bisect_right(self.free, n << 64 | LOW)
        return self.exact(self.free[at] >> 64) if at < len(self.free) else None

    def take(self, piece: Piece) -> Piece:
        """A free piece is held."""
        del self.free[bisect_left(self.free, piece.n << 64 | LOW - piece.address)]
        piece.mapping.state[piece.start : piece.start + piece.n] = b"\1" * piece.n
        return piece

    def put(self, piece: Piece) -> None:
        """A piece is free."""
        insort(self.free, piece.n << 64 | LOW - piece.address)
        piece.mapping.state[piece.start : piece.start + piece.n] = bytes(piece.n)

    def all_ranges(self) -> Iterator[Range]:
        """Those that are not held themselves."""
        for ranges in self.ranges.values():
            for _, found in ranges:
                yield found
