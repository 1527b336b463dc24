"""One library -> its debloated copy, and the rows that tell of it. What runs in a worker."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import zstandard

from gpubloat.errors import GpubloatError
from gpubloat.libraries import inputs, locate, rewrite
from gpubloat.libraries.elf import PAGE, Array
from gpubloat.libraries.inputs import Input
from gpubloat.libraries.onefile import Options, scan_file, sha256
from gpubloat.libraries.reader import Reader
from gpubloat.libraries.union import SCANNED, Usage
from gpubloat.tables.libraries import TABLES

ZSTD_LEVEL = 3
_CHUNK = 8 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """What to do with one file. `sha256` is what it must have, or empty; `tables` its scan, or None to scan it."""

    entry: Input
    sha256: str
    tables: dict[str, pd.DataFrame] | None
    usage: Usage | None
    wanted: tuple[str, ...] | None
    layout: str
    zstd: bool
    place: str
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class Done:
    """What came out. `sha256_copy` is empty where nothing was removed: then there is no copy."""

    library: pd.DataFrame
    removed: pd.DataFrame
    problems: pd.DataFrame | None
    ranges: Array
    reduction: dict[str, Any]
    sha256: str
    sha256_copy: str


def run(job: Job) -> Done:
    """Check the file, decide, write the copy. Raises GpubloatError where the file is not the traced one."""
    started = time.perf_counter()
    name = job.entry.library
    tables = job.tables
    with inputs.opened(job.entry) as reader:
        digest = sha256(reader)
        if job.sha256 and digest != job.sha256:
            hint = "trace the workload again, with the libraries that are there now"
            raise GpubloatError(f"{name} is not the file that was traced: its sha256 differs", hint)
        if tables is None:
            tables = scan_file(job.entry, _OPTIONS)
            tables |= {name: TABLES[name].none() for name in SCANNED if name not in tables}
        plan = locate.plan(reader, tables, job.usage, job.wanted)
        before = -(-reader.size // PAGE) * PAGE
        copy = rewrite.Written("", before)
        if len(plan.ranges):
            edits = rewrite.edits(plan, tables, job.layout)
            copy = rewrite.write(reader, edits, Path(job.place), job.mode)
        seconds = time.perf_counter() - started
        packed = (_zstd(reader), _zstd_of(job.place) if copy.sha256 else None) if job.zstd else (None, None)
    library = tables["libraries"].assign(sha256=digest)
    row = library.iloc[0]
    reduction = {
        "library": name,
        "file_bytes": reader.size,
        "file_bytes_after": reader.size,
        "allocated_bytes": before,
        "allocated_bytes_after": copy.allocated_bytes,
        "zstd_bytes": packed[0],
        "zstd_bytes_after": packed[0] if packed[1] is None else packed[1],
        **_counts(plan, row),
        "debloat_s": seconds,
    }
    removed = plan.removed.assign(library=name)
    return Done(library, removed, tables.get("problems"), plan.ranges, reduction, digest, copy.sha256)


_OPTIONS = Options(digests=False, threads=1)


def _counts(plan: locate.Plan, row: Any) -> dict[str, int]:
    removed = plan.removed
    is_function = (removed["what"] == "function").to_numpy(bool)
    reasons = removed["reason"].value_counts()
    size = removed["size_bytes"].to_numpy(np.int64)
    return {
        "cpu_code_bytes": int(row["cpu_code_bytes"]),
        "cpu_removed_bytes": int(size[is_function].sum()),
        "function_bytes": int(row["function_bytes"]),
        "n_functions": int(row["n_functions"]),
        "n_functions_unknown": plan.n_unknown,
        "n_functions_removed": int(is_function.sum()),
        "gpu_code_bytes": int(row["gpu_code_bytes"]),
        "gpu_removed_bytes": int(size[~is_function].sum()),
        "n_elements": int(row["n_elements"]),
        "n_elements_removed": int((~is_function).sum()),
        "n_other_architecture": int(reasons.get("other_architecture", 0)),
        "n_unused_element": int(reasons.get("unused_element", 0)),
    }


def _zstd(reader: Reader) -> int:
    packer = zstandard.ZstdCompressor(level=ZSTD_LEVEL, threads=-1).compressobj(size=reader.size)
    total = 0
    for at in range(0, reader.size, _CHUNK):
        total += len(packer.compress(reader.view(at, min(_CHUNK, reader.size - at))))
        reader.release()
    return total + len(packer.flush())


def _zstd_of(path: str) -> int:
    with inputs.opened(Input(path, "", path)) as reader:
        return _zstd(reader)
