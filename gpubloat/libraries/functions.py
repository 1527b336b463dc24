"""CPU functions of one ELF file: starts from `.eh_frame`, `.symtab` and `.dynsym`, told apart from PLT stubs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from gpubloat.libraries import elf, unwind
from gpubloat.libraries.elf import Array, Elf
from gpubloat.tables.libraries import Functions

SOURCES = ("fde", "symtab", "dynsym")
# `name` is an offset into the string table of the source.
START = np.dtype([("address", "<u8"), ("size", "<u8"), ("name", "<u4"), ("source", "i1"), ("rank", "i1")])
# Object files have no addresses yet: section number << 40 gives each section a space of its own.
SECTION_SHIFT = 40


class CodeRanges(NamedTuple):
    """Executable ranges sorted by address: begins, ends (uint64), file offsets (int64), names."""

    begins: Array
    ends: Array
    offsets: Array
    names: list[str]


class Counts(NamedTuple):
    """What the row of `libraries` says about functions."""

    n_functions: int
    n_cold: int | None
    n_names: int
    function_bytes: int


def read(file: Elf, library: str, prefix: str = "", base: int = 0) -> tuple[pd.DataFrame, Counts]:
    """Table `functions` of `file`, sorted by address, and its counts.

    Every start address in an executable section is one row: an alias adds to `n_names`, a `.cold` part is a row of its
    own with `is_cold`. Addresses outside executable sections, and the stubs in `.plt*`, are left out. In files
    without sections the executable segments take their place. `prefix` and `base` place a member of an archive.
    """
    code = code_ranges(file)
    if not len(code.begins):
        return Functions.none(), Counts(0, None, 0, 0)
    starts, strings = _starts(file)
    row = np.searchsorted(code.begins, starts["address"], "right") - 1
    stub = np.array([t.startswith(".plt") for t in code.names])
    inside = (row >= 0) & (starts["address"] < code.ends[row]) & ~stub[row]
    starts, row = starts[inside], row[inside]
    # One group per address. Inside it the unwind entry comes first, then the symbol that says most.
    order = np.lexsort((starts["rank"], starts["source"], starts["address"]))
    starts, row = starts[order], row[order]
    is_first = np.ones(len(starts), bool)
    is_first[1:] = starts["address"][1:] != starts["address"][:-1]
    group = np.cumsum(is_first) - 1
    heads, head_rows = starts[is_first], row[is_first]
    n = len(heads)

    best = np.full(n, -1)
    named = np.flatnonzero(starts["source"] > 0)[::-1]  # backwards, so that the first symbol of a group stays
    best[group[named]] = named
    titles = np.full(n, "", object)
    for source, table in strings.items():
        pick = (best >= 0) & (starts["source"][best] == source)
        titles[pick] = table.names(starts["name"][best[pick]])
    # .dynsym repeats names of .symtab, so the fuller of the two tells how many names an address has.
    n_names = np.maximum(*(np.bincount(group[starts["source"] == kind], minlength=n) for kind in (1, 2)))
    sizes = heads["size"].copy()
    by_symbol = (starts["source"] > 0) & (heads["source"][group] > 0)  # no unwind entry: the largest symbol
    np.maximum.at(sizes, group[by_symbol], starts["size"][by_symbol])
    sizes = np.minimum(sizes, code.ends[head_rows] - heads["address"]).astype(np.int64)
    inner = heads["address"] - code.begins[head_rows]
    offsets = code.offsets[head_rows] + inner.astype(np.int64)
    widths = np.array([len(prefix) + len(name) for name in code.names])
    file.reader.check_text(int(widths[head_rows].sum()))
    frame = pd.DataFrame(
        {
            "library": library,
            "function": titles,
            "section": [prefix + code.names[i] for i in head_rows.tolist()],
            "address": inner if file.header.e_type == elf.ET_REL else heads["address"],
            "offset_bytes": offsets + base,
            "size_bytes": sizes,
            "boundary": np.array(SOURCES, object)[heads["source"]],
            "n_names": n_names,
            "is_cold": pd.array([is_cold(t) if t else pd.NA for t in titles.tolist()], dtype="boolean"),
        }
    )
    has_symtab = bool((starts["source"] == 1).any())
    n_cold = int(frame["is_cold"].sum()) if has_symtab else None
    return frame, Counts(n, n_cold, int(n_names.sum()), _union(offsets, sizes))


def _starts(file: Elf) -> tuple[Array, dict[int, elf.Strings]]:
    """One record (dtype START) per place that says that a function starts somewhere, and the names by source."""
    begin, length = unwind.ranges(file)
    parts = [np.zeros(len(begin), START)]
    parts[0]["address"], parts[0]["size"] = begin, length
    names = {}
    for source, sh_type in ((1, elf.SHT_SYMTAB), (2, elf.SHT_DYNSYM)):
        table, names[source] = file.symbols(sh_type)
        kind = table["st_info"] & 0xF
        wanted = ((kind == elf.STT_FUNC) | (kind == elf.STT_GNU_IFUNC)) & (table["st_shndx"] != 0)
        table, section = table[wanted], file.section_indices(sh_type)[wanted]
        part = np.zeros(len(table), START)
        part["address"], part["size"], part["name"] = table["st_value"], table["st_size"], table["st_name"]
        part["source"] = source
        if file.header.e_type == elf.ET_REL:
            # A value beyond the space of its section would be taken for a place in the next one.
            inside = table["st_value"] < 1 << SECTION_SHIFT
            part["address"] = np.where(inside, part["address"] + (section.astype(np.uint64) << SECTION_SHIFT), 0)
        bind = table["st_info"] >> 4
        part["rank"] = np.select([bind == elf.STB_GLOBAL, bind == elf.STB_WEAK], [0, 1], 2)
        parts.append(part)
    return np.concatenate(parts), names


def is_cold(name: str) -> bool:
    """GCC names the split-off part of f ``f.cold`` or ``f.cold.N``; LLVM adds ``.cold.N`` or ``.__part.N``."""
    stem, _, last = name.rpartition(".")
    return (last == "cold" and bool(stem)) or (last.isdigit() and stem.endswith((".cold", ".__part")))


def _union(starts: Array, sizes: Array) -> int:
    """Bytes covered by at least one of the ranges; `starts` is sorted within sections, so sort it first."""
    order = np.argsort(starts, kind="stable")
    start, stop = starts[order], (starts + sizes)[order]
    before = np.concatenate([[0], np.maximum.accumulate(stop)[:-1]]) if len(stop) else stop
    return int(np.maximum(stop - np.maximum(start, before), 0).sum())


def code_ranges(file: Elf) -> CodeRanges:
    """The executable sections, or segments in a file without sections, sorted by address."""
    if file.sections:
        rows = [(s.sh_addr, s.sh_size, s.sh_offset, s.name, s.index) for s in file.sections if s.is_code]
    else:
        load = file.segments[(file.segments["p_type"] == elf.PT_LOAD) & (file.segments["p_flags"] & elf.PF_X != 0)]
        rows = [(int(p["p_vaddr"]), int(p["p_filesz"]), int(p["p_offset"]), "(segment)", i) for i, p in enumerate(load)]
    if file.header.e_type == elf.ET_REL:
        rows = [(r[4] << SECTION_SHIFT, *r[1:]) for r in rows]
    kept, stop = [], 0
    for r in sorted(r for r in rows if r[0] + r[1] < 1 << 63 and r[2] + r[1] <= file.reader.size):
        if r[0] >= stop:  # overlapping sections cannot be real; the first keeps the addresses
            kept.append(r)
            stop = r[0] + r[1]
    begins = np.array([r[0] for r in kept], np.uint64)
    ends = np.array([r[0] + r[1] for r in kept], np.uint64)
    return CodeRanges(begins, ends, np.array([r[2] for r in kept], np.int64), [r[3] for r in kept])
