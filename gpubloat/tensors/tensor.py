"""One tensor as rows of unsigned words, from arrays in memory: NumPy's and PyTorch's."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from gpubloat.errors import GpubloatError
from gpubloat.tensors.dtypes import named

Words = npt.NDArray[np.unsignedinteger[Any]]

CHUNKS = (8, 16, 32, 64)
_FLOATS = {"f8": "fp64", "f4": "fp32", "f2": "fp16", "b1": "bool"}
# What ml_dtypes and PyTorch call them; their other float8 types share the widths, not the meaning of the bits.
_OTHERS = {"bfloat16": "bf16", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
_NUMPY_NAMES = {"float64": "fp64", "float32": "fp32", "float16": "fp16"}
_SUPPORTED = "floats of 8 (e4m3fn, e5m2), 16, 32 and 64 bits, bfloat16, integers of 8 to 64 bits, and bool can be read"


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor: `n_rows` rows (dimension 0) of all other dimensions, flattened. No dimension: one row of one element.

    Attributes
    ----------
    name : as in the file.
    dtype : name of the element type in `dtypes.DTYPES`.
    shape : of the tensor.
    words : the elements as unsigned integers of their width, little-endian, of `shape`, C-contiguous and read-only.

    Raises
    ------
    GpubloatError : the parts do not fit together.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    words: Words

    def __post_init__(self) -> None:
        words = self.words.view()
        if words.dtype != named(self.dtype).words or words.shape != self.shape or not words.flags.c_contiguous:
            raise GpubloatError(f"tensor {self.name}: {words.dtype} {words.shape} are no {self.dtype} {self.shape}")
        words.flags.writeable = False
        object.__setattr__(self, "words", words)

    @property
    def n_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.words.itemsize

    @property
    def n_bytes(self) -> int:
        return self.words.nbytes

    def rows(self, chunk_bits: int | None = None) -> Words:
        """The tensor as (n_rows, m) unsigned words of `chunk_bits` each; default, the width of an element.

        A view, or a copy where it does not begin at a multiple of the word. GpubloatError if words of this width do not
        divide the row.
        """
        width = chunk_bits or self.words.itemsize * 8
        fitting = [str(bits) for bits in CHUNKS if self.row_bytes % (bits // 8) == 0]
        if str(width) not in fitting:
            raise GpubloatError(
                f"tensor {self.name}: rows of {self.row_bytes} bytes cannot be cut into words of {width} bits",
                f"widths that divide them: {', '.join(fitting)}",
            )
        dtype, shape = np.dtype(f"<u{width // 8}"), (self.n_rows, self.row_bytes * 8 // width)
        flat = aligned(self.words.reshape(-1).view(dtype)) if self.words.size else np.empty(0, dtype)
        words = flat.reshape(shape)
        words.flags.writeable = False
        return words


def as_tensor(x: Any, name: str = "tensor") -> Tensor:
    """`x` as a Tensor, without a copy where its elements lie one after another in memory.

    Parameters
    ----------
    x : NumPy array (also of ml_dtypes), PyTorch tensor (those on a GPU are copied to the host), anything else that
        NumPy makes an array of by ``__array__``, or a Tensor, which is returned as it is.
    name : of the Tensor.

    Raises
    ------
    GpubloatError : `x` is no such thing, is not dense, or its elements are of a type that cannot be read.
    """
    if isinstance(x, Tensor):
        return x
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    if torch is not None and isinstance(x, torch.Tensor):
        return _from_torch(torch, x, name)
    if not hasattr(x, "__array__"):
        raise GpubloatError(
            f"{name}: {type(x).__name__} is neither an array nor a tensor", "give a NumPy array or a PyTorch tensor"
        )
    try:
        array = np.asarray(x)
    except Exception as error:  # whatever another library raises for an array that it keeps elsewhere
        raise GpubloatError(f"{name}: NumPy cannot read it: {error}") from None
    return Tensor(name, dtype_of(array.dtype, name), array.shape, plain(array))


def dtype_of(dtype: np.dtype[Any], name: str) -> str:
    """Which of `DTYPES` NumPy's `dtype` is, in any byte order; GpubloatError if it is none."""
    kind = f"{dtype.kind}{dtype.itemsize}"
    if kind in _FLOATS:
        return _FLOATS[kind]
    if dtype.name in _OTHERS:
        return _OTHERS[dtype.name]
    if re.fullmatch(r"[iu][1248]", kind):
        return f"{'u' * (kind[0] == 'u')}int{dtype.itemsize * 8}"
    raise GpubloatError(f"{name}: elements of type {dtype} cannot be read", _SUPPORTED)


def plain(array: npt.NDArray[Any]) -> Words:
    """The elements of `array` as little-endian words in C order; copied only if they are not that already."""
    order = array.dtype.str[0] if array.dtype.kind in "fiu" else "<"
    words = array if array.flags.c_contiguous else array.copy(order="C")
    words = words.view(f"{'>' if order == '>' else '<'}u{array.itemsize}")
    return aligned(words.astype(f"<u{array.itemsize}", copy=False))


def aligned(words: Words) -> Words:
    """`words`, copied if they do not begin at a multiple of their size: compiled loops count on that."""
    return words if words.flags.aligned else words.copy()


def torch_dtype(name: str) -> str | None:
    """Which of `DTYPES` PyTorch's ``torch.<name>`` is, or None."""
    known = _OTHERS.get(name) or _NUMPY_NAMES.get(name)
    return known or (name if name == "bool" or re.fullmatch(r"u?int(8|16|32|64)", name) else None)


def _from_torch(torch: Any, x: Any, name: str) -> Tensor:
    kind = str(x.dtype).removeprefix("torch.")
    dtype = torch_dtype(kind)
    if dtype is None:
        raise GpubloatError(f"{name}: elements of type {kind} cannot be read", _SUPPORTED)
    if x.layout != torch.strided or x.is_nested or x.device.type == "meta":
        what = "meta" if x.device.type == "meta" else "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise GpubloatError(f"{name}: a {what} tensor has no rows to read", "give a dense tensor: .to_dense()")
    same_width = (torch.uint8, torch.int16, torch.int32, torch.int64)[named(dtype).bits.bit_length() - 4]
    try:
        dense = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
        array = dense.view(same_width).numpy()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise GpubloatError(f"{name}: PyTorch cannot give its bytes: {reason}") from None
    return Tensor(name, dtype, tuple(array.shape), plain(array))
