"""Is the model the allocator? A trace is replayed by its own rules; every address is compared with the recorded one.

Where a new segment lies is the driver's choice, not the allocator's: the recorded addresses of segments are handed to
the model, each at the moment when the trace has it, and only if the model asks for a segment of just that size.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import pandas as pd

from gpubloat.errors import GpubloatError
from gpubloat.memory.allocators import Caching, Driver, Expandable
from gpubloat.memory.allocators.base import END, MIB
from gpubloat.memory.allocators.settings import NO_LIMIT
from gpubloat.memory.replay import adopt, allocations, begin
from gpubloat.memory.start import Start
from gpubloat.memory.trace import Trace, opened, traces
from gpubloat.run import Run, RunWriter, provenance

METHOD = {
    "address_exact_frac": "allocations whose replayed address is the recorded one, over all; no tolerance",
    "n_segment_predicted": "segments taken or given back by the model at that moment, with that size and kind of call; "
    "for the first map of a range and for new segments the address is the driver's, taken from the trace",
}
_SEGMENT = {"segment_alloc": "malloc", "segment_free": "free", "segment_map": "map", "segment_unmap": "unmap"}


class Recorded(Driver):
    """A driver that answers with the recorded addresses, and counts what was asked of it and not recorded."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(limit)
        self.waiting: deque[tuple[str, int, int]] = deque()  # (call, address, size) since the last block
        self.n_refusals = 0  # how often a new segment may still be refused, while recorded frees come before it
        self.n_predicted = 0
        self.n_unrecorded = 0
        self._taken: list[tuple[int, int]] = []  # start and end of what is in use

    def _answer(self, call: str, size: int, address: int | None = None) -> int | None:
        """Address of the recorded call that this one is; it is not waited for any more."""
        for i, (recorded, where, large) in enumerate(self.waiting):
            if recorded == call and large == size and address in (None, where):
                del self.waiting[i]
                self.n_predicted += 1
                return where
        self.n_unrecorded += 1
        return None

    def take(self, address: int, size: int) -> bool:
        """Whether nothing else lies there; it is taken then. A damaged file may name any address."""
        at = bisect_left(self._taken, (address, 0))
        before, after = self._taken[at - 1 : at] if at else [], self._taken[at : at + 1]
        if (before and before[0][1] > address) or (after and after[0][0] < address + size) or address + size > END:
            return False
        self._taken.insert(at, (address, address + size))
        return True

    def malloc(self, size: int) -> int | None:
        if self.n_refusals and self.waiting and self.waiting[0][0] == "free":
            self.n_refusals -= 1
            return None
        placed = super().malloc(size)
        if placed is None:
            return None
        address = self._answer("malloc", size)
        return placed if address is None or not self.take(address, size) else address

    def free(self, address: int, size: int) -> None:
        self._answer("free", size, address)
        at = bisect_left(self._taken, (address, 0))
        if self._taken[at : at + 1] == [(address, address + size)]:
            del self._taken[at]
        super().free(address, size)

    def reserve(self, size: int) -> int | None:
        first = next((where for call, where, _ in self.waiting if call == "map"), None)
        placed = super().reserve(size)
        return placed if first is None or not self.take(first, MIB) else first

    def address_free(self, address: int, size: int) -> None:
        """The driver may give these addresses to another range."""
        self._taken = [(start, end) for start, end in self._taken if end <= address or start >= address + size]
        super().address_free(address, size)

    def map(self, address: int, size: int, handles: int) -> bool:
        self._answer("map", size, address)
        return super().map(address, size, handles)

    def unmap(self, address: int, size: int, handles: int) -> None:
        self._answer("unmap", size, address)
        super().unmap(address, size, handles)


@dataclass(slots=True)
class Checked:
    """What a verification counts."""

    addresses: list[int]
    n_exact: int = 0
    first_inexact: int | None = None
    n_segment_events: int = 0


