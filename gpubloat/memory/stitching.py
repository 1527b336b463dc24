"""GMLake's stitching as the allocator of this process: what is free and scattered serves large requests.

`install` once, before anything is on a GPU. PyTorch keeps no statistics, snapshots or history for an allocator that is
not its own and raises instead, so the functions of `torch._C` that would raise are replaced (see `_FUNCTIONS`):
torch.cuda.memory_stats, memory_summary, _snapshot and the like work as before.

What does not: sharing tensors between processes (CUDA IPC has no handles for such memory), torch.compile's graph trees
(mode="reduce-overhead"), torch.cuda.MemPool, torch.backends.cudnn.benchmark. Memory that is used on a second stream
needs Tensor.record_stream, as ever; with programmatic dependent launch, a kernel may run before the one that last used
the same memory at another address has ended, so do not use both.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import re
import tempfile
from pathlib import Path
from typing import Any

from gpubloat.errors import DeviceError, GpubloatError, MissingToolError
from gpubloat.memory import stitchstate
from gpubloat.native import stitching as native

CHUNK = 2 << 20
MOST_ENTRIES = 1_000_000
_HOOKS = {
    "set_reset_fn": "gpubloat_empty_cache",
    "set_memory_fraction_fn": "gpubloat_memory_fraction",
    "set_base_alloc_fn": "gpubloat_base_alloc",
    "set_record_stream_fn": "gpubloat_record_stream",
    "set_begin_allocate_to_pool": "gpubloat_begin_pool",
    "set_end_allocate_to_pool_fn": "gpubloat_end_pool",
    "set_release_pool": "gpubloat_release_pool",
}
# Method of Stitching <- function of torch._C that raises for an allocator that is not PyTorch's own.
_FUNCTIONS = {
    "_cuda_memoryStats": "_memory_stats",
    "_cuda_resetPeakMemoryStats": "reset_peak_stats",
    "_cuda_resetAccumulatedMemoryStats": "_reset_sums",
    "_cuda_memorySnapshot": "_snapshot",
    "_cuda_record_memory_history": "_record_history",
    "_cuda_getMemoryFraction": "_memory_fraction",
}
_installed: Stitching | None = None


class Stitching:
    """The allocator of this process. `settings` are those of `install`."""

    def __init__(self, library: ctypes.CDLL, torch: Any, settings: dict[str, Any]) -> None:
        self.settings = settings
        self._library = library
        self._torch = torch

    def stats(self, device: int | None = None) -> dict[str, int]:
        """Statistics of a GPU; default, the current one.

        Keys
        ----
        reserved_bytes, active_bytes, allocated_bytes, requested_bytes, each also with ``peak_``: held from the driver;
            in blocks that are not free, in multiples of 512; the same without those that wait for other streams; asked.
        n_alloc, n_free, n_retries, n_oom : allocations; those for which the driver had no memory at first, and at all.
        n_s1 to n_s5 : large requests (2 MiB or more) by what served them: exact match, split, stitched, new memory;
            S5, the driver had none at first.
        n_chunks, n_stitched, stitched_bytes, n_ranges : chunks; stitched ranges, their addresses; ranges of split
            blocks.
        n_<call>, us_<call> : calls to the driver by kind, and their microseconds; see gpubloat.native.stitching.CALLS.
        n_split, split_bytes : free small blocks that cannot go back, as their segments are in use.
        n_waiting, n_leaks, n_check_failures, n_failed_calls : blocks that wait for other streams; driver calls that
            left something behind; addresses refused by the self-check or freed twice; calls that failed, those for
            want of memory included.
        """
        found = native.report(self._library, self._device(device))
        out: dict[str, int] = {}
        for name, row in zip(native.ROWS, found.rows):
            if name.endswith("_bytes"):
                out[name], out[f"peak_{name}"] = row[0].current, row[0].peak
        out["n_alloc"], out["n_free"] = found.rows[0][0].allocated, found.rows[0][0].freed
        out |= {f"n_s{i + 1}": n for i, n in enumerate(found.states)}
        out["n_chunks"] = out["reserved_bytes"] // int(self.settings["chunk_bytes"])
        out |= {name: getattr(found, name) for name in native.COUNTS}
        for name, n, microseconds in zip(native.CALLS, found.calls, found.microseconds):
            out[f"n_{name}"], out[f"us_{name}"] = n, microseconds
        return out

    @property
    def n_driver_calls(self) -> int:
        """Calls to the driver about memory, on all GPUs so far: none are made once a program's requests repeat."""
        reports = (native.report(self._library, device) for device in range(self._torch.cuda.device_count()))
        return sum(sum(found.calls[: len(native.MEMORY_CALLS)]) for found in reports)

    def reset_peak_stats(self, device: int | None = None) -> None:
        """Peaks become the current values."""
        self._library.gpubloat_reset_stats(self._device(device), 0)

    def empty_cache(self) -> None:
        """Give back to the driver what is free, on all GPUs; waits for the streams that used it."""
        self._library.gpubloat_empty_cache()

    def snapshot(self) -> dict[str, Any]:
        """All segments, blocks and the trace (with `record`), as torch.cuda.memory._snapshot returns them.

        Segments are the mappings that memory was made for. The additional key ``aliases`` lists stitched ranges: their
        address, size, state, and the ``members``, (address, bytes) in segments, that they are made of. A held one's
        members are active blocks of their segments; the trace has its own address.
        """
        devices = range(self._torch.cuda.device_count())
        segments: list[dict[str, Any]] = []
        aliases: list[dict[str, Any]] = []
        for device in devices:
            stitchstate.state(
                device, native.rows(self._library.gpubloat_dump, native.DumpRow, device), segments, aliases
            )
        traces = [
            [stitchstate.entry(*row) for row in native.rows(self._library.gpubloat_trace, native.Entry, device)]
            for device in devices
        ]
        return {
            "segments": sorted(segments, key=lambda s: (s["device"], s["address"])),
            "device_traces": traces,
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "allocator": "gpubloat stitching", **self.settings},
            "external_annotations": [],
            "aliases": aliases,
        }

    def dump_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Pickle `snapshot` into a file that gpubloat.memory.load and PyTorch's viewer read. Raises GpubloatError."""
        content = pickle.dumps(self.snapshot(), 4)
        folder = Path(path).parent
        try:
            handle, name = tempfile.mkstemp(prefix=".snapshot-", dir=folder)
            with open(handle, "wb") as file:
                file.write(content)
            os.replace(name, path)
        except OSError as error:
            raise GpubloatError(f"{path} cannot be written: {error.strerror}") from None

    def record(self, max_entries: int = MOST_ENTRIES, *, clear: bool = False) -> None:
        """Keep the newest `max_entries` entries of the trace of each GPU from now on; 0 ends it."""
        self._library.gpubloat_record(max_entries, clear)

    def _device(self, device: int | None) -> int:
        return int(self._torch.cuda.current_device()) if device is None else int(device)

    def _memory_stats(self, device: int) -> dict[str, Any]:
        """The nested dict that torch.cuda.memory_stats flattens."""
        found = native.report(self._library, device)
        names = [field[0] for field in native.Stat._fields_]
        out: dict[str, Any] = {
            row: {pool: {name: getattr(stat, name) for name in names} for pool, stat in zip(native.POOLS, stats)}
            for row, stats in zip(native.ROWS, found.rows)
        }
        nothing = dict.fromkeys(names, 0)
        # Known at this moment only: there is no peak and no sum of it. What is free and large can always go back.
        for row, value in (("inactive_split", found.n_split), ("inactive_split_bytes", found.split_bytes)):
            out[row] = {pool: nothing | {"current": value} for pool in native.POOLS[:2]} | {native.POOLS[2]: nothing}
        memory = dict(zip(native.CALLS, found.calls))
        out |= {"oversize_allocations": nothing, "oversize_segments": nothing, "max_split_size": -1}
        out |= {"num_alloc_retries": found.n_retries, "num_ooms": found.n_oom}
        out |= {"num_sync_all_streams": found.n_synchronized}
        return out | {"num_device_alloc": memory["create"], "num_device_free": memory["release"]}

    def _reset_sums(self, device: int) -> None:
        self._library.gpubloat_reset_stats(device, 1)

    def _snapshot(self, *_: Any) -> dict[str, Any]:
        return self.snapshot()

    def _record_history(self, enabled: str | None, *given: Any) -> None:
        """As torch.cuda.memory._record_memory_history: enabled, context, stacks, max_entries, clear. Without stacks."""
        entries = given[2] if len(given) > 2 else MOST_ENTRIES
        clear = bool(given[3]) if len(given) > 3 else False
        self.record(min(entries, MOST_ENTRIES) if enabled == "all" else 0, clear=clear)

    def _memory_fraction(self, device: int) -> float:
        found = native.report(self._library, device)
        return float(found.limit_bytes / found.total_bytes) if found.total_bytes else 1.0


