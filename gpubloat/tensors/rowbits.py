"""The bits of rows: how long a packed row is, and the loops that write and read it (bit-exact reference).

A packed row is a stream of bits in little-endian 32-bit words, the least significant bit first: the flags of the
columns that have a mask, then the kept bits of every chunk in column order, then zeros up to the next word. A chunk
keeps the bits of ``~(always | mask)`` where its flag is set, of ``~always`` where it is not. A row that breaks `always`
or would not get shorter is stored raw: its bytes, zero padded to a word; its length alone says so.

Kept bits are gathered and scattered by log2(W) masked moves for all chunks of a tile at a time (Warren, Hacker's
Delight, 2nd edition, section 7-4), whose moves depend on the column only. Offsets and bit counts are 64-bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpubloat.tensors.jit import compiled

Words = npt.NDArray[Any]

_TILE = 256  # chunks that are moved at a time: their scratch stays in the first-level cache
_LOW = np.uint64(0xFFFFFFFF)
_ONE, _FIVE, _U31, _U32 = np.uint64(1), np.uint64(5), np.uint64(31), np.uint64(32)


class Plan(NamedTuple):
    """A codebook as the loops need it; all arrays are (m,) in the chunk's type unless said otherwise."""

    always: Words
    mask: Words
    value: Words  # 0 outside always | mask
    kept: Words  # how many bits are kept where the flag is not set
    saved: Words  # how many fewer where it is: bits of the mask
    weights: Words  # the same, int64
    flagged: Words  # int64 (n_flags,): columns that have a mask
    moves: Words  # (log2(W), m): bits that move down by 2**step where the flag is not set
    toggles: Words  # (log2(W), m): the same where it is set, xor moves
    raw_words: int  # 32-bit words of a raw row


