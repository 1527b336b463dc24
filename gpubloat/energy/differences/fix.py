"""The fix of a difference, measured: a setting under which the wasteful side runs again, or the other side as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpubloat.energy.capture import capture
from gpubloat.energy.causes import Cause, Switch
from gpubloat.energy.compare import Comparison
from gpubloat.energy.differences.pair import Pair
from gpubloat.energy.engines import IN_A_GRAPH
from gpubloat.energy.match.regions import match
from gpubloat.energy.statistics import NO_DIFFERENCE, UNKNOWN, Saved
from gpubloat.errors import DeviceError, GpubloatError, sentence


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
    """Measure the wasteful side with the cause's setting; without one that saves energy, the other side in its place.

    Nothing is measured where nothing differs, where no energy is known, past the deadline, or of functions that do not
    compute the same.
    """
    whole = pair.whole
    if cause is None or pair.said.verdict in (NO_DIFFERENCE, UNKNOWN):
        return Fix("")
    if whole is None or not isinstance(whole.saved, Saved):
        return Fix("")
    if cause.kind in ("unknown", "input data") and not pair.outputs_equal:
        return Fix("")
    if not pair.has_time:
        return Fix("", notes=["no fix was measured: the deadline was reached"])
    slow = "AB".index(whole.saved.wasteful)
    switch = cause.switch
    tried = Fix("") if switch is None or switch.setter is None else _switched(pair, slow, switch)
    if tried.saved is not None or not pair.has_time:
        return tried
    found = pair.compare(pair.fns[slow], pair.fns[1 - slow], "the fix")
    return _judged(pair, f"{'BA'[slow]} in place of {'AB'[slow]}", found, tried.notes)


def _switched(pair: Pair, slow: int, switch: Switch) -> Fix:
    """Set once for many calls, as a user would: what the setting itself takes, such as a copy, is hardly counted."""
    fn, args = pair.fns[slow], pair.args[slow]
    assert pair.whole is not None
    in_a_graph = (pair.whole.a, pair.whole.b)[slow].how == IN_A_GRAPH

    def fixed() -> Any:
        with switch.on(*args):
            return fn()

    notes = [] if _is_equal(pair, slow, fixed) else [f"with {switch.setting} the outputs differ"]
    try:
        work = pair.engine.prepared(fn, in_a_graph, lambda: switch.on(*args))
        found = pair.compare(fn, work, "the setting")
    except DeviceError:
        raise
    except Exception as error:  # of PyTorch: no backend can do this; or of the function, which did not expect it
        return Fix("", notes=[f"{switch.setting} cannot be used: {sentence(error)}"])
    return _judged(pair, switch.setting, found, notes)


def _is_equal(pair: Pair, slow: int, fixed: Callable[[], Any]) -> bool:
    """Of a function that changes what it is given nothing can be told by calling it twice."""
    if pair.changes_inputs(slow):
        return True
    try:
        with capture(pair.fns[slow]) as before, capture(fixed) as after:
            return match(before, after, None, pair.tolerance).outputs_equal
    except GpubloatError:
        return False


def _judged(pair: Pair, name: str, found: Comparison, notes: list[str]) -> Fix:
    """What saves no more than A against A differs by is no fix: it is told in a note."""
    if not isinstance(found.saved, Saved):
        return Fix("", notes=[*notes, f"{name} was tried, but its energy is {found.saved}"])
    is_certain = found.saved.low_frac > (pair.band if isinstance(pair.band, float) else 0.0)
    if is_certain and found.saved.wasteful == "A":
        return Fix(name, found.saved, notes)
    return Fix("", notes=[*notes, f"{name} {'takes more energy, not less' if is_certain else 'saves nothing'}"])
