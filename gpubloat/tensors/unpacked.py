"""Unpacked tensors as a file of safetensors, one after the other: no more than one of them is in memory.

Source of the format: as in `files.safetensors`, which reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gpubloat.errors import GpubloatError
from gpubloat.run import replacing_file
from gpubloat.tensors.files.safetensors import DTYPES, METADATA, SUFFIX
from gpubloat.tensors.packing import Packed, unpack

_NAMES = {ours: theirs for theirs, ours in DTYPES.items()}
_ALIGN = 8  # of the first tensor's bytes, as the library does it


def write(path: Path, tensors: Mapping[str, Packed], force: bool = False) -> None:
    """Unpack tensors to a new file, under a temporary name until all are written and checked.

    Raises
    ------
    GpubloatError : the file exists and `force` is not set, it cannot be written, or a packed tensor is damaged.
    """
    if path.suffix != SUFFIX:
        raise GpubloatError(f"{path} is no name for a file of safetensors", f"let it end in {SUFFIX}")
    if METADATA in tensors:
        raise GpubloatError(
            f"a tensor is called {METADATA}, which safetensors has another use for", "unpack it in Python"
        )
    header: dict[str, object] = {}
    at = 0
    for name, packed in tensors.items():
        end = at + packed.raw_bytes
        header[name] = {"dtype": _NAMES[packed.dtype], "shape": packed.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % _ALIGN)
    with replacing_file(path, force) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for packed in tensors.values():
            file.write(np.ascontiguousarray(unpack(packed)).reshape(-1).view(np.uint8).data)
