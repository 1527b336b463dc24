"""What runs a function again and again for a time: on PyTorch, with CUDA graphs where that works, and on JAX."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from gpubloat.energy.host import cpu_seconds
from gpubloat.energy.replay import TARGET_S, Replay, captured_graph
from gpubloat.energy.sampler import Clock, WallClock
from gpubloat.errors import MissingToolError, sentence
from gpubloat.optional import torch_module

Around = Callable[[], AbstractContextManager[Any]]

AS_CALLED, IN_A_GRAPH = "as called", "CUDA graph"
_TRIAL_S = 0.005  # calls are timed until they have taken this long
_MOST_CALLS = 1000  # of one `Work.run`


@dataclass(frozen=True)
class Work:
    """Something to be run again and again.

    run : makes `calls` calls, asynchronously on a GPU. how : "CUDA graph", "as called", or a text that begins so and
    goes on with the reason. restore : makes the copies alone that `run` makes before each call, or None.
    """

    run: Callable[[], Any]
    calls: int
    how: str
    restore: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Ran:
    """Calls that were made from `start_s` to `end_s` on the engine's clock; nothing was left to do at either end.

    cpu_s : CPU time of the process in between, in steps of 0.01 s.
    """

    n_calls: int
    start_s: float
    end_s: float
    cpu_s: float

    @property
    def call_s(self) -> float:
        return (self.end_s - self.start_s) / self.n_calls


class Engine(Protocol):
    """Runs work on one device.

    clock : that of the meter. prepared : a function as work; `as_graph` asks for a CUDA graph and gets one if it can
    be; `around` makes a context that is entered once for all calls of a run. run : whole runs of `work` until `seconds`
    have passed, at least one, without a gap between them. idle : nothing is run. release : gives memory back that
    nobody uses.
    """

    @property
    def clock(self) -> Clock: ...

    def prepared(self, fn: Callable[[], Any], as_graph: bool, around: Around = nullcontext) -> Work: ...

    def run(self, work: Work, seconds: float) -> Ran: ...

    def idle(self, seconds: float) -> None: ...

    def release(self) -> None: ...


def engine_for(framework: str, device: str) -> Engine:
    """framework : "torch" or "jax". device : as a capture names it, "cpu" or "cuda:0"."""
    if framework == "jax":
        return JaxEngine()
    return TorchEngine(int(device.partition(":")[2] or 0) if device.startswith("cuda") else None)


def of_replay(replay: Replay) -> Work:
    """Recorded operators as work."""
    return Work(replay.run, replay.calls, replay.how, replay.restore)


def repeated(fn: Callable[[], Any], calls: int, around: Around = nullcontext) -> Callable[[], Any]:
    """Calls `fn` that often, in one context; gives what the last call gave."""

    def run() -> Any:
        result = None
        with around():
            for _ in range(calls):
                result = fn()
        return result

    return run


class TorchEngine:
    """index : PyTorch's number of the GPU, None for the CPU.

    At most two runs of a work wait on the GPU: it never falls idle between them, and the host sleeps meanwhile.
    """

    def __init__(self, index: int | None, clock: Clock | None = None) -> None:
        self._torch = torch_module()
        self._index = index
        self.clock: Clock = clock or WallClock()

    def prepared(self, fn: Callable[[], Any], as_graph: bool, around: Around = nullcontext) -> Work:
        """About 20 ms of calls, at most 1,000. They are captured in one graph where that works.

        In a graph the host's work is left out: the calls of Python, waiting, what runs on the CPU. Functions that wait
        for the GPU cannot be captured and run as called.
        """
        with around():
            calls = _calls(fn, self._finish, self.clock)
        body = repeated(fn, calls, around)
        if not as_graph:
            return Work(body, calls, AS_CALLED)
        if self._index is None:
            return Work(body, calls, f"{AS_CALLED}: on the CPU")
        try:
            return Work(self._captured(body), calls, IN_A_GRAPH)
        except Exception as error:  # whatever a function raises that may not wait, or not allocate, in a capture
            self._finish()
            return Work(body, calls, f"{AS_CALLED}: {sentence(error)}")

    def run(self, work: Work, seconds: float) -> Ran:
        with self._device():
            self._finish()
            waiting: Any = None
            cpu_s, start_s = cpu_seconds(), self.clock.now()
            n_calls = 0
            while not n_calls or self.clock.now() < start_s + seconds:
                work.run()
                n_calls += work.calls
                before, waiting = waiting, self._mark()
                if before is not None:
                    before.synchronize()
            self._finish()
            return Ran(n_calls, start_s, self.clock.now(), cpu_seconds() - cpu_s)

    def idle(self, seconds: float) -> None:
        self._finish()
        self.clock.sleep(seconds)

    def release(self) -> None:
        """PyTorch keeps freed memory; what is free decides how many sets of inputs a replay takes."""
        if self._index is not None:
            gc.collect()
            self._torch.cuda.empty_cache()

    def _captured(self, body: Callable[[], Any]) -> Callable[[], Any]:
        with self._device():
            return captured_graph(self._torch, body)

    def _mark(self) -> Any:
        """What can be waited for, without the host spinning: that the GPU has come here."""
        if self._index is None:
            return None
        event = self._torch.cuda.Event(blocking=True)
        event.record()
        return event

    def _device(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._index is None else self._torch.cuda.device(self._index)

    def _finish(self) -> None:
        if self._index is not None:
            self._torch.cuda.synchronize(self._index)


class JaxEngine:
    """Calls functions as they are, compiled or not, and waits for what they return. There are no graphs here."""

    def __init__(self, clock: Clock | None = None) -> None:
        try:
            self._jax = import_module("jax")
        except ImportError:
            raise MissingToolError("JAX", "pip install jax") from None
        self.clock: Clock = clock or WallClock()
        self._result: Any = None

    def prepared(self, fn: Callable[[], Any], as_graph: bool, around: Around = nullcontext) -> Work:
        """About 20 ms of calls, at most 1,000."""

        def called() -> Any:
            self._result = fn()

        with around():
            calls = _calls(called, self._finish, self.clock)
        self._result = None
        how = f"{AS_CALLED}: JAX captures no graph here" if as_graph else AS_CALLED
        return Work(repeated(fn, calls, around), calls, how)

    def run(self, work: Work, seconds: float) -> Ran:
        waiting: Any = None
        cpu_s, start_s = cpu_seconds(), self.clock.now()
        n_calls = 0
        while not n_calls or self.clock.now() < start_s + seconds:
            before, waiting = waiting, work.run()
            n_calls += work.calls
            if before is not None:
                self._jax.block_until_ready(before)
        self._jax.block_until_ready(waiting)
        return Ran(n_calls, start_s, self.clock.now(), cpu_seconds() - cpu_s)

    def idle(self, seconds: float) -> None:
        self.clock.sleep(seconds)

    def release(self) -> None:
        gc.collect()

    def _finish(self) -> None:
        self._jax.block_until_ready(self._result)


def _calls(fn: Callable[[], Any], finish: Callable[[], None], clock: Clock) -> int:
    """How many calls take about 20 ms."""
    fn()  # loads kernels, compiles
    n = 1
    while True:
        finish()
        start_s = clock.now()
        for _ in range(n):
            fn()
        finish()
        took_s = clock.now() - start_s
        if took_s >= _TRIAL_S or n >= _MOST_CALLS:
            return max(1, min(_MOST_CALLS, math.ceil(TARGET_S * n / took_s))) if took_s > 0 else _MOST_CALLS
        n *= 4
