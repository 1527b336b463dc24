"""Tables in, tables out; no file, process or GPU is touched. A module is loaded when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = [
    "compare",
    "debloat",
    "diagnosis",
    "energy",
    "libraries",
    "memory",
    "pinning",
    "rates",
    "stacks",
    "tensors",
    "training",
    "usage",
    "whatif",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f"gpubloat.analysis.{name}")
    raise AttributeError(f"module 'gpubloat.analysis' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
