"""Tables of the `memory` instrument. `device` and `event` join them: an entry of the trace of one GPU.

Addresses and streams are unsigned 64-bit numbers as the allocator had them. A pool is ``"0.0"`` (the default one) or
the two numbers of a graph's or MemPool's id. Sizes of `events` are what the program asked for; those of `blocks` and
`segments` are real.
"""

from __future__ import annotations

import pandas as pd
from pandera.typing import Series

from gpubloat.tables.base import Table, column
from gpubloat.tables.training import TABLES as TRAINING

ACTIONS = (
    "alloc",
    "free_requested",  # the tensor is gone; another stream may still use the block
    "free_completed",  # the block is back in the allocator's hands
    "segment_alloc",  # cudaMalloc
    "segment_free",  # cudaFree
    "segment_map",  # pages of an expandable segment
    "segment_unmap",
    "snapshot",  # somebody took a snapshot: size is all active bytes
    "oom",  # an allocation failed: address is what the driver called free
    "annotate",
    "unknown",  # an action of a version that is not known here
)
STATES = ("active_allocated", "active_pending_free", "inactive", "unknown")
CALLS = (
    "malloc",  # cuMemAlloc
    "free",
    "reserve",  # addresses alone
    "create",  # one call per handle, as for map and release
    "map",
    "set_access",  # one call for the range
    "set_access_each",  # one call per handle
    "unmap",  # one call for the range
    "release",
    "address_free",
)
STEPS = ("n_s1", "n_s2", "n_s3", "n_s4", "n_s5", "n_stitchable", "n_stitched")  # of models that stitch
BOUNDS = ("live", "chunks", "packing")
SIDES = ("lower", "upper", "exact")


class Events(Table):
    """One row = one entry of a trace of one GPU, in the order in which it was recorded."""

    device: Series[int] = column("number of the GPU", ge=0)
    event: Series[int] = column("number of the entry in the trace of this GPU", ge=0)
    action: Series[str] = column("what happened", isin=list(ACTIONS))
    address: Series[pd.UInt64Dtype] = column("of the block or segment; free bytes of the device where action is oom")
    size_bytes: Series[pd.UInt64Dtype] = column("requested for blocks, real for segments; see ACTIONS")
    stream: Series[pd.UInt64Dtype] = column("CUDA stream of the block; 0 is the default stream")
    pool: Series[str] = column("0.0, or the id of a private pool; of old traces, that of the segment at this address")
    time_us: Series[pd.Int64Dtype] = column("since 1970; empty in old traces and in logs without dates", nullable=True)
    stack: Series[pd.Int64Dtype] = column("see stacks; empty if none was recorded", nullable=True, ge=0)


class Segments(Table):
    """One row = one range that the allocator holds from the driver at the end, mapped without a hole."""

    device: Series[int] = column("number of the GPU", ge=0)
    segment: Series[int] = column("number in the snapshot", ge=0)
    address: Series[pd.UInt64Dtype] = column("where it starts")
    size_bytes: Series[pd.UInt64Dtype] = column("reserved from the driver")
    allocated_bytes: Series[pd.UInt64Dtype] = column("in blocks that a tensor holds")
    active_bytes: Series[pd.UInt64Dtype] = column("the same, with blocks that wait for another stream")
    free_bytes: Series[pd.UInt64Dtype] = column("in inactive blocks")
    unattributed_bytes: Series[int] = column("size less active and free blocks; 0 unless the snapshot is at odds")
    requested_bytes: Series[pd.UInt64Dtype] = column("what programs asked for of the allocated bytes")
    stream: Series[pd.UInt64Dtype] = column("CUDA stream that its blocks serve")
    kind: Series[str] = column("which half of the pool", isin=["small", "large"])
    pool: Series[str] = column("0.0, or the id of a private pool")
    is_expandable: Series[bool] = column("mapped page by page into a reserved range")
    n_blocks: Series[int] = column("blocks in it", ge=0)


