"""install() against a PyTorch of our own, on a fake driver: what it refuses, what it replaces, what it reports."""

from __future__ import annotations

import ctypes
import pickle
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpubloat import memory
from gpubloat.errors import DeviceError, GpubloatError, MissingToolError
from gpubloat.memory import stitching
from gpubloat.native import build
from tests.native import stitched
from tests.native.stitched import CHUNK, MIB

# What stitching.cpp needs of c10, and a caller that says what it caught: 1 for no memory, 2 for any other error.
EXCEPTION = """
#pragma once
#include <cstdint>
#include <exception>
#include <string>
#define API __attribute__((visibility("default")))
namespace c10 {
struct SourceLocation { const char *function; const char *file; uint32_t line; };
struct API Error : std::exception {
  std::string text;
  Error(SourceLocation, std::string given);
  const char *what() const noexcept override;
};
struct API OutOfMemoryError : Error { using Error::Error; };
}
"""
C10 = """
#include <c10/util/Exception.h>
#include <cstring>
#include <sys/types.h>
namespace c10 {
Error::Error(SourceLocation, std::string given) : text(given) {}
const char *Error::what() const noexcept { return text.c_str(); }
}
extern "C" API int caught(void *(*alloc)(ssize_t, int, void *), ssize_t size, char *text) {
  try {
    alloc(size, 0, nullptr);
  } catch (const c10::OutOfMemoryError &error) {
    strcpy(text, error.what());
    return 1;
  } catch (const std::exception &error) {
    strcpy(text, error.what());
    return 2;
  }
  return 0;
}
"""


class Pluggable:
    """torch.cuda.memory.CUDAPluggableAllocator, with the addresses that it was given."""

    def __init__(self, path: str, alloc: str, free: str) -> None:
        library = ctypes.CDLL(path)
        self.hooks = {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in (alloc, free)}
        self.alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(
            self.hooks[alloc]
        )
        self.free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(
            self.hooks[free]
        )

    def allocator(self) -> Pluggable:
        return self

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("set_"):
            raise AttributeError(name)
        return lambda address: self.hooks.__setitem__(name, address)


def torch_of(folder: Path, **changed: Any) -> Any:
    """A module that looks like PyTorch with CUDA, unused so far."""

    def raises(*_: Any) -> None:
        raise RuntimeError("CUDAPluggableAllocator does not yet support this")

    torch: Any = types.ModuleType("torch")
    torch.__file__, torch.__version__ = str(folder / "torch" / "__init__.py"), "2.11.0+cu130"
    torch.compiled_with_cxx11_abi = lambda: True
    torch.version = types.SimpleNamespace(cuda="13.0")
    torch._C = types.SimpleNamespace(**dict.fromkeys(stitching._FUNCTIONS, raises))
    torch.current = []
    memory_ = types.SimpleNamespace(
        CUDAPluggableAllocator=Pluggable, change_current_allocator=lambda given: torch.current.append(given)
    )
    torch.cuda = types.SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: False, device_count=lambda: 2, current_device=lambda: 0,
        memory=memory_,
    )  # fmt: skip
    for name, value in changed.items():
        setattr(torch.version if name == "cuda_version" else torch.cuda, name, value)
    if "cuda_version" in changed:
        torch.version.cuda = changed["cuda_version"]
    return torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has PyTorch's headers and libc10, the fake driver, and what is compiled."""
    folder = tmp_path_factory.mktemp("stitching")
    header, library = folder / "torch/include/c10/util/Exception.h", folder / "torch/lib/libc10.so"
    header.parent.mkdir(parents=True)
    library.parent.mkdir()
    header.write_text(EXCEPTION)
    source = folder / "c10.cpp"
    source.write_text(C10)
    shutil.copy(stitched.compiled()[0], folder / "libcuda.so.1")
    tool = build.compiler(cpp=True)
    fast = folder / "c++"  # what is tested here does not depend on how long the compiler thinks
    fast.write_text(f'#!/bin/sh\nexec {tool} "$@" -O0\n')
    fast.chmod(0o755)
    # Not under PyTorch's name: where another test has imported the real one, the loader would take that in its place.
    soname = "libc10-of-tests.so"
    subprocess.run(
        [tool, "-shared", "-fPIC", f"-I{folder}/torch/include", f"-Wl,-soname,{soname}", "-o", library, source],
        check=True,
    )
    library.with_name(soname).symlink_to(library.name)
    return folder


