"""The bytes of one file, mapped and not read, with bounds checked on every access."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt

from gpubloat.errors import FormatError, GpubloatError
from gpubloat.tensors.tensor import Words, aligned

MAX_NAME = 1024  # characters of a tensor's name: it stands in every row of the tables
_MAX_DIMENSIONS = 64  # of a NumPy array
_MAX_BYTES = 2**63 - 1


class Bytes:
    """Bytes of a file, or of one member of an archive.

    Parameters
    ----------
    path : name used in messages. data : the bytes, (n,) uint8. base : offset of the first of them in that file.

    Every access outside raises FormatError with the path and the offset.
    """

    __slots__ = ("base", "data", "path")

    def __init__(self, path: str, data: npt.NDArray[np.uint8], base: int = 0) -> None:
        self.path, self.data, self.base = path, data, base

    @property
    def size(self) -> int:
        return len(self.data)

    def error(self, offset: int, message: str, hint: str | None = None) -> FormatError:
        return FormatError(self.path, self.base + min(max(offset, 0), self.size), message, hint)

    def check(self, offset: int, size: int, what: str) -> None:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise self.error(offset, f"{what} of {size} bytes does not fit into the {self.size} bytes that there are")

    def read(self, offset: int, size: int, what: str) -> bytes:
        """A copy of some bytes."""
        self.check(offset, size, what)
        return self.data[offset : offset + size].tobytes()

    def unpack(self, layout: Struct, offset: int, what: str) -> tuple[Any, ...]:
        """Fields of a fixed-size structure."""
        return layout.unpack(self.read(offset, layout.size, what))

    def part(self, offset: int, size: int, name: str) -> Bytes:
        """A part of the file, whose offsets start at 0 again; messages go on naming those in the file."""
        self.check(offset, size, name)
        return Bytes(f"{self.path}({name})", self.data[offset : offset + size], self.base + offset)

    def words(self, dtype: np.dtype[Any], offset: int, shape: Sequence[int], what: str) -> Words:
        """An array of words, not copied if its place is a multiple of their size."""
        self.shape(shape, dtype.itemsize, offset, what)
        size = prod(shape) * dtype.itemsize
        self.check(offset, size, what)
        if not size:
            return np.empty(tuple(shape), dtype)
        return aligned(self.data[offset : offset + size].view(dtype)).reshape(shape)

    def shape(self, shape: Any, itemsize: int, offset: int, what: str) -> tuple[int, ...]:
        """`shape`, if it is one that an array of elements of `itemsize` bytes can have."""
        if not isinstance(shape, (list, tuple)) or len(shape) > _MAX_DIMENSIONS:
            raise self.error(offset, f"{what}: its shape is no list of up to {_MAX_DIMENSIONS} numbers")
        if not all(type(n) is int and 0 <= n <= _MAX_BYTES for n in shape):
            raise self.error(offset, f"{what}: its shape has something else than sizes")
        if prod(n for n in shape if n) * itemsize > _MAX_BYTES:  # NumPy refuses it even where one size is 0
            raise self.error(offset, f"{what}: its shape is larger than memory can be")
        return tuple(shape)

    def name(self, name: Any, offset: int) -> str:
        """`name`, if it is one that tables can hold."""
        if not isinstance(name, str) or len(name) > MAX_NAME:
            raise self.error(offset, f"the name of a tensor is no text of up to {MAX_NAME} characters")
        if any("\ud800" <= c <= "\udfff" for c in name):
            raise self.error(offset, "the name of a tensor is no valid Unicode")
        return name

    def json(self, offset: int, size: int, what: str) -> dict[str, Any]:
        """A JSON object; a key that stands in it twice is an error."""
        try:
            found = json.loads(self.read(offset, size, what).decode("utf-8"), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise self.error(offset, f"{what} is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise self.error(offset, f"{what} is no JSON object")
        return found


def opened(path: Path) -> Bytes:
    """A file, mapped; GpubloatError if it cannot be opened, FormatError if it is empty."""
    try:
        data = np.memmap(path, np.uint8, "r") if path.stat().st_size else None
    except (OSError, ValueError) as error:
        raise GpubloatError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if data is None:
        raise FormatError(path.name, 0, "the file is empty", "download it again")
    return Bytes(path.name, np.asarray(data))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice[:MAX_NAME]!r} stands in it twice")
    return found
