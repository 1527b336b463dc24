"""The cause of every case of the campaign, from captures on the CPU and, where only kernels tell, from timings."""

from __future__ import annotations

from typing import Any

import pytest

from gpubloat.energy.capture import torchops
from gpubloat.energy.causes import KINDS, causes
from gpubloat.energy.match.regions import match

from . import causes_cases as cases

torch = pytest.importorskip("torch")

# case -> cause, where it can be seen without a GPU; operators of A and B at the lines in question
SEEN = {
    "gelu": ("unfused chain", "0.5 * x", "functional.gelu"),
    "gelu_fp32": ("unfused chain", "0.5 * x", "functional.gelu"),
    "cross_entropy": ("layout", "logits.permute", "logits.reshape"),
    "layer_norm": ("extra copy", "x.permute(0, 2, 3, 1).contiguous()", "functional.layer_norm"),
    "depthwise": ("layout", "conv2d", "conv2d"),
    "lm_head": ("redundant rows", "functional.linear(hidden, weight)", "hidden[:, -1:]"),
    "repeat_one": ("extra copy", "repeat_interleave", "return q * k"),
    "sdpa_contiguous": ("extra copy", "q.contiguous()", "(q, k, v, is_causal=True)"),
    "repeat_kv": ("extra copy", ".expand(", "enable_gqa=True"),
    "mm_fold": ("kernel choice", "return x @ w", "x.flatten"),
    "copy_out": ("extra copy", "out.copy_", "return functional.scaled_dot"),
    "cat_split": ("extra copy", "torch.cat", "functional.linear"),
    "addmm": ("kernel choice", "torch.addmm", "torch.mm"),
    "top_k": ("kernel choice", "x.sort", "x.topk"),
    "zeros": ("input data", "return x @ x", "zeros @ zeros"),
}
SAME_AS_EXPECTED = {  # what the cases call by another name
    "energy only": "kernel choice", "inputs differ": "input data",
}  # fmt: skip


def sides(name: str) -> tuple[Any, Any, Any]:
    case = cases.load(name)
    args = case.inputs(1, small=True)
    return case, torchops.capture(case.slow, *args), torchops.capture(case.fast, *args)


@pytest.mark.parametrize("name", SEEN)
def test_cause_of_case(name: str) -> None:
    kind, a_code, b_code = SEEN[name]
    case, a, b = sides(name)
    assert SAME_AS_EXPECTED.get(case.EXPECTED, case.EXPECTED) == kind
    with a, b:
        for slow in ("a", ""):
            found = causes(a, b, None, slow=slow)
            assert found.kind == kind
            assert a_code in found.a_line.code
            assert b_code in found.b_line.code
            assert found.a_line.file.endswith(f"{name.removesuffix('_fp32')}.py")
        assert all(other.kind in KINDS for other in found.also)
        # Seen from the other side it is the same, with the lines exchanged.
        turned = causes(b, a, None, slow="b")
        assert (turned.kind, turned.a_line, turned.b_line) == (found.kind, found.b_line, found.a_line)


@pytest.mark.parametrize(
    ("name", "n_copies"), [("repeat_one", 1), ("sdpa_contiguous", 3), ("repeat_kv", 2), ("layer_norm", 2)]
)
def test_regions_that_only_copy(name: str, n_copies: int) -> None:
    """The match leaves each copy as a region of its own, to which nothing of B belongs."""
    _, a, b = sides(name)
    with a, b:
        found = [causes(a, b, region) for region in match(a, b).regions if not region.b_ops]
        assert [cause.kind for cause in found] == ["extra copy"] * n_copies
        assert all("contiguous" in c.a_line.code or "repe" in c.a_line.code or "expand" in c.a_line.code for c in found)
        assert all(cause.b_line is not None for cause in found)


def test_bytes_of_copies() -> None:
    _, a, b = sides("sdpa_contiguous")
    with a, b:
        moved = sum(2 * a.tensors[t].n_bytes for t in a.inputs)
        assert f"{moved / 1024:.1f} KiB read and written" in causes(a, b, None).evidence


def test_each_block_of_a_long_function_counts() -> None:
    case, a, b = sides("cat_split")
    with a, b:
        assert f"aten::cat.default x {case.BLOCKS}" in causes(a, b, None).evidence


def test_copies_are_worth_their_time() -> None:
    """Where attention itself, not the copies before it, makes the difference, the copies do not come first."""
    _, a, b = sides("sdpa_contiguous")
    with a, b:
        attention = cases.find(a, "scaled_dot_product")
        copies = {i: [(cases.COPY, 10.0)] for i in range(attention)}
        slow = cases.timing(a, copies | {attention: [("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", 900.0)]})
        fast = cases.timing(b, {0: [("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", 300.0)]})
        first = causes(a, b, None, slow, fast)
        assert first.kind in ("layout", "kernel choice")
        assert "extra copy" in [other.kind for other in first.also]
        equal = cases.timing(a, {i: [(cases.COPY, 200.0)] for i in range(attention)} | {attention: [("flash", 300.0)]})
        assert causes(a, b, None, equal, fast).kind == "extra copy"