class Blocks(Table):
    """One row = one block of a segment at the end, held or free."""

    device: Series[int] = column("number of the GPU", ge=0)
    segment: Series[int] = column("see segments", ge=0)
    block: Series[int] = column("number in the segment, by address", ge=0)
    address: Series[pd.UInt64Dtype] = column("where it starts")
    size_bytes: Series[pd.UInt64Dtype] = column("real size, after rounding and without the split part")
    requested_bytes: Series[pd.UInt64Dtype] = column("what the last owner asked for")
    state: Series[str] = column("who holds it", isin=list(STATES))
    stack: Series[pd.Int64Dtype] = column("see stacks; empty if none was recorded", nullable=True, ge=0)


class Stacks(Table):
    """One row = one frame of one distinct call stack, the innermost first."""

    stack: Series[int] = column("number of the stack", ge=0)
    depth: Series[int] = column("0 is the frame that called the allocator", ge=0)
    frame: Series[int] = column("see frames", ge=0)


class Frames(Table):
    """One row = one distinct place in a source file."""

    frame: Series[int] = column("number of the frame", ge=0)
    function: Series[str] = column("name of the function")
    file: Series[str] = column("as the recording program named it")
    line: Series[int] = column("line number; 0 where there is none", ge=0)


class Usage(Table):
    """One row = the bytes held after one event of a replay."""

    device: Series[int] = column("number of the GPU", ge=0)
    event: Series[int] = column("see events", ge=0)
    reserved_bytes: Series[pd.UInt64Dtype] = column("held from the driver")
    active_bytes: Series[pd.UInt64Dtype] = column(
        "in blocks that are not free, as large as the allocator made them; stitching, gmlake: in multiples of 512"
    )
    free_bytes: Series[pd.UInt64Dtype] = column("reserved less active: in the allocator's hands")
    requested_bytes: Series[pd.UInt64Dtype] = column("what programs asked for of the active bytes")


class Allocations(Table):
    """One row = one allocation of a replay, beside the recorded one."""

    device: Series[int] = column("number of the GPU", ge=0)
    event: Series[int] = column("see events", ge=0)
    size_bytes: Series[pd.UInt64Dtype] = column("requested")
    address: Series[pd.UInt64Dtype] = column("recorded")
    replayed: Series[pd.UInt64Dtype] = column("address by the model; empty where it had no memory", nullable=True)


class Calls(Table):
    """One row = one call that the allocator made to the driver during a replay."""

    device: Series[int] = column("number of the GPU", ge=0)
    event: Series[int] = column("event that led to it", ge=0)
    call: Series[str] = column("driver function; create, map, release stand for one call per handle", isin=list(CALLS))
    address: Series[pd.UInt64Dtype] = column("of the segment or range, also where its handles are made or released")
    size_bytes: Series[pd.UInt64Dtype] = column("of the segment or range")
    n_handles: Series[int] = column(
        "handles that it makes, maps or unmaps; 1 for malloc and free, 0 for addresses", ge=0
    )
    cost_us: Series[float] = column("modelled: a fixed time and one per handle", ge=0)


