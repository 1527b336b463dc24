"""Traced runs without a trace: what a test wants a run to have used, as tables. No tests in here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from gpubloat.libraries.inputs import Input
from gpubloat.libraries.locate import CPU, GPU
from gpubloat.libraries.onefile import Options, scan_file
from gpubloat.run import Run, RunWriter, provenance
from gpubloat.tables.libraries import TABLES as SCAN
from gpubloat.tables.usage import TABLES as USAGE

SCANNED = ("libraries", "regions", "elements", "functions", "problems")


def scan(path: Path, library: str) -> dict[str, pd.DataFrame]:
    found = scan_file(Input(library, library, str(path), is_named=True), Options(threads=1))
    return {name: found.get(name, SCAN[name].none()) for name in SCANNED}


def run(
    out: Path | None,
    libraries: Mapping[str, Path],
    *,
    functions: Mapping[str, Iterable[str | int]] | None = None,
    elements: Mapping[str, Iterable[tuple[int, int]]] | None = None,
    targets: Sequence[str] = ("sm_90",),
    gpu: bool = True,
    cupti: str = "recorded",
    problem: str = "",
    scanned: bool = True,
    source: str = "content",
    pages: int = 1,
    is_gone: bool = False,
    **about: object,
) -> Run:
    """A traced run of `libraries` (name -> file) that entered `functions` (names or offsets) and used `elements`.

    `pages` is how many pages of GPU code were watched for their first touch; `is_gone`: the files were gone or replaced
    when the run ended.
    """
    names = [*USAGE, *(SCANNED if scanned else ())]
    with RunWriter("libraries", names, out, False) as writer:
        for library, path in libraries.items():
            tables = scan(path, library)
            known = tables["functions"]
            wanted = set((functions or {}).get(library, ()))
            used = known[known["function"].isin(wanted) | known["offset_bytes"].isin(wanted)]
            used = used[["library", "function", "address", "offset_bytes", "size_bytes"]].assign(n_processes=1)
            writer.append("used_functions", used)
            digest = "" if is_gone else tables["libraries"]["sha256"].iloc[0]
            loaded = {
                "library": library, "path": str(path), "sha256": digest,
                "file_bytes": path.stat().st_size, "n_processes": 1, "n_functions_watched": len(known),
                "n_functions_used": len(used), "cpu_problem": problem, "n_pages_guarded": pages, "n_pages_touched": 0,
            }  # fmt: skip
            writer.append("loaded", pd.DataFrame([loaded]))
            rows = [(library, r, e, source, 1) for r, e in (elements or {}).get(library, ())]
            writer.append(
                "evidence", pd.DataFrame(rows, columns=["library", "region", "element", "source", "n_events"])
            )
            for name in SCANNED if scanned else ():
                writer.append(name, tables[name])
        process = {"process": 0, "program": "python", "n_libraries": len(libraries), "cupti": cupti, "problem": ""}
        writer.append("processes", pd.DataFrame([process]))
        record = provenance("test", {}, [])
        record |= {"targets": list(targets), "is_gpu_traced": gpu, "workload": "test", "trace": "trace", **about}
        return writer.finish(record)


def expected_ranges(removed: pd.DataFrame, elements: pd.DataFrame) -> list[tuple[int, int, int, int]]:
    """What the ranges of `removed` (index: id) must be: its bytes, and two bytes at the header of each element."""
    outer = elements[elements["member"].isna()].set_index(["region", "element"])
    rows = []
    for row in removed.itertuples():
        kind = CPU if row.what == "function" else GPU
        rows.append((int(row.offset_bytes), int(row.size_bytes), kind, int(row.Index)))
        if kind == GPU and outer.loc[(row.region, row.element), "header_bytes"]:
            rows.append((int(outer.loc[(row.region, row.element), "offset_bytes"]), 2, GPU, int(row.Index)))
    return sorted(rows)


def guard(out: Path | None, misses: Sequence[Mapping[str, object]], **about: object) -> Run:
    """A run under the guard that met the removed code of `misses` (library, what, offset_bytes, region, element)."""
    with RunWriter("libraries", ["misses"], out, False) as writer:
        rows = [{"function": "", "size_bytes": 1, "action": "restored", "n_processes": 1, **miss} for miss in misses]
        frame = pd.DataFrame(rows).reindex(columns=list(USAGE["misses"].to_schema().columns))
        writer.append("misses", frame.astype({"region": "Int64", "element": "Int64"}))
        return writer.finish(provenance("test", {}, []) | {"trace": "guard", **about})
