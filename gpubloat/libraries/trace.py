"""A command -> what it used: which functions, fatbin elements and kernels of which libraries, in all its processes.

The program is not changed. The environment attaches two libraries to every process: an audit library of the dynamic
loader (breakpoints at function starts, first touches of GPU code) and a CUPTI injection (look-ups of kernels, loaded
cubins). Source of the method: Negativa-ML, section 3 (detection); here without DynamoRIO, and without the whole
callback domains that made its detector slow.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from gpubloat.libraries import attach, cuptilog, evidence, record
from gpubloat.libraries.elf import PAGE, PT_LOAD, Array, Elf
from gpubloat.libraries.inputs import Input, opened
from gpubloat.libraries.names import library_names
from gpubloat.libraries.onefile import Options, Tables
from gpubloat.libraries.record import Record, Watched
from gpubloat.libraries.scan import scan_each
from gpubloat.run import Run, RunWriter, provenance
from gpubloat.tables import targets
from gpubloat.tables.usage import TABLES as USAGE

METHOD = {
    "functions": "one-shot breakpoint at each start of .eh_frame_hdr outside .plt*, planted before relocation",
    "elements": "cubins seen by CUPTI matched by content; images by pointer; kernels by name; first touches of pages",
    "processes": "all that the environment reaches: not a process that clears LD_AUDIT, and no static program",
}
NOT_ASKED = "not asked for"
GONE = "the file was gone or changed when the run ended"
SCANNED = ("libraries", "regions", "elements", "functions", "problems")


@dataclass(frozen=True, slots=True)
class Sources:
    """What to record: first entries of functions, first touches of GPU code, CUPTI's callbacks."""

    functions: bool = True
    pages: bool = True
    cupti: bool = True


ALL = Sources()


def trace(
    command: Sequence[str],
    *,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    workload: str = "",
    target: str | None = None,
    repeat: int = 1,
    sources: Sources = ALL,
    env: Mapping[str, str] | None = None,
    executor: Executor | None = None,
    progress: bool = False,
    stdout: int | None = None,
    command_line: str = "gpubloat.libraries.trace",
) -> Run:
    """Run `command` and its children unchanged, and record what they use.

    Parameters
    ----------
    command : program and arguments.
    out, force : keep the run in this folder; replace one that is there.
    workload : name of the workload in run.json; default, the program and its first argument.
    target : the GPU, such as ``"sm_90"``; default, the GPUs that the run saw.
    repeat : run it so often; what any of the runs used counts. Programs differ from run to run (garbage collection,
        hash seeds, times), so two runs find more than one.
    sources : what to record.
    env : environment of the command; default, this process's.
    executor : for the scan of the loaded libraries.
    stdout : file descriptor for what the command prints; default, this process's own.
    command_line : what run.json says was run.

    Returns
    -------
    Run with the tables of `tables.usage`, and libraries, regions, elements, functions, problems of the loaded files.
    Its provenance has exit_status, wall_s (of one run of the command), scan_s, targets, is_gpu_traced, workload, and
    loading: where it is eager, the driver loads elements used or not, so their evidence says little (see `union`).

    Raises
    ------
    GpubloatError : the command cannot be started, or this system has no such loader. MissingToolError : no compiler.
    """
    if out is not None:
        attach.check_out(out, force)
    target = f"sm_{targets.gpu(target)}" if target else None
    given = dict(os.environ if env is None else env)
    folder = Path(tempfile.mkdtemp(prefix="gpubloat-record-"))
    try:
        variables, why_no_cupti = _variables(folder, sources, given)
        started, status = time.monotonic(), 0
        for _ in range(repeat):
            status = attach.run(command, variables, stdout) or status
        wall = (time.monotonic() - started) / repeat
        names = [*USAGE, *SCANNED]
        with RunWriter("libraries", names, out, force) as writer:
            details = _collect(writer, folder, target, why_no_cupti, executor, progress)
            words = workload or " ".join(os.path.basename(w) for w in list(command)[:2])
            about = provenance(command_line, METHOD, details.pop("inputs"))
            about |= {"workload": words, "exit_status": status, "wall_s": round(wall, 3), "repeat": repeat}
            about |= {"trace": "trace", "loading": _loading(given)}
            return writer.finish(about | details)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _loading(env: Mapping[str, str]) -> str:
    return "eager" if env.get("CUDA_MODULE_LOADING", "").upper() == "EAGER" else "lazy"


