"""The fix of a difference, measured: a setting under which the wasteful side runs again, or the other side as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpubloat.energy.capture import capture
from gpubloat.energy.causes import Cause, Switch
from gpubloat.energy.compare import Comparison
from gpubloat.energy.differences.pair import Pair
from gpubloat.energy.match.regions import match
from gpubloat.energy.statistics import NO_DIFFERENCE, UNKNOWN, Saved
from gpubloat.errors import GpubloatError, sentence


@dataclass(frozen=True)
class Fix:
    """name : what was measured instead of the wasteful side; "" if nothing was. saved : by it."""

    name: str
    saved: Saved | None = None
    notes: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """Columns of table comparisons."""
        known = self.saved
        return {
            "fix": self.name,
            "fix_saved_frac": None if known is None else known.saved_frac,
            "fix_low_frac": None if known is None else known.low_frac,
            "fix_high_frac": None if known is None else known.high_frac,
        }


def fix(pair: Pair, cause: Cause | None) -> Fix:
    """Measure the wasteful side against itself with the cause's setting; without one, against the other side again.

    Nothing is measured where nothing differs, where no energy is known, or past the deadline.
    """
    whole = pair.whole
    if cause is None or pair.said.verdict in (NO_DIFFERENCE, UNKNOWN):
        return Fix("")
    if whole is None or not isinstance(whole.saved, Saved):
        return Fix("")
    if not pair.has_time:
        return Fix("", notes=["no fix was measured: the deadline was reached"])
    slow = "AB".index(whole.saved.wasteful)
    if cause.switch is not None and cause.switch.setter is not None:
        return _switched(pair, slow, cause.switch)
    found = pair.compare(pair.fns[slow], pair.fns[1 - slow], "the fix")
    return _judged(f"{'BA'[slow]} in place of {'AB'[slow]}", found, [])


def _switched(pair: Pair, slow: int, switch: Switch) -> Fix:
    fn, args = pair.fns[slow], pair.args[slow]

    def fixed() -> Any:
        with switch.on(*args):
            return fn()

    notes = [] if _is_equal(fn, fixed) else [f"with {switch.setting} the outputs differ"]
    try:
        found = pair.compare(fn, fixed, "the fix")
    except RuntimeError as error:  # of PyTorch: no backend can do this, or the build lacks it
        return Fix("", notes=[f"{switch.setting} cannot be used: {sentence(error)}"])
    return _judged(switch.setting, found, notes)


def _is_equal(fn: Callable[[], Any], fixed: Callable[[], Any]) -> bool:
    try:
        with capture(fn) as before, capture(fixed) as after:
            return match(before, after).outputs_equal
    except GpubloatError:
        return False


def _judged(name: str, found: Comparison, notes: list[str]) -> Fix:
    saved = found.saved if isinstance(found.saved, Saved) else None
    if saved is not None and saved.wasteful == "B":
        notes = [*notes, f"{name} takes more energy, not less"]
        saved = None
    return Fix(name, saved, notes)
