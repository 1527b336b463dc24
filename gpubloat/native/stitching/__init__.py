"""The compiled stitching allocator, and what its C structs are in Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from gpubloat.errors import GpubloatError
from gpubloat.native import build

VERSION = 1
SOURCES = ["stitching/stitching.cpp"]
FLAGS = ["-std=c++17", "-ldl", "-pthread"]
CHECK, LOG = 1, 2  # flags of Config
# The order of the enums in heap.h, driver.h and stitching.cpp.
ROWS = (
    "allocation", "segment", "active", "allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes",
)  # fmt: skip
POOLS = ("all", "small_pool", "large_pool")
CALLS = ("reserve", "create", "map", "access", "unmap", "release", "unreserve", "event", "sync", "info")
MEMORY_CALLS = CALLS[:7]
ACTIONS = ("alloc", "free_requested", "free_completed", "segment_map", "segment_unmap", "oom")
SEGMENT, BLOCK, ALIAS, MEMBER = range(4)  # kinds of DumpRow


class Config(ctypes.Structure):
    """Settings; a limit of 0 is 8 times the device's memory, a `stitch_min_bytes` of 0 one chunk."""

    _fields_ = (
        ("size", c_uint32),
        ("flags", c_uint32),
        ("chunk_bytes", c_uint64),
        ("stitch_min_bytes", c_uint64),
        ("stitch_limit_bytes", c_uint64),
        ("trace_entries", c_uint64),
    )


class Stat(ctypes.Structure):
    """One number over time; allocated and freed are the sums of its rises and falls."""

    _fields_ = (("current", c_int64), ("peak", c_int64), ("allocated", c_int64), ("freed", c_int64))


COUNTS = (
    "n_retries", "n_oom", "n_synchronized", "n_stitched", "stitched_bytes", "n_ranges", "n_leaks", "n_check_failures",
    "n_waiting", "n_failed_calls", "total_bytes", "limit_bytes", "stitch_limit_bytes", "n_split", "split_bytes",
)  # fmt: skip


class Report(ctypes.Structure):
    """All statistics of one device."""

    _fields_ = (
        ("version", c_uint32),
        ("size", c_uint32),
        ("rows", Stat * len(POOLS) * len(ROWS)),
        ("states", c_int64 * 5),
        *((name, c_int64) for name in COUNTS),
        ("calls", c_int64 * len(CALLS)),
        ("microseconds", c_int64 * len(CALLS)),
    )


class Entry(ctypes.Structure):
    """One entry of the trace; the address of an oom is what the driver called free."""

    _fields_ = tuple((name, c_int64) for name in ("action", "address", "size", "stream", "time_us", "pool0", "pool1"))


class DumpRow(ctypes.Structure):
    """A segment, its blocks behind it; a stitched range, its members behind it. State: 0 free, 1 held, 2 pending."""

    _fields_ = tuple(
        (name, c_int64)
        for name in ("kind", "address", "size", "requested", "state", "stream", "pool0", "pool1", "is_small")
    )


class Logged(ctypes.Structure):
    """Calls to the driver of one kind, one behind the other."""

    _fields_ = (("kind", c_int64), ("bytes", c_int64), ("n", c_int64))


_SIGNATURES: dict[str, tuple[Any, Sequence[Any]]] = {
    "gpubloat_configure": (c_int, [POINTER(Config)]),
    "gpubloat_error": (c_int, [c_char_p, c_size_t]),
    "gpubloat_alloc": (c_void_p, [c_size_t, c_int, c_void_p]),
    "gpubloat_free": (None, [c_void_p, c_size_t, c_int, c_void_p]),
    "gpubloat_record_stream": (None, [c_void_p, c_void_p]),
    "gpubloat_empty_cache": (None, []),
    "gpubloat_memory_fraction": (None, [c_double, c_int]),
    "gpubloat_base_alloc": (c_void_p, [c_void_p, POINTER(c_size_t)]),
    "gpubloat_report": (c_int, [c_int, POINTER(Report)]),
    "gpubloat_reset_stats": (None, [c_int, c_int]),
    "gpubloat_record": (None, [c_size_t, c_int]),
    "gpubloat_trace": (c_size_t, [c_int, POINTER(Entry), c_size_t]),
    "gpubloat_dump": (c_size_t, [c_int, POINTER(DumpRow), c_size_t]),
    "gpubloat_log": (c_size_t, [c_int, POINTER(Logged), c_size_t]),
}


def compiled(torch: Path | None = None, version: str = "", cxx11_abi: bool = True) -> Path:
    """The allocator's library, compiled if need be.

    With `torch`, the folder of an installed PyTorch, against its headers and libc10: it throws PyTorch's errors then.
    Raises MissingToolError without a C++ compiler, GpubloatError if it does not compile.
    """
    flags = [*FLAGS]
    if torch is not None:
        library = torch / "lib"
        # The version is for the digest: another PyTorch in the same folder needs another library.
        flags += [f'-DGPUBLOAT_TORCH="{version}"', f"-D_GLIBCXX_USE_CXX11_ABI={int(cxx11_abi)}"]
        flags += ["-isystem", str(torch / "include"), f"-L{library}", "-lc10", f"-Wl,-rpath,{library}"]
    return build.library("stitching", SOURCES, flags)


def opened(path: Path) -> ctypes.CDLL:
    """The library with the types of its functions. ctypes lets go of the interpreter's lock for each call."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def report(library: ctypes.CDLL, device: int) -> Report:
    """Statistics; zeros for a device that nothing was allocated on."""
    found = Report(size=ctypes.sizeof(Report))
    if library.gpubloat_report(device, ctypes.byref(found)) == 2 or found.version != VERSION:
        raise GpubloatError("the compiled allocator is of another version", "remove gpubloat's cache folder")
    return found


def rows(function: Callable[..., int], kind: type[ctypes.Structure], device: int) -> list[tuple[int, ...]]:
    """All rows of gpubloat_trace, gpubloat_dump or gpubloat_log, which other threads may make longer meanwhile."""
    room = 0
    while True:
        found = (kind * room)()
        n = function(device, found, room)
        if n <= room:
            names = [field[0] for field in kind._fields_]
            return [tuple(getattr(row, name) for name in names) for row in found[:n]]
        room = n + n // 4


def error(library: ctypes.CDLL) -> str:
    """Why this thread's last allocation failed."""
    text = ctypes.create_string_buffer(1000)
    library.gpubloat_error(text, len(text))
    return text.value.decode("utf-8", "replace")
