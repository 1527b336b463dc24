"""The loads of the probe, made with PyTorch: products at full power, copies in device memory, nothing."""

from __future__ import annotations

import time
from typing import Any

from gpubloat.errors import DeviceError, GpubloatError
from gpubloat.optional import torch_module

SIDE = 8192  # of the matrices: about 1.5 ms a product on an H200
PRODUCTS = 3
COPY_BYTES = 1 << 30  # far over any cache
COPIES = 8
IDLE_S = 0.005


class TorchLoads:
    """Each call keeps the GPU busy for a few milliseconds, and waits for the call before: there is never a gap.

    Takes 2.5 GB of GPU memory. Matrices are random: products of zeros draw less and run faster.
    """

    def __init__(self, index: int = 0) -> None:
        self._torch = torch = torch_module()
        if not torch.cuda.is_available():
            raise DeviceError("absent", "PyTorch finds no CUDA device", "run `gpubloat doctor`")
        if not 0 <= index < torch.cuda.device_count():
            raise DeviceError("absent", f"there is no device cuda:{index}", f"there are {torch.cuda.device_count()}")
        self._device = torch.device("cuda", index)
        self._waiting: Any = None
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(index)[0] >= 8 else torch.float16
        try:
            self._a = torch.randn(SIDE, SIDE, device=self._device, dtype=dtype)
            self._b = torch.randn(SIDE, SIDE, device=self._device, dtype=dtype)
            self._c = torch.empty(SIDE, SIDE, device=self._device, dtype=dtype)
            self._from = torch.randint(0, 256, (COPY_BYTES,), device=self._device, dtype=torch.uint8)
            self._to = torch.empty_like(self._from)
        except torch.cuda.OutOfMemoryError:
            raise GpubloatError("the probe needs 2.5 GB of GPU memory", "stop what else is on the GPU") from None

    def product(self) -> None:
        for _ in range(PRODUCTS):
            self._torch.mm(self._a, self._b, out=self._c)
        self._wait_for_the_last()

    def copy(self) -> None:
        for _ in range(COPIES):
            self._to.copy_(self._from)
        self._wait_for_the_last()

    def idle(self) -> None:
        self._torch.cuda.synchronize(self._device)
        time.sleep(IDLE_S)

    def _wait_for_the_last(self) -> None:
        before = self._waiting
        self._waiting = self._torch.cuda.Event(blocking=True)
        self._waiting.record(self._torch.cuda.current_stream(self._device))
        if before is not None:
            before.synchronize()
