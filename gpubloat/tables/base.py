"""How a table is declared and checked: a pandera model per table, one row = one thing, said in its docstring."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pandera.pandas as pa
from pandera.errors import SchemaErrors

from gpubloat.errors import SchemaError

# Suffixes of column names, and the unit that each stands for.
UNITS = {"bytes": "bytes", "bits": "bits", "s": "s", "us": "µs", "j": "J", "w": "W", "frac": "fraction, 0 to 1"}


def column(meaning: str, **checks: Any) -> Any:
    """Declare a column: what it means, with the unit, and pandera's checks (``ge=0``, ``nullable=True``...)."""
    return pa.Field(description=meaning, **checks)


class Table(pa.DataFrameModel):  # type: ignore[misc]
    """Base of all schemas. The docstring of a subclass says what one row is."""

    class Config:
        strict = True
        coerce = True

    @classmethod
    def check(cls, frame: pd.DataFrame, name: str) -> pd.DataFrame:
        """Return `frame` with the declared column order and dtypes, or raise SchemaError."""
        columns = list(cls.to_schema().columns)
        missing = [c for c in columns if c not in frame.columns]
        extra = [c for c in frame.columns if c not in columns]
        if missing or extra:
            raise SchemaError(name, (missing or extra)[0], "is missing" if missing else "is not in the schema")
        try:
            checked: pd.DataFrame = cls.validate(frame[columns], lazy=True)
        except SchemaErrors as error:
            case = error.failure_cases.iloc[0]
            rows = len(error.failure_cases)
            raise SchemaError(
                name, str(case["column"]), f"fails {case['check']} with {case['failure_case']!r} ({rows} such values)"
            ) from None
        return checked

    @classmethod
    def none(cls) -> pd.DataFrame:
        """The empty table, with its columns and dtypes."""
        frame = pd.DataFrame({c: pd.Series([], dtype=object) for c in cls.to_schema().columns})
        empty: pd.DataFrame = cls.validate(frame)
        return empty

    @classmethod
    def describe(cls) -> pd.DataFrame:
        """One row per column: name, dtype, unit (by the suffix of the name), whether it may be empty, meaning."""
        rows = [
            (name, str(c.dtype), UNITS.get(name.rpartition("_")[2], ""), c.nullable, c.description)
            for name, c in cls.to_schema().columns.items()
        ]
        return pd.DataFrame(rows, columns=["column", "dtype", "unit", "nullable", "meaning"])
