"""What is inside the elements: kernels and variables.

What must be decompressed whole is read by threads: decompression leaves the interpreter lock to the others.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gpubloat.errors import FormatError
from gpubloat.libraries import cubin, cubinhead, fatbin, hostdata
from gpubloat.libraries.cubin import Contents
from gpubloat.libraries.fatbin import Element
from gpubloat.libraries.hostdata import RawCubin
from gpubloat.libraries.reader import Reader

BATCH_BYTES = 16 << 20
BATCH_ELEMENTS = 256
# What all elements of a file may decompress to together: 16 times what a "size" build packs, and room for small files.
MAX_RATIO, MAX_FLOOR = 128, 1 << 30


NOTHING = Contents([], [], [], [])


@dataclass(frozen=True, slots=True)
class Code:
    """One piece to read: a fatbin element or a raw cubin, and its numbers in the tables."""

    region: int
    index: int
    code: Element | RawCubin


@dataclass(frozen=True, slots=True)
class Read:
    """What was found in one piece, or in one member of a concatenated element; nothing, and `error`, if unreadable."""

    region: int
    index: int
    member: int | None
    target: str
    contents: Contents
    error: FormatError | None = None


def read_all(reader: Reader, pieces: list[Code], threads: int | None = None) -> Iterator[Read]:
    """Read all pieces; those that their first bytes tell all of come first, then the others, each in file order.

    A damaged piece gives a `Read` with its error; the others are not touched by it.
    """
    allowed, refused = _affordable(reader, pieces)
    yield from refused
    # Rows and their names, too, are bounded by the size of the file: a payload of zeros packs 10,000 to 1.
    left = 64 * reader.size + (64 << 20)
    whole = []
    for number, piece in enumerate(allowed):
        read = _by_head(reader, piece) if left >= 0 else None
        if read is None:
            whole.append(piece)
        else:
            left -= _cost(read)
            yield read
        if number % BATCH_ELEMENTS == 0:
            reader.release()
    batches = list(_batches(whole))
    reads = _in_order(reader, batches, threads or os.cpu_count() or 1)
    for batch in batches:
        if left >= 0:
            found = next(reads)
            left -= sum(map(_cost, found))
        else:
            reads.close()
            error = reader.error(batch[0].code.offset, "not read: the file has more names than a real one can hold")
            found = [Read(piece.region, piece.index, None, "", NOTHING, error) for piece in batch]
        yield from found


def _affordable(reader: Reader, pieces: list[Code]) -> tuple[list[Code], list[Read]]:
    """The pieces that may be decompressed, and an error for each that would be beyond reason for the file's size."""
    left = MAX_RATIO * reader.size + MAX_FLOOR
    allowed, refused = [], []
    for piece in pieces:
        size = piece.code.uncompressed_size
        left -= size if size <= fatbin.MAX_UNCOMPRESSED else 0  # a larger claim is refused when it is read
        if left >= 0:
            allowed.append(piece)
        else:
            detail = "not decompressed: the elements declare more than a real file can hold"
            error = reader.error(piece.code.offset, detail)
            refused.append(Read(piece.region, piece.index, None, "", NOTHING, error))
    return allowed, refused


def _cost(read: Read) -> int:
    """About the bytes that the rows of a read take."""
    inside = read.contents
    return sum(sum(map(len, names)) + 64 * len(names) for names in (inside.kernels, inside.variables))


def _by_head(reader: Reader, piece: Code) -> Read | None:
    """What the first bytes of a packed cubin tell; None if it must be read whole.

    Not in threads: so little is decompressed that handing over the interpreter lock would cost more.
    """
    code = piece.code
    if code.kind != "cubin" or code.compression != "zstd":
        return None
    packed = reader.view(code.offset + code.header_size, code.stored_size, "cubin")
    contents = cubinhead.read(reader, packed, code.uncompressed_size)
    return None if contents is None else Read(piece.region, piece.index, None, code.target or "", contents)


def _in_order(reader: Reader, batches: list[list[Code]], workers: int) -> Generator[list[Read], None, None]:
    if workers == 1 or len(batches) < 2:
        yield from (_read_batch(reader, batch) for batch in batches)
        return
    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(lambda batch: _read_batch(reader, batch), batches)
    finally:
        pool.shutdown(cancel_futures=True)


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
            found.append(Read(piece.region, piece.index, None, "", NOTHING, error))
    reader.release()
    return found


def _read(reader: Reader, piece: Code) -> list[Read]:
    code = piece.code
    if code.kind not in ("cubin", "ptx", "relocatable_ptx", "concat"):
        return []
    if isinstance(code, RawCubin):
        data = memoryview(hostdata.content(reader, code))
        return [Read(piece.region, piece.index, None, code.target, _inside(reader, "cubin", data))]
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
    return NOTHING
