"""Rules of causes on other programs than the campaign's: other names, shapes and directions, and what is no cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubloat.energy.capture.records import UNCOMPILED, Capture, TensorInfo
from gpubloat.energy.causes import Cause, causes, names
from gpubloat.energy.causes.formats import axes_order
from gpubloat.energy.causes.sides import in_bytes
from gpubloat.energy.timing import Kernel

from . import causes_cases as cases
from .captures import Program

RNG = np.random.default_rng(5)


def noise(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def on_gpu(capture: Capture, *host: int) -> Capture:
    """The same with its tensors on a GPU, but for some."""
    for number, info in capture.tensors.items():
        capture.tensors[number] = replace(info, device="cpu" if number in host else "cuda:0")
    return capture


def compared(slow: Callable[..., Any], fast: Callable[..., Any], *args: Any) -> Cause:
    """The cause of two functions of PyTorch, without timings."""
    pytest.importorskip("torch")
    from gpubloat.energy.capture import torchops

    with torchops.capture(slow, *args) as a, torchops.capture(fast, *args) as b:
        return causes(a, b, None, slow="a")


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


# Extra copies


def test_copy_by_index_is_a_copy(torch: Any) -> None:
    def slow(x: Any) -> Any:
        order = torch.arange(x.shape[0])
        return torch.tanh(x.index_select(0, order))

    found = compared(slow, lambda x: torch.tanh(x), torch.randn(40, 17))
    assert found.kind == "extra copy"
    assert "index_select" in found.evidence
    assert "index_select" in found.a_line.code


def test_parts_that_are_joined_and_parted_again(torch: Any) -> None:
    def slow(x: Any, y: Any) -> Any:
        joined = torch.stack([x, y])
        return joined[0].sum(), joined[1].sum()

    assert compared(slow, lambda x, y: (x.sum(), y.sum()), torch.randn(33, 9), torch.randn(33, 9)).kind == "extra copy"


def test_rows_written_out_for_broadcasting(torch: Any) -> None:
    found = compared(lambda x, b: x + b.repeat(64, 1), lambda x, b: x + b, torch.randn(64, 31), torch.randn(31))
    assert found.kind == "extra copy"
    assert "64 times" in found.evidence
    assert "broadcasting" in found.remedy


def test_copy_on_both_sides_is_no_excess(torch: Any) -> None:
    """Both write the product in another order; only one of them by an operator called clone."""
    x, w = torch.randn(24, 16), torch.randn(16, 20)

    def fast(x: Any, w: Any) -> Any:
        out = torch.empty(20, 24)
        out.copy_((x @ w).t())
        return out

    found = compared(lambda x, w: torch.mm(x, w).t().contiguous(), fast, x, w)
    assert "extra copy" not in [found.kind, *(c.kind for c in found.also if c.side == "a")]


def test_line_of_the_copy_that_is_in_excess(torch: Any) -> None:
    """Of two copies of one size, the one that the other side makes too is not shown, whichever comes first."""

    def slow(x: Any, w: Any) -> Any:
        y = torch.tanh(x.t().contiguous())  # in excess
        return (y @ w).t().contiguous()

    def fast(x: Any, w: Any) -> Any:
        y = torch.tanh(x.t())
        return (y @ w).t().contiguous()

    def late(x: Any, w: Any) -> Any:
        y = torch.tanh(x.t().contiguous())
        return (y @ w).t()

    args = torch.randn(32, 32), torch.randn(32, 32)
    found = compared(slow, fast, *args)
    assert found.kind == "extra copy"
    assert "in excess" in found.a_line.code
    assert "torch.tanh(x.t())" in found.b_line.code
    found = compared(slow, late, *args)
    assert found.kind == "extra copy"
    assert "(y @ w).t().contiguous()" in found.a_line.code


def test_copy_that_saves_a_value_is_needed(torch: Any) -> None:
    def slow(x: Any) -> Any:
        y = x * 2
        before = y.clone()
        y.mul_(3)
        return y + before

    found = compared(slow, lambda x: x * 6 + x * 2, torch.randn(30, 30))
    assert "extra copy" not in [found.kind, *(c.kind for c in found.also)]


def test_arithmetic_that_changes_nothing_here_is_no_copy(torch: Any) -> None:
    found = compared(lambda x: torch.relu(x).sum(), lambda x: x.sum(), torch.rand(30, 30) + 1)
    assert found.kind != "extra copy"


def test_copy_on_the_fast_side_is_not_the_cause(torch: Any) -> None:
    """What repairs the layout is a copy; the cost is the other side's stride."""
    x = torch.randn(64, 48).t()
    found = compared(lambda x: x.softmax(1), lambda x: x.contiguous().softmax(1), x)
    assert found.kind == "layout"
    assert found.also[-1].side == "b"


