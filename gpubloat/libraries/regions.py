"""Find every fatbin region and raw cubin of a file, wherever it is.

Neither section names nor wrappers are complete: cuFFT keeps 266 MB in `.ldata`, cuSOLVER has regions that no wrapper
names, and a file may have no section table. So the whole file is searched for the first 8 bytes of a region header,
and a hit counts only if the whole chain of elements behind it is consistent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import Struct

import numpy as np

from gpubloat.errors import FormatError
from gpubloat.libraries import cubin, fatbin
from gpubloat.libraries.elf import ET_REL, SHT_NOBITS, Elf
from gpubloat.libraries.fatbin import Region
from gpubloat.libraries.reader import Reader

CHUNK = 1 << 20
RELEASE = 32 << 20  # bytes searched between two releases of mapped pages
MAX_REGIONS = 1 << 20
NAMED = (".nv_fatbin", "__nv_relfatbin", ".hip_fatbin")
WRAPPER = Struct("<IIQQ")
WRAPPER_MAGIC = 0x466243B1
CUBIN_IDENT = b"\x7fELF\x02\x01\x01"
_CLAIMS = {b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\x00": "xz", b"\x1f\x8b\x08": "gzip", b"7z\xbc\xaf\x27\x1c": "7z"}
_U64 = Struct("<Q")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something found that could not be read or understood: a row of the table `problems`."""

    offset: int
    problem: str
    detail: str


@dataclass(slots=True)
class Found:
    """All regions in file order, raw cubins as (offset, size), the regions that wrappers point at, and problems."""

    regions: list[Region] = field(default_factory=list)
    cubins: list[tuple[int, int]] = field(default_factory=list)
    wrapped: set[int] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)


def find(reader: Reader, elf: Elf | None) -> Found:
    """Search a file. `elf` is its ELF view, or None for other bytes."""
    found = Found()
    named = [(s.sh_offset, s.sh_offset + s.file_size) for n in NAMED for s in elf.named(n)] if elf else []
    _search_regions(reader, named, found)
    if elf is not None:
        _follow_wrappers(reader, elf, found)
    found.regions.sort(key=lambda r: r.offset)
    _explain_rest(reader, named, found)
    _search_data(reader, elf, found)
    return found


