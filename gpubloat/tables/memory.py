"""Tables of the `memory` instrument. `device` and `event` join them: an entry of the trace of one GPU.

Addresses and streams are unsigned 64-bit numbers as the allocator had them. A pool is ``"0.0"`` (the default one) or
the two numbers of a graph's or MemPool's id. Sizes of `events` are what the program asked for; those of `blocks` and
`segments` are real.
"""

from __future__ import annotations

import pandas as pd
from pandera.typing import Series

from gpubloat.tables.base import Table, column

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
CALLS = ("malloc", "free", "map", "unmap", "reserve")


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
    active_bytes: Series[pd.UInt64Dtype] = column("in blocks that are not free, as large as the allocator made them")
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
    call: Series[str] = column("malloc, free, map, unmap, or reserve of addresses alone", isin=list(CALLS))
    address: Series[pd.UInt64Dtype] = column("of the segment or range")
    size_bytes: Series[pd.UInt64Dtype] = column("of the segment or range")
    n_handles: Series[int] = column("pages mapped or unmapped one by one; 1 for malloc and free", ge=0)


class Replays(Table):
    """One row = one replay of the trace of one GPU through one model of an allocator."""

    device: Series[int] = column("number of the GPU", ge=0)
    allocator: Series[str] = column("name of the model")
    settings: Series[str] = column("its settings that are not the default, as name=value,...")
    limit_bytes: Series[pd.UInt64Dtype] = column("memory that the driver had; empty if no limit", nullable=True)
    n_events: Series[int] = column("events of the trace", ge=0)
    n_allocations: Series[int] = column("allocations among them", ge=0)
    n_preexisting: Series[int] = column("blocks that were held before the trace begins", ge=0)
    n_calls: Series[int] = column("calls to the driver", ge=0)
    n_oom: Series[int] = column("allocations that found no memory", ge=0)
    oom_event: Series[pd.Int64Dtype] = column("the first of them", nullable=True, ge=0)
    peak_reserved_bytes: Series[pd.UInt64Dtype] = column("most bytes held from the driver")
    peak_active_bytes: Series[pd.UInt64Dtype] = column("most bytes in blocks that are not free")
    peak_requested_bytes: Series[pd.UInt64Dtype] = column("most bytes asked for and not given back")
    utilisation_frac: Series[float] = column("peak active over peak reserved", nullable=True, ge=0, le=1)


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
    "verifications": Verifications,
}