def plan(always: Words, mask: Words, value: Words) -> Plan:
    """The loops' form of a codebook: which bits move how far when the kept ones are gathered."""
    word = always.dtype
    width = word.itemsize * 8
    steps = [_moves(bits, width) for bits in (~always, ~(always | mask))]
    return Plan(
        always=always,
        mask=mask,
        value=value,
        kept=np.bitwise_count(~always).astype(word),
        saved=np.bitwise_count(mask).astype(word),
        weights=np.bitwise_count(mask).astype(np.int64),
        flagged=np.flatnonzero(mask).astype(np.int64),
        moves=steps[0],
        toggles=steps[0] ^ steps[1],
        raw_words=-(-always.size * width // 32),
    )


def _moves(keep: Words, width: int) -> Words:
    """(log2(width), m): the bits that have an odd 1, 2, 4... dropped bits below them, where they are by then."""
    one = keep.dtype.type(1)
    dropped_below = ~keep << one
    moves = np.zeros((width.bit_length() - 1, keep.size), keep.dtype)
    for step in range(len(moves)):
        parity = dropped_below.copy()
        for shift in (1 << i for i in range(len(moves))):
            parity ^= parity << keep.dtype.type(shift)
        moves[step] = parity & keep
        keep = (keep ^ moves[step]) | (moves[step] >> keep.dtype.type(1 << step))
        dropped_below &= ~parity
    return moves


@compiled
def measure(words: Words, plan: Plan, row_words: Words) -> tuple[int, Any]:
    """Write the stored length of each row (n, m) into `row_words`; return raw rows and bits removed from the others."""
    n_rows, m = words.shape
    width = words.itemsize * 8
    n_raw, removed = 0, np.int64(0)
    least_removed = np.int64(m * width)
    most_bits = np.int64(len(plan.flagged))
    for j in range(m):
        least_removed -= np.int64(plan.kept[j])
        most_bits += np.int64(plan.kept[j])
    for r in range(n_rows):
        row = words[r]
        broken = row.dtype.type(0)
        saved = np.int64(0)
        for j in range(m):
            differs = row[j] ^ plan.value[j]
            broken |= differs & plan.always[j]
            saved += plan.weights[j] if (differs & plan.mask[j]) == 0 else 0
        length = (most_bits - saved + 31) >> 5
        if broken != 0 or length >= plan.raw_words:
            length = np.int64(plan.raw_words)
            n_raw += 1
        else:
            removed += least_removed + saved
        row_words[r] = length
    return n_raw, removed


@compiled
def encode(words: Words, plan: Plan, row_words: Words, offsets: Words, out: Words) -> None:
    """Write rows (n, m) to `out` (32-bit words), each at its offset; `row_words` (by `measure`) says which are raw."""
    n_rows, m = words.shape
    halves = 2 if words.itemsize == 8 else 1
    n_steps = len(plan.moves)
    none = words.dtype.type(0)
    every = ~none
    bits = np.empty(_TILE, words.dtype)
    lengths = np.empty(_TILE, words.dtype)
    flags = np.empty(m, words.dtype)  # every bit set where the chunk leaves its mask out
    full = np.empty(2 * _TILE + 1, np.uint32)  # one more than a tile fills: the loop stores before it knows
    for r in range(n_rows):
        at = np.int64(offsets[r])
        pending = n = np.uint64(0)  # bits that do not fill a word yet, and how many
        is_raw = row_words[r] == plan.raw_words
        if not is_raw:
            row = words[r]
            for j in range(m):
                flags[j] = every if ((row[j] ^ plan.value[j]) & plan.mask[j]) == 0 else none
            n_flags = len(plan.flagged)
            for begin in range(0, n_flags - 31, 32):
                some = plan.flagged[begin : begin + 32]
                bit = np.uint32(0)
                for k in range(32):
                    bit |= np.uint32(flags[some[k]] & 1) << np.uint32(k)
                out[at] = bit
                at += 1
            for j in plan.flagged[n_flags & ~31 :]:
                pending |= np.uint64(flags[j] & 1) << n
                n += _ONE
        for begin in range(0, m, _TILE):
            end = min(begin + _TILE, m)
            row = words[r, begin:end]
            if is_raw:
                for j in range(end - begin):
                    bits[j] = row[j]
                    lengths[j] = words.itemsize * 8
            else:
                # One short loop per result: with more arrays at a time the compiler gives up on vectors.
                mask, always = plan.mask[begin:end], plan.always[begin:end]
                kept, saved, chosen = plan.kept[begin:end], plan.saved[begin:end], flags[begin:end]
                for j in range(end - begin):
                    bits[j] = row[j] & ~(always[j] | (mask[j] & chosen[j]))
                for j in range(end - begin):
                    lengths[j] = kept[j] - (saved[j] & chosen[j])
                for step in range(n_steps):
                    moves, toggles = plan.moves[step, begin:end], plan.toggles[step, begin:end]
                    for j in range(end - begin):
                        moved = bits[j] & (moves[j] ^ (toggles[j] & chosen[j]))
                        bits[j] = (bits[j] ^ moved) | (moved >> (1 << step))
            n_full = np.int64(0)
            for j in range(end - begin):
                chunk, n_bits = np.uint64(bits[j]), np.uint64(lengths[j])
                for _ in range(halves):
                    now = min(n_bits, _U32)
                    pending |= (chunk & _LOW) << n
                    n += now
                    full[n_full] = np.uint32(pending & _LOW)
                    spill = n & _U32  # 32 where the word is full: a branch here would be a coin toss
                    n_full += np.int64(spill >> _FIVE)
                    pending >>= spill
                    n &= _U31
                    chunk >>= _U32
                    n_bits -= now
            out[at : at + n_full] = full[:n_full]
            at += n_full
        if n > 0:
            out[at] = np.uint32(pending)


@compiled
def _window(near: Words, position: Any, n_bits: Any) -> Any:
    """At most 32 bits from a bit position on (both uint64)."""
    word = np.int64(position >> _FIVE)
    both = np.uint64(near[word]) | (np.uint64(near[word + 1]) << _U32)
    return (both >> (position & _U31)) & ((_ONE << n_bits) - _ONE)


@compiled
def decode(stored: Words, plan: Plan, row_words: Words, offsets: Words, rows: Words, out: Words) -> int:
    """Read `rows` (int64 numbers of rows) into `out` (len(rows), m); the first one whose length is wrong, or -1.

    Nothing outside a row's `row_words` words is read: flags that promise more bits are found before.
    """
    m = out.shape[1]
    width = out.itemsize * 8
    wide = out.itemsize == 8
    n_steps = len(plan.moves)
    none = out.dtype.type(0)
    every = ~none
    flags = np.zeros(m, out.dtype)  # every bit set where the chunk's mask was left out
    bits = np.empty(_TILE, out.dtype)
    lengths = np.empty(_TILE, out.dtype)
    near = np.zeros(2 * _TILE + 4, np.uint32)  # the words of a tile and zeros: a window may reach past the row
    for i in range(len(rows)):
        source = rows[i]
        at = np.int64(offsets[source])
        n_words = np.int64(row_words[source])
        position = np.int64(0)  # in bits
        is_raw = n_words == plan.raw_words
        if not is_raw:
            position += len(plan.flagged)
            if n_words > plan.raw_words or position > n_words * 32:
                return int(source)
            for f in range(len(plan.flagged)):
                flag = (stored[at + (f >> 5)] >> np.uint32(f & 31)) & np.uint32(1)
                flags[plan.flagged[f]] = every if flag != 0 else none
            total = position
            for j in range(m):
                total += np.int64(plan.kept[j]) - np.int64(plan.saved[j] & flags[j])
            if (total + 31) >> 5 != n_words:
                return int(source)
        for begin in range(0, m, _TILE):
            end = min(begin + _TILE, m)
            kept, saved, chosen = plan.kept[begin:end], plan.saved[begin:end], flags[begin:end]
            total = np.int64(0)
            if is_raw:
                lengths[:] = width
                total = np.int64((end - begin) * width)
            else:
                for j in range(end - begin):
                    lengths[j] = kept[j] - (saved[j] & chosen[j])
                for j in range(end - begin):
                    total += np.int64(lengths[j])
            first, last = position >> 5, (position + total + 31) >> 5
            near[: last - first] = stored[at + first : at + last]
            here = np.uint64(position & 31)
            position += total
            for j in range(end - begin):
                chunk = np.uint64(0)
                n_bits = np.uint64(lengths[j])
                if wide:
                    low = min(n_bits, _U32)
                    chunk = _window(near, here, low)
                    n_bits -= low
                    here += low
                    chunk |= _window(near, here, n_bits) << _U32
                else:
                    chunk = _window(near, here, n_bits)
                here += n_bits
                bits[j] = chunk
            row = out[i, begin:end]
            if is_raw:
                for j in range(end - begin):
                    row[j] = bits[j]
                continue
            for step in range(n_steps - 1, -1, -1):
                moves, toggles = plan.moves[step, begin:end], plan.toggles[step, begin:end]
                for j in range(end - begin):
                    risen = moves[j] ^ (toggles[j] & chosen[j])
                    bits[j] = (bits[j] & ~risen) | ((bits[j] << (1 << step)) & risen)
            value, mask, always = plan.value[begin:end], plan.mask[begin:end], plan.always[begin:end]
            for j in range(end - begin):
                left_out = always[j] | (mask[j] & chosen[j])
                row[j] = (bits[j] & ~left_out) | (value[j] & left_out)
    return -1