def _search_regions(reader: Reader, named: list[tuple[int, int]], found: Found) -> None:
    at = wasted = released = 0
    while at + 8 <= reader.size:
        # Regions follow each other: look at the next place first, search only where there is none.
        window = reader.view(at, min(CHUNK, (reader.size - at) // 8 * 8))
        if _U64.unpack_from(window)[0] == fatbin.SIGNATURE:
            hits = [0]
        else:
            words = np.frombuffer(window, np.uint8)
            if words.ctypes.data % 8:
                words = words.copy()
            hits = (np.flatnonzero(words.view("<u8") == fatbin.SIGNATURE) * 8).tolist()
        stop = at + len(window)
        for hit in hits:
            place = at + hit if hit else at
            if found.regions and place < found.regions[-1].offset + found.regions[-1].size:
                continue
            try:
                found.regions.append(fatbin.region(reader, place))
            except FormatError as error:
                wasted += error.offset - place + 64
                if wasted > 2 * reader.size + CHUNK:
                    raise reader.error(place, "more false fatbin headers than a real file can have") from None
                if any(a <= place < b for a, b in named):
                    found.problems.append(Problem(error.offset, "unreadable", error.detail))
                if hits == [0] and hit == 0:
                    stop = at + 8
                continue
            if len(found.regions) > MAX_REGIONS:
                raise reader.error(place, f"more than {MAX_REGIONS} fatbin regions")
            stop = max(found.regions[-1].offset + found.regions[-1].size, stop if len(hits) > 1 else 0)
            stop = (stop + 7) // 8 * 8
            if hits == [0]:
                break
        if stop - released > RELEASE:
            reader.release()
            released = stop
        at = stop


def _follow_wrappers(reader: Reader, elf: Elf, found: Found) -> None:
    """Match the wrappers of `.nvFatBinSegment` (versions 1 and 2) with the regions, both ways."""
    if elf.header.e_type == ET_REL:
        return  # the pointers are not filled in yet
    known = {r.offset for r in found.regions}
    for section in elf.named(".nvFatBinSegment"):
        for at in range(section.sh_offset, section.sh_offset + section.sh_size - WRAPPER.size + 1, WRAPPER.size):
            magic, version, pointer, second = reader.unpack(WRAPPER, at, "fatbin wrapper")
            if magic != WRAPPER_MAGIC:
                continue
            if version not in (1, 2):
                found.problems.append(Problem(at, "unknown_version", f"fatbin wrapper of version {version}"))
                continue
            address = section.sh_addr + at - section.sh_offset
            pointers = [_pointer(elf, pointer, address + 8)]
            if version == 2:
                pointers += _prelinked(reader, elf, _pointer(elf, second, address + 16))
            for target in elf.file_offsets(np.array(pointers, np.uint64)).tolist():
                if target not in known and target >= 0 and (region := fatbin.is_region(reader, target)):
                    found.regions.append(region)
                    known.add(target)
                if target in known:
                    found.wrapped.add(target)
                else:
                    detail = "fatbin wrapper points at no fatbin region"
                    found.problems.append(Problem(at, "wrapper_without_region", detail))


def _pointer(elf: Elf, value: int, place: int) -> int:
    """A pointer in the file: the bytes if the linker filled them in, else the addend of its relocation."""
    if value:
        return value
    places, addends = elf.relative_addends
    index = int(np.searchsorted(places, place))
    return max(int(addends[index]), 0) if index < len(places) and int(places[index]) == place else 0


def _prelinked(reader: Reader, elf: Elf, address: int) -> list[int]:
    """Wrapper version 2: a null-ended array of pointers to regions that are input of the device linker."""
    found: list[int] = []
    while address and len(found) < MAX_REGIONS:
        offset = int(elf.file_offsets(np.array([address], np.uint64))[0])
        if offset < 0 or offset + 8 > reader.size:
            break
        pointer = _pointer(elf, reader.unpack(_U64, offset, "fatbin pointer")[0], address)
        if not pointer:
            break
        found.append(pointer)
        address += 8
    return found


def _gaps(spans: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """What `spans` (sorted, disjoint) leave of [start, stop)."""
    left, at = [], start
    for a, b in spans:
        if b <= start or a >= stop:
            continue
        if a > at:
            left.append((at, a))
        at = max(at, b)
    if at < stop:
        left.append((at, stop))
    return left


def _explain_rest(reader: Reader, named: list[tuple[int, int]], found: Found) -> None:
    """Bytes of the fatbin sections that belong to no region: say what they are, once for each gap."""
    spans = [(r.offset, r.offset + r.size) for r in found.regions]
    seen = {p.offset for p in found.problems}
    for start, stop in named:
        for a, b in _gaps(spans, start, stop):
            a += -a % 8
            if b - a < 16 or a in seen or not np.frombuffer(reader.view(a, b - a), np.uint8).any():
                continue
            try:
                fatbin.region(reader, a)
            except FormatError as error:
                old = _U64.unpack_from(reader.view(a, 8))[0] & 0xFFFFFFFF == fatbin.OLD_MAGIC
                kind = "old_magic" if old else "unknown_version" if "version" in error.detail else "unreadable"
                found.problems.append(Problem(a, kind, f"{b - a} bytes of a fatbin section: {error.detail}"))


def _search_data(reader: Reader, elf: Elf | None, found: Found) -> None:
    """Raw cubins in host data, at any alignment, and data in a general compression format.

    Executable sections are left out: instruction bytes imitate both.
    """
    spans = [(r.offset, r.offset + r.size) for r in found.regions]
    if elf is not None and elf.sections:
        skip = (".debug", ".eh_frame", ".comment", ".strtab", ".shstrtab", ".note")
        places = [
            (s.sh_offset, s.sh_offset + s.file_size)
            for s in elf.sections
            if s.sh_type != SHT_NOBITS and s.sh_type == 1 and not s.is_code and not s.name.startswith(skip)
        ]
    else:
        places = [(1, reader.size)]
    failures = 0
    for start, stop in sorted(set(places)):
        for a, b in _gaps(spans, start, stop):
            for hit in _hits(reader, CUBIN_IDENT, a, b):
                if found.cubins and hit < sum(found.cubins[-1]):
                    continue
                size = cubin.extent(reader, hit)
                if size is not None:
                    found.cubins.append((hit, size))
                    continue
                failures += 1
                if failures > 10_000:
                    raise reader.error(hit, "more false cubin headers than a real file can have")


def _hits(reader: Reader, needle: bytes, start: int, stop: int) -> list[int]:
    """Offsets of `needle` in [start, stop), found chunk by chunk."""
    found = []
    for at in range(start, stop, CHUNK):
        data = bytes(reader.view(at, min(CHUNK + len(needle) - 1, stop - at)))
        index = data.find(needle)
        while index >= 0:
            found.append(at + index)
            index = data.find(needle, index + 1)
        if (at - start) % RELEASE == 0:
            reader.release()
    return found