def _variables(folder: Path, sources: Sources, given: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The command's environment, and why CUPTI's callbacks will not be recorded, if so."""
    wanted = {"GPUBLOAT_DIR": str(folder)}
    wanted |= {"GPUBLOAT_FUNCTIONS": "1"} if sources.functions else {}
    wanted |= {"GPUBLOAT_PAGES": "1"} if sources.pages else {}
    why = NOT_ASKED
    if sources.cupti:
        library, why = attach.cupti_library()
        if library is not None and given.get("CUDA_INJECTION64_PATH", str(library)) != str(library):
            why = "another tool is in CUDA_INJECTION64_PATH"
        elif library is not None:
            wanted["CUDA_INJECTION64_PATH"] = str(library)
    return attach.audited(given, **wanted), why


def _collect(
    writer: RunWriter, folder: Path, target: str | None, why_no_cupti: str, executor: Executor | None, progress: bool
) -> dict[str, Any]:
    """Turn the record into tables; what run.json says about them."""
    started = time.monotonic()
    found = record.read(folder)
    found.libraries = _one_each(w for w in record.with_text_paths(found) if not attach.is_injection(w.path))
    logs = cuptilog.read_all(folder)
    gpus = [target] if target else evidence.gpus(logs)
    names = library_names([w.path for w in found.libraries])
    kept: dict[str, list[pd.DataFrame]] = {"regions": [], "elements": []}
    loaded: list[dict[str, Any]] = []
    touched: dict[str, Array] = {}
    guarded: dict[str, Array] = {}
    options = Options(target=gpus[0] if len(gpus) == 1 else None)
    for watched, tables in _scanned(found.libraries, names, options, executor, progress):
        library = names[watched.path]
        used = used_functions(watched, tables.get("functions"))
        writer.append("used_functions", used)
        loaded.append(_loaded(watched, library, tables, len(used)))
        for name in SCANNED:
            if name in tables:
                writer.append(name, tables[name])
                if name in kept:
                    kept[name].append(tables[name])
        if tables:
            touched[library], guarded[library] = page_offsets(watched)
    whole = {name: pd.concat(parts, ignore_index=True) if parts else None for name, parts in kept.items()}
    paths = {names[w.path]: w.path for w in found.libraries}
    if whole["elements"] is not None and whole["regions"] is not None:
        made, problems = evidence.tables(logs, paths, whole["regions"], whole["elements"], gpus)
        pages = evidence.from_pages(touched, whole["elements"], guarded)
        made["evidence"] = pd.concat([made["evidence"], pages], ignore_index=True) if len(pages) else made["evidence"]
        for name, table in made.items():
            writer.append(name, table)
        writer.append("problems", _unread(problems))
    writer.append("loaded", pd.DataFrame(loaded, columns=list(USAGE["loaded"].to_schema().columns)))
    processes = _processes(found, logs, why_no_cupti)
    writer.append("processes", processes)
    return {
        "targets": gpus,
        "is_gpu_traced": set(processes["cupti"]) <= {"recorded", "no_cuda"} or any(map(len, guarded.values())),
        "scan_s": round(time.monotonic() - started, 3),
        "gpus": sorted({name for log in logs for _, name in log.gpus}),
        "inputs": [{"name": row["library"], "bytes": row["file_bytes"], "sha256": row["sha256"]} for row in loaded],
        "record_problems": found.problems,
        "empty": _why_empty(loaded, processes),
    }


def _one_each(libraries: Iterable[Watched]) -> list[Watched]:
    """Each path once. Where several files were loaded under one path, what was used of which no longer tells much."""
    found: dict[str, Watched] = {}
    for watched in libraries:
        known = found.setdefault(watched.path, watched)
        if known is not watched:
            known.problem = GONE
            known.processes |= watched.processes
    return list(found.values())


def _scanned(
    libraries: Sequence[Watched],
    names: Mapping[str, str],
    options: Options,
    executor: Executor | None,
    progress: bool,
) -> Iterator[tuple[Watched, Tables]]:
    """The scan tables of each library of the record; none of a file that is gone."""
    is_there = [not w.problem.startswith(GONE) and w.is_there() for w in libraries]
    there = [w for w, here in zip(libraries, is_there) if here]
    gone = [w for w, here in zip(libraries, is_there) if not here]
    files = [Input(names[w.path], os.path.dirname(names[w.path]) or "/", w.path) for w in there]
    yield from zip(there, scan_each(files, options, executor, progress), strict=True)
    yield from ((w, {}) for w in gone)


def used_functions(watched: Watched, functions: pd.DataFrame | None) -> pd.DataFrame:
    """Table `used_functions` of one library: the sites that were hit, with name, offset and size from the scan."""
    if functions is None or not len(watched.sites):
        return USAGE["used_functions"].none()
    hit = np.flatnonzero(watched.n_hits)
    hits = pd.DataFrame({"address": pd.array(watched.sites[hit], "UInt64"), "n_processes": watched.n_hits[hit]})
    known = functions[["library", "function", "address", "offset_bytes", "size_bytes"]]
    return hits.drop_duplicates("address").merge(known, on="address", how="inner")


def page_offsets(watched: Watched) -> tuple[Array, Array]:
    """File offsets of the pages of GPU code that were touched, and of all whose touch would have been seen."""
    if not len(watched.runs):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    with opened(Input(watched.path, "", watched.path)) as reader:
        segments = Elf(reader).segments
        segments = segments[segments["p_type"] == PT_LOAD]
        begins, shifts = segments["p_vaddr"].astype(np.int64), segments["p_offset"].astype(np.int64)
    order = np.argsort(begins)

    def offsets(addresses: npt.NDArray[np.uint64]) -> Array:
        row = order[np.searchsorted(begins[order], addresses.astype(np.int64) + PAGE - 1, "right") - 1]
        found: Array = addresses.astype(np.int64) - begins[row] + shifts[row]
        return found

    runs = [run["vaddr"] + PAGE * np.arange(int(run["n_pages"]), dtype=np.uint64) for run in watched.runs]
    return offsets(watched.touched_addresses()), offsets(np.concatenate(runs))


def _loaded(watched: Watched, library: str, tables: Tables, n_used: int) -> dict[str, Any]:
    scanned = tables.get("libraries")
    problem = watched.problem or ("" if scanned is not None else GONE)
    if not problem and not len(watched.sites):
        problem = "functions were not asked for" if len(watched.runs) else "no function starts are known"
    return {
        "library": library,
        "path": watched.path,
        "sha256": "" if scanned is None else str(scanned["sha256"].iloc[0]),
        "file_bytes": watched.file_bytes,
        "n_processes": len(watched.processes),
        "n_functions_watched": len(watched.sites),
        "n_functions_used": n_used,
        "cpu_problem": problem,
        "n_pages_guarded": len(watched.n_touches),
        "n_pages_touched": int((watched.n_touches > 0).sum()),
    }


def _processes(found: Record, logs: Iterable[cuptilog.Log], why_no_cupti: str) -> pd.DataFrame:
    """Table `processes`. A process that loaded the driver and left no log was not recorded by CUPTI."""
    states = evidence.states(logs)
    rows = []
    for number, process in enumerate(found.processes):
        mine = [w for w in found.libraries if process.tag in w.processes]
        has_driver = any(os.path.basename(w.path).startswith("libcuda.so") for w in mine)
        state, problem = states.get(int(process.pid), _no_log(has_driver, why_no_cupti))
        problems = dict.fromkeys([*process.problems, problem])
        said = record.text("; ".join(filter(None, problems)))
        rows.append((number, record.text(process.program), len(mine), state, said))
    return pd.DataFrame(rows, columns=list(USAGE["processes"].to_schema().columns))


def _no_log(has_driver: bool, why: str) -> tuple[str, str]:
    if not has_driver:
        return "no_cuda", ""
    if why == NOT_ASKED:
        return "off", ""
    return "missing", why or "the driver did not load the injection library"


def _unread(problems: Iterable[tuple[str, str]]) -> pd.DataFrame:
    rows = [(library, 0, "undecodable_payload", detail) for library, detail in problems]
    return pd.DataFrame(rows, columns=["library", "offset_bytes", "problem", "detail"])


def _why_empty(loaded: Sequence[Mapping[str, Any]], processes: pd.DataFrame) -> dict[str, str]:
    if not loaded:
        why = "the command loaded no shared library under observation: is it a static program?"
        return {"loaded": why, "used_functions": why}
    if (processes["cupti"] == "no_cuda").all():
        return dict.fromkeys(("evidence", "used_kernels", "modules"), "no process initialised CUDA")
    return {"misses": "the command ran on its original libraries"}
