"""Tables of a traced run of the `libraries` instrument: what a command loaded and used."""

from __future__ import annotations

import pandas as pd
from pandera.typing import Series

from gpubloat.tables.base import Table, column

SOURCES = (
    "content",  # a cubin that the driver loaded is, byte for byte, this element
    "pointer",  # the driver was given this element's region, and this element is what it would choose
    "kernel",  # a kernel was looked up by a name that only this element (or few) could answer
    "variable",  # the same of a global or managed variable
    "page",  # a page that holds nothing but this element's payload was read
    "page_shared",  # a page was read that holds a part of this element's payload, and something else
)
CUPTI_STATES = (
    "off",  # not asked for
    "no_cuda",  # the process never initialised CUDA
    "recorded",
    "yielded",  # another subscriber (a profiler) came: recorded until then
    "refused",  # another subscriber was there before
    "missing",  # CUDA was used, and the injection library could not be loaded
)


class Loaded(Table):
    """One row = one library that the run loaded, in any of its processes."""

    library: Series[str] = column("path below site-packages, else the path from the root", unique=True)
    path: Series[str] = column("where the library was; empty in published runs")
    sha256: Series[str] = column("of the file when it was traced")
    file_bytes: Series[int] = column("size of the file", ge=0)
    n_processes: Series[int] = column("processes that loaded it", ge=1)
    n_functions_watched: Series[int] = column("function starts that could be recorded", ge=0)
    n_functions_used: Series[int] = column("of those, entered at least once", ge=0)
    cpu_problem: Series[str] = column("why its functions were not watched; empty if they were")
    n_pages_guarded: Series[int] = column("pages of GPU code whose first touch could be recorded", ge=0)
    n_pages_touched: Series[int] = column("of those, touched by any process", ge=0)


class UsedFunctions(Table):
    """One row = one function of one library that was entered in this run."""

    library: Series[str] = column("see loaded")
    function: Series[str] = column("symbol name, mangled; empty where no symbol names the address")
    address: Series[pd.UInt64Dtype] = column("virtual address of its start")
    offset_bytes: Series[int] = column("file offset of its start", ge=0)
    size_bytes: Series[int] = column("from the unwind table", ge=0)
    n_processes: Series[int] = column("processes that entered it", ge=1)


class Evidence(Table):
    """One row = one fatbin element and one kind of evidence that it was used."""

    library: Series[str] = column("see loaded")
    region: Series[int] = column("see regions", ge=0)
    element: Series[int] = column("see elements", ge=0)
    source: Series[str] = column("kind of evidence, the strongest first", isin=list(SOURCES))
    n_events: Series[int] = column("distinct observations: loads, names or pages", ge=1)


class UsedKernels(Table):
    """One row = one kernel name that was looked up, in one library or in code made at run time."""

    library: Series[str] = column("see loaded; empty for code that was made at run time or could not be found")
    region: Series[pd.Int64Dtype] = column("see regions", nullable=True, ge=0)
    element: Series[pd.Int64Dtype] = column("see elements", nullable=True, ge=0)
    kernel: Series[str] = column("symbol name, mangled")
    attribution: Series[str] = column(
        "handle: the look-up named the loaded image; name: only the name was known; jit: made at run time; unknown",
        isin=["handle", "name", "jit", "unknown"],
    )
    n_candidates: Series[int] = column("elements that could have answered the look-up", ge=0)


class Modules(Table):
    """One row = one distinct cubin that the driver loaded, as CUPTI shows it after decompression."""

    crc32: Series[int] = column("of its content", ge=0)
    size_bytes: Series[int] = column("of its content", ge=0)
    n_loads: Series[int] = column("how often it was loaded, over all processes", ge=1)
    attribution: Series[str] = column("where it came from", isin=["element", "jit", "unknown"])
    library: Series[str] = column("see loaded; empty if it is no element of a loaded library")
    region: Series[pd.Int64Dtype] = column("see regions", nullable=True, ge=0)
    element: Series[pd.Int64Dtype] = column("see elements", nullable=True, ge=0)


class Processes(Table):
    """One row = one process of the traced command (the command itself or a descendant)."""

    process: Series[int] = column("number in order of start", ge=0, unique=True)
    program: Series[str] = column("file name of the executable")
    n_libraries: Series[int] = column("libraries it loaded", ge=0)
    cupti: Series[str] = column("state of the record of look-ups", isin=list(CUPTI_STATES))
    problem: Series[str] = column("what could not be recorded and why; empty if nothing")


class Misses(Table):
    """One row = removed code that a run under the guard met."""

    library: Series[str] = column("see loaded")
    what: Series[str] = column("kind of code", isin=["function", "element"])
    function: Series[str] = column("symbol name, mangled; empty for elements and where no symbol names it")
    offset_bytes: Series[int] = column("file offset of what had been removed: function body or payload", ge=0)
    size_bytes: Series[int] = column("bytes that had been removed there", ge=0)
    region: Series[pd.Int64Dtype] = column("see regions", nullable=True, ge=0)
    element: Series[pd.Int64Dtype] = column("see elements", nullable=True, ge=0)
    action: Series[str] = column("what the guard did", isin=["reported", "restored"])
    n_processes: Series[int] = column("processes that met it", ge=1)


class Overhead(Table):
    """One row = one run of a workload under one way of recording it."""

    variant: Series[str] = column(
        "none; callbacks: CUPTI's few; all: and functions, pages; domains: CUPTI's whole domains; profiler: torch's"
    )
    repeat: Series[int] = column("number of the round", ge=0)
    exit_status: Series[int] = column("of the command; negative: the signal that ended it")
    wall_s: Series[float] = column("wall time of the command", ge=0)
    step_s: Series[float] = column("time of a step after the first ones; empty if it ended early", nullable=True, ge=0)


TABLES: dict[str, type[Table]] = {
    "loaded": Loaded,
    "used_functions": UsedFunctions,
    "evidence": Evidence,
    "used_kernels": UsedKernels,
    "modules": Modules,
    "processes": Processes,
    "misses": Misses,
}
# What campaigns add.
EXTRA_TABLES: dict[str, type[Table]] = {"overhead": Overhead}
