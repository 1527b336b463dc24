"""Files -> tables: where every byte of a GPU library goes, for which GPU, and what is inside."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from gpubloat.libraries import inputs
from gpubloat.libraries.inputs import Input
from gpubloat.libraries.onefile import Options, Tables, scan_file
from gpubloat.run import Run, RunWriter, provenance
from gpubloat.tables import targets
from gpubloat.tables.libraries import TABLES

METHOD = {
    "bytes": "each byte labelled once: headers, fatbin regions and raw cubins, sections, segments, the rest",
    "functions": "distinct start addresses from .eh_frame, .symtab and .dynsym; PLT stubs left out",
    "elements": "regions found by their header anywhere in the file, accepted if the whole chain is consistent",
    "is_loadable": "same major and minor <= the GPU's; a exact; f same family; else PTX; decided per region",
}


def scan(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    target: str | None = None,
    kernels: bool = False,
    functions: bool = True,
    digests: bool = True,
    executor: Executor | None = None,
    progress: bool = False,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    command: str = "gpubloat.libraries.scan",
) -> Run:
    """Scan libraries into the tables of `gpubloat.tables.libraries`.

    Parameters
    ----------
    paths : files (ELF, archive, fatbin, cubin), folders, wheels, or names of installed packages.
    target : a GPU such as ``"sm_90"``: fills `fit` and `is_loadable` of each element.
    kernels : also decompress all elements and list their kernels and variables.
    functions : list CPU functions; without, the counts of `libraries` are 0.
    digests : sha256 of each file and of each element's stored code.
    executor : any `concurrent.futures.Executor`, also `dask.distributed`'s ``client.get_executor()``; one task a file.
    progress : show a progress bar on stderr.
    out : keep the run in this folder; default, a temporary one that goes with the Run.
    force : replace a run that is in `out` already.
    command : what run.json says was run.

    Returns
    -------
    Run with libraries, sections, functions, regions, elements, kernels, variables, problems. A file of a folder or
    wheel that cannot be read is a row of `problems`; its bytes are `unattributed`.

    Raises
    ------
    FormatError : a file that was named itself cannot be read. GpubloatError : a path does not exist.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if target is not None:
        target = f"sm_{targets.gpu(target)}"
    options = Options(target, kernels, functions, digests)
    found = inputs.discover(given)
    with RunWriter("libraries", list(TABLES), out, force) as writer:
        for tables in scan_each(found.files, options, executor, progress):
            for name in list(tables):
                writer.append(name, tables.pop(name))  # not kept while the next file is read
        record = provenance(command, METHOD, _roots(found.files, digests))
        record |= {"target": target, "n_files_without_code": found.n_skipped, "empty": _why_empty(found, options)}
        return writer.finish(record)


def scan_each(files: list[Input], options: Options, executor: Executor | None, progress: bool) -> Iterator[Tables]:
    """The tables of each file, in input order, with a progress bar if wanted."""
    return _progress(_each(files, options, executor), len(files), progress)


def _each(files: list[Input], options: Options, executor: Executor | None) -> Iterator[Tables]:
    """Results in input order; with an executor, a bounded number of tasks is under way."""
    work: Callable[[Input], Tables] = partial(scan_file, options=options)
    if executor is None:
        yield from map(work, files)
        return
    waiting: deque[Future[Tables]] = deque()
    try:
        for entry in files:
            waiting.append(executor.submit(work, entry))
            if len(waiting) >= 2 * (os.cpu_count() or 1):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _progress(tables: Iterator[Tables], total: int, wanted: bool) -> Iterator[Tables]:
    if not wanted:
        return tables
    from tqdm.auto import tqdm

    return iter(tqdm(tables, total=total, unit="file", disable=None, leave=False))


def _roots(files: list[Input], digests: bool) -> list[dict[str, Any]]:
    """The inputs as run.json lists them: wheels by their own sha256, other roots by name (their files have theirs)."""
    found: dict[str, dict[str, Any]] = {}
    for entry in files:
        record: dict[str, Any] = {"name": entry.root}
        if entry.member is not None and entry.root not in found:
            record["bytes"] = os.stat(entry.path).st_size
            if digests:
                with open(entry.path, "rb") as file:
                    record["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
        found.setdefault(entry.root, record)
    return list(found.values())


def _why_empty(found: inputs.Inputs, options: Options) -> dict[str, str]:
    reasons = {}
    if not found.files:
        reasons["libraries"] = f"none of the {found.n_skipped} files is an ELF file, an archive or a fatbin"
    if not options.kernels:
        reasons |= dict.fromkeys(("kernels", "variables"), "kernels were not asked for (--kernels)")
    if not options.functions:
        reasons["functions"] = "functions were not asked for"
    return reasons
