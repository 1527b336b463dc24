"""Training of a GNN whose features stay in host memory: what reads by the GPU give, and what fewer bytes do.

The step `gnn` of codec.py. The GPU holds a random graph, its degrees in a power law, and samples ten neighbours of each
of 1024 nodes and ten of each of those. Features of all of them are fetched by four ways in turn, and two layers of
GraphSAGE (torch-geometric) are trained on them, a model per way, from the same start on the same batches:

- packed: the GPU reads packed rows. raw: the same kernel on rows that are all stored raw, which is the control: raw
  beside cpu_gather_copy is what reads by the GPU give, packed beside raw what fewer bytes do.
- plain: a kernel that copies plain rows. cpu_gather_copy: the CPU gathers rows in a pinned buffer, which is copied.

Features are a bag of words (fp32, as Pubmed's) or embeddings (bf16, normal values). gnn.csv: medians of ten batches
after two that are not counted, the last loss, if all features had the right bits, and if all losses were the same.
"""

from __future__ import annotations

import dataclasses
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from timing import Campaign, HostRows, features, nothing_removed

from gpubloat.tensors import codebook, packing
from gpubloat.tensors.gpu.torchuse import PackedTensor, as_bytes

FAN_OUT, HOPS, HIDDEN, CLASSES, WARM_UP = 10, 2, 256, 16, 2
Layers = list[tuple[Any, Any]]  # where the nodes of a layer, and FAN_OUT neighbours of each, are among those below it


def graph(campaign: Campaign) -> tuple[Any, Any, Any, list[Any]]:
    """Where neighbours of each node begin, how many there are, all of them; batches of nodes. On the GPU."""
    n, batch, n_batches = (2_000, 32, 4) if campaign.dry else (1_000_000, 1024, WARM_UP + 10)
    rng = np.random.default_rng(0)
    degrees = np.minimum(5.5 * (1 + rng.pareto(1.5, n)), n / 100).astype(np.int64)  # 15 on average
    neighbours = rng.permutation(np.repeat(np.arange(n), degrees))
    parts = (degrees.cumsum() - degrees, degrees, neighbours, rng.permutation(n)[: batch * n_batches])
    begins, degrees, neighbours, seeds = (torch.from_numpy(part).to(campaign.where) for part in parts)
    return begins, degrees, neighbours, list(seeds.split(batch))


def sampled(edges: list[Any], nodes: Any, seed: int) -> tuple[Any, Layers]:
    """All nodes that a batch needs, ascending, and what each layer takes from those before, the widest first."""
    begins, degrees, neighbours = edges
    draw = torch.Generator(nodes.device).manual_seed(seed)
    layers: Layers = []
    for _ in range(HOPS):
        chosen = torch.randint(1 << 62, (len(nodes), FAN_OUT), generator=draw, device=nodes.device)
        found = neighbours[begins[nodes, None] + chosen % degrees[nodes, None]]
        below, places = torch.unique(torch.cat([nodes, found.flatten()]), return_inverse=True)
        layers.insert(0, (places[: len(nodes)], places[len(nodes) :]))
        nodes = below
    return nodes, layers


class Model:
    """Two layers of GraphSAGE, and Adam."""

    def __init__(self, n_features: int, where: Any) -> None:
        nn: Any = importlib.import_module("torch_geometric.nn")

        class Mean(nn.Aggregation):  # type: ignore[misc]
            """Of equally many neighbours that lie in order: no atomic additions, whose order would change the loss."""

            def forward(self, x: Any, *_: Any, dim_size: Any = None, **__: Any) -> Any:
                return x.view(dim_size, -1, x.shape[-1]).mean(1)

        torch.manual_seed(0)
        convs = [nn.SAGEConv(n_features, HIDDEN, aggr=Mean()), nn.SAGEConv(HIDDEN, CLASSES, aggr=Mean())]
        self.convs = torch.nn.ModuleList(convs).to(where)
        self.adam = torch.optim.Adam(self.convs.parameters(), lr=3e-3)

    def train(self, x: Any, layers: Layers, labels: Any) -> Any:
        x = x.float()
        for conv, (own, found) in zip(self.convs, layers):
            x = x if conv is self.convs[0] else x.relu()
            to = torch.arange(len(own), device=own.device).repeat_interleave(FAN_OUT)
            x = conv((x, x[own]), torch.stack([found, to]))
        loss = torch.nn.functional.cross_entropy(x, labels)
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        return loss.detach()


def repeated(packed: packing.Packed, times: int) -> PackedTensor:
    """As if repeated rows had been packed, which takes longer; there is no checksum, as only rows are read."""
    tiled: dict[str, Any] = {name: np.tile(getattr(packed, name), times) for name in ("words", "row_words")}
    shape = (times * packed.n_rows, *packed.shape[1:])
    return PackedTensor(dataclasses.replace(packed, shape=shape, crc32=0, **tiled))


