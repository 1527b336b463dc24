"""One file -> its tables: the readers of this package put together, and their records turned into rows."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from gpubloat.errors import FormatError
from gpubloat.libraries import archive, contents, elf, fatbin, functions, hostdata, inputs, layout, regions
from gpubloat.libraries.contents import Code, Read
from gpubloat.libraries.elf import Elf
from gpubloat.libraries.fatbin import Element, Region
from gpubloat.libraries.functions import Counts
from gpubloat.libraries.hostdata import RELEASE, RawCubin
from gpubloat.libraries.inputs import Input
from gpubloat.libraries.reader import Reader
from gpubloat.tables import targets
from gpubloat.tables.libraries import TABLES

Tables = dict[str, pd.DataFrame]
_HASH_CHUNK = 16 << 20


@dataclass(frozen=True, slots=True)
class Options:
    """What to read beside the byte layout."""

    target: str | None = None
    kernels: bool = False
    functions: bool = True
    digests: bool = True
    threads: int | None = None


def scan_file(entry: Input, options: Options) -> Tables:
    """The tables of one file. Raises FormatError if the file was named by the user and cannot be read."""
    try:
        with inputs.opened(entry) as reader:
            return _tables(entry, reader, options)
    except FormatError as error:
        if entry.is_named:
            raise
        return _unreadable(entry, error)


@dataclass(slots=True)
class _File:
    """The rows of one file while they come together; objects of an archive add to the same rows."""

    library: str
    options: Options
    spans: list[tuple[int, int, str, str]] = field(default_factory=list)
    functions: list[pd.DataFrame] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)
    regions: list[tuple[Any, ...]] = field(default_factory=list)
    elements: list[tuple[Any, ...]] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    problems: list[tuple[Any, ...]] = field(default_factory=list)
    build_id: str = ""


def _tables(entry: Input, reader: Reader, options: Options) -> Tables:
    file = _File(entry.library, options)
    head = bytes(reader.view(0, min(8, reader.size)))
    if head == inputs.AR_MAGIC:
        form = "archive"
        _archive(reader, file)
    elif head == inputs.THIN_MAGIC:
        raise reader.error(0, "a thin archive holds no code", "scan the object files that it names")
    else:
        form = _object(reader, file)
    if form == "raw" and not file.regions:
        for offset, problem, detail in file.problems:
            if offset == 0 and problem == "compressed_data":
                raise reader.error(0, detail, "unpack it first, and scan what comes out")
        hint = "give an ELF library, an archive, a fatbin, a cubin, a wheel or a folder"
        raise reader.error(0, "no ELF file, and no fatbin inside", hint)
    digest = sha256(reader) if options.digests else ""
    return _frames(entry, reader, file, form, digest)


def _archive(reader: Reader, file: _File) -> None:
    at = 0
    for name, offset, size in archive.members(reader):
        file.spans.append((at, offset, "(archive headers)", "headers"))
        part = reader.window(offset, size, name)
        try:
            _object(part, file, prefix=f"{name}:", base=offset)
        except FormatError as error:
            file.problems.append((offset + error.offset, "unreadable", error.detail))
            file.spans.append((offset, offset + size, f"{name}:(unreadable)", "unattributed"))
        at = offset + size
    file.spans.append((at, reader.size, "(archive headers)", "headers"))


def _object(reader: Reader, file: _File, prefix: str = "", base: int = 0) -> str:
    """Add one object to the rows of its file, whole or (FormatError) not at all; return its format."""
    head = bytes(reader.view(0, min(4, reader.size)))
    view = Elf(reader) if head == elf.MAGIC else None
    if view is not None and view.header.e_machine == elf.EM_CUDA:
        form, view = "cubin", None
        found = regions.Found(cubins=[hostdata.whole(reader)])
    else:
        form = "elf" if view else "fatbin" if head in inputs.MAGICS[3:] else "raw"
        if form == "fatbin":
            fatbin.region(reader, 0)
        found = regions.find(reader, view)
    spans = layout.spans(reader, view, found)
    cpu = functions.read(view, file.library, prefix, base) if view is not None and file.options.functions else None
    misaligned = [] if view is None else view.misaligned_segments()
    holders = [] if view is None else sorted((s.sh_offset, s.sh_offset + s.file_size, s.name) for s in view.sections)
    _add_regions(reader, file, found, lambda offset: prefix + layout.section_at(holders, offset), base)
    file.spans += [(a + base, b + base, prefix + section, label) for a, b, section, label in spans]
    file.problems += [(p.offset + base, p.problem, p.detail) for p in found.problems]
    if cpu is not None:
        file.functions.append(cpu[0])
        file.counts.append(cpu[1])
    if view is not None:
        file.build_id = view.build_id()
        detail = "PT_LOAD whose address and offset differ within a page: the loader refuses the file"
        file.problems += [(at + base, "misaligned_segment", detail) for at in misaligned]
    return form


def _add_regions(
    reader: Reader, file: _File, found: regions.Found, section_at: Callable[[int], str], base: int
) -> None:
    pieces: list[Code] = []
    released = 0
    things: list[Region | RawCubin] = [*found.regions, *found.cubins]
    for thing in sorted(things, key=lambda t: t.offset):
        number, at = len(file.regions), thing.offset + base
        section = section_at(thing.offset)
        if thing.offset - released > RELEASE:
            reader.release()
            released = thing.offset
        if isinstance(thing, RawCubin):
            file.regions.append((number, section, at, thing.size, 1, False, True))
            digest = _digest(reader, thing.offset, thing.size, file.options)
            sizes = (at, 0, thing.size, thing.uncompressed_size, thing.compression)
            file.elements.append((section, number, 0, None, "cubin", fatbin.CUBIN, thing.target, "", *sizes, 0, digest))
            pieces.append(Code(number, 0, thing))
            continue
        is_wrapped = thing.offset in found.wrapped
        file.regions.append((number, section, at, thing.size, len(thing.elements), is_wrapped, False))
        for index, element in enumerate(thing.elements):
            pieces.append(Code(number, index, element))
            file.elements += [(section, number, *row) for row in _element_rows(reader, file, index, element, base)]
    if file.options.kernels:
        _add_contents(reader, file, pieces, base)


def _element_rows(reader: Reader, file: _File, index: int, e: Element, base: int) -> Iterator[tuple[Any, ...]]:
    if e.kind == "unknown" and e.kind_code:  # 0: an element that was removed
        detail = f"element kind 0x{e.kind_code:x} is not known; its {e.payload_size} bytes are counted, not read"
        file.problems.append((e.offset + base, "unknown_kind", detail))
    size = e.uncompressed_size if e.is_compressed else e.payload_size
    inside = []
    if e.kind == "concat":
        try:
            inside = fatbin.members(reader, e)
        except FormatError as error:
            file.problems.append((error.offset + base, "unreadable", error.detail))
    at = e.offset + base
    digest = _digest(reader, e.offset + e.header_size, e.stored_size, file.options)
    own = size - sum(m.size for m in inside)
    yield (
        index, None, e.kind, e.kind_code, e.target, e.identifier, at, e.header_size, e.payload_size, own, e.compression,
        e.flags, digest,
    )  # fmt: skip
    for number, m in enumerate(inside):
        yield (index, number, m.kind, m.kind_code, m.target, m.identifier, at, 0, 0, m.size, e.compression, m.flags, "")


def _add_contents(reader: Reader, file: _File, pieces: list[Code], base: int) -> None:
    offsets = {(p.region, p.index): p.code.offset for p in pieces}
    for read in contents.read_all(reader, pieces, file.options.threads):
        if read.error is None:
            file.reads.append(read)
        else:
            place = offsets[read.region, read.index] + base
            file.problems.append((place, "undecodable_payload", read.error.detail))


def _frames(entry: Input, reader: Reader, file: _File, form: str, digest: str) -> Tables:
    names = {name: [c for c in TABLES[name].to_schema().columns if c != "library"] for name in TABLES}

    def frame(name: str, rows: list[tuple[Any, ...]]) -> pd.DataFrame:
        table = pd.DataFrame(rows, columns=names[name][: len(rows[0])] if rows else names[name])
        table.insert(0, "library", file.library)
        return table

    element_names = [c for c in names["elements"] if c not in ("n_kernels", "fit", "is_loadable")]
    elements = pd.DataFrame(file.elements, columns=element_names)
    elements.insert(0, "library", file.library)
    elements["member"] = elements["member"].astype("Int64")
    elements["n_kernels"] = _counts(file, elements)
    kernels, variables = _inside(file)
    if file.options.target and len(elements):
        elements = targets.fit(elements, file.options.target)
    else:
        elements = elements.assign(fit=None, is_loadable=pd.array([pd.NA] * len(elements), "boolean"))
    spans = sorted(s for s in file.spans if s[1] > s[0])
    n_rows = len(spans) + len(file.elements) + len(kernels) + len(variables)
    held = [s[2] for s in spans] + [row[0] for row in file.elements]
    reader.check_text(len(file.library) * n_rows + sum(map(len, held)))
    sections = frame("sections", [(section, label, a, b - a) for a, b, section, label in spans])
    by_label = sections.groupby("label")["size_bytes"].sum()
    n_cold = [c.n_cold for c in file.counts if c.n_cold is not None]
    library = {
        "library": file.library,
        "root": entry.root,
        "format": form,
        "file_bytes": reader.size,
        "cpu_code_bytes": int(by_label.get("cpu_code", 0)),
        "gpu_code_bytes": int(by_label.get("gpu_code", 0)),
        "function_bytes": sum(c.function_bytes for c in file.counts),
        "n_functions": sum(c.n_functions for c in file.counts),
        "n_cold": sum(n_cold) if n_cold else None,
        "n_function_names": sum(c.n_names for c in file.counts),
        "n_regions": len(file.regions),
        "n_elements": int(elements["member"].isna().sum()),
        "n_kernels": len(kernels) if file.options.kernels else None,
        "build_id": file.build_id,
        "sha256": digest,
    }
    return {
        "libraries": pd.DataFrame([library]),
        "sections": sections,
        "functions": pd.concat(file.functions, ignore_index=True) if file.functions else TABLES["functions"].none(),
        "regions": frame("regions", file.regions),
        "elements": elements,
        "kernels": kernels,
        "variables": variables,
        "problems": frame("problems", sorted(file.problems)),
    }


def _counts(file: _File, elements: pd.DataFrame) -> Any:
    """Kernels of each element row; unknown where they were not read."""
    if not file.options.kernels:
        return pd.array([pd.NA] * len(elements), "Int64")
    found = {(r.region, r.index, -1 if r.member is None else r.member): len(r.contents.kernels) for r in file.reads}
    rows = elements[["region", "element", "member"]].fillna(-1).itertuples(index=False, name=None)
    return [found.get(row, 0) for row in rows]


def _inside(file: _File) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tables `kernels` and `variables`, in file order."""
    reads = sorted(file.reads, key=lambda r: (r.region, r.index, -1 if r.member is None else r.member))
    keys = pd.DataFrame(
        {
            "library": file.library,
            "region": [r.region for r in reads],
            "element": [r.index for r in reads],
            "member": pd.array([r.member for r in reads], "Int64"),
            "target": [r.target for r in reads],
        }
    )

    def table(name: str, names: list[list[str]], size: str, sizes: list[Any]) -> pd.DataFrame:
        rows = keys.loc[np.repeat(np.arange(len(reads)), [len(n) for n in names])].reset_index(drop=True)
        rows[name] = list(chain(*names))
        rows[size] = pd.array(list(chain(*sizes)), "Int64")
        return rows

    inside = [r.contents for r in reads]
    code_bytes = [[None] * len(c.kernels) if c.code_bytes is None else c.code_bytes for c in inside]
    return (
        table("kernel", [c.kernels for c in inside], "code_bytes", code_bytes),
        table("variable", [c.variables for c in inside], "size_bytes", [c.variable_bytes for c in inside]),
    )


