"""Timing from traces: made by hand as Kineto writes them on a GPU, and real ones of this PyTorch on the CPU."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubloat.energy.capture import Call, Capture, Op, Ref, Store, TensorInfo
from gpubloat.energy.timing import STEP, of_trace
from gpubloat.errors import GpubloatError

PID, MAIN, ENGINE = 77, 77, 91


class Trace:
    """Events in the format of Kineto; ids count up as its do."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "ts": 0, "pid": PID, "tid": 0}]
        self.ids = 0

    def op(
        self, name: str, ts: float, dur: float, dims: Any = (), kinds: Any = None, tid: int = MAIN, **more: Any
    ) -> int:
        self.ids += 1
        args = {"External id": self.ids, "Ev Idx": self.ids, "Input Dims": list(dims)}
        args["Input type"] = list(kinds if kinds is not None else ["float" if d else "Scalar" for d in dims])
        self.add("cpu_op", name, ts, dur, tid, args | more)
        return self.ids

    def launch(self, ts: float, corr: int, ext: int | None, tid: int = MAIN, name: str = "cudaLaunchKernel") -> None:
        args: dict[str, Any] = {"cbid": 211, "correlation": corr} | ({"External id": ext} if ext is not None else {})
        self.add(
            "cuda_driver" if name.startswith("cu") and name[2].isupper() else "cuda_runtime", name, ts, 3, tid, args
        )

    def device(
        self, cat: str, name: str, ts: float, dur: float, corr: int, ext: int | None, stream: int = 7, **more: Any
    ) -> None:
        args = {"device": 0, "stream": stream, "correlation": corr, **more}
        self.add(cat, name, ts, dur, stream, args | ({"External id": ext} if ext is not None else {}), pid=0)

    def add(self, cat: str, name: str, ts: float, dur: float, tid: int, args: Any, pid: int = PID) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )


def captured(*calls: tuple[str, list[tuple[int, ...]], bool]) -> Capture:
    """A capture of operators (name, shapes of inputs, whether a view), all fp32."""
    infos: dict[int, TensorInfo] = {}
    ops, made = [], []

    def new(shape: tuple[int, ...]) -> int:
        number = len(infos)
        infos[number] = TensorInfo(number, shape, None, "fp32", "cuda:0", number, 0, 0, False)
        return number

    for index, (name, shapes, is_view) in enumerate(calls):
        inputs = tuple(new(shape) for shape in shapes)
        outputs = (new((1,)),)
        ops.append(Op(index, name, inputs, outputs, "", (), "", is_view, ()))
        made.append(Call(name, tuple(map(Ref, inputs)), {}, outputs))
    return Capture("torch", ops, infos, (), (), Store(), calls=made)


