"""Members of a zip file by their place, so that those that are not compressed are mapped and not read.

Source: APPNOTE.TXT 6.3.10 of PKWARE, sections 4.3 (records) and 4.5.3 (ZIP64). Of several disks, encrypted, or packed
by other methods than deflate: refused. Members that overlap, too: that is how small files unpack to huge ones.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct

import numpy as np

from gpubloat.tensors.files.mapped import Bytes

_END = Struct("<4sHHHHIIH")
_END64_PLACE = Struct("<4sIQI")
_END64 = Struct("<4sQHHIIQQQQ")
_ENTRY = Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL = Struct("<4sHHHHHIIIHH")
_MAX_COMMENT = 65535
_MAX_MEMBERS = 1 << 20
_MAX_INFLATED = 2 << 30  # bytes of one file that are unpacked in memory
_STORED, _DEFLATED = 0, 8


@dataclass(frozen=True, slots=True)
class Member:
    """A file inside: its bytes are `packed_size` bytes at `at`, and `size` when they are unpacked."""

    name: str
    at: int
    packed_size: int
    size: int
    is_deflated: bool
    crc32: int


def members(file: Bytes) -> dict[str, Member]:
    """Name -> member, in the order of the directory. FormatError: not a zip file, damaged, or hostile."""
    count, at, size = _directory(file)
    file.check(at, size, "directory of the zip file")
    if count > _MAX_MEMBERS or count * _ENTRY.size > size:
        raise file.error(at, f"{count} members do not fit into a directory of {size} bytes")
    found: dict[str, Member] = {}
    places = []
    end = at + size
    for _ in range(count):
        member, begin, at = _entry(file, at)
        if at > end:
            raise file.error(at, "an entry of the directory goes on behind its end")
        if member.name in found:
            raise file.error(begin, f"two members are called {member.name[:200]!r}")
        found[member.name] = member
        places.append((begin, member.at + member.packed_size))
    places.sort()
    for (_, stop), (begin, _) in pairwise(places):
        if begin < stop:
            raise file.error(begin, "members of the zip file overlap")
    if places and places[-1][1] > end - size:
        raise file.error(places[-1][0], "a member of the zip file overlaps the directory")
    return found


def contents(file: Bytes, member: Member, inflated: int = 0) -> tuple[Bytes, int]:
    """The bytes of a member, and `inflated` with those added that were unpacked in memory for it.

    Mapped if they are stored; their CRC is then not looked at, since all of them would have to be read.
    """
    if not member.is_deflated:
        return file.part(member.at, member.size, member.name), inflated
    inflated += member.size
    if inflated > _MAX_INFLATED:
        raise file.error(
            member.at,
            f"members would take {inflated} bytes when unpacked; at most {_MAX_INFLATED} are",
            "save it without compression, then it is mapped",
        )
    unpacker = zlib.decompressobj(-15)
    try:
        data = unpacker.decompress(file.read(member.at, member.packed_size, member.name), member.size + 1)
    except zlib.error as error:
        raise file.error(member.at, f"member {member.name[:200]!r} cannot be unpacked: {error}") from None
    if len(data) != member.size or not unpacker.eof or zlib.crc32(data) != member.crc32:
        raise file.error(member.at, f"member {member.name[:200]!r} is not the {member.size} bytes that it should be")
    return Bytes(f"{file.path}({member.name})", np.frombuffer(data, np.uint8)), inflated


def _directory(file: Bytes) -> tuple[int, int, int]:
    """Number of entries, offset and size of the directory."""
    start = max(file.size - _END.size - _MAX_COMMENT, 0)
    tail = file.read(start, file.size - start, "end of the zip file")
    at = start + tail.rfind(b"PK\5\6")
    if at < start or at + _END.size > file.size:
        raise file.error(file.size, "no zip file, or its end is missing", "download it again")
    _, disk, _, here, count, size, offset, comment = file.unpack(_END, at, "end of the directory")
    if disk not in (0, 0xFFFF) or here != count or at + _END.size + comment != file.size:
        raise file.error(at, "the end of the directory is damaged")
    if at >= _END64_PLACE.size:
        magic, _, place, _ = file.unpack(_END64_PLACE, at - _END64_PLACE.size, "place of the ZIP64 record")
        if magic == b"PK\6\7":
            magic, *_, here, count, size, offset = file.unpack(_END64, place, "ZIP64 record")
            if magic != b"PK\6\6" or here != count:
                raise file.error(place, "the ZIP64 record is damaged")
    return count, offset, size


def _entry(file: Bytes, at: int) -> tuple[Member, int, int]:
    """A member, where its header begins, and where the next entry of the directory does."""
    magic, _, _, flags, method, _, _, crc, packed, size, n_name, n_extra, n_comment, _, _, _, local = file.unpack(
        _ENTRY, at, "entry of the directory"
    )
    if magic != b"PK\1\2":
        raise file.error(at, "no entry of the directory is here")
    text = file.read(at + _ENTRY.size, n_name, "name of a member")
    extra = file.read(at + _ENTRY.size + n_name, n_extra, "extra fields of a member")
    size, packed, local = _wide(file, at, extra, [size, packed, local])
    name = text.decode("utf-8" if flags & 0x800 else "cp437", "backslashreplace")
    if flags & 1 or method not in (_STORED, _DEFLATED):
        raise file.error(at, f"member {name[:200]!r} is encrypted, or packed by method {method}")
    # Deflate packs 1032 to 1 at most: a larger claim is a lie, refused before memory is taken for it.
    if (method == _STORED and size != packed) or size > 1032 * packed + 1024:
        raise file.error(at, f"member {name[:200]!r} claims {size} bytes in {packed}, which cannot be")
    magic, *_, n_local_name, n_local_extra = file.unpack(_LOCAL, local, "header of a member")
    start = local + _LOCAL.size + n_name + n_local_extra
    if (
        magic != b"PK\3\4"
        or n_local_name != n_name
        or file.read(local + _LOCAL.size, n_name, "name of a member") != text
    ):
        raise file.error(local, f"no header of member {name[:200]!r} is here")
    file.check(start, packed, f"member {name[:200]!r}")
    member = Member(name, start, packed, size, method == _DEFLATED, crc)
    return member, local, at + _ENTRY.size + n_name + n_extra + n_comment


def _wide(file: Bytes, at: int, extra: bytes, fields: list[int]) -> list[int]:
    """Sizes and offset; those that are all ones stand in the ZIP64 field, in this order, with 64 bits each."""
    missing = [i for i, field in enumerate(fields) if field == 0xFFFFFFFF]
    while missing and len(extra) >= 4:
        kind, length = int.from_bytes(extra[:2], "little"), int.from_bytes(extra[2:4], "little")
        if kind == 1:
            values = extra[4 : 4 + length]
            if len(values) < 8 * len(missing):
                break
            for number, i in enumerate(missing):
                fields[i] = int.from_bytes(values[8 * number : 8 * number + 8], "little")
            return fields
        extra = extra[4 + length :]
    if missing:
        raise file.error(at, "an entry of the directory without its ZIP64 field")
    return fields