def verify(
    trace: Run | str | os.PathLike[str],
    *,
    limit_bytes: int | None = None,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> Run:
    """Replay each GPU's trace through the model of the allocator that recorded it.

    Parameters
    ----------
    trace, out, force : as in `replay`.
    limit_bytes : what the allocator was allowed to take (set_per_process_memory_fraction), which no trace records. Only
        with it can garbage collection be predicted; without, recorded collections are followed.

    Returns
    -------
    Run with verifications (one row per GPU) and allocations. GpubloatError where there is nothing to compare with.
    """
    run = opened(trace)
    if not len(run["segments"]):
        raise GpubloatError(
            "the trace has no segments: it cannot be compared with PyTorch's allocator", "give a snapshot of PyTorch"
        )
    rows = []
    with RunWriter("memory", ["verifications", "allocations"], out, force) as writer:
        for one in traces(run):
            row, addresses = verify_one(one, limit_bytes)
            rows.append(row)
            writer.append("allocations", allocations(one, addresses))
        writer.append("verifications", pd.DataFrame(rows))
        record = provenance("gpubloat.memory.verify", METHOD, run.provenance.get("inputs", []))
        return writer.finish(record | {"empty": {"allocations": "the trace has no allocation"}})


def verify_one(trace: Trace, limit_bytes: int | None = None) -> tuple[dict[str, Any], list[int]]:
    """The row of `verifications` of one GPU, and the replayed address of each allocation (-1: no memory)."""
    before = begin(trace)
    driver = Recorded(limit_bytes)
    for segment in [*before.segments, *(part for _, parts in before.ranges for part in parts)]:
        driver.take(segment.address, segment.size)
    model = (Expandable if trace.settings.expandable_segments else Caching)(driver, trace.settings)
    held = {address: placed for address, (placed, _) in adopt(model, before).items()}
    checked = check(trace, model, driver, held)
    return _row(trace, model, driver, before, checked, _at_odds(model, trace)), checked.addresses


def check(trace: Trace, model: Caching, driver: Recorded, held: dict[int, int]) -> Checked:
    """Run the events; segment events wait until the model makes the calls that they record."""
    checked = Checked([])
    rows = zip(trace.actions, trace.addresses, trace.sizes, trace.streams, trace.pools)
    for event, (action, address, size, stream, pool) in enumerate(rows):
        if action in _SEGMENT:
            checked.n_segment_events += 1
            driver.waiting.append((_SEGMENT[action], address, size))
        elif action == "alloc":
            if driver.waiting:
                put_back(model, driver)
            if address in held:  # its free is not in the trace
                model.free(held.pop(address))
            placed = model.malloc(size, stream, pool)
            checked.addresses.append(-1 if placed is None else placed)
            if placed == address:
                checked.n_exact += 1
            elif checked.first_inexact is None:
                checked.first_inexact = event
            if placed is not None:
                held[address] = placed
            settle(model, driver)
        elif action == "free_completed":
            if driver.waiting:
                put_back(model, driver)
                settle(model, driver)
            if address in held:
                model.free(held.pop(address))
    if driver.waiting:
        put_back(model, driver)
        settle(model, driver)
    return checked


def settle(model: Caching, driver: Recorded) -> None:
    """After a block's event: frees that the model did not come to are made, and nothing is waited for any more."""
    if driver.waiting:
        follow(model, driver)
        driver.waiting.clear()
    driver.n_refusals = 0


def put_back(model: Caching, driver: Recorded) -> None:
    """Before a block's event: what was given back since the last one, by empty_cache or to make room.

    All that is wholly free in a pool, or nothing of it: so it is with empty_cache, and where the driver refuses. With
    max_split_size the allocator tries less at first, so the model is refused and left to choose. Where the limit is
    given, the model chooses by itself. Anything else (garbage collection, whose limit is not recorded) is followed, and
    not counted as predicted.
    """
    free = {where for call, where, _ in driver.waiting if call == "free"}
    if any(call == "unmap" for call, _, _ in driver.waiting):
        model.release()
        free = {where for call, where, _ in driver.waiting if call == "free"}
    if not free:
        return
    whole = model.releasable()
    pools = {whole[address] for address in free if address in whole}
    if free == {address for address, pool in whole.items() if pool in pools}:
        model.release(pools)
    elif driver.limit is not None:
        return
    elif model.settings.max_split_size != NO_LIMIT and not model.settings.garbage_collection_threshold:
        driver.n_refusals = 2
    else:
        follow(model, driver)


def follow(model: Caching, driver: Recorded) -> None:
    """Give back the segments that the trace names, as far as they are free in the model."""
    for call, address, _ in list(driver.waiting):
        if call == "free" and address in model.releasable():
            model.put_back(address)
            driver.n_predicted -= 1


def _at_odds(model: Caching, trace: Trace) -> int:
    """Segments at the end whose blocks are not those of the snapshot, either way."""
    mine, blocks = trace.segments, trace.blocks
    recorded: dict[int, list[tuple[int, int, bool]]] = {}
    for number, address, size, state in zip(
        *(blocks[c].tolist() for c in ("segment", "address", "size_bytes", "state"))
    ):
        recorded.setdefault(number, []).append((address, size, state != "inactive"))
    wanted = Counter(
        (address, tuple(recorded.get(number, [])))
        for number, address in zip(mine["segment"].tolist(), mine["address"].tolist())
    )
    found = Counter((s.address, tuple(s.blocks)) for s in model.segments())
    return max(sum((wanted - found).values()), sum((found - wanted).values()))


def _row(
    trace: Trace, model: Caching, driver: Recorded, before: Start, checked: Checked, n_at_odds: int
) -> dict[str, Any]:
    n = len(checked.addresses)
    return {
        "device": trace.device,
        "allocator": model.name,
        "settings": model.settings.changed(),
        "n_events": len(trace.actions),
        "n_preexisting": len(before.held),
        "n_owners_of_gaps": before.n_owners,
        "n_allocations": n,
        "n_exact": checked.n_exact,
        "first_inexact_event": checked.first_inexact,
        "n_segment_events": checked.n_segment_events,
        "n_segment_predicted": driver.n_predicted,
        "n_calls_unrecorded": driver.n_unrecorded,
        "n_segments_at_odds": n_at_odds,
        "address_exact_frac": checked.n_exact / n if n else None,
    }