@pytest.fixture(scope="module")
def torch(folder: Path) -> Iterator[Any]:
    """PyTorch with stitching installed; `torch.stitching` is what install() returned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUBLOAT_CACHE", str(folder / "cache"))
        patch.setenv("CXX", str(folder / "c++"))
        patch.setenv("GPUBLOAT_LIBCUDA", str(folder / "libcuda.so.1"))
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            patch.delenv(name, raising=False)
        torch = torch_of(folder)
        patch.setitem(sys.modules, "torch", torch)
        patch.setattr(stitching, "_installed", None)
        ctypes.CDLL(str(folder / "libcuda.so.1")).fake_setup(ctypes.c_size_t(64 * CHUNK), 1, 0)
        torch.stitching = stitching.install(record=True, check=True)
        yield torch


@pytest.fixture
def bare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing is installed, and PyTorch is there."""
    monkeypatch.setattr(stitching, "_installed", None)
    monkeypatch.setitem(sys.modules, "torch", torch_of(folder))
    monkeypatch.setenv("GPUBLOAT_CACHE", str(folder / "cache"))
    monkeypatch.setenv("CXX", str(folder / "c++"))
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_pytorch(bare: pytest.MonkeyPatch) -> None:
    bare.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingToolError, match="PyTorch is not installed"):
        stitching.install()


@pytest.mark.parametrize("changed", [{"cuda_version": None}, {"is_available": lambda: False}])
def test_without_cuda(folder: Path, bare: pytest.MonkeyPatch, changed: dict[str, Any]) -> None:
    bare.setitem(sys.modules, "torch", torch_of(folder, **changed))
    with pytest.raises(DeviceError, match="no CUDA device"):
        stitching.install()


def test_after_the_first_tensor(folder: Path, bare: pytest.MonkeyPatch) -> None:
    bare.setitem(sys.modules, "torch", torch_of(folder, is_initialized=lambda: True))
    with pytest.raises(GpubloatError, match="CUDA is in use already"):
        stitching.install()


@pytest.mark.parametrize("conf", ["expandable_segments:True", "max_split_size_mb:64,backend:cudaMallocAsync"])
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_with_settings_of_another_allocator(bare: pytest.MonkeyPatch, name: str, conf: str) -> None:
    bare.setenv(name, conf)
    with pytest.raises(GpubloatError, match=f"{name} asks for"):
        stitching.install()


