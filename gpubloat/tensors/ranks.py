"""How many rows match every prefix of a column's bits, in one scan.

The bits of a column are put in an order, those that agree most first. All bits of a prefix match at once in the rows
whose first disagreeing bit comes later, so one histogram of that bit's rank gives the joint matches of every prefix.
"""

from __future__ import annotations

import numpy as np

from gpubloat.tensors.jit import compiled, in_blocks
from gpubloat.tensors.rowbits import Words


def order_of(agreement: Words) -> Words:
    """(m, W) int64: the bits of each column, those with most agreement first, more significant ones before others."""
    width = agreement.shape[1]
    order: Words = width - 1 - np.argsort(-agreement[:, ::-1], axis=1, kind="stable")
    return order


def prefixes(order: Words, dtype: np.dtype[np.unsignedinteger]) -> Words:
    """(m, W) in the chunk's type: all bits up to a rank, by rank."""
    single = np.left_shift(dtype.type(1), order.astype(dtype))
    return np.bitwise_or.accumulate(single, axis=1)


def matches(words: Words, majority: Words, masks: Words) -> Words:
    """Rows in which all bits of a prefix have their majority value.

    Parameters
    ----------
    words : (n, m) chunks. majority : (m,) the value of every bit. masks : (m, W) from `prefixes`.

    Returns
    -------
    (m, W) int64: rows that match the bits of ranks 0 to k, by column and k.
    """
    m, width = masks.shape

    def counted(begin: int, end: int) -> Words:
        found = np.zeros((m, width + 1), np.int64)
        _first_disagreeing(words[begin:end], majority, masks, found)
        return found

    first = sum(in_blocks(counted, len(words), words.nbytes))
    return len(words) - np.cumsum(first, axis=1)[:, :width]


@compiled
def _first_disagreeing(words: Words, majority: Words, masks: Words, found: Words) -> None:
    """Count by column the rank of the first bit that disagrees; W where none does. A bisection: prefixes only grow."""
    n, m = words.shape
    width = masks.shape[1]
    for r in range(n):
        for j in range(m):
            differs = words[r, j] ^ majority[j]
            rank = 0
            step = width >> 1
            while step > 0:
                if (differs & masks[j, rank + step - 1]) == 0:
                    rank += step
                step >>= 1
            if rank == width - 1 and (differs & masks[j, rank]) == 0:
                rank = width
            found[j, rank] += 1
