"""Joules of GPU programs: which signals a card gives, how well they agree, and what a stretch of time cost.

Names are looked up when they are used: neither NVML nor PyTorch is loaded before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpubloat.energy.differences.flow import diff
    from gpubloat.energy.measuring import measure
    from gpubloat.energy.meter import open_meter
    from gpubloat.energy.probing import probe
    from gpubloat.energy.windows import window

# No module has the name of a function that is looked up here: importing the module would hide the function.
_FROM = {
    "differences.flow": ("diff",),
    "measuring": ("measure",),
    "meter": ("open_meter",),
    "probing": ("probe",),
    "windows": ("window",),
}
_MODULES = {name: module for module, names in _FROM.items() for name in names}

__all__ = ["diff", "measure", "open_meter", "probe", "window"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"gpubloat.energy.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'gpubloat.energy' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
