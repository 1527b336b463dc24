"""GPU code in the host's data without a fatbin around it, and data whose content is not analysed.

cuBLASLt keeps 393 cubins as bare zstd frames in `.ldata`, CUPTI and others keep plain ones in `.rodata`: no section
name and no wrapper tells of them.
"""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct
from typing import ClassVar

import lz4.frame
import numpy as np
import zstandard

from gpubloat.errors import FormatError
from gpubloat.libraries import cubin, fatbin
from gpubloat.libraries.elf import EHDR, EM_CUDA
from gpubloat.libraries.elf import MAGIC as ELF_MAGIC
from gpubloat.libraries.fatbin import ZSTD_MAGIC
from gpubloat.libraries.reader import Problem, Range, Reader

CHUNK = 1 << 20
RELEASE = 32 << 20  # bytes searched between two releases of mapped pages
CUBIN_IDENT = b"\x7fELF\x02\x01\x01"
# General compression formats by their first bytes, and what their content can turn out to be.
FORMATS = {
    ZSTD_MAGIC: "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"\xfd7zXZ\x00": "xz",
    b"\x1f\x8b\x08": "gzip",
    b"7z\xbc\xaf\x27\x1c": "7z",
}
_CONTENTS = {ELF_MAGIC: "an ELF file", fatbin.MAGIC.to_bytes(4, "little"): "a fatbin", b"!<arch>\n": "an archive"}
MAX_CLAIMS = 100  # rows of `problems` in one file
MAX_TRIALS = 5_000  # first bytes that turn out to be no cubin
MAX_BLOCKS = 4096  # of a zstd frame; one block holds up to 128 KiB
MAX_WINDOW = 128 << 20  # what the zstd command refuses by default, too
_TRIAL_BYTES = 1 << 16
_MACHINE = Struct("<18xH")


@dataclass(frozen=True, slots=True)
class RawCubin:
    """A bare cubin in host data: `size` bytes at `offset`, packed as a zstd frame if `compression` says so."""

    offset: int
    size: int
    uncompressed_size: int
    compression: str
    target: str

    kind: ClassVar[str] = "cubin"
    header_size: ClassVar[int] = 0

    @property
    def stored_size(self) -> int:
        return self.size


def whole(reader: Reader) -> RawCubin:
    """A file that is a cubin itself."""
    return RawCubin(0, reader.size, reader.size, "none", cubin.target(reader))


def content(reader: Reader, raw: RawCubin) -> bytes | memoryview:
    """The cubin, decompressed. FormatError if its frame does not hold what it declares."""
    data = reader.view(raw.offset, raw.size, "cubin")
    if raw.compression == "none":
        return data
    return fatbin.unzstd(reader, raw.offset, data, raw.uncompressed_size)


def search(reader: Reader, places: list[Range]) -> tuple[list[RawCubin], list[Problem]]:
    """Find cubins, plain or as a zstd frame, at any alignment, and data in a general compression format.

    `places` are the ranges to look into, sorted and disjoint. What is no cubin is a problem of class
    `compressed_data`; the content of it is not analysed.
    """
    cubins: list[RawCubin] = []
    problems: list[Problem] = []
    failures = trials = behind = 0
    left = 2 * reader.size + CHUNK  # bytes of false zstd frames that are walked through: they can share their blocks
    for a, b in places:
        for hit, needle in _hits(reader, (CUBIN_IDENT, *FORMATS), a, b):
            if hit < behind:
                continue  # inside the last find
            if needle == CUBIN_IDENT:
                found = _plain(reader, hit, b)
                failures += 0 if found else 1 + cubin.n_sections(reader, hit, b) // 64
                if failures > 10_000:
                    raise reader.error(hit, "more false cubin headers than a real file can have")
            else:
                if trials >= MAX_TRIALS:
                    continue
                found, walked = _packed(reader, hit, b) if needle == ZSTD_MAGIC else (None, 0)
                left -= walked
                trials = MAX_TRIALS if left < 0 else trials + (found is None)
                if trials == MAX_TRIALS:
                    detail = "too many places look like compressed data; the rest of the file was not looked into"
                    problems.append(Problem(hit, "compressed_data", detail))
                if found is None and len(problems) < MAX_CLAIMS:
                    problems += _claim(reader, hit, b, FORMATS[needle], is_last=len(problems) == MAX_CLAIMS - 1)
            if found is not None:
                cubins.append(found)
                behind = hit + found.size
    return cubins, problems


def _plain(reader: Reader, offset: int, limit: int) -> RawCubin | None:
    size = cubin.extent(reader, offset, limit)
    if size is None:
        return None
    return RawCubin(offset, size, size, "none", cubin.target(reader.window(offset, size, "cubin")))


def _packed(reader: Reader, offset: int, limit: int) -> tuple[RawCubin | None, int]:
    """The zstd frame at `offset` if it holds a cubin: only its block headers and its first bytes are read.

    Without one, also how many bytes were walked through in vain.
    """
    size = 0
    try:
        size, content_size = _frame(reader, offset, limit)
        start = _first(reader.view(offset, size), EHDR.size)
        if start[:7] != CUBIN_IDENT or _MACHINE.unpack_from(start)[0] != EM_CUDA:
            return None, size
        return RawCubin(offset, size, content_size, "zstd", cubin.target(Reader(reader.path, start))), 0
    except FormatError as error:
        return None, error.offset
    except zstandard.ZstdError:
        return None, size


