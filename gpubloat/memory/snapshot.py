"""PyTorch memory snapshots -> tables, for every form that `torch.cuda.memory._snapshot` has had.

The oldest (2023) has blocks without an address, each with a `history`; later ones add times, settings, pools, private
fields. Unknown keys are passed over, unknown actions and states are kept as "unknown"; what is wrong in kind or in
range is a FormatError that names the place. A pickle has no offsets of its parts, so those errors carry offset 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from gpubloat.errors import FormatError
from gpubloat.memory.stacks import Stacks
from gpubloat.tables.memory import ACTIONS, STATES

Tables = dict[str, pd.DataFrame]
CHUNK = 50_000  # events that are columns and objects at the same time
_ROW_BYTES = 8  # no event, segment or block takes fewer bytes of a pickle, unless it is one object many times
_MAX_DEVICES = 4096
_MOST_BYTES = 1 << 48  # of one block or segment: more than any device has
_MOST_IN_ALL = 1 << 62  # of all blocks that a trace asks for, so that no sum wraps
_MOST_MAPPED = 1 << 42  # of expandable segments, which are looked at page by page


class Snapshot:
    """The parts of one unpickled snapshot; `tables` takes them apart, so it can be called once."""

    def __init__(self, content: Any, path: str, file_bytes: int) -> None:
        self.path = path
        self.file_bytes = file_bytes
        if isinstance(content, list):  # torch.cuda.memory_snapshot(): the segments alone
            content = {"segments": content}
        if not isinstance(content, dict) or not isinstance(content.get("segments"), list):
            raise self.error("has no list of segments: it is no memory snapshot")
        self.segments: list[Any] = content["segments"]
        traces = content.get("device_traces", [])
        if not isinstance(traces, list) or not all(isinstance(t, list) for t in traces) or len(traces) > _MAX_DEVICES:
            raise self.error("device_traces is no list of lists")
        self.traces: list[list[Any]] = traces
        settings = content.get("allocator_settings")
        self.settings: dict[str, Any] = settings if isinstance(settings, dict) else {}
        if sum(map(len, traces)) * _ROW_BYTES > file_bytes + 65536:
            raise self.error("lists the same events many times")

    def error(self, message: str) -> FormatError:
        return FormatError(self.path, 0, message, "write the snapshot again, or say which program wrote it")

    def tables(self) -> Iterator[Tables]:
        """The tables of `gpubloat.tables.memory.TABLES`, in pieces."""
        stacks = Stacks(self)
        segments, blocks = self._state(stacks)
        yield {"segments": segments, "blocks": blocks} | stacks.new()
        where = _pools_by_address(segments)
        for device, trace in enumerate(self.traces):
            for start in range(0, len(trace), CHUNK):
                part = trace[start : start + CHUNK]
                trace[start : start + CHUNK] = [None] * len(part)  # its objects go with `part`
                yield {"events": self._events(device, start, part, stacks, where)} | stacks.new()

    def _events(self, device: int, start: int, part: list[Any], stacks: Stacks, where: Any) -> pd.DataFrame:
        place = f"the trace of device {device}"
        self.dicts(part, place)
        n = len(part)
        known = set(ACTIONS)
        actions = [a if isinstance(a, str) and a in known else "unknown" for a in (e.get("action") for e in part)]
        addresses = [e["addr"] if "addr" in e else e.get("device_free", 0) for e in part]
        address = self.unsigned(addresses, f"addr in {place}")
        ids = [e.get("pool_id") for e in part]
        pools = where(device, address)
        for i, pool_id in enumerate(ids) if ids.count(None) < n else ():
            if pool_id is not None:
                pools[i] = self.pool(pool_id)
        return pd.DataFrame(
            {
                "device": np.full(n, device),
                "event": np.arange(start, start + n),
                "action": actions,
                "address": address,
                "size_bytes": self.unsigned([e.get("size", 0) for e in part], f"size in {place}"),
                "stream": self.unsigned([e.get("stream", 0) for e in part], f"stream in {place}"),
                "pool": pools,
                "time_us": self.times([e.get("time_us") for e in part], place),
                "stack": stacks.numbers([e.get("frames") for e in part]),
            }
        )

    def _state(self, stacks: Stacks) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The tables segments and blocks."""
        segments = self.segments
        self.dicts(segments, "segments")
        lists = [s.get("blocks", []) for s in segments]
        for i, blocks in enumerate(lists):
            self.dicts(blocks, f"blocks of segment {i}")
        if (len(segments) + sum(map(len, lists))) * _ROW_BYTES > self.file_bytes + 65536:
            raise self.error("lists the same blocks many times")
        device = self.unsigned([s.get("device", 0) for s in segments], "device in segments")
        if len(device) and int(device.max()) >= _MAX_DEVICES:
            raise self.error(f"a segment of device {device.max()}")
        n_blocks = [len(blocks) for blocks in lists]
        flat = [block for blocks in lists for block in blocks]
        old = [_newest(block) for block in flat]
        size = self.unsigned([b.get("size", 0) for b in flat], "size in blocks")
        given = [b.get("address") for b in flat]
        ends = np.cumsum(n_blocks, dtype=np.int64)
        firsts = [given[end - n] or old[end - n].get("addr") if n else 0 for end, n in zip(ends, n_blocks)]
        address = self.unsigned([s.get("address", first or 0) for s, first in zip(segments, firsts)], "address")
        states = ["active_pending_free" if b.get("state") == "active_awaiting_free" else b.get("state") for b in flat]
        block = pd.DataFrame(
            {
                "device": np.repeat(device, n_blocks),
                "segment": np.repeat(np.arange(len(segments)), n_blocks),
                "block": np.arange(len(flat)) - np.repeat(ends - n_blocks, n_blocks),
                "address": self._addresses(
                    given, np.repeat(address, n_blocks), np.repeat(ends - n_blocks, n_blocks), size
                ),
                "size_bytes": size,
                "requested_bytes": self.unsigned(
                    [b.get("requested_size", 0) for b in flat], "requested_size in blocks"
                ),
                "state": [state if isinstance(state, str) and state in STATES else "unknown" for state in states],
                "stack": stacks.numbers([b.get("frames", h.get("frames")) for b, h in zip(flat, old)]),
            }
        )
        total = self.unsigned([s.get("total_size", 0) for s in segments], "total_size")
        held = _sum(block, len(segments), ("active_allocated",))
        active = [a + b for a, b in zip(held, _sum(block, len(segments), ("active_pending_free",)))]
        free = _sum(block, len(segments), ("inactive",))
        left = [int(t) - a - f for t, a, f in zip(total, active, free)]
        if sum(size for s, size in zip(segments, total.tolist()) if s.get("is_expandable") is True) > _MOST_MAPPED:
            raise self.error("the expandable segments have more bytes than any device")
        if any(abs(x) >= 1 << 63 for x in left):
            raise self.error("blocks of a segment add up to more than there are addresses")
        segment = pd.DataFrame(
            {
                "device": device,
                "segment": np.arange(len(segments)),
                "address": address,
                "size_bytes": total,
                "allocated_bytes": np.array(held, np.uint64),
                "active_bytes": np.array(active, np.uint64),
                "free_bytes": np.array(free, np.uint64),
                "unattributed_bytes": np.array(left, np.int64),
                "requested_bytes": self.unsigned([s.get("requested_size", 0) for s in segments], "requested_size"),
                "stream": self.unsigned([s.get("stream", 0) for s in segments], "stream in segments"),
                "kind": ["small" if s.get("segment_type") == "small" else "large" for s in segments],
                "pool": [self.pool(s.get("segment_pool_id")) for s in segments],
                "is_expandable": [s.get("is_expandable") is True for s in segments],
                "n_blocks": n_blocks,
            }
        )
        return segment, block

    def _addresses(self, given: list[Any], segment: Any, first: Any, size: Any) -> Any:
        """Addresses of blocks; where none was recorded, a block follows the one before it in its segment."""
        before = np.cumsum(size, dtype=np.uint64) - size
        address = segment + before - before[first] if len(first) else before
        missing = np.array([a is None for a in given], bool)
        recorded = self.unsigned([0 if a is None else a for a in given], "address of blocks")
        return np.where(missing, address, recorded)

    def dicts(self, things: Any, place: str) -> None:
        """FormatError unless `things` is a list of dicts."""
        if not isinstance(things, list) or not set(map(type, things)) <= {dict}:
            raise self.error(f"{place}: not a list of dicts")

    def unsigned(self, values: list[Any], place: str) -> Any:
        """The values as uint64, or FormatError. Addresses written as signed numbers are taken modulo 2**64."""
        if not set(map(type, values)) <= {int}:
            raise self.error(f"{place}: not a whole number")
        if values and not (min(values) >= -(1 << 63) and max(values) < 1 << 64):
            raise self.error(f"{place}: a number of more than 64 bits")
        if values and min(values) < 0:
            if not place.startswith(("addr", "stream")):
                raise self.error(f"{place}: {min(values)} is negative")
            values = [v % (1 << 64) for v in values]
        elif "size" in place and values and (max(values) > _MOST_BYTES or sum(values) > _MOST_IN_ALL):
            raise self.error(f"{place}: {max(values)} bytes are more than any device has")
        return np.array(values, np.uint64)

    def times(self, values: list[Any], place: str) -> Any:
        if values.count(None) == len(values):
            return pd.array([None] * len(values), dtype="Int64")
        wrong = [v for v in values if v is not None and not (type(v) is int and -(1 << 63) <= v < 1 << 63)]
        if wrong:
            raise self.error(f"time_us in {place}: not a 64-bit number")
        return pd.array(values, dtype="Int64")

    def pool(self, pool_id: Any) -> str:
        """(0, 0) -> "0.0"; also where no id was recorded."""
        if pool_id is None:
            return "0.0"
        if not isinstance(pool_id, (tuple, list)) or len(pool_id) != 2 or not all(type(i) is int for i in pool_id):
            raise self.error("a pool id that is not two numbers")
        if not all(-(1 << 63) <= i < 1 << 64 for i in pool_id):
            raise self.error("a pool id of more than 64 bits")
        return f"{pool_id[0]}.{pool_id[1]}"