def step_on_gpu() -> tuple[Trace, Capture]:
    """linear(x, w) -> clone -> copy to the host; its backward on another thread; a GPU range around all."""
    trace = Trace()
    trace.add("user_annotation", f"{STEP} 0", 0, 200, MAIN, {"External id": 9001})
    trace.op("aten::linear", 10, 50, [[2, 3], [4, 3]])
    trace.op("aten::t", 11, 5, [[4, 3]])
    mm = trace.op("aten::mm", 20, 35, [[2, 3], [3, 4]])
    trace.launch(25, 100, mm)
    trace.launch(40, 101, mm)
    trace.op("aten::clone", 70, 20, [[2, 4], []], ["float", ""])
    copy = trace.op("aten::copy_", 75, 12, [[2, 4], [2, 4], []])
    trace.launch(80, 102, copy)
    back = trace.op("autograd::engine::evaluate_function: MmBackward0", 95, 40, tid=ENGINE)
    trace.op("MmBackward0", 96, 38, [[2, 4]], tid=ENGINE)
    grad = trace.op("aten::mm", 100, 30, [[3, 2], [2, 4]], tid=ENGINE)
    trace.launch(110, 103, None, tid=ENGINE)
    to_host = trace.op("aten::_to_copy", 140, 40, [[2, 4]])
    inner = trace.op("aten::copy_", 150, 25, [[2, 4], [2, 4]])
    trace.launch(155, 104, inner, name="cudaMemcpyAsync")
    trace.launch(190, 105, None, name="cuLaunchKernel")  # Triton's, outside of operators
    trace.device("kernel", "gemm_tn", 60, 30, 100, mm)
    trace.device("kernel", "splitK_reduce", 90, 5, 101, mm)
    trace.device("kernel", "elementwise", 95, 4, 102, copy)
    trace.device("kernel", "gemm_nt", 120, 20, 103, None)
    trace.device("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 160, 10, 104, inner, bytes=32)
    trace.device("kernel", "triton_poi_fused", 215, 6, 105, None)
    trace.device("gpu_user_annotation", f"{STEP} 0", 60, 161, 0, 9001)
    assert back
    assert grad
    assert to_host
    found = captured(
        ("aten::t.default", [(4, 3)], True),
        ("aten::mm.default", [(2, 3), (3, 4)], False),
        ("aten::detach.default", [(2, 4)], True),
        ("aten::clone.default", [(2, 4)], False),
        ("aten::mm.default", [(3, 2), (2, 4)], False),
        ("aten::_to_copy.default", [(2, 4)], False),
    )
    return trace, found


def test_kernels_go_to_the_operators_that_launched_them() -> None:
    trace, found = step_on_gpu()
    timing = of_trace({"schemaVersion": 1, "traceEvents": trace.events}, found)
    assert timing.source == "kernels"
    assert [(k.name, k.us, k.kind, k.n_bytes, k.operator, k.op) for k in timing.kernels] == [
        ("gemm_tn", 30, "kernel", None, "aten::mm", 1),
        ("splitK_reduce", 5, "kernel", None, "aten::mm", 1),
        ("elementwise", 4, "kernel", None, "aten::copy_", 3),
        ("gemm_nt", 20, "kernel", None, "aten::mm", 4),
        ("Memcpy DtoH (Device -> Pageable)", 10, "memcpy", 32, "aten::copy_", 5),
        ("triton_poi_fused", 6, "kernel", None, "", None),
    ]
    assert timing.op_us == {0: 0, 1: 35, 3: 4, 4: 20, 5: 10}
    assert timing.work_us == timing.busy_us == 75
    assert timing.step_us == 221  # to the end of the last kernel
    assert timing.idle_us == 221 - 75
    assert timing.not_joined_us == 6
    assert timing.mismatches == ("triton_poi_fused, launched outside of operators, belongs to no captured operator",)
    assert timing.notes == ("1 views of the capture are not in the trace: they do no work",)
    assert [k.name for k in timing.of(1)] == ["gemm_tn", "splitK_reduce"]


def test_without_external_ids_the_launch_decides() -> None:
    trace, found = step_on_gpu()
    for event in trace.events:
        if event.get("cat") in ("kernel", "gpu_memcpy"):
            event["args"].pop("External id", None)
    timing = of_trace(trace.events, found)
    assert timing.op_us == {0: 0, 1: 35, 3: 4, 4: 20, 5: 10}


def test_a_kernel_that_is_listed_twice_counts_once() -> None:
    trace, found = step_on_gpu()
    once = of_trace(trace.events, found)
    twice = of_trace(trace.events + [e for e in trace.events if e.get("cat") == "kernel"], found)
    assert twice == once


def test_kernels_of_a_graph_share_a_correlation_and_all_count() -> None:
    trace = Trace()
    trace.launch(10, 1, None, name="cudaGraphLaunch")
    for n in range(3):
        trace.device("kernel", "node", 20 + 5 * n, 5, 1, None)
    timing = of_trace(trace.events)
    assert timing.work_us == 15
    assert timing.step_us == 25  # from the launch
    assert timing.not_joined_us == 0  # nothing to join to


def test_kernels_side_by_side() -> None:
    trace = Trace()
    op = trace.op("aten::mm", 0, 10, [[2, 2], [2, 2]])
    for stream, start in ((7, 20), (8, 25)):
        trace.launch(5, stream, op)
        trace.device("kernel", "gemm", start, 10, stream, op, stream=stream)
    timing = of_trace(trace.events)
    assert (timing.work_us, timing.busy_us) == (20, 15)
    assert timing.idle_us == 20


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("aten::mm.default", [(2, 3), (3, 5)]),  # another shape
        ("aten::bmm.default", [(2, 3), (3, 4)]),  # another operator
        ("aten::mm.default", [(2, 3)]),  # other arguments
    ],
)
def test_an_operator_that_differs_is_reported_not_guessed(name: str, shapes: Any) -> None:
    trace, _ = step_on_gpu()
    found = captured((name, shapes, False), ("aten::clone.default", [(2, 4)], False))
    timing = of_trace(trace.events, found)
    assert timing.op_us == {1: 4}
    assert f"{name} (operator 0) is not in the trace" in timing.mismatches
    assert "gemm_tn, launched by aten::mm, belongs to no captured operator" in timing.mismatches
    assert timing.not_joined_us == 71


