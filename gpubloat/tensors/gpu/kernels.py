"""Kernels of native/tensors: which there are, and how they are compiled for a GPU; none is needed for that."""

from __future__ import annotations

import hashlib
import importlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpubloat.errors import GpubloatError, MissingToolError
from gpubloat.native import build

SOURCES = build.FOLDER / "tensors"
SEGMENT_WORDS = 128  # of unpack.cu
STAGES = 4
COUNT_COLUMNS, COUNT_PLANES = 256, 16  # of count.cu
PAD = 128  # words of a codebook are a multiple
INSTALL = "pip install cuda-python nvidia-cuda-nvrtc"


@dataclass(frozen=True)
class Kernel:
    """One instance of a template: the file without its suffix, and the name with template arguments."""

    source: str
    name: str


@dataclass(frozen=True)
class Cubin:
    """Machine code of one kernel, its name in there, and what the compiler said."""

    cubin: bytes
    symbol: str
    log: str


def unpack(chunk_bits: int, words_per_lane: int = 2, stages: int = STAGES, book_shared: bool = True) -> Kernel:
    """The decoder for chunks of so many bits; a lane decodes `words_per_lane` (1, 2, 4; not 1 for 64) at once."""
    return Kernel("unpack", f"unpack<{chunk_bits}, {words_per_lane}, {stages}, {str(book_shared).lower()}>")


def row_sizes(chunk_bits: int) -> Kernel:
    return Kernel("pack", f"row_sizes<{chunk_bits}>")


def pack(chunk_bits: int) -> Kernel:
    return Kernel("pack", f"pack<{chunk_bits}>")


def read_rows(unit_bytes: int) -> Kernel:
    """Copies rows by index in units of 1 to 16 bytes."""
    return Kernel("read", f"read_rows<{'uint4' if unit_bytes == 16 else f'u{unit_bytes * 8}'}>")


COUNT, MOVE_ROWS = Kernel("count", "count"), Kernel("read", "move_rows")
ALL = (
    *(unpack(w, n, book_shared=shared) for w in (8, 16, 32, 64) for n in (1, 2, 4) if w < 64 or n > 1
      for shared in (True, False)),
    *(kernel(w) for w in (8, 16, 32, 64) for kernel in (row_sizes, pack)),
    *(read_rows(unit) for unit in (1, 2, 4, 8, 16)),
    COUNT, MOVE_ROWS,
)  # fmt: skip


def warp_bytes(stages: int = STAGES) -> int:
    """Shared memory that `unpack` takes for each warp: ring, flags, queue."""
    return 4 * (stages * SEGMENT_WORDS + 64) + 24 * stages


def book_words(always: np.ndarray, mask: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The codebook as kernels read it, uint32 (4, padded): always, mask, value, number of flags before the word.

    The arrays are (m,) unsigned of the chunk's width. Words behind the row are kept out by `always`.
    """
    row_words = -(-mask.nbytes // 4)
    book = np.zeros((4, -(-max(row_words, 1) // PAD) * PAD), np.uint32)
    book[0] = 0xFFFFFFFF
    for line, part in zip(book, (always, mask, value)):
        line.view(np.uint8)[: part.nbytes] = np.ascontiguousarray(part).view(np.uint8)
    flags = np.zeros(book.shape[1] * 4 // mask.itemsize, np.int64)
    flags[: mask.size] = mask != 0
    before = np.cumsum(flags) - flags
    book[3] = np.repeat(before, 2) if mask.itemsize == 8 else before[:: 4 // mask.itemsize]
    return book


def compiled(kernel: Kernel, capability: str) -> Cubin:
    """`kernel` for a GPU such as "90" (sm_90), from the cache if it is there.

    Raises MissingToolError without NVRTC or its binding, GpubloatError with what the compiler says.
    """
    digest = hashlib.sha256(f"{kernel}\0{capability}\0{_version()}".encode())
    for path in (SOURCES / "ibp.cuh", SOURCES / f"{kernel.source}.cu"):
        digest.update(path.read_bytes())
    target = build.cache() / f"{kernel.source}-sm_{capability}-{digest.hexdigest()[:16]}.cubin"
    try:
        symbol, log, cubin = target.read_bytes().split(b"\0", 2)
        return Cubin(cubin, symbol.decode(), log.decode())
    except (OSError, ValueError):
        made = _compile(kernel, capability)
    _keep(target, b"\0".join([made.symbol.encode(), made.log.encode(), made.cubin]))
    return made


def _nvrtc() -> Any:
    try:
        return importlib.import_module("cuda.bindings.nvrtc")
    except ImportError:
        raise MissingToolError("cuda-python", INSTALL) from None


def _version() -> str:
    nvrtc = _nvrtc()
    try:
        return str(nvrtc.nvrtcVersion()[1:])
    except RuntimeError:  # the binding finds no library
        raise MissingToolError("NVRTC", INSTALL) from None


def _compile(kernel: Kernel, capability: str) -> Cubin:
    nvrtc = _nvrtc()
    source = (SOURCES / f"{kernel.source}.cu").read_bytes()
    header = (SOURCES / "ibp.cuh").read_bytes()
    name = f"{kernel.source}.cu".encode()
    status, program = nvrtc.nvrtcCreateProgram(source, name, 1, [header], [b"ibp.cuh"])
    ok = nvrtc.nvrtcResult.NVRTC_SUCCESS
    if status != ok:
        raise GpubloatError(f"NVRTC takes no program: {status.name}")
    try:
        nvrtc.nvrtcAddNameExpression(program, kernel.name.encode())
        flags = [f"--gpu-architecture=sm_{capability}".encode(), b"--std=c++17", b"--device-as-default-execution-space"]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        log = _room(nvrtc.nvrtcGetProgramLogSize(program)[1])
        nvrtc.nvrtcGetProgramLog(program, log)
        text = log.partition(b"\0")[0].decode(errors="replace").strip()
        if status != ok:
            said = text.splitlines()[0] if text else status.name
            raise GpubloatError(f"{kernel.name} cannot be compiled for sm_{capability}: {said}")
        symbol = nvrtc.nvrtcGetLoweredName(program, kernel.name.encode())[1].decode()
        size = nvrtc.nvrtcGetCUBINSize(program)[1]
        cubin = _room(size)
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return Cubin(cubin[:size], symbol, text)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _keep(target: Path, content: bytes) -> None:
    """Write whole or not at all: other processes may compile the same."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".kernel-", delete=False) as file:
            file.write(content)
        os.replace(file.name, target)
    except OSError as error:
        raise GpubloatError(
            f"{target.parent} cannot be written: {error.strerror}", "set GPUBLOAT_CACHE to another folder"
        ) from None


def _room(size: int) -> bytes:
    """Bytes that NVRTC may write to. One more than it asks for: Python has one shared object for each single byte."""
    return b" " * (size + 1)