def test_rms_norm_against_one_kernel() -> None:
    """On the GPU it is one operator; on the CPU PyTorch takes it apart, so one is declared here."""

    @torch.library.custom_op("gpubloat_tests::fused_rms_norm", mutates_args=())
    def fused(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)

    case = cases.load("rms_norm")
    args = case.inputs(1, small=True)
    with torchops.capture(case.slow, *args) as a, torchops.capture(lambda x, w: fused(x, w), *args) as b:
        found = causes(a, b, None)
        assert found.kind == case.EXPECTED == "unfused chain"
        assert "8 operators of A" in found.evidence
        assert "fused_rms_norm" in found.remedy
        assert "x.float()" in found.a_line.code


def test_tf32_by_its_kernels() -> None:
    case, a, b = sides("tf32")
    with a, b:
        assert "ran with matmul.allow_tf32 False in A and True in B" in causes(a, b, None).evidence
        found = causes(
            a,
            b,
            None,
            cases.timing(a, {0: [(cases.FP32_GEMM, 21000.0)]}),
            cases.timing(b, {0: [(cases.TF32_GEMM, 2900.0)]}),
        )
        assert found.kind == case.EXPECTED == "precision"
        assert found.switch is not None
        assert found.switch.name == "matmul.allow_tf32"
        assert "with_tf32(False" in found.a_line.code
        assert "with_tf32(True" in found.b_line.code
        assert "cutlass_80_simt_sgemm" in found.evidence


def test_eigenvalues_by_the_waiting_gpu() -> None:
    """The wasteful side has less work for the GPU."""
    case, a, b = sides("eigenvalues")
    with a, b:
        eig, sort = cases.find(a, "linalg_eig"), cases.find(a, "sort")
        a_timing = cases.timing(a, {eig: [("gehrd_kernel", 9000.0)], sort: [("radix_sort", 20.0)]}, wall_us=1.1e6)
        b_timing = cases.timing(b, {0: [("syevd_kernel", 9900.0)]}, wall_us=1.04e4)
        for slow in ("", "a", "b"):
            found = causes(a, b, None, a_timing, b_timing, slow=slow)
            assert found.kind == case.EXPECTED == "host fallback"
            assert found.side == "a"
            assert "eigh" in found.remedy
            assert "eigvals(x)" in found.a_line.code


def test_spin_wait_by_the_hosts_time() -> None:
    _, a, b = sides("spin_wait")
    with a, b:
        same = {i: [(cases.BF16_GEMM, 1700.0)] for i in range(20)}
        timings = cases.timing(a, same), cases.timing(b, same)
        found = causes(a, b, None, *timings, (0.034, 0.002))
        assert (found.kind, found.side) == ("host wait", "a")
        assert "34 ms" in found.evidence
        assert "SPIN" in found.a_line.code
        assert "BLOCK" in found.b_line.code
        assert causes(a, b, None, *timings, (0.034, 0.033)).kind == "unknown"


def test_same_function_twice() -> None:
    _, a, b = sides("same")
    with a, b:
        same = {0: [(cases.BF16_GEMM, 200.0)], 1: [(cases.ELEMENTWISE, 12.0)]}
        for timings in ((None, None), (cases.timing(a, same), cases.timing(b, same))):
            found = causes(a, b, None, *timings, (0.01, 0.01))
            assert found.kind == "unknown"
            assert found.also == ()
            assert "same 2 operators" in found.evidence


def test_fold_that_is_missed_by_its_kernels() -> None:
    case, a, b = sides("mm_fold")
    with a, b:
        slow = cases.timing(a, {cases.find(a, "bmm"): [(cases.GEMV, 480.0)]})
        fast = cases.timing(b, {cases.find(b, "mm.default"): [(cases.BF16_GEMM, 35.0)]})
        found = causes(a, b, None, slow, fast)
        assert found.kind == case.EXPECTED == "kernel choice"
        assert "gemvNSP_kernel" in found.evidence
        assert "sm90_xmma_gemm_bf16" in found.evidence


def test_energy_alone() -> None:
    """Equal times: the side that takes more energy is told by whoever measured."""
    _, a, b = sides("addmm")
    with a, b:
        slow = cases.timing(a, {0: [("nvjet_hsh_128x256_64x4_1x2_h_bz_bias_TNT", 5890.0)]})
        fast = cases.timing(b, {0: [("nvjet_hsh_128x256_64x4_1x2_h_bz_TNT", 5650.0)], 1: [(cases.ELEMENTWISE, 220.0)]})
        found = causes(a, b, None, slow, fast, slow="a")
        assert (found.kind, found.side) == ("kernel choice", "a")
