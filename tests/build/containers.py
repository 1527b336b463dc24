"""Wheels (zip files) and static libraries (ar archives), sound or lying."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED


def wheel(path: Path, members: Mapping[str, tuple[bytes, int]] | Sequence[tuple[str, bytes, int]]) -> Path:
    """A zip file of members (content, STORED or DEFLATED), in order; a list can hold a name twice."""
    rows = [(n, *m) for n, m in members.items()] if isinstance(members, Mapping) else members
    with zipfile.ZipFile(path, "w") as file:
        for name, data, method in rows:
            info = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))
            file.writestr(info, data, compress_type=method)
    return path


def patch_directory(path: Path, name: str, **fields: int) -> Path:
    """Make the central directory lie about a member: compress_size, file_size, header_offset, method, flags."""
    data = bytearray(path.read_bytes())
    place = {"flags": (8, "<H"), "method": (10, "<H"), "compress_size": (20, "<I"), "file_size": (24, "<I")}
    place["header_offset"] = (42, "<I")
    at = data.find(b"PK\x01\x02")
    while data[at + 46 : at + 46 + len(name)] != name.encode():
        at = data.index(b"PK\x01\x02", at + 4)
    for field, value in fields.items():
        offset, layout = place[field]
        struct.pack_into(layout, data, at + offset, value)
    path.write_bytes(data)
    return path


def archive(members: Sequence[tuple[str | bytes, bytes]], *, style: str = "gnu", index: bool = True) -> bytes:
    """An ar archive: ``gnu`` (names over 15 characters in a table) or ``bsd`` (names over 16 in front of the data)."""
    made = bytearray(b"!<arch>\n")
    names, table = [], b""
    for name, _ in members:
        raw = name.encode() if isinstance(name, str) else name
        if style == "gnu" and len(raw) > 15:
            names.append(b"/%d" % len(table))
            table += raw + b"/\n"
        else:
            names.append(raw + b"/" if style == "gnu" else raw)
    if index:
        symbols = struct.pack(">I", 0)
        made += header(b"/", symbols) if style == "gnu" else header(b"#1/20", b"__.SYMDEF SORTED\0\0\0\0" + bytes(8))
    if table:
        made += header(b"//", table)
    for name, (_, data) in zip(names, members, strict=True):
        if style == "bsd" and (len(name) > 16 or b" " in name):
            padded = name + bytes(-len(name) % 4)
            made += header(b"#1/%d" % len(padded), padded + data)
        else:
            made += header(name, data)
    return bytes(made)


def header(name: bytes, data: bytes, *, size: int | None = None, end: bytes = b"`\n") -> bytes:
    """One member with its header; `size` may lie."""
    stated = len(data) if size is None else size
    head = b"%-16s%-12d%-6d%-6d%-8o%-10d%s" % (name, 0, 0, 0, 0o644, stated, end)
    return head + data + b"\n" * (len(data) % 2)
