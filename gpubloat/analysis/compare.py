"""Measured numbers beside published ones: the only place where the two meet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from gpubloat.errors import GpubloatError

# unit -> what it measures, and how many base units it is. MB and GB are decimal; a unit not listed only meets itself.
UNITS: dict[str, tuple[str, float]] = {
    "frac": ("share", 1.0), "ratio": ("share", 1.0), "percent": ("share", 0.01),
    "bytes": ("size", 1.0), "MB": ("size", 1e6), "GB": ("size", 1e9), "MiB": ("size", 2.0**20),
    "GiB": ("size", 2.0**30), "us": ("time", 1e-6), "ms": ("time", 1e-3), "s": ("time", 1.0), "min": ("time", 60.0),
    "mJ": ("energy", 1e-3), "j": ("energy", 1.0), "J": ("energy", 1.0), "w": ("power", 1.0), "W": ("power", 1.0),
}  # fmt: skip
SUFFIXES = ("bytes", "frac", "us", "s", "j", "w")
COLUMNS = ["subject", "quantity", "unit", "measured", "published", "lower", "upper", "within", "ratio", "status"]


def beside(measured: pd.DataFrame, published: pd.DataFrame, *, on: Sequence[str], conditions: str) -> pd.DataFrame:
    """One row per published number, with the measured one beside it, both in the published unit.

    Parameters
    ----------
    measured : columns `subject`, `quantity`, `value`, `unit`. A quantity named like a column of a gpubloat table needs
        no unit: where `unit` is empty and the name ends in ``_bytes _frac _us _s _j`` or ``_w``, that suffix is the
        unit and the rest is the quantity (``file_reduction_frac`` is ``file_reduction`` in ``frac``); ``n_`` counts.
    published : rows of `gpubloat.published.load`.
    on : columns that say which rows belong together, such as ``["subject", "quantity"]``; rows only meet if their
        units measure the same thing, so a reduction in percent never meets one in MB.
    conditions : what differs between the two (GPU, versions); one text, repeated in every row.

    Returns
    -------
    DataFrame with `measured` empty where nothing was measured; measured rows without a published one are left out.
    `within` says if the measured value lies between `lower` and `upper`, ends included, and is empty where neither
    is known or nothing was measured. `ratio` is measured / published.

    Examples
    --------
    >>> ours = pd.DataFrame({"subject": ["a"], "quantity": ["saving_frac"], "value": [0.5], "unit": [""]})
    >>> theirs = pd.DataFrame({"subject": ["a"], "quantity": ["saving"], "unit": ["percent"], "value": [40.0],
    ...                        "lower": [float("nan")], "upper": [55.0], "status": ["stated"]})
    >>> beside(ours, theirs, on=["subject", "quantity"], conditions="H200, not T4")[["measured", "within", "ratio"]]
       measured  within  ratio
    0      50.0    True   1.25
    """
    if not conditions.strip():
        raise GpubloatError("a comparison names no conditions", "say what differs: the GPU, the versions")
    keys = [*on, "_kind"]
    left = published.assign(_kind=published["unit"].map(_kind)).rename(columns={"value": "published"})
    right = _in_base_units(measured)
    if right.duplicated(keys).any():
        twice = right.loc[right.duplicated(keys), list(on)].iloc[0].to_dict()
        raise GpubloatError(f"measured twice: {twice}", "give `on` more columns, or reduce the measured rows first")
    table = left.merge(right[[*keys, "_base"]], on=keys, how="left", validate="many_to_one")
    table["measured"] = table["_base"] / table["unit"].map(_factor).astype(float)
    known = table["measured"].notna() & (table["lower"].notna() | table["upper"].notna())
    # Rounding away the last bits: 0.55 in percent is 55.00000000000001, and must not miss a bound of 55.
    value = table["measured"].round(9)
    inside = ~(value < table["lower"]) & ~(value > table["upper"])  # an open end compares false, so it never excludes
    table["within"] = inside.astype("boolean").where(known)
    table["ratio"] = table["measured"] / table["published"].where(table["published"] != 0, np.nan)
    return table[COLUMNS].assign(conditions=conditions)


def _kind(unit: str) -> str:
    return UNITS[unit][0] if unit in UNITS else unit


def _factor(unit: str) -> float:
    return UNITS[unit][1] if unit in UNITS else 1.0


def _in_base_units(measured: pd.DataFrame) -> pd.DataFrame:
    table = measured.copy()
    suffix = table["quantity"].str.extract(f"_({'|'.join(SUFFIXES)})$", expand=False)
    counted = table["quantity"].str.startswith("n_") & (table["unit"] == "")
    named = suffix.notna() & (table["unit"] == "") & ~counted
    table["unit"] = table["unit"].where(~named, suffix).mask(counted, "count")
    table["quantity"] = table["quantity"].where(~named, table["quantity"].str.replace(r"_[a-z]+$", "", regex=True))
    factor = table["unit"].map(_factor).astype(float)  # an empty table maps to text
    return table.assign(_kind=table["unit"].map(_kind), _base=table["value"] * factor)


def known(table: pd.DataFrame) -> pd.DataFrame:
    """For reading: rows of `beside` with a number on either side, without `status` and the repeated `conditions`."""
    rows = table.dropna(subset=["measured", "published"], how="all")
    return rows.drop(columns=["status", "conditions"]).reset_index(drop=True)