class Replays(Table):
    """One row = one replay of the trace of one GPU through one model of an allocator."""

    device: Series[int] = column("number of the GPU", ge=0)
    allocator: Series[str] = column("name of the model")
    settings: Series[str] = column("its settings that are not the default, as name=value,...")
    limit_bytes: Series[pd.UInt64Dtype] = column("memory that the driver had; empty if no limit", nullable=True)
    n_events: Series[int] = column("events of the trace", ge=0)
    n_allocations: Series[int] = column("allocations among them", ge=0)
    n_preexisting: Series[int] = column("blocks that were held before the trace begins", ge=0)
    n_calls: Series[int] = column("calls to the driver after the start, the sum of those below", ge=0)
    n_malloc: Series[int] = column("cuMemAlloc", ge=0)
    n_free: Series[int] = column("cuMemFree", ge=0)
    n_reserve: Series[int] = column("reservations of addresses", ge=0)
    n_create: Series[int] = column("handles made", ge=0)
    n_map: Series[int] = column("handles mapped, each one call", ge=0)
    n_set_access: Series[int] = column("calls that make mapped memory accessible", ge=0)
    n_unmap: Series[int] = column("ranges unmapped", ge=0)
    n_release: Series[int] = column("handles released", ge=0)
    n_address_free: Series[int] = column("reservations given back", ge=0)
    last_call_event: Series[pd.Int64Dtype] = column("event of the last call; later, it ran alone", nullable=True, ge=0)
    driver_s: Series[float] = column("modelled time in the driver", ge=0)
    n_s1: Series[pd.Int64Dtype] = column("stitching: large requests that found an exact fit", nullable=True, ge=0)
    n_s2: Series[pd.Int64Dtype] = column("that split a larger block", nullable=True, ge=0)
    n_s3: Series[pd.Int64Dtype] = column("that stitched free blocks", nullable=True, ge=0)
    n_s4: Series[pd.Int64Dtype] = column("that took new memory for what was missing", nullable=True, ge=0)
    n_s5: Series[pd.Int64Dtype] = column("that were refused by the driver at first", nullable=True, ge=0)
    n_stitchable: Series[pd.Int64Dtype] = column("requests large enough to be stitched", nullable=True, ge=0)
    n_stitched: Series[pd.Int64Dtype] = column("ranges that were stitched", nullable=True, ge=0)
    n_oom: Series[int] = column(
        "allocations that found no memory, and blocks from before the trace that did not fit", ge=0
    )
    oom_event: Series[pd.Int64Dtype] = column("the first of them; 0 where the start did not fit", nullable=True, ge=0)
    peak_reserved_bytes: Series[pd.UInt64Dtype] = column("most bytes held from the driver")
    peak_active_bytes: Series[pd.UInt64Dtype] = column("most bytes in blocks that are not free")
    peak_requested_bytes: Series[pd.UInt64Dtype] = column("most bytes asked for and not given back")
    utilisation_frac: Series[float] = column("peak active over peak reserved", nullable=True, ge=0, le=1)


class Bounds(Table):
    """One row = what no allocator, or none of some kind, can do with less, of the trace of one GPU."""

    device: Series[int] = column("number of the GPU", ge=0)
    bound: Series[str] = column(
        "live: bytes requested; chunks: large blocks in whole chunks; packing: blocks that never move",
        isin=list(BOUNDS),
    )
    peak_reserved_bytes: Series[pd.UInt64Dtype] = column("empty where there are too many blocks", nullable=True)
    side: Series[str] = column("where the true least lies: at or above, at or below, or exactly here", isin=list(SIDES))
    event: Series[pd.Int64Dtype] = column("of the peak; empty for packing, and at the start", nullable=True, ge=0)
    n_blocks: Series[int] = column("blocks that were counted", ge=0)


class Verifications(Table):
    """One row = one trace of one GPU, replayed through the model of the allocator that recorded it."""

    device: Series[int] = column("number of the GPU", ge=0)
    allocator: Series[str] = column("name of the model")
    settings: Series[str] = column("its settings that are not the default, as name=value,...")
    n_events: Series[int] = column("events of the trace", ge=0)
    n_preexisting: Series[int] = column("blocks that were held before the trace begins", ge=0)
    n_owners_of_gaps: Series[int] = column("of those, blocks found to be larger than their recorded request", ge=0)
    n_allocations: Series[int] = column("allocations", ge=0)
    n_exact: Series[int] = column("of those, at the recorded address", ge=0)
    first_inexact_event: Series[pd.Int64Dtype] = column("first at another address", nullable=True, ge=0)
    n_segment_events: Series[int] = column("recorded segment_alloc, segment_free, segment_map, segment_unmap", ge=0)
    n_segment_predicted: Series[int] = column("of those, made by the model at that moment with that size", ge=0)
    n_calls_unrecorded: Series[int] = column("driver calls of the model that no recorded event answers", ge=0)
    n_segments_at_odds: Series[int] = column("segments at the end that differ from the snapshot's", ge=0)
    address_exact_frac: Series[float] = column("exact over allocations; empty if there are none", nullable=True, ge=0)


# What `load` writes.
TABLES: dict[str, type[Table]] = {
    "events": Events,
    "segments": Segments,
    "blocks": Blocks,
    "stacks": Stacks,
    "frames": Frames,
}
# What replays add.
EXTRA_TABLES: dict[str, type[Table]] = {
    "usage": Usage,
    "allocations": Allocations,
    "calls": Calls,
    "replays": Replays,
    "bounds": Bounds,
    "verifications": Verifications,
    **TRAINING,
}
