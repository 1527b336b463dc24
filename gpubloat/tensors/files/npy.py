"""NumPy's files: .npy, mapped, and .npz. No object arrays: they are pickles, and a pickle is a program.

Source: numpy.lib.format, "Format Version 1.0" to "3.0".
"""

from __future__ import annotations

import ast
import re
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from gpubloat.tensors.files.mapped import Bytes, opened
from gpubloat.tensors.files.zipfiles import contents, members
from gpubloat.tensors.tensor import Tensor, dtype_of, plain

_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 10_000  # as numpy.load


def array(path: Path) -> list[Tensor]:
    """The one array of a .npy file, called like the file."""
    file = opened(path)
    return [_array(file, file.name(path.stem, 0))]


def archive(path: Path) -> list[Tensor]:
    """The arrays of a .npz file, in its order; those that are not compressed are mapped."""
    file = opened(path)
    found = []
    inflated = 0
    for member in members(file).values():
        if member.name.endswith(".npy"):
            inside, inflated = contents(file, member, inflated)
            found.append(_array(inside, file.name(member.name.removesuffix(".npy"), member.at)))
    return found


def _array(file: Bytes, name: str) -> Tensor:
    if file.read(0, min(len(_MAGIC), file.size), "magic") != _MAGIC:
        raise file.error(0, "not a .npy file")
    major, minor, *length = file.read(len(_MAGIC), 6, "version")
    if (major, minor) not in ((1, 0), (2, 0), (3, 0)):
        raise file.error(len(_MAGIC), f"version {major}.{minor} of the .npy format is not known")
    wide = 2 if major == 1 else 4
    at, size = len(_MAGIC) + 2 + wide, int.from_bytes(bytes(length[:wide]), "little")
    if size > _MAX_HEADER:
        raise file.error(at - wide, f"a header of {size} bytes; at most {_MAX_HEADER} are read")
    header = _header(file, at, size, "utf-8" if major == 3 else "latin-1")
    descr = header["descr"]
    if not isinstance(descr, str) or not re.fullmatch(r"[<>|=][fiub]\d{1,2}", descr):
        hint = (
            "save it with a plain dtype" if "V" not in str(descr) else "save it as .safetensors, which names the type"
        )
        if "O" in str(descr):
            hint = "Python objects are stored as a pickle, which could run anything: save numbers"
        raise file.error(at, f"array {name!r}: elements of type {str(descr)[:100]} cannot be read", hint)
    try:
        dtype = np.dtype(descr)
    except TypeError:
        raise file.error(at, f"array {name!r}: there are no elements of type {descr}") from None
    known = dtype_of(dtype, name)
    shape = file.shape(header["shape"], dtype.itemsize, at, f"array {name!r}")
    start, n_bytes = at + size, prod(shape) * dtype.itemsize
    if start + n_bytes < file.size:
        raise file.error(
            start + n_bytes, f"{file.size - start - n_bytes} bytes after the array", "is it several arrays?"
        )
    fortran = header["fortran_order"]
    words = file.words(np.dtype(f"<u{dtype.itemsize}"), start, shape[::-1] if fortran else shape, f"array {name!r}")
    stored = words.view(dtype)
    return Tensor(name, known, shape, plain(stored.T if fortran else stored))


def _header(file: Bytes, at: int, size: int, encoding: str) -> dict[str, Any]:
    """The dictionary with descr, fortran_order and shape: a literal, nothing in it is run."""
    try:
        header = ast.literal_eval(file.read(at, size, "header").decode(encoding))
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise file.error(at, "the header is no Python literal") from None
    if not isinstance(header, dict) or header.keys() != {"descr", "fortran_order", "shape"}:
        raise file.error(at, "the header does not give descr, fortran_order and shape")
    if not isinstance(header["fortran_order"], bool):
        raise file.error(at, "fortran_order is neither True nor False")
    return header
