"""Tensors, from files and from memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from gpubloat.errors import GpubloatError
from gpubloat.tensors.files import npy, safetensors, torchzip
from gpubloat.tensors.tensor import Tensor, as_tensor

__all__ = ["Tensor", "as_tensor", "tensors_in"]

_READERS: dict[str, Callable[[Path], list[Tensor]]] = {
    safetensors.INDEX: safetensors.indexed,
    safetensors.SUFFIX: safetensors.tensors,
    ".npy": npy.array,
    ".npz": npy.archive,
    ".pth": torchzip.tensors,
    ".pt": torchzip.tensors,
    ".bin": torchzip.tensors,
}


def tensors_in(path: str | os.PathLike[str]) -> list[Tensor]:
    """All tensors of a file or a folder, mapped where their bytes lie in the file as they are.

    Parameters
    ----------
    path : a file of safetensors; the index of a model in several of them; .npy; .npz; a PyTorch file (.pth, .pt, .bin;
        only read by place: nothing in it is unpickled); or a folder with files of safetensors.

    Raises
    ------
    GpubloatError : there is no such file, or its kind is not known. FormatError : it is damaged or hostile, or has
        tensors of a type that cannot be read.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return safetensors.folder(path)
        is_file = path.is_file()
    except (OSError, ValueError) as error:
        raise GpubloatError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    for suffix, read in _READERS.items():
        if is_file and path.name.lower().endswith(suffix):
            return read(path)
    raise GpubloatError(
        f"{path}: {'tensors are not read from such a file' if is_file else 'no such file or folder'}",
        f"files with tensors end in {', '.join(_READERS)}",
    )
