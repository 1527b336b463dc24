"""Host memory that a GPU can read: of exactly the size that is needed, registered with the driver, always given back.

PyTorch's pinned memory is rounded up to a power of two and cannot be had for memory that exists. Here pages are taken
from the system and registered in pieces, so that no single call of the driver has to pin everything.
"""

from __future__ import annotations

import mmap
import weakref
from types import TracebackType
from typing import Any

import numpy as np

from gpubloat.errors import GpubloatError
from gpubloat.optional import torch_module
from gpubloat.tensors.gpu import launch

PIECE = 1 << 30  # bytes; a multiple of the page


class Pinned:
    """A copy of `array` in registered memory, until `close`, the end of a ``with`` block, or the last reference.

    Attributes
    ----------
    array : the copy. address : of it, for the host and for every GPU.

    Raises
    ------
    DeviceError : no GPU. GpubloatError : too little memory, or the driver refuses; nothing stays registered then.
    """

    def __init__(self, array: np.ndarray, piece: int = PIECE) -> None:
        torch_module().cuda.synchronize(launch.gpu().index)  # a context has to exist
        size = -(-max(array.nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            pages = mmap.mmap(-1, size)
        except OSError as error:
            raise GpubloatError(f"{size} bytes of host memory cannot be had: {error.strerror}") from None
        self.array = np.frombuffer(pages, array.dtype, array.size).reshape(array.shape)
        self.array[...] = array
        self.address = int(self.array.ctypes.data)
        self.nbytes = array.nbytes
        self.piece = piece
        registered: list[int] = []
        # The pages are referred to, so that they outlive their registration.
        self._close = weakref.finalize(self, _unregister, registered, pages)
        flags = driver_flags()
        try:
            for at in range(self.address, self.address + size, piece):
                launch.call("cuMemHostRegister", at, min(piece, self.address + size - at), flags)
                registered.append(at)
                if int(launch.call("cuMemHostGetDevicePointer", at, 0)) != at:
                    raise GpubloatError("the GPU sees host memory at other addresses than the host")
        except GpubloatError as error:
            self.close()
            hint = "pinned memory may be limited: see ulimit -l, or free some"
            raise GpubloatError(error.message, hint) from None

    def close(self) -> None:
        """Unregister. No kernel may be reading any more: PyTorch's work is waited for."""
        self._close()

    def copy_to(self, target: Any, begin: int, n_bytes: int) -> None:
        """Start a copy of a range of bytes to a CUDA tensor, on the current stream; no copy crosses a piece."""
        torch = torch_module()
        stream = torch.cuda.current_stream(target.device).cuda_stream
        with torch.cuda.device(target.device):
            for at, size in pieces(begin, n_bytes, self.piece):
                launch.call(
                    "cuMemcpyHtoDAsync", target.data_ptr() + at - begin, self.address + at, size, stream
                )  # fmt: skip

    def __enter__(self) -> Pinned:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def driver_flags() -> int:
    driver = launch.driver()
    return int(driver.CU_MEMHOSTREGISTER_PORTABLE) | int(driver.CU_MEMHOSTREGISTER_DEVICEMAP)


def pieces(begin: int, n_bytes: int, piece: int) -> list[tuple[int, int]]:
    """The range as (begin, size), cut at multiples of `piece`."""
    found, end = [], begin + n_bytes
    while begin < end:
        size = min(end, (begin // piece + 1) * piece) - begin
        found.append((begin, size))
        begin += size
    return found


def _unregister(registered: list[int], pages: mmap.mmap) -> None:
    if registered:
        torch_module().cuda.synchronize()
    while registered:
        launch.driver().cuMemHostUnregister(registered.pop())
    del pages


def is_readable(address: int) -> bool:
    """Whether a GPU can read what lies there: memory of a device, or pinned memory of the host.

    The function for several attributes is asked: an address that CUDA does not know is no error of it.
    """
    driver = launch.driver()
    kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    status, found = driver.cuPointerGetAttributes(1, [kind], address)
    return bool(status == 0 and found[0])
