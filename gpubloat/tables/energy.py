"""Tables of the `energy` instrument.

Energies are those of the whole board unless a column says otherwise. What was not measured is empty, never 0, and
`notes` says why. Further tables of the instrument have their schemas in this file, too: add them to TABLES.
"""

from __future__ import annotations

import pandas as pd
from pandera.typing import Series

from gpubloat.tables.base import Table, column

SIDES = ("A", "B")
VERDICTS = ("waste", "trade-off", "no difference", "not measured")


class Signals(Table):
    """One row = one signal of a GPU."""

    signal: Series[str] = column("name of the signal; counters are in mJ, powers in W")
    is_answering: Series[bool] = column("whether it gives a value")
    period_s: Series[float] = column("median distance of its changes; empty if too few were seen", nullable=True, gt=0)
    call_s: Series[float] = column("median time of a call", nullable=True, ge=0)
    rise_s: Series[float] = column(
        "from the start of a load to 90 % of its step; empty for what is no power", nullable=True, ge=0
    )
    resolution: Series[float] = column("smallest change seen, in the signal's unit", nullable=True, gt=0)
    notes: Series[str] = column("why it does not answer, or what it is; may be empty")


class Loads(Table):
    """One row = one load of the probe, held for some seconds, and what each signal says of its second half."""

    load: Series[str] = column("idle (with a context), product, copy, or a square wave of both")
    repeat: Series[int] = column("number of its repetition, from 0", ge=0)
    seconds_s: Series[float] = column("length of the part that is measured", ge=0)
    n_ticks: Series[int] = column("changes of the counter that were used", ge=0)
    slope_w: Series[float] = column("power by the counter's slope; empty if not measured", nullable=True, ge=0)
    slope_error_w: Series[float] = column("half of its 95 % interval", nullable=True, ge=0)
    instant_w: Series[float] = column("mean of the instant power", nullable=True, ge=0)
    average_w: Series[float] = column("mean of the 1-s mean", nullable=True, ge=0)
    agreement_frac: Series[float] = column(
        "largest difference of the two means from the slope, relative to them", nullable=True, ge=0
    )
    is_steady: Series[bool] = column("instant power scatters by 3 % of its mean at most")
    sm_mhz: Series[float] = column("median clock of the SMs", nullable=True, ge=0)
    temperature_c: Series[float] = column("mean temperature of the GPU, degrees Celsius", nullable=True)
    throttle_bits: Series[pd.Int64Dtype] = column("all reasons that held clocks down, NVML's mask", nullable=True, ge=0)
    notes: Series[str] = column("why something is empty; may be empty")


class Samples(Table):
    """One row = one reading of a meter; empty where a signal did not answer."""

    part: Series[str] = column("what was going on: a load of the probe and its repetition, or a block")
    t_s: Series[float] = column("middle of the call that read the counter, from the start of the recording")
    call_s: Series[float] = column("length of that call", ge=0)
    counter_mj: Series[float] = column("energy since the driver was loaded, mJ", nullable=True, ge=0)
    instant_w: Series[float] = column("power", nullable=True, ge=0)
    average_w: Series[float] = column("power, mean over about a second", nullable=True, ge=0)
    sm_mhz: Series[float] = column("clock of the SMs", nullable=True, ge=0)
    temperature_c: Series[float] = column("temperature of the GPU, degrees Celsius", nullable=True)
    throttle_bits: Series[float] = column("why clocks are held down, NVML's mask", nullable=True, ge=0)


class Blocks(Table):
    """One row = one measured block: one side of one subject, run again and again for some seconds."""

    subject: Series[str] = column("what is measured: a region, an operator, a whole step")
    side: Series[str] = column("A or B", isin=list(SIDES))
    order: Series[int] = column("place in the order of measuring, from 0: A B B A, A B B A...", ge=0)
    seconds_s: Series[float] = column("length of the part that is measured", ge=0)
    n_calls: Series[int] = column("calls in it", ge=0)
    energy_j: Series[float] = column("of the part; empty if not measured", nullable=True, gt=0)
    error_j: Series[float] = column("half of its 95 % interval", nullable=True, ge=0)
    power_w: Series[float] = column("by the counter's slope", nullable=True, gt=0)
    call_time_s: Series[float] = column("time of one call", nullable=True, gt=0)
    sm_mhz: Series[float] = column("median clock of the SMs", nullable=True, ge=0)
    temperature_c: Series[float] = column("mean temperature of the GPU, degrees Celsius", nullable=True)
    throttle_bits: Series[pd.Int64Dtype] = column("all reasons that held clocks down, NVML's mask", nullable=True, ge=0)
    notes: Series[str] = column("why something is empty; may be empty")


