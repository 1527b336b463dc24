"""Cases of the campaign as modules, and timings as a GPU would give them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from gpubloat.energy.capture.records import Capture
from gpubloat.energy.timing import Kernel, Timing

FOLDER = Path(__file__).parents[2] / "campaigns" / "energy" / "cases"
Kernels = Sequence[tuple[str, float]]

# Kernels by the names that a Hopper GPU reports.
ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3>>"
)
COPY = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda"
    "(at::TensorIteratorBase&)::{lambda()#3}>(at::TensorIteratorBase&, int)>"
)
BF16_GEMM = (
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_nn_n_tilesize128x128x64_warpgroupsize2x1x1_execute_segment_k_off_kernel"
)
TF32_GEMM = "sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x32_warpgroupsize2x1x1_execute_segment_k_off_kernel"
FP32_GEMM = "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(cutlass_80_simt_sgemm::Params)"
GEMV = "void gemvNSP_kernel<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 1, 32, 4, 1024>(cublasGemvParams)"
TO_NHWC = (
    "void cudnn::engines_precompiled::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>"
)


def load(name: str) -> ModuleType:
    """A case. Its folder is on the path only meanwhile, and its modules are not left behind under their short names."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        module = importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
        for new in set(sys.modules) - before:
            file = getattr(sys.modules[new], "__file__", None)
            if file and Path(file).parent == FOLDER:
                del sys.modules[new]
    return module


def timing(capture: Capture, kernels: Mapping[int, Kernels], wall_us: float | None = None) -> Timing:
    """Of a GPU. kernels : operator -> names and microseconds; operators that are not named ran nothing."""
    made = tuple(
        Kernel(name, us, "kernel", None, capture.ops[op].name, op, 0) for op, own in kernels.items() for name, us in own
    )
    busy = sum(kernel.us for kernel in made)
    wall = busy if wall_us is None else wall_us
    op_us = {op.index: sum(us for _, us in kernels.get(op.index, ())) for op in capture.ops if not op.is_view}
    return Timing("kernels", 1, made, op_us, wall, busy, busy, wall - busy, 0.0, wall, (), ())


def find(capture: Capture, name: str) -> int:
    """The first operator with this in its name."""
    return next(op.index for op in capture.ops if name in op.name)
