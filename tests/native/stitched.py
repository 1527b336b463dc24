"""The stitching allocator on the fake libcuda, a fresh one for each test, and what the two say of themselves."""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_long, c_size_t, c_uint64, c_ulonglong, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpubloat.errors import MissingToolError
from gpubloat.native import build
from gpubloat.native import stitching as native

HERE = Path(__file__).parent
MIB = 1 << 20
CHUNK = 2 * MIB
RESERVE, CREATE, MAP, ACCESS, UNMAP, RELEASE, UNRESERVE, RECORD, QUERY, WAIT = range(10)  # kinds of fakecuda.c
OUT_OF_MEMORY = 2
_numbers = itertools.count()


@functools.cache
def compiled() -> tuple[Path, Path]:
    """The fake driver, and the allocator with what drives it. Skips without a compiler."""
    folder = Path(tempfile.mkdtemp(prefix="stitching-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    fake, library = folder / "libcuda.so.1", folder / "driven.so"
    shared = ["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    try:
        sources = [str(build.FOLDER / source) for source in native.SOURCES]
        cpp = [build.compiler(cpp=True), *shared, "-fvisibility=hidden", *sources, str(HERE / "drive_stitching.cpp")]
        c = [build.compiler(), *shared, str(HERE / "fakecuda.c"), "-pthread"]
    except MissingToolError as error:
        pytest.skip(str(error))
    running = [subprocess.Popen([*c, "-o", str(fake)]), subprocess.Popen([*cpp, *native.FLAGS, "-o", str(library)])]
    assert [process.wait() for process in running] == [0, 0]
    return fake, library


@dataclass
class Fake:
    """One allocator, its driver and its settings."""

    lib: ctypes.CDLL
    cuda: ctypes.CDLL

    def alloc(self, size: int, stream: int = 0, device: int = 0) -> int:
        return int(self.lib.gpubloat_alloc(size, device, stream) or 0)

    def free(self, address: int, stream: int = 0, device: int = 0) -> None:
        self.lib.gpubloat_free(address, 0, device, stream)

    def report(self, device: int = 0) -> native.Report:
        return native.report(self.lib, device)

    def now(self, row: str, device: int = 0) -> int:
        return int(self.report(device).rows[native.ROWS.index(row)][0].current)

    def calls(self) -> list[int]:
        """Calls to the driver about memory, by kind."""
        return [self.cuda.fake_count(kind) for kind in range(UNRESERVE + 1)]

    def empty(self) -> None:
        self.lib.gpubloat_empty_cache()

    def misuse(self) -> str:
        text = ctypes.create_string_buffer(200)
        n = self.cuda.fake_misuse(text, len(text))
        return f"{n}: {text.value.decode()}" if n else ""

    def close(self) -> None:
        """After everything was given back: nothing is left in the driver, and nothing was done wrong."""
        self.empty()
        for device in (0, 1):
            found = self.report(device)
            assert [found.rows[i][0].current for i in range(len(native.ROWS))] == [0] * len(native.ROWS)
            assert (found.n_stitched, found.stitched_bytes, found.n_ranges) == (0, 0, 0)
            assert (found.n_leaks, found.n_check_failures, found.n_waiting) == (0, 0, 0)
            assert self.cuda.fake_used(device) == 0
        assert self.cuda.fake_left() == 0
        assert self.misuse() == ""


def fresh(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    memory: int = 256 * MIB,
    backed: bool = True,
    reuse: bool = False,
    flags: int = native.CHECK,
    least: int = 0,
    limit: int = 0,
    chunk: int = CHUNK,
    trace: int = 0,
) -> Fake:
    """An allocator of its own: a copy of the library is another library for the loader."""
    copies = [Path(shutil.copy(path, folder / f"{next(_numbers)}-{path.name}")) for path in compiled()]
    monkeypatch.setenv("GPUBLOAT_LIBCUDA", str(copies[0]))
    cuda, lib = ctypes.CDLL(str(copies[0])), native.opened(copies[1])
    for library, signatures in ((cuda, _FAKES), (lib, _DRIVES)):
        for name, result, arguments in signatures:
            getattr(library, name).restype, getattr(library, name).argtypes = result, arguments
    cuda.fake_setup(memory, backed, reuse)
    cuda.fake_chunk(chunk)
    config = native.Config(ctypes.sizeof(native.Config), flags, chunk, least, limit, trace)
    assert lib.gpubloat_configure(byref(config)) == 0
    return Fake(lib, cuda)


_FAKES: list[tuple[str, Any, Sequence[Any]]] = [
    ("fake_setup", None, [c_size_t, c_int, c_int]),
    ("fake_chunk", None, [c_size_t]),
    ("fake_peers", None, [c_int]),
    ("fake_fail", None, [c_int, c_long, c_int]),
    ("fake_count", c_long, [c_int]),
    ("fake_misuse", c_long, [c_char_p, c_size_t]),
    ("fake_used", c_size_t, [c_int]),
    ("fake_access", c_int, [c_uint64]),
    ("fake_capture", None, [c_long, c_int]),
    ("fake_work", c_long, [c_long, c_uint64, c_size_t]),
    ("fake_complete", None, [c_long, c_long]),
    ("fake_left", c_long, []),
]
_DRIVES: list[tuple[str, Any, Sequence[Any]]] = [
    ("stress", None, [c_int64, c_int, c_int, c_uint64, c_uint64, POINTER(c_int64)]),
    ("replay", c_int64, [POINTER(c_int64), c_int64, POINTER(native.Logged), c_int64, POINTER(c_int64)]),
    ("begin_pool", None, [c_int, c_ulonglong, c_ulonglong, c_void_p]),
    ("end_pool", None, [c_int, c_ulonglong, c_ulonglong]),
    ("release_pool", None, [c_int, c_ulonglong, c_ulonglong]),
]
