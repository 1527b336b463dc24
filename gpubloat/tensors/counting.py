"""Counting of bits by column and position, and of patterns, at the speed of memory.

`ones` is a positional population count by carry-save adders (Harley and Seal's counter, as in Mula, Kurz and Lemire,
"Faster population counts using AVX2 instructions", 2018, turned from one counter into one per bit). All bits of 64-bit
words are counted at once: plane k of a column holds bit k of its 64 counters. Sixteen rows become one carry out of the
lowest four planes, which is added to the planes above; counters are read from the planes once per block. Which element
a bit belongs to does not matter for that, so elements of all widths are counted as 64-bit words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import gcd
from typing import Any

import numpy as np

from gpubloat.errors import GpubloatError
from gpubloat.tensors.jit import THREADS, compiled

_STRIP = 1 << 15  # 64-bit words of a row that one task counts
_BLOCK = 8 << 20  # bytes that one task counts, about
_ROWS = 1024  # of one task, if there are so many
_MOST_ROWS = 65_520  # of one task: 16 planes hold counts below 65536
_PLANES = 16
_TILE = 128  # words of a row that are counted at a time: all their planes fit into the first-level cache
_FOLD = 512  # bytes: shorter rows are counted several at a time, as one longer row


def ones(words: np.ndarray, threads: int = THREADS) -> np.ndarray:
    """How often each bit of each column is set.

    Parameters
    ----------
    words : (n, m) unsigned integers of W = 8, 16, 32 or 64 bits, best in memory (or in a map) row after row. Columns of
        a larger matrix, ``words[:, a:b]``, are not copied either where they are whole 64-bit words.
    threads : that count at the same time.

    Returns
    -------
    (m, W) int64: set bits by column and bit, bit 0 being the least significant. It takes 64 bytes for each byte of a
    row: count wide rows in pieces.

    Raises
    ------
    GpubloatError : `words` is no matrix of unsigned integers.
    """
    if words.ndim != 2 or words.dtype.kind != "u" or not words.dtype.isnative:
        raise GpubloatError(f"bits of {words.ndim}-dimensional {words.dtype} cannot be counted", "give (n, m) unsigned")
    n, m = words.shape
    width = words.dtype.itemsize * 8
    counts = np.zeros((m, width), np.int64)
    if not n or not m:
        return counts
    fold = _fold(words)
    if fold == 1:
        return _counted(words, threads)[: m * width].reshape(m, width)
    whole = n - n % fold
    if whole:
        longer = _counted(words[:whole].reshape(whole // fold, fold * m), threads)
        counts += longer[: fold * m * width].reshape(fold, m, width).sum(axis=0)
    if whole < n:
        counts += _counted(words[whole:], threads)[: m * width].reshape(m, width)
    return counts


def _fold(words: np.ndarray) -> int:
    """How many rows to count as one, so that a row is whole 64-bit words and long enough."""
    row_bytes: int = words.shape[1] * words.dtype.itemsize
    if not words.flags.c_contiguous or (row_bytes >= _FOLD and row_bytes % 8 == 0):
        return 1
    step = 8 // gcd(row_bytes, 8)
    return step * -(-_FOLD // (step * row_bytes))


def _counted(words: np.ndarray, threads: int) -> np.ndarray:
    """Counts of all bits of a row, in order, padded to whole 64-bit words."""
    n, m = words.shape
    row_bytes = m * words.dtype.itemsize
    total = np.zeros(-(-row_bytes // 8) * 64, np.int64)
    # Narrow strips of many rows: reading the planes out, once per task, takes as long as some ten rows.
    width = min(len(total) // 64, _STRIP, max(_BLOCK // (8 * min(n, _ROWS)), _TILE))
    rows = min(_MOST_ROWS, max(16, _BLOCK // (8 * width) // 16 * 16))
    per_word = 8 // words.dtype.itemsize
    tasks = [
        (words[top : top + rows, left * per_word : (left + width) * per_word], left)
        for left in range(0, len(total) // 64, width)
        for top in range(0, n, rows)
    ]
    for left, counts in _in_threads(lambda task: (task[1], _block(task[0])), tasks, threads):
        total[left * 64 : left * 64 + len(counts)] += counts
    return total


def _block(words: np.ndarray) -> np.ndarray:
    """Counts of one task."""
    n, m = words.shape
    size = words.dtype.itemsize
    row_words = -(-m * size // 8)
    is_view = m * size % 8 == 0 and words.strides[1] == size and words.strides[0] % 8 == 0 and words.strides[0] > 0
    if not is_view or words.ctypes.data % 8:
        padded = np.zeros((n, row_words * 8 // size), words.dtype)
        padded[:, :m] = words
        words = padded
    stride = words.strides[0] // 8
    # The rows and what lies between them, as one run of words.
    flat = np.lib.stride_tricks.as_strided(
        words[:1].view("u8").reshape(-1)[:1], ((n - 1) * stride + row_words,), (8,), writeable=False
    )
    counts = np.zeros(row_words * 64, np.int64)
    _planes(flat, n, stride, row_words, max(int(n).bit_length(), 5), counts)
    return counts


@compiled
def _add(a: Any, b: Any, c: Any) -> Any:
    """Full adder: carry and sum, for each bit."""
    u = a ^ b
    return (a & b) | (u & c), u ^ c


@compiled
def _planes(flat: Any, n: int, stride: int, width: int, n_planes: int, counts: Any) -> None:
    """Add the set bits of `n` rows, of `width` words every `stride` words of `flat`, to `counts` (64 for each word)."""
    planes = np.zeros((_PLANES, _TILE), np.uint64)
    carry = np.empty(_TILE, np.uint64)
    for left in range(0, width, _TILE):
        size = min(_TILE, width - left)
        planes[:, :] = 0
        row = 0
        while row + 16 <= n:
            r = row * stride + left
            for j in range(size):
                one, two, four, eight = planes[0, j], planes[1, j], planes[2, j], planes[3, j]
                p = r + j
                t1, one = _add(one, flat[p], flat[p + stride])
                t2, one = _add(one, flat[p + 2 * stride], flat[p + 3 * stride])
                f1, two = _add(two, t1, t2)
                t1, one = _add(one, flat[p + 4 * stride], flat[p + 5 * stride])
                t2, one = _add(one, flat[p + 6 * stride], flat[p + 7 * stride])
                f2, two = _add(two, t1, t2)
                e1, four = _add(four, f1, f2)
                t1, one = _add(one, flat[p + 8 * stride], flat[p + 9 * stride])
                t2, one = _add(one, flat[p + 10 * stride], flat[p + 11 * stride])
                f1, two = _add(two, t1, t2)
                t1, one = _add(one, flat[p + 12 * stride], flat[p + 13 * stride])
                t2, one = _add(one, flat[p + 14 * stride], flat[p + 15 * stride])
                f2, two = _add(two, t1, t2)
                e2, four = _add(four, f1, f2)
                carry[j], eight = _add(eight, e1, e2)
                planes[0, j], planes[1, j], planes[2, j], planes[3, j] = one, two, four, eight
            for k in range(4, n_planes):
                for j in range(size):
                    both = planes[k, j] & carry[j]
                    planes[k, j] ^= carry[j]
                    carry[j] = both
            row += 16
        for last in range(row, n):
            for j in range(size):
                carry[j] = flat[last * stride + left + j]
            for k in range(n_planes):
                for j in range(size):
                    both = planes[k, j] & carry[j]
                    planes[k, j] ^= carry[j]
                    carry[j] = both
        for j in range(size):
            start = (left + j) * 64
            for k in range(n_planes):
                plane = planes[k, j]
                for bit in range(64):
                    counts[start + bit] += np.int64((plane >> np.uint64(bit)) & np.uint64(1)) << k


def histogram(words: np.ndarray, threads: int = THREADS) -> np.ndarray:
    """How often each pattern occurs among words of at most 16 bits, of any shape.

    Returns int64 counts of all 256 or 65536 patterns, by pattern. Arrays of several dimensions that do not lie in
    memory row after row are copied. Raises GpubloatError where the words are wider or no unsigned integers.
    """
    if words.dtype.kind != "u" or words.dtype.itemsize > 2 or not words.dtype.isnative:
        raise GpubloatError(f"patterns of {words.dtype} cannot be counted", "split them into words of 8 or 16 bits")
    flat = words.reshape(-1)
    step = _BLOCK // 2
    parts = [flat[start : start + step] for start in range(0, len(flat), step)]
    total = np.zeros(1 << (8 * words.dtype.itemsize), np.int64)
    for counts in _in_threads(_patterns, parts, threads):
        total += counts
    return total


def _patterns(words: np.ndarray) -> np.ndarray:
    counts = np.zeros((4, 1 << (8 * words.dtype.itemsize)), np.int32)
    _tally(words, counts)
    total: np.ndarray = counts.sum(axis=0, dtype=np.int64)
    return total


@compiled
def _tally(words: Any, counts: Any) -> None:
    """Four tables in turn: equal neighbours, which are frequent, would wait for each other's sum."""
    n = len(words)
    for i in range(0, n - 3, 4):
        counts[0, words[i]] += 1
        counts[1, words[i + 1]] += 1
        counts[2, words[i + 2]] += 1
        counts[3, words[i + 3]] += 1
    for i in range(n - n % 4, n):
        counts[0, words[i]] += 1


def _in_threads(work: Callable[[Any], Any], tasks: list[Any], threads: int) -> Iterator[Any]:
    """Results in the order of the tasks; those that wait to be taken are few, as tasks are started in batches."""
    if threads <= 1 or len(tasks) == 1:
        yield from map(work, tasks)
        return
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(tasks), 4 * threads):
            yield from pool.map(work, tasks[start : start + 4 * threads])
