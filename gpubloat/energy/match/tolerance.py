"""How far two values may differ and still be called equal: relative errors by the coarser of two types."""

from __future__ import annotations

from typing import Any

import numpy as np

FP32 = 1e-5
TF32 = 2e-3  # of fp32 tensors that went through TF32 products: nothing in them says so, the caller has to
FLOATS = {
    "fp64": 1e-12,
    "complex128": 1e-12,
    "fp32": FP32,
    "complex64": FP32,
    "bf16": 1e-2,
    "fp16": 1e-2,
    "complex32": 1e-2,
}
FP8 = 8e-2  # half a step of e4m3 is 1/16 of the value
# An element may be off by this many tolerances of its own size plus the root mean square: noise has tails, and a norm
# alone hides one wrong element among a million.
ELEMENT = 10.0


def tolerance_of(*dtypes: str) -> float:
    """Relative Frobenius error that is allowed between tensors of these types, by their names in `TensorInfo`.

    0.0 if all are integers or booleans: those are equal exactly. Of an unknown type, FP32's.
    """
    floats = [name for name in dtypes if not name.startswith(("int", "uint", "bool"))]
    return max((FP8 if name.startswith("fp8") else FLOATS.get(name, FP32) for name in floats), default=0.0)


def name_of(dtype: np.dtype[Any]) -> str:
    """Of a NumPy type as in `TensorInfo`: float32 is fp32."""
    return f"fp{dtype.itemsize * 8}" if dtype.kind == "f" else dtype.name