def test_another_type_is_another_operator() -> None:
    trace, _ = step_on_gpu()
    for event in trace.events:
        if event["name"] == "aten::clone":
            event["args"]["Input type"] = ["c10::BFloat16", ""]
    timing = of_trace(trace.events, captured(("aten::clone.default", [(2, 4)], False)))
    assert timing.mismatches[0] == "aten::clone.default (operator 0) is not in the trace"


def test_gradients_are_summed_in_place_outside_of_a_capture() -> None:
    from dataclasses import replace

    from gpubloat.energy.capture import Line

    trace = Trace()
    op = trace.op("aten::add_", 0, 10, [[4], [4], []])
    trace.launch(5, 1, op)
    trace.device("kernel", "add", 20, 3, 1, op)
    found = captured(("aten::add.Tensor", [(4,), (4,)], False))
    assert of_trace(trace.events, found).mismatches
    found.ops = (replace(found.ops[0], lines=(Line("", 0, "backward of MulBackward0", ""),)),)
    assert of_trace(trace.events, found).op_us == {0: 3}


def test_medians_over_repeats() -> None:
    trace = Trace()
    for n, us in enumerate((10.0, 30.0, 11.0)):
        start = 1000.0 * n
        trace.add("user_annotation", f"{STEP} {n}", start, 100, MAIN, {})
        op = trace.op("aten::mm", start + 10, 20, [[2, 2], [2, 2]])
        trace.launch(start + 15, n, op)
        trace.device("kernel", "gemm", start + 40, us, n, op)
    timing = of_trace(trace.events, captured(("aten::mm.default", [(2, 2), (2, 2)], False)))
    assert timing.n_repeats == 3
    assert timing.op_us == {0: 11}
    assert [k.repeat for k in timing.kernels] == [0, 1, 2]
    assert (timing.step_us, timing.idle_us) == (100, 89)
    assert len(timing.of(0)) == 1


@given(st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 100), st.integers(0, 2)), min_size=1, max_size=20))
def test_parts_sum_to_the_whole(kernels: list[tuple[float, float, int]]) -> None:
    trace = Trace()
    trace.add("user_annotation", f"{STEP} 0", 0, 500, MAIN, {})
    ops = [trace.op("aten::mm", 10.0 * n, 9, [[n + 1, 2], [2, 2]]) for n in range(3)]
    for n, (ts, dur, which) in enumerate(kernels):
        trace.launch(10.0 * which + 1, n, ops[which])
        trace.device("kernel", f"k{n}", ts + 30, dur, n, ops[which], stream=n % 3)
    # The last operator is not in the capture.
    found = captured(*(("aten::mm.default", [(n + 1, 2), (2, 2)], False) for n in range(2)))
    timing = of_trace(trace.events, found)
    assert timing.work_us == pytest.approx(sum(dur for _, dur, _ in kernels))
    assert sum(timing.op_us.values()) + timing.not_joined_us == pytest.approx(timing.work_us)
    assert timing.busy_us <= timing.work_us + 1e-6
    assert timing.busy_us + timing.idle_us == pytest.approx(timing.step_us)
    assert timing.idle_us >= -1e-6


def test_an_empty_trace() -> None:
    with pytest.raises(GpubloatError, match="no operator and no kernel"):
        of_trace({"traceEvents": []})


