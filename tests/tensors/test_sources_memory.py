"""Arrays in memory as Tensors, and Tensors as rows of words."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubloat.errors import GpubloatError
from gpubloat.tensors.dtypes import DTYPES
from gpubloat.tensors.sources import Tensor, as_tensor

NUMPY = {
    "fp64": "f8", "fp32": "f4", "fp16": "f2", "bf16": ml_dtypes.bfloat16, "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2, "bool": "?",
    **{f"int{8 * n}": f"i{n}" for n in (1, 2, 4, 8)}, **{f"uint{8 * n}": f"u{n}" for n in (1, 2, 4, 8)},
}  # fmt: skip
SHAPES = [(), (1,), (5,), (1, 1), (0, 3), (3, 0), (0,), (3, 4), (2, 3, 4), (4, 1, 2), (1, 8)]


def some(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Any bits at all: NaN, infinities and -0.0 among them."""
    width = DTYPES[dtype].bits // 8
    size = int(np.prod(shape))
    data = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, size * width, np.uint8)
    return data.view(NUMPY[dtype]).reshape(shape)


def test_there_is_an_array_of_every_type() -> None:
    assert NUMPY.keys() == DTYPES.keys()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_arrays_are_taken_as_they_are(dtype: str, shape: tuple[int, ...]) -> None:
    x = some(dtype, shape)
    tensor = as_tensor(x, "it")
    assert (tensor.name, tensor.dtype, tensor.shape) == ("it", dtype, shape)
    assert tensor.words.dtype == DTYPES[dtype].words
    assert tensor.words.tobytes() == x.tobytes()
    assert np.shares_memory(tensor.words, x) == (x.size > 0)
    assert tensor.words.flags.c_contiguous
    assert not tensor.words.flags.writeable
    assert as_tensor(tensor) is tensor
    assert tensor.n_bytes == x.nbytes == tensor.n_rows * tensor.row_bytes
    assert tensor.n_rows == (shape[0] if shape else 1)


def test_making_a_tensor_leaves_the_array_writeable() -> None:
    x = np.zeros(3)
    as_tensor(x)
    x[0] = 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [None, 8, 16, 32, 64])
def test_rows_hold_the_bytes_or_say_which_widths_do(dtype: str, shape: tuple[int, ...], bits: int | None) -> None:
    tensor = as_tensor(some(dtype, shape))
    width = bits or DTYPES[dtype].bits
    if tensor.row_bytes * 8 % width:
        with pytest.raises(GpubloatError) as caught:
            tensor.rows(bits)
        for fitting in str(caught.value.hint).rpartition(": ")[2].split(", "):
            tensor.rows(int(fitting))
        return
    rows = tensor.rows(bits)
    assert rows.shape == (tensor.n_rows, tensor.row_bytes * 8 // width)
    assert rows.dtype == np.dtype(f"<u{width // 8}")
    assert rows.tobytes() == tensor.words.tobytes()
    assert rows.flags.aligned
    assert not rows.flags.writeable


def test_words_that_do_not_exist_are_refused() -> None:
    for bits in (7, 12, 24, 128, -8):
        with pytest.raises(GpubloatError):
            as_tensor(np.zeros((2, 6), np.uint8)).rows(bits)


def test_rows_of_wider_words_begin_where_processors_want_them() -> None:
    shifted = np.arange(9, dtype="<f4")[1:].reshape(2, 4)
    rows = as_tensor(shifted).rows(64)
    assert rows.flags.aligned
    assert rows.tobytes() == shifted.tobytes()


@given(st.integers(0, 4), st.integers(1, 4), st.integers(1, 4), st.integers(-2, 3), st.permutations([0, 1, 2]))
def test_any_strides_become_c_order(a: int, b: int, c: int, step: int, axes: list[int]) -> None:
    x = np.arange(a * b * c, dtype="<i4").reshape(a, b, c)[:, :: step or 1].transpose(axes)
    tensor = as_tensor(x)
    assert tensor.words.tobytes() == x.tobytes(order="C")
    assert tensor.shape == x.shape
    assert tensor.words.flags.c_contiguous


@pytest.mark.parametrize("kind", ["f2", "f4", "f8", "i2", "i4", "i8", "u2", "u4", "u8"])
def test_big_endian_arrays_are_turned(kind: str) -> None:
    x = np.array([[1, 2], [3, 40]], ">" + kind)
    assert as_tensor(x).words.tobytes() == x.astype("<" + kind).tobytes()


def test_unaligned_fields_are_copied() -> None:
    x = np.frombuffer(b"\0" + np.arange(3, dtype="<f4").tobytes(), "<f4", 3, 1)
    tensor = as_tensor(x)
    assert tensor.words.flags.aligned
    assert tensor.words.tobytes() == x.tobytes()


@pytest.mark.parametrize(
    "x",
    [
        np.zeros(2, complex), np.zeros(2, object), np.zeros(2, "V2"), np.zeros(2, "M8[s]"), np.zeros(2, "S4"),
        np.zeros(2, "U1"), np.zeros(2, np.longdouble), np.zeros(2, [("a", "f4")]),
        np.zeros(2, ml_dtypes.float8_e4m3fnuz), np.zeros(2, ml_dtypes.float8_e4m3), np.zeros(2, ml_dtypes.int4),
        [1.0, 2.0], "text", None, 3,
    ],
    ids=lambda x: str(getattr(x, "dtype", x)),
)  # fmt: skip
def test_what_cannot_be_read_is_said_in_a_sentence(x: Any) -> None:
    with pytest.raises(GpubloatError) as caught:
        as_tensor(x, "weights")
    assert "weights" in str(caught.value)
    assert caught.value.hint


def test_arrays_of_others_come_through_numpy() -> None:
    class Elsewhere:
        def __array__(self, *args: Any, **named: Any) -> np.ndarray:
            raise RuntimeError("it is on another planet")

    class Here:
        def __array__(self, *args: Any, **named: Any) -> np.ndarray:
            return np.ones(2, "f4")

    assert as_tensor(Here()).dtype == "fp32"
    with pytest.raises(GpubloatError, match="another planet"):
        as_tensor(Elsewhere())


def test_parts_of_a_tensor_must_fit() -> None:
    words = np.zeros((2, 3), "<u4")
    Tensor("a", "fp32", (2, 3), words)
    for dtype, shape, given_words in (
        ("fp16", (2, 3), words), ("fp32", (3, 2), words), ("fp32", (3, 2), words.T), ("fp64", (2, 3), words),
        ("none", (2, 3), words), ("fp32", (2, 3), words.astype(">u4")),
    ):  # fmt: skip
        with pytest.raises(GpubloatError):
            Tensor("a", dtype, shape, given_words)
