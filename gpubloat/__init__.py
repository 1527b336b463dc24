"""gpubloat: where a GPU's bytes and joules go.

Four instruments: `libraries` (code that no run uses), `tensors` (bits that never change), `memory` (GPU memory reserved
and unusable), `energy` (joules spent by one of two equal operators). `analysis` and `plots` work on their tables.
Importing gpubloat loads none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "analysis", "energy", "libraries", "memory", "plots", "published", "tables", "tensors"]


def __getattr__(name: str) -> Any:
    if name == "Run":
        return import_module("gpubloat.run").Run
    if name in __all__:
        return import_module(f"gpubloat.{name}")
    raise AttributeError(f"module 'gpubloat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
