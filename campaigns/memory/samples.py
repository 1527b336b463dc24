"""Snapshots of PyTorch's allocator with what public ones lack: each scenario in a process of its own.

python samples.py OUT             all of them: OUT/<scenario>.pickle.zst
python samples.py OUT SCENARIO    one of them, in this process
python samples.py OUT FILE.pickle a snapshot of another program, without the folders of its files: OUT/FILE.pickle.zst

expandable: segments that grow. streams: blocks freed while another stream uses them. graphs: pools of CUDA graphs.
oom: memory ends, with and without expandable segments. settings: large blocks unsplit, rounding, garbage collection.
pool: torch.cuda.MemPool. Every one is a small training loop with batches of several sizes, recorded from the start.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

LIMIT_MIB = {"settings": 1500, "oom": 1200, "expandable-oom": 1200}  # what the allocator may take
KEPT: list[object] = []  # until the snapshot
CONF = {
    "expandable": "expandable_segments:True",
    "expandable-streams": "expandable_segments:True",
    "expandable-oom": "expandable_segments:True",
    "streams": "",
    "graphs": "",
    "oom": "",
    "settings": "max_split_size_mb:64,roundup_power2_divisions:8,garbage_collection_threshold:0.6",
    "pool": "",
}


def model(torch: object, width: int = 1024) -> object:
    nn = torch.nn
    layers = [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)] * 4
    return nn.Sequential(*(type(x)(x.in_features, x.out_features) if hasattr(x, "bias") else x for x in layers)).cuda()


def steps(torch: object, net: object, batches: list[int], streams: list[object] = ()) -> None:
    optimizer = torch.optim.Adam(net.parameters())
    for number, batch in enumerate(batches):
        x = torch.randn(batch, 1024, device="cuda")
        out = net(x)
        if streams:  # the next stream reads it, and frees its own copy
            stream = streams[number % len(streams)]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                copy = out.detach() * 2
                torch.cuda._sleep(5_000_000)
                out.record_stream(stream)
                total = copy.sum()
            del copy, total
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del x, out
        if number % 7 == 6:
            torch.cuda.empty_cache()


def scenario(name: str) -> None:
    import torch

    if name in LIMIT_MIB:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(LIMIT_MIB[name] * 2**20 / total)
    sizes = [512, 3000, 700, 4096, 64, 2500, 4100, 900, 3300, 128, 4800, 1024]
    if (name.startswith("expandable") and "oom" not in name) or name in ("streams", "settings"):
        streams = [torch.cuda.Stream() for _ in range(3)] if "streams" in name else []
        steps(torch, model(torch), sizes, streams)
    elif name.endswith("oom"):
        net = model(torch)
        held = []
        try:
            for number in range(100):
                steps(torch, net, [64 * (number + 1)])
                held.append(torch.empty(number % 5 + 1, 3 << 20, device="cuda", dtype=torch.uint8))
        except torch.OutOfMemoryError:
            print("out of memory at step", number)
        del held[::2]
        steps(torch, net, [64])
    elif name == "graphs":
        net = model(torch)
        steps(torch, net, sizes[:3])
        graphs = []
        for batch in (256, 1024):
            x = torch.randn(batch, 1024, device="cuda")
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                net(x)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = net(x)
            graphs.append((graph, x, out))
        for graph, *_ in graphs * 3:
            graph.replay()
        steps(torch, net, sizes[3:8])
        del graph, graphs[0]
        steps(torch, net, sizes[8:])
    elif name == "pool":
        net = model(torch)
        pool = torch.cuda.MemPool()
        KEPT.append(pool)  # once it is gone, nothing tells its blocks from others: traces do not name pools
        for batch in sizes:
            with torch.cuda.use_mem_pool(pool):
                kept = [torch.empty(batch, 1024, device="cuda"), torch.empty(batch // 8, 1024, device="cuda")]
            steps(torch, net, [batch])
            del kept


def one(out: Path, name: str) -> None:
    if CONF[name]:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = CONF[name]
    import torch

    torch.manual_seed(0)
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=200_000)
    scenario(name)
    keep(out / f"{name}.pickle.zst", torch.cuda.memory._snapshot())


def keep(path: Path, content: dict) -> None:
    import zstandard

    keep_no_paths(content)
    data = zstandard.compress(pickle.dumps(content, protocol=4), 19)
    path.write_bytes(data)
    traces = [len(t) for t in content["device_traces"]]
    print(path.name, len(data), "bytes", traces, "events", len(content["segments"]), "segments", flush=True)


def keep_no_paths(content: dict) -> None:
    """File names of frames without the folders of this machine."""
    holders = [*content["segments"], *(e for t in content["device_traces"] for e in t)]
    holders += [block for segment in content["segments"] for block in segment["blocks"]]
    for holder in holders:
        for frame in holder.get("frames") or ():
            parts = Path(frame["filename"]).parts
            known = [i for i, part in enumerate(parts) if part in ("site-packages", "campaigns")]
            at = max(known, default=max(len(parts) - 2, 0))
            frame["filename"] = "/".join(parts[at + (parts[at] == "site-packages") :]) if parts else ""


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    if len(sys.argv) > 2 and sys.argv[2] in CONF:
        one(out, sys.argv[2])
        return
    if len(sys.argv) > 2:
        with open(sys.argv[2], "rb") as opened:
            keep(out / f"{Path(sys.argv[2]).name}.zst", pickle.load(opened))
        return
    started = [subprocess.Popen([sys.executable, __file__, str(out), name]) for name in CONF]
    failed = [name for name, process in zip(CONF, started, strict=True) if process.wait()]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


main()
