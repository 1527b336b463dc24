"""Values of tensors as they were at one moment: equal ones once; in memory up to a limit, in files up to another."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

KEEP_BYTES = 2 << 30
SPILL_BYTES = 16 << 30
_HASHED = 4 << 20  # bytes that one thread hashes at a time
_THREADS = min(8, os.cpu_count() or 1)
# What PyTorch and JAX call them -> our names, where these differ.
NAMES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "float8_e4m3fnuz": "fp8_e4m3fnuz",
    "float8_e5m2fnuz": "fp8_e5m2fnuz",
    "float8_e8m0fnu": "fp8_e8m0",
}
# Our names -> NumPy's. Those that NumPy has not are kept as unsigned integers and decoded when asked for.
NUMPY = {
    "fp64": "f8", "fp32": "f4", "fp16": "f2", "complex64": "c8", "complex128": "c16", "bool": "?",
    "int8": "i1", "int16": "i2", "int32": "i4", "int64": "i8", "uint8": "u1", "uint16": "u2", "uint32": "u4",
    "uint64": "u8",
}  # fmt: skip
# name -> exponent bits, mantissa bits, bias, what is no number: "ieee", "fn" (only all ones), "fnuz" (only -0)
SMALL_FLOATS = {
    "fp8_e4m3": (4, 3, 7, "fn"),
    "fp8_e5m2": (5, 2, 15, "ieee"),
    "fp8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "fp8_e5m2fnuz": (5, 2, 16, "fnuz"),
}


@dataclass(frozen=True)
class _Entry:
    """A value. key : of its bytes. stored : the shape that is stored, where axes that were expanded have length 1."""

    key: bytes
    dtype: str
    shape: tuple[int, ...]
    stored: tuple[int, ...]


class Store:
    """Bounded. keep_bytes : in memory. spill_bytes : in files of a private temporary folder below `folder`.

    Equal contents (by a 128-bit BLAKE2b) are stored once. The folder goes when the store is closed or
    collected.
    """

    def __init__(
        self, keep_bytes: int = KEEP_BYTES, spill_bytes: int = SPILL_BYTES, folder: str | Path | None = None
    ) -> None:
        self.keep_bytes = keep_bytes
        self.spill_bytes = spill_bytes
        self.folder = folder
        self.kept_bytes = 0
        self.spilled_bytes = 0
        self.refused: dict[str, int] = {}  # reason -> how many
        self._entries: dict[int, _Entry] = {}
        self._blobs: dict[bytes, Array | Path] = {}
        self._spill: Path | None = None
        self._remove: weakref.finalize[..., Any] | None = None

    @classmethod
    @contextmanager
    def owned(cls, keep_bytes: int, spill_bytes: int, folder: str | Path | None) -> Iterator[Store]:
        """A store that is closed if the block raises."""
        store = cls(keep_bytes, spill_bytes, folder)
        try:
            yield store
        except BaseException:
            store.close()
            raise

    def put(
        self, tensor: int, content: Array, dtype: str, shape: tuple[int, ...] | None = None, is_ours: bool = False
    ) -> bool:
        """Keep a value; whether it could be.

        content : elements as NumPy has them, or as unsigned integers of their size; copied, unless nobody else changes
        it (`is_ours`). dtype : one that `holds` knows. shape : of the value, where `content` has length 1 in expanded
        axes.
        """
        flat = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        key = _key(flat)
        if key not in self._blobs and not self._add(key, flat, is_ours):
            return False
        self._entries[tensor] = _Entry(key, dtype, content.shape if shape is None else shape, content.shape)
        return True

    def put_again(self, tensor: int, other: int, dtype: str, shape: tuple[int, ...]) -> bool:
        """Keep a value whose bytes are those of another, in the same order; whether that was kept."""
        entry = self._entries.get(other)
        if entry is None:
            return False
        self._entries[tensor] = _Entry(entry.key, dtype, shape, shape)
        return True

    def notes(self) -> list[str]:
        """A sentence for each reason for which values were not kept."""
        return [f"{n} tensor{'s were' if n > 1 else ' was'} not kept: {why}" for why, n in self.refused.items()]

    def same(self, tensor: int, other: int) -> bool:
        """Whether both values are kept and equal bit by bit, shape and type too."""
        a, b = self._entries.get(tensor), self._entries.get(other)
        return a is not None and a == b

    def bits(self, tensor: int) -> tuple[Array, tuple[int, ...]] | None:
        """The bytes as stored, one axis, and the shape as stored; None if not kept."""
        entry = self._entries.get(tensor)
        if entry is None:
            return None
        blob = self._blobs[entry.key]
        if isinstance(blob, Path):
            blob = np.fromfile(blob, np.uint8)
        return blob, entry.stored

    def value(self, tensor: int) -> Array | None:
        """The value, read-only; bf16 and fp8 as fp32. None if not kept."""
        found = self.bits(tensor)
        if found is None:
            return None
        entry = self._entries[tensor]
        array = np.broadcast_to(decoded(found[0], entry.dtype).reshape(found[1]), entry.shape)
        array.flags.writeable = False
        return array

    def close(self) -> None:
        """Forget all values, remove the files."""
        self._entries.clear()
        self._blobs.clear()
        self.kept_bytes = self.spilled_bytes = 0
        if self._remove is not None:
            self._remove()
            self._spill = self._remove = None

    def _add(self, key: bytes, flat: Array, is_ours: bool) -> bool:
        if self.kept_bytes + flat.nbytes <= self.keep_bytes:
            self._blobs[key] = flat if is_ours else flat.copy()
            self.kept_bytes += flat.nbytes
            return True
        if self.spilled_bytes + flat.nbytes > self.spill_bytes:
            return self.refuse("the limits keep_bytes and spill_bytes are reached")
        try:
            if self._spill is None:
                self._spill = Path(tempfile.mkdtemp(prefix="gpubloat-capture-", dir=self.folder))
                self._remove = weakref.finalize(self, shutil.rmtree, self._spill, ignore_errors=True)
            path = self._spill / key.hex()
            flat.tofile(path)
        except OSError as error:
            # A write cut short reports no error number.
            return self.refuse(f"spilling failed: {error.strerror or error}")
        self._blobs[key] = path
        self.spilled_bytes += flat.nbytes
        return True

    def refuse(self, reason: str) -> bool:
        """Count a value that is not kept, for `notes`."""
        self.refused[reason] = self.refused.get(reason, 0) + 1
        return False


def _key(flat: Array) -> bytes:
    """What bytes are known by. Of many, pieces are hashed in threads, which hashlib lets run side by side."""
    if flat.nbytes <= _HASHED:
        return _digest(flat)
    with ThreadPoolExecutor(_THREADS) as pool:
        pieces = pool.map(_digest, (flat[at : at + _HASHED] for at in range(0, flat.nbytes, _HASHED)))
        return _digest(np.frombuffer(flat.nbytes.to_bytes(8, "little") + b"".join(pieces), np.uint8))


def _digest(flat: Array) -> bytes:
    return hashlib.blake2b(flat.data, digest_size=16).digest()


def holds(dtype: str) -> bool:
    """Whether values of an element type of this name can be kept and read back."""
    return dtype in NUMPY or dtype in SMALL_FLOATS or dtype in ("bf16", "fp8_e8m0")


def decoded(content: Array, dtype: str) -> Array:
    """Bytes (one axis) as the elements that they are; bf16 and fp8 as fp32, which holds all of their values."""
    if dtype == "bf16":
        wide: Array = np.left_shift(content.view("<u2"), 16, dtype="<u4")
        return wide.view("<f4")
    if dtype == "fp8_e8m0":
        return _powers()[content]
    if dtype in SMALL_FLOATS:
        return _small(*SMALL_FLOATS[dtype])[content]
    return content.view(np.dtype(NUMPY[dtype]))


def _powers() -> Array:
    """All values of fp8_e8m0: powers of two, and one that is no number."""
    return np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)


def _small(exponent_bits: int, mantissa_bits: int, bias: int, special: str) -> Array:
    """All 256 values of an 8-bit float, by its bits."""
    code = np.arange(256)
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa)
    values: Array = np.ldexp(fraction.astype(np.float32), np.maximum(exponent, 1) - bias - mantissa_bits)
    values = np.where(code >= 128, -values, values).astype(np.float32)
    if special == "fnuz":
        values[128] = np.nan
    elif special == "fn":
        values[[127, 255]] = np.nan
    else:
        top = exponent == (1 << exponent_bits) - 1
        values[top] = np.where(mantissa[top] > 0, np.nan, np.where(code[top] >= 128, -np.inf, np.inf))
    return values