# Host


def test_item_makes_the_host_wait(torch: Any) -> None:
    from gpubloat.energy.capture import torchops

    x = torch.rand(50, 4)
    a, b = torchops.capture(lambda x: x / x.max().item(), x), torchops.capture(lambda x: x / x.max(), x)
    found = causes(on_gpu(a), on_gpu(b), None)
    assert found.kind == "host fallback"
    assert "local_scalar_dense" in found.evidence
    # The same on the CPU alone makes no GPU wait.
    cpu = torchops.capture(lambda x: x / x.max().item(), x), torchops.capture(lambda x: x / x.max(), x)
    assert causes(*cpu, None).kind != "host fallback"


def test_way_over_the_host() -> None:
    slow = Program()
    x = slow.input(noise(32, 32))
    down = slow.op("aten::_to_copy.default", np.array, x)
    sorted_ = slow.op("aten::sort.stable", np.sort, down)
    up = slow.op("aten::_to_copy.default", np.array, sorted_)
    fast = Program()
    y = fast.op("aten::sort.stable", np.sort, fast.input(slow.arrays[x]))
    found = causes(on_gpu(slow.finish(up), down, sorted_), on_gpu(fast.finish(y)), None)
    assert found.kind == "host fallback"
    assert "sort" in found.evidence
    moved = Program()
    z = moved.input(slow.arrays[x])
    low = moved.op("aten::_to_copy.default", np.array, z)
    high = moved.op("aten::_to_copy.default", np.array, low)
    out = moved.op("aten::sort.stable", np.sort, high)
    found = causes(on_gpu(moved.finish(out), low), on_gpu(fast.finish(y)), None)
    assert (found.kind, "carried tensors" in found.evidence) == ("host fallback", True)


def test_constant_of_a_compiled_program_is_read_by_the_gpu() -> None:
    """As JAX has them: what slices it gives a tensor of the GPU."""
    slow = Program()
    x = slow.input(noise(32, 32))
    table = slow.input(noise(4))
    entry = slow.op("jax::slice", lambda t: t[:1], table)
    out = slow.op("jax::mul", np.multiply, x, entry)
    fast = Program()
    y = fast.op("jax::mul", np.multiply, fast.input(slow.arrays[x]), fast.input(slow.arrays[entry]))
    found = causes(on_gpu(slow.finish(out), table), on_gpu(fast.finish(y)), None, host=(0.002, 0.001))
    assert "host fallback" not in [found.kind, *(cause.kind for cause in found.also)]


def test_a_region_of_views_alone_makes_no_host_wait(torch: Any) -> None:
    from gpubloat.energy.capture import torchops

    x = torch.randn(8, 8)
    with torchops.capture(lambda x: x.t(), x) as a, torchops.capture(lambda x: x[:], x) as b:
        assert causes(a, b, None, host=(0.002, 0.001)).kind == "unknown"


def test_mask_that_needs_its_count(torch: Any) -> None:
    from gpubloat.energy.capture import torchops

    x = torch.randn(60)
    a = torchops.capture(lambda x: x[x > 0].sum(), x)
    b = torchops.capture(lambda x: torch.where(x > 0, x, 0).sum(), x)
    assert causes(on_gpu(a), on_gpu(b), None).kind == "host fallback"


# Chains


