"""What the driver's calls for virtual memory cost: reserve, create, map, set access, unmap, release, by size of chunk.

python vmm.py [--total-mib 2048] [--repeat 3]

Prints one JSON object: rows of the table vmm_costs, and the bandwidth of a copy inside memory made of chunks of each
size beside plain memory. No PyTorch is needed but for the kernel that keeps the GPU busy.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable

import torch

MIB = 1 << 20
CHUNKS_MIB = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SLEEP = 600_000_000  # cycles of the GPU, a third of a second: longer than the calls that are timed
cuda = ctypes.CDLL("libcuda.so.1")
U64, SIZE = ctypes.c_uint64, ctypes.c_size_t


class Location(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("id", ctypes.c_int)]


class Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = [("kind", ctypes.c_int), ("handles", ctypes.c_int), ("location", Location), ("windows", ctypes.c_void_p),
                ("flags", ctypes.c_ubyte * 8)]  # fmt: skip


class Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


PROPERTIES = Properties(1, 0, Location(1, 0))  # pinned memory of device 0
ACCESS = Access(Location(1, 0), 3)  # read and write


def call(name: str, *arguments: object) -> None:
    status = getattr(cuda, name)(*arguments)
    if status:
        raise RuntimeError(f"{name}: CUDA error {status}")


def timed(do: Callable[[], object]) -> float:
    """Microseconds."""
    begun = time.perf_counter_ns()
    do()
    return (time.perf_counter_ns() - begun) / 1000


class Chunks:
    """`total` bytes as handles of `chunk` bytes, mapped in one range of addresses."""

    def __init__(self, total: int, chunk: int) -> None:
        self.total, self.chunk, self.n = total, chunk, total // chunk
        self.handles = (U64 * self.n)()
        self.address = U64()

    def reserve(self) -> None:
        call("cuMemAddressReserve", ctypes.byref(self.address), SIZE(self.total), SIZE(0), U64(0), U64(0))

    def create(self) -> None:
        for i in range(self.n):
            call("cuMemCreate", ctypes.byref(self.handles, 8 * i), SIZE(self.chunk), ctypes.byref(PROPERTIES), U64(0))

    def map(self) -> None:
        for i in range(self.n):
            place = U64(self.address.value + i * self.chunk)
            call("cuMemMap", place, SIZE(self.chunk), SIZE(0), U64(self.handles[i]), U64(0))

    def set_access(self) -> None:
        call("cuMemSetAccess", self.address, SIZE(self.total), ctypes.byref(ACCESS), SIZE(1))

    def set_access_each(self) -> None:
        for i in range(self.n):
            place = U64(self.address.value + i * self.chunk)
            call("cuMemSetAccess", place, SIZE(self.chunk), ctypes.byref(ACCESS), SIZE(1))

    def unmap(self) -> None:
        call("cuMemUnmap", self.address, SIZE(self.total))

    def release(self) -> None:
        for i in range(self.n):
            call("cuMemRelease", U64(self.handles[i]))

    def address_free(self) -> None:
        call("cuMemAddressFree", self.address, SIZE(self.total))


def bandwidth(address: int, total: int) -> float:
    """GB/s, read and written, of copying one half to the other."""
    half, stream = total // 2, torch.cuda.current_stream().cuda_stream
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for repeat in range(12):
        if repeat == 2:
            begun.record()
        call("cuMemcpyDtoDAsync_v2", U64(address + half), U64(address), SIZE(half), ctypes.c_void_p(stream))
    ended.record()
    ended.synchronize()
    return 10 * 2 * half / begun.elapsed_time(ended) / 1e6


def measure(total: int, chunk: int, is_busy: bool) -> tuple[list[dict[str, object]], float | None]:
    rows = []
    speed = None
    for each in (False, True):
        chunks = Chunks(total, chunk)
        if is_busy:
            torch.cuda._sleep(SLEEP)
        steps = ["reserve", "create", "map", "set_access_each" if each else "set_access"]
        for name in steps:
            rows.append(row(name, chunks, is_busy, timed(getattr(chunks, name))))
        if is_busy:
            torch.cuda.synchronize()  # what is mapped must not be unmapped under a kernel that uses it; here none does
            torch.cuda._sleep(SLEEP)
        elif not each:
            speed = bandwidth(chunks.address.value, total)
        for name in ("unmap", "release", "address_free"):
            rows.append(row(name, chunks, is_busy, timed(getattr(chunks, name))))
        torch.cuda.synchronize()
    return rows, speed


def row(name: str, chunks: Chunks, is_busy: bool, time_us: float) -> dict[str, object]:
    n = 1 if name in ("reserve", "set_access", "unmap", "address_free") else chunks.n
    about = {"call": name, "chunk_bytes": chunks.chunk, "n_handles": chunks.n, "total_bytes": chunks.total}
    return about | {"is_busy": is_busy, "n_calls": n, "time_us": time_us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-mib", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    torch.zeros(1, device="cuda")
    total = given.total_mib * MIB
    rows: list[dict[str, object]] = []
    speeds: list[dict[str, object]] = []
    for repeat in range(given.repeat):
        for is_busy in (False, True):
            plain = U64()
            about = {"chunk_bytes": total, "n_handles": 1, "total_bytes": total, "is_busy": is_busy, "n_calls": 1}
            if is_busy:
                torch.cuda._sleep(SLEEP)
            us = timed(lambda: call("cuMemAlloc_v2", ctypes.byref(plain), SIZE(total)))  # noqa: B023
            rows.append({"call": "malloc", "repeat": repeat, "time_us": us} | about)
            if not is_busy:
                speeds.append({"chunk_bytes": 0, "gb_per_s": bandwidth(plain.value, total)})
            us = timed(lambda: call("cuMemFree_v2", plain))  # noqa: B023
            rows.append({"call": "free", "repeat": repeat, "time_us": us} | about)
            for chunk in CHUNKS_MIB:
                if chunk * MIB <= total:
                    found, speed = measure(total, chunk * MIB, is_busy)
                    rows += [{**one, "repeat": repeat} for one in found]
                    if speed:
                        speeds.append({"chunk_bytes": chunk * MIB, "gb_per_s": speed})
    print(json.dumps({"vmm_costs": rows, "bandwidth": speeds, "gpu": torch.cuda.get_device_name()}))


main()
