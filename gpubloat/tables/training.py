"""Tables of training runs under several allocators. The columns up to `allocator` join them: one configuration."""

from __future__ import annotations

import pandas as pd
from pandera.typing import Series

from gpubloat.tables.base import Table, column

VMM_CALLS = (
    "malloc",
    "free",
    "reserve",
    "create",
    "map",
    "set_access",
    "set_access_each",
    "unmap",
    "release",
    "address_free",
)


class Configuration(Table):
    """What makes a run: a model and how it is trained, on how many GPUs, and the allocator."""

    model: Series[str] = column("name of the model, such as OPT-1.3B")
    n_layers: Series[int] = column("layers of the model that were there; the rest of its shape is the model's", ge=1)
    strategy: Series[str] = column("N none, or letters of: L low-rank adapters, R recomputation, O offload")
    n_gpus: Series[int] = column("GPUs that the run was spread over", ge=1)
    batch: Series[int] = column("samples per step and GPU", ge=1)
    seq: Series[int] = column("tokens per sample; the longest, where lengths vary", ge=1)
    lengths: Series[str] = column("of the samples of the steps", isin=["fixed", "varied"])
    limit_bytes: Series[pd.UInt64Dtype] = column("most the allocator may take; empty: the device's", nullable=True)
    allocator: Series[str] = column("caching, expandable, stitching...")
    repeat: Series[int] = column("number of the process with this configuration", ge=0)


class Training(Configuration):
    """One row = one configuration of a training run under one allocator, after its last step."""

    reserved_peak_bytes: Series[pd.UInt64Dtype] = column(
        "most bytes held from the driver; empty if unknown", nullable=True
    )
    active_peak_bytes: Series[pd.UInt64Dtype] = column("most bytes in blocks that are not free", nullable=True)
    requested_peak_bytes: Series[pd.UInt64Dtype] = column("most bytes asked for and not given back", nullable=True)
    utilisation_frac: Series[float] = column("peak active over peak reserved", nullable=True, ge=0, le=1)
    fragmentation_frac: Series[float] = column("1 less utilisation", nullable=True, ge=0, le=1)
    step_s: Series[float] = column("median time of a step; empty if none was finished", nullable=True, ge=0)
    n_steps: Series[int] = column("finished steps", ge=0)
    n_driver_calls: Series[pd.Int64Dtype] = column("calls of the allocator to the driver", nullable=True, ge=0)
    converged_step: Series[pd.Int64Dtype] = column(
        "first step from which on the driver was not called", nullable=True, ge=0
    )
    is_oom: Series[bool] = column("ended by an allocation that found no memory")
    loss: Series[float] = column("of the last finished step", nullable=True)


class DriverSteps(Configuration):
    """One row = one step of a training run."""

    step: Series[int] = column("number of the step, from 0", ge=0)
    n_driver_calls: Series[int] = column("calls of the allocator to the driver in this step", ge=0)
    step_s: Series[float] = column("time of the step", ge=0)


class VmmCosts(Table):
    """One row = the time of one kind of call to the driver, for memory made of chunks of one size."""

    call: Series[str] = column("what was called; malloc and free are the whole as one block", isin=list(VMM_CALLS))
    chunk_bytes: Series[pd.UInt64Dtype] = column("size of a chunk: of one handle", gt=0)
    n_handles: Series[int] = column("chunks, or calls, that make up the total", ge=1)
    total_bytes: Series[pd.UInt64Dtype] = column("memory that all calls together handled", gt=0)
    is_busy: Series[bool] = column("a kernel was running meanwhile")
    repeat: Series[int] = column("number of the round", ge=0)
    n_calls: Series[int] = column("calls that this took", ge=1)
    time_us: Series[float] = column("of all these calls together", ge=0)


class Bandwidth(Table):
    """One row = one measurement of copying inside memory that is made of chunks of one size."""

    chunk_bytes: Series[pd.UInt64Dtype] = column("size of a chunk; 0: plain memory of cuMemAlloc")
    gb_per_s: Series[float] = column("10^9 bytes read and written per second", ge=0)


TABLES: dict[str, type[Table]] = {
    "training": Training,
    "driver_steps": DriverSteps,
    "vmm_costs": VmmCosts,
    "bandwidth": Bandwidth,
}
