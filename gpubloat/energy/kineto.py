"""Events of a Chrome trace of PyTorch's profiler (Kineto): trees of operators, work of devices, and who launched it."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpubloat.energy.capture.records import Capture, Op, Ref

Event = Mapping[str, Any]
# Categories of work on a device, and what each is. "gpu_user_annotation" spans kernels: it is no work of its own.
KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime"}
_AHEAD = 256  # operators of the trace that are looked through for the next one of the capture
_DTYPES = {
    "float": "fp32", "double": "fp64", "c10::Half": "fp16", "c10::BFloat16": "bf16", "long int": "int64",
    "long": "int64", "int": "int32", "short": "int16", "short int": "int16", "signed char": "int8",
    "unsigned char": "uint8",
    "bool": "bool", "c10::complex<float>": "complex64", "c10::complex<double>": "complex128",
    "c10::Float8_e4m3fn": "fp8_e4m3", "c10::Float8_e5m2": "fp8_e5m2",
}  # fmt: skip
# Operators whose lists of tensors may have gaps: a trace says nothing of those lists.
_OPTIONAL_LISTS = ("aten::index.", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index")
# Of tensors with at least one axis, in the order of the arguments; no type where the trace says none (lists).
Signature = tuple[tuple[tuple[int, ...], str | None], ...]


@dataclass(eq=False)
class Node:
    """An operator on a CPU thread, in microseconds, and the ones that it calls."""

    name: str
    start: float
    end: float
    signature: Signature
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)

    def path(self) -> Iterator[Node]:
        """Itself and what it is part of, innermost first."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def operator(self) -> str:
        """The innermost operator of it: ranges of the autograd engine and of users are none."""
        return next((node.name for node in self.path() if "::" in node.name and " " not in node.name), self.name)


def device_events(events: list[Event]) -> list[Event]:
    """Kernels, copies and fills, each once, in the order in which they ran."""
    once = {}
    for event in events:
        if event.get("cat") in KINDS:
            args = event.get("args", {})
            place = (args.get("device"), args.get("stream"), args.get("correlation"))
            once[(*place, event["ts"], event["dur"], event["name"])] = event
    return sorted(once.values(), key=lambda event: event["ts"])


def trees(events: list[Event]) -> tuple[list[Node], dict[Any, Node]]:
    """Outermost operators of all threads in the order of their start, and all operators by external id."""
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            by_thread[event["pid"], event["tid"]].append(event)
    roots: list[Node] = []
    by_id: dict[Any, Node] = {}
    for thread in by_thread.values():
        open_nodes: list[Node] = []
        for event in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
            args = event.get("args", {})
            node = Node(event["name"], event["ts"], event["ts"] + event["dur"], _of_event(args))
            while open_nodes and open_nodes[-1].end <= node.start:
                open_nodes.pop()
            if open_nodes:
                node.parent = open_nodes[-1]
                node.parent.children.append(node)
            else:
                roots.append(node)
            open_nodes.append(node)
            if "External id" in args:
                by_id[args["External id"]] = node
    return sorted(roots, key=lambda root: root.start), by_id


def launcher(
    events: list[Event], roots: list[Node], by_id: Mapping[Any, Node]
) -> Callable[[Event], tuple[Node | None, float]]:
    """Gives a function: device event -> the innermost operator that launched it, and when it was launched."""
    launches = {e["args"]["correlation"]: e for e in events if e.get("cat") in _LAUNCHES and "correlation" in e["args"]}
    by_thread: dict[Any, list[Node]] = defaultdict(list)
    threads = {(e["ts"], e["name"]): (e["pid"], e["tid"]) for e in events if e.get("cat") == "cpu_op"}
    for root in roots:
        by_thread[threads[root.start, root.name]].append(root)
    starts = {thread: [root.start for root in nodes] for thread, nodes in by_thread.items()}

    def around(launch: Event) -> Node | None:
        thread = (launch["pid"], launch["tid"])
        place = bisect.bisect_right(starts.get(thread, []), launch["ts"]) - 1
        found: Node | None = None
        nodes = by_thread[thread][place : place + 1] if place >= 0 else []
        while nodes:
            inside = next((node for node in nodes if node.start <= launch["ts"] < node.end), None)
            found, nodes = (inside, inside.children) if inside is not None else (found, [])
        return found

    def of(event: Event) -> tuple[Node | None, float]:
        args = event.get("args", {})
        launch = launches.get(args.get("correlation"))
        node = by_id.get(args.get("External id"))
        if node is None and launch is not None:
            node = around(launch)
        if launch is not None:
            return node, launch["ts"]
        return node, node.start if node is not None else event["ts"]

    return of


def joined(capture: Capture, roots: list[Node]) -> tuple[dict[Node, int], list[int]]:
    """Captured operators in a trace: node -> operator, and the operators that were not found.

    Work first: in order, each by name, shapes and dtypes, below no other that was found. Views then, between their
    neighbours: PyTorch makes some of them only under a dispatch mode.
    """
    order: list[Node] = []
    past: list[int] = []  # for each, where its descendants end

    def add(node: Node) -> None:
        place = len(order)
        order.append(node)
        past.append(0)
        for child in node.children:
            add(child)
        past[place] = len(order)

    for root in roots:
        add(root)
    found: dict[int, int] = {}  # operator -> place in the order

    def search(ops: list[Op], start: int, stop: int | None) -> None:
        for op in ops:
            name, wanted = op.name.rpartition(".")[0], _of_call(capture, op)
            names = {name}
            if name == "aten::add" and op.lines and "backward of" in op.lines[0].function:
                names.add("aten::add_")  # gradients are summed in place, but not under a dispatch mode
            place, left = start, _AHEAD
            while place < len(order) and (place < stop if stop is not None else left > 0):
                node = order[place]
                if node.name in names and _agree(node.signature, wanted):
                    found[op.index] = place
                    start = past[place]
                    break
                place, left = place + 1, left - 1

    search([op for op in capture.ops if not op.is_view], 0, None)
    waiting: list[Op] = []
    start = 0
    for op in capture.ops:
        if op.is_view:
            waiting.append(op)
        elif op.index in found:
            search(waiting, start, found[op.index])
            waiting, start = [], past[found[op.index]]
    search(waiting, start, len(order))
    missing = [op.index for op in capture.ops if op.index not in found]
    return {order[place]: op for op, place in found.items()}, missing


def _of_event(args: Mapping[str, Any]) -> Signature:
    found: list[tuple[tuple[int, ...], str | None]] = []
    for dims, kind in zip(args.get("Input Dims", ()), args.get("Input type", ())):
        if dims and isinstance(dims[0], list):
            found += [(tuple(d), None) for d in dims if d]
        elif dims:
            found.append((tuple(dims), _DTYPES.get(kind)))
    return tuple(found)


def _of_call(capture: Capture, op: Op) -> Signature:
    found: list[tuple[tuple[int, ...], str | None]] = []

    def add(thing: Any) -> None:
        if isinstance(thing, Ref):
            info = capture.tensors[thing.id]
            if info.shape:
                found.append((info.shape, info.dtype))
        elif isinstance(thing, (list, tuple)):
            for part in thing:
                add(part)

    call = capture.calls[op.index]
    for argument in (*call.args, *call.kwargs.values()):
        if not (isinstance(argument, (list, tuple)) and op.name.startswith(_OPTIONAL_LISTS)):
            add(argument)
    return tuple(found)


def _agree(traced: Signature, captured: Signature) -> bool:
    return len(traced) == len(captured) and all(
        dims == shape and kind in (None, dtype) for (dims, kind), (shape, dtype) in zip(traced, captured)
    )