def test_layer_norm_by_hand(torch: Any) -> None:
    def slow(x: Any, w: Any, b: Any) -> Any:
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5) * w + b

    def fast(x: Any, w: Any, b: Any) -> Any:
        return torch.nn.functional.layer_norm(x, w.shape, w, b)

    found = compared(slow, fast, torch.randn(20, 64), torch.randn(64), torch.randn(64))
    assert found.kind == "unfused chain"
    assert "native_layer_norm" in found.remedy


def test_attention_by_hand(torch: Any) -> None:
    def slow(q: Any, k: Any, v: Any) -> Any:
        scores = torch.bmm(q, k.transpose(1, 2)) * 8**-0.5
        return torch.bmm(torch.softmax(scores, -1), v)

    def fast(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]

    found = compared(slow, fast, *(torch.randn(4, 32, 8) for _ in range(3)))
    assert found.kind == "unfused chain"


def test_chain_in_a_larger_function(torch: Any) -> None:
    """What both sides do is not part of it."""

    def slow(x: Any, w: Any) -> Any:
        gate, up = (x @ w).chunk(2, -1)
        return (gate * (1 / (1 + torch.exp(-gate))) * up) @ w.t()[:32]

    def fast(x: Any, w: Any) -> Any:
        gate, up = (x @ w).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up) @ w.t()[:32]

    found = compared(slow, fast, torch.randn(16, 64), torch.randn(64, 64))
    assert found.kind == "unfused chain"
    assert "torch.exp(-gate)" in found.a_line.code
    assert "silu" in found.b_line.code


def test_chain_in_every_block(torch: Any) -> None:
    def model(activation: Callable[[Any], Any]) -> Callable[..., Any]:
        def forward(x: Any, w: Any) -> Any:
            for _ in range(4):
                x = activation(x @ w)
            return x

        return forward

    def spelled(x: Any) -> Any:
        return x * torch.tanh(torch.log(1 + torch.exp(x)))

    found = compared(model(spelled), model(torch.nn.functional.mish), torch.randn(16, 32), torch.randn(32, 32) / 6)
    assert found.kind == "unfused chain"
    assert "20 operators of A" in found.evidence
    assert "16 intermediate" in found.evidence
    assert "aten::mish.default x 4" in found.evidence


def test_intermediates_that_others_read_are_no_chain(torch: Any) -> None:
    def slow(x: Any) -> Any:
        y = torch.sin(x)
        return y, torch.cos(y)

    found = compared(slow, lambda x: (torch.sin(x), torch.cos(torch.sin(x))), torch.randn(50, 20))
    assert found.kind != "unfused chain"


def test_one_operator_more_is_no_chain(torch: Any) -> None:
    found = compared(lambda x: torch.exp(x) - 1, lambda x: torch.expm1(x), torch.randn(50, 20))
    assert found.kind == "kernel choice"


# Layout


def test_reduction_along_the_wrong_axis(torch: Any) -> None:
    x = torch.randn(40, 24)
    found = compared(lambda x, _: x.sum(0), lambda _, t: t.sum(1), x, x.t().contiguous())
    assert found.kind == "layout"
    assert "(40, 24)" in found.evidence


