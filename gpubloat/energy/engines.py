"""What runs a function again and again for a time: on PyTorch, with CUDA graphs where that works, and on JAX."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
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


def engine_for(device: str, *frameworks: str) -> Engine:
    """device : as a capture names it, "cpu" or "cuda:0". frameworks : "torch", "jax" or both, of what will run."""
    if {*frameworks} == {"jax"}:
        return JaxEngine()
    index = int(device.partition(":")[2] or 0) if device.startswith("cuda") else None
    return BothEngine(index) if "jax" in frameworks else TorchEngine(index)


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
            return _repeated_for(seconds, work, self.clock, lambda _: self._mark(), _waited_for, self._finish)

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

    def wait(self, made: Any) -> None:
        """Until JAX has made it. What JAX cannot take apart did not come from it, and is not waited for."""
        with suppress(ValueError):
            self._jax.block_until_ready(made)

    def prepared(
        self,
        fn: Callable[[], Any],
        as_graph: bool,
        around: Around = nullcontext,
        finish: Callable[[], None] = lambda: None,
    ) -> Work:
        """About 20 ms of calls, at most 1,000. finish : waits for what JAX does not know of."""
        result: Any = None

        def called() -> None:
            nonlocal result
            result = fn()

        def finished() -> None:
            self.wait(result)
            finish()

        with around():
            calls = _calls(called, finished, self.clock)
        how = f"{AS_CALLED}: JAX captures no graph here" if as_graph else AS_CALLED
        return Work(repeated(fn, calls, around), calls, how)

    def run(self, work: Work, seconds: float) -> Ran:
        return _repeated_for(seconds, work, self.clock, lambda made: made, self.wait)

    def idle(self, seconds: float) -> None:
        self.clock.sleep(seconds)

    def release(self) -> None:
        gc.collect()


class BothEngine(TorchEngine):
    """For functions of PyTorch and of JAX in one process: all run as called, and what either leaves is waited for.

    JAX hands work to the GPU from threads of its own: only its results tell that all of it was done.
    """

    def __init__(self, index: int | None, clock: Clock | None = None) -> None:
        super().__init__(index, clock)
        self._of_jax = JaxEngine(self.clock)

    def prepared(self, fn: Callable[[], Any], as_graph: bool, around: Around = nullcontext) -> Work:
        """About 20 ms of calls, at most 1,000."""
        work = self._of_jax.prepared(fn, False, around, self._finish)
        return replace(work, how=f"{AS_CALLED}: JAX captures no graph here") if as_graph else work

    def run(self, work: Work, seconds: float) -> Ran:
        def waited_for(made: tuple[Any, Any]) -> None:
            self._of_jax.wait(made[0])
            _waited_for(made[1])

        with self._device():
            self._finish()
            return _repeated_for(seconds, work, self.clock, lambda made: (made, self._mark()), waited_for, self._finish)


def _waited_for(mark: Any) -> None:
    """mark : an event of PyTorch, or None."""
    if mark is not None:
        mark.synchronize()


def _repeated_for(
    seconds: float,
    work: Work,
    clock: Clock,
    marked: Callable[[Any], Any],
    wait: Callable[[Any], None],
    finish: Callable[[], None] = lambda: None,
) -> Ran:
    """Runs of `work`, of which two at most wait on the device. marked : what to wait for, from what a run gave."""
    cpu_s, start_s = cpu_seconds(), clock.now()
    n_calls = 0
    waiting: list[Any] = []
    while not n_calls or clock.now() < start_s + seconds:
        waiting.append(marked(work.run()))
        n_calls += work.calls
        if len(waiting) > 1:
            wait(waiting.pop(0))
    wait(waiting.pop())
    finish()
    return Ran(n_calls, start_s, clock.now(), cpu_seconds() - cpu_s)


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
