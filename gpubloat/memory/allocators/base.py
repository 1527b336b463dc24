"""What every model of an allocator can do, and the driver below it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

MIB = 1 << 20
DEFAULT_POOL = "0.0"
END = 1 << 57  # no address of a device is above: what is recorded is below, what models place is not
_FIRST_ADDRESS = 1 << 60
_LAST_ADDRESS = 1 << 63
_MOST = 1 << 56  # bytes without a limit; no trace of a real program comes near
EACH = frozenset({"create", "map", "release", "set_access_each"})  # calls that take one handle
_GAP = 2 * MIB  # between segments: blocks of two segments are never neighbours


@dataclass(slots=True)
class Segment:
    """One range from the driver with its blocks: (address, size in bytes, held), by address and without a hole."""

    address: int
    size: int
    stream: int
    pool: str
    is_small: bool
    is_expandable: bool
    blocks: list[tuple[int, int, bool]] = field(default_factory=list)


class Driver:
    """Hands out ranges of memory up to `limit` bytes, at addresses from `first` on, never twice the same.

    `calls` is a list of (event, call, address, size in bytes, number of handles); whoever replays sets `event`. One
    entry stands for one call, or, for the kinds of `EACH`, for one call per handle. Handles have no address: their
    entries have that of the range that they were made for.
    """

    def __init__(self, limit: int | None = None, first: int = _FIRST_ADDRESS) -> None:
        self.limit = limit
        self.used = 0
        self.event = 0
        self.calls: list[tuple[int, str, int, int, int]] = []
        self._next = first

    def malloc(self, size: int) -> int | None:
        """Address of a new segment of `size` bytes, or None where the limit does not allow it."""
        if size > self.left():
            return None
        address = self.place(size)
        if address is None:
            return None
        self.used += size
        self.calls.append((self.event, "malloc", address, size, 1))
        return address

    def free(self, address: int, size: int) -> None:
        self.used -= size
        self.calls.append((self.event, "free", address, size, 1))

    def reserve(self, size: int) -> int | None:
        """Address of a range without memory."""
        address = self.place(size)
        if address is None:
            return None
        self.calls.append((self.event, "reserve", address, size, 0))
        return address

    def address_free(self, address: int, size: int) -> None:
        """Give a range of addresses back."""
        self.calls.append((self.event, "address_free", address, size, 0))

    def map(self, address: int, size: int, handles: int) -> bool:
        """Put new memory below a reserved range; False, and nothing mapped, where the limit does not allow it."""
        if not self.create(address, size, handles):
            return False
        self.alias(address, size, handles)
        return True

    def create(self, address: int, size: int, handles: int) -> bool:
        """New memory, as handles for that range; False where the limit does not allow it, and nothing is kept then."""
        if size > self.left():
            made = min(self.left() * handles // size, handles)
            if made:  # handles are made one by one, until the driver refuses
                self.calls.append((self.event, "create", address, size // handles * made, made))
                self.calls.append((self.event, "release", address, size // handles * made, made))
            return False
        self.used += size
        self.calls.append((self.event, "create", address, size, handles))
        return True

    def unmap(self, address: int, size: int, handles: int) -> None:
        """Take the memory below a range away: its handles go."""
        self.used -= size
        self.unalias(address, size, handles)
        self.calls.append((self.event, "release", address, size, handles))

    def alias(self, address: int, size: int, handles: int, access: str = "set_access") -> None:
        """Put memory that exists below a range.

        `access` is ``set_access``, one call for the range, or ``set_access_each``, one per handle.
        """
        self.calls.append((self.event, "map", address, size, handles))
        self.calls.append((self.event, access, address, size, handles))

    def unalias(self, address: int, size: int, handles: int) -> None:
        """Take it away from that range; the handles stay."""
        self.calls.append((self.event, "unmap", address, size, handles))

    def left(self) -> int:
        """Bytes that the limit still allows."""
        return max((_MOST if self.limit is None else self.limit) - self.used, 0)

    def place(self, size: int) -> int | None:
        """The next address that was never used, a multiple of 2 MiB; None where the address space ends."""
        address = self._next
        if address + size > _LAST_ADDRESS:
            return None
        self._next += (size + 2 * _GAP - 1) // _GAP * _GAP
        return address


class Allocator(Protocol):
    """A model of an allocator: what it would do, without any memory.

    `reserved` = `active` + the free bytes inside segments, after every call.
    """

    name: str
    driver: Driver
    active: int  # bytes in blocks that are not free, as large as the allocator made them
    counts: dict[str, int]  # what the model did, for the columns of `replays` that only some models fill

    def malloc(self, size: int, stream: int = 0, pool: str = DEFAULT_POOL) -> int | None:
        """Address of a block of at least `size` bytes, or None: out of memory."""

    def free(self, address: int) -> None:
        """Give a block back. KeyError if it is not held."""

    def release(self) -> None:
        """What torch.cuda.empty_cache does: whatever is wholly free goes back to the driver."""

    def segments(self) -> Iterator[Segment]:
        """All that is reserved, by address, with its blocks."""
