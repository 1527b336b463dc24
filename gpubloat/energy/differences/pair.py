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
from gpubloat.energy.capture import Capture, capture
from gpubloat.energy.capture.torchops import randomness_restored
from gpubloat.energy.capture.torchvalues import tensors_in
from gpubloat.energy.compare import Comparison, compare, null
from gpubloat.energy.engines import Engine, Work
from gpubloat.energy.match.outputs import Outputs, outputs
from gpubloat.energy.match.regions import Matching
from gpubloat.energy.match.repeats import once
from gpubloat.energy.match.values import Values
from gpubloat.energy.meter import Meter, NotMeasured
from gpubloat.energy.progress import Told, silent
from gpubloat.energy.statistics import UNKNOWN, Verdict
from gpubloat.energy.timing import Timing


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
        """None where outputs are equal but hold no number, so that nothing can be told by them."""
        if not self.matching.outputs_equal or not all(found.are_equal for found in self.compiled_outputs.values()):
            return False
        values = (self.captures[0].value(tensor) for tensor in self.captures[0].outputs)
        return any(value is None or bool(np.isfinite(once(value)).any()) for value in values) or None

    @cached_property
    def compiled_outputs(self) -> dict[int, Outputs]:
        """Side -> what it returned as it was captured, beside what its compiled code returns; of compiled sides only.

        A function that changes what it is given is left out: called once more, it returns something else anyhow.
        """
        found = {}
        for side, own in enumerate(self.captures):
            if own.is_compiled and not self.changes_inputs(side):
                with randomness_restored():
                    returned = list(tensors_in(self.fns[side]()))
                with capture(lambda *given: given, *returned) as real:
                    found[side] = outputs(Values(own), Values(real), self.tolerance)
        return found

    @property
    def output_errors(self) -> list[float]:
        """Relative errors of all outputs that could be compared."""
        pairs = [
            *self.matching.outputs.pairs,
            *(one for found in self.compiled_outputs.values() for one in found.pairs),
        ]
        return [one.error for one in pairs if not math.isnan(one.error)]

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
        devices = [tensor.device for tensor in self.captures[0].tensors.values()]
        on_gpu = self.meter is not None or any(device.startswith("cuda") for device in devices)
        return _hosts(self.whole) if self.whole is not None and on_gpu else None

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
        return {"n_blocks": self.n_blocks, "seconds": self.seconds, "idle": self.idle, "told": self.told}


def _hosts(whole: Comparison) -> tuple[float, float] | None:
    return None if whole.a.host_s is None or whole.b.host_s is None else (whole.a.host_s, whole.b.host_s)
