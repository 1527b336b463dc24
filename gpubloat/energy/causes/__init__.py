"""Why two sides of a difference take different energy: `causes`, and the settings that may close the gap."""

from __future__ import annotations

from gpubloat.energy.causes.classify import causes
from gpubloat.energy.causes.findings import KINDS, Cause
from gpubloat.energy.causes.switches import Switch, applying, closing, sweep

__all__ = ["KINDS", "Cause", "Switch", "applying", "causes", "closing", "sweep"]
