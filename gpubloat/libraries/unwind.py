"""Function ranges from `.eh_frame`: every function that an exception can pass has an entry, stripped or not.

Source: Linux Standard Base 5.0, "Exception Frames"; DWARF 5, section 6.4.1; pointer encodings as in GCC's
unwind-pe.h. `.cold` parts have entries of their own.
"""

from __future__ import annotations

from struct import Struct

import numpy as np

from gpubloat.libraries.elf import Array, Elf, Section
from gpubloat.libraries.reader import Reader

_U32 = Struct("<I")
_U64 = Struct("<Q")
_HDR = Struct("<BBBBiI")
_PCREL_SDATA4_TABLE = (1, 0x1B, 0x03, 0x3B)  # version and encodings that every current linker writes
_WIDTHS = {0x00: "<u8", 0x03: "<u4", 0x04: "<u8", 0x0B: "<i4", 0x0C: "<i8"}  # by the low four bits
_PCREL = 0x10


def ranges(elf: Elf) -> tuple[Array, Array]:
    """Start addresses and lengths of all frame description entries, sorted by address, each start once.

    Returns two arrays of shape (n,), uint64. Raises FormatError for a damaged table. Object files (ET_REL), whose
    entries are not relocated yet, and files without `.eh_frame` give none.
    """
    starts = [np.zeros(0, np.uint64)]
    lengths = [np.zeros(0, np.uint64)]
    if elf.header.e_type != 1:
        for section in elf.named(".eh_frame"):
            entries = _from_header(elf, section)
            if entries is None:
                entries = _walk(elf.reader, section)
            for begin, length in _decode(elf.reader, section, entries):
                starts.append(begin)
                lengths.append(length)
    start, first = np.unique(np.concatenate(starts), return_index=True)
    return start, np.concatenate(lengths)[first]


def _from_header(elf: Elf, frame: Section) -> Array | None:
    """File offsets of the entries, from the linker's search table; None if there is none that can be trusted."""
    for section in elf.named(".eh_frame_hdr"):
        if section.sh_size < _HDR.size:
            return None
        *encodings, _, count = elf.reader.unpack(_HDR, section.sh_offset, ".eh_frame_hdr")
        if tuple(encodings) != _PCREL_SDATA4_TABLE or count * 8 > section.sh_size - _HDR.size or not count:
            return None
        table = elf.reader.array("<i4", section.sh_offset + _HDR.size, 2 * count, ".eh_frame_hdr table")
        shift = section.sh_addr - frame.sh_addr + frame.sh_offset
        if abs(shift) >= 1 << 62:
            return None
        offsets = table[1::2].astype(np.int64) + shift
        inside = (offsets >= frame.sh_offset) & (offsets <= frame.sh_offset + frame.sh_size - 16)
        return np.unique(offsets) if inside.all() else None
    return None


def _walk(reader: Reader, frame: Section) -> Array:
    """File offsets of the entries, by going from length to length."""
    data = reader.view(frame.sh_offset, frame.sh_size, ".eh_frame")
    found = []
    at, end = 0, frame.sh_size
    while at + 4 <= end:
        length = _U32.unpack_from(data, at)[0]
        if length == 0:  # terminator, or padding between merged tables
            at += 4
            continue
        head = 4
        if length == 0xFFFFFFFF:
            if at + 12 > end:
                raise reader.error(frame.sh_offset + at, "unwind entry cut off")
            length, head = _U64.unpack_from(data, at + 4)[0], 12
        if length < 4 or at + head + length > end:
            raise reader.error(frame.sh_offset + at, f"unwind entry of {length} bytes runs out of .eh_frame")
        # In .eh_frame the pointer to the CIE is 4 bytes, also behind a 64-bit length in practice; 0 = this is a CIE.
        if _U32.unpack_from(data, at + head)[0] and head == 4:
            found.append(frame.sh_offset + at)
        at += head + length
    return np.array(found, np.int64)


def _decode(reader: Reader, frame: Section, entries: Array) -> list[tuple[Array, Array]]:
    """(starts, lengths) of the entries, in one array operation for each pointer encoding in use."""
    if not len(entries):
        return []
    data = np.frombuffer(reader.view(frame.sh_offset, frame.sh_size, ".eh_frame"), np.uint8)
    at = entries - frame.sh_offset
    owner = at + 4 - _gather(data, at + 4, "<u4").astype(np.int64)
    inside = (owner >= 0) & (owner < at)
    if not inside.all():
        raise reader.error(int(entries[~inside][0]), "unwind entry that names no CIE")
    cies, which = np.unique(owner, return_inverse=True)
    encodings = np.array([_encoding(reader, frame, int(c)) for c in cies])[which]
    result = []
    for encoding in np.unique(encodings):
        width = _WIDTHS.get(int(encoding) & 0x0F)
        if width is None or int(encoding) & 0x70 not in (0, _PCREL):
            raise reader.error(frame.sh_offset, f"pointer encoding 0x{encoding:02x} of the unwind table is not known")
        place = at[encodings == encoding] + 8
        size = np.dtype(width).itemsize
        if int(place.max()) + 2 * size > len(data):
            raise reader.error(frame.sh_offset + int(place.max()), "unwind entry cut off")
        begin = _gather(data, place, width).astype(np.int64)
        if encoding & _PCREL:
            with np.errstate(over="ignore"):
                begin = begin + place + np.array(frame.sh_addr, np.uint64).astype(np.int64)
        length = _gather(data, place + size, width.replace("i", "u")).astype(np.uint64)
        result.append((begin.astype(np.uint64)[length > 0], length[length > 0]))
    return result


def _gather(data: Array, offsets: Array, dtype: str) -> Array:
    """Unaligned values of `dtype` at `offsets` of a byte array."""
    size = np.dtype(dtype).itemsize
    index = np.minimum(offsets[:, None] + np.arange(size), len(data) - 1)
    return data[index].view(dtype)[:, 0]


def _encoding(reader: Reader, frame: Section, cie: int) -> int:
    """The FDE pointer encoding that the CIE at offset `cie` of the section declares (augmentation letter R)."""
    size = min(frame.sh_size - cie, 256)
    data = bytes(reader.view(frame.sh_offset + cie, size, "CIE"))
    version = data[8] if size > 8 else 0
    end = data.find(b"\0", 9)
    if version not in (1, 3, 4) or end < 0 or _U32.unpack_from(data, 4)[0] != 0:
        raise reader.error(frame.sh_offset + cie, f"unwind CIE of version {version} is not known")
    letters = data[9:end].decode("latin-1")
    at = end + 1 + (2 if version == 4 else 0)
    try:
        for _ in range(2):  # code and data alignment
            at = _skip_leb(data, at)
        at = at + 1 if version == 1 else _skip_leb(data, at)  # return address register
        if not letters.startswith("z"):
            return 0
        at = _skip_leb(data, at)
        for letter in letters[1:]:
            if letter == "R":
                return data[at]
            if letter == "P":
                at += 1 + np.dtype(_WIDTHS.get(data[at] & 0x0F, "<u8")).itemsize
            elif letter == "L":
                at += 1
    except IndexError:
        raise reader.error(frame.sh_offset + cie, "unwind CIE cut off") from None
    return 0


def _skip_leb(data: bytes, at: int) -> int:
    while data[at] & 0x80:
        at += 1
    return at + 1
