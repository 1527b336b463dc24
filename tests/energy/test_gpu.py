"""On a real GPU: signals, graphs, replays and a comparison from end to end. Two minutes; skipped without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpubloat.energy import blocks
from gpubloat.energy.capture import capture
from gpubloat.energy.compare import compare
from gpubloat.energy.differences.flow import diff
from gpubloat.energy.engines import AS_CALLED, IN_A_GRAPH, TorchEngine
from gpubloat.energy.meter import NoDevice, open_meter
from gpubloat.energy.probing import probe
from gpubloat.energy.replay import Replay, replayable
from gpubloat.energy.slope import Slope
from gpubloat.energy.statistics import Saved
from gpubloat.energy.timing import time as timed
from gpubloat.energy.windows import Window, window

torch: Any = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("PyTorch finds no GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def meter() -> Iterator[Any]:
    found = open_meter()
    if isinstance(found, NoDevice):
        pytest.skip(found.reason)
    yield found
    found.close()


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return TorchEngine(0)


@pytest.fixture(scope="module")
def x() -> Any:
    return torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)


def test_signals_answer(meter: Any) -> None:
    reading = meter.read()
    assert reading.counter_mj > 0
    assert reading.instant_w > 10
    assert 0 < reading.call_s < 0.05
    assert meter.describe()["name"]


def test_a_window_knows_its_error(meter: Any, x: Any) -> None:
    with window(meter) as found:
        for _ in range(3000):
            torch.mm(x, x)
    assert isinstance(found, Window)
    assert found.energy_j is not None, found.reason
    assert found.error_j is not None
    assert found.error_j < 0.05 * found.energy_j
    assert found.mean_w is not None
    assert 100 < found.mean_w < 1200


def test_products_run_in_a_graph_and_power_is_known(meter: Any, engine: TorchEngine, x: Any) -> None:
    work = engine.prepared(lambda: x @ x, True)
    assert work.how == IN_A_GRAPH
    one = blocks.block(work, meter, engine, 2.0, "product")
    assert isinstance(one.power, Slope), one.power
    assert one.refused is None
    assert one.power.error_w < 0.02 * one.power.power_w
    assert blocks.idle(meter, engine, 2.0).power.power_w < 0.6 * one.power.power_w  # type: ignore[union-attr]


def test_what_waits_for_the_host_runs_as_called_and_the_gpu_goes_on(engine: TorchEngine, x: Any) -> None:
    work = engine.prepared(lambda: (x @ x).sum().item(), True)
    assert work.how.startswith(AS_CALLED)
    assert engine.run(work, 0.05).n_calls >= work.calls
    again = engine.prepared(lambda: x @ x, True)
    assert again.how == IN_A_GRAPH
    engine.run(again, 0.05)
    torch.cuda.synchronize()


def test_operators_are_captured_timed_and_replayed(x: Any) -> None:
    def step() -> Any:
        return torch.softmax((x @ x).float(), -1).to(x.dtype) @ x

    with capture(step) as found:
        assert {info.device for info in found.tensors.values()} == {"cuda:0"}
        timing = timed(step, capture=found, repeats=3)
        assert timing.source == "kernels"
        assert not timing.mismatches
        assert {op.index for op in found.ops if not op.is_view} <= set(timing.op_us)
        assert sum(timing.op_us.values()) == pytest.approx(timing.work_us, rel=0.01)
        for op in found.ops:
            if op.is_view:
                continue
            made = replayable(op, found)
            assert isinstance(made, Replay), made
            assert made.how == IN_A_GRAPH
            made.run()
        whole = replayable(found.ops, found)
        assert isinstance(whole, Replay), whole
        torch.cuda.synchronize()


def test_the_backward_pass_has_its_lines() -> None:
    linear = torch.nn.Linear(256, 256, device="cuda")

    def step() -> Any:
        loss = linear(torch.ones(8, 256, device="cuda")).square().mean()
        loss.backward()
        return loss

    with capture(step) as found:
        backward = [op for op in found.ops if op.lines and "backward" in op.lines[0].function]
        assert backward


def test_twice_the_work_takes_twice_the_energy(meter: Any, engine: TorchEngine, x: Any) -> None:
    found = compare(lambda: (x @ x, x @ x), lambda: x @ x, meter, engine, seconds=1.0)
    assert isinstance(found.saved, Saved), found.saved
    assert found.saved.wasteful == "A"
    assert found.saved.saved_frac == pytest.approx(0.5, abs=0.02)
    assert found.a.how == found.b.how == IN_A_GRAPH


def test_a_needless_copy_is_waste(meter: Any) -> None:
    k = torch.randn(2048, 4, 32, 128, device="cuda", dtype=torch.bfloat16)

    def slow(k: Any) -> Any:
        return k.repeat_interleave(1, dim=2) * k

    run = diff(slow, lambda k: k * k, k, meter=meter, band=0.01, deadline_s=120.0)
    row = run["comparisons"].iloc[0]
    assert (row["verdict"], row["cause"], row["wasteful"]) == ("waste", "extra copy", "A"), row["reason"]
    assert "test_gpu.py" in row["a_line"]


def test_probe_believes_the_counter(meter: Any) -> None:
    from gpubloat.energy.loads import TorchLoads

    run = probe(meter, TorchLoads(0))
    assert run.provenance["joules"]["is_trusted"], run.provenance["joules"]
    assert run.provenance["idle_w"] > 0