def now(campaign: Campaign) -> Any:
    if campaign.dry:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(first: Any, last: Any) -> float:
    return float(last - first if isinstance(first, float) else first.elapsed_time(last) / 1000)


def gnn(campaign: Campaign, _: Any = None) -> None:
    on_gpu = graph(campaign)
    normal = torch.randn(1 << 16, 256, generator=torch.Generator().manual_seed(0)) * 0.02
    kinds = {"words fp32": torch.from_numpy(features("pubmed")), "embeddings bf16": normal.bfloat16()}
    # Gradients of rows that are neighbours of several nodes are added in one order then, and losses can be compared.
    # It only warns, because cuBLAS asks for a setting of the environment that matters for several streams.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        for kind, rows in kinds.items():
            if campaign.late:
                return
            try:
                one_kind(campaign, on_gpu, kind, rows[: 200 if campaign.dry else None])
            except Exception:
                campaign.fail("gnn", kind)
    finally:
        torch.use_deterministic_algorithms(False)


def one_kind(campaign: Campaign, graph: tuple[Any, Any, Any, list[Any]], kind: str, block: torch.Tensor) -> None:
    *edges, batches = graph
    n, where, book = len(edges[0]), campaign.where, codebook.fit(block)
    times = -(-n // len(block))
    packed = repeated(packing.pack(block, book), times)
    raw = repeated(packing.pack(block, nothing_removed(book), "slots"), times)
    plain = HostRows(campaign, raw.packed.words.view(np.uint8).reshape(-1, raw.packed.row_bytes))  # slots have no gaps
    most = min(n, len(batches[0]) * (1 + FAN_OUT) ** HOPS)
    buffer = torch.empty(most, block.shape[1], dtype=block.dtype, device=where)
    staging = torch.empty(most, plain.row_bytes, dtype=torch.uint8, pin_memory=not campaign.dry)
    labels = torch.randint(0, CLASSES, (n,), generator=torch.Generator().manual_seed(0)).to(where)
    right = block.to(where)

    def cpu_gather_copy(nodes: Any, out: Any) -> None:
        rows = staging[: len(nodes)]
        torch.index_select(plain.tensor, 0, nodes.cpu(), out=rows)
        out.view(torch.uint8).copy_(rows, non_blocking=True)

    ways: dict[str, Callable[[Any, Any], Any]] = {
        "packed": lambda nodes, out: packed.gather(nodes, out, presorted=True),
        "raw": lambda nodes, out: raw.gather(nodes, out, presorted=True),
        "plain": lambda nodes, out: plain.read(nodes, out.view(torch.uint8)),
        "cpu_gather_copy": cpu_gather_copy,
    }

    def one_batch(way: str, number: int) -> dict[str, Any]:
        as_bytes(buffer).fill_(255)  # nothing is right because it was there before
        begun = now(campaign)
        nodes, layers = sampled(edges, batches[number], number)
        before, out = now(campaign), buffer[: len(nodes)]
        ways[way](nodes, out)
        after = now(campaign)
        loss = models[way].train(out, layers, labels[batches[number]])
        end, loss = now(campaign), float(loss)  # which waits
        row_words = (packed if way == "packed" else raw).packed.row_words[nodes.cpu().numpy()]
        return {
            "n_rows": len(nodes), "moved_bytes": 4 * int(row_words.sum(dtype=np.int64)),
            "raw_bytes": as_bytes(out).numel(), "fetch_s": between(before, after), "step_s": between(begun, end),
            "loss": loss, "equal": torch.equal(as_bytes(out), as_bytes(right[nodes % len(right)])),
        }  # fmt: skip

    done: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    failed: dict[str, str] = {}
    try:
        models = {way: Model(block.shape[1], where) for way in ways}
        for held in () if campaign.dry else (packed, raw):
            held.pin()
        for number in range(len(batches)):
            for way in np.roll(list(ways), number).tolist():  # each is first in its turn
                if way not in failed and not campaign.late:
                    try:
                        done[way].append(one_batch(way, number))
                    except Exception as error:
                        failed[way] = f"{type(error).__name__}: {error}"[:300]
                        campaign.fail("gnn", f"{kind} {way}")
    finally:
        packed.unpin()
        raw.unpin()
        plain.close()
    losses = max(([row["loss"] for row in found] for found in done.values()), key=len)
    for way, found in done.items():
        counted = found[WARM_UP:]
        names = ("n_rows", "moved_bytes", "raw_bytes", "fetch_s", "step_s")
        campaign.write("gnn", {
            "workload": "sage", "kind": kind, "way": way,
            **{name: statistics.median(row[name] for row in counted) if counted else "" for name in names},
            "loss": found[-1]["loss"] if found else "", "equal": bool(found) and all(row["equal"] for row in found),
            "same_losses": [row["loss"] for row in found] == losses[: len(found)], "n_batches": len(counted),
            "failed": failed.get(way, "" if counted else "no time left"),
        })  # fmt: skip
