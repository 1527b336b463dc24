"""What runs used x the layout of a library -> the ranges of its file to remove, each with a reason.

Rules, conservative throughout; what is not known is kept.

Elements of fatbins
  used            kept: any evidence of any run counts, a page shared with a neighbour and a variable included.
  reason I        `other_architecture`: the driver would give it to none of the targets (`tables.targets.fit`, for each
                  target in its region, removed if all agree). So PTX goes that is too new, or that stands beside
                  machine code which fits.
  reason II       `unused_element`: cubins and PTX that a target could be given, if every run that loaded the library
                  recorded the use of GPU code. Without a known target (CUDA was never initialised) they all are unused.
                  Where first touches of pages are the only record, an element that touches no whole page of a watched
                  section is not known. A target that no run ran on keeps what it could be given.
  LTO-IR, relocatable PTX, tile IR, all of `__nv_relfatbin`, raw cubins in host data
                  what reads these calls no driver function that a trace sees, but it reads them: reason II if first
                  touches of their pages were recorded in every run and there was none. Raw cubins never for reason I.
  concatenated    removed as a whole or not at all: reason I if no member fits, reason II like a cubin.
  unknown kinds   kept always: nothing tells the driver's rule for them.
A range is the payload, and the kind in the header, which becomes 0: the driver then passes over the element. The rest
of the header stays (a zeroed one sends the driver into an endless loop). Without the kind, an eager driver would try
the zeroed code and report an invalid image when CUDA starts.
Libraries of the driver belong to the host, not to the environment: nothing of them is removed (`names.is_driver`).

Functions (x86-64 only: elsewhere the fill would be no trap)
  removed as `unused_function` if the library's functions were watched in every run that loaded it, no run entered it,
  its bounds come from the unwind table or a sized symbol, and nothing else starts or lies inside. Kept always: `.init`,
  `.fini`, `.plt*`; what the loader calls itself (`entries.fixed`); cold parts of functions in use, by name, and by the
  jumps into them where no name tells; code that a function in use jumps into, or takes an address of, behind its start;
  all of the run-time support of compilers (`RUNTIMES`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from gpubloat.libraries import elf, entries
from gpubloat.libraries.elf import PAGE, Array, Elf
from gpubloat.libraries.functions import code_ranges
from gpubloat.libraries.reader import Reader
from gpubloat.libraries.union import Usage
from gpubloat.tables import targets

CPU, GPU = 1, 2  # what a range was: a function body, now 0xCC; the payload of an element, now zero
RANGE = np.dtype([("offset", "<u8"), ("size", "<u8"), ("kind", "<u4"), ("id", "<u4")])
ENDBR64 = b"\xf3\x0f\x1e\xfa"
# In libtorch_cpu 38 of 275 MB of functions are assembly of MKL that only symbols describe.
BOUNDED_BY = ("fde", "symtab", "dynsym")
LINKER_INPUT = ("lto_ir", "relocatable_ptx", "tile_ir")
RELOCATABLE = "__nv_relfatbin"
# By first touch of their pages; the list of native/audit/sites.c.
WATCHED_SECTIONS = (".nv_fatbin", RELOCATABLE, ".ldata", ".lrodata", ".cask_resource")
_KIND_BYTES = 2  # the first field of an element header
# Run-time support of compilers: which of its paths run depends on timing and on errors more than on the program. Two
# runs of one torch program differ in libgomp's waits, and in how libgfortran ends by what standard input is.
RUNTIMES = ("libgomp", "libiomp5", "libomp", "libtbb", "libgcc_s", "libstdc++", "libc++", "libgfortran", "libquadmath")
COLUMNS = ("what", "offset_bytes", "size_bytes", "region", "element", "reason")


@dataclass(slots=True)
class Plan:
    """What goes from one library.

    `removed` is the table of that name without `library`, sorted by offset; `ranges` (dtype RANGE) is its bytes, and
    the kinds of its elements, sorted and disjoint, with `id` the row number; `n_unknown` counts functions kept for want
    of knowledge.
    """

    removed: pd.DataFrame
    ranges: Array
    n_unknown: int


def plan(
    reader: Reader, tables: dict[str, pd.DataFrame], usage: Usage | None, wanted: Sequence[str] | None = None
) -> Plan:
    """The ranges to remove from the file that `reader` holds.

    Parameters
    ----------
    tables : scan tables of this file: regions, elements, functions.
    usage : what runs used; None to remove by target alone, which leaves functions alone.
    wanted : GPUs to keep code for, such as ``sm_90``; default, those of the runs.
    """
    keep_for = list(wanted or ())
    if wanted is None and usage is not None:
        # A run whose GPU nobody knows could have been given anything.
        keep_for = sorted(usage.targets) if usage.is_target_known else []
    parts = [elements(tables["elements"], tables["regions"], usage, keep_for)]
    n_unknown = len(tables["functions"])
    is_runtime = os.path.basename(reader.path).startswith(RUNTIMES)
    if usage is not None and not usage.cpu_problem and n_unknown and not is_runtime:
        found, n_unknown = functions(reader, tables["functions"], tables["regions"], usage)
        parts.append(found)
    removed = pd.concat([p for p in parts if len(p)] or parts[:1], ignore_index=True)
    removed = removed.sort_values("offset_bytes", kind="stable", ignore_index=True)
    header = _headers(removed, tables["elements"])
    is_sound = _disjoint(removed, header, reader.size)
    removed = removed[is_sound].reset_index(drop=True)
    return Plan(removed, _ranges(removed, header[is_sound]), n_unknown)


def _headers(removed: pd.DataFrame, table: pd.DataFrame) -> Array:
    """Bytes of the header in front of each row of `removed`: 0 for functions and for cubins without a fatbin."""
    outer = table.loc[table["member"].isna(), ["offset_bytes", "header_bytes"]]
    sizes = dict(zip(outer["offset_bytes"] + outer["header_bytes"], outer["header_bytes"]))
    header = removed["offset_bytes"].map(sizes).fillna(0).to_numpy(np.int64)
    found: Array = np.where(removed["what"] == "element", header, 0)
    return found


def _ranges(removed: pd.DataFrame, header: Array) -> Array:
    """Bodies and payloads, and the kind in the header of each element that has one."""
    ranges = np.zeros(len(removed), RANGE)
    ranges["offset"], ranges["size"] = removed["offset_bytes"], removed["size_bytes"]
    ranges["kind"] = np.where(removed["what"] == "function", CPU, GPU)
    ranges["id"] = np.arange(len(removed))
    is_headed = header >= _KIND_BYTES
    kinds = ranges[is_headed].copy()
    kinds["offset"] -= header[is_headed].astype(np.uint64)
    kinds["size"] = _KIND_BYTES
    return np.sort(np.concatenate([ranges, kinds]), order="offset")


def elements(table: pd.DataFrame, regions: pd.DataFrame, usage: Usage | None, wanted: Sequence[str]) -> pd.DataFrame:
    """Rows of `removed` for the elements of one library. `usage` None: by target alone, reason I only."""
    is_outer = table["member"].isna().to_numpy(bool)
    outer = table[is_outer]
    raw = dict(zip(regions["region"].tolist(), regions["is_raw_cubin"].tolist()))
    is_raw = np.array([raw.get(region, True) for region in outer["region"].tolist()], bool)
    not_known = (outer["payload_bytes"] == 0).to_numpy() | (outer["kind"] == "unknown").to_numpy()
    kept = not_known | _used(outer, usage)
    fits = {t: targets.fit(table, t)["is_loadable"].to_numpy(bool)[is_outer] for t in wanted}
    other = np.logical_and.reduce([~f for f in fits.values()]) if fits else np.zeros(len(outer), bool)
    other &= ~is_raw
    unused = np.zeros(len(outer), bool)
    if usage is not None and usage.is_gpu_known:
        section = outer["section"].map(lambda name: name.rpartition(":")[2])
        by_others = is_raw | (outer["kind"].isin(LINKER_INPUT) | (section == RELOCATABLE)).to_numpy()
        touch = _would_be_touched(outer, section)
        unused = np.where(by_others, touch & usage.is_watched, touch | usage.is_gpu_complete)
        run_on = {targets.gpu(t) for t in usage.targets}
        for target, fit in fits.items():
            if targets.gpu(target) not in run_on:
                unused &= ~fit
    picked = (other | unused) & ~kept
    rows = outer[picked]
    return pd.DataFrame(
        {
            "what": "element",
            "offset_bytes": rows["offset_bytes"] + rows["header_bytes"],
            "size_bytes": rows["payload_bytes"],
            "region": rows["region"].astype("Int64"),
            "element": rows["element"].astype("Int64"),
            "reason": np.where(other[picked], "other_architecture", "unused_element"),
        },
        columns=list(COLUMNS),
    )


def _used(outer: pd.DataFrame, usage: Usage | None) -> Array:
    if usage is None:
        return np.zeros(len(outer), bool)
    known = [pair in usage.elements for pair in zip(outer["region"].tolist(), outer["element"].tolist())]
    return np.array(known, bool) | outer["offset_bytes"].isin(usage.headers).to_numpy(bool)


def _would_be_touched(outer: pd.DataFrame, section: pd.Series[str]) -> Array:
    """Elements on whole pages of watched sections: reading them is seen by first touch."""
    start = outer["offset_bytes"] + outer["header_bytes"]
    stop = start + outer["payload_bytes"]
    first = -(-outer["offset_bytes"].groupby(section).transform("min") // PAGE) * PAGE
    last = stop.groupby(section).transform("max") // PAGE * PAGE
    return (section.isin(WATCHED_SECTIONS) & (stop > first) & (start < last)).to_numpy(bool)


def functions(reader: Reader, table: pd.DataFrame, regions: pd.DataFrame, usage: Usage) -> tuple[pd.DataFrame, int]:
    """Rows of `removed` for the functions of one library, and how many are kept since too little is known of them."""
    table = table.sort_values("address", kind="stable")
    file = Elf(reader) if bytes(reader.view(0, min(4, reader.size))) == elf.MAGIC else None
    if file is None or file.header.e_machine != entries.EM_X86_64 or file.header.e_type == elf.ET_REL:
        return _rows(table.iloc[:0]), len(table)
    address = table["address"].to_numpy(np.int64)
    offset = table["offset_bytes"].to_numpy()
    is_fde = (table["boundary"] == "fde").to_numpy(bool)
    size = _without_marks(reader, offset, table["size_bytes"].to_numpy().copy(), is_fde)
    used = np.isin(offset, usage.functions)
    stubs = table["section"].isin([".init", ".fini"]) | table["section"].str.startswith(".plt")
    bounded = table["boundary"].isin(BOUNDED_BY).to_numpy(bool) & (size > 0) & ~stubs.to_numpy(bool)
    bounded &= _is_code(file, offset, size)
    bounded &= ~_entered_inside(offset, size, np.concatenate([offset, usage.functions]))
    bounded &= ~np.isin(address, entries.fixed(file).astype(np.int64))
    bounded &= ~_overlaps(offset, size, regions["offset_bytes"].to_numpy(), regions["size_bytes"].to_numpy())
    candidate = bounded & ~used
    candidate &= ~_cold_of_used(table, used)
    is_cold = table["is_cold"].astype("Int8").fillna(2).to_numpy(np.int8, copy=True)
    is_cold[~is_fde] = 1  # assembly jumps where it likes: each jump into it counts, as into a cold part
    # A cold part that is in use jumps, too: look until nothing new is found.
    looked = np.zeros(len(table), bool)
    while (sources := ~candidate & ~looked).any():
        looked |= sources
        candidate &= ~entries.jumped_into(reader, address, offset, size, sources, is_cold)
    candidate &= ~_overlaps(offset, size, offset[~candidate], size[~candidate])
    return _rows(table.assign(size_bytes=size)[candidate]), int((~used & ~bounded).sum())


def _is_code(file: Elf, offset: Array, size: Array) -> Array:
    """Whether a range lies in one executable section of the file: a damaged table can say anything."""
    code = code_ranges(file)
    order = np.argsort(code.offsets)
    begins = code.offsets[order]
    ends = begins + (code.ends - code.begins).astype(np.int64)[order]
    row = np.searchsorted(begins, offset, "right") - 1
    if not len(begins):
        return np.zeros(len(offset), bool)
    found: Array = (row >= 0) & (size <= ends[row] - offset)
    return found


def _without_marks(reader: Reader, offset: Array, size: Array, is_fde: Array) -> Array:
    """Hand-written functions (1,124 of MKL in libtorch_cpu) have an unwind entry that leaves out the leading
    ``endbr64``: a symbol four bytes in front of it names the same function. Such a symbol gets the size of that mark.
    """
    end = offset + size
    pairs = np.flatnonzero(~is_fde[:-1] & is_fde[1:] & (offset[1:] == offset[:-1] + 4) & (end[1:] == end[:-1]))
    marks = [row for row in pairs.tolist() if bytes(reader.view(int(offset[row]), 4)) == ENDBR64]
    size[marks] = 4
    return size


def _rows(table: pd.DataFrame) -> pd.DataFrame:
    nothing = pd.array([pd.NA] * len(table), "Int64")
    columns = {
        "what": "function",
        "offset_bytes": table["offset_bytes"].to_numpy(),
        "size_bytes": table["size_bytes"].to_numpy(),
        "region": nothing,
        "element": nothing,
        "reason": "unused_function",
    }
    return pd.DataFrame(columns, columns=list(COLUMNS), index=range(len(table)))


def _entered_inside(offset: Array, size: Array, starts: Array) -> Array:
    """Whether one of `starts` lies strictly inside [offset, offset + size)."""
    starts = np.unique(starts)
    following = np.searchsorted(starts, offset, "right")
    return (following < len(starts)) & (starts[np.minimum(following, len(starts) - 1)] < offset + size)


def _overlaps(offset: Array, size: Array, others: Array, sizes: Array) -> Array:
    """Whether a range shares a byte with one of the others (none of which holds bytes outside int64)."""
    order = np.argsort(others, kind="stable")
    begin, reach = others[order], np.maximum.accumulate((others + sizes)[order])
    before = np.searchsorted(begin, offset + size, "left") - 1  # the last that begins in front of the range's end
    if not len(begin):
        return np.zeros(len(offset), bool)
    return (before >= 0) & (reach[np.maximum(before, 0)] > offset)


def _cold_of_used(table: pd.DataFrame, used: Array) -> Array:
    """Cold parts whose name is that of a used function with an ending: ``f.cold``, ``f.cold.1``, ``f.__part.2``."""
    cold = table["is_cold"].fillna(False).to_numpy(bool)
    names = set(table["function"][used]) - {""}
    parents = table["function"][cold].str.replace(r"(\.cold|\.__part)(\.\d+)?$", "", regex=True)
    cold[cold] = parents.isin(names)
    return cold


def _disjoint(removed: pd.DataFrame, header: Array, file_size: int) -> Array:
    """Rows that lie in the file and, headers included, behind all before them. Only damaged files have others."""
    start = removed["offset_bytes"].to_numpy(np.int64)
    size = removed["size_bytes"].to_numpy(np.int64)
    is_inside: Array = (start <= file_size) & (size <= file_size - np.minimum(start, file_size)) & (header <= start)
    stop = np.where(is_inside, start + np.minimum(size, file_size), 0)
    before = np.concatenate([[0], np.maximum.accumulate(stop)[:-1]]) if len(stop) else stop
    found: Array = is_inside & (start - header >= before)
    return found
