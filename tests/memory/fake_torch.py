"""A package `torch` without a GPU: it keeps the contract of the parts that a recorder touches, and a log of calls.

Lazy calls run when CUDA is initialised, under the lock that queueing one takes, as in torch.cuda; the history can be on
before; a ring drops what is oldest; an out-of-memory error calls the observers before it is raised, from a thread that
holds the program.
"""

from __future__ import annotations

from pathlib import Path

_INIT = """
__version__ = "2.11.0+fake"
class _C:
    log = []
    observers = []
    history = None
    @staticmethod
    def _cuda_isHistoryEnabled():
        return _C.history is not None
    @staticmethod
    def _cuda_attach_out_of_memory_observer(observer):
        _C.observers.append(observer)
class version:
    cuda = {cuda!r}
    hip = None
from torch import cuda
"""
_CUDA = '''
import threading
import torch
from torch.cuda import memory
class OutOfMemoryError(RuntimeError):
    pass
_initialised = False
_queued = []
_initialization_lock = threading.Lock()
def is_available():
    return {available!r}
def is_initialized():
    return _initialised
def _lazy_call(function, **_):
    if not _initialization_lock.acquire(timeout=2):
        raise RuntimeError("the real torch.cuda would wait for ever here")
    try:
        if _initialised:
            function()
        else:
            _queued.append(function)
    finally:
        _initialization_lock.release()
def init():
    global _initialised
    torch._C.log.append("init")
    with _initialization_lock:
        for function in _queued:
            function()
        _initialised = True
def use(n=1, size=512):
    """Allocates n blocks."""
    if not _initialised:
        init()
    for _ in range(n):
        memory.event("alloc", size)
def fail():
    memory.event("oom", 1 << 40)
    for observer in torch._C.observers:
        observer(0, 1 << 40, 1 << 34, 1 << 20)
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 GiB.")
'''
_MEMORY = """
import torch
_trace = []
_n = 0
_history_calls = []
def event(action, size):
    global _n
    if torch._C.history is None:
        return
    _n += 1
    key = "device_free" if action == "oom" else "addr"
    entry = {"action": action, key: 1 << 20 if action == "oom" else 1024 * _n, "size": size, "stream": 0, "time_us": _n}
    _trace.append(entry | {"frames": [{"filename": "train.py", "name": "step", "line": 3}]})
    del _trace[: -torch._C.history]
def _record_memory_history(enabled="all", context="all", stacks="all", max_entries=1 << 60, **more):
    if not torch.cuda._initialised and not torch.cuda._queued:
        torch.cuda.init()  # as the real one: it would initialise CUDA
    _history_calls.append((enabled, context, stacks, max_entries))
    torch._C.log.append(f"history {enabled}")
    torch._C.history = max_entries if enabled else None
def _snapshot(device=None):
    torch._C.log.append("snapshot")
    return {"segments": [], "device_traces": [list(_trace), []], "allocator_settings": {}}
"""


def write(folder: Path, *, cuda: str | None = "13.0", available: bool = True) -> Path:
    """Make the package below `folder`, which then goes on sys.path."""
    package = folder / "torch"
    (package / "cuda").mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(_INIT.format(cuda=cuda), "utf-8")
    (package / "cuda" / "__init__.py").write_text(_CUDA.format(available=available), "utf-8")
    (package / "cuda" / "memory.py").write_text(_MEMORY, "utf-8")
    return folder
