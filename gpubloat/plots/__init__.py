"""A table and axes in, axes out. A module is loaded when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["debloat", "energy", "libraries", "memory", "rates", "style", "tensors", "training"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f"gpubloat.plots.{name}")
    raise AttributeError(f"module 'gpubloat.plots' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
