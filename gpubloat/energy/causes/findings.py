"""What a rule finds on one side, and what is reported of it."""

from __future__ import annotations

from dataclasses import dataclass

from gpubloat.energy.capture.records import Line, Op
from gpubloat.energy.causes.switches import Switch

KINDS = (
    "extra copy", "host fallback", "unfused chain", "layout", "precision", "redundant rows", "kernel choice",
    "input data", "host wait", "unknown",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """kind : one of `KINDS`. slow_op, fast_op : where the sides differ first, for the lines.

    us : microseconds of the difference that it would explain, measured or guessed. strength : 0 to 1, how surely the
    facts mean this. is_host : about time of the host, so that the GPU's does not count.
    """

    kind: str
    evidence: str
    remedy: str
    slow_op: Op | None
    fast_op: Op | None
    us: float
    strength: float
    switch: Switch | None = None
    is_host: bool = False


@dataclass(frozen=True)
class Cause:
    """Why two sides differ. side : "a" or "b", whose work is the excess; "" if neither's.

    evidence : a sentence with numbers. a_line, b_line : first lines of the users' code that differ.
    remedy : a sentence. switch : a setting that does it. confidence : 0 to 1. also : other causes, likeliest first.
    """

    kind: str
    evidence: str
    a_line: Line | None
    b_line: Line | None
    remedy: str
    switch: Switch | None = None
    confidence: float = 0.0
    side: str = ""
    also: tuple[Cause, ...] = ()
