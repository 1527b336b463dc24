"""Find every fatbin region and raw cubin of a file, wherever it is.

Neither section names nor wrappers are complete: cuFFT keeps 266 MB in `.ldata`, cuSOLVER has regions that no wrapper
names, and a file may have no section table. So the whole file is searched for the first 8 bytes of a region header,
and a hit counts only if the whole chain of elements behind it is consistent.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from struct import Struct

import numpy as np

from gpubloat.errors import FormatError
from gpubloat.libraries import fatbin, hostdata
from gpubloat.libraries.elf import ET_REL, SHT_PROGBITS, Elf
from gpubloat.libraries.fatbin import Region
from gpubloat.libraries.hostdata import CHUNK, RELEASE, RawCubin
from gpubloat.libraries.reader import Problem, Range, Reader

MAX_REGIONS = 1 << 18  # cuBLASLt, the library with most of them, has 2,782
MAX_LISTED = 1 << 16  # pointers in all the lists of version 2 wrappers; NCCL has 128
NAMED = (".nv_fatbin", "__nv_relfatbin")
HIP = ".hip_fatbin"  # code objects of AMD GPUs (LLVM, CGCUDANV.cpp)
WRAPPER = np.dtype([("magic", "<u4"), ("version", "<u4"), ("data", "<u8"), ("list", "<u8")])
WRAPPER_MAGIC = 0x466243B1
_UPX = b"UPX!"
_U64 = Struct("<Q")


@dataclass(slots=True)
class Found:
    """All regions in file order, raw cubins, the offsets that wrappers point at, and problems."""

    regions: list[Region] = field(default_factory=list)
    cubins: list[RawCubin] = field(default_factory=list)
    wrapped: set[int] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)


def find(reader: Reader, elf: Elf | None) -> Found:
    """Search a file. `elf` is its ELF view, or None for other bytes."""
    found = Found()
    named = _merged([(s.sh_offset, s.sh_offset + s.file_size) for n in NAMED for s in elf.named(n)]) if elf else []
    trials = _Trials(reader)
    _search_regions(reader, named, trials, found)
    if elf is not None:
        _follow_wrappers(reader, elf, trials, found)
    _explain_rest(reader, named, found)
    found.cubins, problems = hostdata.search(reader, _data_places(reader, elf, found))
    found.problems += problems
    for section in elf.named(HIP) if elf else ():
        detail = f"{section.file_size} bytes of AMD GPU code in {HIP}: counted as data, not analysed"
        found.problems.append(Problem(section.sh_offset, "other_vendor", detail))
    if elf is not None and not elf.sections:
        at = bytes(reader.view(0, min(CHUNK, reader.size))).find(_UPX)
        if at >= 0:
            found.problems.append(Problem(at, "packed", "packed with UPX: the content was not analysed"))
    return found


class _Trials:
    """Try to read regions. What failed tries cost together is bounded: nested false headers, each with a long chain
    of elements behind it, would take time that is quadratic in the size of the file."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.left = 2 * reader.size + CHUNK

    def region(self, offset: int) -> Region | FormatError:
        try:
            return fatbin.region(self.reader, offset)
        except FormatError as error:
            self.charge(offset, error.offset - offset)
            return error

    def charge(self, offset: int, size: int) -> None:
        self.left -= size + 64
        if self.left < 0:
            raise self.reader.error(offset, "more false fatbin headers than a real file can have")


def _merged(ranges: list[Range]) -> list[Range]:
    """Sorted and disjoint ranges that cover the same bytes."""
    result: list[Range] = []
    for start, stop in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        elif stop > start:
            result.append((start, stop))
    return result


def _holds(ranges: list[Range], offset: int) -> bool:
    index = bisect_right(ranges, (offset, 1 << 64)) - 1
    return index >= 0 and offset < ranges[index][1]


def _gaps(spans: list[Range], places: list[Range]) -> Iterator[Range]:
    """What `spans` leave of `places`; both are sorted and disjoint."""
    stops = [stop for _, stop in spans]
    for at, end in places:
        index = bisect_right(stops, at)
        while index < len(spans) and spans[index][0] < end:
            if spans[index][0] > at:
                yield at, spans[index][0]
            at = spans[index][1]
            index += 1
        if at < end:
            yield at, end


def _search_regions(reader: Reader, named: list[Range], trials: _Trials, found: Found) -> None:
    start = at = released = 0  # `at`: no region can start before it any more
    while start + 8 <= reader.size:
        # Regions follow each other: look at the very next place first, and search only where there is none.
        is_next = reader.unpack(_U64, start, "word")[0] == fatbin.SIGNATURE
        stop = start + (8 if is_next else CHUNK)
        for place in [start] if is_next else _signatures(reader, start):
            if place < at:
                continue  # inside a region
            region = trials.region(place)
            if isinstance(region, FormatError):
                if _holds(named, place):
                    found.problems.append(Problem(region.offset, "unreadable", region.detail))
                continue
            found.regions.append(region)
            if len(found.regions) > MAX_REGIONS:
                raise reader.error(place, f"more than {MAX_REGIONS} fatbin regions")
            at = (place + region.size + 7) // 8 * 8
        start = max(stop, at)
        if start - released > RELEASE:
            reader.release()
            released = start


