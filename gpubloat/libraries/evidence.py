"""What a run's logs say about the fatbin elements of its libraries: tables evidence, used_kernels and modules.

The rules, the strongest first:

- *content*: the driver loaded a cubin that is, byte for byte, an element. Of equal elements (a library can hold one
  hundreds of times) those count that are used by the next rule, if they can account for all loads; else all.
- *pointer*: the driver was given a region (the image pointer lies in a mapped library), and the element is the one that
  it takes there for the run's GPUs. Given is not used: the CUDA runtime registers all fatbins of a program when it
  starts. It counts if something was looked up in it, if the driver loaded a cubin during a call for it, or if it was
  given to one of the cuModuleLoad functions, which read it at once.
- *kernel*, *variable*: a name was looked up, and this element has it. Where the load of the handle was seen, only the
  elements of that region are asked; where not, all that the GPU could be given in the libraries that had any load, and
  of those with the name, the ones whose content was loaded, if there are any.
- *page*, *page_shared*: see `from_pages`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from gpubloat.libraries import loadable as loading
from gpubloat.libraries.cuptilog import Image, Log, Lookup
from gpubloat.libraries.elf import PAGE
from gpubloat.libraries.loadable import Content, Key, Loadable, Place
from gpubloat.tables.targets import gpu
from gpubloat.tables.usage import SOURCES, Evidence, Modules, UsedKernels

JIT = Place("")  # made at run time


@dataclass(slots=True)
class _Found:
    """What comes together over all processes."""

    scan: Loadable
    by_content: dict[Content, list[Key]]
    evidence: Counter[tuple[Key, str]] = field(default_factory=Counter)
    kernels: dict[tuple[Any, ...], int] = field(default_factory=dict)
    # names looked up in a region (library, region) or, without one, in any: (what, name)
    asked: dict[tuple[str, int] | None, set[tuple[str, str]]] = field(default_factory=lambda: defaultdict(set))
    libraries: set[str] = field(default_factory=set)  # of which anything was loaded
    jit: set[Content] = field(default_factory=set)  # unmatched modules that were made at run time


def gpus(logs: Iterable[Log]) -> list[str]:
    """Compute capabilities that the processes of a run saw: ``["sm_90"]``; empty if none initialised CUDA."""
    return sorted({target for log in logs for target, _ in log.gpus}, key=gpu)


def states(logs: Iterable[Log]) -> dict[int, tuple[str, str]]:
    """By process number: the columns `cupti` and `problem` of the table processes."""
    return {log.pid: (log.state, log.problem) for log in logs}


def tables(
    logs: Sequence[Log],
    paths: Mapping[str, str],
    regions: pd.DataFrame,
    elements: pd.DataFrame,
    targets: Sequence[str] | None = None,
) -> tuple[dict[str, pd.DataFrame], list[tuple[str, str]]]:
    """Tables evidence, used_kernels and modules of a run, and (library, detail) of what could not be read.

    Parameters
    ----------
    logs : of `cuptilog.read_all`; paths : library -> absolute path, of every library that the run loaded.
    regions, elements : scan tables of these libraries; fit and is_loadable are worked out here, for all targets.
    targets : GPUs of the run, by default those of the logs.
    """
    scan = loading.loadable(paths, regions, elements, gpus(logs) if targets is None else targets)
    loads = Counter[Content]()
    for log in logs:
        loads.update(log.modules)
    heap = {(i.crc32, i.size) for log in logs for i in log.loads if not i.path and i.size}
    found = _Found(scan, scan.holding(set(loads) | heap))
    for log in logs:
        _process(found, log)
    _answer(found)
    made = {"evidence": _evidence(found.evidence), "used_kernels": _kernels(found), "modules": _modules(found, loads)}
    return made, list(dict.fromkeys(scan.problems))


def _process(found: _Found, log: Log) -> None:
    """Places of the loads of one process, pointer evidence, and the names that are to be answered."""
    known: dict[Image, Place | None] = {image: _place(found, image) for image in set(log.loads)}
    places = [known[image] for image in log.loads]
    found.libraries |= {place.library for place in places if place and place.library}
    used = {lookup.load for lookup in log.lookups if lookup.load is not None}
    used |= {load for load, _, _ in log.made}
    used |= {load for load, image in enumerate(log.loads) if image.is_loaded_at_once}
    given: set[Key] = set()
    for load in used:
        place = places[load]
        source = "pointer" if log.loads[load].path else "content"
        for key in place.elements if place else ():
            found.evidence[key, source] += 1
            given.add(key)
    for content, n in log.modules.items():
        equal = found.by_content.get(content, [])
        likely = [key for key in equal if key in given]
        for key in likely if n <= len(likely) * max(len(log.gpus), 1) else equal:
            found.evidence[key, "content"] += n
    for lookup in log.lookups:
        _ask(found, lookup, None if lookup.load is None else places[lookup.load])
    found.jit |= _made_at_run_time(found, log, places)


def _place(found: _Found, image: Image) -> Place | None:
    """Where an image lies; JIT if in no file, None if in a file that is no loaded library."""
    if image.kind == "file":
        return None
    if image.path:
        return found.scan.at(image.path, image.vaddr)
    same = found.by_content.get((image.crc32, image.size), ()) if image.size else ()
    if not same:
        return JIT
    # The library has unpacked one of its elements itself.
    library, region, _ = same[0]
    return Place(library, region, tuple(same))


def _ask(found: _Found, lookup: Lookup, place: Place | None) -> None:
    if lookup.what == "all":
        return  # every kernel was handed out, none by name: the pointer says it
    if lookup.load is None:
        found.asked[None].add((lookup.what, lookup.name))
    elif place is not None and place.region is not None:
        for region in {key[:2] for key in place.elements} or {(place.library, place.region)}:
            found.asked[region].add((lookup.what, lookup.name))
    elif lookup.what == "kernel":
        kind = "unknown" if place is None else "jit" if place is JIT else "handle"
        library = place.library if place is not None else ""
        found.kernels.setdefault((library, None, None, lookup.name, kind), 0)


def _made_at_run_time(found: _Found, log: Log, places: Sequence[Place | None]) -> set[Content]:
    """The modules of one process that are no element because they were compiled or linked while it ran.

    Certain for cubins from the heap, and for what the driver loaded during a call for an image that is on the heap or
    of which it takes PTX or LTO-IR. A module that no call accounts for (lazy loading: a launch loads it) is counted
    here, too, if the process has looked something up in such an image.
    """
    loads = list(zip(log.loads, places, strict=True))
    is_made = [place is JIT or (place is not None and _is_compiled(found.scan, image, place)) for image, place in loads]
    unmatched = {content for content in log.modules if content not in found.by_content}
    made = {(image.crc32, image.size) for image, place in loads if place is JIT}
    accounted = {(crc, size): is_made[load] for load, crc, size in log.made}
    some = any(is_made[lookup.load] for lookup in log.lookups if lookup.load is not None)
    return {content for content in unmatched if content in made or accounted.get(content, some)}


def _is_compiled(scan: Loadable, image: Image, place: Place) -> bool:
    """Whether the driver must compile or link what a library gives it: PTX, as text or in a region."""
    if place.region is None:
        return image.kind in ("ptx", "mapped")
    return (place.library, place.region) in scan.compiled


def _answer(found: _Found) -> None:
    """Kernel and variable evidence, and rows of used_kernels, for the names that were asked for."""
    unknown = found.asked.pop(None, set())
    rows = loading.regions_of([place for place in found.asked if place], found.scan.elements)
    if unknown:
        elements = found.scan.elements
        rows = elements[elements["library"].isin(list(found.libraries))] if found.libraries else elements
    names = found.scan.names(rows)
    of_region: dict[tuple[str, int], list[Key]] = defaultdict(list)
    owners: dict[tuple[str, str], list[Key]] = defaultdict(list)  # (what, name)
    for key, (kernels, variables) in names.items():
        of_region[key[:2]].append(key)
        if unknown:
            for what, inside in (("kernel", kernels), ("variable", variables)):
                for name in inside:
                    owners[what, name].append(key)
    for place, asked in found.asked.items():
        assert place is not None
        taken = set(found.scan.chosen.get(place, ()))
        for what, name in sorted(asked):
            column = 0 if what == "kernel" else 1
            having = [key for key in of_region[place] if name in names[key][column]]
            # What the driver takes comes first; another loadable element, where that one has no such name.
            having = [key for key in having if key in taken] or having
            _record(found, what, name, having, "handle", place)
    for what, name in sorted(unknown):
        having = owners[what, name]
        having = [key for key in having if found.evidence[key, "content"]] or having
        _record(found, what, name, having, "name", None)


def _record(
    found: _Found, what: str, name: str, having: list[Key], attribution: str, place: tuple[str, int] | None
) -> None:
    for key in having:
        found.evidence[key, what] += 1
    if what != "kernel":
        return
    if place is None and not having:
        found.kernels.setdefault(("", None, None, name, "unknown"), 0)
    by_library: dict[str, list[Key]] = defaultdict(list)
    for key in having:
        by_library[key[0]].append(key)
    if place is not None:
        by_library.setdefault(place[0], [])
    for library, held in by_library.items():
        region, element = held[0][1:] if len(held) == 1 else (None if place is None else place[1], None)
        found.kernels[library, region, element, name, attribution] = len(having)


def _evidence(counts: Mapping[tuple[Key, str], int]) -> pd.DataFrame:
    rows = [(*key, source, n) for (key, source), n in counts.items()]
    rows.sort(key=lambda row: (row[0], row[1], row[2], SOURCES.index(row[3])))
    return Evidence.check(_frame(Evidence, rows), "evidence")


def _kernels(found: _Found) -> pd.DataFrame:
    rows = [(*key, n) for key, n in sorted(found.kernels.items(), key=lambda item: [*map(str, item[0])])]
    return UsedKernels.check(_frame(UsedKernels, rows), "used_kernels")


def _modules(found: _Found, loads: Mapping[Content, int]) -> pd.DataFrame:
    rows: list[tuple[Any, ...]] = []
    for (crc, size), n in sorted(loads.items()):
        holders = found.by_content.get((crc, size), [])
        # Of equal elements, one that other evidence speaks for.
        best = max(holders, key=lambda key: sum(found.evidence[key, s] for s in SOURCES[1:4]), default=None)
        if best is not None:
            rows.append((crc, size, n, "element", *best))
        else:
            rows.append((crc, size, n, "jit" if (crc, size) in found.jit else "unknown", "", None, None))
    return Modules.check(_frame(Modules, rows), "modules")


def _frame(table: Any, rows: Sequence[tuple[Any, ...]]) -> pd.DataFrame:
    frame: pd.DataFrame = table.none()
    if rows:
        frame = pd.DataFrame(rows, columns=list(frame.columns))
    for column in {"region", "element"} & set(frame.columns):
        frame[column] = frame[column].astype("Int64")
    return frame


def from_pages(
    touched: Mapping[str, npt.ArrayLike],
    elements: pd.DataFrame,
    guarded: Mapping[str, npt.ArrayLike] | None = None,
) -> pd.DataFrame:
    """Table evidence from first touches of the pages of GPU code.

    Parameters
    ----------
    touched : library -> file offsets of the touched pages (multiples of 4096).
    elements : scan table, with is_loadable for the run's GPU if there is one.
    guarded : library -> file offsets of the pages whose touch would have been seen; by default, all.

    To choose an element the driver walks the headers of a region, so a page with a header in it is touched without the
    payload beside it being read; and who reads a payload reads all of its pages. Hence: a payload with pages of its
    own (nothing else in them) is used if one of these was touched (*page*), and not otherwise. One without counts as
    used if every guarded page that holds a part of it was touched (*page_shared*); the header alone can be the cause:
    it is the weakest evidence, and not given to elements that the GPU could not be given.
    """
    rows = []
    outer = elements[elements["member"].isna() & (elements["payload_bytes"] > 0)]
    for library, part in outer.groupby("library", observed=True):
        seen = _pages(touched.get(str(library), ()))
        watched = None if guarded is None else _pages(guarded.get(str(library), ()))
        start = (part["offset_bytes"] + part["header_bytes"]).to_numpy(np.int64)
        stop = start + part["payload_bytes"].to_numpy(np.int64)
        first, last = -(-start // PAGE), stop // PAGE  # the pages of its own
        low, high = start // PAGE, -(-stop // PAGE)  # all that hold a part of it
        has_own = first < last
        if watched is not None:
            has_own &= _count(watched, first, last) > 0
        own = np.where(has_own, _count(seen, first, last), 0)
        shared = _count(seen, low, high)
        wanted = high - low if watched is None else _count(watched, low, high)
        could = part["is_loadable"].fillna(True).to_numpy(bool)
        is_shared = ~has_own & could & (shared > 0) & (shared >= wanted)
        numbers = part[["region", "element"]].to_numpy(np.int64)
        for index in np.flatnonzero((own > 0) | is_shared).tolist():
            source, n = ("page", own[index]) if own[index] else ("page_shared", shared[index])
            rows.append((library, *numbers[index].tolist(), source, int(n)))
    return Evidence.check(_frame(Evidence, rows), "evidence")


def _pages(offsets: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Sorted page numbers, each once."""
    return np.unique(np.asarray(offsets, np.int64) // PAGE)


def _count(pages: npt.NDArray[np.int64], low: Any, high: Any) -> npt.NDArray[np.int64]:
    """How many of the sorted `pages` are in [low, high), for arrays of both."""
    n: npt.NDArray[np.int64] = np.searchsorted(pages, high) - np.searchsorted(pages, low)
    return np.maximum(n, 0)
