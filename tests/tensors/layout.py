"""The row layout in plain Python integers, to compare with: slow, and written from its description alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpubloat.tensors.gpu import kernels


@dataclass
class Book:
    """What is removed of every column: `always`, `mask` and `value` are (m,) unsigned of `bits` bits."""

    bits: int
    always: np.ndarray
    mask: np.ndarray
    value: np.ndarray

    @property
    def n_flags(self) -> int:
        return int(np.count_nonzero(self.mask))

    def device(self) -> np.ndarray:
        """The four arrays that kernels read."""
        return kernels.book_words(self.always, self.mask, self.value)


def pack_row(row: np.ndarray, book: Book) -> list[int]:
    """The 32-bit words of one packed row of unsigned chunks."""
    ones, n, stream, payload = (1 << book.bits) - 1, 0, 0, []
    raw = row.tobytes() + b"\0" * (-row.nbytes % 4)
    plain = [int(w) for w in np.frombuffer(raw, "<u4")]
    for chunk, always, mask, value in zip(*(a.tolist() for a in (row, book.always, book.mask, book.value))):
        if (chunk ^ value) & always:
            return plain
        keep = ~always & ones
        if mask:
            if not (chunk ^ value) & mask:
                stream |= 1 << n
                keep &= ~mask
            n += 1
        payload += [(chunk >> b) & 1 for b in range(book.bits) if keep >> b & 1]
    for bit in payload:
        stream |= bit << n
        n += 1
    n_words = -(-n // 32)
    return plain if n_words >= len(plain) else [stream >> 32 * i & 0xFFFFFFFF for i in range(n_words)]


def pack(rows: np.ndarray, book: Book, slots: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(words, row_words) of all rows: back to back, or in slots of whole 16 bytes."""
    packed = [pack_row(row, book) for row in rows]
    stride = stride_words(rows.shape[1] * rows.itemsize)
    words = [w + [0] * (stride - len(w)) if slots else w for w in packed]
    return np.array([word for row in words for word in row], "<u4"), np.array([len(w) for w in packed], "<u4")


def stride_words(row_bytes: int) -> int:
    return -(-row_bytes // 16) * 4


def example(rng: np.random.Generator, n: int, m: int, bits: int, flagged: float = 0.8) -> tuple[np.ndarray, Book]:
    """Rows that mostly agree in random bits of their columns, and a book of those bits."""
    top = 1 << bits
    draw = lambda *shape: rng.integers(0, top, shape, np.uint64)  # noqa: E731
    mask = draw(m) & draw(m) & np.where(rng.random(m) < flagged, top - 1, 0).astype(np.uint64)
    always = draw(m) & draw(m) & draw(m) & ~mask
    value = draw(m) & (mask | always)
    rows = draw(n, m) & ~always | (value & always)
    agrees = rng.random((n, m)) < 0.8
    rows = np.where(agrees, rows & ~mask | (value & mask), rows)
    if n > 3:
        rows[1] = draw(m)  # does not fit `always`, most likely
        rows[2] = rows[2] & always  # all zero where it may be
    dtype = f"<u{bits // 8}"
    return rows.astype(dtype), Book(bits, always.astype(dtype), mask.astype(dtype), value.astype(dtype))
