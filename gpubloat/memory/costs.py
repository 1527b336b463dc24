"""What driver calls cost: a fixed time and one per handle, from measured calls.

A row of `calls` that stands for one call costs fixed + per_handle x n; one that stands for a call per handle costs the
same where only the sum was measured, except ``set_access_each``, n times what making one handle accessible costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from gpubloat.errors import GpubloatError
from gpubloat.tables.memory import CALLS

COLUMNS = ("call", "chunk_bytes", "n_handles", "time_us")
CHUNK = 2 << 20


@dataclass(frozen=True, slots=True)
class Costs:
    """Per call: (fixed, per handle), in microseconds. A call that is not there costs nothing."""

    us: Mapping[str, tuple[float, float]]
    source: str

    def of(self, call: pd.Series, n_handles: pd.Series) -> pd.Series:
        """Microseconds of each row, of its call and number of handles."""
        n = n_handles.astype("float64")
        fixed, each = (call.map({name: us[i] for name, us in self.us.items()}).astype("float64") for i in (0, 1))
        cost = fixed + each * n
        if "set_access_each" not in self.us and "set_access" in self.us:
            cost = cost.mask(call == "set_access_each", sum(self.us["set_access"]) * n)
        return cost.fillna(0.0)

    def record(self) -> dict[str, Any]:
        """For run.json: the constants, where they come from, and which calls count as nothing."""
        known = {*self.us} | ({"set_access_each"} if "set_access" in self.us else set())
        return {
            "source": self.source,
            "fixed_and_per_handle_us": {name: [float(f"{v:.6g}") for v in us] for name, us in self.us.items()},
            "not_measured": [name for name in CALLS if name not in known],
        }


# `fit` of data/measured/memory-h200-vmm (one H200 with no other process, 2 GiB in chunks of 2 MiB, no kernel running),
# rounded; reserve and address_free are one call whatever the number of handles.
CONSTANTS = Costs(
    {
        "malloc": (370.0, 0.0),
        "free": (630.0, 0.0),
        "reserve": (19.0, 0.0),
        "create": (0.0, 9.6),
        "map": (0.0, 2.1),
        "set_access": (0.0, 23.2),
        "set_access_each": (0.0, 25.2),
        "unmap": (0.0, 16.1),
        "release": (0.0, 10.6),
        "address_free": (29.0, 0.0),
    },
    "constants: one H200, 2 GiB in chunks of 2 MiB (memory-h200-vmm)",
)


def fit(table: pd.DataFrame, chunk_bytes: int = CHUNK) -> Costs:
    """Constants from measured calls.

    Parameters
    ----------
    table : columns call (a name of CALLS), chunk_bytes, n_handles, time_us; other names of calls are left out.
    chunk_bytes : handles of this size count; calls that were not measured with it, by their nearest size.

    Returns
    -------
    Costs: per call, the line with the least relative error, neither part below 0. Raises GpubloatError.
    """
    missing = [name for name in COLUMNS if name not in table.columns]
    if missing:
        raise GpubloatError(f"the table of costs lacks the column {missing[0]}", f"wanted: {', '.join(COLUMNS)}")
    found = {}
    for call, rows in table[table["call"].isin(CALLS)].groupby("call"):
        far = (rows["chunk_bytes"].astype("float64") - chunk_bytes).abs()
        rows = rows[far == far.min()]
        n, us = rows["n_handles"].to_numpy("float64"), rows["time_us"].to_numpy("float64")
        if not (np.isfinite(n).all() and np.isfinite(us).all() and (us > 0).all() and (n >= 0).all()):
            raise GpubloatError(f"the table of costs has no positive time for {call}")
        found[str(call)] = _line(n, us)
    if not found:
        raise GpubloatError("the table of costs has no call that is known", f"known: {', '.join(CALLS)}")
    return Costs(found, f"fitted to {len(table)} measured rows, chunks of {chunk_bytes} bytes")


def _line(n: np.ndarray[Any, Any], us: np.ndarray[Any, Any]) -> tuple[float, float]:
    """(fixed, per handle) with the least squares of relative errors; neither is negative."""
    if len(np.unique(n)) > 1:
        (fixed, each), *_ = np.linalg.lstsq(np.stack([1 / us, n / us], axis=1), np.ones(len(us)), rcond=None)
        if fixed >= 0 and each >= 0:
            return float(fixed), float(each)
        if each < 0:
            return _scale(1 / us), 0.0
        return 0.0, _scale(n / us)
    return (_scale(1 / us), 0.0) if n[0] <= 1 else (0.0, _scale(n / us))


def _scale(x: np.ndarray[Any, Any]) -> float:
    """The factor a with the least squares of a x - 1."""
    return float(x.sum() / (x * x).sum())
