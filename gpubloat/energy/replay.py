"""One operator, or several in order, made again from recorded inputs, so that its energy can be measured alone.

Inputs are clones with the recorded values, strides, alignment and overlaps, in as many sets as it takes to exceed twice
the L2 cache, used in turn. Many calls are one CUDA graph where that works, so that no time passes between kernels.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpubloat.energy.capture.records import Capture, Op
from gpubloat.energy.region import Inputs, Mismatch, Region, outer_inputs, unfit
from gpubloat.errors import GpubloatError
from gpubloat.optional import torch_module

TARGET_S = 0.02  # of one run: many calls
_MOST_CALLS = 10_000
_MOST_CPU_BYTES = 1 << 30  # of all sets together
_TRIAL_S = 1e-3  # calls are timed until they have taken this long


@dataclass(frozen=True)
class Refused:
    """Why operators cannot be replayed. Is false."""

    reason: str

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True)
class Replay:
    """Operators that can be replayed; checked: they gave the recorded outputs again.

    run : makes `calls` calls, asynchronously on a GPU. how : "CUDA graph", or "eager: " and why.
    restore, restored_bytes : where a call changes its inputs so that the next would compute something else, `run`
    copies this many bytes back before each call, and `restore` makes the same copies alone, to be subtracted;
    None and 0 otherwise. n_sets : of inputs, used in turn. set_bytes : size of one.
    is_cold : all sets exceed twice the L2 cache. worst_error : relative error of the outputs, 0 if bit by bit equal.
    """

    ops: tuple[int, ...]
    run: Callable[[], None]
    calls: int
    how: str
    restore: Callable[[], None] | None
    restored_bytes: int
    n_sets: int
    set_bytes: int
    is_cold: bool
    worst_error: float


def replayable(
    ops: Op | Sequence[Op],
    capture: Capture,
    *,
    target_s: float = TARGET_S,
    cache_bytes: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Replay | Refused:
    """Prepare operators of a capture of PyTorch to be run again and again.

    Parameters
    ----------
    ops : one operator or a region; they run in the order of the capture.
    target_s : how long one `Replay.run` is to take.
    cache_bytes : size of the L2 cache; default, asked from the GPU, 0 for the CPU.
    clock : seconds.

    Returns
    -------
    Replay, or Refused: random numbers, results that depend on data, inputs that were not kept, views, and operators
    that do not give the recorded outputs.
    """
    chosen = sorted([ops] if isinstance(ops, Op) else ops, key=lambda op: op.index)
    try:
        reason = unfit(chosen, capture)
        if reason is not None:
            return Refused(reason)
        with torch_module().no_grad():
            return _prepared(Region(chosen, capture), capture, target_s, cache_bytes, clock)
    except Mismatch as error:
        return Refused(error.message)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        said = str(error).strip().splitlines()
        return Refused(f"it cannot run: {said[0] if said else type(error).__name__}")


def _prepared(
    region: Region, capture: Capture, target_s: float, cache_bytes: int | None, clock: Callable[[], float]
) -> Replay:
    device = region.device
    inputs = Inputs(capture, outer_inputs(region.ops))
    worst = region.check(inputs.fresh())
    written = inputs.written(region.ops)
    if written and not region.reads_what_it_changes(inputs):
        written = []
    if cache_bytes is None:
        cache_bytes = _cache_bytes(device)
    calls = _calls(region, inputs, target_s, clock)
    n_sets = min(calls, _sets(inputs.n_bytes, cache_bytes, device))
    calls = math.ceil(calls / n_sets) * n_sets
    sets = [inputs.fresh() for _ in range(n_sets)]
    bound = [region.bound(one) for one in sets]

    def body() -> None:
        for n in range(calls):
            for group in written:
                sets[n % n_sets].buffers[group].copy_(inputs.buffers[group])
            bound[n % n_sets]()

    def copies() -> None:
        for n in range(calls):
            for group in written:
                sets[n % n_sets].buffers[group].copy_(inputs.buffers[group])

    run, how = _as_graph(body, device)
    return Replay(
        ops=tuple(op.index for op in region.ops),
        run=run,
        calls=calls,
        how=how,
        restore=_as_graph(copies, device)[0] if written else None,
        restored_bytes=sum(inputs.buffers[group].numel() for group in written),
        n_sets=n_sets,
        set_bytes=inputs.n_bytes,
        is_cold=n_sets * inputs.n_bytes > 2 * cache_bytes,
        worst_error=worst,
    )


def _calls(region: Region, inputs: Inputs, target_s: float, clock: Callable[[], float]) -> int:
    """How many calls take `target_s`, about."""
    call = region.bound(inputs.fresh())
    call()  # loads kernels
    n = 1
    while True:
        _finish(region.device)
        start = clock()
        for _ in range(n):
            call()
        _finish(region.device)
        took = clock() - start
        if took >= _TRIAL_S or n >= _MOST_CALLS:
            return max(1, min(_MOST_CALLS, math.ceil(target_s * n / took) if took > 0 else _MOST_CALLS))
        n *= 4


def _sets(set_bytes: int, cache_bytes: int, device: Any) -> int:
    """How many sets of inputs exceed twice the cache, if the memory holds them."""
    if set_bytes == 0:
        return 1
    free = torch_module().cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else _MOST_CPU_BYTES
    return max(1, min(2 * cache_bytes // set_bytes + 1, free // set_bytes))


def _cache_bytes(device: Any) -> int:
    return int(torch_module().cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def _finish(device: Any) -> None:
    if device.type == "cuda":
        torch_module().cuda.synchronize(device)


def _as_graph(body: Callable[[], None], device: Any) -> tuple[Callable[[], None], str]:
    """What runs `body`, and how."""
    try:
        return graphed(body, device), "CUDA graph"
    except (RuntimeError, GpubloatError) as error:
        said = str(error).strip().splitlines()

        def eager() -> None:
            with torch_module().no_grad():
                body()

        return eager, f"eager: {said[0] if said else type(error).__name__}"


def graphed(body: Callable[[], None], device: Any) -> Callable[[], None]:
    """A CUDA graph of `body`. GpubloatError or RuntimeError if there is none."""
    if device.type != "cuda":
        raise GpubloatError("the tensors are on the CPU")
    torch = torch_module()
    with torch.no_grad(), torch.cuda.device(device):
        return captured_graph(torch, body)


@dataclass(frozen=True)
class _Replayed:
    """A graph to be called. body : held, since the graph reads the memory of its tensors without owning it."""

    graph: Any
    body: Callable[[], Any]

    def __call__(self) -> None:
        self.graph.replay()


def captured_graph(torch: Any, body: Callable[[], Any]) -> Callable[[], None]:
    """What replays `body`, captured as a CUDA graph on the current device. Raises what `body` raises in a capture.

    What waits for the GPU is found out before: a library that is stopped in a capture may fail in its next call, too.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), _refusing_to_wait(torch):
        body()  # libraries set themselves up outside of the graph
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return _Replayed(graph, body)


@contextlib.contextmanager
def _refusing_to_wait(torch: Any) -> Iterator[None]:
    """Operators of PyTorch that wait for the GPU raise RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*debug mode is a prototype")  # told once, and there is no other
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
