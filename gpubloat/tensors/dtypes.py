"""The element types that are read: how wide they are, and which of their bits are sign, exponent and mantissa."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpubloat.errors import GpubloatError


@dataclass(frozen=True)
class Dtype:
    """An element type. From the most significant bit down: sign, exponent, mantissa; integers have no fields."""

    name: str
    bits: int
    exponent_bits: int = 0
    mantissa_bits: int = 0

    @property
    def is_float(self) -> bool:
        return self.exponent_bits > 0

    @property
    def words(self) -> np.dtype[np.unsignedinteger]:
        """The unsigned integers that elements are viewed as: floats are never compared as numbers (NaN, -0.0)."""
        return np.dtype(f"<u{self.bits // 8}")

    def field(self, bit: int) -> str:
        """What bit `bit` (0 is the least significant) of an element is: sign, exponent, mantissa or integer."""
        if not self.is_float:
            return "integer"
        if bit < self.mantissa_bits:
            return "mantissa"
        return "exponent" if bit < self.mantissa_bits + self.exponent_bits else "sign"


DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype("fp64", 64, 11, 52),
        Dtype("fp32", 32, 8, 23),
        Dtype("fp16", 16, 5, 10),
        Dtype("bf16", 16, 8, 7),
        Dtype("fp8_e4m3", 8, 4, 3),
        Dtype("fp8_e5m2", 8, 5, 2),
        *(Dtype(f"{sign}int{bits}", bits) for sign in ("", "u") for bits in (8, 16, 32, 64)),
        Dtype("bool", 8),
    )
}


def named(name: str) -> Dtype:
    """The element type called `name`; GpubloatError if there is none."""
    if name not in DTYPES:
        raise GpubloatError(f"elements of type {name!r} cannot be read", f"known types: {', '.join(DTYPES)}")
    return DTYPES[name]
