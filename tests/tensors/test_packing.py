"""Packed rows: lossless for every bit pattern, shape and codebook, and bit for bit what the layout says."""

from __future__ import annotations

import dataclasses
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubloat.errors import GpubloatError
from gpubloat.tensors import packing, rowbits
from gpubloat.tensors.codebook import Codebook, fit
from gpubloat.tensors.packing import Packed, pack, unpack, unpack_rows
from tests.tensors.bitstrings import pack_row, unpack_row

Array = np.ndarray[Any, np.dtype[Any]]
WIDTHS = (8, 16, 32, 64)
DTYPES = ("u1", "i1", "?", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8")


def as_bytes(x: Array) -> bytes:
    """Floats are never compared as numbers: NaN differs from itself, and -0.0 equals 0.0."""
    return np.ascontiguousarray(x).tobytes()


def assert_comes_back(x: Array, codebook: Codebook | None = None) -> Packed:
    """Both layouts give `x` again, all of it and row by row; `x` stays as it was."""
    before = as_bytes(x)
    for layout in ("slots", "condensed"):
        packed = pack(x, codebook, layout)
        back = unpack(packed)
        assert back.shape == x.shape
        assert as_bytes(back) == before
        order = np.arange(packed.n_rows)[::-1]
        rows = np.ascontiguousarray(x).reshape(packed.n_rows, *x.shape[1:])
        assert as_bytes(unpack_rows(packed, order)) == as_bytes(rows[order])
        assert packed.crc32 == zlib.crc32(before)
    assert as_bytes(x) == before
    return packed


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Arrays of any shape and type whose columns are partly constant, partly skewed, partly random."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    if shape:
        shape = (draw(st.integers(0, 40)), *shape[1:])
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n_bytes = int(np.prod(shape, dtype=int)) * dtype.itemsize
    columns = n_bytes // shape[0] if shape and shape[0] else n_bytes
    kinds = rng.choice([0, 1, 2], columns or 1)
    raw = rng.integers(0, 256, (n_bytes // len(kinds) if n_bytes else 0, len(kinds)), dtype=np.uint8)
    if len(raw):
        rare = rng.random(raw.shape) < draw(st.sampled_from([0.02, 0.3]))
        raw = np.where(kinds == 0, raw[:1], np.where(kinds == 1, np.where(rare, raw, raw[:1]), raw))
    return (
        np.frombuffer(raw.astype(np.uint8).tobytes(), dtype.newbyteorder("<") if dtype != "?" else "u1")
        .view(dtype)
        .reshape(shape)
    )


@st.composite
def codebooks(draw: st.DrawFn, x: Array) -> Codebook:
    """Any codebook for `x`, sensible or not."""
    row_bytes = x.dtype.itemsize * int(np.prod(x.shape[1:], dtype=int))
    width = draw(st.sampled_from([w for w in WIDTHS if row_bytes % (w // 8) == 0]))
    word = np.dtype(f"<u{width // 8}")
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def some(share: float) -> Array:
        bits = rng.random((row_bytes * 8 // width, width)) < share
        return np.packbits(bits, axis=1, bitorder="little").view(word).reshape(-1)

    always = some(draw(st.sampled_from([0, 0, 0.1, 1])))
    mask = some(draw(st.sampled_from([0, 0.2, 0.9, 1]))) & ~always
    mask *= (rng.random(len(mask)) < draw(st.sampled_from([1.0, 0.5]))).astype(word)
    value = some(0.5)
    if x.size and draw(st.booleans()):  # of a row that is there: some match
        value = np.frombuffer(as_bytes(x)[:row_bytes], word)
    names = {"b1": "bool"}
    kind = {"u": "uint", "i": "int", "f": "fp"}.get(x.dtype.kind, "")
    name = names.get(x.dtype.str[1:], f"{kind}{x.dtype.itemsize * 8}")
    return Codebook(width, name, x.shape[1:], always, mask, value & (always | mask))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_codebook_is_lossless_and_agrees_with_the_bit_strings(data: st.DataObject) -> None:
    x = data.draw(arrays())
    codebook = data.draw(codebooks(x))
    packed = assert_comes_back(x, codebook)
    parts = [[int(k) for k in part] for part in (codebook.always, codebook.mask, codebook.value)]
    content = as_bytes(x)
    for r in range(packed.n_rows):
        row = content[r * packed.row_bytes : (r + 1) * packed.row_bytes]
        begin, end = (int(k) for k in packed.offsets[r : r + 2])
        stored = [int(k) for k in packed.words[begin:end]]
        assert stored == pack_row(row, codebook.chunk_bits, *parts)
        assert unpack_row(stored, packed.row_bytes, codebook.chunk_bits, *parts) == row


@settings(max_examples=50, deadline=None)
@given(
    arrays(),
    st.booleans(),
    st.none() | st.lists(st.sampled_from([0.55, 0.7, 0.8, 0.95, 1.0]), min_size=1, max_size=3),
)
def test_fitted_codebooks_are_lossless_and_predict_the_size(
    x: Array, always: bool, thresholds: list[float] | None
) -> None:
    row_bytes = x.dtype.itemsize * int(np.prod(x.shape[1:], dtype=int))
    for chunk_bits in ("auto", *(w for w in WIDTHS if row_bytes % (w // 8) == 0)):
        codebook = fit(x, chunk_bits, thresholds, always)  # type: ignore[arg-type]
        packed = assert_comes_back(x, codebook)
        assert codebook.estimate is not None
        assert codebook.estimate.packed_bytes == packed.packed_bytes
        assert codebook.estimate.saving_frac == packed.saving_frac


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int16", "uint16"])
@pytest.mark.parametrize("chunk_bits", [8, 16, 32, 64])
def test_all_65536_patterns_of_16_bits_come_back(dtype: str, chunk_bits: int) -> None:
    """All NaN payloads, both zeros, subnormals and infinities among them."""
    bits = np.random.default_rng(0).permutation(np.arange(2**16, dtype=np.uint16)).reshape(-1, 16)
    if dtype == "bf16":
        x = bits.view(pytest.importorskip("ml_dtypes").bfloat16)
    else:
        x = bits.view({"fp16": np.float16, "int16": np.int16, "uint16": np.uint16}[dtype])
    back = unpack(pack(x, fit(x, chunk_bits)))
    assert (back.view(np.uint16) == bits).all()
    assert back.dtype == (np.uint16 if dtype == "bf16" else x.dtype)
    few = bits & np.uint16(0x8FFF)  # some bits constant: now there is something to remove
    codebook = fit(few.view(x.dtype), chunk_bits)
    packed = pack(few.view(x.dtype), codebook)
    assert packed.n_raw_rows < packed.n_rows
    assert (unpack(packed).view(np.uint16) == few).all()


def test_nans_with_payloads_zeros_with_signs_and_subnormals_come_back_among_like_numbers() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 8)).astype(np.float32)
    special = np.array([0x7FC00000, 0xFFC00001, 0x7F800001, 0x80000000, 0, 1, 0x80000001, 0x7F800000], np.uint32)
    x.view(np.uint32)[rng.integers(0, 500, 200), rng.integers(0, 8, 200)] = rng.choice(special, 200)
    assert assert_comes_back(x).n_raw_rows < 500


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_every_length_come_back_and_widths_that_do_not_divide_are_refused(width: int) -> None:
    """No tail is lost, and none is cut off silently."""
    rng = np.random.default_rng(0)
    for row_bytes in range(3 * width // 8 + 2):
        x = rng.choice(np.array([7, 7, 7, 9], np.uint8), (40, row_bytes))
        assert_comes_back(x)
        if row_bytes % (width // 8):
            with pytest.raises(GpubloatError) as error:
                fit(x, width)
            assert error.value.hint
        else:
            assert_comes_back(x, fit(x, width))


def test_rows_of_every_length_modulo_16_begin_at_16_bytes_in_slots() -> None:
    for m in range(1, 18):
        x = np.ones((5, m), np.float32)
        x[2] = np.arange(m)
        packed = pack(x, layout="slots")
        assert packed.stride_words % 4 == 0
        assert 0 <= 4 * packed.stride_words - packed.row_bytes < 16
        assert len(packed.words) == 5 * packed.stride_words
        used = np.arange(packed.stride_words) < packed.row_words[:, None]
        assert not packed.words.reshape(5, -1)[~used].any()  # what a row leaves free is zero


@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (5,), (0, 3), (3, 0), (1, 1), (1, 7), (0, 0), (2, 0, 5), (3, 1, 2), (1, 10_000)]
)
@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "f8", "?"])
def test_empty_tiny_and_one_row_tensors_come_back(shape: tuple[int, ...], dtype: str) -> None:
    x = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    assert_comes_back(np.asarray(x))


def test_a_row_of_no_bits_is_told_from_a_raw_one() -> None:
    """A constant tensor is nothing but its codebook: as small as it can be, and still right."""
    for dtype in ("u1", "u2", "f4", "f8"):
        packed = assert_comes_back(np.full((1000, 24), 3, dtype))
        assert len(packed.words) == 0
        assert packed.n_raw_rows == 0
        assert packed.packed_bytes == 4 * 1000 + 3 * packed.row_bytes


@pytest.mark.parametrize("width", WIDTHS)
def test_columns_that_keep_all_or_none_of_their_bits_are_exact(width: int) -> None:
    """Full chunks of 64 bits, empty masks and incompressible rows: no shift is by the whole width."""
    rng = np.random.default_rng(0)
    word = np.dtype(f"<u{width // 8}")
    x = rng.integers(0, 2**63, (50, 6)).astype(np.uint64).astype(word) | word.type(1 << width - 1)
    x[:, 1] = np.iinfo(word).max
    x[::2, 2] = 0
    every = np.iinfo(word).max
    codebook = Codebook(
        width,
        f"uint{width}",
        (6,),
        np.array([0, every, 0, 0, 0, 0], word),
        np.array([0, 0, every, 0, every, 0], word),
        np.array([0, every, 0, 0, 0, 0], word),
    )
    assert_comes_back(x, codebook)
    x[5, 1] = 0
    assert pack(x, codebook).row_words[5] == 6 * width // 32 + (6 * width % 32 > 0)
    assert_comes_back(x, codebook)


@pytest.mark.parametrize("n_rows", [1, 2, 31, 32, 33, 64, 10_000])
def test_many_tiny_rows_and_blocks_of_32_come_back(n_rows: int) -> None:
    x = np.random.default_rng(0).choice(np.array([1.0, 1.0, 2.5], np.float32), (n_rows, 2))
    assert_comes_back(x)


def test_arrays_that_are_not_contiguous_come_back() -> None:
    base = np.random.default_rng(0).choice(np.array([0, 1, 300], np.int32), (40, 30))
    spread = np.broadcast_to(base[:1], (9, 30))
    for x in (base.T, base[::-1], base[:, ::3], base[3:, 5:], spread, np.asfortranarray(base)):
        assert_comes_back(x)


def test_torch_tensors_are_packed_like_arrays() -> None:
    torch = pytest.importorskip("torch")
    base = torch.arange(600, dtype=torch.float32).reshape(20, 30)
    for x in (base, base.T, base[3:, 5:], base[:1].expand(9, 30)):
        assert as_bytes(unpack(pack(x))) == x.contiguous().numpy().tobytes()
    half = base.to(torch.bfloat16).requires_grad_()
    assert as_bytes(unpack(pack(half))) == half.detach().view(torch.int16).numpy().tobytes()


def test_a_codebook_packs_rows_that_it_was_not_fitted_to() -> None:
    """Rows that break a bit that was constant before are stored raw, and say so by their length."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 1000, (300, 16)).astype(np.uint32)
    new = x.copy()
    new[7, 3] |= np.uint32(1 << 31)
    packed = assert_comes_back(new, fit(x))
    assert (np.flatnonzero(packed.row_words == packed.raw_words) == [7]).all()
    with pytest.raises(GpubloatError, match="codebook is for"):
        pack(x[:, :8], fit(x))
    with pytest.raises(GpubloatError, match="codebook is for"):
        pack(x.view(np.float32), fit(x))


def test_a_hint_of_the_length_is_made_before_packing_and_is_right() -> None:
    x = np.random.default_rng(0).standard_normal((500, 64)).astype(np.float32)
    codebook = fit(x)
    assert codebook.estimate is not None
    assert codebook.estimate.packed_bytes == pack(x, codebook).packed_bytes
    assert codebook.estimate.saving_frac > 0.05


def test_rows_are_taken_in_any_order_with_repeats_and_into_a_given_array() -> None:
    """Reading through a permutation writes to the result alone; neither the packed rows nor the tensor change."""
    x = np.random.default_rng(0).standard_normal((50, 12)).astype(np.float16)
    packed = pack(x)
    words = packed.words.copy()
    order = np.array([49, 0, 7, 7, 7, 3])
    out = np.empty((6, 12), np.float16)
    assert unpack_rows(packed, order, out) is out
    assert as_bytes(out) == as_bytes(x[order])
    assert (packed.words == words).all()
    assert unpack_rows(packed, []).shape == (0, 12)
    assert as_bytes(unpack_rows(packed, np.arange(50, dtype=np.uint8))) == as_bytes(x)
    for wrong in ([50], [-1], [[1]], [0.5], [2**63 - 1], [True]):
        with pytest.raises(GpubloatError):
            unpack_rows(packed, wrong)
    for bad in (np.empty((6, 12), np.float32), np.empty((5, 12), np.float16), np.empty((12, 6), np.float16).T):
        with pytest.raises(GpubloatError, match="out is no"):
            unpack_rows(packed, order, bad)
    whole = np.empty_like(x)
    assert unpack(packed, whole) is whole
    assert as_bytes(whole) == as_bytes(x)


def test_damaged_words_are_found_by_the_flags_or_the_checksum() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((30, 20)).astype(np.float32)
    packed = pack(x, fit(x, 32))
    for at in range(len(packed.words)):
        words = packed.words.copy()
        words[at] ^= np.uint32(1 << int(rng.integers(0, 32)))
        damaged = dataclasses.replace(packed, words=words)
        if as_bytes(_decoded(damaged)) != as_bytes(x):  # padding does not matter to the result
            with pytest.raises(GpubloatError, match=r"checksum differs|is damaged"):
                unpack(damaged)
    for change in ({"words": packed.words[:-1]}, {"row_words": packed.row_words[1:]}, {"layout": "rows"}):
        with pytest.raises(GpubloatError):
            dataclasses.replace(packed, **change)


def _decoded(packed: Packed) -> Array:
    try:
        return unpack_rows(packed, np.arange(packed.n_rows))
    except GpubloatError:
        return np.empty(0)


def test_lengths_that_the_flags_contradict_are_never_read_past() -> None:
    """Stored lengths are moved from one row to the next: sums stay right, no row does."""
    x = np.zeros((64, 8), np.uint32)
    x[:, :4] = np.random.default_rng(0).integers(0, 2**32, (64, 4), dtype=np.uint32)
    packed = pack(x)
    row_words = packed.row_words.copy()
    row_words[::2] -= 1
    row_words[1::2] += 1
    with pytest.raises(GpubloatError, match="row 0 of the packed tensor is damaged"):
        unpack(dataclasses.replace(packed, row_words=row_words))


def test_rows_beyond_16_gib_of_stored_words_are_found(tmp_path: Path) -> None:
    """2**32 words and more: a sparse file whose last row alone has content. Offsets of 32 bits would wrap."""
    n, m = 2**18 + 100, 2**14
    words = np.memmap(tmp_path / "words", np.uint32, "w+", shape=(n * m,))
    last = np.arange(m, dtype=np.uint32)
    words[-m:] = last
    none = np.zeros(m, np.uint32)
    packed = Packed(
        Codebook(32, "uint32", (m,), none, none, none),
        "uint32",
        (n, m),
        "condensed",
        np.asarray(words),
        np.full(n, m, np.uint32),
        0,
    )
    assert packed.offsets[-1] > 2**32
    assert packed.raw_bytes == 4 * n * m
    assert (unpack_rows(packed, [n - 1])[0] == last).all()
    assert not unpack_rows(packed, [n - 1 - 2**18, 0]).any()
    slots = dataclasses.replace(packed, layout="slots")
    assert (unpack_rows(slots, [n - 1])[0] == last).all()


def test_rows_are_written_beyond_16_gib(tmp_path: Path) -> None:
    out = np.memmap(tmp_path / "words", np.uint32, "w+", shape=(2**32 + 64,))
    x = np.arange(1, 9, dtype=np.uint32).reshape(1, 8)
    x.flags.writeable = False
    none = np.zeros(8, np.uint32)
    rowbits.encode(
        x, rowbits.plan(none, none, none), np.array([8], np.uint32), np.array([2**32 + 5], np.uint64), np.asarray(out)
    )
    assert (out[2**32 + 5 : 2**32 + 13] == x[0]).all()
    assert not out[5:13].any()


def test_a_row_whose_length_does_not_fit_into_32_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is lowered: a codebook for 16 GiB would not fit into memory."""
    assert 4 * np.iinfo(np.uint32).max == packing._MOST_ROW_BYTES
    monkeypatch.setattr(packing, "_MOST_ROW_BYTES", 64)
    assert_comes_back(np.ones((2, 64), np.uint8))
    with pytest.raises(GpubloatError, match="too long") as error:
        pack(np.ones((2, 65), np.uint8))
    assert error.value.hint


def test_rows_whose_bits_need_more_than_31_bits_to_count_are_exact() -> None:
    """2**31 bits and more in one row: 260 MiB, constant but for its end."""
    m = (260 << 20) // 8
    x = np.zeros((2, m), np.uint64)
    x[1, -1] = 2**63 + 1
    always = np.zeros(m, np.uint64)
    always[: m - 2] = np.iinfo(np.uint64).max
    row_words, codes = np.empty(2, np.uint32), rowbits.plan(always[-8:], always[-8:] * 0, always[-8:] * 0)
    assert codes.raw_words == 16
    x.flags.writeable = False
    mask = np.zeros(1, np.uint64)
    wide = codes._replace(
        always=always,
        mask=np.broadcast_to(mask, m).copy(),
        value=np.broadcast_to(mask, m).copy(),
        kept=np.where(always == 0, np.uint64(64), np.uint64(0)),
        weights=np.zeros(m, np.int64),
        raw_words=2 * m,
    )
    n_raw, removed = rowbits.measure(x, wide, row_words)
    assert (n_raw, removed) == (0, 2 * 64 * (m - 2))
    assert removed > 2**32
    assert row_words.tolist() == [4, 4]


def test_speed_is_printed_and_not_absurd(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((20_000, 384)) * 0.05).astype(np.float32)
    lines = []
    for name, words in (("fp32", x), ("16 bits", np.ascontiguousarray(x.view(np.uint16)[:, 1::2]))):
        for chunk_bits in WIDTHS[1:]:
            codebook = fit(words, chunk_bits)
            unpack(pack(words[:16], codebook))  # compiled by now
            start = time.perf_counter()
            packed = pack(words, codebook)
            middle = time.perf_counter()
            unpack(packed)
            speeds = words.nbytes / (middle - start) / 1e9, words.nbytes / (time.perf_counter() - middle) / 1e9
            lines.append(f"{name}, chunks of {chunk_bits}: pack {speeds[0]:.2f} GB/s, unpack {speeds[1]:.2f} GB/s")
            assert min(speeds) > 0.02  # a compiled loop on any machine, however busy; plain Python is 1000 times slower
    with capsys.disabled():
        print("\n" + "\n".join(lines))


def test_what_is_packed_says_in_one_line_what_it_is() -> None:
    x = np.zeros((100, 8), np.float32)
    x[0, 0] = 1
    packed = pack(x)
    assert repr(packed) == f"Packed(fp32 100x8, condensed, 3,200 -> {packed.packed_bytes} bytes, 72.0% saved)"
    assert repr(packed.codebook) == "Codebook(fp32, rows of 4 chunks of 64 bits, 4 with bits removed)"