def _newest(block: dict[str, Any]) -> dict[str, Any]:
    """The newest entry of the `history` that blocks had in 2023, or an empty one."""
    history = block.get("history")
    return history[0] if isinstance(history, list) and history and isinstance(history[0], dict) else {}


def _sum(blocks: pd.DataFrame, n: int, states: tuple[str, ...]) -> list[int]:
    """Bytes per segment in blocks of these states, in Python's integers: a hostile file's sums do not wrap."""
    sums = [0] * n
    chosen = blocks[blocks["state"].isin(states)]
    for segment, size in zip(chosen["segment"], chosen["size_bytes"]):
        sums[segment] += int(size)
    return sums


def _pools_by_address(segments: pd.DataFrame) -> Any:
    """(device, addresses) -> pools, by the segments of the snapshot; the default pool for other addresses."""
    found = {}
    for device, group in segments.sort_values("address").groupby("device"):
        start = group["address"].to_numpy(np.uint64)
        found[device] = (start, group["size_bytes"].to_numpy(np.uint64), group["pool"].to_numpy(object))

    def pools(device: int, address: Any) -> Any:
        out = np.full(len(address), "0.0", object)
        if device in found and len(found[device][0]):
            start, size, pool = found[device]
            at = np.maximum(np.searchsorted(start, address, "right"), 1) - 1
            inside = (address >= start[at]) & (address - start[at] < size[at])
            out[inside] = pool[at[inside]]
        return out

    return pools
