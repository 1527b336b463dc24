"""Several traced runs -> what they used together of each library.

An element or a function counts as used if any run used it. A library that only some runs loaded is decided by those
runs. Runs under the guard add what they missed. Under eager loading the driver loads elements used or not: such a run
says nothing of a library's GPU code if a lazy run of the same workload loaded it, too; else all that it loaded counts
as used.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from gpubloat.errors import FormatError, GpubloatError
from gpubloat.libraries.elf import Array
from gpubloat.run import Run
from gpubloat.tables import targets

SCANNED = ("libraries", "regions", "elements", "functions")
# States of the record of look-ups in which nothing of the GPU code in use is missing.
_COMPLETE = ("recorded", "no_cuda")
_HINT = "make one with: gpubloat libraries trace --out RUN -- COMMAND"


@dataclass(slots=True)
class Usage:
    """What the runs that loaded one library used of it, and how far their record goes.

    `functions` are file offsets of starts, `elements` are (region, element), `headers` file offsets of element headers.
    `cpu_problem` says why unused functions are not known. `is_gpu_known`: all of these runs recorded the use of GPU
    code; `is_gpu_complete`: they saw every look-up, so that also elements on no whole page of their own are known;
    `is_target_known`: none of them used a GPU that it cannot name; `is_watched`: all recorded first touches of its GPU
    code.
    """

    targets: set[str] = field(default_factory=set)
    cpu_problem: str = ""
    is_gpu_known: bool = True
    is_gpu_complete: bool = True
    is_target_known: bool = True
    is_watched: bool = True
    functions: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    elements: set[tuple[int, int]] = field(default_factory=set)
    headers: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Library:
    """One library as the runs saw it. `tables` are its scan tables; None if no run carries them."""

    library: str
    path: str
    sha256: str
    file_bytes: int
    usage: Usage
    tables: dict[str, pd.DataFrame] | None = None


def load(runs: Iterable[Run | str | os.PathLike[str]]) -> list[Run]:
    """The runs, opened. GpubloatError where one is no traced run, and if none of them is more than a guard's."""
    found = [r if isinstance(r, Run) else Run.load(r) for r in runs]
    for run in found:
        if run.instrument != "libraries" or not (_is_trace(run) or _is_guard(run)):
            raise GpubloatError(f"{run.folder} is no traced run", _HINT)
        for key, kind in (("targets", list), ("is_gpu_traced", bool)):
            if _is_trace(run) and not isinstance(run.provenance.get(key), kind):
                raise FormatError(str(run.folder / "run.json"), 0, f"no {key!r}: not a traced run", _HINT)
        for target in _targets(run):
            targets.gpu(target)
    if not any(map(_is_trace, found)):
        hint = _HINT if not found else "name the traced runs that the copies were made from, too"
        raise GpubloatError("no traced run was given" if not found else "only misses of a guard were given", hint)
    return found


def record(run: Run) -> dict[str, str]:
    """How the manifest names a run."""
    workload = str(run.provenance.get("workload", "") or run.folder.name)
    return {"workload": workload, "sha256": hashlib.sha256((run.folder / "run.json").read_bytes()).hexdigest()}


def libraries(runs: Sequence[Run]) -> list[Library]:
    """All libraries that the runs loaded, sorted by name, each with what was used of it and its scan tables."""
    found: dict[str, Library] = {}
    for run in runs:
        if _is_trace(run):
            _add_loaded(run, found)
    lazy = {pair for run in runs if run.provenance.get("loading") == "lazy" for pair in _loaded(run)}
    for run in runs:
        superseded = lazy & _loaded(run) if run.provenance.get("loading") == "eager" else set()
        for name in ("used_functions", "evidence", "misses"):
            if name in tuple(run):
                for library, rows in _by_library(run[name]):
                    if library in found and (name != "evidence" or (_workload(run), library) not in superseded):
                        _add_use(found[library].usage, name, rows, run)
    for entry in found.values():
        entry.usage.functions = np.unique(entry.usage.functions)
    return [found[name] for name in sorted(found)]


