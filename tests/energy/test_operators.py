"""Energy by operator: groups, replays within a deadline, and an account that sums up exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubloat.energy import blocks
from gpubloat.energy.capture.records import Capture, Line, Op
from gpubloat.energy.engines import IN_A_GRAPH, Work
from gpubloat.energy.measuring import closing
from gpubloat.energy.operators import Measured, conserved, groups, replayed, short_kernels, tables
from gpubloat.energy.replay import Refused, Replay
from gpubloat.energy.timing import Kernel, Timing
from gpubloat.errors import DeviceError
from gpubloat.tables import schema
from tests.energy.captures import Program
from tests.energy.cards import IDLE_W
from tests.energy.rigs import Costs, Rig

STEP = Costs(0.0104, 410.0)
# microseconds in the step, and what a replay takes: time of a call, watts.
PARTS = {
    "mm": (2000.0, Costs(0.0022, 650.0)),
    "gelu": (800.0, Costs(0.0008, 480.0)),
    "add": (300.0, Costs(3e-4, 450.0)),
}


def made(*names: str) -> Capture:
    """A chain of operators of these names, with a view behind the first."""
    program = Program()
    x = program.input(np.ones((4, 4)))
    for n, name in enumerate(names):
        x = program.op(f"aten::{name}", lambda a: a + 1, x)
        if not n:
            x = program.view("aten::view", lambda a: a[:], x)
    return program.finish(x)


def timing(capture: Capture, us: Mapping[str, float]) -> Timing:
    times = {op.index: 0.0 if op.is_view else us[op.name.removeprefix("aten::")] for op in capture.ops}
    kernels = tuple(
        Kernel(f"void {op.name[6:]}_kernel<float>(int)", times[op.index], "kernel", None, op.name, op.index, 0)
        for op in capture.ops
        if not op.is_view
    )
    work = sum(times.values())
    return Timing("kernels", 1, kernels, times, 10400.0, work, work, 10400.0 - work, 0.0, None, (), ())


def replay_of(cost: Costs, ops: tuple[int, ...], **changes: object) -> Replay:
    plain = Replay(ops, cost, 9, IN_A_GRAPH, None, 0, 3, 64, True, 0.0)
    return replace(plain, **changes)  # type: ignore[arg-type]


def prepare(op: Op, _: Capture) -> Replay | Refused:
    return replay_of(PARTS[op.name.removeprefix("aten::")][1], (op.index,))


NAMES = ("mm", "gelu", "mm", "add", "mm")
US = {name: us for name, (us, _) in PARTS.items()}


def measured_on(
    rig: Rig, capture: Capture, until_s: float = math.inf, how: Callable[[Op, Capture], Replay | Refused] = prepare
) -> tuple[pd.DataFrame, pd.Series]:
    times = timing(capture, US)
    step = blocks.block(Work(STEP, 1, "as called"), rig.meter, rig, 2.0, "step")
    found = replayed(groups(capture, times), capture, rig.meter, rig, seconds=2.0, until_s=until_s, prepare=how)
    rows, closure = tables("f", capture, times, found, [step], IDLE_W)
    checked = schema("energy", "operators").check(rows, "operators")
    return checked.set_index("name"), schema("energy", "closure").check(closure, "closure").iloc[0]


def test_identical_operators_are_one_group_and_the_largest_comes_first() -> None:
    capture = made(*NAMES)
    found = groups(capture, timing(capture, US))
    assert [(capture.ops[group.ops[0]].name, len(group.ops), group.step_us) for group in found] == [
        ("aten::mm", 3, 6000.0),
        ("aten::gelu", 1, 800.0),
        ("aten::add", 1, 300.0),
        ("aten::view", 1, 0.0),
    ]
    assert sorted(n for group in found for n in group.ops) == [op.index for op in capture.ops]
    assert [group.is_work for group in found] == [True, True, True, False]


def test_other_shapes_arguments_and_repeated_inputs_are_other_groups() -> None:
    program = Program()
    x, y, z = (program.input(np.ones(shape)) for shape in ((4, 4), (4, 4), (2, 2)))
    for inputs in ((x, y), (y, x), (x, x), (z, z)):
        program.op("aten::mul", lambda a, b: a * b, *inputs)
    capture = program.finish(x)
    assert sorted(len(group.ops) for group in groups(capture, None)) == [1, 1, 2]
    capture.ops = (*capture.ops[:1], replace(capture.ops[1], arguments="%1, %0, 2.0"), *capture.ops[2:])
    assert sorted(len(group.ops) for group in groups(capture, None)) == [1, 1, 1, 1]


def test_without_times_those_with_most_bytes_come_first() -> None:
    program = Program()
    for size in (2, 8, 4):
        x = program.op("aten::neg", lambda a: -a, program.input(np.ones(size)))
    found = groups(program.finish(x), None)
    assert [group.ops for group in found] == [(1,), (2,), (0,)]


def test_joules_of_operators_are_known() -> None:
    rig = Rig(seed=3)
    rows, closure = measured_on(rig, made(*NAMES))
    for name, (us, cost) in PARTS.items():
        row = rows.loc[f"aten::{name}"]
        assert abs(row["call_j"] - cost.call_j) <= row["error_j"] < 0.02 * cost.call_j
        assert row["call_time_s"] == pytest.approx(cost.call_s)
        assert row["step_time_s"] == pytest.approx(us * row["n_same"] / 1e6)
        assert row["step_j"] == row["n_same"] * row["call_j"]
        assert row["step_frac"] == pytest.approx(row["step_j"] / closure["step_j"])
        assert row["active_j"] == pytest.approx(cost.call_s * (cost.watts - IDLE_W), rel=0.02)
        assert row["method"] == "replayed in a graph"
        assert row["kernels"] == f"{name}_kernel"
    assert rows.loc["aten::view", "method"] == "no kernel"
    assert np.isnan(rows.loc["aten::view", "call_j"])
    assert closure["step_j"] == pytest.approx(STEP.call_j, rel=0.01)
    assert (closure["n_operators"], closure["n_not_measured"]) == (5, 0)
    assert closure["not_measured_time_frac"] == 0


@given(
    step=st.floats(1e-9, 1e9),
    parts=st.lists(st.tuples(st.integers(1, 500), st.floats(1e-9, 1.0)), min_size=1, max_size=40),
    order=st.randoms(use_true_random=False),
)
def test_parts_and_remainder_are_the_step_exactly(step: float, parts: list[tuple[int, float]], order: object) -> None:
    """Parts sum to 100 times the step at most. Exactly: as fractions, and as floats in any order."""
    size = sum(n * share for n, share in parts) / 100
    account = conserved(step, [(n, step * share / max(1.0, size)) for n, share in parts])
    calls = [call_j for call_j in account.calls_j if call_j is not None]
    whole = [n * call_j for (n, _), call_j in zip(parts, calls)]
    exact = sum((n * Fraction(call_j) for (n, _), call_j in zip(parts, calls)), Fraction(account.remainder_j))
    assert exact == Fraction(account.step_j)
    order.shuffle(whole)  # type: ignore[attr-defined]
    assert sum(whole) + account.remainder_j == account.step_j
    assert sum(whole) == account.operators_j
    assert account.step_j == pytest.approx(step, rel=1e-11)
    for (_, share), call_j in zip(parts, calls):
        assert abs(call_j - step * share / max(1.0, size)) <= 1e-12 * step


def test_the_closure_is_exact_in_the_tables() -> None:
    rows, closure = measured_on(Rig(seed=9), made(*NAMES))
    assert rows["step_j"].sum() + closure["remainder_j"] == closure["step_j"]
    assert rows["step_j"].sum() == closure["operators_j"]
    expected = STEP.call_j - 3 * PARTS["mm"][1].call_j - PARTS["gelu"][1].call_j - PARTS["add"][1].call_j
    assert closure["remainder_j"] == pytest.approx(expected, abs=0.03 * STEP.call_j)


def test_what_an_idle_gpu_takes_while_no_kernel_runs_is_said() -> None:
    rows, closure = measured_on(Rig(seed=9), made(*NAMES))
    busy_s = rows["step_time_s"].sum()
    assert closure["waiting_j"] == pytest.approx(IDLE_W * (closure["step_time_s"] - busy_s), rel=0.01)
    assert f"takes about {closure['waiting_j'] / closure['step_j']:.1%} while no kernel runs" in closing(
        pd.DataFrame([closure])
    )


def test_a_step_measured_twice_counts_its_drift_as_error() -> None:
    capture = made("mm")
    rig = Rig()
    first, later = (blocks.block(Work(Costs(0.01, w), 1, ""), rig.meter, rig, 2.0, "step") for w in (400.0, 420.0))
    closure = tables("f", capture, None, [], [first, later], None)[1].iloc[0]
    assert closure["step_j"] == pytest.approx(4.1, rel=0.01)
    assert closure["error_j"] > 0.1


def test_the_deadline_is_kept_and_what_is_left_is_said() -> None:
    rig = Rig()
    capture = made(*NAMES)
    until_s = rig.clock.now() + 9.0  # the step takes 2.8 s, and so does each group
    rows, closure = measured_on(rig, capture, until_s)
    assert rig.clock.now() <= until_s
    left = rows[rows["method"] == "not replayed: the deadline was reached"]
    assert left.index.tolist() == ["aten::add"]
    assert closure["n_not_measured"] == 1
    assert closure["not_measured_time_frac"] == pytest.approx(300 / 7100)
    assert rows["step_j"].sum() + closure["remainder_j"] == closure["step_j"]


def test_slow_preparation_counts_for_the_deadline() -> None:
    rig = Rig()

    def slowly(op: Op, capture: Capture) -> Replay | Refused:
        rig.clock.sleep(3.0)
        return prepare(op, capture)

    until_s = rig.clock.now() + 14.0
    rows, _ = measured_on(rig, made(*NAMES), until_s, slowly)
    assert rig.clock.now() <= until_s
    assert rows["call_j"].notna().sum() == 1


def test_what_cannot_be_replayed_says_why_and_the_rest_is_measured() -> None:
    def one_less(op: Op, capture: Capture) -> Replay | Refused:
        if op.name == "aten::gelu":
            return Refused("it draws random numbers")
        if op.name == "aten::add":
            raise RuntimeError("CUDA out of memory. Tried to allocate\nmore")
        return prepare(op, capture)

    rig = Rig()
    rows, closure = measured_on(rig, made(*NAMES), how=one_less)
    assert rows.loc["aten::gelu", "method"] == "not replayed: it draws random numbers"
    assert rows.loc["aten::gelu", "call_time_s"] == pytest.approx(8e-4)
    assert rows.loc["aten::add", "method"].endswith("RuntimeError: CUDA out of memory. Tried to allocate")
    assert rows.loc["aten::mm", "call_j"] > 0
    assert closure["n_not_measured"] == 2
    assert rig.n_releases == 3


def test_notes_say_what_makes_a_replay_unlike_the_step() -> None:
    copies = Costs(2e-4, 460.0)
    both = Costs(1e-3, (PARTS["gelu"][1].call_j + copies.call_j) / 1e-3)

    def odd(op: Op, capture: Capture) -> Replay | Refused:
        if op.name == "aten::mm":
            return replay_of(PARTS["mm"][1], (op.index,), how="eager: it waits", is_cold=False)
        if op.name == "aten::gelu":
            return replay_of(both, (op.index,), restore=copies, restored_bytes=64)
        return prepare(op, capture)

    rows, _ = measured_on(Rig(), made(*NAMES), how=odd)
    assert rows.loc["aten::mm", "method"] == "replayed eagerly"
    assert rows.loc["aten::mm", "notes"].startswith("eager: it waits; inputs may lie in the cache: ")
    assert rows.loc["aten::gelu", "call_j"] == pytest.approx(PARTS["gelu"][1].call_j, rel=0.02)
    assert rows.loc["aten::gelu", "call_time_s"] == pytest.approx(8e-4)
    assert "copies of 64 bytes" in rows.loc["aten::gelu", "notes"]


def test_a_call_that_costs_no_more_than_its_copies_is_not_measured() -> None:
    copies = Costs(1e-3, 480.0)

    def equal(op: Op, capture: Capture) -> Replay | Refused:
        if op.name != "aten::gelu":
            return prepare(op, capture)
        return replay_of(Costs(1.2e-3, 300.0), (op.index,), restore=copies, restored_bytes=64)

    rows, closure = measured_on(Rig(), made(*NAMES), how=equal)
    assert np.isnan(rows.loc["aten::gelu", "call_j"])
    assert "no more than the copies" in rows.loc["aten::gelu", "notes"]
    assert closure["n_not_measured"] == 1


def test_a_meter_that_dies_is_not_taken_for_an_operator_that_fails() -> None:
    rig = Rig()

    def dead(_: object) -> None:
        raise DeviceError("absent", "the GPU is lost")

    rig.fails = dead
    capture = made("mm")
    with pytest.raises(DeviceError, match="the GPU is lost"):
        replayed(groups(capture, None), capture, rig.meter, rig, seconds=2.0, until_s=math.inf, prepare=prepare)


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["void at::native::gemm<float, 4>(int*)"], "at::native::gemm"),
        (["a", "a", "b"], "2 x a + b"),
        (["a", "b", "c", "d", "e", "f"], "a + b + c + d + 2 more"),
        ([], ""),
    ],
)
def test_short_names_of_kernels(names: list[str], short: str) -> None:
    assert short_kernels(names) == short


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ((), ""),
        ((Line("m.py", 7, "step", "x @ y"), Line("n.py", 1, "main", "step()")), "m.py:7 step"),
        ((Line("", 0, "backward of MmBackward0", ""),), "backward of MmBackward0"),
    ],
)
def test_lines_of_operators(lines: tuple[Line, ...], text: str) -> None:
    capture = made("mm")
    capture.ops = (replace(capture.ops[0], lines=lines), *capture.ops[1:])
    found = [Measured(group, "not replayed: times only") for group in groups(capture, None)]
    rig = Rig()
    step = blocks.block(Work(STEP, 1, ""), None, rig, 1.0, "step")
    assert tables("f", capture, None, found, [step], None)[0]["line"].iloc[0] == text
