"""Tables of debloating: what was removed and why, and how the copies behave beside the originals."""

from __future__ import annotations

import pandas as pd
from pandera.typing import Series

from gpubloat.tables.base import Table, column

REASONS = {
    "other_architecture": "no GPU of the targets can be given it (reason I)",
    "unused_element": "the targets' GPUs could be given it, and no run used it (reason II)",
    "unused_function": "no run entered it",
}


class Removed(Table):
    """One row = one function or fatbin element whose bytes were removed."""

    library: Series[str] = column("see loaded")
    what: Series[str] = column("kind of code", isin=["function", "element"])
    offset_bytes: Series[int] = column("file offset of what was removed: payload or function body", ge=0)
    size_bytes: Series[int] = column("bytes removed there", ge=0)
    region: Series[pd.Int64Dtype] = column("see regions; empty for functions", nullable=True, ge=0)
    element: Series[pd.Int64Dtype] = column("see elements; empty for functions", nullable=True, ge=0)
    reason: Series[str] = column("why", isin=list(REASONS))


class Reduction(Table):
    """One row = one library before and after debloating."""

    library: Series[str] = column("see loaded", unique=True)
    file_bytes: Series[int] = column("logical size of the original", ge=0)
    file_bytes_after: Series[int] = column("logical size of the copy", ge=0)
    allocated_bytes: Series[int] = column("bytes of blocks that a copy of the original takes on disk", ge=0)
    allocated_bytes_after: Series[int] = column("bytes of blocks that the debloated copy takes: holes take none", ge=0)
    zstd_bytes: Series[pd.Int64Dtype] = column("original compressed by zstd level 3; empty if not asked", nullable=True)
    zstd_bytes_after: Series[pd.Int64Dtype] = column("copy compressed by zstd level 3", nullable=True)
    cpu_code_bytes: Series[int] = column("bytes of executable sections", ge=0)
    cpu_removed_bytes: Series[int] = column("of those, removed", ge=0)
    function_bytes: Series[int] = column("executable bytes inside a known function", ge=0)
    n_functions: Series[int] = column("distinct function starts", ge=0)
    n_functions_unknown: Series[int] = column("of those, kept since their bounds or use are not known", ge=0)
    n_functions_removed: Series[int] = column("of those, removed", ge=0)
    gpu_code_bytes: Series[int] = column("bytes of fatbin regions and raw cubins", ge=0)
    gpu_removed_bytes: Series[int] = column("of those, removed", ge=0)
    n_elements: Series[int] = column("fatbin elements", ge=0)
    n_elements_removed: Series[int] = column("of those, removed", ge=0)
    n_other_architecture: Series[int] = column("elements removed for reason I", ge=0)
    n_unused_element: Series[int] = column("elements removed for reason II", ge=0)
    debloat_s: Series[float] = column("time to locate and write the copy", ge=0)


class Repeats(Table):
    """One row = one measured run of a command, on the originals or on the copies."""

    variant: Series[str] = column("which libraries", isin=["original", "debloated"])
    loading: Series[str] = column("CUDA_MODULE_LOADING", isin=["lazy", "eager", "default"])
    repeat: Series[int] = column("number of the round", ge=0)
    exit_status: Series[int] = column("of the command; negative: the signal that ended it")
    wall_s: Series[float] = column("wall time of the command", ge=0)
    peak_rss_bytes: Series[int] = column("largest resident set of any of its processes", ge=0)
    peak_gpu_bytes: Series[pd.Int64Dtype] = column(
        "most GPU memory in use beyond the level before; empty: no GPU", nullable=True
    )
    stdout_sha256: Series[str] = column("of what it printed")
    files_sha256: Series[str] = column("of the files named for comparison, or empty")
    is_equal: Series[bool] = column("exit status, output and files equal the first original run of this loading mode")


class Verdicts(Table):
    """One row = one loading mode: the copies against the originals, medians over the rounds."""

    loading: Series[str] = column("CUDA_MODULE_LOADING", isin=["lazy", "eager", "default"], unique=True)
    n_repeats: Series[int] = column("rounds of each variant", ge=1)
    is_deterministic: Series[pd.BooleanDtype] = column(
        "all original runs gave the same output; empty after one round", nullable=True
    )
    is_equal: Series[bool] = column("all runs of the copies gave the output of the originals")
    wall_s: Series[float] = column("median of the originals", ge=0)
    wall_s_after: Series[float] = column("median of the copies", ge=0)
    wall_spread_s: Series[float] = column("largest minus smallest of the originals", ge=0)
    wall_spread_s_after: Series[float] = column("largest minus smallest of the copies", ge=0)
    peak_rss_bytes: Series[int] = column("median of the originals", ge=0)
    peak_rss_bytes_after: Series[int] = column("median of the copies", ge=0)
    peak_gpu_bytes: Series[pd.Int64Dtype] = column("median of the originals", nullable=True)
    peak_gpu_bytes_after: Series[pd.Int64Dtype] = column("median of the copies", nullable=True)
    verdict: Series[str] = column(
        "equal, differs or crashed; not_deterministic: the originals differ among themselves, only exit status counts",
        isin=["equal", "differs", "crashed", "not_deterministic"],
    )


TABLES: dict[str, type[Table]] = {
    "removed": Removed,
    "reduction": Reduction,
    "repeats": Repeats,
    "verdicts": Verdicts,
}
