"""Packed tensors in a file that is memory-mapped, not read, and not trusted.

Format, version 1; numbers are little-endian::

    0   8 bytes  magic: 89 49 42 50 0d 0a 1a 0a ("\\x89IBP\\r\\n\\x1a\\n")
    8   uint32   version, 1
    12  uint32   CRC-32 of all bytes from 16 to the end of the header
    16  uint64   bytes of the header, 64 MiB at most
    24  uint64   bytes of the file
    32  header   JSON, UTF-8
    ..  zeros to a multiple of 64, from which offsets of sections count
    ..  sections, each at the next multiple of 64 after the one before, with zeros between; the last ends the file

The header is ``{"tensors": [...]}``, and each of them has exactly: name, dtype, shape, layout, chunk_bits, threshold
(number or null), estimate (of `codebook.Estimate`, or null), crc32 (of the unpacked bytes) and sections: for always,
mask, value (the codebook), row_words and words, in that order, ``[offset, bytes, CRC-32]``. Since every section has one
place where it can be, none overlaps another, and no byte of the file is outside a checksum or a check for zeros.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gpubloat.errors import FormatError, GpubloatError
from gpubloat.run import replacing_file
from gpubloat.tensors.codebook import WIDTHS, Codebook, Estimate
from gpubloat.tensors.dtypes import DTYPES
from gpubloat.tensors.packing import Packed
from gpubloat.tensors.rowbits import Words

MAGIC = b"\x89IBP\r\n\x1a\n"
VERSION = 1
_PREAMBLE = struct.Struct("<8sIIQQ")
_CHECKED_FROM = 16
_ALIGN = 64
_MOST_HEADER = 64 << 20
_KEYS = {"name", "dtype", "shape", "layout", "chunk_bits", "threshold", "estimate", "crc32", "sections"}
_SECTIONS = ("always", "mask", "value", "row_words", "words")
_HINT = "give a file that gpubloat packed, or pack the tensors again"


def save(path: str | os.PathLike[str], tensors: Mapping[str, Packed], force: bool = False) -> None:
    """Write packed tensors to a file, under a temporary name until all is written.

    Raises
    ------
    GpubloatError : the file exists and `force` is not set, or it cannot be written.
    """
    with replacing_file(Path(path), force) as opened:
        _write(opened, tensors)


def _write(opened: BinaryIO, tensors: Mapping[str, Packed]) -> None:
    entries, at = [], 0
    for name, packed in tensors.items():
        sections: dict[str, tuple[int, int, int]] = {}
        for part, data in _parts(packed):
            at = _aligned(at)
            sections[part] = (at, len(data), zlib.crc32(data))
            at += len(data)
        entries.append(_entry(name, packed, sections))
    header = json.dumps({"tensors": entries}, allow_nan=False).encode("ascii")
    if len(header) > _MOST_HEADER:
        raise GpubloatError(f"names and shapes of {len(tensors)} tensors take {len(header)} bytes", "save fewer")
    start = _aligned(_PREAMBLE.size + len(header))
    sizes = struct.pack("<QQ", len(header), start + at)
    opened.write(MAGIC + struct.pack("<II", VERSION, zlib.crc32(sizes + header)) + sizes + header)
    for packed in tensors.values():
        for _, data in _parts(packed):
            opened.write(bytes(_aligned(opened.tell()) - opened.tell()))
            opened.write(data)
    opened.write(bytes(start + at - opened.tell()))  # where there is no section


def _parts(packed: Packed) -> Iterator[tuple[str, memoryview]]:
    for name in _SECTIONS:
        array: Words = getattr(packed.codebook if name in _SECTIONS[:3] else packed, name)
        yield name, np.ascontiguousarray(array).view(np.uint8).data


def _entry(name: str, packed: Packed, sections: dict[str, tuple[int, int, int]]) -> dict[str, Any]:
    codebook = packed.codebook
    return {
        "name": name,
        "dtype": packed.dtype,
        "shape": packed.shape,
        "layout": packed.layout,
        "chunk_bits": codebook.chunk_bits,
        "threshold": codebook.threshold,
        "estimate": codebook.estimate and dataclasses.asdict(codebook.estimate),
        "crc32": packed.crc32,
        "sections": sections,
    }


def _aligned(at: int) -> int:
    return -(-at // _ALIGN) * _ALIGN


def load(path: str | os.PathLike[str]) -> dict[str, Packed]:
    """The tensors of a file, memory-mapped. All of it is read once, to check it; the file must not be changed later.

    Raises
    ------
    FormatError : the file is damaged, truncated, foreign or hostile. GpubloatError : it cannot be read.
    """
    file = Path(path)
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size < _PREAMBLE.size:
                raise FormatError(str(file), 0, f"has {size} bytes and no header", _HINT)
            data: Words = np.asarray(np.memmap(opened, np.uint8, "r"))
    except OSError as error:
        raise GpubloatError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError:
        raise GpubloatError(f"{file} cannot be mapped") from None
    return _Reader(str(file), data).tensors()


class _Reader:
    """A position in the sections of one file, and what is wrong there."""

    def __init__(self, path: str, data: Words) -> None:
        self.path = path
        self.data = data
        self.end = _PREAMBLE.size  # of what was checked

    def wrong(self, message: str, at: int | None = None) -> FormatError:
        return FormatError(self.path, self.end if at is None else at, message, _HINT)

    def tensors(self) -> dict[str, Packed]:
        entries = self._header()
        self._zeros(_aligned(self.end))
        start, found = self.end, {}
        for entry in entries:
            if not isinstance(entry, dict) or set(entry) != _KEYS or not isinstance(entry["name"], str):
                raise self.wrong("the header describes a tensor that lacks something", _PREAMBLE.size)
            name = entry["name"]
            if name in found:
                raise self.wrong(f"two tensors are called {name!r}", _PREAMBLE.size)
            found[name] = self._tensor(entry, start)
        if self.end != len(self.data):
            raise self.wrong(f"{len(self.data) - self.end} bytes belong to no tensor")
        return found

    def _header(self) -> list[Any]:
        magic, version, checksum, header_bytes, file_bytes = _PREAMBLE.unpack(self.data[: _PREAMBLE.size].tobytes())
        if magic != MAGIC:
            raise self.wrong("is no file of packed tensors", 0)
        if version != VERSION:
            raise self.wrong(f"has version {version}, and only {VERSION} can be read", 8)
        if file_bytes != len(self.data):
            raise self.wrong(f"has {len(self.data)} bytes and should have {file_bytes}", 24)
        if header_bytes > min(_MOST_HEADER, file_bytes - _PREAMBLE.size):
            raise self.wrong(f"has a header of {header_bytes} bytes", 16)
        self.end += header_bytes
        if zlib.crc32(self.data[_CHECKED_FROM : self.end].data) != checksum:
            raise self.wrong("the header is damaged: its checksum differs", 12)
        try:
            header = json.loads(self.data[_PREAMBLE.size : self.end].tobytes())
        except (ValueError, RecursionError):
            raise self.wrong("the header is no JSON", _PREAMBLE.size) from None
        if not isinstance(header, dict) or set(header) != {"tensors"} or not isinstance(header["tensors"], list):
            raise self.wrong("the header is no list of tensors", _PREAMBLE.size)
        return header["tensors"]

    def _zeros(self, end: int) -> None:
        if end > len(self.data) or self.data[self.end : end].any():
            raise self.wrong("there are no zeros up to the next multiple of 64")
        self.end = end

    def _tensor(self, entry: dict[str, Any], start: int) -> Packed:
        name = entry["name"]
        dtype, shape, width = entry["dtype"], entry["shape"], entry["chunk_bits"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self.wrong(f"{name!r} has an unknown dtype", _PREAMBLE.size)
        if not isinstance(shape, list) or len(shape) > 64 or not all(_is_count(k) for k in shape):
            raise self.wrong(f"{name!r} has no shape", _PREAMBLE.size)
        if math.prod(max(k, 1) for k in shape) * DTYPES[dtype].bits >= 2**63:
            raise self.wrong(f"{name!r} has an impossible shape", _PREAMBLE.size)
        if not _is_count(width) or width not in WIDTHS:
            raise self.wrong(f"{name!r} has no known chunk width", _PREAMBLE.size)
        if not isinstance(entry["layout"], str) or not _is_count(entry["crc32"]):
            raise self.wrong(f"{name!r} has no layout or no checksum", _PREAMBLE.size)
        if not isinstance(entry["sections"], dict) or list(entry["sections"]) != list(_SECTIONS):
            raise self.wrong(f"{name!r} lacks a section", _PREAMBLE.size)
        threshold, estimate = self._fitted(entry)
        parts = {part: self._section(entry["sections"][part], start, f"{part} of {name!r}") for part in _SECTIONS}
        try:
            word = np.dtype(f"<u{width // 8}")
            always, mask, value = (_as(parts[part], word) for part in _SECTIONS[:3])
            codebook = Codebook(width, dtype, tuple(shape[1:]), always, mask, value, threshold, estimate)
            row_words, words = _as(parts["row_words"], np.dtype("<u4")), _as(parts["words"], np.dtype("<u4"))
            return Packed(codebook, dtype, tuple(shape), entry["layout"], words, row_words, entry["crc32"])
        except GpubloatError as error:
            raise self.wrong(f"{name!r} is inconsistent: {error.message}") from None

    def _fitted(self, entry: dict[str, Any]) -> tuple[float | None, Estimate | None]:
        threshold, estimate = entry["threshold"], entry["estimate"]
        fields = {field.name: str(field.type) for field in dataclasses.fields(Estimate)}
        if threshold is not None and not (_is_number(threshold) and 0.5 < threshold <= 1):
            raise self.wrong(f"{entry['name']!r} has no sensible threshold", _PREAMBLE.size)
        if estimate is None:
            return threshold, None
        if not isinstance(estimate, dict) or set(estimate) != set(fields):
            raise self.wrong(f"{entry['name']!r} has no sensible estimate", _PREAMBLE.size)
        if not all(_is_count(v) if fields[k] == "int" else _is_number(v) for k, v in estimate.items()):
            raise self.wrong(f"{entry['name']!r} has no sensible estimate", _PREAMBLE.size)
        return threshold, Estimate(**estimate)

    def _section(self, place: Any, start: int, what: str) -> Words:
        """The bytes of the next section, checked."""
        if not isinstance(place, list) or len(place) != 3 or not all(_is_count(k) for k in place):
            raise self.wrong(f"{what} has no place", _PREAMBLE.size)
        offset, n_bytes, checksum = place
        begin = _aligned(self.end)
        if start + offset != begin or n_bytes > len(self.data) - begin:
            raise self.wrong(f"{what} is said to be at {start + offset}, {n_bytes} bytes")
        self._zeros(begin)
        section: Words = self.data[begin : begin + n_bytes]
        if zlib.crc32(section.data) != checksum:
            raise self.wrong(f"{what} is damaged: its checksum differs")
        self.end += n_bytes
        return section


def _as(section: Words, word: np.dtype[Any]) -> Words:
    if section.nbytes % word.itemsize:
        raise GpubloatError(f"a section of {section.nbytes} bytes is no row of {word}")
    return section.view(word)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
