"""The members of a static library (`.a`): System V and GNU ar.

Source: ar(5); GNU binutils documentation, "ar". BSD names (``#1/length``) are read, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

from gpubloat.libraries.reader import Reader

_HEADER = Struct("<16s12s6s6s8s10s2s")
MAGIC_SIZE = 8
MAX_NAME = 1024  # it stands in every row of the tables
_INDEXES = (b"/", b"/SYM64/", b"__.SYMDEF", b"__.SYMDEF SORTED")


def members(reader: Reader) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) of each member that is a file, in order; symbol indexes and the name table are skipped."""
    at = MAGIC_SIZE
    long_names = b""
    while at + _HEADER.size <= reader.size:
        raw_name, _, _, _, _, raw_size, end = reader.unpack(_HEADER, at, "archive member header")
        if end != b"`\n" or not raw_size.strip().isdigit():
            raise reader.error(at, "no archive member header", "the archive may be truncated")
        size, start = int(raw_size), at + _HEADER.size
        data = reader.view(start, size, "archive member")
        name = raw_name.rstrip(b" ")
        at = start + size + size % 2
        if name == b"//":
            long_names = bytes(data)
            continue
        if name in _INDEXES:
            continue
        if name.startswith(b"#1/") and name[3:].isdigit() and int(name[3:]) <= size:
            length = int(name[3:])
            name, start, size = bytes(data[: min(length, MAX_NAME + 1)]).rstrip(b"\0"), start + length, size - length
            if name in _INDEXES:
                continue
        elif name.startswith(b"/") and name[1:].isdigit():
            offset = int(name[1:])
            if offset >= len(long_names):
                raise reader.error(start - _HEADER.size, "archive member whose name is not in the name table")
            name = long_names[offset : offset + MAX_NAME + 1].split(b"\n", 1)[0].rstrip(b"/")
        else:
            name = name.rstrip(b"/")
        if len(name) > MAX_NAME:
            raise reader.error(start - _HEADER.size, f"archive member whose name has more than {MAX_NAME} bytes")
        yield name.decode("utf-8", "backslashreplace"), start, size
