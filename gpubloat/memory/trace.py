"""The events of one GPU as plain lists, which a loop over events reads fastest."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pandas as pd

from gpubloat.errors import GpubloatError
from gpubloat.memory import collect
from gpubloat.memory.allocators.settings import Settings, recorded
from gpubloat.run import Run


@dataclass(slots=True)
class Trace:
    """Events in order, as lists of the same length, and the state at the end.

    `settings` are those of the allocator that recorded them.
    """

    device: int
    actions: list[str]
    addresses: list[int]
    sizes: list[int]
    streams: list[int]
    pools: list[str]
    segments: pd.DataFrame  # at the end; rows of this GPU
    blocks: pd.DataFrame
    settings: Settings


def opened(trace: Run | str | os.PathLike[str]) -> Run:
    """The run of a trace: as it is, from a run folder, or from a file that `load` reads."""
    if isinstance(trace, Run):
        run = trace
    elif os.path.isdir(trace):
        run = Run.load(trace)
    else:
        run = collect.load(trace)
    if run.instrument != "memory" or "events" not in run:
        raise GpubloatError(f"a run of {run.instrument} holds no trace of an allocator", "give what memory.load reads")
    return run


def traces(run: Run) -> list[Trace]:
    """The trace of each GPU. Raises GpubloatError where there is no event at all, with the reason."""
    events = run["events"]
    if not len(events):
        why = run.provenance.get("empty", {}).get("events", "the run has no events")
        raise GpubloatError("there is nothing to replay", why)
    settings = recorded(run.provenance.get("allocator_settings", {}))
    segments, blocks = run["segments"], run["blocks"]
    found = []
    for device in sorted(events["device"].unique()):
        mine, held, cut = (table[table["device"] == device] for table in (events, segments, blocks))
        found.append(of_device(int(device), mine, held, cut, settings))
    return found


def of_device(
    device: int, events: pd.DataFrame, segments: pd.DataFrame, blocks: pd.DataFrame, settings: Settings
) -> Trace:
    """The trace of one GPU from its rows of the tables events, segments, blocks."""
    columns = (events[name].tolist() for name in ("action", "address", "size_bytes", "stream", "pool"))
    actions, addresses, sizes, streams, pools = columns
    return Trace(device, actions, addresses, sizes, streams, pools, segments, blocks, settings)
