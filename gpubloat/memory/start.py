"""What was there before a trace begins, worked out backwards from the snapshot at its end.

A trace holds requested sizes. A held block's real size is known where the snapshot still has it. Of the others, a large
one may own up to 1 MiB that was too little to be split off, and no event says so. Two rules find it: free blocks of a
large pool are larger than 1 MiB, so a smaller gap belongs to the block before it; and the first block that is put into
a gap starts where the gap does. With max_split_size, a block of at least that size is never split: it owns its gap.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from gpubloat.errors import GpubloatError
from gpubloat.memory.allocators.base import END, MIB, Segment
from gpubloat.memory.allocators.settings import NO_LIMIT, Settings
from gpubloat.memory.trace import Trace

_MAX_PAGES = 1 << 20  # of expandable segments: 2 TiB in pages of 2 MiB
PAGE = 2 * MIB


@dataclass(slots=True)
class Start:
    """Segments and ranges at the start of a trace, by address, and the held blocks: address -> (real, requested)."""

    segments: list[Segment] = field(default_factory=list)
    ranges: list[tuple[int, list[Segment]]] = field(default_factory=list)  # start of the range, its mapped parts
    held: dict[int, tuple[int, int]] = field(default_factory=dict)
    streams: dict[int, tuple[int, str]] = field(default_factory=dict)  # of held blocks: stream, pool
    n_owners: int = 0
    n_at_odds: int = 0  # events that do not fit what came after them


def infer(trace: Trace, rounded: Callable[[int], int]) -> Start:
    """The state before the first event of `trace`. `rounded` gives the size of a block for a request."""
    blocks = trace.blocks
    start = Start()
    known, mapped = _end(trace)
    held: dict[int, tuple[int, int]] = {
        address: (size, requested)
        for address, size, requested, state in zip(
            *(blocks[c].tolist() for c in ("address", "size_bytes", "requested_bytes", "state"))
        )
        if state in ("active_allocated", "active_pending_free")
    }
    where: dict[int, tuple[int, str]] = {}
    rows = zip(trace.actions, trace.addresses, trace.sizes, trace.streams, trace.pools)
    for action, address, size, stream, pool in reversed(list(rows)):
        if action == "alloc":
            start.n_at_odds += held.pop(address, None) is None
        elif action == "free_completed":
            start.n_at_odds += address in held
            held[address] = (0, size)
            where[address] = (stream, pool)
        elif action == "segment_alloc":
            start.n_at_odds += known.pop(address, None) is None
        elif action == "segment_free":
            known[address] = Segment(address, size, stream, pool, size == PAGE, False)
        elif action in ("segment_map", "segment_unmap"):
            mapped.change(address, size, stream, pool, action == "segment_unmap")
    parts = mapped.runs()
    everything = sorted([*known.values(), *(s for _, runs in parts for s in runs)], key=lambda s: s.address)
    starts = [s.address for s in everything]
    for one, other in zip(everything, [*everything[1:], None]):
        if one.address + one.size > (END if other is None else other.address):
            raise GpubloatError(
                f"the segment at 0x{one.address:x} overlaps another one", "the snapshot is damaged or was not recorded"
            )
    inside: dict[int, list[int]] = {}
    for address in sorted(held):
        at = bisect_right(starts, address) - 1
        if at >= 0 and address < everything[at].address + everything[at].size:
            inside.setdefault(at, []).append(address)
            where[address] = (everything[at].stream, everything[at].pool)
        else:
            start.n_at_odds += bool(everything)
    hints = _first_in_gaps(trace, held)
    for at, segment in enumerate(everything):
        _fill(segment, inside.get(at, []), held, hints, trace.settings, rounded, start)
    start.segments = sorted(known.values(), key=lambda s: s.address)
    start.ranges = parts
    start.held, start.streams = held, {address: where.get(address, (0, "0.0")) for address in held}
    return start


def _fill(
    segment: Segment,
    addresses: list[int],
    held: dict[int, tuple[int, int]],
    hints: dict[int, int],
    settings: Settings,
    rounded: Callable[[int], int],
    start: Start,
) -> None:
    """Lay the held blocks into their segment; what is between them is free, or belongs to the block before it."""
    at, end = segment.address, segment.address + segment.size
    slack = 0 if segment.is_small or segment.is_expandable or settings.expandable_segments else MIB
    for i, address in enumerate(addresses):
        real, requested = held[address]
        following = addresses[i + 1] if i + 1 < len(addresses) else end
        if not real:
            real = rounded(requested)
            gap = following - address - real
            if 0 < gap <= slack or (slack and gap > 0 and real >= settings.max_split_size):
                real += gap
                start.n_owners += 1
            elif slack and gap > 0 and address in hints:
                more = hints[address] - address - real
                most = slack if settings.max_split_size == NO_LIMIT else max(slack, settings.max_non_split_rounding)
                if 0 < more <= most:
                    real += more
                    start.n_owners += 1
        if address < at or address + real > following:
            start.n_at_odds += 1  # overlaps: a damaged or invented snapshot
            real = min(real, following - address)
            if address < at or real <= 0:
                continue
        if address > at:
            segment.blocks.append((at, address - at, False))
        segment.blocks.append((address, real, True))
        held[address] = (real, min(requested, real))
        at = address + real
    if at < end:
        segment.blocks.append((at, end - at, False))


def _first_in_gaps(trace: Trace, held: dict[int, tuple[int, int]]) -> dict[int, int]:
    """Held block -> address of the first block that was put behind it, before anything changed around them."""
    order = sorted(held)
    gone: set[int] = set()
    seen: dict[int, int] = {}
    for action, address in zip(trace.actions, trace.addresses):
        if action == "free_completed":
            gone.add(address)
        elif action == "alloc" and order:
            owner = order[max(bisect_right(order, address) - 1, 0)]
            if owner < address and owner not in gone:
                seen.setdefault(owner, address)
    return seen


class _Mapped:
    """Pages of expandable segments, by (stream, pool, is small)."""

    def __init__(self, large_page: int) -> None:
        self.large_page = large_page
        self.pages: dict[tuple[int, str, bool], set[int]] = {}
        self.ever: dict[tuple[int, str, bool], set[int]] = {}
        self.n = 0

    def add(self, key: tuple[int, str, bool], address: int, size: int) -> None:
        page = PAGE if key[2] else self.large_page
        self.n += -(-size // page)
        if self.n > _MAX_PAGES:
            raise GpubloatError(
                "the expandable segments of this snapshot have more pages than any device", "is the file intact?"
            )
        new = range(address, address + size, page)
        self.pages.setdefault(key, set()).update(new)
        self.ever.setdefault(key, set()).update(new)

    def change(self, address: int, size: int, stream: int, pool: str, was_unmapped: bool) -> None:
        """Undo a segment_unmap (the pages are there before it) or a segment_map (they are not)."""
        key = (stream, pool, self.is_small(address, size, stream, pool))
        if was_unmapped:
            self.add(key, address, size)
        else:
            self.add(key, address, size)  # for `ever`
            self.pages[key].difference_update(range(address, address + size, PAGE if key[2] else self.large_page))

    def is_small(self, address: int, size: int, stream: int, pool: str) -> bool:
        for is_small in (True, False):
            if address in self.ever.get((stream, pool, is_small), ()):
                return is_small
        return size == PAGE or size % self.large_page != 0

    def runs(self) -> list[tuple[int, list[Segment]]]:
        """For each range: the lowest address that was ever mapped, and its parts that are mapped without a hole."""
        found = []
        for key, pages in self.pages.items():
            page = PAGE if key[2] else self.large_page
            parts: list[Segment] = []
            for address in sorted(pages):
                if parts and parts[-1].address + parts[-1].size == address:
                    parts[-1].size += page
                else:
                    parts.append(Segment(address, page, key[0], key[1], key[2], True))
            if parts:
                found.append((min(self.ever[key]), parts))
        return found


def _end(trace: Trace) -> tuple[dict[int, Segment], _Mapped]:
    """Segments at the end, and pages at the end."""
    names = ("address", "size_bytes", "stream", "pool", "kind", "is_expandable")
    mapped = _Mapped(trace.settings.large_segment_size)
    known = {}
    for address, size, stream, pool, kind, expandable in zip(*(trace.segments[c].tolist() for c in names)):
        if expandable:
            mapped.add((stream, pool, kind == "small"), address, size)
        elif size:
            known[address] = Segment(address, size, stream, pool, kind == "small", False)
    # Maps first: what an unmap took away is told by the page it was mapped with.
    for action, address, size, stream, pool in zip(
        trace.actions, trace.addresses, trace.sizes, trace.streams, trace.pools
    ):
        if action == "segment_map":
            small = mapped.is_small(address, size, stream, pool)
            mapped.ever.setdefault((stream, pool, small), set()).add(address)
    return known, mapped
