"""Declared schemas: what one row of each table is, and what each column means."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from gpubloat.errors import SchemaError

if TYPE_CHECKING:
    from gpubloat.tables.base import Table

INSTRUMENTS = ("libraries", "tensors", "memory", "energy")


def schema(instrument: str, name: str) -> type[Table]:
    """The schema of table `name` of `instrument`; SchemaError names the tables there are."""
    if instrument not in INSTRUMENTS:
        raise SchemaError(
            name, None, f"is asked of an unknown instrument {instrument!r}", f"known: {', '.join(INSTRUMENTS)}"
        )
    try:
        module = import_module(f"gpubloat.tables.{instrument}")
        declared: dict[str, type[Table]] = module.TABLES | getattr(module, "EXTRA_TABLES", {})
    except ModuleNotFoundError:
        declared = {}
    if name not in declared:
        known = ", ".join(declared) or "none yet"
        raise SchemaError(name, None, f"is no table of {instrument}", f"tables of {instrument}: {known}")
    return declared[name]