class Operators(Table):
    """One row = one group of identical operators of one side: measured once, counted as often as they ran.

    Identical: name, arguments, shapes, strides, types and device. The inputs are those of the first of them.
    `step_j` is `n_same` times `call_j`, exactly; their sum and closure's remainder are the energy of the step.
    """

    subject: Series[str] = column("what is measured: the function")
    side: Series[str] = column("A or B", isin=list(SIDES))
    operator: Series[int] = column("number of the first of the group, in the order in which operators ran", ge=0)
    name: Series[str] = column("name of the operator")
    arguments: Series[str] = column("of the first, tensors as type and shape, shortened")
    module: Series[str] = column("path of the module that the first ran in; may be empty")
    line: Series[str] = column("file:line function of the user's innermost frame; may be empty")
    n_same: Series[int] = column("operators of the group in one step", ge=1)
    kernels: Series[str] = column("names of the first's kernels, shortened, joined by +; empty if not known")
    call_time_s: Series[float] = column(
        "of one call: of its replay if it was replayed, else of the timing pass", nullable=True, ge=0
    )
    step_time_s: Series[float] = column(
        "of the whole group in one step, by the timing pass: inputs may be in a cache", nullable=True, ge=0
    )
    call_j: Series[float] = column("energy of one call; empty if not measured", nullable=True, gt=0)
    error_j: Series[float] = column("half of its 95 % interval", nullable=True, ge=0)
    active_j: Series[float] = column("call_j without what an idle GPU takes in the same time", nullable=True)
    step_j: Series[float] = column("energy of the group in one step", nullable=True, gt=0)
    step_frac: Series[float] = column("share of the energy of the step", nullable=True, gt=0)
    method: Series[str] = column("replayed in a graph, replayed eagerly, no kernel, or not replayed: why")
    notes: Series[str] = column("what else is to be known; may be empty")


class Closure(Table):
    """One row = one step measured whole, and what its operators sum to. operators_j + remainder_j = step_j, exactly."""

    subject: Series[str] = column("what is measured: the function")
    side: Series[str] = column("A or B", isin=list(SIDES))
    step_time_s: Series[float] = column("time of one call of the function, as it is called", nullable=True, gt=0)
    step_j: Series[float] = column("its energy; empty if not measured", nullable=True, gt=0)
    error_j: Series[float] = column("half of its 95 % interval", nullable=True, ge=0)
    operators_j: Series[float] = column("sum of the operators that were measured", nullable=True, ge=0)
    remainder_j: Series[float] = column(
        "the rest: not in kernels, and operators not measured; negative if replays took more than the step",
        nullable=True,
    )  # fmt: skip
    waiting_j: Series[float] = column(
        "of the remainder: what an idle GPU takes in the time of the step in which no kernel runs, an estimate; empty "
        "if times are not known",
        nullable=True, ge=0,
    )  # fmt: skip
    n_operators: Series[int] = column("operators of the step that do work", ge=0)
    n_not_measured: Series[int] = column("of those, without an energy", ge=0)
    not_measured_time_frac: Series[float] = column(
        "share of the time of all kernels that belongs to no measured operator; empty if times are not known",
        nullable=True, ge=0, le=1,
    )  # fmt: skip
    idle_w: Series[float] = column("power of the idle GPU, with a context", nullable=True, gt=0)
    notes: Series[str] = column("why something is empty; may be empty")


