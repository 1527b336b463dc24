"""Two functions that are compared, and what is known of them so far."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from gpubloat.energy import blocks as measured
from gpubloat.energy.blocks import Block
from gpubloat.energy.capture import Capture
from gpubloat.energy.compare import Comparison, compare, null
from gpubloat.energy.differences.compiled import Returned, returned
from gpubloat.energy.engines import Engine, Work
from gpubloat.energy.match.regions import Matching
from gpubloat.energy.match.repeats import once
from gpubloat.energy.meter import Meter, NotMeasured
from gpubloat.energy.progress import Told, silent
from gpubloat.energy.statistics import UNKNOWN, Saved, Verdict
from gpubloat.energy.timing import Timing

_MOST_S = 30.0  # of a comparison of times: functions of seconds are called a dozen times all the same


@dataclass
class Pair:
    """Both sides, and what is known of them so far.

    seconds, n_blocks : of each comparison. until_s : deadline on the engine's clock. told : hears what is being done.
    tolerance : of `match`. whole : comparison of the functions, `said` what it means. band : what A against A differs
    by. blocks : all that were measured.
    """

    fns: tuple[Callable[[], Any], Callable[[], Any]]
    args: tuple[tuple[Any, ...], tuple[Any, ...]]
    captures: tuple[Capture, Capture]
    matching: Matching
    engine: Engine
    meter: Meter | None
    seconds: float
    n_blocks: int
    until_s: float
    told: Told = silent
    tolerance: float | None = None
    timings: tuple[Timing | None, Timing | None] = (None, None)
    idle: Block | None = None
    band: float | NotMeasured = field(default_factory=lambda: NotMeasured("it was not measured"))
    whole: Comparison | None = None
    said: Verdict = field(default_factory=lambda: Verdict(UNKNOWN, "it was not measured"))
    blocks: list[Block] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def outputs_equal(self) -> bool | None:
        """None where outputs are equal but hold no number, or those of compiled code cannot be compared."""
        of_compiled = [found.are_equal for found in self.compiled]
        if not self.matching.outputs_equal or False in of_compiled:
            return False
        if None in of_compiled:
            return None
        values = (self.captures[0].value(tensor) for tensor in self.captures[0].outputs)
        return any(value is None or bool(np.isfinite(once(value)).any()) for value in values) or None

    @cached_property
    def compiled(self) -> tuple[Returned, ...]:
        """What the compiled code of a side returns; of compiled sides only."""
        sides = zip(self.fns, self.captures, "AB")
        return tuple(returned(fn, own, letter, self.tolerance) for fn, own, letter in sides if own.is_compiled)

    @property
    def output_errors(self) -> list[float]:
        """Relative errors of all outputs that could be compared."""
        of_pairs = [one.error for one in self.matching.outputs.pairs if not math.isnan(one.error)]
        return [*of_pairs, *(error for found in self.compiled for error in found.errors)]

    @property
    def compare_s(self) -> float:
        """What one comparison takes."""
        gap_s = measured.GAP_S if self.meter is not None else 0.0
        return 4 * self.n_blocks * (measured.SETTLE_S + self.seconds + gap_s) + 4.0

    @property
    def has_time(self) -> bool:
        return self.engine.clock.now() + self.compare_s <= self.until_s

    @property
    def hosts(self) -> tuple[float, float] | None:
        """CPU seconds per call of both, once the whole functions were compared; None where no GPU is measured or used.

        There the host computes, and its time is no waste beside another time.
        """
        on_gpu = self.meter is not None or self.is_on_gpu
        return _hosts(self.whole) if self.whole is not None and on_gpu else None

    @property
    def is_on_gpu(self) -> bool:
        return any(tensor.device.startswith("cuda") for tensor in self.captures[0].tensors.values())

    @property
    def is_by_time(self) -> bool:
        """Whether times have to tell which side is slow."""
        return self.whole is not None and not isinstance(self.whole.saved, Saved)

    def changes_inputs(self, side: int) -> bool:
        """Whether a function writes to what it is given: each call finds what the one before left."""
        own = self.captures[side]
        written = {own.tensors[tensor].storage for op in own.ops for tensor in op.writes}
        return bool(written & {own.tensors[tensor].storage for tensor in own.inputs})

    def compare(self, a: Callable[[], Any] | Work, b: Callable[[], Any] | Work, subject: str) -> Comparison:
        """As everything in this pair is compared; its blocks are kept."""
        found = compare(a, b, self.meter, self.engine, subject=subject, **self._how())
        self.blocks += found.blocks
        return found

    def null(self) -> Comparison:
        """A against itself; its blocks are kept."""
        found = null(self.fns[0], self.meter, self.engine, **self._how())
        self.blocks += found.blocks
        return found

    def _how(self) -> dict[str, Any]:
        most_s = _MOST_S if self.meter is None else None
        known = {"n_blocks": self.n_blocks, "seconds": self.seconds, "most_s": most_s}
        return known | {"idle": self.idle, "told": self.told}


def _hosts(whole: Comparison) -> tuple[float, float] | None:
    return None if whole.a.host_s is None or whole.b.host_s is None else (whole.a.host_s, whole.b.host_s)
