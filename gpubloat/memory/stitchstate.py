"""What the stitching allocator dumps -> the parts of a memory snapshot of PyTorch."""

from __future__ import annotations

from typing import Any

from gpubloat.native import stitching as native


def state(
    device: int, rows: list[tuple[int, ...]], segments: list[dict[str, Any]], aliases: list[dict[str, Any]]
) -> None:
    """Rows of the dump -> segments with their blocks, and stitched ranges with their members."""
    states = ("inactive", "active_allocated", "active_pending_free")
    for kind, address, size, requested, state, stream, pool0, pool1, is_small in rows:
        if kind == native.SEGMENT:
            segments.append(
                {
                    "device": device,
                    "address": address,
                    "total_size": size,
                    "allocated_size": 0,
                    "active_size": 0,
                    "requested_size": 0,
                    "stream": stream,
                    "segment_type": "small" if is_small else "large",
                    "segment_pool_id": (pool0, pool1),
                    "is_expandable": True,
                    "frames": [],
                    "blocks": [],
                }
            )
        elif kind == native.BLOCK:
            segment = segments[-1]
            block = {"address": address, "size": size, "requested_size": requested, "state": states[state]}
            segment["blocks"].append(block | {"frames": []})
            segment["active_size"] += size if state else 0
            segment["allocated_size"] += size if state == 1 else 0
            segment["requested_size"] += requested if state == 1 else 0
        elif kind == native.ALIAS:
            alias = {"device": device, "address": address, "size": size, "requested_size": requested}
            aliases.append(alias | {"state": states[state], "stream": stream, "members": []})
        else:
            aliases[-1]["members"].append((address, size))


def entry(action: int, address: int, size: int, stream: int, time_us: int, pool0: int, pool1: int) -> dict[str, Any]:
    """A row of the trace as an entry of `device_traces`."""
    name = native.ACTIONS[action]
    where = {"device_free" if name == "oom" else "addr": address}
    more = {"size": size, "stream": stream, "time_us": time_us, "pool_id": (pool0, pool1), "frames": []}
    return {"action": name, **where, **more}