def model() -> tuple[Any, Any, Any]:
    torch = pytest.importorskip("torch")
    from tests.energy.test_capture_torch import GPT, IDS

    torch.manual_seed(0)
    return torch, GPT(), torch.tensor(IDS)


def test_a_real_step_on_the_cpu() -> None:
    from gpubloat.energy.capture import capture
    from gpubloat.energy.timing import time

    torch, gpt, ids = model()
    optimizer = torch.optim.AdamW(gpt.parameters(), foreach=True)

    def step() -> Any:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(gpt(ids)["logits"].flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        return loss

    step()  # the first makes the optimizer's state
    found = capture(step)
    timing = time(step, capture=found, repeats=2)
    assert timing.source == "operators on the CPU"
    assert timing.n_repeats == 2
    assert not timing.mismatches
    assert set(timing.op_us) >= {op.index for op in found.ops if not op.is_view}
    assert not timing.kernels
    assert all(us > 0 for us in timing.op_us.values())
    assert timing.work_us <= timing.step_us
    assert timing.wall_us is not None
    assert timing.wall_us > 0
    assert any("on the CPU" in note for note in timing.notes)


def test_a_real_trace_in_a_file(tmp_path: Path) -> None:
    from gpubloat.energy.capture import capture

    torch, gpt, ids = model()
    found = capture(gpt, ids)
    with torch.profiler.profile(record_shapes=True) as profile:
        gpt(ids)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    timing = of_trace(json.loads((tmp_path / "trace.json").read_text("utf-8")), found)
    assert not timing.mismatches
    own = {e.key: e for e in profile.key_averages()}
    gelu = sum(timing.op_us[op.index] for op in found.ops if op.name == "aten::gelu.default")
    assert gelu == pytest.approx(own["aten::gelu"].cpu_time_total, rel=1e-3, abs=0.1)


def test_indexing_and_lists_are_joined() -> None:
    from gpubloat.energy.capture import capture
    from gpubloat.energy.timing import time

    torch, _, _ = model()
    x, n, mask = torch.randn(4, 5), torch.tensor([1, 3]), torch.tensor([True, False, True, True])

    def fn() -> Any:
        y = x.clone()
        y[n] = 2.0
        y.index_put_((n, n), torch.ones(2))
        z = torch.cat([y[mask], torch.stack([y[0], y[1]])]).to(torch.bfloat16)
        return z * 2 + torch.ones((), dtype=torch.bfloat16), torch.nonzero(mask).sum().item()

    found = capture(fn)
    timing = time(fn, capture=found, repeats=1)
    assert not timing.mismatches


def test_never_inside_a_dispatch_mode() -> None:
    from gpubloat.energy.timing import time

    torch, _, _ = model()
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False), pytest.raises(GpubloatError, match="twice inside a dispatch mode"):
        time(lambda: torch.ones(2))
    with pytest.raises(GpubloatError, match="repeats is 0"):
        time(lambda: torch.ones(2), repeats=0)


def test_random_numbers_are_as_before() -> None:
    from gpubloat.energy.timing import time

    torch, _, _ = model()
    state = torch.get_rng_state()
    time(lambda: torch.randn(3), repeats=1)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("call_us", "n_operators", "repeats"), [(20, 1, 200), (2000, 1, 50), (50_000, 1, 5), (200, 400, 10), (9, 1000, 5)]
)
def test_short_functions_are_repeated_more_often(
    monkeypatch: pytest.MonkeyPatch, call_us: int, n_operators: int, repeats: int
) -> None:
    from gpubloat.energy.capture import capture
    from gpubloat.energy.timing import time

    torch, _, _ = model()

    def fn() -> Any:
        y = torch.ones(3)
        for _ in range(n_operators - 1):
            y = y * 2
        return y

    found = capture(fn)
    ticks = itertools.count()
    monkeypatch.setattr("gpubloat.energy.timing.clock.perf_counter", lambda: next(ticks) * call_us / 1e6)
    timing = time(fn, capture=found)
    assert timing.n_repeats == len(timing.repeats_us) == repeats
    assert timing.wall_us == pytest.approx(call_us)
    assert timing.op_us[0] == statistics.median(one[0] for one in timing.repeats_us)
