"""What runs work: how many calls, how far the host runs ahead, what happens where a graph cannot be had."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gpubloat.energy import engines
from gpubloat.energy.engines import (
    AS_CALLED,
    IN_A_GRAPH,
    BothEngine,
    JaxEngine,
    TorchEngine,
    Work,
    engine_for,
    sentence,
)
from gpubloat.energy.recording import VirtualClock
from gpubloat.energy.replay import captured_graph
from gpubloat.errors import GpubloatError, MissingToolError


class Gpu:
    """A stand-in for PyTorch: a queue of work that runs as far as somebody waits for it, on a virtual clock."""

    def __init__(self, clock: VirtualClock, call_s: float) -> None:
        self.clock = clock
        self.call_s = call_s
        self.queued = 0
        self.most_queued = 0
        self.captured: list[int] | None = None
        self.n_calls = 0
        self.calls: list[str] = []
        self.may_capture = True
        self.waits = False
        self.mode: int | str = 0
        self.cuda = SimpleNamespace(
            synchronize=self.synchronize, device=self.device, Event=self.event, Stream=SimpleNamespace,
            stream=lambda _: contextlib.nullcontext(), current_stream=lambda: SimpleNamespace(wait_stream=self.said),
            CUDAGraph=lambda: SimpleNamespace(replay=self.replay), graph=self.graph,
            get_sync_debug_mode=lambda: self.mode, set_sync_debug_mode=lambda mode: setattr(self, "mode", mode),
            empty_cache=lambda: self.calls.append("empty_cache"),
        )  # fmt: skip
        self.cuda.Stream = lambda: SimpleNamespace(wait_stream=self.said)

    def said(self, *_: Any) -> None:
        self.calls.append("wait_stream")

    def kernel(self) -> None:
        """The workload."""
        self.n_calls += 1
        if self.waits and self.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.captured is not None:
            self.captured.append(1)
            if not self.may_capture:
                raise RuntimeError("operation not permitted when stream is capturing\nmore")
            return
        self.launch(1)

    def launch(self, n: int) -> None:
        self.queued += n
        self.most_queued = max(self.most_queued, self.queued)

    def replay(self) -> None:
        self.launch(self.in_graph)

    @contextlib.contextmanager
    def graph(self, _: Any) -> Iterator[None]:
        self.captured = []
        try:
            yield
        finally:
            self.in_graph = len(self.captured)
            self.captured = None

    def wait_until(self, left: int) -> None:
        self.clock.sleep(max(0, self.queued - left) * self.call_s)
        self.queued = min(self.queued, left)

    def synchronize(self, _: Any = None) -> None:
        self.wait_until(0)

    @contextlib.contextmanager
    def device(self, _: int) -> Iterator[None]:
        yield

    def event(self, blocking: bool) -> Any:
        assert blocking  # the host sleeps: its CPU time is not spent on waiting
        place = SimpleNamespace(at=0)

        def record() -> None:
            place.at = self.done + self.queued

        def synchronize() -> None:
            self.wait_until(max(0, self.done + self.queued - place.at))

        return SimpleNamespace(record=record, synchronize=synchronize)

    @property
    def done(self) -> int:
        return round(self.clock.now() / self.call_s)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu(VirtualClock(), 0.0005)
    monkeypatch.setattr(engines, "torch_module", lambda: made)
    return made


def test_work_runs_for_a_time_and_the_host_is_one_run_ahead(gpu: Gpu) -> None:
    engine = TorchEngine(0, gpu.clock)
    work = engine.prepared(gpu.kernel, as_graph=False)
    assert (work.calls, work.how) == (40, AS_CALLED)  # 20 ms
    gpu.most_queued = 0
    ran = engine.run(work, 2.0)
    assert ran.call_s == pytest.approx(gpu.call_s)
    assert 2.0 <= ran.end_s - ran.start_s < 2.1
    assert ran.end_s == gpu.clock.now()
    assert gpu.queued == 0
    assert 40 < gpu.most_queued <= 80


def test_a_graph_makes_many_calls(gpu: Gpu) -> None:
    engine = TorchEngine(0, gpu.clock)
    work = engine.prepared(gpu.kernel, as_graph=True)
    assert work.how == IN_A_GRAPH
    before = gpu.n_calls
    ran = engine.run(work, 1.0)
    assert gpu.n_calls == before  # the function itself is not called any more
    assert ran.call_s == pytest.approx(gpu.call_s)
    assert "wait_stream" in gpu.calls


def test_a_context_is_entered_once_for_all_calls_of_a_run(gpu: Gpu) -> None:
    """As a graph it is entered while captured only: what it does at its start is in the graph once."""
    entered = []

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        entered.append(gpu.n_calls)
        yield
        entered.append(gpu.n_calls)

    for as_graph in (False, True):
        work = TorchEngine(0, gpu.clock).prepared(gpu.kernel, as_graph, around)
        entered.clear()
        work.run()
        assert [b - a for a, b in zip(entered[::2], entered[1::2])] == ([] if as_graph else [work.calls])


def test_what_cannot_be_captured_runs_as_called_and_says_why(gpu: Gpu) -> None:
    gpu.may_capture = False
    engine = TorchEngine(0, gpu.clock)
    work = engine.prepared(gpu.kernel, as_graph=True)
    assert work.how == "as called: RuntimeError: operation not permitted when stream is capturing"
    assert engine.run(work, 1.0).call_s == pytest.approx(gpu.call_s)


def test_what_waits_for_the_gpu_is_not_even_captured(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that a library breaks off leaves the library in a state in which its next call fails."""
    gpu.waits = True
    monkeypatch.setattr(gpu.cuda, "graph", None)
    work = TorchEngine(0, gpu.clock).prepared(gpu.kernel, as_graph=True)
    assert work.how == "as called: RuntimeError: called a synchronizing CUDA operation"
    assert gpu.mode == 0  # as it was


