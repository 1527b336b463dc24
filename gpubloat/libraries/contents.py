"""What is inside the elements: kernels and variables, read by threads (decompression leaves the interpreter lock)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from gpubloat.errors import FormatError
from gpubloat.libraries import cubin, fatbin, hostdata
from gpubloat.libraries.cubin import Contents
from gpubloat.libraries.fatbin import Element
from gpubloat.libraries.hostdata import RawCubin
from gpubloat.libraries.reader import Reader

BATCH_BYTES = 16 << 20
BATCH_ELEMENTS = 256
# What all elements of a file may decompress to together: 16 times what a "size" build packs, and room for small files.
MAX_RATIO, MAX_FLOOR = 128, 4 << 30


@dataclass(frozen=True, slots=True)
class Code:
    """One piece to read: a fatbin element or a raw cubin, and its numbers in the tables."""

    region: int
    index: int
    code: Element | RawCubin


@dataclass(frozen=True, slots=True)
class Read:
    """What was found in one piece, or in one member of a concatenated element; `error` if it could not be read."""

    region: int
    index: int
    member: int | None
    target: str
    contents: Contents | None
    error: FormatError | None = None


def read_all(reader: Reader, pieces: list[Code], threads: int | None = None) -> Iterator[Read]:
    """Read all pieces, in order. A damaged piece gives a `Read` with its error; the others are not touched by it."""
    left = MAX_RATIO * reader.size + MAX_FLOOR
    allowed = []
    for piece in pieces:
        size = piece.code.uncompressed_size
        left -= size if size <= fatbin.MAX_UNCOMPRESSED else 0  # a larger claim is refused when it is read
        if left >= 0:
            allowed.append(piece)
        else:
            error = reader.error(
                piece.code.offset, "not decompressed: the elements declare more than a real file can hold"
            )
            yield Read(piece.region, piece.index, None, "", None, error)
    # Rows and their names, too, are bounded by the size of the file: a payload of zeros packs 10,000 to 1.
    left = 64 * reader.size + (64 << 20)
    for read in _in_order(reader, list(_batches(allowed)), threads or os.cpu_count() or 1):
        if read.contents is not None:
            left -= sum(len(name) + 64 for name in (*read.contents.kernels, *read.contents.variables))
            if left < 0:
                error = reader.error(0, "more names of kernels and variables than a file of this size can have")
                read = replace(read, contents=None, error=error)
        yield read


def _in_order(reader: Reader, batches: list[list[Code]], workers: int) -> Iterator[Read]:
    if workers == 1 or len(batches) < 2:
        for batch in batches:
            yield from _read_batch(reader, batch)
        return
    with ThreadPoolExecutor(workers) as pool:
        for reads in pool.map(lambda batch: _read_batch(reader, batch), batches):
            yield from reads


def _batches(pieces: Iterable[Code]) -> Iterator[list[Code]]:
    """Pieces in groups that are worth a hand-over between threads and small enough to bound memory."""
    batch: list[Code] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += max(piece.code.stored_size, piece.code.uncompressed_size)
        if size >= BATCH_BYTES or len(batch) >= BATCH_ELEMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read_batch(reader: Reader, batch: list[Code]) -> list[Read]:
    found = []
    for piece in batch:
        try:
            found += _read(reader, piece)
        except FormatError as error:
            found.append(Read(piece.region, piece.index, None, "", None, error))
    reader.release()
    return found


def _read(reader: Reader, piece: Code) -> list[Read]:
    code = piece.code
    if isinstance(code, RawCubin):
        data = memoryview(hostdata.content(reader, code))
        return [Read(piece.region, piece.index, None, code.target, _inside(reader, "cubin", data))]
    if code.kind not in ("cubin", "ptx", "relocatable_ptx", "concat"):
        return []
    data = memoryview(fatbin.payload(reader, code))
    if code.kind != "concat":
        return [Read(piece.region, piece.index, None, code.target or "", _inside(reader, code.kind, data))]
    found = []
    for number, member in enumerate(fatbin.members(reader, code)):
        part = data[member.offset : member.offset + member.size]
        inside = _inside(reader, member.kind, part)
        found.append(Read(piece.region, piece.index, number, member.target or "", inside))
    return found


def _inside(reader: Reader, kind: str, data: memoryview) -> Contents:
    if kind == "cubin":
        return cubin.read(Reader(f"{reader.path}(element)", data))
    if kind in ("ptx", "relocatable_ptx"):
        return cubin.read_ptx(Reader(f"{reader.path}(element)", data))
    return Contents([], [], [], [])
