"""Kernels of native/tensors on a GPU that PyTorch uses: loaded once per GPU, launched on PyTorch's current stream."""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpubloat.errors import DeviceError, GpubloatError, MissingToolError
from gpubloat.optional import torch_module
from gpubloat.tensors.gpu import kernels
from gpubloat.tensors.gpu.kernels import Kernel

LEAST = (8, 0)  # asynchronous copies to shared memory
_DEFAULT_SHARED = 48 << 10  # a kernel that takes more has to say so


@dataclass(frozen=True)
class Gpu:
    """A GPU that can run the kernels. index : PyTorch's number of it."""

    index: int
    capability: str
    n_sms: int

    @property
    def device(self) -> Any:
        """As PyTorch writes it."""
        return torch_module().device("cuda", self.index)


@dataclass(frozen=True)
class Loaded:
    """A kernel in a GPU's memory, and how many blocks of one size its SMs take at once."""

    gpu: Gpu
    kernel: Kernel
    function: Any
    blocks: int


def driver() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        raise MissingToolError("cuda-python", kernels.INSTALL) from None


def call(name: str, *arguments: Any) -> Any:
    """A function of the driver; its results but the status. GpubloatError names what failed."""
    status, *results = getattr(driver(), name)(*arguments)
    if status != 0:
        raise GpubloatError(f"{name} failed: {status.name}")
    return results[0] if len(results) == 1 else results


def gpu(device: Any = "cuda") -> Gpu:
    """The GPU of a torch device. DeviceError if there is none, if it is no CUDA device, or if it is too old."""
    torch = torch_module()
    device = torch.device(device)
    if device.type != "cuda":
        raise DeviceError("unsupported", f"{device} is no CUDA device", 'use "cuda"')
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise DeviceError("absent", "PyTorch finds no CUDA device", "run `gpubloat doctor`")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise DeviceError("absent", f"there is no device cuda:{index}", f"there are {torch.cuda.device_count()}")
    return _described(index)


@functools.cache
def _described(index: int) -> Gpu:
    torch = torch_module()
    found = torch.cuda.get_device_properties(index)
    if (found.major, found.minor) < LEAST:
        raise DeviceError(
            "unsupported", f"{found.name} has compute capability {found.major}.{found.minor}", "8.0 or newer is needed"
        )
    return Gpu(index, f"{found.major}{found.minor}", found.multi_processor_count)


@functools.cache
def load(on: Gpu, kernel: Kernel, threads: int, shared_bytes: int) -> Loaded:
    """`kernel` on a GPU, for blocks of this size; compiled if need be."""
    torch = torch_module()
    made = kernels.compiled(kernel, on.capability)
    torch.cuda.synchronize(on.index)  # PyTorch's context exists from here on
    with torch.cuda.device(on.index):
        module = call("cuModuleLoadData", made.cubin)
        function = call("cuModuleGetFunction", module, made.symbol.encode())
        if shared_bytes > _DEFAULT_SHARED:
            name = driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call("cuFuncSetAttribute", function, name, shared_bytes)
        blocks = call("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, threads, shared_bytes)
    return Loaded(on, kernel, function, max(1, int(blocks)))


def launch(
    kernel: Loaded, grid: tuple[int, int], threads: int, shared_bytes: int, arguments: Sequence[tuple[Any, Any]]
) -> None:
    """Put the kernel on the current stream of its GPU. `arguments`: (ctypes type, value) of each parameter."""
    torch = torch_module()
    values = tuple(value for _, value in arguments)
    types = tuple(kind for kind, _ in arguments)
    with torch.cuda.device(kernel.gpu.index):
        stream = torch.cuda.current_stream(kernel.gpu.index).cuda_stream
        call("cuLaunchKernel", kernel.function, *grid, 1, threads, 1, 1, shared_bytes, stream, (values, types), 0)


def pointer(tensor: Any) -> tuple[Any, int]:
    """A tensor, or an address, or None for a null pointer, as a parameter. cuda.bindings takes no None."""
    if tensor is None:
        return ctypes.c_void_p, 0
    return ctypes.c_void_p, tensor if isinstance(tensor, int) else int(tensor.data_ptr())


def u32(value: int) -> tuple[Any, int]:
    return ctypes.c_uint32, value


def u64(value: int) -> tuple[Any, int]:
    return ctypes.c_uint64, value
