"""Peaks that no counter keeps: memory of a process tree and of the GPUs, looked at again and again by a thread."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

INTERVAL_S = 0.02
SHARE = 0.05  # of one core: the most that walking the process tree may take
_NOT_TOLD = 1 << 62  # bytes; NVML's sign for what it does not tell is the greatest number
SETTLE_S = 1.0  # the driver frees the memory of an earlier process a little after its end


@dataclass
class Peaks:
    """Largest values seen so far, in bytes: of one process, of the sum over the tree, of the GPUs. None: not seen.

    own_gpu : of what NVML says the processes hold themselves.
    """

    process: int = 0
    tree: int | None = None
    all_gpu: int | None = None
    own_gpu: int | None = None

    @property
    def gpu(self) -> int | None:
        """What the processes hold, where NVML lists them: a GPU may be shared. Else what the GPUs hold."""
        return self.all_gpu if self.own_gpu is None else self.own_gpu

    @property
    def gpu_of(self) -> str | None:
        """Whose memory `gpu` is: "processes", "gpus"; None if it was not seen."""
        return "processes" if self.own_gpu is not None else None if self.all_gpu is None else "gpus"


@dataclass(frozen=True)
class GpuMemory:
    """above : bytes in use on the visible GPUs, above the level before. of : what NVML says these processes hold there.

    None where nothing can be read: no NVML, no GPU, a GPU that does not tell, or none of the processes is listed, as
    from inside a container.
    """

    above: Callable[[], int | None] = lambda: None
    of: Callable[[Collection[int]], int | None] = lambda _: None


@contextlib.contextmanager
def sampled(root: int, used: GpuMemory) -> Iterator[Peaks]:
    """Look every 20 ms at the descendants of process `root` and at the GPUs while the block runs."""
    peaks = Peaks(tree=0 if os.path.exists(f"/proc/{root}/task/{root}/children") else None, all_gpu=used.above())
    stop = threading.Event()
    thread = threading.Thread(target=_look, args=(root, used, peaks, stop), name="gpubloat-peaks", daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        stop.set()
        thread.join()


def _look(root: int, used: GpuMemory, peaks: Peaks, stop: threading.Event) -> None:
    due = 0.0
    pids: list[int] = []
    while not stop.wait(INTERVAL_S):
        peaks.all_gpu = _greater(peaks.all_gpu, used.above())
        start = time.monotonic()
        if peaks.tree is not None and start >= due:
            pids = _descendants(root)
            sizes = [_resident(pid) for pid in pids]
            peaks.process = max(peaks.process, *sizes, 0)
            peaks.tree = max(peaks.tree, sum(sizes))
            # Hundreds of threads take milliseconds to list: look less often then.
            due = time.monotonic() + (time.monotonic() - start) / SHARE
        peaks.own_gpu = _greater(peaks.own_gpu, used.of(pids))


def _greater(peak: int | None, level: int | None) -> int | None:
    return level if peak is None else peak if level is None else max(peak, level)


def _descendants(root: int) -> list[int]:
    found, waiting = [], [root]
    while waiting:
        folder = f"/proc/{waiting.pop()}/task"
        children: list[int] = []
        with contextlib.suppress(OSError):  # it may end at any moment
            for thread in os.listdir(folder):
                with open(f"{folder}/{thread}/children", "rb") as file:
                    children += map(int, file.read().split())
        found += children
        waiting += children
    return found


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


@contextlib.contextmanager
def gpu_memory(env: Mapping[str, str]) -> Iterator[GpuMemory]:
    """What is in use on the GPUs that `env` shows, while the block runs; its start is the level before."""
    try:
        import pynvml
    except ImportError:
        yield GpuMemory()
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield GpuMemory()
        return
    try:
        try:
            handles = _visible(pynvml, env.get("CUDA_VISIBLE_DEVICES"))
        except pynvml.NVMLError:
            handles = []

        def total() -> int | None:
            try:
                return sum(int(pynvml.nvmlDeviceGetMemoryInfo(h).used) for h in handles) if handles else None
            except pynvml.NVMLError:
                return None

        level = _settled(total)

        def above() -> int | None:
            now = total()
            return None if now is None or level is None else max(now - level, 0)

        def of(pids: Collection[int]) -> int | None:
            try:
                listed = [p for h in handles for p in pynvml.nvmlDeviceGetComputeRunningProcesses(h) if p.pid in pids]
                held = [int(p.usedGpuMemory) for p in listed]  # None on Windows: TypeError
            except (pynvml.NVMLError, AttributeError, TypeError, ValueError):  # of an older NVML, too
                return None
            return sum(held) if held and all(0 <= one < _NOT_TOLD for one in held) else None

        yield GpuMemory(above, of)
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def gpus() -> list[str]:
    """Names of the GPUs of this machine that CUDA_VISIBLE_DEVICES shows; empty without NVML."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        names = [pynvml.nvmlDeviceGetName(h) for h in _visible(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return []
    return [_text(name) for name in names]


def _visible(nvml: Any, listed: str | None) -> list[Any]:
    """Handles of the GPUs that CUDA_VISIBLE_DEVICES lists; as in CUDA, an entry that names none ends the list.

    Numbers are taken in NVML's order (that of the bus); CUDA's own order differs only between unlike GPUs.
    """
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    if listed is None:
        return handles
    found: list[Any] = []
    for word in (part.strip() for part in listed.split(",")):
        if word.isdecimal() and int(word) < len(handles):
            found.append(handles[int(word)])
        elif word.startswith("GPU-"):
            matching = [h for h in handles if _text(nvml.nvmlDeviceGetUUID(h)).startswith(word)]
            if len(matching) != 1:
                break
            found += matching
        elif word.startswith("MIG-"):
            try:
                found.append(nvml.nvmlDeviceGetHandleByUUID(word))
            except nvml.NVMLError:
                break
        else:
            break
    return found


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _settled(total: Callable[[], int | None]) -> int | None:
    """The level once three looks in a row agree; the last one if they do not within a second."""
    seen = [total()]
    end = time.monotonic() + SETTLE_S
    while seen[-1] is not None and time.monotonic() < end and (len(seen) < 3 or len(set(seen[-3:])) > 1):
        time.sleep(INTERVAL_S)
        seen.append(total())
    return seen[-1]
