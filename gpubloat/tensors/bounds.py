"""What no lossless code of some kind can do better than: entropies of bits, of fields and of whole words.

Entropies are those of what was counted (plug-in estimates), in bits. A *bound* is the greatest share of the bytes that
a code of that kind can save on exactly these data, its tables not counted:

- marginal: each bit on its own, given its share of ones, by column or by position in the whole tensor. Packing that
  looks at several bits of a word together may do better. Few rows make the one by column too great.
- joint: each 16-bit piece of a word on its own (a word of 32 bits is two of them, one of 64 bits four). Few words make
  it too great: a piece that was seen once seems certain.
- exponent: sign and mantissa stay as they are, the exponent is coded by its frequency (ZipNN, DFloat11).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpubloat.tensors import counting
from gpubloat.tensors.dtypes import Dtype
from gpubloat.tensors.jit import THREADS

FEW = 10  # words for each pattern that a piece can have: with fewer, the joint bound is biased


@dataclass(frozen=True)
class Fields:
    """Entropies of the words of a tensor, in bits per word; of `Fields`, None where the type has no such field."""

    sign_bits: float | None
    exponent_bits: float | None
    mantissa_bits: float | None  # of more than 16 bits: the sum over its 16-bit pieces, at least the true one
    joint_bits: float  # the sum over the 16-bit pieces of a word
    joint_bound_frac: float
    exponent_bound_frac: float | None
    is_biased: bool  # fewer than 10 words for each pattern of a piece: the joint bound is too great


def of_bits(ones: np.ndarray, n: int) -> np.ndarray:
    """Entropy, in bits, of each bit that is set in `ones` of `n` > 0 words; of any shape."""
    share = np.asarray(ones, float) / n
    rest = 1 - share
    # 0 log 0 is 0
    logs = share * np.log2(share, out=np.zeros_like(share), where=share > 0)
    logs += rest * np.log2(rest, out=np.zeros_like(share), where=rest > 0)
    return np.abs(logs)  # and not -0.0


def of_patterns(counts: np.ndarray) -> float:
    """Entropy, in bits, of a pattern that occurs so often; 0 where nothing was counted."""
    found = counts[counts > 0].astype(float)
    total = found.sum()
    # Rounding can leave the entropy of a single pattern a little below 0.
    return max(float(np.log2(total) - (found * np.log2(found)).sum() / total), 0.0) if total else 0.0


def marginal_frac(ones: np.ndarray, n: int, *, per_column: bool = True) -> float:
    """The marginal bound of (m, W) counts over `n` > 0 rows: by column and bit, or by bit over all columns."""
    entropies = of_bits(ones, n) if per_column else of_bits(ones.sum(axis=0), n * len(ones))
    return 1 - float(entropies.mean())


def pieces(words: np.ndarray, threads: int = THREADS) -> np.ndarray:
    """How often each pattern occurs in each 16-bit piece of the words, the most significant piece first.

    Parameters
    ----------
    words : unsigned integers of any shape, row after row in memory (others are copied).

    Returns
    -------
    (pieces, 65536) int64; (1, 256) for words of 8 bits. Counts of parts of a tensor may be added.
    """
    size = words.dtype.itemsize
    if size <= 2:
        return counting.histogram(words, threads)[np.newaxis]
    halves = np.ascontiguousarray(words).reshape(-1).view("<u2")
    return np.stack([counting.histogram(halves[i :: size // 2], threads) for i in reversed(range(size // 2))])


def fields(counts: np.ndarray, dtype: Dtype) -> Fields:
    """Entropies and bounds of the words whose `pieces` were counted; at least one word."""
    n = int(counts[0].sum())
    by_piece = [of_patterns(piece) for piece in counts]
    joint = sum(by_piece)
    sign = exponent = mantissa = bound = None
    if dtype.is_float:
        # The most significant piece: sign, exponent, the first bits of the mantissa.
        parts = counts[0].reshape(2, 1 << dtype.exponent_bits, -1)
        sign, exponent, first = (of_patterns(parts.sum(axis=axes)) for axes in ((1, 2), (0, 2), (0, 1)))
        mantissa = first + sum(by_piece[1:])
        bound = (dtype.exponent_bits - exponent) / dtype.bits
    return Fields(sign, exponent, mantissa, joint, 1 - joint / dtype.bits, bound, n < FEW * counts.shape[1])