def _signatures(reader: Reader, start: int) -> list[int]:
    """Multiples of 8 in the chunk at `start` that hold the first 8 bytes of a region header."""
    window = np.frombuffer(reader.view(start, min(CHUNK, (reader.size - start) // 8 * 8)), np.uint8)
    if window.ctypes.data % 8:  # a member of an archive can lie anywhere
        window = window.copy()
    return [start + 8 * hit for hit in np.flatnonzero(window.view("<u8") == fatbin.SIGNATURE).tolist()]


def _follow_wrappers(reader: Reader, elf: Elf, trials: _Trials, found: Found) -> None:
    """Match the wrappers of `.nvFatBinSegment` (versions 1 and 2) with the regions, both ways."""
    if elf.header.e_type == ET_REL:
        return  # the pointers are not filled in yet
    known = {r.offset for r in found.regions}
    tried: set[int] = set()
    lists: set[int] = set()
    for section in elf.named(".nvFatBinSegment"):
        table = reader.array(WRAPPER, section.sh_offset, section.sh_size // WRAPPER.itemsize, "fatbin wrappers")
        rows = np.flatnonzero(table["magic"] == WRAPPER_MAGIC)
        if len(rows) > MAX_REGIONS:
            raise reader.error(section.sh_offset, f"more than {MAX_REGIONS} fatbin wrappers")
        for row in rows.tolist():
            at = section.sh_offset + row * WRAPPER.itemsize
            address = section.sh_addr + row * WRAPPER.itemsize
            _, version, pointer, second = table[row].tolist()
            if version not in (1, 2):
                found.problems.append(Problem(at, "unknown_version", f"fatbin wrapper of version {version}"))
                continue
            pointers = [_pointer(elf, pointer, address + 8)]
            if version == 2:
                pointers += _prelinked(reader, elf, _pointer(elf, second, address + 16), lists)
            for target in elf.file_offsets(np.array(pointers, np.uint64)).tolist():
                if target >= 0 and target not in known and target not in tried:
                    tried.add(target)
                    if _add_region(trials, target, found):
                        known.add(target)
                if target in known:
                    found.wrapped.add(target)
                else:
                    detail = "fatbin wrapper points at no fatbin region"
                    found.problems.append(Problem(at, "wrapper_without_region", detail))


def _add_region(trials: _Trials, offset: int, found: Found) -> bool:
    """Add the region at `offset`, which the search has missed (it is not aligned), unless it overlaps another."""
    region = trials.region(offset)
    if isinstance(region, FormatError):
        return False
    index = bisect_right(found.regions, offset, key=lambda r: r.offset)
    overlaps = index > 0 and found.regions[index - 1].offset + found.regions[index - 1].size > offset
    if overlaps or (index < len(found.regions) and found.regions[index].offset < offset + region.size):
        trials.charge(offset, region.size)
        return False
    insort(found.regions, region, key=lambda r: r.offset)
    return True


def _pointer(elf: Elf, value: int, place: int) -> int:
    """A pointer in the file: the bytes if the linker filled them in, else the addend of its relocation."""
    if value:
        return value
    places, addends = elf.relative_addends
    index = int(np.searchsorted(places, np.uint64(place)))
    return max(int(addends[index]), 0) if index < len(places) and int(places[index]) == place else 0


def _prelinked(reader: Reader, elf: Elf, address: int, seen: set[int]) -> list[int]:
    """Wrapper version 2: a null-ended array of pointers to regions that are input of the device linker.

    Places in `seen` were read for another wrapper and are not read again.
    """
    found: list[int] = []
    while address and address not in seen and len(seen) < MAX_LISTED:
        seen.add(address)
        offset = int(elf.file_offsets(np.array([address], np.uint64))[0])
        if offset < 0 or offset + 8 > reader.size:
            break
        pointer = _pointer(elf, reader.unpack(_U64, offset, "fatbin pointer")[0], address)
        if not pointer:
            break
        found.append(pointer)
        address += 8
    return found


def _explain_rest(reader: Reader, named: list[Range], found: Found) -> None:
    """Bytes of the fatbin sections that belong to no region: say what they are, once for each gap."""
    spans = [(r.offset, r.offset + r.size) for r in found.regions]
    seen = sorted(p.offset for p in found.problems)
    for a, b in _gaps(spans, named):
        a += -a % 8
        is_explained = bisect_left(seen, a) < bisect_left(seen, b)
        if b - a < 16 or is_explained or not np.frombuffer(reader.view(a, b - a), np.uint8).any():
            continue
        try:
            fatbin.region(reader, a)
        except FormatError as error:
            old = _U64.unpack_from(reader.view(a, 8))[0] & 0xFFFFFFFF == fatbin.OLD_MAGIC
            kind = "old_magic" if old else "unknown_version" if "version" in error.detail else "unreadable"
            found.problems.append(Problem(a, kind, f"{b - a} bytes of a fatbin section: {error.detail}"))


def _data_places(reader: Reader, elf: Elf | None, found: Found) -> list[Range]:
    """Where host data is: not in regions, nor in executable sections (instruction bytes imitate anything), nor in
    debug data and names."""
    spans = [(r.offset, r.offset + r.size) for r in found.regions]
    if elf is None:
        return list(_gaps(spans, [(0, reader.size)]))
    if not elf.sections:
        return list(_gaps(spans, [(1, reader.size)]))  # the ELF header itself is no find
    skip = (".debug", ".eh_frame", ".comment", ".strtab", ".shstrtab", ".note", ".gnu_debugdata", HIP)
    places = [
        (s.sh_offset, s.sh_offset + s.sh_size)
        for s in elf.sections
        if s.sh_type == SHT_PROGBITS and not s.is_code and not s.name.startswith(skip)
    ]
    return list(_gaps(spans, _merged(places)))