def test_without_a_compiler(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bare.setenv("PATH", str(tmp_path))
    bare.delenv("CXX", raising=False)
    with pytest.raises(MissingToolError, match=r"a C\+\+ compiler"):
        stitching.install()


@pytest.mark.parametrize(
    "settings", [{"chunk_bytes": 3 * MIB}, {"chunk_bytes": 0}, {"stitch_min_bytes": 0}, {"stitch_limit_bytes": -1}]
)
def test_settings_that_make_no_sense(bare: pytest.MonkeyPatch, settings: dict[str, int]) -> None:  # noqa: ARG001
    with pytest.raises(GpubloatError, match="is wanted"):
        stitching.install(**settings)


def test_where_pytorch_keeps_its_own_allocator(folder: Path, bare: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("Can't swap an already initialized allocator\nmore")

    torch = torch_of(folder)
    torch.cuda.memory.change_current_allocator = refuse
    bare.setitem(sys.modules, "torch", torch)
    before = dict(vars(torch._C))
    with pytest.raises(GpubloatError, match="keeps its allocator: Can't swap an already initialized"):
        stitching.install(record=True, check=True)
    assert vars(torch._C) == before
    assert stitching._installed is None


def test_every_hook_is_set_and_pytorch_calls_it(torch: Any) -> None:
    (current,) = torch.current
    assert set(current.hooks) == {"gpubloat_alloc", "gpubloat_free", *stitching._HOOKS}
    assert all(current.hooks.values())
    address = current.alloc(5 * MIB, 0, None)
    assert torch.stitching.stats()["active_bytes"] == 5 * MIB
    current.free(address, 5 * MIB, 0, None)
    assert torch.stitching.stats()["n_free"] >= 1


def test_a_second_install(torch: Any) -> None:
    assert stitching.install(record=True, check=True) is torch.stitching
    with pytest.raises(GpubloatError, match="other settings"):
        stitching.install()


def test_no_memory_is_pytorchs_error_and_the_process_goes_on(torch: Any, folder: Path) -> None:
    c10 = ctypes.CDLL(str(folder / "torch/lib/libc10.so"))
    c10.caught.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_char_p]
    text = ctypes.create_string_buffer(1000)
    alloc = torch.current[0].hooks["gpubloat_alloc"]
    assert c10.caught(alloc, 65 * CHUNK, text) == 1
    assert text.value.startswith(b"CUDA out of memory. Tried to allocate 130.00 MiB. GPU 0 has")
    cuda = ctypes.CDLL(str(folder / "libcuda.so.1"))
    cuda.fake_fail(stitched.CREATE, ctypes.c_long(1), 719)
    assert c10.caught(alloc, 7 * CHUNK, text) == 2
    assert b"CUDA_ERROR_OTHER" in text.value
    assert torch.stitching.stats()["n_oom"] == 1
    actions = [entry["action"] for entry in torch.stitching.snapshot()["device_traces"][0]]
    assert actions.count("oom") == 1


def test_pytorchs_statistics_are_those_of_the_allocator(torch: Any) -> None:
    (current,) = torch.current
    blocks = [current.alloc(size, 0, None) for size in (700, 3 * MIB)]
    found = torch._C._cuda_memoryStats(0)
    wanted = [
        "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes",
        "inactive_split_bytes", "requested_bytes",
    ]  # fmt: skip
    for name in wanted:
        for pool in ("all", "large_pool", "small_pool"):
            assert set(found[name][pool]) == {"current", "peak", "allocated", "freed"}
    assert found["allocated_bytes"]["small_pool"]["current"] == 1024
    assert found["requested_bytes"]["all"]["current"] == 700 + 3 * MIB
    assert found["inactive_split_bytes"]["all"]["current"] == 2 * MIB - 1024
    assert found["reserved_bytes"]["all"]["current"] == torch.stitching.stats()["n_chunks"] * CHUNK
    for address in blocks:
        current.free(address, 0, 0, None)
    assert torch._C._cuda_memoryStats(0)["active_bytes"]["all"]["peak"] >= 3 * MIB
    torch._C._cuda_resetPeakMemoryStats(0)
    torch._C._cuda_resetAccumulatedMemoryStats(0)
    found = torch._C._cuda_memoryStats(0)
    assert found["active_bytes"]["all"] == dict.fromkeys(("current", "peak", "allocated", "freed"), 0)
    assert found["num_ooms"] == 0
    assert torch._C._cuda_getMemoryFraction(0) == 1.0
    torch.stitching.empty_cache()
    assert torch.stitching.stats()["reserved_bytes"] == 0
    assert torch.stitching.stats(1)["reserved_bytes"] == 0
    before = torch.stitching.n_driver_calls
    assert before > 0
    current.free(current.alloc(CHUNK, 0, None), CHUNK, 0, None)
    assert torch.stitching.n_driver_calls == before + 4


def test_a_snapshot_is_what_load_reads(torch: Any, tmp_path: Path) -> None:
    (current,) = torch.current
    torch.stitching.empty_cache()
    torch._C._cuda_record_memory_history("all", "all", "python", 1000, True, False, False, [])
    pieces = [current.alloc(n * CHUNK, 0, None) for n in (3, 4, 2)]
    current.free(pieces[0], 0, 0, None)
    current.free(pieces[1], 0, 0, None)
    wide = current.alloc(7 * CHUNK - 5000, 0, None)
    small = current.alloc(1000, 0, None)
    other = current.alloc(100 * 512, 1, 5)
    stats = torch.stitching.stats()
    path = tmp_path / "snapshot.pickle"
    torch.stitching.dump_snapshot(path)
    run = memory.load(path)
    segments = run["segments"]
    mine = segments[segments["device"] == 0]
    assert mine["size_bytes"].sum() == stats["reserved_bytes"]
    assert mine["active_bytes"].sum() == stats["active_bytes"]
    assert mine["requested_bytes"].sum() == stats["requested_bytes"]
    assert (segments["unattributed_bytes"] == 0).all()
    assert sorted(segments[segments["device"] == 1]["stream"]) == [5]
    ends = mine["address"] + mine["size_bytes"]
    assert (mine["address"].iloc[1:].to_numpy() >= ends.iloc[:-1].to_numpy()).all()
    events = run["events"]
    assert list(events[events["device"] == 0]["action"]) == [
        *["segment_map", "alloc"] * 3, *["free_requested", "free_completed"] * 2, "alloc", "segment_map", "alloc"
    ]  # fmt: skip
    assert wide in set(events["address"])
    (alias,) = pickle.loads(path.read_bytes())["aliases"]
    assert (alias["address"], alias["size"], alias["requested_size"]) == (wide, 7 * CHUNK, 7 * CHUNK - 5000)
    assert alias["members"] == [(pieces[1], 4 * CHUNK), (pieces[0], 3 * CHUNK)]
    assert alias["state"] == "active_allocated"
    torch._C._cuda_record_memory_history(None)
    for address, device in ((wide, 0), (small, 0), (pieces[2], 0), (other, 1)):
        current.free(address, 0, device, None)
    assert torch._C._cuda_memorySnapshot(None)["device_traces"][0] == []
    with pytest.raises(GpubloatError, match="cannot be written"):
        torch.stitching.dump_snapshot(tmp_path / "nowhere" / "snapshot.pickle")
