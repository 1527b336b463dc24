"""Packed tensors in PyTorch: rows, whole tensors and embeddings out of packed host memory.

Everything works on the CPU, too, by the reference in `packing`: slower, the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpubloat.errors import GpubloatError
from gpubloat.optional import torch_module
from gpubloat.tensors import packing
from gpubloat.tensors.codebook import Codebook
from gpubloat.tensors.gpu import device as gpu
from gpubloat.tensors.gpu import launch
from gpubloat.tensors.gpu.hostmemory import Pinned
from gpubloat.tensors.packing import Packed

torch: Any = torch_module()

CHUNK_BYTES = 64 << 20  # of packed words that are copied at once while those before are decoded
_NAMES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn",
          "fp8_e5m2": "float8_e5m2"}  # fmt: skip


class PackedTensor:
    """A packed tensor in host memory, that gives its rows or all of itself to a GPU (or to the CPU).

    Attributes
    ----------
    packed : what it holds. shape, dtype : of the tensor, as PyTorch has them. nbytes : of the packed form.
    """

    def __init__(self, packed: Packed) -> None:
        self.packed = packed
        self.shape = torch.Size(packed.shape)
        self.dtype: Any = getattr(torch, _NAMES.get(packed.dtype, packed.dtype))
        self.nbytes = packed.packed_bytes
        self._pinned: Pinned | None = None
        self._rows: dict[int, gpu.Rows] = {}

    def pin(self) -> PackedTensor:
        """Copy the packed words to host memory that GPUs can read (`hostmemory.Pinned`); once is enough.

        Raises DeviceError, MissingToolError without a GPU, GpubloatError if the driver refuses.
        """
        if self._pinned is None:
            self._pinned = Pinned(self.packed.words)
        return self

    def unpin(self) -> None:
        """Give the pinned copy back."""
        self._rows.clear()
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None

    @property
    def is_pinned(self) -> bool:
        return self._pinned is not None

    def rows(self, device: Any) -> gpu.Rows:
        """The rows as kernels on a CUDA device read them from pinned memory. GpubloatError if they are not pinned."""
        if self._pinned is None:
            raise GpubloatError(
                "the packed words are in pageable memory, which the GPU cannot read", "call pin() first"
            )
        index = torch.device(device).index
        index = torch.cuda.current_device() if index is None else index
        if index not in self._rows:
            self._rows[index] = gpu.rows(self.packed, self._pinned, device)
        return self._rows[index]

    def gather(self, indices: Any, out: Any = None, presorted: bool = False) -> Any:
        """Rows by number, decoded where `indices` (int64) are: a GPU reads its rows from pinned host memory itself.

        Parameters
        ----------
        out : write into this contiguous tensor. presorted : `indices` ascend; else they are read in ascending order
            all the same, for the sake of neighbours in one memory page, and written in theirs.

        Returns
        -------
        (*indices.shape, *shape[1:]). Of wrong indices on a GPU `check` tells: their rows are undefined.

        Raises
        ------
        GpubloatError : not pinned; on the CPU, an index out of range.
        """
        indices = as_indices(indices)
        out = self.room(indices, out)
        wanted = indices.reshape(-1).contiguous()
        if indices.device.type == "cpu":
            found = packing.unpack_rows(self.packed, wanted.numpy())
            as_bytes(out).copy_(torch.from_numpy(found.reshape(-1).view(np.uint8)))
            return out
        places = None
        if not presorted:
            wanted, places = torch.sort(wanted)
        self.rows(indices.device).decode(out.view(len(wanted), -1) if out.numel() else out, wanted, places)
        return out

    def room(self, indices: Any, out: Any = None) -> Any:
        """Where rows of these numbers go: `out`, or a new tensor. GpubloatError if either is not as it has to be."""
        if indices.dtype.is_floating_point or indices.dtype.is_complex or indices.dtype == torch.bool:
            raise GpubloatError(f"numbers of rows are integers, not {indices.dtype}")
        shape = (*indices.shape, *self.shape[1:])
        out = empty(shape, self.dtype, indices.device) if out is None else out
        if out.shape != shape or out.dtype != self.dtype or out.device != indices.device or not out.is_contiguous():
            raise GpubloatError(f"out is no contiguous {self.dtype} tensor of shape {tuple(shape)} on {indices.device}")
        return out

    def check(self) -> None:
        """Wait for the GPUs; GpubloatError if an index given to `gather` was out of range, or a row damaged."""
        for rows in self._rows.values():
            rows.check()

    def to(self, device: Any = "cuda", chunk_bytes: int = CHUNK_BYTES) -> Any:
        """The whole tensor on a device: packed words are copied there in chunks, and decoded as they come.

        It need not be pinned, but copies from pageable memory are slow, and do not overlap with decoding.

        Raises
        ------
        GpubloatError : a row is damaged; on the CPU, the checksum differs. DeviceError, MissingToolError : as `pin`.
        """
        out = empty(self.shape, self.dtype, device)
        if out.device.type == "cpu":
            found = packing.unpack(self.packed)
            as_bytes(out).copy_(torch.from_numpy(found.reshape(-1).view(np.uint8)))
            return out
        rows = self.rows(out.device) if self.is_pinned else gpu.rows(self.packed, None, out.device)
        flat = out.view(self.packed.n_rows, -1) if out.numel() else out
        main, side = torch.cuda.current_stream(out.device), torch.cuda.Stream(out.device)
        chunks = self._chunks(chunk_bytes // 4)
        most = max((words for _, _, _, words in chunks), default=0)
        stages = [torch.empty(most, dtype=torch.int32, device=out.device) for _ in range(min(2, len(chunks)))]
        side.wait_stream(main)
        for stage in stages:
            stage.record_stream(side)
        free: list[Any] = []
        for i, (begin, end, base, n_words) in enumerate(chunks):
            stage = stages[i % 2][:n_words]
            with torch.cuda.stream(side):
                if i >= 2:
                    side.wait_event(free[i - 2])
                self.copy_words(stage, base)
            main.wait_stream(side)
            rows.part(begin, end, stage, base).decode(flat[begin:end])
            free.append(main.record_event())
        rows.check()
        return out

    def copy_words(self, target: Any, base: int) -> None:
        """Start to copy packed words from number `base` on to an int32 CUDA tensor, on the current stream."""
        if self._pinned is not None:
            self._pinned.copy_to(target, 4 * base, 4 * target.numel())
        else:
            words = self.packed.words[base : base + target.numel()]
            target.copy_(torch.from_numpy(words.astype("<i4")))

    def _chunks(self, most_words: int) -> list[tuple[int, int, int, int]]:
        """(first row, last row + 1, first word, words) of blocks of at most so many words, but at least one row."""
        offsets, begin, found = self.packed.offsets, 0, []
        while begin < self.packed.n_rows:
            until = offsets[begin] + np.uint64(max(0, most_words))
            end = max(begin + 1, int(np.searchsorted(offsets, until, "right")) - 1)
            found.append((begin, end, int(offsets[begin]), int(offsets[end] - offsets[begin])))
            begin = end
        return found


class PackedEmbedding(torch.nn.Module):  # type: ignore[misc]
    """An embedding table that stays packed in host memory; rows are decoded where the indices are. Not trainable."""

    def __init__(self, weight: PackedTensor, cache: Any = None) -> None:
        super().__init__()
        self.weight = weight
        self.cache = cache

    @classmethod
    def from_pretrained(
        cls, weight: Any, codebook: Codebook | None = None, cache_bytes: int = 0, device: Any = None
    ) -> PackedEmbedding:
        """Pack `weight` (n, d). With a CUDA `device` it is pinned, and up to `cache_bytes` of rows are kept there."""
        from gpubloat.tensors.gpu.rowcache import RowCache

        packed = PackedTensor(packing.pack(weight, codebook))
        where = torch.device(device or "cpu")
        if where.type == "cuda":
            packed.pin()
        return cls(packed, RowCache(packed, cache_bytes, device=where) if cache_bytes else None)

    def forward(self, indices: Any) -> Any:
        return (self.cache or self.weight).gather(indices)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, {self.weight.dtype}, saving {self.weight.packed.saving_frac:.1%}"


def empty(shape: Any, dtype: Any, device: Any) -> Any:
    """torch.empty; a GPU is asked for by `launch.gpu`, which says why there is none."""
    device = torch.device(device)
    if device.type != "cpu":
        device = torch.device("cuda", launch.gpu(device).index)
    return torch.empty(shape, dtype=dtype, device=device)


def as_indices(given: Any) -> Any:
    """Numbers of rows as a tensor: a list or an array of them, too. GpubloatError if it is none."""
    try:
        found = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise GpubloatError("these are no numbers of rows", "give a tensor, an array or a list of integers") from None
    return found if found.numel() or torch.is_tensor(given) else found.long()  # an empty list has no type


def as_bytes(tensor: Any) -> Any:
    """The bytes of a contiguous tensor, as a flat uint8 view."""
    return tensor.reshape(-1).view(torch.uint8)
