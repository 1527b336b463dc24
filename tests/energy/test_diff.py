"""Two functions from capture to verdict, cause and fix, on a simulated card; PyTorch runs on the CPU."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gpubloat import Run
from gpubloat.energy import blocks
from gpubloat.energy.differences.flow import diff
from gpubloat.energy.engines import Around, Work
from gpubloat.errors import DeviceError, GpubloatError
from tests.energy.cards import Changed
from tests.energy.rigs import Costs, Rig

CASES = Path(__file__).parents[2] / "campaigns" / "energy" / "cases"
REPLAY = Costs(1e-4, 400.0)


class Charged(Rig):
    """A function costs what it says when it is called, by `charge`; replays cost `REPLAY`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cost=REPLAY, **options)
        self._charged: Costs | None = None

    @property
    def cost_of_replays(self) -> Costs | None:
        return self._cost

    @cost_of_replays.setter
    def cost_of_replays(self, cost: Costs) -> None:
        self._cost = cost

    def charge(self, call_s: float, watts: float, host_s: float = 0.0) -> None:
        self._charged = Costs(call_s, watts, host_s)

    def prepared(self, fn: Callable[[], Any], as_graph: bool, around: Around = nullcontext) -> Work:
        with around():
            fn()
        return super().prepared(self._charged or fn, as_graph)


