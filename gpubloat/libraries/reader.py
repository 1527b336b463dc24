"""A bounded little-endian view of one file: the only way the format readers touch bytes."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt

from gpubloat.errors import FormatError

Range = tuple[int, int]  # [start, stop) in a file


@dataclass(frozen=True, slots=True)
class Problem:
    """Something found that could not be read or understood: a row of the table `problems`."""

    offset: int
    problem: str
    detail: str


class Reader:
    """Bytes of one file (or of one member of an archive), with bounds checked on every access.

    Parameters
    ----------
    path : name used in messages; not opened.
    data : a memory map, or any object with the buffer interface.
    base : offset inside `data` where the file starts.
    size : its length; default, the rest of `data`.

    Every access outside the bounds raises FormatError with the path and the offset.
    """

    __slots__ = ("base", "data", "map", "path", "size")

    def __init__(self, path: str, data: Any, base: int = 0, size: int | None = None) -> None:
        self.path = path
        self.map = data if isinstance(data, mmap.mmap) else None
        self.data = data if isinstance(data, memoryview) else memoryview(data)
        self.base = base
        self.size = len(self.data) - base if size is None else size

    def error(self, offset: int, message: str, hint: str | None = None) -> FormatError:
        # A field can point anywhere; the place of the error is in the file.
        return FormatError(self.path, min(max(offset, 0), self.size), message, hint)

    def _at(self, offset: int, size: int, what: str) -> int:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise self.error(offset, f"{what} of {size} bytes does not fit into the file of {self.size} bytes")
        return self.base + offset

    def unpack(self, layout: Struct, offset: int, what: str) -> tuple[Any, ...]:
        """Fields of a fixed-size structure."""
        return layout.unpack_from(self.data, self._at(offset, layout.size, what))

    def view(self, offset: int, size: int, what: str = "range") -> memoryview:
        """The bytes themselves, not copied."""
        start = self._at(offset, size, what)
        return self.data[start : start + size]

    def array(self, dtype: npt.DTypeLike, offset: int, count: int, what: str) -> npt.NDArray[Any]:
        """`count` records of `dtype`, not copied. Shape (count,)."""
        kind = np.dtype(dtype)
        start = self._at(offset, kind.itemsize * count, what)
        return np.frombuffer(self.data, kind, count, start)

    def window(self, offset: int, size: int, name: str, what: str = "member") -> Reader:
        """A reader of a part: its offsets start at 0 again."""
        start = self._at(offset, size, what)
        part = Reader(f"{self.path}({name})", self.data, start, size)
        part.map = self.map
        return part

    def check_text(self, length: int) -> None:
        """FormatError where tables would repeat far more text than the file holds: one long name on very many rows."""
        if length > 64 * self.size + 65536:
            raise self.error(0, f"names that would fill {length} bytes, in a file of {self.size}")

    def release(self) -> None:
        """Give the pages read so far back to the system; they are read again when touched."""
        if self.map is not None:
            self.map.madvise(mmap.MADV_DONTNEED)
