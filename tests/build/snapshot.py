"""Memory snapshots as `torch.cuda.memory._snapshot` returns them, made from operations instead of a GPU."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gpubloat.memory.allocators import Caching, Segment, Settings

MIB = 1 << 20
FRAME = {"filename": "train.py", "name": "step", "line": 7}
Snapshot = dict[str, Any]
# ("alloc", name, size, stream, pool), ("free", name), ("empty_cache",)
Operation = tuple[Any, ...]


def event(action: str, addr: int, size: int, stream: int = 0, **more: Any) -> dict[str, Any]:
    """One entry of a trace."""
    return {"action": action, "addr": addr, "size": size, "stream": stream, **more}


def block(size: int, state: str = "inactive", requested: int | None = None, **more: Any) -> dict[str, Any]:
    """One block; without an `address` in `more`, it lies behind the one before it."""
    return {"size": size, "requested_size": size if requested is None else requested, "state": state, **more}


def segment(address: int, blocks: Sequence[dict[str, Any]], kind: str = "large", **more: Any) -> dict[str, Any]:
    """One segment with its sums."""
    held = [b for b in blocks if b["state"] == "active_allocated"]
    return {
        "device": 0,
        "address": address,
        "total_size": sum(b["size"] for b in blocks),
        "allocated_size": sum(b["size"] for b in held),
        "active_size": sum(b["size"] for b in blocks if b["state"] != "inactive"),
        "requested_size": sum(b["requested_size"] for b in held),
        "stream": 0,
        "segment_type": kind,
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": list(blocks),
        **more,
    }


def snapshot(
    segments: Sequence[dict[str, Any]] = (), *traces: Sequence[dict[str, Any]], settings: Settings | None = None
) -> Snapshot:
    """A whole snapshot of the current form."""
    return {
        "segments": list(segments),
        "device_traces": [list(trace) for trace in traces],
        "allocator_settings": allocator_settings(settings or Settings()),
        "external_annotations": [],
    }


def allocator_settings(settings: Settings) -> dict[str, Any]:
    """The settings as a snapshot names them."""
    split = settings.max_split_size
    large = settings.large_segment_size
    return {
        "PYTORCH_CUDA_ALLOC_CONF": "" if large == 20 * MIB else f"large_segment_size_mb:{large // MIB}",
        "max_split_size": -1 if split >= 1 << 63 else split,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "roundup_power2_divisions": {str(1 << i): d for i, d in enumerate(settings.roundup_power2_divisions)},
    }


def write(path: Path, content: Any, protocol: int = 4) -> Path:
    """Pickle it, as _dump_snapshot does."""
    path.write_bytes(pickle.dumps(content, protocol))
    return path


def recorded(model: Caching, operations: Iterable[Operation], skip: int = 0) -> Snapshot:
    """What PyTorch would have recorded of these operations, if it were the model. `skip` first events are lost."""
    trace: list[dict[str, Any]] = []
    live: dict[Any, tuple[int, int, int, tuple[int, ...]]] = {}
    names = {"malloc": "segment_alloc", "free": "segment_free", "map": "segment_map", "unmap": "segment_unmap"}

    owner: dict[int, tuple[int, tuple[int, ...]]] = {}  # of each 2 MiB: stream, pool

    def flush(stream: int, pool_id: tuple[int, ...] = (0, 0)) -> None:
        for _, call, address, size, _ in model.driver.calls:
            if call in ("malloc", "map"):
                owner.update(dict.fromkeys(range(address, address + size, 2 * MIB), (stream, pool_id)))
            if call in names:
                stream_of, pool_of = owner[address]
                trace.append(event(names[call], address, size, stream_of, time_us=len(trace), pool_id=pool_of))
        model.driver.calls.clear()

    for operation in operations:
        if operation[0] == "alloc":
            _, name, size, stream, pool = operation
            address = model.malloc(size, stream, pool)
            pool_id = tuple(int(part) for part in pool.split("."))
            flush(stream, pool_id)
            if address is None:
                trace.append({"action": "oom", "device_free": 0, "size": size, "stream": stream, "pool_id": pool_id})
                continue
            trace.append(event("alloc", address, size, stream, time_us=len(trace), pool_id=pool_id, frames=[FRAME]))
            live[name] = (address, size, stream, pool_id)
        elif operation[0] == "free" and operation[1] in live:
            address, size, stream, pool_id = live.pop(operation[1])
            model.free(address)
            for action in ("free_requested", "free_completed"):
                trace.append(event(action, address, size, stream, time_us=len(trace), pool_id=pool_id))
        elif operation[0] == "empty_cache":
            model.release()
            flush(0)
    asked = {address: size for address, size, _, _ in live.values()}
    segments = [_segment(s, asked) for s in model.segments()]
    return snapshot(segments, trace[skip:], settings=model.settings)


def _segment(found: Segment, asked: dict[int, int]) -> dict[str, Any]:
    blocks = [
        block(size, "active_allocated" if held else "inactive", asked.get(address, 0), address=address)
        for address, size, held in found.blocks
    ]
    return segment(
        found.address,
        blocks,
        "small" if found.is_small else "large",
        stream=found.stream,
        segment_pool_id=tuple(int(part) for part in found.pool.split(".")),
        is_expandable=found.is_expandable,
    )