def _add_loaded(run: Run, found: dict[str, Library]) -> None:
    is_complete = "processes" in tuple(run) and set(run["processes"]["cupti"]) <= set(_COMPLETE)
    rows: list[dict[str, Any]] = [{str(k): v for k, v in row.items()} for row in run["loaded"].to_dict("records")]
    scanned = _scanned(run, {str(row["library"]) for row in rows} - set(found))
    for row in rows:
        name = str(row["library"])
        if name not in found:
            size = int(row["file_bytes"])
            found[name] = Library(name, str(row["path"]), str(row["sha256"]), size, Usage(), scanned.get(name))
        known = found[name]
        known.sha256 = known.sha256 or str(row["sha256"])
        if row["sha256"] and known.sha256 != row["sha256"]:
            raise GpubloatError(
                f"{name} is not the same file in all runs: its sha256 differs", "trace all of them again"
            )
        known.path = known.path or str(row["path"])
        usage = known.usage
        usage.targets |= set(_targets(run))
        problem = str(row["cpu_problem"]) or ("" if row["n_functions_watched"] else "no function was watched")
        usage.cpu_problem = usage.cpu_problem or problem
        # Without a digest the file was gone, or another one, when its run ended: what was used of it is not known.
        usage.is_gpu_known &= bool(run.provenance["is_gpu_traced"]) and bool(row["sha256"])
        usage.is_gpu_complete &= is_complete
        usage.is_watched &= bool(row["n_pages_guarded"])
        usage.is_target_known &= bool(_targets(run)) or bool(run.provenance["is_gpu_traced"])


def _workload(run: Run) -> str:
    name = run.provenance.get("workload")
    return name if isinstance(name, str) else ""


def _loaded(run: Run) -> set[tuple[str, str]]:
    """(workload, library) of all that a run loaded; none without a workload's name, for then no run is of the same."""
    name = _workload(run)
    return {(name, str(library)) for library in run["loaded"]["library"]} if name and _is_trace(run) else set()


def _scanned(run: Run, wanted: set[str]) -> dict[str, dict[str, pd.DataFrame]]:
    if not wanted or not set(SCANNED) <= set(run):
        return {}
    tables = {name: dict(_by_library(run[name])) for name in SCANNED}
    empty = {name: run[name].iloc[:0] for name in SCANNED}
    return {
        library: {name: tables[name].get(library, empty[name]) for name in SCANNED}
        for library in wanted & set(tables["libraries"])
    }


def _by_library(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    for name, rows in table.groupby("library", sort=False, observed=True):
        yield str(name), rows


def _add_use(usage: Usage, name: str, rows: pd.DataFrame, run: Run) -> None:
    if name == "used_functions":
        usage.functions = np.concatenate([usage.functions, rows["offset_bytes"].to_numpy(np.int64)])
    elif name == "evidence":
        usage.elements |= set(zip(rows["region"].tolist(), rows["element"].tolist()))
    else:
        if _is_guard(run):
            usage.targets |= set(_targets(run))
        is_function = (rows["what"] == "function").to_numpy()
        usage.functions = np.concatenate([usage.functions, rows["offset_bytes"].to_numpy(np.int64)[is_function]])
        usage.headers |= set(rows["offset_bytes"][~is_function].tolist())
        known = rows[~is_function & rows["region"].notna() & rows["element"].notna()]
        usage.elements |= set(zip(known["region"].astype(int).tolist(), known["element"].astype(int).tolist()))


def _targets(run: Run) -> list[str]:
    found: Any = run.provenance.get("targets", [])
    if not isinstance(found, list) or not all(isinstance(t, str) for t in found):
        raise FormatError(str(run.folder / "run.json"), 0, "'targets' is no list of GPU targets")
    return found


# `name in run` would read the table: a Run is a Mapping.
def _is_guard(run: Run) -> bool:
    return run.provenance.get("trace") == "guard" and "misses" in tuple(run)


def _is_trace(run: Run) -> bool:
    return "loaded" in tuple(run) and run.provenance.get("trace") != "guard"
