"""Give every byte of a file one label, so that the sum is the file size on every input."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from gpubloat.libraries.elf import EHDR, PF_W, PF_X, PHDR, PT_LOAD, SHDR, SHF_WRITE, Array, Elf, Section
from gpubloat.libraries.reader import Reader
from gpubloat.libraries.regions import Found

_SYMBOL_TYPES = {2, 3, 5, 11, 18, 0x6FFFFFF6, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF}  # SYMTAB ... GNU_versym
_RELOCATION_TYPES = {4, 9, 19, 0x6FFFFF00}  # RELA, REL, RELR, Android RELR
_CHUNK = 16 << 20


class Span(NamedTuple):
    """A labelled range of the file: [start, stop)."""

    start: int
    stop: int
    section: str
    label: str


def spans(reader: Reader, elf: Elf | None, found: Found) -> list[Span]:
    """Disjoint spans in file order that cover [0, file size). Earlier layers win over later ones."""
    gpu = [(r.offset, r.offset + r.size) for r in found.regions] + [(c.offset, c.offset + c.size) for c in found.cubins]
    sections = [] if elf is None else [s for s in elf.sections if s.file_size]
    layers = [
        # First, so that the elements add up to the GPU code also where a crafted file has headers inside a region.
        [Span(a, b, "", "gpu_code") for a, b in gpu],
        _headers(elf),
        [Span(s.sh_offset, s.sh_offset + s.file_size, s.name, label(s)) for s in sections],
        _segments(elf),
    ]
    painted = _paint(layers, reader.size)
    holders = sorted((s.sh_offset, s.sh_offset + s.file_size, s.name) for s in sections)
    result: list[Span] = []
    for span in painted:
        if not span.label:
            span = _leftover(reader, span)
        elif span.label == "gpu_code":
            span = span._replace(section=section_at(holders, span.start))
        last = result[-1] if result else None
        if last and (last.section, last.label, last.stop) == (span.section, span.label, span.start):
            result[-1] = last._replace(stop=span.stop)
        else:
            result.append(span)
    return result


def section_at(holders: list[tuple[int, int, str]], offset: int) -> str:
    """Name of the section in `holders` (start, stop, name; sorted) that holds `offset`."""
    index = bisect_right(holders, (offset, 1 << 64, "")) - 1
    if index >= 0 and holders[index][0] <= offset < holders[index][1]:
        return holders[index][2]
    return "(no section)"


def label(section: Section) -> str:
    """What a section is for, by its flags and type first and its name second."""
    name = section.name
    if section.is_code:
        return "cpu_code"
    if section.sh_type in _SYMBOL_TYPES or name in (".strtab", ".shstrtab", ".hash"):
        return "symbols"
    if section.sh_type in _RELOCATION_TYPES:
        return "relocations"
    if name.startswith((".debug", ".zdebug", ".gdb_index", ".stab")):
        return "debug"
    if name.startswith((".eh_frame", ".gcc_except_table", ".ARM.ex")):
        return "unwind"
    if section.sh_type == 7 or name.startswith((".note", ".comment", ".interp", ".gnu_debug", ".SUNW")):
        return "notes"
    return "data" if section.sh_flags & SHF_WRITE else "read_only_data"


def _headers(elf: Elf | None) -> list[Span]:
    if elf is None:
        return []
    head = elf.header
    tables = [
        (0, EHDR.size, "(ELF header)"),
        (head.e_phoff, head.e_phnum * PHDR.itemsize, "(program headers)"),
        (head.e_shoff, head.e_shnum * SHDR.itemsize, "(section headers)"),
    ]
    return [Span(at, at + size, name, "headers") for at, size, name in tables if size]


def _segments(elf: Elf | None) -> list[Span]:
    """What the loader maps, in a file without sections; with sections, bytes between them are nobody's."""
    if elf is None or elf.sections:
        return []
    found = []
    for p in elf.segments[elf.segments["p_type"] == PT_LOAD]:
        at, size, flags = int(p["p_offset"]), int(p["p_filesz"]), int(p["p_flags"])
        kind = "cpu_code" if flags & PF_X else "data" if flags & PF_W else "read_only_data"
        found.append(Span(at, at + size, "(segment)", kind))
    return found


def _paint(layers: Iterable[list[Span]], size: int) -> list[Span]:
    """Cut the layers at all their boundaries and give each piece to the first layer that covers it."""
    made = [_disjoint(layer, size) for layer in layers]
    edges = np.unique(np.concatenate([np.array([0, size]), *[m[:, :2].ravel() for m in made if len(m)]]))
    starts = edges[:-1]
    owner = np.full((len(starts), 2), -1)  # (layer, index in the layer)
    for number, table in enumerate(made):
        if not len(table):
            continue
        row = np.maximum(np.searchsorted(table[:, 0], starts, "right") - 1, 0)
        covered = (table[row, 0] <= starts) & (starts < table[row, 1]) & (owner[:, 0] < 0)
        owner[covered] = np.column_stack([np.full(len(starts), number), table[row, 2]])[covered]
    layers = list(layers)
    result = []
    for start, stop, (layer, index) in zip(starts.tolist(), edges[1:].tolist(), owner.tolist(), strict=True):
        span = layers[layer][index] if layer >= 0 else Span(0, 0, "(no section)", "")
        result.append(span._replace(start=start, stop=stop))
    return result


def _disjoint(layer: list[Span], size: int) -> Array:
    """(start, stop, index) sorted by start; where spans overlap, the one that starts first keeps the bytes."""
    table = np.array([(min(s.start, size), min(s.stop, size), i) for i, s in enumerate(layer)], np.int64).reshape(-1, 3)
    table = table[np.argsort(table[:, 0], kind="stable")]
    if len(table):
        before = np.concatenate([[0], np.maximum.accumulate(table[:, 1])[:-1]])
        table[:, 0] = np.maximum(table[:, 0], before)
    return table[table[:, 1] > table[:, 0]]


def _leftover(reader: Reader, span: Span) -> Span:
    """Bytes that belong to nothing: zeros are padding, anything else is said to be unattributed."""
    for at in range(span.start, span.stop, _CHUNK):
        if np.frombuffer(reader.view(at, min(_CHUNK, span.stop - at)), np.uint8).any():
            return span._replace(label="unattributed")
        reader.release()
    return span._replace(label="padding")