@pytest.fixture
def case(torch: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:  # noqa: ARG001
    """A module of campaigns/energy/cases by name."""
    monkeypatch.syspath_prepend(str(CASES))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and Path(str(sys.modules[name].__file__)).parent == CASES:
            del sys.modules[name]


def compared(rig: Charged, a: Any, b: Any, *args: Any, **options: Any) -> Run:
    given = {"meter": rig.meter, "engine": rig, "seconds": 1.0, "band": 0.01}
    return diff(a, b, *args, **(given | options))


def costing(rig: Charged, fn: Callable[..., Any], *cost: float) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        rig.charge(*cost)
        return fn(*args)

    return called


def by_time(a: Callable[..., Any], a_s: float, b: Callable[..., Any], b_s: float, *args: Any) -> pd.Series[Any]:
    """The comparison where only times are taken, of functions that take so many seconds."""
    rig = Charged()
    run = diff(costing(rig, a, a_s, 0.0), costing(rig, b, b_s, 0.0), *args, engine=rig, times_only=True)
    return run["comparisons"].iloc[0]


def test_a_copy_that_only_one_side_makes(case: Callable[[str], Any], tmp_path: Path) -> None:
    module, rig = case("repeat_one"), Charged()
    inputs = [module.inputs(seed, small=True) for seed in (0, 9)]
    run = compared(
        rig, costing(rig, module.slow, 3e-3, 500.0), costing(rig, module.fast, 2e-3, 500.0), *inputs[0],
        again=(inputs[1], inputs[1]), subject="repeat", case=module.ID, out=tmp_path / "run", names=("a", "b"),
    )  # fmt: skip
    assert Run.load(tmp_path / "run")["comparisons"].equals(run["comparisons"])
    row = run["comparisons"].iloc[0]
    assert (row["verdict"], row["cause"], row["wasteful"], row["case"]) == ("waste", "extra copy", "A", "D7")
    assert run.provenance["verdict"] == "waste"
    assert row["saved_frac"] == pytest.approx(1 / 3, abs=2e-3)
    assert row["low_frac"] <= row["saved_frac"] <= row["high_frac"]
    assert row["time_ratio"] == pytest.approx(2 / 3, rel=0.01)
    assert row["outputs_equal"]
    assert row["output_error"] == 0
    assert "repeat_one.py" in row["a_line"]
    assert row["a_line"].endswith("slow")
    assert row["fix"] == "B in place of A"
    assert row["fix_saved_frac"] == pytest.approx(1 / 3, abs=0.01)
    regions = run["regions"]
    (alone,) = regions[~regions["is_same"]].itertuples()
    assert (alone.a_operators, alone.b_operators) == ("aten::index_select.default", "") or alone.b_operators == ""
    assert alone.a_call_j == pytest.approx(REPLAY.call_j, rel=0.05)
    assert (alone.verdict, alone.saved_frac, alone.wasteful) == ("waste", 1.0, "A")
    assert regions[regions["is_same"]]["verdict"].eq("no difference").all()
    assert set(run["blocks"]["subject"]) == {"whole", "region of A alone", "the fix"}


def test_the_same_twice(case: Callable[[str], Any]) -> None:
    module, rig = case("same"), Charged(noise=0.001)
    run = compared(
        rig, costing(rig, module.slow, 2e-3, 600.0), costing(rig, module.fast, 2e-3, 600.0),
        *module.inputs(0, small=True), band=None,
    )  # fmt: skip
    row = run["comparisons"].iloc[0]
    assert (row["verdict"], row["cause"], row["fix"]) == ("no difference", "", "")
    assert 0 < row["band_frac"] < 0.015
    assert run["regions"]["is_same"].all()
    assert set(run["blocks"]["subject"]) == {"whole", "A against A"}
    assert "one input only" in row["notes"]


def test_other_inputs_are_no_waste(case: Callable[[str], Any]) -> None:
    module, rig = case("zeros"), Charged()
    run = compared(
        rig, costing(rig, module.slow, 2e-3, 600.0), costing(rig, module.fast, 1.8e-3, 500.0),
        *module.inputs(0, small=True),
    )  # fmt: skip
    row = run["comparisons"].iloc[0]
    assert (row["verdict"], row["reason"]) == ("trade-off", "outputs differ")
    assert (row["cause"], row["fix"]) == ("input data", "")
    assert not row["outputs_equal"]


def test_functions_that_compute_something_else_get_no_advice(torch: Any) -> None:
    def slow(x: Any) -> Any:
        copy = x.clone()
        return torch.relu(copy @ x)

    x = torch.randn(32, 32)
    row = diff(slow, lambda x: torch.sigmoid(x @ x), x, times_only=True, seconds=0.02)["comparisons"].iloc[0]
    assert (row["cause"], row["outputs_equal"]) == ("unknown", False)
    assert re.fullmatch(
        r"the functions part at aten::relu.default of A \(.*test_diff.py:\d+\) and aten::sigmoid.default of B "
        r"\(.*test_diff.py:\d+\): what they compute from there on is not equal",
        row["evidence"],
    )
    assert "make the outputs equal first" in row["remedy"]


def compiled_wrongly(torch: Any, fn: Any) -> Any:
    return torch.compile(fn, backend=lambda graph, _: lambda *given: tuple(1.5 * y for y in graph.forward(*given)))


def test_what_cannot_be_compared_of_compiled_code_is_not_called_equal(torch: Any) -> None:
    """A buffer that is written to, random numbers, state: each call returns something else anyhow."""
    buffer, norm, seen = torch.empty(32, 32), torch.nn.BatchNorm1d(32).train(), [torch.ones(32, 32)]

    def with_state(x: Any) -> Any:
        seen[0] = seen[0] + x
        return seen[0].relu()

    def into_buffer(x: Any) -> Any:
        torch.mm(x, x, out=buffer)
        return torch.nn.functional.dropout(buffer.relu(), 0.5)

    for fn in (with_state, into_buffer, lambda x: torch.relu(torch.rand_like(x) @ x)):
        compiled = compiled_wrongly(torch, fn)
        row = diff(fn, compiled, torch.randn(32, 32), times_only=True, seconds=0.02)["comparisons"].iloc[0]
        assert row["outputs_equal"] is pd.NA or not row["outputs_equal"]  # False: A and B share the state
        assert "what B returns compiled was not compared: it returns something else in each call" in row["notes"]
    right = torch.compile(norm, backend="eager")
    row = diff(norm, right, torch.randn(64, 32), times_only=True, seconds=0.02)["comparisons"].iloc[0]
    assert row["outputs_equal"]
    wrong = compiled_wrongly(torch, norm)
    row = diff(norm, wrong, torch.randn(64, 32), times_only=True, seconds=0.02)["comparisons"].iloc[0]
    assert not row["outputs_equal"]
    assert "B returns something else compiled" in row["notes"]


def test_compiled_code_that_fails_is_told_in_a_sentence(torch: Any) -> None:
    def boom(*_: Any) -> Any:
        raise ValueError("no such kernel")

    late = torch.compile(lambda x: torch.relu(x @ x), backend=lambda *_: boom)
    with pytest.raises(GpubloatError, match=r"failed at .*test_diff.py:\d+ while it was run compiled: .*no such"):
        diff(lambda x: torch.relu(x @ x), late, torch.randn(8, 8), times_only=True, seconds=0.02)


def test_a_number_has_no_partner_and_is_not_where_functions_part(torch: Any) -> None:
    def with_check(activation: Any) -> Any:
        return lambda x: activation(x @ x) if x.isfinite().all().item() else x

    x = torch.randn(32, 32)
    row = diff(with_check(torch.relu), with_check(torch.sigmoid), x, times_only=True, seconds=0.02)["comparisons"].iloc[
        0
    ]
    assert row["evidence"].startswith("the functions part at aten::relu.default of A (")


@pytest.mark.parametrize("is_right", [True, False])
def test_what_compiled_code_returns_is_compared(torch: Any, is_right: bool) -> None:
    """Captured uncompiled, both sides are the same program; what the compiler made of one may not be."""

    def fn(x: Any) -> Any:
        return torch.relu(x @ x)

    def backend(graph: Any, _: Any) -> Any:
        return graph.forward if is_right else lambda *given: tuple(1.5 * made for made in graph.forward(*given))

    compiled, x = torch.compile(fn, backend=backend), torch.randn(32, 32)
    row = diff(fn, compiled, x, times_only=True, seconds=0.02)["comparisons"].iloc[0]
    assert row["outputs_equal"] == is_right
    assert ("B returns something else compiled" in row["notes"]) != is_right
    assert row["output_error"] == pytest.approx(0.0 if is_right else 1 / 3, abs=1e-6)


@pytest.mark.parametrize("a_is_jax", [False, True])
def test_a_program_of_torch_against_one_of_jax(torch: Any, a_is_jax: bool) -> None:
    jax = pytest.importorskip("jax")

    def of_torch(x: Any) -> Any:
        return torch.softmax(x @ x, -1)

    def of_jax(x: Any) -> Any:
        return jax.nn.softmax(x @ x)

    inputs = [torch.randn(64, 64), torch.randn(64, 64)]
    sides = [(of_torch, inputs), (jax.jit(of_jax), [jax.numpy.asarray(x.numpy()) for x in inputs])]
    (a, of_a), (b, of_b) = sides[::-1] if a_is_jax else sides
    run = diff(a, b, of_a[0], b_args=(of_b[0],), again=((of_a[1],), (of_b[1],)), times_only=True, seconds=0.02)
    row = run["comparisons"].iloc[0]
    assert row["outputs_equal"]
    assert row["time_ratio"] > 0
    spelled = {frozenset(ops) for ops in run["regions"][["a_operators", "b_operators"]].itertuples(index=False)}
    assert frozenset({"aten::mm.default", "jax::dot_general"}) in spelled


def test_a_function_of_jax_without_arrays_of_jax_says_what_to_give(torch: Any) -> None:
    jax = pytest.importorskip("jax")
    x = torch.randn(8, 8)
    with pytest.raises(GpubloatError, match="B: the function returns arrays of JAX") as error:
        diff(lambda x: x @ x, lambda x: jax.numpy.matmul(x, x), x, b_args=(x.numpy(),), times_only=True)
    assert "arrays of JAX" in str(error.value.hint)


def test_results_that_jax_cannot_take_apart_are_no_obstacle(torch: Any) -> None:
    jax = pytest.importorskip("jax")
    x = torch.randn(16, 16)
    run = diff(
        lambda x: {1: x @ x, "a": x + 1}, jax.jit(lambda x: (x @ x, x + 1)), x,
        b_args=(jax.numpy.asarray(x.numpy()),), times_only=True, seconds=0.02,
    )  # fmt: skip
    assert run["comparisons"].iloc[0]["outputs_equal"]


def test_frameworks_on_different_devices_are_refused(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")
    monkeypatch.setattr("gpubloat.energy.differences.flow.used_device", lambda one: f"{one.framework}'s")
    x = torch.randn(8, 8)
    with pytest.raises(GpubloatError, match="A runs on torch's and B on jax's") as error:
        diff(lambda x: x @ x, lambda x: x @ x, x, b_args=(jax.numpy.asarray(x.numpy()),), times_only=True)
    assert error.value.hint


def test_a_copy_comes_before_the_layout_that_it_makes(torch: Any) -> None:
    x, w = torch.randn(300, 200), torch.randn(300, 200)
    row = by_time(lambda x, w: x @ w.t().contiguous(), 3e-3, lambda x, w: x @ w.t(), 2e-3, x, w)
    assert row["cause"] == "extra copy"


def test_equal_outputs_without_a_number_say_nothing(torch: Any) -> None:
    rig, x = Charged(), torch.randn(32, 32)
    slow, fast = (
        costing(rig, lambda x, f=f: f(x) * torch.nan, s, 500.0) for f, s in ((torch.sin, 3e-3), (torch.cos, 2e-3))
    )
    row = compared(rig, slow, fast, x)["comparisons"].iloc[0]
    assert (row["verdict"], row["reason"]) == ("trade-off", "outputs were not compared")


def test_settings_that_make_no_sense(torch: Any) -> None:
    rig, x = Charged(), torch.ones(4)
    for options in ({"band": float("nan")}, {"deadline_s": float("nan")}, {"deadline_s": -1.0}, {"n_blocks": 0}):
        with pytest.raises(GpubloatError, match=r"band is nan|greater than 0"):
            compared(rig, torch.sin, torch.sin, x, **options)
    with pytest.raises(GpubloatError, match=r"^A: the function failed .*SystemExit: 3"):
        compared(rig, lambda _: sys.exit(3), torch.sin, x)


def test_waiting_for_the_host_saves_nothing(case: Callable[[str], Any]) -> None:
    """The side that lets the GPU wait takes less of its energy."""
    module, rig = case("eigenvalues"), Charged()
    run = compared(
        rig, costing(rig, module.slow, 1.1, 130.0), costing(rig, module.fast, 0.4, 600.0),
        *module.inputs(0, small=True), seconds=2.5,
    )  # fmt: skip
    row = run["comparisons"].iloc[0]
    assert (row["verdict"], row["wasteful"]) == ("trade-off", "B")
    assert "longer" in row["reason"]


def test_time_of_the_host_alone(case: Callable[[str], Any]) -> None:
    module, rig = case("spin_wait"), Charged()
    run = compared(
        rig, costing(rig, module.slow, 0.02, 600.0, 0.02), costing(rig, module.fast, 0.02, 600.0, 0.001),
        *module.inputs(0, small=True),
    )  # fmt: skip
    row = run["comparisons"].iloc[0]
    assert (row["verdict"], row["cause"]) == ("no difference", "host wait")
    assert row["a_host_s"] > 10 * row["b_host_s"]
    assert row["fix"] == ""


def test_without_a_gpu_the_time_of_the_host_is_no_cause(torch: Any) -> None:
    """There the host computes. Of two functions that run the same, one may take longer for many reasons."""

    def slow(x: Any) -> Any:
        end = time.process_time() + 0.004
        while time.process_time() < end:
            pass
        return x * 2

    run = diff(slow, lambda x: x * 2, torch.ones(8), times_only=True, seconds=0.05)
    assert run["comparisons"].iloc[0]["cause"] == ""


def test_a_setting_is_measured_as_the_fix(case: Callable[[str], Any], torch: Any) -> None:
    module, rig = case("tf32"), Charged()
    x, w = module.inputs(0, small=True)

    def slow(x: Any, w: Any) -> Any:
        rig.charge(*((1e-3, 600.0) if torch.backends.cuda.matmul.allow_tf32 else (8e-3, 500.0)))
        return x @ w

    def fast(x: Any, w: Any) -> Any:
        rig.charge(1e-3, 600.0)
        return module.fast(x, w)

    row = compared(rig, slow, fast, x, w)["comparisons"].iloc[0]
    assert (row["cause"], row["fix"]) == ("precision", "torch.backends.cuda.matmul.allow_tf32 = True")
    assert row["fix_saved_frac"] == pytest.approx(1 - 0.6 / 4.0, abs=0.01)
    assert not torch.backends.cuda.matmul.allow_tf32


def test_a_setting_that_saves_nothing_is_no_fix(case: Callable[[str], Any]) -> None:
    """The function sets it back itself, as that of the case does: then the other side is the fix."""
    module, rig = case("tf32"), Charged()
    run = compared(
        rig, costing(rig, module.slow, 8e-3, 500.0), costing(rig, module.fast, 1e-3, 600.0),
        *module.inputs(0, small=True),
    )  # fmt: skip
    row = run["comparisons"].iloc[0]
    assert (row["cause"], row["fix"]) == ("precision", "B in place of A")
    assert row["fix_saved_frac"] == pytest.approx(1 - 0.6 / 4.0, abs=0.01)
    assert "torch.backends.cuda.matmul.allow_tf32 = True saves nothing" in row["notes"]
    assert set(run["blocks"]["subject"]) == {"whole", "the setting", "the fix"}


@pytest.mark.parametrize(("costs", "better"), [((3e-3, 1e-3), "topk"), ((1e-3, 3e-3), "sort")])
def test_where_only_the_whole_is_known_the_remedy_is_what_the_better_side_does(
    case: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, costs: tuple[float, float], better: str
) -> None:
    def unseen(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernels are seen")

    monkeypatch.setattr("gpubloat.energy.differences.flow.timed", unseen)
    module, rig = case("top_k"), Charged()
    run = compared(
        rig, *(costing(rig, fn, cost, 500.0) for fn, cost in zip((module.slow, module.fast), costs)),
        *module.inputs(0, small=True), deadline_s=1.0,
    )  # fmt: skip
    assert f"call aten::{better}.default" in run["comparisons"].iloc[0]["remedy"]


def test_a_region_where_the_better_side_takes_more_is_not_the_cause(
    case: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As measured on an H200: LayerNorm itself is dearer in B, by more than each copy that only A makes takes."""
    module, rig = case("layer_norm"), Charged()
    plain = blocks.block

    def block(work: Work, meter: Any, engine: Any, seconds: float, subject: str, side: str = "", order: int = 0) -> Any:
        if subject.startswith("region"):
            rig.cost_of_replays = Costs(*{"A": (2.3e-4, 533.0), "B": (4.8e-4, 564.0)}[side])
        return plain(work, meter, engine, seconds, subject, side, order)

    monkeypatch.setattr(blocks, "block", block)
    run = compared(
        rig, costing(rig, module.slow, 7e-4, 586.0), costing(rig, module.fast, 4.7e-4, 569.0),
        *module.inputs(0, small=True),
    )  # fmt: skip
    row = run["comparisons"].iloc[0]
    assert (row["wasteful"], row["cause"]) == ("A", "extra copy")
    regions = run["regions"].set_index("cause")
    assert (
        regions.loc["layout", "b_call_j"] - regions.loc["layout", "a_call_j"]
        > regions.loc["extra copy", "a_call_j"].max()
    )


def test_functions_that_do_not_compute_the_same_have_no_fix(torch: Any) -> None:
    rig = Charged()
    row = compared(
        rig, costing(rig, torch.relu, 3e-3, 500.0), costing(rig, torch.sigmoid, 1e-3, 500.0), torch.ones(8, 8) - 3
    )["comparisons"].iloc[0]
    assert (row["verdict"], row["cause"], row["fix"]) == ("trade-off", "unknown", "")


def test_a_function_that_fails_under_the_setting_has_no_fix_and_the_table_stays(
    case: Callable[[str], Any], torch: Any
) -> None:
    module, rig = case("tf32"), Charged()

    def slow(x: Any, w: Any) -> Any:
        rig.charge(8e-3, 500.0)
        if torch.backends.cuda.matmul.allow_tf32:
            raise ValueError("not with TF32")
        return x @ w

    row = compared(rig, slow, costing(rig, module.fast, 1e-3, 600.0), *module.inputs(0, small=True), tolerance=0.01)
    found = row["comparisons"].iloc[0]
    assert found["fix"] == "B in place of A"
    assert "allow_tf32 = True cannot be used: ValueError: not with TF32" in found["notes"]
    assert not torch.backends.cuda.matmul.allow_tf32


def test_an_expanded_result_is_not_written_out(torch: Any) -> None:
    """40 GiB of it if it were."""
    x = torch.randn(32, 32)
    run = diff(
        lambda m: (m * 2).expand(10**7, 32, 32), lambda m: (m + m).expand(10**7, 32, 32), x, times_only=True,
        seconds=0.02,
    )  # fmt: skip
    assert run["comparisons"].iloc[0]["outputs_equal"]


def test_what_there_is_no_time_for(case: Callable[[str], Any]) -> None:
    module, rig = case("repeat_one"), Charged()
    run = compared(
        rig, costing(rig, module.slow, 3e-3, 500.0), costing(rig, module.fast, 2e-3, 500.0),
        *module.inputs(0, small=True), deadline_s=1.0,
    )  # fmt: skip
    row = run["comparisons"].iloc[0]
    assert (row["verdict"], row["fix"]) == ("waste", "")
    assert "no fix was measured: the deadline was reached" in row["notes"]
    regions = run["regions"]
    assert regions[~regions["is_same"]]["notes"].tolist() == ["not measured: the deadline was reached"]


def test_bad_input_is_one_sentence(torch: Any, tmp_path: Path) -> None:
    rig, x = Charged(), torch.ones(3, 3)

    def fails(x: Any) -> Any:
        return x @ torch.ones(2, 2)

    def raises(x: Any) -> Any:
        raise ValueError(f"three sheep of {(x + 1).shape}")

    line = raises.__code__.co_firstlineno + 1
    with pytest.raises(GpubloatError, match=r"^B: the function failed in aten::mm.* at .*test_diff\.py:\d+: "):
        compared(rig, lambda x: x + 1, fails, x)
    with pytest.raises(GpubloatError, match=rf"failed after aten::add.* at .*test_diff\.py:{line}: ValueError: three"):
        compared(rig, lambda x: x + 1, raises, x)
    with pytest.raises(GpubloatError, match=r"^A: the function returns no tensor"):
        compared(rig, lambda _: None, lambda x: x, x)
    with pytest.raises(GpubloatError, match="uses no GPU"):
        diff(lambda x: x + 1, lambda x: 1 + x, x, meter=rig.meter)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(GpubloatError, match="not empty"):
        compared(rig, lambda x: x, lambda x: x, x, out=tmp_path / "full")


def test_a_meter_that_dies(torch: Any) -> None:
    rig, n_reads = Charged(), [0]
    read = rig.meter.read

    def dying() -> Any:
        n_reads[0] += 1
        if n_reads[0] > 60:
            raise DeviceError("absent", "the GPU is lost")
        return read()

    rig.meter.read = dying  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="the GPU is lost"):
        compared(rig, costing(rig, torch.tanh, 1e-3, 300.0), costing(rig, torch.tanh, 1e-3, 300.0), torch.ones(4))


def copying(x: Any) -> Any:
    for _ in range(20):
        x = x.clone()
    return (x @ x).tanh()


def plain(x: Any) -> Any:
    return (x @ x).tanh()


def test_times_only_needs_no_gpu(torch: Any) -> None:
    run = diff(copying, plain, torch.randn(32, 32), times_only=True, n_blocks=5, seconds=0.02)
    row = run["comparisons"].iloc[0]
    assert row["verdict"] == "not measured"
    assert row["a_call_s"] > row["b_call_s"] > 0
    assert re.fullmatch(
        r"B takes [\d.]+% of A's time \([\d.]+% to [\d.]+%\), on the CPU; "
        "energy was not measured: only times were asked for",
        row["reason"],
    )
    assert (row["cause"], row["wasteful"]) == ("extra copy", "")
    assert run["comparisons"]["saved_frac"].isna().all()
    (copies,) = run["regions"][~run["regions"]["is_same"]].itertuples()
    assert copies.cause == "extra copy"
    assert copies.reason.startswith("A surely takes longer; energy was not measured")


@pytest.mark.parametrize("is_swapped", [False, True])
def test_without_energies_only_the_side_that_takes_longer_is_blamed(torch: Any, is_swapped: bool) -> None:
    """It copies, so it is to blame if it is slower, and is no cause of anything if it is faster or as fast."""

    def compared_by_time(copying_s: float, plain_s: float) -> pd.Series[Any]:
        sides = [(copying, copying_s), (plain, plain_s)]
        (a, a_s), (b, b_s) = sides[::-1] if is_swapped else sides
        return by_time(a, a_s, b, b_s, torch.randn(32, 32))

    slow, fast = "BA" if is_swapped else "AB"
    row = compared_by_time(3e-3, 2e-3)
    assert row["cause"] == "extra copy"
    assert f"operators of {slow} (aten::clone.default" in row["evidence"]
    assert row["reason"].startswith(f"{fast} takes 66.7% of {slow}'s time (66.7% to 66.7%), on the CPU; energy")
    row = compared_by_time(2e-3, 3e-3)
    assert (row["cause"], row["remedy"]) == ("unknown", "none known")
    assert f"{fast} takes longer, but none of its operators surely does" in row["evidence"]
    row = compared_by_time(2.04e-3, 2e-3)
    assert (row["cause"], row["remedy"]) == ("", "")
    assert f"{fast} takes 98.0% of {slow}'s time" in row["reason"]
    assert "neither surely takes over 5 % more" in row["reason"]


def test_times_that_scatter_name_no_cause(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some blocks of A take six times as long as others, as on a machine with much else to do."""
    original, rig, seen = blocks.block, Charged(), [0]

    def block(*args: Any, **options: Any) -> Any:
        seen[0] += 1
        rig.charge(6e-3 if seen[0] % 3 == 0 else 1e-3, 0.0)
        return original(dataclasses.replace(args[0], run=rig._charged), *args[1:], **options)

    monkeypatch.setattr(blocks, "block", block)
    row = diff(copying, plain, torch.randn(32, 32), engine=rig, times_only=True)["comparisons"].iloc[0]
    assert (row["cause"], row["remedy"]) == ("", "")
    assert "neither surely takes over 5 % more" in row["reason"]
    assert re.search(r"times of this run are uncertain by \d+%: .*OMP_NUM_THREADS=1", row["notes"])


def test_operands_that_changed_places_are_no_other_input(torch: Any) -> None:
    row = by_time(lambda x: torch.relu(x @ x) + x, 3e-3, lambda x: x + torch.relu(x @ x), 2e-3, torch.rand(32, 32))
    assert (row["cause"], row["outputs_equal"]) == ("", True)


def test_what_returns_less_saves_nothing(torch: Any) -> None:
    x, rig = torch.randn(64, 64), Charged()
    a, b = costing(rig, lambda x: (x.sin(), x @ x), 3e-3, 500.0), costing(rig, lambda x: x.sin(), 2e-3, 500.0)
    less = compared(rig, a, b, x)["comparisons"].iloc[0]
    assert (less["verdict"], less["wasteful"]) == ("trade-off", "A")
    assert less["reason"] == "A returns more: the other may have computed less"
    a, b = costing(rig, lambda x: x.sin(), 3e-3, 500.0), costing(rig, lambda x: (x.sin(), x), 2e-3, 500.0)
    assert compared(rig, a, b, x)["comparisons"]["verdict"].tolist() == ["waste"]


def test_inputs_that_change_are_told(torch: Any) -> None:
    x, rig = torch.ones(64), Charged()
    a, b = costing(rig, lambda x: x.mul_(1.5), 2e-3, 500.0), costing(rig, lambda x: x * 1.5, 2e-3, 500.0)
    notes = compared(rig, a, b, x)["comparisons"].iloc[0]["notes"]
    assert "A changes what it is given: each call finds what the one before left" in notes
    assert "B changes" not in notes


def test_turned_outputs_are_told(torch: Any) -> None:
    x, rig = torch.randn(64, 64), Charged()
    a, b = costing(rig, lambda x: x.sin(), 3e-3, 500.0), costing(rig, lambda x: x.sin().t(), 2e-3, 500.0)
    row = compared(rig, a, b, x)["comparisons"].iloc[0]
    assert row["outputs_equal"]
    assert "axes in another order in B: 0" in row["notes"]


def test_one_product_for_three_computes_nothing_in_vain(torch: Any) -> None:
    x, w, rig = torch.randn(8, 64), torch.randn(192, 64), Charged()
    a = costing(rig, lambda x, w: [x @ part.t() for part in w.chunk(3)], 3e-3, 500.0)
    b = costing(rig, lambda x, w: (x @ w.t()).split(64, -1), 2e-3, 500.0)
    row = compared(rig, a, b, x, w)["comparisons"].iloc[0]
    assert (row["verdict"], row["outputs_equal"], row["cause"]) == ("waste", True, "kernel choice")


def test_a_power_of_zero_confirms_no_counter(torch: Any) -> None:
    rig = Charged()
    rig.meter = Changed(rig.meter, lambda one: dataclasses.replace(one, instant_w=0.0, average_w=0.0))  # type: ignore[assignment]
    a, b = costing(rig, lambda x: x * 2, 3e-3, 500.0), costing(rig, lambda x: x + x, 2e-3, 500.0)
    row = compared(rig, a, b, torch.ones(64))["comparisons"].iloc[0]
    assert row["verdict"] == "not measured"
    assert "no power signal answers" in row["reason"]


def test_layers_that_run_the_same_are_measured_once(torch: Any) -> None:
    """One of them stands for all, and together they outweigh a region that alone takes more than each."""

    def slow(x: Any) -> Any:
        for _ in range(3):
            x = torch.tanh(x.clone() @ x)
        return torch.relu(x.reshape(-1).clone())

    def fast(x: Any) -> Any:
        for _ in range(3):
            x = torch.tanh(x @ x)
        return torch.relu(x.reshape(-1))

    rig = Charged()
    run = compared(rig, costing(rig, slow, 3e-3, 500.0), costing(rig, fast, 2e-3, 500.0), torch.randn(32, 32))
    copies = run["regions"][~run["regions"]["is_same"]]
    assert copies["a_operators"].tolist() == ["aten::clone.default"] * 4
    assert copies["notes"].str.contains("3 regions run the same").tolist() == [True] * 3 + [False]
    assert copies["a_call_j"].nunique() == 2
    assert copies["a_call_j"].iloc[:3].nunique() == 1
    assert (run["blocks"]["subject"] == "region of A alone").sum() == 2
    assert copies["a_line"].str.contains("test_diff.py").all()
