"""Tensors -> tables: which of their bits change, by position and column, and what codes could save of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gpubloat.errors import GpubloatError
from gpubloat.run import Run, RunWriter, provenance
from gpubloat.tensors import bounds, counting
from gpubloat.tensors.dtypes import Dtype, named
from gpubloat.tensors.saving import savings
from gpubloat.tensors.sources import Tensor, as_tensor, tensors_in

METHOD = {
    "words": "elements as unsigned integers: NaN, -0.0 and denormals are patterns like any other",
    "columns": "a tensor is rows (dimension 0) of columns (all other dimensions)",
    "joint": "entropy of 16-bit pieces as counted, summed; is_biased where fewer than 10 elements per pattern",
    "agreement": "share of the more frequent value of a bit in its column; quantiles rounded down to 1/10000",
}
_STRIP = 1 << 18  # bytes of a row that are counted at a time: their counts take 64 times as much
_BLOCK = 32 << 20  # bytes of sampled rows that are gathered at a time
_SCALE = 10_000  # agreements are kept as a histogram of so many steps
_QUANTILES = (5, 25, 50, 75, 95)


def stats(
    source: Any,
    *,
    columns: bool = False,
    thresholds: Sequence[float | None] | None = (None,),
    max_rows: int | None = None,
    seed: int = 0,
    digests: bool = True,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    command: str = "gpubloat.tensors.stats",
) -> Run:
    """Count the bits of tensors into the tables of `gpubloat.tables.tensors`.

    Parameters
    ----------
    source : a path of a file or folder with tensors, an array (NumPy's or PyTorch's), a list of both, or a mapping of
        names to arrays, such as a model's ``state_dict()``. Files are mapped, not read into memory.
    columns : also fill the table `columns`, with one row per column and bit.
    thresholds : of the table `savings`, see `saving.savings`: packing is tried in every chunk width, by both methods.
        None leaves the table empty, which takes a fraction of the time.
    max_rows : look at so many rows of each tensor: one, at random, out of each of so many equal parts.
    seed : of that choice.
    digests : sha256 of the files and arrays, for run.json.
    out : keep the run in this folder; default, a temporary one that goes with the Run.
    force : replace a run that is in `out` already.
    command : what run.json says was run.

    Returns
    -------
    Run with tensors, bits, columns, savings.

    Raises
    ------
    GpubloatError : a path or an array cannot be read. FormatError : a file is damaged or hostile.
    """
    if max_rows is not None and max_rows < 1:
        raise GpubloatError(f"max_rows is {max_rows}", "give at least 1, or None for all rows")
    names = ["tensors", "bits", "columns", "savings"]
    inputs: list[dict[str, Any]] = []
    with RunWriter("tensors", names, out, force) as writer:
        for file, tensor in _each(source, inputs, digests):
            for name, frame in _tables(file, tensor, columns, max_rows, seed):
                writer.append(name, frame)
            if thresholds is not None and tensor.n_bytes:
                writer.append("savings", _savings(file, tensor, thresholds, max_rows, seed))
        record = provenance(command, METHOD, inputs) | {"max_rows": max_rows, "seed": seed, "empty": {}}
        if not columns:
            record["empty"]["columns"] = "columns were not asked for (columns=True)"
        if thresholds is None:
            record["empty"]["savings"] = "savings were not asked for (thresholds=)"
        return writer.finish(record)


def _each(source: Any, inputs: list[dict[str, Any]], digests: bool) -> Iterator[tuple[str, Tensor]]:
    """File and tensor; what was opened is added to `inputs`."""
    if isinstance(source, Mapping):
        given: list[tuple[str, Any]] = [(str(name), thing) for name, thing in source.items()]
    elif isinstance(source, Sequence) and not isinstance(source, str):
        given = [(f"tensor {number}", thing) for number, thing in enumerate(source)]
    else:
        given = [("tensor", source)]
    seen: dict[str, int] = {}
    for name, thing in given:
        if isinstance(thing, (str, os.PathLike)):
            path = Path(thing)
            found = tensors_in(path)
            label = path.name or path.resolve().name
            seen[label] = seen.get(label, 0) + 1
            if seen[label] > 1:  # of another folder
                label = f"{label} ({seen[label]})"
            inputs.append({"name": label, **_described(path, digests)})
            for tensor in found:
                yield label, tensor
        else:
            tensor = as_tensor(thing, name)
            inputs.append({"name": tensor.name, "bytes": tensor.n_bytes})
            if digests:
                content: Any = tensor.words.reshape(-1).view(np.uint8)
                inputs[-1]["sha256"] = hashlib.sha256(content).hexdigest()
            yield "", tensor


def _described(path: Path, digests: bool) -> dict[str, Any]:
    """Size and sha256 of a file; of a folder, those of its files of tensors in the order of their names."""
    if not path.is_dir():
        return {"bytes": path.stat().st_size} | ({"sha256": _digest(path)} if digests else {})
    files = sorted(file for file in path.glob("*.safetensors*") if file.is_file())
    content = {"bytes": sum(file.stat().st_size for file in files)}
    return content | ({"files": {file.name: _digest(file) for file in files}} if digests else {})


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tables(
    file: str, tensor: Tensor, columns: bool, max_rows: int | None, seed: int
) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of one tensor for each table."""
    dtype = named(tensor.dtype)
    keys = {"file": file, "tensor": tensor.name}
    matrix = tensor.rows()
    chosen = _sample(tensor.n_rows, max_rows, seed)
    n_rows = len(matrix) if chosen is None else len(chosen)
    summed = _Summed(dtype.bits, n_rows)
    if matrix.size:
        step = _STRIP // matrix.dtype.itemsize
        for left in range(0, matrix.shape[1], step):
            counts = _ones(matrix[:, left : left + step], chosen)
            summed.add(counts)
            if columns:
                yield "columns", _columns(counts, n_rows, left).assign(**keys)
    yield "bits", summed.bits(dtype).assign(**keys)
    yield "tensors", pd.DataFrame([keys | _tensor(tensor, dtype, n_rows, summed, _patterns(matrix, chosen))])


