"""Which bits of tensors never change, and what packing and other codes save of them. Tables in, tables out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from gpubloat.errors import GpubloatError

KEYS = ["file", "tensor"]
BOUNDS = ("marginal_bound_frac", "exponent_bound_frac", "joint_bound_frac")
# Narrower float types: those whose range is as large first, and how many mantissa bits they have.
_NARROWER = {"fp64": (("fp32", 23, False),), "fp32": (("bf16", 7, True), ("fp16", 10, False))}
_WIDTHS = (8, 16, 32)
ROW_BYTES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def labels(table: pd.DataFrame) -> pd.Series:
    """What to call each row's tensor: its name, with the file's before it where names alone do not tell them apart."""
    names = table["tensor"].str.removesuffix(".weight")
    several = table[KEYS].drop_duplicates().groupby("tensor")["file"].nunique()
    is_ambiguous = table["tensor"].map(several) > 1
    return names.where(~is_ambiguous, table["file"] + ": " + names).rename("label")


def best(savings: pd.DataFrame, *, method: str | None = None) -> pd.DataFrame:
    """The smallest packed form of each tensor, of one method or of all; of equal ones, the paper's, then wide chunks.

    Columns: those of `savings`. One row per tensor, the largest first.
    """
    table = savings if method is None else savings[savings["method"] == method]
    table = table.sort_values(
        ["packed_bytes", "method", "chunk_bits", "threshold"], ascending=[True, False, False, False]
    )
    table = table.drop_duplicates(KEYS)
    return table.sort_values(["raw_bytes", *KEYS], ascending=[False, True, True], ignore_index=True)


def against_bounds(tensors: pd.DataFrame, savings: pd.DataFrame) -> pd.DataFrame:
    """What packing saves of each tensor beside what no code of some kind can do better than.

    Columns: file, tensor, label, dtype, raw_bytes, paper_frac and always_frac (the best of each method; empty if it was
    not tried), best_frac, method, chunk_bits, threshold (empty where it is by column), the three bounds, is_biased (the
    joint bound is too great), reached_frac (best over joint bound). One row per tensor, the largest first.
    """
    table = tensors[[*KEYS, "dtype", "raw_bytes"]].copy()
    for method in ("paper", "always"):
        found = best(savings, method=method)[[*KEYS, "saving_frac"]]
        table = table.merge(found.rename(columns={"saving_frac": f"{method}_frac"}), on=KEYS, how="left")
    chosen = best(savings)[[*KEYS, "saving_frac", "method", "chunk_bits", "threshold"]]
    chosen = chosen.astype({"chunk_bits": "Int64"}).rename(columns={"saving_frac": "best_frac"})
    table = table.merge(chosen, on=KEYS, how="left").merge(tensors[[*KEYS, *BOUNDS, "is_biased"]], on=KEYS)
    table["reached_frac"] = table["best_frac"] / table["joint_bound_frac"].where(table["joint_bound_frac"] > 0)
    table.insert(2, "label", labels(table))
    return table.sort_values(["raw_bytes", *KEYS], ascending=[False, True, True], ignore_index=True)


def total(table: pd.DataFrame) -> dict[str, float]:
    """Of what `against_bounds` gives: raw_bytes, packed_bytes and saving_frac of all tensors, each packed in its best
    way or left as it is where it would grow."""
    raw = int(table["raw_bytes"].sum())
    packed = raw - float((table["raw_bytes"] * table["best_frac"].clip(lower=0).fillna(0)).sum())
    return {"raw_bytes": raw, "packed_bytes": round(packed), "saving_frac": 1 - packed / raw if raw else 0.0}


def bit_map(bits: pd.DataFrame, value: str = "agreement_mean_frac") -> pd.DataFrame:
    """One row per tensor and bit, tensors in the order of the table, the most significant bit first.

    Columns: file, tensor, label, position (0 is the most significant bit), bit, field, value (that column of `bits`),
    is_invariant (the bit never changes, in no column). GpubloatError if `bits` has no such figure.
    """
    known = [name for name in bits.columns if name.endswith(("_frac", "_bits"))]
    if value not in known:
        raise GpubloatError(f"{value!r} is no figure of a bit", f"known: {', '.join(known)}")
    table = bits[[*KEYS, "bit", "field"]].assign(value=bits[value].astype(float), label=labels(bits))
    table["order"] = table.groupby(KEYS, sort=False).ngroup()
    table["position"] = table.groupby("order")["bit"].transform("max") - table["bit"]
    table["is_invariant"] = bits["invariant_frac"] == 1
    table = table.sort_values(["order", "position"], ignore_index=True)
    return table[[*KEYS, "label", "position", "bit", "field", "value", "is_invariant"]]


def hidden_precision(tensors: pd.DataFrame, bits: pd.DataFrame) -> pd.DataFrame:
    """Tensors whose elements are wider than what they hold, those with most unused bytes first.

    Of floats, low mantissa bits that are zero in all elements: they were once held in a narrower type. Of integers,
    high bits that are zero, too. Where only some rows were read, it is true of those. Columns: file, tensor, label,
    dtype, raw_bytes, unused_bits (of an element), unused_bytes, used_bits (of the mantissa, or of the integer),
    narrower (a type that holds all elements, or may: see `finding`; empty if there is none), finding.
    """
    mantissa = bits[bits["field"] == "mantissa"].groupby(KEYS).size()
    rows = []
    for row in tensors[tensors["raw_bytes"] > 0].to_dict("records"):
        unused, used, narrower, finding = _finding(row, int(mantissa.get((row["file"], row["tensor"]), 0)))
        if unused:
            size = row["raw_bytes"] * unused // row["element_bits"]
            kept = [row[name] for name in (*KEYS, "dtype", "raw_bytes")]
            rows.append((*kept, unused, size, used, narrower, finding))
    names = [*KEYS, "dtype", "raw_bytes", "unused_bits", "unused_bytes", "used_bits", "narrower", "finding"]
    table = pd.DataFrame(rows, columns=names)
    table.insert(2, "label", labels(table.astype({"file": str, "tensor": str})))
    return table.sort_values(["unused_bytes", *KEYS], ascending=[False, True, True], ignore_index=True)


def _finding(row: dict[Any, Any], mantissa: int) -> tuple[int, int, str, str]:
    """Unused bits, used bits, a narrower type, and the finding in words."""
    width, low, high = (int(row[name]) for name in ("element_bits", "hidden_zero_bits", "high_zero_bits"))
    dtype = str(row["dtype"])
    if low >= width:
        return width, 0, "", "all elements are zero"
    if not mantissa:
        return _integer(dtype, width, low, high)
    unused = min(low, mantissa)
    used = mantissa - unused
    finding = f"{used} of {mantissa} mantissa bits are used"
    for narrower, bits, is_exact in _NARROWER.get(dtype, ()):
        if used <= bits:
            return unused, used, narrower, f"{finding}: as {narrower}" + ("" if is_exact else " if in its range")
    return unused, used, "", finding


def _integer(dtype: str, width: int, low: int, high: int) -> tuple[int, int, str, str]:
    used = width - low - high
    finding = f"{used} of {width} bits are used"
    if dtype == "bool":  # has no narrower type, and every one would be a finding
        return 0, used, "", finding
    for narrower in _WIDTHS:
        if width - high <= narrower < width:
            return low + high, used, f"uint{narrower}", f"{finding}: as uint{narrower}"
    # The sign of non-negative integers is no finding.
    return (low + high if low or high > 1 else 0), used, "", finding


def by_threshold(savings: pd.DataFrame, *, method: str = "paper", chunk_bits: int | None = None) -> pd.DataFrame:
    """Saving of each tensor by threshold, with chunks of one width; default, of each tensor the one that saves most.

    Columns: file, tensor, label, chunk_bits, threshold, saving_frac, by_column_frac (the best set of bits for each
    column, the same in all rows of a tensor; empty if it was not tried).
    """
    table = savings[savings["method"] == method]
    if chunk_bits is None:
        chosen = best(table)[[*KEYS, "chunk_bits"]]
        table = table.merge(chosen, on=[*KEYS, "chunk_bits"])
    else:
        table = table[table["chunk_bits"] == chunk_bits]
    free = table[table["threshold"].isna()].groupby(KEYS)["saving_frac"].max().rename("by_column_frac")
    table = table[table["threshold"].notna()].merge(free, left_on=KEYS, right_index=True, how="left")
    table = table.assign(label=labels(table)).sort_values([*KEYS, "threshold"], ignore_index=True)
    return table[[*KEYS, "label", "chunk_bits", "threshold", "saving_frac", "by_column_frac"]]


def effective(savings: pd.DataFrame) -> pd.DataFrame:
    """What is left of each tensor's best saving when rows are read in pieces of 32 and 128 bytes; short rows first.

    Columns: file, tensor, label, row_bytes, saving_frac, effective_32_frac, effective_128_frac.
    """
    table = best(savings)
    table = table.assign(label=labels(table), row_bytes=table["raw_bytes"] // table["n_rows"].clip(lower=1))
    table = table.sort_values(["row_bytes", *KEYS], ignore_index=True)
    return table[[*KEYS, "label", "row_bytes", "saving_frac", "effective_32_frac", "effective_128_frac"]]


def granularity(savings: Sequence[float], row_bytes: Sequence[int] = ROW_BYTES) -> pd.DataFrame:
    """What is left of a saving where every row shrinks alike and begins at a piece of 32 or 128 bytes.

    Columns: saving_frac, row_bytes, piece_bytes, effective_frac.
    """
    table = pd.MultiIndex.from_product(
        [savings, row_bytes, (32, 128)], names=["saving_frac", "row_bytes", "piece_bytes"]
    ).to_frame(index=False)
    packed = np.ceil(table["row_bytes"] * (1 - table["saving_frac"]).round(12))
    before, after = (np.ceil(size / table["piece_bytes"]) for size in (table["row_bytes"], packed))
    return table.assign(effective_frac=1 - after / before)
