"""Files of safetensors: single ones, and models in several of them with an index.

Source: "Format" in the README of huggingface/safetensors. An 8-byte length, a JSON header, and the tensors' bytes,
which fill the rest of the file without holes or overlaps. Checked here as the library does, before any is touched.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from struct import Struct
from typing import Any

from gpubloat.errors import GpubloatError
from gpubloat.tensors.dtypes import named
from gpubloat.tensors.files.mapped import Bytes, opened
from gpubloat.tensors.tensor import Tensor

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
METADATA = "__metadata__"  # a key of the header that is no tensor
_LENGTH = Struct("<Q")
_MAX_HEADER = 32 << 20  # the largest models' take less than 10 MiB; the library allows 100 MB
DTYPES = {
    "F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8_e4m3", "F8_E5M2": "fp8_e5m2",
    "BOOL": "bool", **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}  # fmt: skip


def tensors(path: Path) -> list[Tensor]:
    """All tensors of one file, in the order of its header. FormatError, GpubloatError: it cannot be read."""
    file = opened(path)
    (length,) = file.unpack(_LENGTH, 0, "length of the header")
    if length > _MAX_HEADER:
        raise file.error(
            0, f"a header of {length} bytes; at most {_MAX_HEADER} are read", "is this a safetensors file?"
        )
    header = file.json(_LENGTH.size, length, "header")
    header.pop(METADATA, None)
    start = _LENGTH.size + length
    found, places = [], []
    for name, entry in header.items():
        tensor, place = _tensor(file, start, file.name(name, _LENGTH.size), entry)
        found.append(tensor)
        places.append((*place, name))
    end = 0
    for begin, stop, name in sorted(places):
        if begin != end:
            problem = "overlaps the one before it" if begin < end else f"comes after {begin - end} bytes of no tensor"
            raise file.error(start + begin, f"tensor {name!r} {problem}")
        end = stop
    if start + end != file.size:
        raise file.error(start + end, f"{file.size - start - end} bytes after the last tensor")
    return found


def indexed(path: Path) -> list[Tensor]:
    """The tensors that an index names, in its order, from the files beside it."""
    file = opened(path)
    if file.size > _MAX_HEADER:
        raise file.error(0, f"an index of {file.size} bytes; at most {_MAX_HEADER} are read")
    names = file.json(0, file.size, "index").get("weight_map")
    if not isinstance(names, dict) or not names:
        raise file.error(0, "the index has no weight_map")
    shards: dict[str, dict[str, Tensor]] = {}
    found = []
    for name, shard in names.items():
        # The files that a model consists of lie beside its index; nothing else is opened on its behalf.
        if not isinstance(shard, str) or not shard.endswith(SUFFIX) or {*shard} & {"/", "\\", "\0"}:
            raise file.error(
                0, f"tensor {name!r} is said to be in {str(shard)[:200]!r}, which is no file beside the index"
            )
        if shard not in shards:
            if not (path.parent / shard).is_file():
                raise GpubloatError(f"{path.name} names {shard}, which is not there", "download all files of the model")
            shards[shard] = {tensor.name: tensor for tensor in tensors(path.parent / shard)}
        if name not in shards[shard]:
            raise file.error(0, f"tensor {name!r} is not in {shard}")
        found.append(shards[shard][name])
    return found


def folder(path: Path) -> list[Tensor]:
    """The tensors of a folder with a model: by its index, or of all files of safetensors in it."""
    indexes = sorted(path.glob(f"*{INDEX}"))
    if len(indexes) > 1:
        raise GpubloatError(f"{path} has {len(indexes)} indexes of models", f"give one of them: {indexes[0]}")
    if indexes:
        return indexed(indexes[0])
    files = sorted(path.glob(f"*{SUFFIX}"))
    if not files:
        raise GpubloatError(f"{path} holds no {SUFFIX} files", "give files with tensors by their names")
    owners: dict[str, Path] = {}
    found = []
    for file in files:
        for tensor in tensors(file):
            if tensor.name in owners:
                raise GpubloatError(
                    f"{path}: tensor {tensor.name!r} is in {owners[tensor.name].name} and in {file.name}",
                    "give one of the files",
                )
            owners[tensor.name] = file
            found.append(tensor)
    return found


def _tensor(file: Bytes, start: int, name: str, entry: Any) -> tuple[Tensor, tuple[int, int]]:
    """A tensor, and where its bytes begin and end behind the header."""
    at, what = _LENGTH.size, f"tensor {name!r}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise file.error(at, f"{what}: the header does not give its dtype, shape and data_offsets")
    kind, offsets = entry["dtype"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise file.error(
            at, f"{what}: elements of type {str(kind)[:40]!r} cannot be read", f"known: {', '.join(DTYPES)}"
        )
    dtype = named(DTYPES[kind])
    shape = file.shape(entry["shape"], dtype.words.itemsize, at, what)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):
        raise file.error(at, f"{what}: its data_offsets are no two numbers")
    begin, end = offsets
    if begin < 0 or end - begin != prod(shape) * dtype.words.itemsize:
        raise file.error(at, f"{what}: {end - begin} bytes at {begin} are no {kind} of shape {list(shape)}")
    return Tensor(name, dtype.name, shape, file.words(dtype.words, start + begin, shape, what)), (begin, end)