def _frame(reader: Reader, offset: int, limit: int) -> tuple[int, int]:
    """Stored and uncompressed size of a zstd frame, by its headers (RFC 8878, section 3.1.1); FormatError if none."""
    frame = reader.window(offset, limit - offset, "zstd frame")
    start = bytes(frame.view(0, min(18, frame.size)))
    try:
        parameters = zstandard.get_frame_parameters(start)
        at = zstandard.frame_header_size(start)
    except zstandard.ZstdError as error:
        raise frame.error(0, f"no zstd frame: {error}") from None
    if parameters.window_size > MAX_WINDOW or parameters.dict_id:
        raise frame.error(0, "zstd frame with a dictionary or a window that is too large")
    if not EHDR.size <= parameters.content_size <= fatbin.MAX_UNCOMPRESSED:
        raise frame.error(0, "zstd frame that cannot hold a cubin")
    for _ in range(MAX_BLOCKS):
        block = int.from_bytes(frame.view(at, 3, "zstd block header"), "little")
        is_last, kind, size = bool(block & 1), block >> 1 & 3, block >> 3
        if kind == 3:
            raise frame.error(at, "zstd block of a reserved type")
        at += 3 + (1 if kind == 1 else size)  # type 1 repeats one byte
        if is_last:
            break
    else:
        raise frame.error(at, f"zstd frame of more than {MAX_BLOCKS} blocks")
    at += 4 * parameters.has_checksum
    frame.view(0, at, "zstd frame")
    return at, parameters.content_size


def _first(data: memoryview, size: int) -> bytes:
    with zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).stream_reader(data) as stream:
        return bytes(stream.read(size))


def _claim(reader: Reader, offset: int, limit: int, form: str, is_last: bool) -> list[Problem]:
    """The problem that compressed data at `offset` is, or none if the bytes only look like it."""
    start = _start_of(form, bytes(reader.view(offset, min(_TRIAL_BYTES, limit - offset))))
    if start is None:
        return []
    inside = next((f"; it starts as {what}" for magic, what in _CONTENTS.items() if start.startswith(magic)), "")
    more = "; further ones are not listed" if is_last else ""
    detail = f"{form} data in the host's part, its content was not analysed{inside}{more}"
    return [Problem(offset, "compressed_data", detail)]


def _start_of(form: str, data: bytes) -> bytes | None:
    """First bytes of what `data` decompresses to (none for 7z), or None if it is not in that format.

    Garbage behind four right bytes can look like a valid block or two, so more is decompressed than is needed.
    """
    try:
        if form == "zstd":
            frame = zstandard.get_frame_parameters(data)
            if frame.window_size > MAX_WINDOW or frame.dict_id:
                return None
            start = zstandard.ZstdDecompressor().stream_reader(data).read(1 << 20)
        elif form == "lz4":
            start = lz4.frame.LZ4FrameDecompressor().decompress(data, 1 << 20)
        elif form == "gzip":
            inflate = zlib.decompressobj(31)
            start = inflate.decompress(data, _TRIAL_BYTES)
            if len(start) < 256 and not inflate.eof:
                return None
        elif form == "xz":
            start = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_WINDOW).decompress(data, 64)
        else:  # 7z: a checksum of the 20 bytes that say where the rest of its header is
            return b"" if len(data) >= 32 and zlib.crc32(data[12:32]) == int.from_bytes(data[8:12], "little") else None
    except (zstandard.ZstdError, zlib.error, lzma.LZMAError, RuntimeError):  # lz4 raises RuntimeError
        return None
    return start[:16] or None


def _hits(reader: Reader, needles: tuple[bytes, ...], start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Offsets of the needles in [start, stop), in order, found chunk by chunk.

    The first bytes are compared four at a time, at each of the four alignments: several times faster than one search
    of the bytes for each needle.
    """
    overlap = max(map(len, needles)) - 1
    heads = [(n, int.from_bytes(n[:4], "little"), 0xFFFFFFFF if len(n) > 3 else 0xFFFFFF) for n in needles]
    for at in range(start, stop, CHUNK):
        data = bytes(reader.view(at, min(CHUNK + overlap, stop - at))) + b"\0\0\0"
        found = []
        for shift in range(4):
            words = np.frombuffer(data, "<u4", (len(data) - shift) // 4, shift)
            for needle, head, mask in heads:
                is_equal = words == head if mask == 0xFFFFFFFF else words & mask == head
                if is_equal.any():
                    places = (4 * np.flatnonzero(is_equal) + shift).tolist()
                    found += [(i, needle) for i in places if i < CHUNK and data.startswith(needle, i)]
        for index, needle in sorted(found):
            yield at + index, needle
        if (at - start) % RELEASE == 0:
            reader.release()