def test_a_graph_keeps_the_tensors_that_it_reads(gpu: Gpu) -> None:
    """It owns what is made in the capture, not what was there before."""

    class Tensor:
        pass

    tensor = Tensor()
    alive = weakref.ref(tensor)

    def reading(tensor: Tensor) -> Callable[[], None]:
        return lambda: gpu.kernel() if tensor is not None else None

    run = captured_graph(gpu, reading(tensor))
    del tensor
    gc.collect()
    assert alive() is not None
    run()
    del run
    gc.collect()
    assert alive() is None


def test_ctrl_c_in_a_capture_goes_through(gpu: Gpu) -> None:
    def stopped() -> None:
        gpu.kernel()
        if gpu.captured is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TorchEngine(0, gpu.clock).prepared(stopped, as_graph=True)
    assert gpu.captured is None


def test_memory_is_given_back(gpu: Gpu) -> None:
    TorchEngine(0, gpu.clock).release()
    TorchEngine(None, gpu.clock).release()
    assert gpu.calls == ["empty_cache"]


@pytest.mark.parametrize("call_s", [1e-6, 0.003, 0.5])
def test_at_least_one_run_and_at_most_a_thousand_calls_in_it(gpu: Gpu, call_s: float) -> None:
    engine = TorchEngine(None, gpu.clock)
    work = engine.prepared(lambda: gpu.clock.sleep(call_s), as_graph=True)
    assert work.how == "as called: on the CPU"
    assert work.calls == {1e-6: 1000, 0.003: 7, 0.5: 1}[call_s]
    ran = engine.run(work, 0.001)
    assert ran.n_calls >= work.calls
    assert ran.call_s == pytest.approx(call_s)


def test_idle_passes_time(gpu: Gpu) -> None:
    gpu.launch(4)
    start_s = gpu.clock.now()
    TorchEngine(0, gpu.clock).idle(1.5)
    assert gpu.clock.now() - start_s == pytest.approx(1.5 + 4 * gpu.call_s)


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(block_until_ready=found.append))
    return found


def test_jax_waits_for_the_run_before_and_for_the_last(waited: list[Any]) -> None:
    clock = VirtualClock()
    engine = JaxEngine(clock)
    results: list[int] = []

    def function() -> int:
        clock.sleep(0.005)
        results.append(len(results))
        return results[-1]

    work = engine.prepared(function, as_graph=True)
    assert work.calls == 4
    assert work.how.startswith("as called: JAX")
    waited.clear()
    ran = engine.run(Work(work.run, work.calls, work.how), 0.1)
    assert ran.n_calls == 20
    assert ran.call_s == pytest.approx(0.005)
    first = results[-ran.n_calls]
    assert waited == [first + 4 * n + 3 for n in range(5)]


@pytest.mark.parametrize("is_jax", [False, True])
def test_both_frameworks_are_waited_for(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, is_jax: bool) -> None:
    """PyTorch's events do not tell of what JAX launched, nor do JAX's results of PyTorch's."""
    of_jax = Gpu(gpu.clock, gpu.call_s)

    def block(made: Any) -> None:
        if made == "result":
            of_jax.wait_until(20)

    def function() -> Any:
        (of_jax if is_jax else gpu).launch(1)
        return "result" if is_jax else object()

    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(block_until_ready=block))
    engine = BothEngine(0, gpu.clock)
    work = engine.prepared(function, as_graph=True)
    assert work.how == "as called: JAX captures no graph here"
    used, other = (of_jax, gpu) if is_jax else (gpu, of_jax)
    used.most_queued = 0
    ran = engine.run(work, 1.0)
    assert ran.call_s == pytest.approx(gpu.call_s, rel=0.05)
    assert work.calls < used.most_queued <= 2 * work.calls + 20
    assert used.queued <= 20
    assert other.most_queued == 0


@pytest.mark.usefixtures("waited")
def test_the_engine_of_a_framework(gpu: Gpu) -> None:
    assert isinstance(engine_for("cuda:0", "jax"), JaxEngine)
    assert type(engine_for("cpu", "torch")) is TorchEngine
    assert isinstance(engine_for("cuda:0", "torch", "jax"), BothEngine)
    seen: list[int] = []
    gpu.cuda.synchronize = seen.append
    for device in ("cuda:3", "cuda"):
        engine_for(device, "torch").idle(0.0)
    assert seen == [3, 0]


def test_without_jax_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(MissingToolError, match="JAX is not installed"):
        JaxEngine()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad.\nmore"), "ValueError: bad"),
        (ValueError(), "ValueError"),
        (GpubloatError("what it says", "hint"), "what it says"),
    ],
)
def test_an_exception_in_one_line(error: Exception, text: str) -> None:
    assert sentence(error) == text


def test_a_function_of_pytorch_on_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(64, 64)
    engine = TorchEngine(None)
    called: Callable[[], Any] = lambda: x @ x  # noqa: E731
    ran = engine.run(engine.prepared(called, as_graph=True), 0.02)
    assert ran.n_calls >= 1
    assert ran.end_s - ran.start_s >= 0.02
