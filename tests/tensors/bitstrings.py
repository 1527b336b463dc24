"""Packing again, in plain Python on strings of 0 and 1, written from the description of the layout: slow and plain."""

from __future__ import annotations

from collections.abc import Sequence


def pack_row(row: bytes, width: int, always: Sequence[int], mask: Sequence[int], value: Sequence[int]) -> list[int]:
    """The 32-bit words that a row is stored as."""
    raw = _words("".join(_bits(byte, 8) for byte in row))
    chunks = [int.from_bytes(row[i : i + width // 8], "little") for i in range(0, len(row), width // 8)]
    if any((c ^ v) & a for c, a, v in zip(chunks, always, value)):
        return raw
    flags = kept = ""
    for c, a, k, v in zip(chunks, always, mask, value):
        matches = (c ^ v) & k == 0
        if k:
            flags += "1" if matches else "0"
        dropped = _bits(a | (k if matches else 0), width)
        kept += "".join(bit for bit, drop in zip(_bits(c, width), dropped) if drop == "0")
    packed = _words(flags + kept)
    return packed if len(packed) < len(raw) else raw


def unpack_row(
    words: Sequence[int], row_bytes: int, width: int, always: Sequence[int], mask: Sequence[int], value: Sequence[int]
) -> bytes:
    """The row that is stored as these words."""
    stream = iter("".join(_bits(word, 32) for word in words))
    if len(words) == -(-row_bytes // 4):
        return b"".join(int("".join(next(stream) for _ in range(8))[::-1], 2).to_bytes(1) for _ in range(row_bytes))
    flags = [next(stream) if k else "0" for k in mask]
    row = b""
    for flag, a, k, v in zip(flags, always, mask, value):
        dropped = _bits(a | (k if flag == "1" else 0), width)
        chunk = [bit if drop == "1" else next(stream) for bit, drop in zip(_bits(v, width), dropped)]
        row += int("".join(chunk)[::-1], 2).to_bytes(width // 8, "little")
    assert "1" not in set(stream)
    return row


def _bits(number: int, width: int) -> str:
    """Least significant first."""
    return format(number, f"0{width}b")[::-1]


def _words(bits: str) -> list[int]:
    bits += "0" * (-len(bits) % 32)
    return [int(bits[i : i + 32][::-1], 2) for i in range(0, len(bits), 32)]