class Regions(Table):
    """One row = one pair of regions of a diff: operators of A and of B between tensors that were matched."""

    subject: Series[str] = column("what is compared")
    region: Series[int] = column("number, in the order of the program", ge=0)
    is_same: Series[bool] = column("the same operators on both sides: not measured")
    a_operators: Series[str] = column("names of A's, joined by +")
    b_operators: Series[str] = column("names of B's, joined by +")
    a_line: Series[str] = column("file:line function of A; may be empty")
    b_line: Series[str] = column("the same of B; may be empty")
    a_time_s: Series[float] = column("of A's operators in one call", nullable=True, ge=0)
    b_time_s: Series[float] = column("the same of B", nullable=True, ge=0)
    a_call_j: Series[float] = column("energy of A's operators in one call; empty if not measured", nullable=True, gt=0)
    b_call_j: Series[float] = column("the same of B", nullable=True, gt=0)
    saved_frac: Series[float] = column("1 - E_fast / E_slow; empty if not measured", nullable=True, ge=0, le=1)
    low_frac: Series[float] = column("lower end of its 95 % interval", nullable=True, le=1)
    high_frac: Series[float] = column("upper end", nullable=True, ge=0, le=1)
    wasteful: Series[str] = column("the side that takes more: A, B, or empty", isin=[*SIDES, ""])
    verdict: Series[str] = column("what may be said", isin=list(VERDICTS))
    reason: Series[str] = column("why, one clause")
    cause: Series[str] = column("class of the cause; may be empty")
    evidence: Series[str] = column("what the cause was seen by; may be empty")
    remedy: Series[str] = column("switch or rewrite; may be empty")
    notes: Series[str] = column("what else is to be known; may be empty")


class Comparisons(Table):
    """One row = one diff of two functions."""

    subject: Series[str] = column("what is compared")
    case: Series[str] = column("number of the case; may be empty")
    framework: Series[str] = column("torch or jax")
    a: Series[str] = column("file:function")
    b: Series[str] = column("file:function")
    verdict: Series[str] = column("what may be said", isin=list(VERDICTS))
    reason: Series[str] = column("why, one clause")
    saved_frac: Series[float] = column("1 - E_fast / E_slow; empty if not measured", nullable=True, ge=0, le=1)
    low_frac: Series[float] = column("lower end of its 95 % interval", nullable=True, le=1)
    high_frac: Series[float] = column("upper end", nullable=True, ge=0, le=1)
    wasteful: Series[str] = column("the side that takes more: A, B, or empty", isin=[*SIDES, ""])
    time_ratio: Series[float] = column(
        "time of the side that takes less energy over the other's; B over A if energies are not known",
        nullable=True,
        gt=0,
    )
    band_frac: Series[float] = column("the smallest share that may be claimed, by A against A", nullable=True, ge=0)
    a_call_j: Series[float] = column("energy of one call of A; empty if not measured", nullable=True, gt=0)
    b_call_j: Series[float] = column("the same of B", nullable=True, gt=0)
    a_active_j: Series[float] = column("the same of A without what an idle GPU takes in the same time", nullable=True)
    b_active_j: Series[float] = column("the same of B", nullable=True)
    a_call_s: Series[float] = column("time of one call of A", nullable=True, gt=0)
    b_call_s: Series[float] = column("the same of B", nullable=True, gt=0)
    a_host_s: Series[float] = column("CPU time of the process in one call of A", nullable=True, ge=0)
    b_host_s: Series[float] = column("the same of B", nullable=True, ge=0)
    outputs_equal: Series[pd.BooleanDtype] = column(
        "within the tolerance of their type; empty if not compared", nullable=True
    )
    output_error: Series[float] = column("worst relative error of the norm", nullable=True, ge=0)
    cause: Series[str] = column("class of the cause; may be empty")
    evidence: Series[str] = column("what the cause was seen by; may be empty")
    a_line: Series[str] = column("first line of A that differs, file:line function; may be empty")
    b_line: Series[str] = column("the same of B; may be empty")
    remedy: Series[str] = column("switch or rewrite; may be empty")
    fix: Series[str] = column("what was measured instead of the wasteful side; may be empty")
    fix_saved_frac: Series[float] = column("what it saves; empty if not measured", nullable=True, ge=0, le=1)
    fix_low_frac: Series[float] = column("lower end of its 95 % interval", nullable=True, le=1)
    fix_high_frac: Series[float] = column("upper end", nullable=True, ge=0, le=1)
    notes: Series[str] = column("what else is to be known; may be empty")


TABLES: dict[str, type[Table]] = {
    # of `probe`
    "signals": Signals,
    "loads": Loads,
    "samples": Samples,
    # of measurements
    "blocks": Blocks,
    "operators": Operators,
    "closure": Closure,
    "regions": Regions,
    "comparisons": Comparisons,
}
