"""TensorFlow's and XLA's allocator, "best fit with coalescing": one heap of regions for all streams.

The rules are those of xla/tsl/framework/bfc_allocator.cc. Sizes are multiples of 256 bytes. Chunks lie in bins of
powers of two and are sorted by (size, address) inside each, so that the first fit from the request's bin up is the
best fit of all: one sorted list stands for the bins. A chunk is split where it is at least twice the request, or where
the rest would be at least `fragmentation_bytes`. Regions start at 2 MiB and double; where the driver refuses one, it
is asked for nine tenths, and so on. Without growth there is one region of all the memory.

Not modelled: two ends of one region (spatial partitioning), regions that grow in place, time stamps of frees.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from gpubloat.errors import GpubloatError
from gpubloat.memory.allocators.base import DEFAULT_POOL, MIB, Driver
from gpubloat.memory.allocators.blocks import LOW, Block, Pool
from gpubloat.memory.allocators.caching import Caching
from gpubloat.memory.allocators.settings import changed, number, truth

GRAIN = 256
FIRST_REGION = 2 * MIB
MOST_UNSPLIT = 128 * MIB
BACK_OFF = 0.9
_ALL = 1 << 56  # memory without a limit


@dataclass(frozen=True, slots=True)
class BfcSettings:
    """Bytes and fractions; see `settings`."""

    allow_growth: bool = True
    fragmentation_fraction: float = 0.0
    memory_limit_bytes: int | None = None
    garbage_collection: bool = False

    def changed(self) -> str:
        return changed(self)


def settings(
    *,
    allow_growth: bool | str = True,
    fragmentation_fraction: float = 0.0,
    memory_limit_bytes: int | None = None,
    garbage_collection: bool | str = False,
) -> BfcSettings:
    """Settings of BFC, checked. Raises GpubloatError.

    Parameters
    ----------
    allow_growth : regions are added as they are needed; else one region of the whole limit (TensorFlow's default, and
        XLA's "preallocate").
    fragmentation_fraction : the part of the limit that a chunk may be too large by without being split; 0 means
        128 MiB.
    memory_limit_bytes : memory that it may take; default, all that the device has.
    garbage_collection : give wholly free regions back before it fails (TensorFlow's default).
    """
    fraction = number("fragmentation_fraction", fragmentation_fraction)
    if not 0 <= fraction <= 1:
        raise GpubloatError(f"fragmentation_fraction={fraction}: a fraction from 0 to 1 is wanted")
    limit = None if memory_limit_bytes is None else int(number("memory_limit_bytes", memory_limit_bytes))
    if limit is not None and limit < GRAIN:
        raise GpubloatError(f"memory_limit_bytes={limit}: at least {GRAIN} are wanted")
    growth = truth("allow_growth", allow_growth)
    return BfcSettings(growth, fraction, limit, truth("garbage_collection", garbage_collection))


class Bfc(Caching):
    """The model. It has no empty_cache: `release` does nothing."""

    name = "bfc"
    largest_small = -1

    def __init__(self, driver: Driver, settings: BfcSettings | None = None) -> None:
        super().__init__(driver)
        self.given = settings or BfcSettings()
        limit = self.given.memory_limit_bytes if self.given.memory_limit_bytes is not None else driver.limit
        if limit is None and not self.given.allow_growth:
            raise GpubloatError(
                "bfc without growth takes all its memory at once: it needs to know how much that is",
                "give limit_bytes or memory_limit_bytes",
            )
        self.memory_limit = _ALL if limit is None else limit
        fraction = self.given.fragmentation_fraction
        self.fragmentation_bytes = int(fraction * self.memory_limit) if fraction else MOST_UNSPLIT
        self.region_bytes = round_up(min(self.memory_limit, FIRST_REGION) if self.given.allow_growth else limit or 0)
        self._rounds = True

    def malloc(self, size: int, stream: int = 0, pool: str = DEFAULT_POOL) -> int | None:  # noqa: ARG002
        return super().malloc(size)

    def round(self, size: int) -> int:
        return round_up(max(size, 1))

    def release(self, pools: Container[str] = (DEFAULT_POOL,)) -> None:
        """Nothing goes back: TensorFlow has no call for it."""

    def _splits(self, block: Block, rounded: int) -> bool:
        return block.size >= 2 * rounded or block.size - rounded >= self.fragmentation_bytes

    def _grow(self, pool: Pool, rounded: int) -> Block | None:
        block = self._extend(pool, rounded)
        if block is None and self.given.garbage_collection and self._put_back_free_regions(pool, rounded):
            block = self._extend(pool, rounded)
        return block

    def _extend(self, pool: Pool, rounded: int) -> Block | None:
        """A new region as one chunk."""
        available = max(self.memory_limit - self.driver.used, 0) // GRAIN * GRAIN
        if rounded > available:
            return None
        has_grown = False
        while rounded > self.region_bytes:
            self.region_bytes *= 2
            has_grown = True
        size = min(self.region_bytes, available)
        address = self.driver.malloc(size)
        while address is None:
            size = min(round_up(int(size * BACK_OFF)), size - GRAIN)
            if size < rounded:
                return None
            address = self.driver.malloc(size)
        if not has_grown:
            self.region_bytes *= 2
        block = self.blocks[address] = Block(address, size, pool)
        return block

    def _put_back_free_regions(self, pool: Pool, rounded: int) -> bool:
        whole = [key & LOW for key in pool.free if self._is_whole(self.blocks[key & LOW])]
        freed = sum(self.blocks[address].size for address in whole)
        if not whole or rounded > self.memory_limit - self.driver.used + freed:
            return False
        for address in whole:
            self.put_back(address)
        return True


def round_up(size: int) -> int:
    """The next multiple of 256."""
    return -(-size // GRAIN) * GRAIN
