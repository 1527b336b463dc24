"""Tensors as packed rows and back, bit for bit, in memory (reference; the layout of a row is in `rowbits`).

Nothing is packed in place: the caller's tensor is not written to, and a checksum of its bytes goes with the result.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gpubloat.errors import GpubloatError
from gpubloat.tensors.codebook import Codebook, fit
from gpubloat.tensors.dtypes import named
from gpubloat.tensors.jit import in_blocks
from gpubloat.tensors.rowbits import Words, decode, encode, measure
from gpubloat.tensors.sources import as_tensor

LAYOUTS = ("condensed", "slots")
_SLOT_WORDS = 4  # slots are whole 16 bytes
_MOST_ROW_BYTES = 4 * (2**32 - 1)  # lengths of rows are 32-bit numbers of 32-bit words
_NATURAL = {f"int{8 * width}": f"<i{width}" for width in (1, 2, 4, 8)}
_NATURAL |= {"fp64": "<f8", "fp32": "<f4", "fp16": "<f2", "bool": "|b1"}


@dataclass(frozen=True, eq=False)
class Packed:
    """A packed tensor.

    Attributes
    ----------
    dtype, shape : of the tensor. layout : condensed, rows back to back; slots, each at a multiple of `stride_words`.
    words : uint32, the rows. row_words : (n,) uint32 stored length of each; a row of `raw_words` is not packed.
    crc32 : of the tensor's bytes, row after row.

    Raises
    ------
    GpubloatError : the parts do not fit together.
    """

    codebook: Codebook
    dtype: str
    shape: tuple[int, ...]
    layout: str
    words: Words
    row_words: Words
    crc32: int

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise GpubloatError(f"there is no layout {self.layout!r}", f"layouts: {', '.join(LAYOUTS)}")
        if (self.codebook.dtype, self.codebook.row_shape) != (self.dtype, self.shape[1:]):
            raise GpubloatError(f"the codebook is not for {self.dtype} {self.shape}")
        for name in ("words", "row_words"):
            numbers = getattr(self, name)
            if numbers.dtype != np.dtype("<u4") or numbers.ndim != 1:
                raise GpubloatError(f"{name} of the packed tensor are not a row of 32-bit words")
        if len(self.row_words) != self.n_rows or (self.row_words > self.raw_words).any():
            raise GpubloatError("lengths of packed rows do not fit the tensor's shape")
        if self.offsets[-1] != len(self.words):
            raise GpubloatError(f"packed rows take {self.offsets[-1]} words, and there are {len(self.words)}")

    @property
    def n_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return self.codebook.row_bytes

    @property
    def raw_words(self) -> int:
        return -(-self.row_bytes // 4)

    @property
    def stride_words(self) -> int:
        """From one slot to the next."""
        return -(-self.raw_words // _SLOT_WORDS) * _SLOT_WORDS

    @cached_property
    def offsets(self) -> Words:
        """(n + 1,) uint64: the word at which each row begins, and the end."""
        if self.layout == "condensed":
            return _ends(self.row_words)
        return np.arange(self.n_rows + 1, dtype=np.uint64) * np.uint64(self.stride_words)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.shape))
        sizes = f"{self.raw_bytes:,} -> {self.packed_bytes:,} bytes, {self.saving_frac:.1%} saved"
        return f"Packed({self.dtype} {shape}, {self.layout}, {sizes})"

    def to(self, device: Any = "cuda") -> Any:
        """The tensor as PyTorch has it, decoded on a device: `gpu.torchuse.PackedTensor.to`."""
        return self._in_torch.to(device)

    def gather(self, indices: Any, out: Any = None) -> Any:
        """Rows by number, decoded where `indices` are, a tensor of PyTorch: `gpu.torchuse.PackedTensor.gather`.

        A list or an array of numbers counts as a tensor of the CPU. For a GPU the packed words are copied to pinned
        host memory once, and stay there as long as this object.
        """
        from gpubloat.tensors.gpu.torchuse import as_indices

        wanted = as_indices(indices)
        return (self._in_torch.pin() if wanted.is_cuda else self._in_torch).gather(wanted, out)

    @cached_property
    def _in_torch(self) -> Any:
        from gpubloat.tensors.gpu.torchuse import PackedTensor  # PyTorch is loaded where it is needed

        return PackedTensor(self)

    @property
    def n_raw_rows(self) -> int:
        return int(np.count_nonzero(self.row_words == self.raw_words))

    @property
    def raw_bytes(self) -> int:
        return self.n_rows * self.row_bytes

    @property
    def packed_bytes(self) -> int:
        """Words that belong to rows (not the rest of slots), row_words, and the codebook."""
        return 4 * int(self.row_words.sum(dtype=np.int64)) + 4 * self.n_rows + self.codebook.n_bytes

    @property
    def saving_frac(self) -> float:
        """Of packed bytes over raw ones; 0 of an empty tensor, negative where packing costs more than it saves."""
        return 1 - self.packed_bytes / self.raw_bytes if self.raw_bytes else 0.0


def pack(x: Any, codebook: Codebook | None = None, layout: Literal["condensed", "slots"] = "condensed") -> Packed:
    """Pack `x`: a NumPy array, torch tensor or Tensor, with a codebook fitted to it or to others like it.

    Raises
    ------
    GpubloatError : the codebook is for another dtype or row, or a row has 16 GiB or more.
    """
    tensor = as_tensor(x)
    codebook = codebook or fit(tensor)
    if (codebook.dtype, codebook.row_shape) != (tensor.dtype, tensor.shape[1:]):
        raise GpubloatError(
            f"the codebook is for {codebook.dtype} rows of {codebook.row_shape}, "
            f"{tensor.name} has {tensor.dtype} rows of {tensor.shape[1:]}",
            "fit one to this tensor",
        )
    if tensor.row_bytes > _MOST_ROW_BYTES:
        raise GpubloatError(f"a row of {tensor.row_bytes} bytes is too long", "split or reshape it: 16 GiB at most")
    if layout not in LAYOUTS:
        raise GpubloatError(f"there is no layout {layout!r}", f"layouts: {', '.join(LAYOUTS)}")
    rows, codes = tensor.rows(codebook.chunk_bits), codebook.plan()
    row_words = np.empty(len(rows), np.uint32)
    in_blocks(lambda begin, end: measure(rows[begin:end], codes, row_words[begin:end]), len(rows), rows.nbytes)
    if layout == "condensed":
        offsets = _ends(row_words)
        words = np.empty(int(offsets[-1]), np.uint32)
    else:
        stride = -(-codes.raw_words // _SLOT_WORDS) * _SLOT_WORDS
        offsets = np.arange(len(rows) + 1, dtype=np.uint64) * np.uint64(stride)
        words = np.zeros(int(offsets[-1]), np.uint32)
    in_blocks(
        lambda begin, end: encode(rows[begin:end], codes, row_words[begin:end], offsets[begin:end], words),
        len(rows),
        rows.nbytes,
    )
    return Packed(codebook, tensor.dtype, tensor.shape, layout, words, row_words, _crc32(tensor.words))


def unpack(packed: Packed, out: Words | None = None) -> npt.NDArray[Any]:
    """The tensor that was packed, all its bits.

    Parameters
    ----------
    out : write into this array (C-contiguous, of the shape and dtype below) instead of a new one.

    Returns
    -------
    An array of the tensor's shape, in NumPy's dtype of that name. bf16 and fp8 have none: their bits are returned, as
    uint16 and uint8; view them as what you have (``.view(ml_dtypes.bfloat16)``).

    Raises
    ------
    GpubloatError : the result differs from what was packed (its checksum), or a row is damaged.
    """
    out = _output(packed, packed.shape, out)
    _decode(packed, np.arange(packed.n_rows), out)
    if _crc32(out) != packed.crc32:
        raise GpubloatError("the unpacked tensor is not the one that was packed: its checksum differs")
    return out


def unpack_rows(packed: Packed, indices: Any, out: Words | None = None) -> npt.NDArray[Any]:
    """Rows of the tensor that was packed, in the order of `indices` (0 to n - 1, any order, repeats allowed).

    Returns
    -------
    (len(indices), *shape[1:]) as from `unpack`; `out` as there. There is no checksum of single rows.

    Raises
    ------
    GpubloatError : an index is out of range or no integer, or a row is damaged.
    """
    wanted = np.asarray(indices)
    if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
        raise GpubloatError("indices of rows are a one-dimensional list of integers")
    if wanted.size and (wanted.min() < 0 or wanted.max() >= packed.n_rows):
        raise GpubloatError(f"rows {wanted.min()} to {wanted.max()} are asked for, and there are {packed.n_rows}")
    out = _output(packed, (wanted.size, *packed.shape[1:]), out)
    _decode(packed, wanted.astype(np.int64), out)
    return out


def _ends(row_words: Words) -> Words:
    offsets = np.zeros(len(row_words) + 1, np.uint64)
    np.cumsum(row_words, out=offsets[1:], dtype=np.uint64)
    return offsets


def _crc32(array: Words) -> int:
    return zlib.crc32(array.reshape(-1).view(np.uint8).data)


def _output(packed: Packed, shape: tuple[int, ...], out: Words | None) -> Words:
    dtype = np.dtype(_NATURAL.get(packed.dtype, named(packed.dtype).words))
    if out is None:
        try:
            return np.empty(shape, dtype)
        except MemoryError:
            raise GpubloatError(f"{prod(shape) * dtype.itemsize} bytes do not fit into memory") from None
    if out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous or not out.flags.writeable:
        raise GpubloatError(f"out is no writeable C-contiguous {dtype} array of shape {shape}")
    return out


def _decode(packed: Packed, wanted: Words, out: Words) -> None:
    """Write the rows of these numbers to `out`, whose rows they are."""
    codebook, codes = packed.codebook, packed.codebook.plan()
    word = codebook.always.dtype
    rows = np.empty((len(wanted), 0), word)
    if packed.row_bytes:
        rows = out.reshape(len(wanted), -1) if out.size else out.reshape(0, prod(packed.shape[1:]))
        rows = rows.view(word)
    stored, row_words, offsets = (_read_only(a) for a in (packed.words, packed.row_words, packed.offsets))

    def read(begin: int, end: int) -> int:
        return decode(stored, codes, row_words, offsets, wanted[begin:end], rows[begin:end])

    damaged = [row for row in in_blocks(read, len(wanted), rows.nbytes) if row >= 0]
    if damaged:
        raise GpubloatError(f"row {damaged[0]} of the packed tensor is damaged: its length is not what its flags say")


def _read_only(array: Words) -> Words:
    """One type for the compiled loops, be it a part of a file or not."""
    view: Words = np.asarray(array).view()
    view.flags.writeable = False
    return view
