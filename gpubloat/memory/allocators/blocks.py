"""What allocators that split and merge are made of: blocks, and pools of free ones."""

from __future__ import annotations

LOW = (1 << 64) - 1  # the address, of a key of a free block


class Block:
    """A block, free or held; `previous` and `next` are its neighbours in the segment."""

    __slots__ = ("address", "born", "is_free", "is_mapped", "next", "pool", "previous", "size", "space")

    def __init__(self, address: int, size: int, pool: Pool) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.is_free = False
        self.is_mapped = True
        self.previous: Block | None = None
        self.next: Block | None = None
        self.born = 0  # for garbage collection: look-ups of the pool when it came in
        self.space: tuple[int, int] | None = None  # start and size of the reserved range, if expandable


class Pool:
    """Free blocks of one stream, one size class and one pool id, as sorted keys: size << 64 | address."""

    __slots__ = ("free", "id", "is_small", "n_looks", "stream", "unmapped")

    def __init__(self, id: str, stream: int, is_small: bool) -> None:
        self.id = id
        self.stream = stream
        self.is_small = is_small
        self.free: list[int] = []
        self.unmapped: list[int] = []  # addresses of blocks without memory, in expandable segments
        self.n_looks = 0
