"""The data flow of a capture: operators are nodes, tensors are edges; and the nodes that all of it passes through.

Views are nodes too, but marked: one that only rearranges all elements of a tensor runs nothing, and its output is the
same value. Versions of what was written in place are tensors of their own; who reads memory that another operator wrote
through another tensor depends on that operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from gpubloat.energy.capture.records import Capture, Op, TensorInfo

# Views whose elements differ from those of the memory that they show.
_CHANGED = ("conj", "neg_view")


@dataclass(frozen=True)
class Edge:
    """Operator `reader` needs what operator `maker` made, and reads it as `tensor`."""

    maker: int
    reader: int
    tensor: int


@dataclass(frozen=True)
class Graph:
    """value : tensor id -> the first tensor with the same elements in the same memory, often itself.

    makers : value -> operator that made it; values without one are inputs. is_free : operators that only show tensors
    in another order. edges_in, edges_out : by operator; they lead past free operators, from the maker of a value.
    """

    capture: Capture
    value: dict[int, int]
    edges_in: tuple[tuple[Edge, ...], ...]
    edges_out: tuple[tuple[Edge, ...], ...]
    is_free: tuple[bool, ...]
    makers: dict[int, int]

    @property
    def n(self) -> int:
        return len(self.capture.ops)

    def before(self, op: int) -> list[int]:
        """Operators that `op` reads from, each once, in order."""
        return sorted({edge.maker for edge in self.edges_in[op]})

    def made(self, op: int) -> list[int]:
        """Values that `op` made."""
        own = dict.fromkeys(self.value[t] for t in self.capture.ops[op].outputs)
        return [v for v in own if self.makers.get(v) == op]

    @cached_property
    def _readers(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for op in self.capture.ops:
            for tensor in dict.fromkeys(op.inputs):
                found.setdefault(tensor, []).append(op.index)
        return found

    def readers(self, tensors: Iterable[int]) -> list[int]:
        """Operators that read one of these very tensors, free ones too, in order."""
        return sorted({op for tensor in tensors for op in self._readers.get(tensor, ())})


def graph(capture: Capture) -> Graph:
    """Of a capture whose operators are in the order they ran."""
    value: dict[int, int] = {}
    makers: dict[int, int] = {}
    written: dict[int, int] = {}  # storage -> operator that last wrote to it in place
    edges: list[Edge] = []
    is_free = []
    for op in capture.ops:
        for tensor in dict.fromkeys(op.inputs):
            value.setdefault(tensor, tensor)
            sources = {makers.get(value[tensor]), written.get(capture.tensors[tensor].storage)}
            edges += [Edge(source, op.index, tensor) for source in sources if source is not None]
        new = [t for t in dict.fromkeys(op.outputs) if t not in value]
        same = {t: _shown(capture, op, t) for t in new} if op.is_view and not op.writes else {}
        for tensor in new:
            shown = same.get(tensor)
            value[tensor] = tensor if shown is None else value[shown]
            if shown is None:
                makers[tensor] = op.index
        is_free.append(bool(same) and None not in same.values())
        for tensor in op.writes:
            written[capture.tensors[tensor].storage] = op.index
    for tensor in (*capture.inputs, *capture.outputs):
        value.setdefault(tensor, tensor)
    ingoing: list[list[Edge]] = [[] for _ in capture.ops]
    outgoing: list[list[Edge]] = [[] for _ in capture.ops]
    for edge in edges:
        ingoing[edge.reader].append(edge)
        outgoing[edge.maker].append(edge)
    return Graph(capture, value, tuple(map(tuple, ingoing)), tuple(map(tuple, outgoing)), tuple(is_free), makers)


def _shown(capture: Capture, op: Op, output: int) -> int | None:
    """The input whose elements are exactly those of a view, only in another order or shape."""
    view = capture.tensors[output]
    grid = _grid(view)
    if grid is None or any(word in op.name for word in _CHANGED):
        return None
    for tensor in op.inputs:
        base = capture.tensors[tensor]
        if (base.storage, base.offset, base.dtype) == (view.storage, view.offset, view.dtype) and _grid(base) == grid:
            return tensor
    return None


def _grid(tensor: TensorInfo) -> tuple[tuple[int, int], ...] | None:
    """The places of its elements in memory, in whatever order: (step, how many) from the smallest step on.

    None where they are not known, or where elements share a place.
    """
    if tensor.strides is None:
        return None
    grid: list[tuple[int, int]] = []
    for step, length in sorted((s, n) for s, n in zip(tensor.strides, tensor.shape) if n != 1):
        reach = grid[-1][0] * grid[-1][1] if grid else 1
        if step < reach:
            return None
        if grid and step == reach:
            grid[-1] = (grid[-1][0], grid[-1][1] * length)
        else:
            grid.append((step, length))
    return tuple(grid)


def dominators(before: Sequence[Sequence[int]], root: int) -> list[int | None]:
    """Immediate dominator of each node of an acyclic graph; None where `root` does not reach. The root's is itself.

    before : predecessors of each node, all with smaller numbers. Cooper, Harvey and Kennedy, "A simple, fast dominance
    algorithm" (2001); with nodes in topological order one pass is enough.
    """
    parent: list[int | None] = [None] * len(before)
    parent[root] = root
    for node in range(root + 1, len(before)):
        for source in before[node]:
            if parent[source] is not None:
                known = parent[node]
                parent[node] = source if known is None else _common(parent, known, source)
    return parent


def _common(parent: list[int | None], a: int, b: int) -> int:
    while a != b:
        if a < b:
            a, b = b, a
        above = parent[a]
        assert above is not None
        a = above
    return a


def data_free(flow: Graph) -> set[int]:
    """Operators that read no input, nor what was made of one: a range, a causal mask, tables of rotations."""
    found: set[int] = set()
    for op in flow.capture.ops:
        if all(flow.value[t] in flow.makers for t in op.inputs) and found.issuperset(flow.before(op.index)):
            found.add(op.index)
    return found


def cuts(flow: Graph) -> list[int]:
    """Operators on every path from source to sink, in order: the post-dominators of the source.

    Weights enter everywhere, and caches leave everywhere, so a source before all inputs and a sink behind all outputs
    would leave no cut. Source and sink are the ends of the longest way to an output; but a mask may take a long way
    around all layers, so no source has less than half the cuts of another, nor is data-free where another is not.
    """
    ends = {flow.makers[v] for v in (flow.value[t] for t in flow.capture.outputs) if v in flow.makers}
    if not ends:
        return []
    depth = [0] * flow.n
    for op in range(flow.n):
        depth[op] = max((depth[i] + 1 for i in flow.before(op)), default=0)
    sink = max(ends, key=lambda op: (depth[op], -op))
    last = flow.n - 1
    # Numbered from the last operator on, dominators are post-dominators.
    turned = [[last - edge.reader for edge in flow.edges_out[last - node]] for node in range(flow.n)]
    parent = dominators(turned, last - sink)
    way, behind = {sink: 0}, {sink: 0}  # operator -> longest way to the sink, cuts behind it
    for op in reversed(range(sink)):
        above = parent[last - op]
        if above is not None:
            way[op] = 1 + max(way[edge.reader] for edge in flow.edges_out[op] if edge.reader in way)
            behind[op] = 1 + behind[last - above]
    starts = [op for op in way if not flow.edges_in[op]]
    free = data_free(flow)
    starts = [op for op in starts if op not in free] or starts
    most = max(behind[op] for op in starts)
    node = max((op for op in starts if 2 * behind[op] >= most), key=lambda op: (way[op], -op))
    chain = [node]
    while node != sink:
        above = parent[last - node]
        assert above is not None
        node = last - above
        chain.append(node)
    return chain
