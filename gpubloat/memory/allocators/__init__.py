"""Models of allocators, by name."""

from __future__ import annotations

from typing import Any

from gpubloat.errors import GpubloatError
from gpubloat.memory.allocators import bfc, gmlake, pieces
from gpubloat.memory.allocators.base import Allocator, Driver, Segment
from gpubloat.memory.allocators.bfc import Bfc, BfcSettings
from gpubloat.memory.allocators.caching import Caching
from gpubloat.memory.allocators.expandable import Expandable
from gpubloat.memory.allocators.gmlake import Gmlake, GmlakeSettings
from gpubloat.memory.allocators.native import Native
from gpubloat.memory.allocators.pieces import StitchingSettings
from gpubloat.memory.allocators.settings import Settings, lint, settings
from gpubloat.memory.allocators.stitching import Stitching

NAMES = ("native", "bfc", "caching", "expandable", "stitching", "gmlake")
AnySettings = Settings | BfcSettings | StitchingSettings | GmlakeSettings
# What makes the settings of a model from what a user gives.
_SETTINGS: dict[str, Any] = {
    "bfc": bfc.settings,
    "caching": settings,
    "expandable": settings,
    "stitching": pieces.settings,
    "gmlake": gmlake.settings,
}

__all__ = [
    "NAMES",
    "Allocator",
    "AnySettings",
    "Bfc",
    "Caching",
    "Driver",
    "Expandable",
    "Gmlake",
    "Native",
    "Segment",
    "Settings",
    "Stitching",
    "choose",
    "lint",
    "make",
    "settings",
]


def make(name: str, driver: Driver, given: AnySettings | None = None) -> Allocator:
    """The model `name` with settings of `choose`. GpubloatError lists the names there are."""
    known(name)
    if name == "bfc":
        return Bfc(driver, given if isinstance(given, BfcSettings) else None)
    if name == "stitching":
        return Stitching(driver, given if isinstance(given, StitchingSettings) else None)
    if name == "gmlake":
        return Gmlake(driver, given if isinstance(given, GmlakeSettings) else None)
    if name == "native":
        return Native(driver)
    model = Caching if name == "caching" else Expandable
    return model(driver, given if isinstance(given, Settings) else None)


def choose(name: str, wanted: dict[str, Any]) -> tuple[str, AnySettings]:
    """Name and settings of a model; ``caching`` with expandable_segments=True is ``expandable``."""
    known(name)
    if name == "native":
        if wanted:
            raise GpubloatError(f"native has no setting {next(iter(wanted))!r}")
        return name, Settings()
    made = _SETTINGS[name]
    names = list(made.__kwdefaults__)
    for given in wanted:
        if given not in names:
            raise GpubloatError(f"{name} has no setting {given!r}", f"known: {', '.join(names)}")
    if made is not settings:
        return name, made(**wanted)
    chosen = settings(**({"expandable_segments": name == "expandable"} | wanted))
    return "expandable" if chosen.expandable_segments else "caching", chosen


def known(name: str) -> None:
    """Raises GpubloatError where there is no model of this name."""
    if name not in NAMES:
        raise GpubloatError(f"no allocator {name!r}", f"known: {', '.join(NAMES)}")
