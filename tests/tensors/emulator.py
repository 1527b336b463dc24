"""The kernels on the CPU: compiled with `warp.h`, called through ctypes; arrays that end at a page without access."""

from __future__ import annotations

import ctypes
import functools
import mmap
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from gpubloat.errors import GpubloatError
from gpubloat.native import build

HERE = Path(__file__).parent
SOURCES = build.FOLDER / "tensors"
PAGE = mmap.PAGESIZE
# (W, words per lane, stages, codebook in shared memory) of the decoders that kernels.cpp has.
DECODERS = (
    (8, 1, 4, True), (8, 2, 4, True), (8, 4, 8, False), (16, 1, 4, True), (16, 2, 4, True), (16, 4, 8, False),
    (32, 1, 4, True), (32, 2, 4, True), (32, 4, 4, False), (64, 2, 4, True), (64, 4, 8, False),
)  # fmt: skip


@functools.cache
def library(folder: Path) -> ctypes.CDLL:
    """kernels.cpp, compiled into `folder`. GpubloatError with what the compiler says."""
    target = folder / "kernels.so"
    flags = ["-std=c++17", "-O1", "-g", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    command = [build.compiler(cpp=True), *flags, f"-I{HERE}", f"-I{SOURCES}", str(HERE / "kernels.cpp")]
    done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True)
    if done.returncode:
        raise GpubloatError(f"kernels.cpp cannot be compiled: {done.stderr}")
    return ctypes.CDLL(str(target))


def guarded(array: np.ndarray, at_begin: bool = False) -> np.ndarray:
    """A copy that ends where a page begins that cannot be touched, or, `at_begin`, that begins where one ends."""
    size = -(-max(array.nbytes, 1) // PAGE) * PAGE
    pages = mmap.mmap(-1, size + 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for page in (address, address + PAGE + size):
        assert protect(page, PAGE, 0) == 0
    offset = PAGE if at_begin else PAGE + size - array.nbytes
    copy = np.frombuffer(pages, array.dtype, array.size, offset).reshape(array.shape)
    copy[...] = array
    return copy


def argument(value: Any) -> Any:
    """Arrays by address, integers as 64 bits: the calls are of C and take what fits of them."""
    if value is None:
        return ctypes.c_void_p(None)
    return ctypes.c_void_p(value.ctypes.data) if isinstance(value, np.ndarray) else ctypes.c_uint64(int(value))


def call(lib: ctypes.CDLL, name: str, *arguments: Any) -> int:
    return int(getattr(lib, name)(*map(argument, arguments)))
