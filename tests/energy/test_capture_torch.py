"""Captures of PyTorch against PyTorch itself: values, order, memory, lines, modules."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpubloat.energy.capture import Capture, capture, torchvalues
from gpubloat.errors import GpubloatError

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Any) -> Any:
        n, t, width = x.shape
        q, k, v = (
            part.view(n, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.ln_1(x)).split(width, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(n, t, width))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, words: int = 31, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(8, width)
        self.h = nn.ModuleList(Block(width, 2) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, ids: Any) -> Any:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return {"logits": F.linear(self.ln_f(x), self.wte.weight)}


@pytest.fixture
def gpt() -> Any:
    torch.manual_seed(0)
    return GPT()


IDS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]


def names(found: Capture) -> list[str]:
    return [op.name for op in found.ops]


def check_order(found: Capture) -> None:
    """Every value comes from an earlier operator or from outside, and from one only."""
    made = set(found.inputs)
    assert len(found.inputs) == len(made)
    for n, op in enumerate(found.ops):
        assert op.index == n
        assert set(op.inputs) <= made
        assert set(op.writes) <= set(op.inputs)
        assert not set(op.outputs) & made
        made.update(op.outputs)
    assert set(found.outputs) <= made == set(found.tensors)
    assert found.producer == {number: op.index for op in found.ops for number in op.outputs}


def nothing_left() -> bool:
    hooks = torch.nn.modules.module
    return (
        not hooks._global_forward_hooks
        and not hooks._global_forward_pre_hooks
        and torch._C._len_torch_dispatch_stack() == 0
    )


def test_values_of_a_model_are_its_own(gpt: Any) -> None:
    ids = torch.tensor(IDS)
    seen: dict[str, Any] = {}
    hook = gpt.h[1].mlp.register_forward_hook(lambda _, __, result: seen.update(mlp=result.detach().numpy()))
    real = gpt(ids)["logits"]
    hook.remove()
    with capture(gpt, ids) as found:
        check_order(found)
        assert np.array_equal(found.value(found.outputs[0]), real.detach().numpy())
        last = [op for op in found.ops if op.module == "h.1.mlp.2" and op.name == "aten::view.default"][-1]
        assert np.array_equal(found.value(last.outputs[0]), seen["mlp"])
        assert all(t.is_kept for t in found.tensors.values())
        assert not found.notes
        weights = {p.detach().numpy().tobytes() for p in gpt.parameters()}
        assert weights <= {found.value(number).tobytes() for number in found.inputs}
    assert nothing_left()


def test_counts_are_those_of_the_profiler(gpt: Any) -> None:
    ids = torch.tensor(IDS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gpt(ids)
    counted = Counter(event.name for event in profile.events())
    ours = Counter(name.rpartition(".")[0] for name in names(capture(gpt, ids)))
    leaves = ("addmm", "mm", "native_layer_norm", "gelu", "embedding", "add", "split", "arange")
    for name in (f"aten::{leaf}" for leaf in leaves):
        # ``arange`` calls itself with an output.
        assert ours[name] == counted[name] // (2 if name == "aten::arange" else 1) > 0, name


def test_lines_and_modules(gpt: Any) -> None:
    found = capture(lambda ids: gpt(ids), torch.tensor(IDS))
    (gelu, _) = [op for op in found.ops if op.name == "aten::gelu.default"]
    assert gelu.module == "h.0.mlp.1"
    assert gelu.lines[0].file.endswith("test_capture_torch.py")
    assert not gelu.lines[0].file.startswith("/")
    assert gelu.lines[0].code == "return x + self.mlp(self.ln_2(x))"
    assert [line.function for line in gelu.lines] == ["forward", "forward", "<lambda>"]
    source, first = inspect.getsourcelines(Block.forward)
    assert source[gelu.lines[0].line - first].strip() == gelu.lines[0].code
    assert gelu.arguments == f"%{gelu.inputs[0]}, approximate='tanh'"
    assert {op.name: op.module for op in found.ops}["aten::arange.default"] == ""


def test_functions_without_modules() -> None:
    a = torch.randn(3, 4)
    found = capture(lambda: torch.where(a > 0, a, a.exp()).sum())
    assert names(found) == ["aten::gt.Scalar", "aten::exp.default", "aten::where.self", "aten::sum.default"]
    assert {op.module for op in found.ops} == {""}
    assert found.ops[2].inputs == (found.ops[0].outputs[0], found.inputs[0], found.ops[1].outputs[0])
    assert found.tensors[found.ops[0].outputs[0]].dtype == "bool"


def test_a_write_makes_a_new_value() -> None:
    def fn(x: Any) -> Any:
        y = x * 2
        head, tail = y[0], y[1]
        head.add_(1)
        return y.sum(), tail + 0, head + 0

    x = torch.arange(6.0).reshape(2, 3)
    found = capture(fn, x)
    check_order(found)
    by_name = {op.name.split("::")[1].split(".")[0]: op for op in found.ops}
    twice, add, total = (by_name[name] for name in ("mul", "add_", "sum"))
    before, after = twice.outputs[0], total.inputs[0]
    assert before != after
    assert np.array_equal(found.value(before), x.numpy() * 2)
    assert found.value(after).tolist() == [[1, 3, 5], [6, 8, 10]]
    assert found.producer[after] == add.index
    assert found.tensors[before].storage == found.tensors[after].storage
    assert add.writes == (add.inputs[0],)
    assert not add.is_view
    views = [op for op in found.ops if op.is_view]
    assert {op.name for op in views} == {"aten::select.int"}
    untouched = views[1].outputs[0]
    assert untouched in found.ops[-2].inputs  # the row that was not written is the same value still
    assert add.outputs[0] in found.ops[-1].inputs


def test_an_alias_of_the_same_window_has_the_written_value() -> None:
    def fn(x: Any) -> Any:
        alias = x.view(x.shape)
        x.mul_(3)
        return alias.exp()

    found = capture(fn, torch.ones(2))
    check_order(found)
    assert found.ops[-1].inputs == found.ops[1].outputs


def test_operators_of_lists_and_of_outputs_given() -> None:
    def fn(x: Any) -> Any:
        parts = torch.unbind(x)
        torch._foreach_add_(list(parts), 1.0)  # returns None
        out = torch.empty(3)
        torch.add(parts[0], parts[1], out=out)
        return out

    found = capture(fn, torch.zeros(2, 3))
    check_order(found)
    unbind, each, _, add = found.ops
    assert unbind.is_view
    assert len(unbind.outputs) == 2
    assert each.writes == unbind.outputs == each.inputs
    assert len(each.outputs) == 2
    assert add.name == "aten::add.out"
    assert len(add.writes) == 1
    assert found.value(found.outputs[0]).tolist() == [2, 2, 2]


def test_running_means_are_written_though_no_signature_says_so() -> None:
    norm = nn.BatchNorm1d(3)
    found = capture(norm, torch.randn(4, 3))
    check_order(found)
    (op,) = [op for op in found.ops if "batch_norm" in op.name]
    new = [found.value(number) for number in op.outputs if found.tensors[number].shape == (3,)]
    assert any(np.array_equal(value, norm.running_mean.numpy()) for value in new)
    assert len(op.writes) == 2
    assert not [op for op in capture(norm.eval(), torch.randn(4, 3)).ops if op.writes]


SPECIAL = {
    "nan and infinities": lambda: torch.tensor([float("nan"), float("inf"), -0.0]),
    "empty": lambda: torch.zeros(0, 3),
    "scalar": lambda: torch.tensor(2.5),
    "complex": lambda: torch.tensor([1 + 2j, -3j]),
    "conjugate": lambda: torch.tensor([1 + 2j, -3j]).conj(),
    "bool": lambda: torch.tensor([True, False]),
    "bf16": lambda: torch.randn(5).to(torch.bfloat16),
    "fp8": lambda: torch.randn(5).to(torch.float8_e4m3fn),
    "fp8 e5m2": lambda: torch.randn(5).to(torch.float8_e5m2),
    "transposed": lambda: torch.randn(3, 4).t(),
    "every second": lambda: torch.randn(10)[1::2],
    "expanded": lambda: torch.randn(3, 1).expand(2, 3, 4),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "overlapping": lambda: torch.arange(6.0).unfold(0, 3, 1),
    "uint16": lambda: torch.tensor([1, 65535], dtype=torch.uint16),
}


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
def test_special_tensors(make: Any) -> None:
    x = make()
    found = capture(lambda: x.clone())
    number = found.ops[-1].inputs[0] if found.ops else found.outputs[0]
    wide = x.float() if x.dtype.itemsize < 4 and x.dtype.is_floating_point else x.resolve_conj()
    value = found.value(number)
    assert np.array_equal(value, wide.numpy(), equal_nan=value.dtype.kind in "fc")
    info = found.tensors[number]
    assert (info.shape, info.strides, info.offset) == (tuple(x.shape), x.stride(), x.storage_offset())
    assert info.n_bytes == x.numel() * x.element_size()
    assert np.array_equal(found.value(found.outputs[0]), value, equal_nan=value.dtype.kind in "fc")
    with pytest.raises(ValueError):
        value[...] = 0


def test_what_cannot_be_kept_is_said() -> None:
    sparse = torch.eye(3).to_sparse()
    found = capture(lambda: torch.sparse.mm(sparse, torch.ones(3, 2)))
    number = next(t.id for t in found.tensors.values() if not t.is_kept)
    assert found.value(number) is None
    assert found.tensors[number].strides is None
    assert any("sparse" in note for note in found.notes)
    assert found.value(found.outputs[0]).tolist() == [[1, 1]] * 3


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    dtype=st.sampled_from(["float32", "float64", "int8", "int64", "complex64", "bool"]),
    axes=st.randoms(use_true_random=False),
    step=st.integers(1, 2),
)
def test_any_layout(shape: list[int], dtype: str, axes: Any, step: int) -> None:
    order = list(range(len(shape)))
    axes.shuffle(order)
    x = torch.arange(int(np.prod(shape))).reshape(shape).to(getattr(torch, dtype)).permute(order)
    if shape:
        x = x[::step]
    found = capture(lambda: x.mul(1))
    assert np.array_equal(found.value(found.ops[0].inputs[0]), x.numpy())


@dataclasses.dataclass
class Output:
    logits: Any
    hidden: tuple[Any, ...]
    name: str = "no tensor"


def test_outputs_in_dataclasses_and_mappings() -> None:
    x = torch.ones(2)
    found = capture(lambda: Output(x + 1, (x + 2, {"deep": [x + 3]})))
    assert [found.value(number)[0] for number in found.outputs] == [2, 3, 4]
    assert capture(lambda: x).outputs == (0,)


def nothing() -> None:
    torch.ones(2).add_(1)


def generator() -> Any:
    yield torch.ones(2)


async def coroutine() -> Any:
    return torch.ones(2)


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (nothing, "returns no tensor"),
        (generator, "generators"),
        (coroutine, "coroutines"),
        (lambda: generator(), "generator"),
        (lambda: 3, "returns no tensor"),
        (3, "cannot be called"),
    ],
)
def test_what_cannot_be_captured(fn: Any, says: str) -> None:
    with pytest.raises(GpubloatError, match=says) as info:
        capture(fn)
    assert not info.value.message.endswith(".")
    assert nothing_left()


def test_a_workload_that_raises(gpt: Any) -> None:
    def fails() -> Any:
        gpt(torch.tensor(IDS))
        return torch.ones(2, 3) @ torch.ones(2, 3)

    with pytest.raises(
        GpubloatError, match=r"in aten::mm.default at \S*test_capture_torch.py:\d+: RuntimeError"
    ) as info:
        capture(fails)
    assert isinstance(info.value.__cause__, RuntimeError)
    assert nothing_left()

    def fails_later() -> Any:
        torch.ones(2).exp()
        raise KeyError("mine")

    with pytest.raises(GpubloatError, match="after aten::exp"):
        capture(fails_later)

    def interrupted() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(interrupted)
    assert nothing_left()


def test_a_failure_that_is_caught_is_not_blamed() -> None:
    def fn() -> Any:
        with contextlib.suppress(RuntimeError):
            torch.ones(2, 3) @ torch.ones(2, 3)
        torch.ones(1).exp()
        raise ValueError("other")

    with pytest.raises(GpubloatError, match="after aten::exp"):
        capture(fn)


def test_random_numbers_are_the_same_again() -> None:
    def fn() -> Any:
        return F.dropout(torch.ones(50), 0.5) + torch.randn(50) + float(np.random.rand())  # noqa: NPY002

    torch.manual_seed(7)
    state = torch.get_rng_state()
    first, second = capture(fn), capture(fn)
    assert np.array_equal(first.value(first.outputs[0]), second.value(second.outputs[0]))
    assert torch.equal(state, torch.get_rng_state())
    assert [(op.name, op.arguments) for op in first.ops] == [(op.name, op.arguments) for op in second.ops]


def test_backward_has_the_lines_of_its_forward(gpt: Any) -> None:
    def step() -> Any:
        loss = F.cross_entropy(gpt(torch.tensor(IDS))["logits"].flatten(0, 1), torch.tensor(IDS).flatten())
        loss.backward()
        return loss

    found = capture(step)
    check_order(found)
    gelu = [op for op in found.ops if op.name == "aten::gelu.default"]
    back = [op for op in found.ops if op.name == "aten::gelu_backward.default"]
    assert [op.module for op in back] == [op.module for op in reversed(gelu)]
    for op, forward in zip(back, reversed(gelu)):
        assert (op.lines[0].line, op.lines[1:]) == (forward.lines[0].line, forward.lines[1:])
        assert op.lines[0].function == "forward (backward of GeluBackward0)"
    grads = {p.grad.numpy().tobytes() for p in gpt.parameters()}
    values = {found.value(number).tobytes() for number in found.tensors}
    assert grads <= values
    assert all(op.lines for op in found.ops)


def test_an_optimizer_writes_in_place() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)

    def step() -> Any:
        optimizer.zero_grad()
        loss = (weight * torch.arange(3.0)).sum()
        loss.backward()
        optimizer.step()
        return loss, weight

    found = capture(step)
    check_order(found)
    assert found.value(found.outputs[1]).tolist() == weight.tolist() == [1, 0.5, 0]
    (writer,) = [found.ops[found.producer[found.outputs[1]]]]
    assert writer.writes
    assert writer.lines[0].code == "optimizer.step()"
    assert found.value(writer.writes[0]).tolist() == [1, 1, 1]
    assert not found.notes


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.pow(2)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad.sinh() * x


def test_a_backward_of_the_user_has_its_own_lines() -> None:
    x = torch.ones(2, requires_grad=True)

    def step() -> Any:
        Square.apply(x).sum().backward()
        return x.grad

    found = capture(step)
    (op,) = [op for op in found.ops if op.name == "aten::sinh.default"]
    assert [line.function for line in op.lines] == ["backward", "step"]


def test_recomputation_has_the_lines_of_the_forward() -> None:
    from torch.utils.checkpoint import checkpoint

    inner = nn.Linear(3, 3)

    def hidden(x: Any) -> Any:
        return inner(x).tanh()

    def step() -> Any:
        x = torch.ones(2, 3, requires_grad=True)
        checkpoint(hidden, x, use_reentrant=False).sum().backward()
        return x.grad

    found = capture(step)
    check_order(found)
    tanh = [op for op in found.ops if op.name == "aten::tanh.default"]
    assert len(tanh) == 2
    assert tanh[0].lines[0] == tanh[1].lines[0]
    assert found.store.same(tanh[0].outputs[0], tanh[1].outputs[0])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any, gpt: Any) -> None:
    ids = torch.tensor(IDS)
    with mode():
        found, real = capture(gpt, ids), gpt(ids)["logits"]
    check_order(found)
    assert np.array_equal(found.value(found.outputs[0]), real.numpy())
    inside = capture(mode()(lambda: gpt(ids)))
    assert names(inside) == names(found)


def test_functional_transforms() -> None:
    w = torch.randn(3, 3)

    def loss(w: Any, x: Any) -> Any:
        return (x @ w).tanh().sum()

    xs = torch.randn(4, 2, 3)
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    found = capture(per_sample, w, xs)
    check_order(found)
    assert np.array_equal(found.value(found.outputs[0]), per_sample(w, xs).numpy())
    assert "aten::tanh.default" in names(found)


def test_compiled_functions_are_captured_uncompiled() -> None:
    def fn(x: Any) -> Any:
        return x.sin().cos()

    found = capture(torch.compile(fn, fullgraph=True), torch.ones(2))
    assert names(found) == ["aten::sin.default", "aten::cos.default"]
    assert any("torch.compile" in note for note in found.notes)


def test_a_compiled_module_keeps_its_names(gpt: Any) -> None:
    found = capture(torch.compile(gpt), torch.tensor(IDS))
    assert "h.1.mlp.1" in {op.module for op in found.ops}
    assert any("torch.compile" in note for note in found.notes)


def test_fake_tensors_are_not_kept() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2))
    found = capture(lambda x: x.exp(), fake)
    assert not any(t.is_kept for t in found.tensors.values())
    assert found.notes


def test_other_threads_are_out_of_sight() -> None:
    def fn() -> Any:
        made = []
        thread = threading.Thread(target=lambda: made.append(torch.ones(2).exp()))
        thread.start()
        thread.join()
        return made[0]

    found = capture(fn)
    assert not found.ops
    assert found.inputs == found.outputs
    assert any("out of sight" in note for note in found.notes)
    assert np.allclose(found.value(found.outputs[0]), np.e)


def test_tensors_of_other_classes() -> None:
    class Plain(torch.Tensor):
        pass

    found = capture(lambda x: x.exp(), torch.ones(2).as_subclass(Plain))
    assert names(found) == ["aten::exp.default"]

    from torch.testing._internal.two_tensor import TwoTensor

    a, b = torch.ones(2), torch.zeros(2)
    found = capture(lambda x: x.exp(), TwoTensor(a, b))
    check_order(found)
    assert names(found) == ["aten::exp.default"] * 2
    assert [found.value(number)[1] for number in found.outputs] == pytest.approx([np.e, 1])
    assert any("by their parts" in note for note in found.notes)


def test_values_that_are_taken_beside_the_dispatcher() -> None:
    """``.data`` makes new objects for the same values, and gives objects other values."""
    x = torch.ones(2, requires_grad=True)

    def fn() -> Any:
        y = x.data.log()
        x.data = y
        return x.exp()

    found = capture(fn)
    check_order(found)
    assert found.inputs == (0,)
    assert found.value(0).tolist() == [1, 1]
    by_name = {op.name: op for op in found.ops}
    assert by_name["aten::exp.default"].inputs == by_name["aten::log.default"].outputs


def test_not_kept_over_the_limits(tmp_path: Any) -> None:
    found = capture(lambda x: x.exp().sum(), torch.arange(64.0), keep_bytes=256, spill_bytes=0, folder=tmp_path)
    assert [t.is_kept for t in found.tensors.values()] == [True, False, False]
    assert found.value(1) is None
    assert found.notes == ["2 tensors were not kept: the limits keep_bytes and spill_bytes are reached"]
    with capture(lambda x: x.exp().sum(), torch.arange(64.0), keep_bytes=256, folder=tmp_path) as spilled:
        assert np.array_equal(spilled.value(1), torch.arange(64.0).exp().numpy())
        assert len(list(tmp_path.glob("*/*"))) == 2
    assert not list(tmp_path.iterdir())


def test_a_failed_capture_leaves_no_file(tmp_path: Any) -> None:
    def fn() -> Any:
        torch.ones(100).exp()
        raise ValueError

    with pytest.raises(GpubloatError):
        capture(fn, keep_bytes=0, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_views_of_the_same_bytes_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    read = torchvalues.content_of
    monkeypatch.setattr(torchvalues, "content_of", lambda tensor: reads.append(tuple(tensor.shape)) or read(tensor))

    def fn(x: Any) -> Any:
        y = x.exp()
        rows, flat, bits = y.view(4, 6), y.view(-1), y.view(torch.int32)
        turned = rows.t()  # in another order
        before = flat.view(2, 12)
        y.add_(1)
        return rows.view(6, 4) + turned.reshape(6, 4), bits, before

    x = torch.arange(24.0).view(2, 3, 4)
    found = capture(fn, x)
    made = {op.name.split("::")[1].split(".")[0]: found.value(op.outputs[0]) for op in found.ops}
    exp = x.exp()
    assert reads.count((24,)) == reads.count((4, 6)) == 0
    assert np.array_equal(made["t"], exp.view(4, 6).t())
    values = [found.value(op.outputs[0]) for op in found.ops if "view" in op.name]
    assert [v.shape for v in values[:4]] == [(4, 6), (24,), (2, 3, 4), (2, 12)]
    assert np.array_equal(values[0], exp.view(4, 6))
    assert np.array_equal(values[2], exp.view(torch.int32))
    assert np.array_equal(values[4], exp.view(6, 4) + 1)  # after the write
