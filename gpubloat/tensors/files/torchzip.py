"""PyTorch's files since 1.6: a zip file with one pickle, and the bytes of each storage, which are mapped.

Source: torch/csrc/jit/serialization/docs/serialization.md of PyTorch. What tensors there are is read off the pickle by
`picklewalk`; a file cannot run anything here.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from gpubloat.errors import FormatError
from gpubloat.tensors.dtypes import named
from gpubloat.tensors.files.mapped import MAX_NAME, Bytes, opened
from gpubloat.tensors.files.picklewalk import Pairs, View, walk
from gpubloat.tensors.files.zipfiles import Member, contents, members
from gpubloat.tensors.tensor import Tensor, Words, torch_dtype

# Lists may refer to lists that refer to lists: few bytes, very many ways to go.
_MAX_DEPTH = 100
_MAX_OBJECTS = 1 << 22
_MAX_TENSORS = 1 << 18


def tensors(path: Path) -> list[Tensor]:
    """All tensors of a file, called by their keys, joined by dots; one that is alone is called like the file.

    Views that do not lie in order in their storage are copied, at most as often as fits into four times the file.
    """
    file = opened(path)
    if file.read(0, min(2, file.size), "magic") != b"PK":
        raise file.error(
            0,
            "no zip file: PyTorch before 1.6 wrote tensors as a plain pickle, which is a program and is not read",
            "if you trust the file: torch.save(torch.load(path, map_location='cpu'), new_path), with a recent PyTorch",
        )
    return _Reader(file).tensors(path.stem)


class _Reader:
    """One file while it is read: what has been mapped, unpacked and copied of it."""

    def __init__(self, file: Bytes) -> None:
        self.file, self.members = file, members(file)
        roots = [name for name in self.members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise file.error(
                0, f"{len(roots)} members are called data.pkl, where PyTorch writes one", "is it PyTorch's?"
            )
        self.root = roots[0].removesuffix("data.pkl")
        self.at = self.members[roots[0]].at  # what the pickle says wrong is reported there
        self.inflated = self.copied = self.n_objects = 0
        self.storages: dict[str, Bytes] = {}
        self.views: dict[tuple[Any, ...], Words] = {}

    def tensors(self, stem: str) -> list[Tensor]:
        order = self.members.get(f"{self.root}byteorder")
        if order is not None and self._contents(order).data.tobytes() != b"little":
            raise self.file.error(order.at, "the file was written by a big-endian machine", "save it on this one")
        pickled = self.members[f"{self.root}data.pkl"]
        found: dict[str, Tensor] = {}
        for path, view in self._views("", walk(self._contents(pickled)), 0):
            name = self.file.name(path or stem, self.at)
            if name in found:
                raise self.error(f"two tensors are called {name!r}")
            if len(found) == _MAX_TENSORS:
                raise self.error(f"more than {_MAX_TENSORS} tensors")
            found[name] = self._tensor(name, view)
        return list(found.values())

    def error(self, message: str, hint: str | None = None) -> FormatError:
        return self.file.error(self.at, message, hint)

    def _views(self, path: str, found: Any, depth: int) -> Iterator[tuple[str, View]]:
        """Every tensor below `found`, which `path` leads to, with the keys that lead there."""
        if isinstance(found, View):
            yield path, found
        items = found if isinstance(found, Pairs) else enumerate(found) if isinstance(found, (list, tuple)) else ()
        for key, value in items:
            self.n_objects += 1
            if self.n_objects > _MAX_OBJECTS or depth > _MAX_DEPTH:
                raise self.error(f"more than {_MAX_OBJECTS} objects, or nested deeper than {_MAX_DEPTH}")
            if not isinstance(value, (View, list, tuple)):
                continue
            if not isinstance(key, str) and not (isinstance(key, int) and key.bit_length() < 64):
                raise self.error(f"a tensor is kept under a key of type {type(key).__name__}, not a name or number")
            if isinstance(key, str) and len(path) + len(key) > MAX_NAME:
                raise self.error(f"the keys that lead to a tensor have more than {MAX_NAME} characters")
            yield from self._views(f"{path}.{key}" if path else str(key), value, depth + 1)

    def _contents(self, member: Member) -> Bytes:
        inside, self.inflated = contents(self.file, member, self.inflated)
        return inside

    def _storage(self, view: View, itemsize: int, what: str) -> Bytes:
        key = view.storage.key
        if key not in self.storages:
            member = self.members.get(f"{self.root}data/{key}")
            if member is None:
                raise self.error(f"{what}: its storage {key[:100]!r} is not in the file")
            self.storages[key] = self._contents(member)
        # Where the storage has no type, its length is given in bytes.
        expected = view.storage.n_elements * (itemsize if view.storage.dtype else 1)
        if expected != self.storages[key].size:
            raise self.error(f"{what}: its storage has {self.storages[key].size} bytes, not {expected}")
        return self.storages[key]

    def _tensor(self, name: str, view: View) -> Tensor:
        what = f"tensor {name!r}"
        known = torch_dtype(view.dtype)
        if known is None:
            raise self.error(f"{what}: elements of type {view.dtype} cannot be read")
        if view.is_pending:
            raise self.error(f"{what}: a conjugate or negative that is not worked out", "save .resolve_neg()")
        dtype = named(known).words
        shape = self.file.shape(view.shape, dtype.itemsize, self.at, what)
        stride = self.file.shape(view.stride, dtype.itemsize, self.at, f"{what}: stride")
        (offset,) = self.file.shape((view.offset,), dtype.itemsize, self.at, f"{what}: offset")
        storage = self._storage(view, dtype.itemsize, what)
        if len(stride) != len(shape):
            raise self.error(f"{what}: {len(shape)} dimensions and {len(stride)} strides")
        count = prod(shape)
        last = offset + sum((n - 1) * s for n, s in zip(shape, stride)) if count else offset
        if count and (last + 1) * dtype.itemsize > storage.size:
            raise self.error(f"{what}: element {last} is outside its storage of {storage.size} bytes")
        if not count or _is_contiguous(shape, stride):
            words = storage.words(dtype, offset * dtype.itemsize if count else 0, shape, what)
        else:
            words = self._copy(storage, dtype, view.storage.key, offset, shape, stride, what)
        return Tensor(name, known, shape, words)

    def _copy(
        self, storage: Bytes, dtype: np.dtype[Any], key: str, offset: int, shape: Any, stride: Any, what: str
    ) -> Words:
        """A view whose elements are not in order, in order."""
        place = (key, dtype.itemsize, offset, shape, stride)
        if place not in self.views:
            self.copied += prod(shape) * dtype.itemsize
            # A stride of 0 makes any number of elements out of one.
            if prod(shape) * dtype.itemsize > storage.size or self.copied > 4 * self.file.size:
                raise self.error(f"{what}: a view with more elements than are stored", "save it contiguous")
            whole = storage.words(dtype, 0, (storage.size // dtype.itemsize,), what)
            steps = tuple(s * dtype.itemsize for s in stride)
            strided = np.lib.stride_tricks.as_strided(whole[offset:], shape, steps, writeable=False)
            self.views[place] = strided.copy(order="C")
        return self.views[place]


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for n, step in zip(reversed(shape), reversed(stride)):
        if n != 1 and step != expected:
            return False
        expected *= n
    return True