def _unreadable(entry: Input, error: FormatError) -> Tables:
    """A file of a folder that breaks its format: its size is still accounted for."""
    try:
        size = os.path.getsize(entry.path) if entry.member is None and os.path.isfile(entry.path) else 0
    except OSError:
        size = 0
    library: dict[str, Any] = dict.fromkeys(TABLES["libraries"].to_schema().columns, 0)
    library |= {"library": entry.library, "root": entry.root, "format": "unreadable", "file_bytes": size}
    library |= {"n_cold": None, "n_kernels": None, "build_id": "", "sha256": ""}
    section = {"section": "(unreadable)", "label": "unattributed", "offset_bytes": 0, "size_bytes": size}
    problem = {"offset_bytes": error.offset, "problem": "unreadable", "detail": error.detail}
    return {
        "libraries": pd.DataFrame([library]),
        "sections": pd.DataFrame([{"library": entry.library, **section}]),
        "problems": pd.DataFrame([{"library": entry.library, **problem}]),
    }


def _digest(reader: Reader, offset: int, size: int, options: Options) -> str:
    return hashlib.sha256(reader.view(offset, size)).hexdigest()[:16] if options.digests else ""


def sha256(reader: Reader) -> str:
    """Of the whole file, in bounded memory."""
    value = hashlib.sha256()
    for at in range(0, reader.size, _HASH_CHUNK):
        value.update(reader.view(at, min(_HASH_CHUNK, reader.size - at)))
        reader.release()
    return value.hexdigest()
