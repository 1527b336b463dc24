"""Which bits of a tensor's columns need not be stored in every row: invariant bits, found and judged.

A tensor is a matrix of n rows (dimension 0) of m chunks, words of 8, 16, 32 or 64 bits that hold several elements or
part of one. `always`: bits that are equal in all rows, removed from each. `mask`: bits that mostly equal `value`,
removed from the chunks where all of them do; one flag bit per row and column with a mask says where.

With ``always=False`` that is Invariant Bit Packing (A. K. Kamath et al., EuroSys 2026, doi 10.1145/3767295.3803595):
one mask per column. With ``thresholds`` the bits of a mask are those whose majority holds in at least a share T of the
rows, one T for the tensor, as there. Without, each column has the prefix of its bits, sorted by agreement, that saves
most: k bits that jointly match in M of n rows save k M - n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np

from gpubloat.errors import GpubloatError
from gpubloat.tensors import ranks
from gpubloat.tensors.account import Account, account
from gpubloat.tensors.counting import ones
from gpubloat.tensors.dtypes import named
from gpubloat.tensors.jit import in_blocks
from gpubloat.tensors.rowbits import Plan, Words, plan
from gpubloat.tensors.sources import Tensor, as_tensor

WIDTHS = (8, 16, 32, 64)
_COLUMNS = 4096  # chunks that are judged at a time: counts take W words of eight bytes for each
_SAMPLE_BYTES, _FEWEST_ROWS = 256 << 20, 10_000  # a sample is no larger, unless it would have fewer rows


@dataclass(frozen=True)
class Estimate:
    """What packing the fitted tensor gives, from all rows or from a sample of them.

    Attributes
    ----------
    metadata_bytes : the codebook (three rows) and four bytes per row; part of `packed_bytes`. A tensor of one row is
        constant and all of it goes, but the codebook takes three times as much: the saving is negative.
    saving_frac : 1 - packed_bytes / raw_bytes; 0 where there is nothing.
    saving_error_frac : half the width of the 95 % interval of it; 0 if all rows were looked at.
    effective_32_frac, effective_128_frac : saving of rows that are read alone from an aligned address in whole units of
        32 and 128 bytes, without metadata.
    """

    raw_bytes: int
    packed_bytes: int
    metadata_bytes: int
    saving_frac: float
    saving_error_frac: float
    effective_32_frac: float
    effective_128_frac: float
    n_rows_sampled: int
    n_rows: int


@dataclass(frozen=True, eq=False)
class Codebook:
    """Bits that are removed from the rows of a tensor, by column.

    Attributes
    ----------
    chunk_bits : W, the width of a chunk. dtype, row_shape : of the tensors that it packs.
    always, mask, value : (m,) unsigned of W bits, see the module; `always` and `mask` share no bit, and `value` has
        none outside them. Read-only.
    threshold : T that all masks were made by; None, each column has its own best prefix.
    estimate : what it gives for the tensor that it was fitted to; None if it was not fitted.

    Raises
    ------
    GpubloatError : the parts do not fit together.
    """

    chunk_bits: int
    dtype: str
    row_shape: tuple[int, ...]
    always: Words
    mask: Words
    value: Words
    threshold: float | None = None
    estimate: Estimate | None = None

    def __post_init__(self) -> None:
        if self.chunk_bits not in WIDTHS:
            raise GpubloatError(f"chunks of {self.chunk_bits} bits cannot be packed", "use 8, 16, 32 or 64")
        word = np.dtype(f"<u{self.chunk_bits // 8}")
        for name in ("always", "mask", "value"):
            bits: Words = np.asarray(getattr(self, name)).view()
            if bits.dtype != word or bits.ndim != 1 or bits.nbytes != self.row_bytes:
                raise GpubloatError(f"{name} of the codebook is not one row of {word} chunks")
            bits.flags.writeable = False
            object.__setattr__(self, name, bits)
        if (self.always & self.mask).any() or (self.value & ~(self.always | self.mask)).any():
            raise GpubloatError("always, mask and value of the codebook contradict each other")

    def __repr__(self) -> str:
        n = f"{len(self.mask)} chunks of {self.chunk_bits} bits"
        return (
            f"Codebook({self.dtype}, rows of {n}, {int(np.count_nonzero(self.mask | self.always))} with bits removed)"
        )

    @property
    def row_bytes(self) -> int:
        return prod(self.row_shape) * named(self.dtype).bits // 8

    @property
    def n_bytes(self) -> int:
        """always, mask and value."""
        return 3 * self.row_bytes

    def plan(self) -> Plan:
        return plan(self.always, self.mask, self.value)


def fit(
    x: Any,
    chunk_bits: Literal["auto"] | int = "auto",
    thresholds: Sequence[float] | None = None,
    always: bool = True,
    max_rows: int = 100_000,
    seed: int = 0,
) -> Codebook:
    """Find the bits of `x` that can be left out.

    Parameters
    ----------
    x : NumPy array, torch tensor or Tensor, of any shape.
    chunk_bits : width of the chunks; it must divide the row. auto: the width that gives the smallest result.
    thresholds : None, the best prefix per column; else shares in (0.5, 1]: a bit is in the mask if at least so many
        rows have its majority value. Of several, the one that gives the smallest result.
    always : remove bits that all rows share without a flag. This looks at all rows; False is the paper's method.
    max_rows, seed : masks are chosen on all rows, or on so many at random (fewer where they would take more than
        256 MiB, but 10,000 at least); the estimate says how sure it is.

    Raises
    ------
    GpubloatError : the width does not divide the row, a threshold is out of range, or `x` cannot be read.
    """
    tensor = as_tensor(x)
    wanted = None if thresholds is None else _checked(thresholds)
    if max_rows < 1:
        raise GpubloatError(f"max_rows is {max_rows}", "give at least 1")
    sample = _sample(tensor, max_rows, seed)
    constant = _constant(tensor.rows()) if always else np.zeros(tensor.rows().shape[1], tensor.words.dtype)
    best: Codebook | None = None
    for width in _widths(tensor, chunk_bits):
        word = np.dtype(f"<u{width // 8}")
        for found in _candidates(tensor, _as(sample, word), _as(constant, word), wanted):
            if best is None or _size(found) < _size(best):
                best = found
    assert best is not None
    return best


def _checked(thresholds: Sequence[float]) -> list[float]:
    """Thresholds from high to low: where two give the same size, the one with fewer bits stays."""
    values = sorted({float(t) for t in thresholds}, reverse=True)
    if not values or not all(0.5 < t <= 1 for t in values):
        raise GpubloatError(f"thresholds {values} are no shares of rows", "give numbers above 0.5, up to 1")
    return values


def _widths(tensor: Tensor, chunk_bits: Literal["auto"] | int) -> list[int]:
    """Widths to try, the widest first: of two that save the same, it has fewer chunks to decode."""
    if chunk_bits != "auto":
        if chunk_bits not in WIDTHS:
            raise GpubloatError(f"chunks of {chunk_bits} bits cannot be packed", "use 8, 16, 32 or 64")
        tensor.rows(chunk_bits)  # says so where it does not divide the row
        return [chunk_bits]
    return [width for width in reversed(WIDTHS) if tensor.row_bytes % (width // 8) == 0]


def _sample(tensor: Tensor, max_rows: int, seed: int) -> Words:
    """(s, row) rows in the order of the tensor, all or some of them."""
    rows: Words = tensor.rows()
    n = min(max_rows, max(_FEWEST_ROWS, _SAMPLE_BYTES // max(1, tensor.row_bytes)))
    if len(rows) <= n:
        return rows
    picked = np.random.default_rng(seed).choice(len(rows), n, replace=False, shuffle=False)
    sample: Words = rows[np.sort(picked)]
    sample.flags.writeable = False
    return sample


def _constant(rows: Words) -> Words:
    """(m,) bits that all rows share; none where there is no row."""
    if not len(rows):
        return np.zeros(rows.shape[1], rows.dtype)

    def both(begin: int, end: int) -> tuple[Words, Words]:
        return np.bitwise_and.reduce(rows[begin:end], axis=0), np.bitwise_or.reduce(rows[begin:end], axis=0)

    parts = in_blocks(both, len(rows), rows.nbytes)
    ones_everywhere = np.bitwise_and.reduce([part[0] for part in parts], axis=0)
    ones_anywhere = np.bitwise_or.reduce([part[1] for part in parts], axis=0)
    constant: Words = ~(ones_everywhere ^ ones_anywhere)
    return constant


def _as(rows: Words, word: np.dtype[np.unsignedinteger]) -> Words:
    """The same bytes as chunks of another width."""
    return rows.view(word) if rows.shape[-1] else rows.astype(word)


def _candidates(tensor: Tensor, sample: Words, always: Words, thresholds: list[float] | None) -> list[Codebook]:
    """The codebooks of one width: one per threshold, or the one of the best prefixes."""
    shares: Sequence[float | None] = thresholds or [None]
    masks = {t: np.zeros_like(always) for t in shares}
    majority = np.zeros_like(always)
    for begin in range(0, sample.shape[1] if len(sample) else 0, _COLUMNS):
        part = slice(begin, begin + _COLUMNS)
        counts = ones(sample[:, part])
        agreement = np.maximum(counts, len(sample) - counts)
        majority[part] = _together(counts * 2 > len(sample), sample.dtype)
        for t in masks:
            if t is None:
                masks[t][part] = _best_prefixes(sample[:, part], majority[part], agreement, always[part])
            else:
                # A quotient, not t * n: rounded once, it equals the threshold where the decimal fraction does.
                masks[t][part] = _together(agreement / len(sample) >= t, sample.dtype) & ~always[part]
    return [_judged(tensor, sample, always, mask, majority & (always | mask), t) for t, mask in masks.items()]


def _together(bits: Words, word: np.dtype[np.unsignedinteger]) -> Words:
    """(m, W) truth values -> (m,) words."""
    words: Words = np.bitwise_or.reduce(np.left_shift(bits.astype(word), np.arange(bits.shape[1], dtype=word)), axis=1)
    return words


def _best_prefixes(words: Words, majority: Words, agreement: Words, always: Words) -> Words:
    """(m,) masks: of every column the prefix that saves most, flags paid; 0 if none saves."""
    n, width = len(words), agreement.shape[1]
    is_always = (always[:, None] >> np.arange(width, dtype=always.dtype)) & always.dtype.type(1) != 0
    masks = ranks.prefixes(ranks.order_of(np.where(is_always, n + 1, agreement)), words.dtype)
    n_removed = np.arange(1, width + 1) - is_always.sum(axis=1)[:, None]
    saved = n_removed * ranks.matches(words, majority, masks) - n
    best = saved.argmax(axis=1)
    column = np.arange(len(best))
    chosen: Words = np.where(saved[column, best] > 0, masks[column, best] & ~always, always.dtype.type(0))
    return chosen


def _judged(
    tensor: Tensor, sample: Words, always: Words, mask: Words, value: Words, threshold: float | None
) -> Codebook:
    counted = account(sample, plan(always, mask, value))
    estimate = _estimate(counted, tensor.n_rows)
    return Codebook(sample.dtype.itemsize * 8, tensor.dtype, tensor.shape[1:], always, mask, value, threshold, estimate)


def _estimate(counted: Account, n_rows: int) -> Estimate:
    """Rows that were counted -> all rows."""
    scale = n_rows / counted.n_rows if counted.n_rows else 0.0
    metadata = 3 * counted.row_bytes + 4 * n_rows
    raw, packed = n_rows * counted.row_bytes, round(4 * counted.stored_words * scale) + metadata
    unseen = 1 - counted.n_rows / n_rows if n_rows else 0.0
    return Estimate(
        raw_bytes=raw,
        packed_bytes=packed,
        metadata_bytes=metadata,
        saving_frac=1 - packed / raw if raw else 0.0,
        saving_error_frac=counted.error_frac * unseen**0.5,
        effective_32_frac=counted.effective_32_frac,
        effective_128_frac=counted.effective_128_frac,
        n_rows_sampled=counted.n_rows,
        n_rows=n_rows,
    )


def _size(codebook: Codebook) -> int:
    assert codebook.estimate is not None
    return codebook.estimate.packed_bytes
