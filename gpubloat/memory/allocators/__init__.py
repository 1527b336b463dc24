"""Models of allocators, by name."""

from __future__ import annotations

from typing import Any

from gpubloat.errors import GpubloatError
from gpubloat.memory.allocators.base import Allocator, Driver, Segment
from gpubloat.memory.allocators.caching import Caching
from gpubloat.memory.allocators.expandable import Expandable
from gpubloat.memory.allocators.native import Native
from gpubloat.memory.allocators.settings import Settings, settings

NAMES = ("native", "caching", "expandable")

__all__ = ["NAMES", "Allocator", "Caching", "Driver", "Expandable", "Native", "Segment", "Settings", "make", "settings"]


def make(name: str, driver: Driver, given: Settings | None = None) -> Allocator:
    """The model `name`. GpubloatError lists the names there are."""
    if name == "native":
        return Native(driver)
    if name == "caching":
        return Caching(driver, given)
    if name == "expandable":
        return Expandable(driver, given)
    raise GpubloatError(f"no allocator {name!r}", f"known: {', '.join(NAMES)}")


def choose(name: str, wanted: dict[str, Any]) -> tuple[str, Settings]:
    """Name and settings of a model; ``caching`` with expandable_segments=True is ``expandable``."""
    if name not in NAMES:
        raise GpubloatError(f"no allocator {name!r}", f"known: {', '.join(NAMES)}")
    if name == "native" and wanted:
        raise GpubloatError(f"native has no setting {next(iter(wanted))!r}")
    try:
        chosen = settings(**({"expandable_segments": name == "expandable"} | wanted))
    except TypeError:
        known = ", ".join(settings.__kwdefaults__ or ())
        raise GpubloatError(f"{name} has no such setting: {', '.join(wanted)}", f"known: {known}") from None
    if name != "native":
        name = "expandable" if chosen.expandable_segments else "caching"
    return name, chosen
