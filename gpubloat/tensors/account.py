"""What a codebook does to rows, counted: every bit of them is removed or kept, every stored bit is kept or overhead."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gpubloat.tensors.jit import in_blocks
from gpubloat.tensors.rowbits import Plan, Words, measure

_READS = (32, 128)  # bytes that a GPU reads at once: a sector, a line


@dataclass(frozen=True)
class Account:
    """Sums over rows. ``8 * raw_bytes = removed_bits + kept_bits`` and
    ``32 * stored_words = flag_bits + kept_bits + padding_bits``; all bits of a row that is stored raw are kept.

    `read_32_bytes` and `read_128_bytes`: rows read in whole units of 32 or 128 bytes, each from an aligned address;
    `raw_32_bytes` and `raw_128_bytes`: the same of rows that are not packed.
    """

    row_bytes: int
    n_rows: int
    n_raw_rows: int
    removed_bits: int
    flag_bits: int
    kept_bits: int
    padding_bits: int
    stored_words: int
    read_32_bytes: int
    read_128_bytes: int
    squared_words: float  # sum of the squares of stored lengths, in words

    @property
    def raw_bytes(self) -> int:
        return self.n_rows * self.row_bytes

    @property
    def metadata_bytes(self) -> int:
        """always, mask and value (three rows), and four bytes per row that say how long it is."""
        return 3 * self.row_bytes + 4 * self.n_rows

    @property
    def packed_bytes(self) -> int:
        return 4 * self.stored_words + self.metadata_bytes

    @property
    def saving_frac(self) -> float:
        """Of packed bytes, metadata counted; negative where packing costs more than it saves, 0 of nothing."""
        return 1 - self.packed_bytes / self.raw_bytes if self.raw_bytes else 0.0

    @property
    def effective_32_frac(self) -> float:
        return self._effective(self.read_32_bytes, 32)

    @property
    def effective_128_frac(self) -> float:
        return self._effective(self.read_128_bytes, 128)

    def _effective(self, read: int, unit: int) -> float:
        raw = self.n_rows * -(-self.row_bytes // unit) * unit
        return 1 - read / raw if raw else 0.0

    @property
    def error_frac(self) -> float:
        """Half the width of the 95 % interval of the mean saving per row, where these rows are a random sample."""
        if self.n_rows < 2 or not self.row_bytes:
            return 0.0
        mean = self.stored_words / self.n_rows
        variance = max(0.0, self.squared_words / self.n_rows - mean * mean)
        return float(1.96 * 4 * np.sqrt(variance / (self.n_rows - 1)) / self.row_bytes)


def account(words: Words, plan: Plan) -> Account:
    """Count what `plan` does to rows (n, m), all of them."""
    return _account(
        words, plan, in_blocks(lambda begin, end: _lengths(words[begin:end], plan), len(words), words.nbytes)
    )


def _lengths(words: Words, plan: Plan) -> tuple[int, int, Words]:
    row_words = np.empty(len(words), np.uint32)
    n_raw, removed = measure(words, plan, row_words)
    return n_raw, removed, row_words


def _account(words: Words, plan: Plan, blocks: Iterable[tuple[int, int, Words]]) -> Account:
    blocks = list(blocks)
    n_rows, row_bytes = len(words), words.shape[1] * words.itemsize
    row_words = np.concatenate([block[2] for block in blocks]).astype(np.int64)
    n_raw, removed, stored = sum(b[0] for b in blocks), sum(b[1] for b in blocks), int(row_words.sum())
    kept = 8 * row_bytes * n_rows - removed
    flags = len(plan.flagged) * (n_rows - n_raw)
    read_32, read_128 = (int((-(-4 * row_words // unit) * unit).sum()) for unit in _READS)
    return Account(
        row_bytes=row_bytes,
        n_rows=n_rows,
        n_raw_rows=n_raw,
        removed_bits=removed,
        flag_bits=flags,
        kept_bits=kept,
        padding_bits=32 * stored - flags - kept,
        stored_words=stored,
        read_32_bytes=read_32,
        read_128_bytes=read_128,
        squared_words=float((row_words.astype(np.float64) ** 2).sum()),
    )
