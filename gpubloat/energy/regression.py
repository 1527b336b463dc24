"""Whether a function takes more energy than another one that it replaces, as a test asks it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpubloat.energy.capture import capture
from gpubloat.energy.compare import Comparison, compare
from gpubloat.energy.engines import Engine, engine_for
from gpubloat.energy.measuring import opened_meter, used_device
from gpubloat.energy.meter import Meter
from gpubloat.energy.statistics import CLAIM, Saved
from gpubloat.errors import DeviceError, GpubloatError


@dataclass(frozen=True)
class Regression:
    """skipped : why nothing was measured, failed : by how much it is worse; both may be "". comparison : A is `fn`."""

    skipped: str = ""
    failed: str = ""
    comparison: Comparison | None = None


def regression(
    fn: Callable[..., Any],
    baseline: Callable[..., Any],
    *args: Any,
    most_frac: float = CLAIM,
    meter: Meter | None = None,
    engine: Engine | None = None,
    **options: Any,
) -> Regression:
    """Measure ``fn(*args)`` and ``baseline(*args)`` in blocks A B B A, 34 s by default.

    It fails where the baseline would surely save over `most_frac` of what `fn` takes: by the lower end of the 95 %
    interval.
    What is less than that is no difference that one comparison can tell.

    Parameters
    ----------
    meter, engine : as in `measuring.measure`. options : of `compare.compare`.

    Raises
    ------
    GpubloatError : a function fails or returns nothing; `most_frac` makes no sense.
    """
    if not 0 <= most_frac < 1:
        raise GpubloatError(f"most_frac is {most_frac}", "a share of 0 to 1, such as 0.05")
    with contextlib.ExitStack() as held:
        try:
            opened = opened_meter(meter, 0, held)
        except DeviceError as error:
            return Regression(skipped=f"energy is not measured: {error.message}")
        with capture(fn, *args) as captured:
            framework, device = captured.framework, used_device(captured)
        if engine is None and framework == "torch" and not device.startswith("cuda"):
            return Regression(skipped="energy is not measured: the function uses no GPU")
        found = compare(
            lambda: fn(*args), lambda: baseline(*args), opened, engine or engine_for(device, framework), **options
        )
    if not isinstance(found.saved, Saved):
        return Regression(skipped=f"energy is {found.saved}", comparison=found)
    if found.saved.wasteful == "B" or found.saved.low_frac <= most_frac:
        return Regression(comparison=found)
    said = (
        f"takes {_mj(found.a.call_j)} a call where the baseline takes {_mj(found.b.call_j)}: "
        f"{found.saved.saved_frac:.1%} of it would be saved (95 % interval {found.saved.low_frac:.1%} to "
        f"{found.saved.high_frac:.1%}, allowed {most_frac:.1%})"
    )
    return Regression(failed=said, comparison=found)


def _mj(joules: float | None) -> str:
    return "?" if joules is None else f"{1e3 * joules:.4g} mJ"