def _savings(
    file: str, tensor: Tensor, thresholds: Sequence[float | None], max_rows: int | None, seed: int
) -> pd.DataFrame:
    """Rows of the table `savings`, of all rows of the tensor or of the chosen ones."""
    chosen = _sample(tensor.n_rows, max_rows, seed)
    if chosen is not None:
        tensor = Tensor(tensor.name, tensor.dtype, (len(chosen), *tensor.shape[1:]), tensor.words[chosen])
    table = savings(tensor, thresholds=thresholds, seed=seed)
    return table.assign(file=file, tensor=tensor.name)


def _sample(n: int, most: int | None, seed: int) -> np.ndarray | None:
    """Numbers of the rows to look at, in order; None for all. One out of each of `most` equal parts."""
    if most is None or n <= most:
        return None
    edges = np.arange(most + 1, dtype=object) * n // most  # exact, however many rows
    low, high = edges[:-1].astype(np.int64), edges[1:].astype(np.int64)
    return np.random.default_rng(seed).integers(low, high)


def _blocks(matrix: np.ndarray, chosen: np.ndarray | None) -> Iterator[np.ndarray]:
    """All rows as they are, or the chosen ones, copied a few at a time."""
    if chosen is None:
        yield matrix
        return
    step = max(_BLOCK // max(matrix.shape[1] * matrix.dtype.itemsize, 1), 1)
    for start in range(0, len(chosen), step):
        yield matrix[chosen[start : start + step]]


def _ones(matrix: np.ndarray, chosen: np.ndarray | None) -> np.ndarray:
    counts = np.zeros((matrix.shape[1], matrix.dtype.itemsize * 8), np.int64)
    for block in _blocks(matrix, chosen):
        counts += counting.ones(block)
    return counts


def _patterns(matrix: np.ndarray, chosen: np.ndarray | None) -> np.ndarray | None:
    """`bounds.pieces` of the rows; None where there is no element."""
    total: np.ndarray | None = None
    for block in _blocks(matrix, chosen) if matrix.size else ():
        counts = bounds.pieces(block)
        total = counts if total is None else total + counts
    return total


def _columns(counts: np.ndarray, n_rows: int, left: int) -> pd.DataFrame:
    m, width = counts.shape
    element, bit = np.divmod(np.arange(m * width), width)
    ones = counts.reshape(-1)
    return pd.DataFrame({"element": element + left, "bit": bit, "ones": ones, "zeros": n_rows - ones})


def _distinct(counts: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct values of counts between 0 and n, and how often each occurs."""
    if n > 4 * len(counts):  # a table of all values would be longer than what it is of
        return np.unique(counts, return_counts=True)
    often = np.bincount(counts, minlength=n + 1)
    values = np.flatnonzero(often)
    return values, often[values]


class _Summed:
    """What is kept of the counts of all columns: sums by bit, and a histogram of agreements by bit."""

    def __init__(self, width: int, n_rows: int) -> None:
        self.width, self.n_rows, self.n_columns = width, n_rows, 0
        self.ones, self.invariant = np.zeros(width, np.int64), np.zeros(width, np.int64)
        self.entropy, self.agreement = np.zeros(width), np.zeros(width)
        self.steps = np.zeros((width, _SCALE + 1), np.int64)

    def add(self, counts: np.ndarray) -> None:
        """Counts (m, W) of further columns."""
        n = self.n_rows
        self.n_columns += len(counts)
        for bit in range(self.width):
            values, often = _distinct(counts[:, bit], n)
            most = np.maximum(values, n - values)
            self.ones[bit] += (values * often).sum()
            self.invariant[bit] += often[most == n].sum()
            self.entropy[bit] += (bounds.of_bits(values, n) * often).sum()
            self.agreement[bit] += (most / n * often).sum()
            np.add.at(self.steps[bit], (most / n * _SCALE).astype(np.int64), often)

    def bits(self, dtype: Dtype) -> pd.DataFrame:
        """One row per bit position; figures are empty where there is no element."""
        n = self.n_rows * self.n_columns
        table = pd.DataFrame({"bit": range(self.width), "field": [dtype.field(bit) for bit in range(self.width)]})
        table["ones"], table["zeros"] = self.ones, n - self.ones
        some, m = (np.nan, np.nan) if not n else (n, self.n_columns)
        table["ones_frac"] = self.ones / some
        table["entropy_bits"] = bounds.of_bits(self.ones, n) if n else np.nan
        table["column_entropy_bits"] = (self.entropy / m).clip(0, 1)
        table["invariant_frac"] = self.invariant / m
        table["agreement_mean_frac"] = (self.agreement / m).clip(0.5, 1)
        below = self.steps.cumsum(axis=1)
        for percent in _QUANTILES:
            reached = below * 100 >= self.n_columns * percent
            table[f"agreement_{percent:02}_frac"] = (reached.argmax(axis=1) / _SCALE).clip(0.5, 1) if n else np.nan
        return table


def _tensor(tensor: Tensor, dtype: Dtype, n_rows: int, summed: _Summed, patterns: np.ndarray | None) -> dict[str, Any]:
    """The row of the table `tensors`, without its keys."""
    row: dict[str, Any] = {
        "dtype": tensor.dtype, "shape": "x".join(map(str, tensor.shape)), "element_bits": dtype.bits,
        "n_rows": tensor.n_rows, "n_columns": tensor.row_bytes * 8 // dtype.bits, "row_bytes": tensor.row_bytes,
        "raw_bytes": tensor.n_bytes, "n_rows_read": n_rows,
    }  # fmt: skip
    is_used = np.append(summed.ones > 0, n_rows * summed.n_columns > 0)  # where nothing is set, all bits are zero
    row["hidden_zero_bits"] = int(is_used.argmax())
    row["high_zero_bits"] = int(np.append(is_used[-2::-1], is_used[-1]).argmax())
    found = None if patterns is None else bounds.fields(patterns, dtype)
    row["is_biased"] = found is None or found.is_biased
    row["joint_entropy_bits"] = found and found.joint_bits
    row["joint_bound_frac"] = found and found.joint_bound_frac
    row["exponent_bound_frac"] = found and found.exponent_bound_frac
    for name in ("sign", "exponent", "mantissa"):
        row[f"{name}_entropy_bits"] = found and getattr(found, f"{name}_bits")
    n = n_rows * summed.n_columns
    row["marginal_bound_frac"] = 1 - summed.entropy.mean() / summed.n_columns if n else None
    row["marginal_global_bound_frac"] = 1 - bounds.of_bits(summed.ones, n).mean() if n else None
    row["invariant_bits_frac"] = summed.invariant.mean() / summed.n_columns if n else None
    fractions = [name for name in row if name.endswith("_frac") and row[name] is not None]
    return row | {name: min(max(float(row[name]), 0.0), 1.0) for name in fractions}  # 1e-17 below 0
