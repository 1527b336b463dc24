"""What operators and kernels do, by their names."""

from __future__ import annotations

import re


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Families: operators that compute the same kind of thing, however they are called.
_FAMILIES = {
    "product": """mm bmm addmm baddbmm addbmm mv addmv dot vdot matmul linear einsum dot_general int_mm scaled_mm
        addmm_activation mkldnn_linear sparse_mm ragged_dot""",
    "convolution": """convolution conv1d conv2d conv3d conv_transpose2d cudnn_convolution conv_depthwise2d
        conv_depthwise3d slow_conv2d thnn_conv2d mkldnn_convolution cudnn_convolution_relu conv_general_dilated""",
    "attention": "",  # by a part of the name
    "softmax": "softmax log_softmax safe_softmax",
    "norm": """native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm batch_norm layer_norm rms_norm
        fused_rms_norm""",
    "order": "sort topk kthvalue msort argsort top_k approx_top_k",
    "eigenvalues": "linalg_eig linalg_eigvals linalg_eigh linalg_eigvalsh eig eigh",
    "fft": "fft fft_r2c fft_c2r fft_c2c",
}
_FAMILY = {name: family for family, names in _FAMILIES.items() for name in names.split()}
# Solvers that compute on the host, wholly or for the most part, although their tensors are on the GPU.
HOST_SOLVERS = _set("linalg_eig linalg_eigvals eig")
# Operators whose result goes to the host, or whose result's shape depends on values: the host waits for the GPU.
SYNCS = _set(
    """local_scalar_dense item nonzero is_nonzero masked_select unique unique2 unique_dim unique_consecutive equal
    repeat_interleave_tensor nonzero_numpy"""
)
# Operators that only move elements. Of those in COPIES it is certain; others are compared by value.
COPIES = _set("clone contiguous copy reshape_copy lift_fresh_copy transpose")
MOVERS = COPIES | _set(
    """cat stack concatenate index index_select gather take take_along_dim embedding repeat repeat_interleave tile roll
    flip rev pad constant_pad_nd constant_pad slice_scatter select_scatter index_copy index_put scatter im2col col2im
    unfold dynamic_slice dynamic_update_slice broadcast_in_dim reshape concat split_with_sizes_copy split_copy
    expand_copy permute_copy view_copy t_copy transpose_copy unsqueeze_copy squeeze_copy slice_copy select_copy
    unfold_copy alias_copy narrow_copy unbind_copy"""
)
CASTS = _set("to_copy convert_element_type to")
# Equations of JAX that no compiled program runs as a kernel of its own.
FREE = _set("reshape squeeze expand_dims stop_gradient bitcast_convert_type sharding_constraint")
POINTWISE = CASTS | _set(
    """add sub rsub mul div pow neg exp exp2 expm1 log log2 log10 log1p tanh sigmoid logistic sin cos tan asin acos
    atan atan2 sinh cosh asinh acosh atanh erf erfc erf_inv erfinv sqrt rsqrt cbrt square abs sign floor ceil round
    trunc frac relu relu6 leaky_relu elu selu celu gelu silu mish softplus softshrink hardtanh hardswish hardsigmoid
    threshold glu clamp clamp_min clamp_max clip maximum minimum max min where select_n masked_fill lerp addcmul addcdiv
    reciprocal fmod remainder rem eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and
    bitwise_or bitwise_xor bitwise_not and or not xor isnan isinf isfinite is_finite nan_to_num integer_pow xlogy
    floor_divide true_divide native_dropout dropout bernoulli fill tril triu gelu_backward tanh_backward
    sigmoid_backward silu_backward threshold_backward"""
)
REDUCTIONS = _set(
    """sum mean prod amax amin any all var std var_mean std_mean norm linalg_vector_norm logsumexp cumsum
    cumprod argmax argmin reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or"""
)
# Layout changes inside a library's operator, and copies.
_TRANSFORMS = re.compile(
    r"nchw2?tonhwc|nhwc2?tonchw|nchw_to_nhwc|transpose|permute|direct_copy|copy_kernel|tensor_transform", re.I
)
_TENSOR_CORES = re.compile(
    r"tensorop|tf32|s1688|s16816|h16816|i16832|hmma|imma|gmma|bf16|fp16|f16f16|hgemm|nvjet", re.I
)
_CUDA_CORES = re.compile(r"simt|sgemm|dgemm|ffma|dfma|scudnn|f32f32_f32f32", re.I)


def base(name: str) -> str:
    """``aten::add_.Tensor`` -> "add", ``jax::dot_general`` -> "dot_general": without overload and leading bars."""
    return name.rpartition("::")[2].partition(".")[0].strip("_").removesuffix("_for_cpu")


def essence(name: str) -> str:
    """The same for variants of an operator: nll_loss2d_forward is nll_loss, all attentions are attention."""
    own = base(name)
    if "scaled_dot_product" in own or "attention" in own:
        return "attention_backward" if own.endswith("backward") else "attention"
    if own == "repeat_interleave" and name.endswith(".Tensor"):
        return "repeat_interleave_tensor"
    return re.sub(r"(\dd)?(_forward)?$", "", own) if own.endswith(("_forward", "loss2d")) else own


def family(name: str) -> str:
    """What is computed: "product" for mm, bmm, addmm; the essence for what belongs to no family."""
    own = essence(name)
    return own if own.startswith("attention") else _FAMILY.get(own, own)


def is_light(name: str) -> bool:
    """Element-wise, a reduction or a cast: its time is that of reading and writing memory."""
    own = base(name)
    return own in POINTWISE or own in REDUCTIONS


def is_transform(kernel: str) -> bool:
    """Whether a kernel only changes the layout of a tensor, as those that libraries put around theirs."""
    return _TRANSFORMS.search(kernel) is not None


def cores(kernel: str) -> str:
    """ "tensor" or "CUDA", the cores that a kernel of a product uses by its name; "" if that does not tell."""
    if _CUDA_CORES.search(kernel) and not re.search(r"tensorop|tf32|s1688|hmma|gmma", kernel, re.I):
        return "CUDA"
    return "tensor" if _TENSOR_CORES.search(kernel) else ""


def short(kernel: str, most: int = 60) -> str:
    """A kernel's name without return type, template arguments and parameters; of CUTLASS, the first argument."""
    name = re.sub(r"\(anonymous namespace\)::", "", kernel.removeprefix("void "))
    name = re.sub(r"^cutlass::(?:device_)?kernel\d?<([^<>(,]*).*", r"\1", name, flags=re.I)
    name = re.split(r"[<(]", name)[0].rpartition("::")[2] or name
    return name if len(name) <= most else name[: most - 3] + "..."
