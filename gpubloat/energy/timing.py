"""How long operators take: a pass of its own under PyTorch's profiler, joined to a capture.

A kernel belongs to the innermost operator that launched it (Kineto's external id, else the correlation id of the launch
and what ran around it), and through it to the captured operator that contains it. Captured operators are found in the
trace in order, by name, shapes and dtypes; one that is not found is reported. Device events count once; annotations of
users on the GPU repeat the time of kernels and never count. Without a GPU, times are those of operators on the CPU.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time as clock
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from gpubloat.energy.capture.records import Capture
from gpubloat.energy.capture.torchops import randomness_restored
from gpubloat.energy.kineto import KINDS, Event, Node, device_events, joined, launcher, trees
from gpubloat.energy.unmarked import unmarked
from gpubloat.errors import GpubloatError
from gpubloat.optional import torch_module

STEP = "gpubloat step"  # the mark around each repeat
_WARM_UP = 2
_REPEATS, _MOST_REPEATS = 5, 200
_MOST_OPERATORS = 4000  # of all repeats, beyond the least: a trace is read in seconds
_LEAST_US = 1e5  # of all repeats together: the median of a few calls of 20 us is not the same in the next run


@dataclass(frozen=True)
class Kernel:
    """Work on a device. us : its time. kind : kernel, memcpy or memset. n_bytes : that a copy moved, else None.

    operator : innermost operator that launched it, "" if none did. op : index of the captured one, None if not joined.
    repeat : which of the repeats.
    """

    name: str
    us: float
    kind: str
    n_bytes: int | None
    operator: str
    op: int | None
    repeat: int


@dataclass(frozen=True)
class Timing:
    """Medians over repeats, in microseconds, under the profiler except `wall_us`.

    source : "kernels", or "operators on the CPU" where the trace holds no device. op_us : captured operator -> its
    kernels, or its time on the CPU with all that it calls. step_us : of a repeat, to the end of its last kernel.
    work_us : sum of all kernels (operators). busy_us : time in which at least one ran. idle_us : the rest of the
    step, "not in kernels". not_joined_us : part of work_us that belongs to no captured operator.
    wall_us : a repeat without the profiler; None for a trace from a file.
    mismatches : a sentence for each captured operator that the trace lacks, or work that the capture lacks.
    repeats_us : op_us of each repeat, for their spread.
    """

    source: str
    n_repeats: int
    kernels: tuple[Kernel, ...]
    op_us: Mapping[int, float]
    step_us: float
    work_us: float
    busy_us: float
    idle_us: float
    not_joined_us: float
    wall_us: float | None
    mismatches: tuple[str, ...]
    notes: tuple[str, ...]
    repeats_us: tuple[Mapping[int, float], ...] = ()

    def of(self, op: int) -> tuple[Kernel, ...]:
        """The kernels of a captured operator in the first repeat."""
        return tuple(kernel for kernel in self.kernels if kernel.op == op and kernel.repeat == 0)


def time(fn: Callable[..., Any], *args: Any, capture: Capture | None = None, repeats: int | None = None) -> Timing:
    """Run ``fn(*args)``: twice to warm up, `repeats` times plain, `repeats` times under the profiler.

    capture : of the same function and arguments; operators are joined to it. repeats : default, 5, and of a short
    function as many as take 0.1 s, at most 200, and fewer of one with many operators.

    Raises
    ------
    GpubloatError : a dispatch mode is active (PyTorch's profiler counts operators twice in it), repeats < 1.
    """
    torch = torch_module()
    if repeats is not None and repeats < 1:
        raise GpubloatError(f"repeats is {repeats}", "1 or more")
    if import_module("torch._C")._len_torch_dispatch_stack():
        raise GpubloatError("the profiler counts operators twice inside a dispatch mode", "time outside of it")
    profiler = import_module("torch.profiler")
    has_gpu = torch.cuda.is_available()
    finish = torch.cuda.synchronize if has_gpu else _nothing
    kinds = [profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if has_gpu else [])]

    def wall_us() -> float:
        finish()
        start = clock.perf_counter()
        fn(*args)
        finish()
        return (clock.perf_counter() - start) * 1e6

    with randomness_restored():
        warm_us = min(wall_us() for _ in range(_WARM_UP))
        if repeats is None:
            most = min(_MOST_REPEATS, _MOST_OPERATORS // max(1, len(capture.ops) if capture is not None else 1))
            repeats = max(_REPEATS, min(most, math.ceil(_LEAST_US / max(warm_us, 1.0))))
        walls = [wall_us() for _ in range(repeats)]
        with unmarked(profiler.profile(activities=kinds, record_shapes=True)) as profile:
            for n in range(repeats):
                with profiler.record_function(f"{STEP} {n}"):
                    fn(*args)
                    finish()
    with tempfile.TemporaryDirectory(prefix="gpubloat-trace-") as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        content = json.loads(path.read_text("utf-8", "replace"), strict=False)
    return of_trace(content, capture, wall_us=statistics.median(walls))


def _nothing() -> None:
    pass


def of_trace(
    trace: Mapping[str, Any] | Iterable[Mapping[str, Any]],
    capture: Capture | None = None,
    *,
    wall_us: float | None = None,
) -> Timing:
    """Timing of a Chrome trace as the profiler exports it, or of its list of events.

    Repeats are the marks of `time`; without them the whole trace is one.

    Raises
    ------
    GpubloatError : the trace holds no operator and no kernel.
    """
    events = trace["traceEvents"] if isinstance(trace, Mapping) else list(trace)
    complete = [event for event in events if event.get("ph") == "X"]
    roots, by_id = trees(complete)
    device = device_events(complete)
    if not roots and not device:
        raise GpubloatError("the trace holds no operator and no kernel", "export it with record_shapes=True")
    launched_by = launcher(complete, roots, by_id)
    works = [_Work(event, *launched_by(event)) for event in device]
    steps = []
    for number, (start, end) in enumerate(_spans(complete, roots, works)):
        inside = [root for root in roots if start <= root.start < end]
        step = _Step(number, start, end, *(joined(capture, inside) if capture is not None else ({}, [])))
        if device:
            _add_kernels(step, [work for work in works if start <= work.launched < end])
        else:
            _add_operators(step, inside)
        steps.append(step)
    return _summary(steps, capture, bool(device), wall_us)


@dataclass(frozen=True)
class _Work:
    """An event of a device, the innermost operator that launched it, and when."""

    event: Event
    node: Node | None
    launched: float


@dataclass
class _Step:
    """A repeat. joined : node of the trace -> captured operator. missing : captured operators that it lacks."""

    number: int
    start: float
    end: float
    joined: dict[Node, int]
    missing: list[int]
    kernels: list[Kernel] = field(default_factory=list)
    op_us: dict[int, float] = field(default_factory=dict)
    work_us: float = 0.0
    busy_us: float = 0.0
    not_joined: dict[str, float] = field(default_factory=dict)


def _spans(complete: list[Event], roots: list[Node], works: list[_Work]) -> list[tuple[float, float]]:
    """Start and end of each repeat on the CPU: what is started in between belongs to it."""
    marks = [e for e in complete if e.get("cat") == "user_annotation" and str(e["name"]).startswith(STEP)]
    if marks:
        return sorted((e["ts"], e["ts"] + e["dur"]) for e in marks)
    starts = [*(root.start for root in roots), *(work.launched for work in works)]
    ends = [*(root.end for root in roots), *(work.event["ts"] + work.event["dur"] for work in works)]
    return [(min(starts), max(ends))]


def _add_kernels(step: _Step, works: list[_Work]) -> None:
    step.op_us = dict.fromkeys(step.joined.values(), 0.0)
    intervals = [(work.event["ts"], work.event["ts"] + work.event["dur"]) for work in works]
    for work in works:
        event, node = work.event, work.node
        op = next((step.joined[n] for n in node.path() if n in step.joined), None) if node is not None else None
        operator = node.operator() if node is not None else ""
        size = event.get("args", {}).get("bytes")
        step.kernels.append(Kernel(event["name"], event["dur"], KINDS[event["cat"]], size, operator, op, step.number))
        if op is not None:
            step.op_us[op] += event["dur"]
        else:
            what = f"{event['name'][:80]}, launched {'by ' + operator if operator else 'outside of operators'},"
            step.not_joined[what] = step.not_joined.get(what, 0.0) + event["dur"]
    step.work_us = sum(kernel.us for kernel in step.kernels)
    step.busy_us = _union(intervals)
    step.end = max([step.end, *(end for _, end in intervals)])


def _add_operators(step: _Step, roots: list[Node]) -> None:
    """Times on the CPU: outermost operators are the work; a captured one has what it calls inside it."""
    step.op_us = {op: node.end - node.start for node, op in step.joined.items()}
    intervals = [(root.start, root.end) for root in roots]
    step.work_us = sum(end - start for start, end in intervals)
    step.busy_us = _union(intervals)
    step.end = max([step.end, *(end for _, end in intervals)])
    if step.joined:
        step.not_joined["what operators of the trace do around captured ones"] = step.work_us - sum(step.op_us.values())


def _union(intervals: list[tuple[float, float]]) -> float:
    """Length of what at least one interval covers."""
    total, covered = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total


def _summary(steps: list[_Step], capture: Capture | None, has_device: bool, wall_us: float | None) -> Timing:
    ops = sorted({op for step in steps for op in step.op_us})
    mismatches: dict[str, None] = {}
    notes = []
    if capture is not None:
        gone = [op for step in steps for op in step.missing]
        for op in dict.fromkeys(gone):
            if not capture.ops[op].is_view:
                mismatches[f"{capture.ops[op].name} (operator {op}) is not in the trace"] = None
        n_views = len({op for op in gone if capture.ops[op].is_view})
        if n_views:
            notes.append(f"{n_views} views of the capture are not in the trace: they do no work")
        if has_device:
            for what in dict.fromkeys(what for step in steps for what in step.not_joined):
                mismatches[f"{what} belongs to no captured operator"] = None
    if has_device and len({tuple(kernel.name for kernel in step.kernels) for step in steps}) > 1:
        notes.append("the kernels differ between repeats")
    if not has_device:
        notes.append("no device in the trace: times are those of operators on the CPU, with what they call")

    return Timing(
        source="kernels" if has_device else "operators on the CPU",
        n_repeats=len(steps),
        kernels=tuple(kernel for step in steps for kernel in step.kernels),
        op_us={op: statistics.median([step.op_us[op] for step in steps if op in step.op_us]) for op in ops},
        step_us=statistics.median([step.end - step.start for step in steps]),
        work_us=statistics.median([step.work_us for step in steps]),
        busy_us=statistics.median([step.busy_us for step in steps]),
        idle_us=statistics.median([step.end - step.start - step.busy_us for step in steps]),
        not_joined_us=statistics.median([sum(step.not_joined.values()) for step in steps])
        if capture is not None
        else 0.0,
        wall_us=wall_us,
        mismatches=tuple(mismatches),
        notes=tuple(notes),
        repeats_us=tuple(step.op_us for step in steps),
    )