def test_convolution_that_transforms_inside() -> None:
    """The same operator on the same strides, with kernels around it that only change the layout."""

    def convolution(x: np.ndarray[Any, Any], w: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return x * w.sum()

    captures = []
    x, w = noise(2, 3, 8, 8), noise(3, 3, 1, 1)
    for _ in range(2):
        program = Program()
        captures.append(
            program.finish(program.op("aten::convolution.default", convolution, program.input(x), program.input(w)))
        )
    a, b = captures
    main = "sm90_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x32_cudnn"
    slow = cases.timing(
        a, {0: [(cases.TO_NHWC, 60.0), (main, 200.0), (cases.TO_NHWC.replace("nchwToNhwc", "nhwcToNchw"), 50.0)]}
    )
    found = causes(a, b, None, slow, cases.timing(b, {0: [(main, 200.0)]}))
    assert found.kind == "layout"
    assert "nchwToNhwcKernel" in found.evidence
    others = causes(
        a,
        b,
        None,
        cases.timing(a, {0: [("implicit_convolve_sgemm", 900.0)]}),
        cases.timing(b, {0: [("cudnn::winograd_nonfused::winogradForwardData4x4", 200.0)]}),
    )
    assert others.kind in ("kernel choice", "precision")
    assert others.switch is not None


def test_rows_of_a_larger_tensor_lie_well_enough(torch: Any) -> None:
    wide = torch.randn(32, 128)
    found = compared(lambda x, _: torch.exp(x), lambda _, y: torch.exp(y), wide[:, :64], wide[:, :64].contiguous())
    assert "layout" not in [found.kind, *(c.kind for c in found.also)]


@given(st.permutations([2, 3, 5]), st.permutations([0, 1, 2]), st.booleans())
def test_axes_order_against_numpy(shape: list[int], order: list[int], has_ones: bool) -> None:
    array = np.zeros(shape, np.int32).transpose(order)
    if has_ones:
        array = array[:, None]
    strides = tuple(s // array.itemsize for s in array.strides)
    info = TensorInfo(0, array.shape, strides, "int32", "cpu", 0, 0, array.nbytes, is_kept=False)
    assert (axes_order(info) == ()) == array.flags.c_contiguous


# Precision


def test_product_in_a_wider_type(torch: Any) -> None:
    x, w = torch.randn(32, 48, dtype=torch.bfloat16), torch.randn(48, 40, dtype=torch.bfloat16)
    found = compared(lambda x, w: (x.float() @ w.float()).bfloat16(), lambda x, w: x @ w, x, w)
    assert found.kind == "precision"
    assert "fp32 in A and in bf16 in B" in found.evidence


def test_light_operators_in_a_wider_type(torch: Any) -> None:
    x = torch.rand(64, 64)
    found = compared(lambda x, _: torch.exp(x) * x, lambda _, y: torch.exp(y) * y, x.double(), x)
    assert (found.kind, found.side) == ("precision", "a")
    assert found.evidence == "aten::exp.default, aten::mul.Tensor computed in fp64 in A and in fp32 in B"
    assert "in the type that B uses, if the accuracy is enough" in found.remedy


def test_casts_there_and_back(torch: Any) -> None:
    found = compared(lambda x: torch.tanh(x.double().float()), lambda x: torch.tanh(x), torch.randn(64, 64))
    assert found.kind == "precision"
    assert "x.double().float()" in found.a_line.code


@pytest.mark.parametrize(("relative", "kind"), [(3e-4, "precision"), (1e-7, "unknown"), (0.3, "unknown")])
def test_results_as_far_apart_as_tf32(relative: float, kind: str) -> None:
    x, w, off = noise(32, 32), noise(32, 32), noise(32, 32)
    captures = []
    for error in (0.0, relative):
        program = Program()
        product = x @ w
        made = product + error * off * np.linalg.norm(product) / np.linalg.norm(off)
        function = lambda *_, made=made: made.astype(np.float32)  # noqa: E731
        captures.append(program.finish(program.op("aten::mm.default", function, program.input(x), program.input(w))))
    assert causes(*captures, None).kind == kind


def test_recorded_settings() -> None:
    """Where a capture says under which settings an operator ran."""

    class Flagged:
        def __init__(self, op: Any, flags: str) -> None:
            self.__dict__.update({f: getattr(op, f) for f in op.__dataclass_fields__}, flags=flags)

    captures = []
    for flags in ("matmul.allow_tf32=False, cudnn.benchmark=False", "matmul.allow_tf32=True, cudnn.benchmark=False"):
        program = Program()
        x = program.input(np.ones((8, 8), np.float32))
        capture = program.finish(program.op("aten::mm.default", np.matmul, x, x))
        capture.ops = tuple(Flagged(op, flags) for op in capture.ops)  # type: ignore[assignment,misc]
        captures.append(capture)
    found = causes(*captures, None)
    assert (found.kind, found.side) == ("precision", "a")
    assert "matmul.allow_tf32" in found.evidence


# Redundant rows


def test_all_rows_before_some_are_taken(torch: Any) -> None:
    def slow(x: Any) -> Any:
        return torch.softmax(x, -1)[8:12]

    found = compared(slow, lambda x: torch.softmax(x[8:12], -1), torch.randn(64, 50))
    assert found.kind == "redundant rows"
    assert "16 times" in found.evidence


def test_padded_batch() -> None:
    x, w = noise(5, 16), noise(16, 16)
    slow = Program()
    padded = slow.op("aten::constant_pad_nd.default", lambda v: np.pad(v, ((0, 11), (0, 0))), slow.input(x))
    all_rows = slow.op("aten::mm.default", np.matmul, padded, slow.input(w))
    a = slow.finish(slow.view("aten::slice.Tensor", lambda v: v[:5], all_rows))
    fast = Program()
    b = fast.finish(fast.op("aten::mm.default", np.matmul, fast.input(x), fast.input(w)))
    assert causes(a, b, None).kind == "redundant rows"


def test_rows_by_shape_where_values_were_not_kept() -> None:
    x, w = noise(64, 16), noise(16, 24)
    slow = Program()
    all_rows = slow.op("aten::mm.default", np.matmul, slow.input(x), slow.input(w))
    a = slow.finish(slow.view("aten::slice.Tensor", lambda v: v[-2:], all_rows), without=[all_rows])
    fast = Program()
    b = fast.finish(fast.op("aten::mm.default", np.matmul, fast.input(x[-2:]), fast.input(w)))
    assert causes(a, b, None).kind == "redundant rows"


def test_branch_that_is_never_taken(torch: Any) -> None:
    def slow(x: Any, w: Any) -> Any:
        return torch.where(torch.isfinite(x), torch.tanh(x), (x @ w) @ w)

    found = compared(slow, lambda x, _: torch.tanh(x), torch.randn(512, 512), torch.randn(512, 512))
    assert found.kind == "redundant rows"
    assert "takes none" in found.evidence
    assert "torch.where" in found.a_line.code


def test_branch_that_is_taken_in_part_is_work(torch: Any) -> None:
    def slow(x: Any, w: Any) -> Any:
        return torch.where(x > 0, torch.tanh(x), (x @ w) @ w)

    found = compared(slow, slow, torch.randn(32, 32), torch.randn(32, 32))
    assert found.kind == "unknown"


def test_values_of_choices_are_read_once_for_all_regions(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of many layers has many regions, and values of gigabytes."""
    from gpubloat.energy.capture import torchops
    from gpubloat.energy.match.regions import Region

    def slow(x: Any, w: Any) -> Any:
        for _ in range(4):
            x = torch.where(x > 0, torch.tanh(x), (x @ w) @ w)
        return x

    x, w = torch.randn(32, 32), torch.randn(32, 32)
    with torchops.capture(slow, x, w) as a, torchops.capture(torch.tanh, x) as b:
        read: Counter[int] = Counter()
        value = a.store.value
        monkeypatch.setattr(a.store, "value", lambda tensor: read.update([tensor]) or value(tensor))
        products = [op for op in a.ops if op.name == "aten::mm.default"]
        for op in products:
            causes(a, b, Region((op.index,), (0,), op.inputs, op.outputs, b.inputs, b.outputs, False))
        chosen = [op.outputs[0] for op in a.ops if op.name == "aten::where.self"]
        assert len(products) == 8
        assert [read[tensor] for tensor in chosen] == [1] * 4


def test_kernels_are_told_of_the_side_that_was_timed() -> None:
    """Of JAX none is seen: that is not "no kernel"."""
    captures = []
    for name in ("aten::mm.default", "jax::dot_general"):
        program = Program(dtype="bf16")
        x = program.input(noise(16, 16))
        captures.append(program.finish(program.op(name, np.matmul, x, x)))
    captures[1].framework = "jax"
    found = causes(*captures, None, cases.timing(captures[0], {0: [(cases.BF16_GEMM, 20.0)]}, wall_us=30.0), None)
    assert found.kind == "kernel choice"
    assert "(20 us) in A; equations as traced" in found.evidence
    assert "no kernel" not in found.evidence


def test_gradients_are_used(torch: Any) -> None:
    """A step returns its loss alone, and its gradients matter all the same."""
    w = torch.randn(32, 32, requires_grad=True)

    def step(x: Any) -> Any:
        loss = torch.tanh(x @ w).sum()
        loss.backward()
        return loss

    found = compared(step, lambda x: torch.tanh(x @ w).sum(), torch.randn(16, 32))
    assert "redundant rows" not in [found.kind, *(c.kind for c in found.also)]


# Kernels, inputs, and nothing at all


def test_same_product_by_another_kernel() -> None:
    captures = []
    for _ in range(2):
        program = Program(dtype="bf16")
        x = program.input(np.ones((16, 16), np.float32))
        captures.append(program.finish(program.op("aten::mm.default", np.matmul, x, x)))
    slow = cases.timing(captures[0], {0: [("sm80_xmma_gemm_bf16bf16_bf16f32_f32_nn_n_tilesize64x64x64_splitK", 90.0)]})
    fast = cases.timing(captures[1], {0: [(cases.BF16_GEMM, 40.0)]})
    found = causes(*captures, None, slow, fast)
    assert found.kind == "kernel choice"
    assert "90 us" in found.evidence
    assert found.switch is None or "tf32" not in found.switch.name  # not of bf16


@pytest.mark.parametrize(("slow", "said"), [("jax", "does in JAX what aten::mm.default"), ("torch", "does in PyTorch")])
def test_operators_of_another_framework_are_not_to_be_called(slow: str, said: str) -> None:
    captures = {}
    for framework in ("torch", "jax"):
        program = Program(framework)
        x = program.input(noise(16, 16))
        name = "aten::mm.default" if framework == "torch" else "jax::dot_general"
        captures[framework] = program.finish(program.op(name, np.matmul, x, x))
    found = causes(captures.pop(slow), *captures.values(), None, slow="a")
    assert found.kind == "kernel choice"
    assert said in found.remedy


FUSED = "triton_poi_fused_add_tanh_0"


@pytest.mark.parametrize(
    ("kernels", "compiled", "kind", "told"),
    [
        pytest.param(
            {0: [("align1_gemm", 90.0)], 1: [("vectorized_add", 4.0)], 2: [("vectorized_tanh", 4.0)]},
            [(cases.BF16_GEMM, 30.0), (FUSED, 5.0)],
            "kernel choice", f"aten::mm.default with align1_gemm (90 us); B has 1 others instead (30 us), the longest "
            f"{names.short(cases.BF16_GEMM)}", id="library",
        ),
        pytest.param(
            {0: [(cases.BF16_GEMM, 30.0)], 1: [("vectorized_add", 40.0)], 2: [("vectorized_tanh", 44.0)]},
            [(cases.BF16_GEMM, 30.0), (FUSED, 45.0)],
            "unfused chain", f"2 operators of A (84 us) ran kernels that B has not, most time aten::tanh.default with "
            f"vectorized_tanh (44 us); B has 1 fused ones instead (45 us), the longest {FUSED} (45 us)", id="fusion",
        ),
        pytest.param(
            {0: [(cases.BF16_GEMM, 30.0)], 1: [("vectorized_add", 4.0)], 2: [("vectorized_tanh", 4.0)]},
            [(cases.BF16_GEMM, 20.0)],
            "unfused chain", "B has 0 fused ones instead (0 us)", id="nothing-instead",
        ),
    ],
)  # fmt: skip
def test_compiled_code_is_told_by_its_kernels(kernels: Any, compiled: Any, kind: str, told: str) -> None:
    """Same operators on both sides; of the compiled one, no kernel belongs to an operator."""
    captures = []
    for _ in range(2):
        program = Program(dtype="bf16")
        x = program.input(noise(16, 16))
        y = program.op("aten::mm.default", np.matmul, x, x)
        z = program.op("aten::add.Tensor", np.add, y, x)
        captures.append(program.finish(program.op("aten::tanh.default", np.tanh, z)))
    captures[1].notes.append(UNCOMPILED)
    slow = cases.timing(captures[0], kernels, wall_us=1000.0)
    own = tuple(Kernel(name, us, "kernel", None, "", None, 0) for name, us in compiled)
    fast = replace(cases.timing(captures[1], {}, wall_us=200.0), kernels=own, op_us={})
    found = causes(*captures, None, slow, fast)
    assert found.kind == kind
    assert told in found.evidence
    assert "as B does" in found.remedy
    assert found.evidence.endswith("of 1 ms, and B takes 200 us")  # launching is what takes the time
    assert all("no kernel" not in cause.evidence for cause in (found, *found.also))
    assert causes(captures[1], captures[0], None, fast, slow).kind == kind


def test_inputs_that_were_not_kept_are_not_judged() -> None:
    captures = []
    for value in (1.0, 0.0):
        program = Program()
        x = program.input(np.full((16, 16), value, np.float32))
        captures.append(program.finish(program.op("aten::mm.default", np.matmul, x, x), without=[x]))
    assert causes(*captures, None).kind == "unknown"


_STEPS = {
    "aten::tanh.default": np.tanh, "aten::clone.default": np.array, "aten::mm.default": lambda x: x @ x,
    "aten::_to_copy.default": lambda x: x.astype(np.float64).astype(np.float32),
    "aten::sum.default": lambda x: x + x.sum(),
}  # fmt: skip


@given(st.lists(st.sampled_from(sorted(_STEPS)), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_program_against_itself_has_no_cause(steps: list[str]) -> None:
    captures = []
    for _ in range(2):
        program = Program()
        value = program.input(np.linspace(-1, 1, 36, dtype=np.float32).reshape(6, 6))
        for step in steps:
            value = program.op(step, _STEPS[step], value)
        captures.append(program.finish(value))
    timings = [cases.timing(c, {i: [(name, 10.0)] for i, name in enumerate(steps)}) for c in captures]
    for found in (causes(*captures, None), causes(*captures, None, *timings, (0.1, 0.1))):
        assert (found.kind, found.also) == ("unknown", ())


@given(st.lists(st.sampled_from(sorted(_STEPS)), max_size=6), st.lists(st.sampled_from(sorted(_STEPS)), max_size=6))
@settings(max_examples=40, deadline=None)
def test_any_two_programs_get_an_answer(one: list[str], other: list[str]) -> None:
    """And what is said of A and B does not depend on which is called A."""
    captures = []
    for steps in (one, other):
        program = Program()
        value = program.input(np.linspace(-1, 1, 36, dtype=np.float32).reshape(6, 6))
        for step in steps:
            value = program.op(step, _STEPS[step], value)
        captures.append(program.finish(value))
    a, b = captures
    found, turned = causes(a, b, None, slow="a"), causes(b, a, None, slow="b")
    assert found.kind == turned.kind
    assert 0 <= found.confidence == turned.confidence <= 1
    assert [c.confidence for c in found.also] == sorted((c.confidence for c in found.also), reverse=True)
    if sorted(one) != sorted(other):
        assert found.kind != "unknown"
    n_copies = [sum("clone" in step or "_to_copy" in step for step in steps) for steps in (one, other)]
    if n_copies[0] <= n_copies[1]:
        assert ("extra copy", "a") not in [(c.kind, c.side) for c in (found, *found.also)]


@given(st.integers(0, 1 << 45))
def test_bytes_read_back(n: int) -> None:
    number, unit = in_bytes(n).split()
    assert float(number) * 1024 ** ["B", "KiB", "MiB", "GiB"].index(unit) == pytest.approx(n, rel=0.051, abs=0.5)


@pytest.mark.parametrize(
    ("kernel", "cores"),
    [
        (cases.FP32_GEMM, "CUDA"),
        ("ampere_sgemm_128x64_nn", "CUDA"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4", "CUDA"),
        (cases.TF32_GEMM, "tensor"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>(Params)", "tensor"),
        (cases.BF16_GEMM, "tensor"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "tensor"),
        (cases.ELEMENTWISE, ""),
        (cases.GEMV, ""),
    ],
)
def test_cores_by_kernel(kernel: str, cores: str) -> None:
    assert names.cores(kernel) == cores


def test_short_names() -> None:
    assert names.short(cases.FP32_GEMM) == "cutlass_80_simt_sgemm_256x128_8x4_nn_align1"
    assert names.short(cases.ELEMENTWISE) == "vectorized_elementwise_kernel"
    assert names.short(cases.TO_NHWC) == "nchwToNhwcKernel"
    assert names.short("x" * 100).endswith("...")
