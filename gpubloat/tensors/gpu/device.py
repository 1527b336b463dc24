"""Rows packed, decoded, counted and read on a GPU, by the kernels of native/tensors; all on PyTorch's current stream.

The results equal those of `packing`, bit for bit. Nothing here waits for the GPU but `Rows.check`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpubloat.errors import DeviceError, GpubloatError
from gpubloat.optional import torch_module
from gpubloat.tensors.codebook import Codebook
from gpubloat.tensors.gpu import hostmemory, kernels, launch
from gpubloat.tensors.gpu.launch import Gpu, pointer, u32, u64
from gpubloat.tensors.packing import Packed

THREADS = 512  # of a block; more warps share one copy of the codebook
MOST_BOOK_BYTES = 64 << 10  # of a codebook in shared memory: two blocks per SM
MOST_ROW_BYTES = 1 << 30  # the kernels count the words of four rows in 32 bits
LINE_BYTES = 16 << 10  # of whole rows that `count` reads side by side, at most, but for longer rows
LEAST_LINES = 64  # of a block
_STAGE_WORDS = 66  # of a warp that packs


@dataclass(frozen=True)
class Book:
    """A codebook in a GPU's memory. words : int32 (4, padded)."""

    gpu: Gpu
    words: Any
    chunk_bits: int
    n_flags: int
    row_bytes: int

    @property
    def padded(self) -> int:
        return int(self.words.shape[1])

    @property
    def raw_words(self) -> int:
        return -(-self.row_bytes // 4)


def book(codebook: Codebook, device: Any = "cuda") -> Book:
    """Copy a codebook to a GPU. GpubloatError for rows of more than 1 GiB; DeviceError as from `launch.gpu`."""
    gpu = launch.gpu(device)
    if codebook.row_bytes > MOST_ROW_BYTES:
        raise GpubloatError(f"rows of {codebook.row_bytes} bytes are too long for the GPU", "1 GiB at most")
    words = kernels.book_words(codebook.always, codebook.mask, codebook.value)
    return Book(
        gpu, to_device(words, gpu), codebook.chunk_bits, int(np.count_nonzero(codebook.mask)), codebook.row_bytes
    )


def to_device(array: np.ndarray, gpu: Gpu) -> Any:
    """Unsigned words of 32 and 64 bits as int32 and int64 tensors: PyTorch knows few operations on unsigned ones."""
    torch = torch_module()
    signed = np.ascontiguousarray(array).view(f"<i{array.itemsize}")
    if not signed.flags.writeable:
        signed = signed.copy()
    return torch.from_numpy(signed).to(gpu.device)


@dataclass(frozen=True)
class Rows:
    """Packed rows that a GPU can read.

    Attributes
    ----------
    address, n_words : the words, in memory of the GPU or pinned memory of the host. base : number of the first of them.
    row_words : int32 (n,), offsets : int64 (n,) or None for slots of `stride` words; both on the GPU.
    error : int32 (1,), what kernels found wrong. owner : whatever keeps the memory alive.
    """

    book: Book
    address: int
    n_words: int
    row_words: Any
    offsets: Any
    stride: int
    error: Any
    owner: Any = None
    base: int = 0

    def decode(
        self, out: Any, indices: Any = None, places: Any = None, words_per_lane: int | None = None,
        blocks_per_sm: int | None = None,
    ) -> None:  # fmt: skip
        """Write rows to `out`, a contiguous CUDA tensor of their bytes: all, or those of `indices` (int64, CUDA).

        Row i of them goes to row ``places[i]`` of `out` if given. `check` says whether all indices and rows were right:
        wrong ones leave `out` as it is.
        """
        n = len(self.row_words) if indices is None else len(indices)
        n_out = n if places is None else len(out)
        _fits(out, self.book.gpu, n_out * self.book.row_bytes)
        for numbers in (indices, places):
            _numbers(numbers, self.book.gpu, n)
        if n == 0 or self.book.row_bytes == 0:
            return
        lane = words_per_lane or (1 if self.book.raw_words <= 32 and self.book.chunk_bits < 64 else 2)
        shared = 16 * self.book.padded <= MOST_BOOK_BYTES
        shared_bytes = 16 * self.book.padded * shared + THREADS // 32 * kernels.warp_bytes()
        kernel = launch.load(
            self.book.gpu, kernels.unpack(self.book.chunk_bits, lane, book_shared=shared), THREADS, shared_bytes
        )
        most = self.book.gpu.n_sms * min(kernel.blocks, blocks_per_sm or kernel.blocks)
        tile = min(32, max(1, n // (most * THREADS // 32 * 4)))
        grid = min(most, -(-n // (tile * THREADS // 32)))
        launch.launch(
            kernel, (grid, 1), THREADS, shared_bytes,
            (pointer(self.address), u64(self.n_words), u64(self.base), pointer(self.row_words), pointer(self.offsets),
             u64(self.stride), u64(len(self.row_words)), pointer(indices), pointer(places), u64(n), u64(n_out),
             u32(tile), pointer(self.book.words), u32(self.book.padded), u32(self.book.n_flags), pointer(out),
             u64(self.book.row_bytes), pointer(self.error)),
        )  # fmt: skip

    def part(self, begin: int, end: int, words: Any, base: int) -> Rows:
        """Rows `begin` to `end`, whose words are in `words`, a CUDA tensor; `base` is the number of its first."""
        return dataclasses.replace(
            self, address=int(words.data_ptr()), n_words=int(words.numel()), row_words=self.row_words[begin:end],
            offsets=None if self.offsets is None else self.offsets[begin:end], owner=words, base=base,
        )  # fmt: skip

    def check(self) -> None:
        """Wait for the GPU; GpubloatError if a kernel met a wrong index or row since the last time."""
        found = int(self.error.item())
        self.error.zero_()
        if found & 1:
            raise GpubloatError(f"an index is out of range: there are {len(self.row_words)} rows")
        if found:
            raise GpubloatError("a packed row is damaged: it lies outside of the packed words")


def rows(packed: Packed, words: Any, device: Any = "cuda") -> Rows:
    """Rows of `packed`, whose words are in `words`: a hostmemory.Pinned, a CUDA tensor, or None (see `Rows.part`).

    Raises
    ------
    DeviceError, MissingToolError : as `launch.gpu`. GpubloatError : the words are pageable memory.
    """
    torch = torch_module()
    held = book(packed.codebook, device)
    address = 0
    if words is not None:
        address = words.address if isinstance(words, hostmemory.Pinned) else int(words.data_ptr())
    if address and len(packed.words) and not hostmemory.is_readable(address):
        raise GpubloatError("the packed words are in pageable memory, which the GPU cannot read", "call pin() first")
    offsets = to_device(packed.offsets[:-1], held.gpu) if packed.layout == "condensed" else None
    error = torch.zeros(1, dtype=torch.int32, device=held.gpu.device)
    row_words = to_device(packed.row_words, held.gpu)
    n_words = len(packed.words) if address else 0
    return Rows(held, address, n_words, row_words, offsets, packed.stride_words, error, words)


def pack(x: Any, codebook: Codebook, layout: str = "condensed") -> Rows:
    """Pack the rows of a contiguous CUDA tensor in the GPU's memory, as `packing.pack` would."""
    torch = torch_module()
    held = book(codebook, x.device)
    n = x.shape[0] if x.ndim else 1
    _fits(x, held.gpu, n * held.row_bytes)
    empty = {"device": x.device, "dtype": torch.int32}
    row_words = torch.empty(n, **empty)
    error, stride = torch.zeros(1, **empty), -(-held.raw_words // 4) * 4
    common = (pointer(x), u64(n), u64(held.row_bytes), pointer(held.words), u32(held.padded))
    if n and held.row_bytes:
        _over_rows(held.gpu, kernels.row_sizes(held.chunk_bits), n, 0,
                   (*common, u32(held.n_flags), pointer(row_words)))  # fmt: skip
    offsets, n_words = None, n * stride
    if layout == "condensed":
        ends = torch.cumsum(row_words, 0, dtype=torch.int64)
        offsets, n_words = ends - row_words, int(ends[-1]) if n else 0
    words = torch.empty(n_words, **empty)
    if n and held.row_bytes:
        _over_rows(held.gpu, kernels.pack(held.chunk_bits), n, THREADS // 32 * _STAGE_WORDS * 4,
                   (*common, pointer(row_words), pointer(offsets), u64(stride), pointer(words)))  # fmt: skip
    return Rows(held, int(words.data_ptr()), n_words, row_words, offsets, stride, error, words)


def count(x: Any) -> Any:
    """How often each bit of a row is set: int64 (8 * row_bytes,), bit b of chunk c at c * W + b, for any width W."""
    torch = torch_module()
    gpu = launch.gpu(x.device)
    n = x.shape[0] if x.ndim else 1
    row_bytes = x.numel() * x.element_size() // n if n else 0
    _fits(x, gpu, n * row_bytes)
    counts = torch.zeros(8 * row_bytes, dtype=torch.int64, device=x.device)
    if n == 0 or row_bytes == 0:
        return counts
    threads = kernels.COUNT_COLUMNS
    shared_bytes = 4 * kernels.COUNT_PLANES * threads
    kernel = launch.load(gpu, kernels.COUNT, threads, shared_bytes)
    whole = 4 // math.gcd(row_bytes, 4)  # rows that make whole words
    columns = row_bytes * whole * max(1, LINE_BYTES // (row_bytes * whole)) // 4
    n_words = n * row_bytes // 4
    across, lines = max(1, -(-min(columns, n_words) // threads)), max(1, -(-n_words // columns))
    # Blocks that run at the same time, if lines are enough for that; each empties its counters once.
    blocks = max(1, gpu.n_sms * kernel.blocks // across)
    slab = min(max(LEAST_LINES, -(-lines // blocks)), (1 << kernels.COUNT_PLANES) - 1)
    launch.launch(
        kernel, (across, -(-lines // slab)), threads, shared_bytes,
        (pointer(x), u64(n * row_bytes), u32(columns), u64(8 * row_bytes), u64(slab), pointer(counts)),
    )  # fmt: skip
    return counts


def read_rows(address: int, n_rows: int, row_bytes: int, indices: Any, out: Any, error: Any) -> None:
    """Plain rows by index (int64, CUDA) from memory that the GPU can read: what `Rows.decode` does, without packing."""
    gpu, n = launch.gpu(out.device), len(indices)
    _fits(out, gpu, n * row_bytes)
    _numbers(indices, gpu, n)
    if not hostmemory.is_readable(address):
        raise GpubloatError("the rows are in pageable memory, which the GPU cannot read", "pin them first")
    if n and row_bytes:
        unit = next(u for u in (16, 8, 4, 2, 1) if not (row_bytes % u or address % u or out.data_ptr() % u))
        _over_rows(gpu, kernels.read_rows(unit), n, 0, (
            pointer(address), u64(n_rows), pointer(indices), u64(n), u64(row_bytes), pointer(out), pointer(error),
        ))  # fmt: skip


def move_rows(source: Rows, indices: Any, slots: Any, places: Any, lengths: Any) -> None:
    """Copy packed rows as they are to slots: int32 (n_slots, words); `lengths` (n_slots,) of those that fit are set."""
    n = len(indices)
    for numbers in (indices, places):
        _numbers(numbers, source.book.gpu, n)
    if n:
        _over_rows(source.book.gpu, kernels.MOVE_ROWS, n, 0, (
            pointer(source.address), u64(source.n_words), pointer(source.row_words), pointer(source.offsets),
            u64(source.stride), u64(len(source.row_words)), pointer(indices), pointer(places), u64(n),
            u64(slots.shape[1]), u64(slots.shape[0]), pointer(slots), pointer(lengths), pointer(source.error),
        ))  # fmt: skip


def _over_rows(gpu: Gpu, kernel: kernels.Kernel, n: int, shared_bytes: int, arguments: Any) -> None:
    """One warp per row, as many blocks as the GPU holds."""
    loaded = launch.load(gpu, kernel, THREADS, shared_bytes)
    grid = min(gpu.n_sms * loaded.blocks, -(-n // (THREADS // 32)))
    launch.launch(loaded, (grid, 1), THREADS, shared_bytes, arguments)


def _fits(tensor: Any, gpu: Gpu, n_bytes: int) -> None:
    if tensor.device != gpu.device:
        raise DeviceError("unsupported", f"a tensor is on {tensor.device}, and the kernel runs on {gpu.device}")
    if not tensor.is_contiguous() or tensor.numel() * tensor.element_size() != n_bytes:
        raise GpubloatError(f"a tensor of {n_bytes} contiguous bytes is needed, not {tuple(tensor.shape)}")


def _numbers(numbers: Any, gpu: Gpu, n: int) -> None:
    if numbers is not None:
        _fits(numbers, gpu, 8 * n)
        if str(numbers.dtype) != "torch.int64":
            raise GpubloatError(f"numbers of rows are int64, not {numbers.dtype}")
