"""Operators made again from their recorded inputs. The oracle is the capture of PyTorch itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubloat.energy import replay
from gpubloat.energy.capture import Capture, Op, capture
from gpubloat.energy.region import Inputs, Region, outer_inputs
from gpubloat.energy.replay import Refused, Replay, replayable
from gpubloat.errors import GpubloatError

torch = pytest.importorskip("torch")
F = torch.nn.functional


class Clock:
    """Every reading is a fixed time after the one before, whatever the machine does."""

    def __init__(self, step_s: float = 0.01) -> None:
        self.now, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


def made(ops: Any, found: Capture, **options: Any) -> Any:
    return replayable(ops, found, **{"clock": Clock(), "target_s": 0.03, "cache_bytes": 1000} | options)


def named(found: Capture, name: str) -> Op:
    (op,) = [op for op in found.ops if op.name.startswith(f"aten::{name}.")]
    return op


def reason(fn: Any, name: str, **options: Any) -> str:
    found = capture(fn, **options)
    refused = made(named(found, name), found)
    assert isinstance(refused, Refused)
    assert not refused
    return refused.reason


def test_every_operator_of_a_training_step() -> None:
    from tests.energy.test_capture_torch import GPT, IDS

    torch.manual_seed(0)
    gpt = GPT(layers=1)
    optimizer = torch.optim.SGD(gpt.parameters(), lr=0.1, momentum=0.9)
    ids = torch.tensor(IDS)

    def step() -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(gpt(ids)["logits"].flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        return loss

    step()
    found = capture(step)
    for op in found.ops:
        result = made(op, found)
        if op.is_view:
            assert result == Refused("views and allocations run no kernel")
        else:
            assert isinstance(result, Replay), (op, result)
            assert result.worst_error == 0
            assert bool(result.restore) == bool(op.writes)
            result.run()
    # Forward and backward as one region, with all views in it.
    until = next(op.index for op in found.ops if op.writes)
    region = made(found.ops[:until], found)
    assert isinstance(region, Replay)
    assert region.worst_error == 0
    assert region.ops == tuple(range(until))


def test_inputs_are_laid_out_as_they_were() -> None:
    base = torch.arange(400.0)
    a, b = base[129:].as_strided((5, 6), (7, 1)), base[140:].as_strided((6, 5), (1, 7))
    c = torch.randn(3, 1).expand(3, 6)
    found = capture(lambda: torch.addmm(c[:, :3].t()[:1, :1], a, b) + c[0, 0])
    op = named(found, "addmm")
    given_ = Inputs(found, outer_inputs([op]))
    one, two = given_.fresh(), given_.fresh()
    for number in op.inputs:
        info, tensor = found.tensors[number], one.tensors[number]
        assert np.array_equal(tensor.numpy(), found.value(number))
        assert tensor.stride() == info.strides
        assert tensor.storage_offset() * 4 % 512 == info.offset * 4 % 512
    x, y = (one.tensors[number] for number in op.inputs[1:])
    assert (y.data_ptr() - x.data_ptr()) == 4 * 11  # they overlap as they did
    x.fill_(-1)
    assert (y == -1).any()
    assert not (two.tensors[op.inputs[2]] == -1).any()


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=3), st.booleans(), st.sampled_from(["float32", "int16", "bool"])
)
def test_any_shape_is_replayed(shape: list[int], is_turned: bool, dtype: str) -> None:
    x = torch.arange(int(np.prod(shape))).reshape(shape).to(getattr(torch, dtype))
    if is_turned:
        x = x.permute(*reversed(range(x.dim())))
    found = capture(lambda: torch.logical_not(x))
    result = made(found.ops[0], found)
    assert isinstance(result, Replay)
    assert result.worst_error == 0


def test_sets_exceed_twice_the_cache() -> None:
    found = capture(lambda x: x.exp(), torch.ones(64))  # 256 bytes
    result = made(found.ops[0], found, target_s=1.0, cache_bytes=1000)
    assert (result.set_bytes, result.n_sets, result.is_cold) == (256, 8, True)
    assert result.n_sets * result.set_bytes > 2 * 1000
    assert result.calls % result.n_sets == 0
    # One call takes 10 ms of this clock: a run of 30 ms has three, and needs no more sets.
    short = made(found.ops[0], found, target_s=0.03, cache_bytes=1000)
    assert (short.calls, short.n_sets, short.is_cold) == (3, 3, False)
    assert made(found.ops[0], found, cache_bytes=None).n_sets == 1  # a CPU


def test_sets_are_used_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    found = capture(lambda x: x.exp(), torch.ones(64))
    used: list[int] = []
    real = Region.bound

    def bound(self: Region, given: Any) -> Any:
        call = real(self, given)
        (tensor,) = given.tensors.values()
        return lambda: (used.append(tensor.data_ptr()), call())

    monkeypatch.setattr(Region, "bound", bound)
    result = made(found.ops[0], found)
    used.clear()
    result.run()
    assert len(used) == result.calls == 3
    assert len(set(used)) == result.n_sets == 3


@pytest.mark.parametrize(
    ("fn", "name", "is_restored"),
    [
        (lambda x: x.add_(1), "add_", True),
        (lambda x: x.relu_(), "relu_", True),  # the second call would find no negative numbers
        (lambda x: x.zero_(), "zero_", False),
        (lambda x: x.copy_(torch.ones(3)), "copy_", False),
        (lambda x: x.index_put_((torch.tensor([1]),), torch.tensor([5.0])), "index_put_", False),
        (lambda x: torch.exp(torch.ones(3), out=x), "exp", False),
    ],
)
def test_written_inputs_are_restored_where_it_matters(fn: Any, name: str, is_restored: bool) -> None:
    found = capture(fn, torch.tensor([-1.0, 2.0, -3.0]))
    result = made(named(found, name), found)
    assert isinstance(result, Replay)
    assert (result.restore is not None) == is_restored
    assert (result.restored_bytes > 0) == is_restored
    result.run()


def test_every_call_of_a_run_finds_the_recorded_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = capture(lambda x: x.add_(1), torch.tensor([-1.0, 2.0, -3.0]))
    met: list[list[float]] = []
    real = Region.bound

    def bound(self: Region, given: Any) -> Any:
        call = real(self, given)
        return lambda: (met.append(given.tensors[0].tolist()), call())

    monkeypatch.setattr(Region, "bound", bound)
    result = made(named(found, "add_"), found, cache_bytes=4)
    met.clear()
    result.run()
    result.run()
    assert met == [[-1, 2, -3]] * 2 * result.calls


def test_indices_that_are_written_are_never_spoiled() -> None:
    def fn(n: Any) -> Any:
        n.add_(1)
        return torch.arange(10.0)[n]

    found = capture(fn, torch.tensor([1, 2]))
    result = made([op for op in found.ops if op.name != "aten::arange.default"], found)
    assert isinstance(result, Replay)
    assert result.restore is not None


@pytest.mark.parametrize(
    ("fn", "name", "says"),
    [
        (lambda: (torch.ones(3), torch.ones(3).sum().item())[0], "_local_scalar_dense", "waits for the host"),
        (lambda: torch.ones(3).nonzero(), "nonzero", "waits for the host"),
        (lambda: torch.ones(3).unique(), "_unique2", "waits for the host"),
        (lambda: torch.ones(3).masked_select(torch.ones(3) > 0), "masked_select", "waits for the host"),
        (lambda: torch.ones(3)[torch.ones(3) > 0], "index", "waits for the host"),
        (lambda: torch.randn(3), "randn", "random"),
        (lambda: F.dropout(torch.ones(3), 0.5), "bernoulli_", "random"),
        (lambda: torch.ones(2, 3).t(), "t", "views"),
        (lambda: torch.empty(3), "empty", "allocations"),
        (lambda: torch.sparse.mm(torch.eye(3).to_sparse(), torch.ones(3, 2)), "_sparse_addmm", "not kept"),
    ],
)
def test_reasons(fn: Any, name: str, says: str) -> None:
    assert says in reason(fn, name)


def test_indices_that_are_numbers_wait_for_nobody() -> None:
    found = capture(lambda: torch.arange(5.0)[torch.tensor([1, 3])])
    assert made(named(found, "index"), found)


def test_what_was_not_kept_is_not_replayed() -> None:
    x = torch.ones(64)
    assert reason(lambda: x.exp(), "exp", keep_bytes=0, spill_bytes=0) == "input %0 was not kept"
    assert "cannot be checked" in reason(lambda: x.exp(), "exp", keep_bytes=256, spill_bytes=0)


def test_a_replay_that_gives_something_else_is_refused() -> None:
    """As with another kernel chosen, or an input that changed behind PyTorch's back."""
    found = capture(lambda x: x.exp(), torch.ones(4))
    changed = np.ones(4, np.float32)
    changed[2] = 1.5
    found.store.put(0, changed, "fp32")
    assert "not the recorded one: relative error 0.3" in made(found.ops[0], found).reason
    changed[2] = np.nan
    found.store.put(0, changed, "fp32")
    assert "relative error inf" in made(found.ops[0], found).reason