def install(
    *,
    stitch_min_bytes: int | None = None,
    stitch_limit_bytes: int | None = None,
    chunk_bytes: int = CHUNK,
    record: bool = False,
    check: bool = False,
) -> Stitching:
    """Make the stitching allocator that of PyTorch, in this process, on all GPUs. Before the first CUDA tensor.

    Parameters
    ----------
    stitch_min_bytes : the smallest free block that is stitched (the paper's fragmentation limit); default, one chunk.
    stitch_limit_bytes : most bytes of addresses of stitched ranges on one GPU; default, 8 times its memory.
    chunk_bytes : size of the pieces of memory, a multiple of 2 MiB.
    record : keep a trace of up to a million entries, for `Stitching.snapshot`.
    check : refuse to hand out what is in use, by marks of its own; costs time.

    Returns
    -------
    Stitching. A second call with the same settings returns the same one.

    Raises
    ------
    MissingToolError : no PyTorch, or no C++ compiler. DeviceError : no CUDA.
    GpubloatError : CUDA was used already, a setting that makes no sense or that cannot be combined with those of
    PYTORCH_CUDA_ALLOC_CONF, or other settings than at the first call.
    """
    global _installed
    settings = _settings(stitch_min_bytes, stitch_limit_bytes, chunk_bytes, record, check)
    if _installed is not None:
        if _installed.settings != settings:
            raise GpubloatError(f"stitching is installed with other settings: {_installed.settings}")
        return _installed
    _conf()
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise MissingToolError("PyTorch", "pip install torch") from None
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise DeviceError("absent", "PyTorch finds no CUDA device", "run `gpubloat doctor`")
    if torch.cuda.is_initialized():
        raise GpubloatError("CUDA is in use already", "call install() before the first CUDA tensor")
    path = native.compiled(Path(torch.__file__).parent, torch.__version__, torch.compiled_with_cxx11_abi())
    library = native.opened(path)
    flags = native.CHECK if check else 0
    entries = MOST_ENTRIES if record else 0
    config = native.Config(
        ctypes.sizeof(native.Config), flags, chunk_bytes, stitch_min_bytes or 0, stitch_limit_bytes or 0, entries
    )
    if library.gpubloat_configure(ctypes.byref(config)):
        raise GpubloatError("the allocator has handed out memory already", "call install() first of all")
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(path), "gpubloat_alloc", "gpubloat_free")
    for setter, name in _HOOKS.items():
        address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        getattr(allocator.allocator(), setter)(address)
    try:
        torch.cuda.memory.change_current_allocator(allocator)
    except RuntimeError as error:
        raise GpubloatError(
            f"PyTorch keeps its allocator: {str(error).splitlines()[0]}", "call install() before the first CUDA tensor"
        ) from None
    _installed = Stitching(library, torch, settings)
    for function, method in _FUNCTIONS.items():
        setattr(torch._C, function, getattr(_installed, method))
    return _installed


def _settings(least: int | None, limit: int | None, chunk: int, record: bool, check: bool) -> dict[str, Any]:
    if chunk < CHUNK or chunk % CHUNK:
        raise GpubloatError(f"chunk_bytes={chunk}: a multiple of 2 MiB is wanted")
    for name, value in (("stitch_min_bytes", least), ("stitch_limit_bytes", limit)):
        if value is not None and value < 1:
            raise GpubloatError(f"{name}={value}: more than 0 is wanted")
    return {
        "stitch_min_bytes": least, "stitch_limit_bytes": limit, "chunk_bytes": chunk, "record": record, "check": check
    }  # fmt: skip


def _conf() -> None:
    """Another backend would not call this allocator, and expandable segments promise what it does not do."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        given = os.environ.get(name, "")
        found = re.search(r"backend\s*:\s*cudaMallocAsync|expandable_segments\s*:\s*True", given)
        if found:
            raise GpubloatError(f"{name} asks for {found.group()}, which stitching replaces", f"unset {name}")