def test_memory_that_holds_two_values_in_turn() -> None:
    def fn(x: Any) -> Any:
        y = x + 0
        a = y.exp()
        y.add_(1)
        return a + y.log()

    found = capture(fn, torch.ones(4))
    exp, log, add = named(found, "exp"), named(found, "log"), found.ops[-1]
    assert "two values in turn" in made([exp, log, add], found).reason
    region = made(found.ops, found)
    assert isinstance(region, Replay)
    assert region.restore is None  # it writes what it made itself


def test_memory_seen_through_another_view_is_refused() -> None:
    def fn(x: Any) -> Any:
        row = x[0]
        row.add_(1)
        return x.exp()

    found = capture(fn, torch.ones(2, 3))
    assert "through another view" in made(found.ops, found).reason


def test_a_graph_is_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[Any] = []

    def fake(body: Any, device: Any) -> Any:
        assert device.type == "cpu"
        bodies.append(body)
        return lambda: body()

    monkeypatch.setattr(replay, "graphed", fake)
    found = capture(lambda x: x.add_(1), torch.ones(4))
    result = made(found.ops[0], found)
    assert result.how == "CUDA graph"
    assert len(bodies) == 2  # the calls, and the copies alone
    result.run()
    result.restore()


def test_without_a_graph_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = capture(lambda x: x.exp(), torch.ones(4))
    assert made(found.ops[0], found).how == "eager: the tensors are on the CPU"

    def fails(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(replay, "graphed", fails)
    assert made(found.ops[0], found).how == "eager: operation not permitted when stream is capturing"
    monkeypatch.undo()
    with pytest.raises(GpubloatError, match="on the CPU"):
        replay.graphed(lambda: None, torch.device("cpu"))


def test_an_operator_of_a_library_that_is_not_there() -> None:
    from dataclasses import replace as changed

    found = capture(lambda x: x.exp(), torch.ones(4))
    found.calls = (changed(found.calls[0], target="mine::fused.default"),)
    assert made(found.ops[0], found).reason == "mine::fused.default is not loaded"


def test_another_framework_and_nothing() -> None:
    found = capture(lambda x: x.exp(), torch.ones(4))
    assert made([], found).reason == "there is no operator"
    found.framework = "jax"
    assert "not for jax" in made(found.ops[0], found).reason


def test_small_types_and_complex_numbers() -> None:
    for x in (
        torch.randn(9).to(torch.bfloat16), torch.randn(9, dtype=torch.complex64), torch.randn(9).to(torch.float8_e5m2)
    ):  # fmt: skip
        found = capture(lambda x: x.clone(), x)
        result = made(found.ops[0], found)
        assert isinstance(result, Replay), result
        assert result.worst_error == 0
