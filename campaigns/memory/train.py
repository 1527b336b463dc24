"""Train one model under one allocator, and print one JSON object: memory, driver calls and time of every step.

python train.py --model OPT-1.3B --strategy LRO --batch 8 --seq 1024 --allocator caching|expandable|stitching

One process is one allocator, since it cannot be changed after the first allocation. Random weights and tokens. An
out-of-memory error ends the run early and is part of the answer. Under `torchrun --nproc-per-node N`, N GPUs share the
parameters (FSDP), and the first one's numbers are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="GPT-2")
parser.add_argument("--strategy", default="N")
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--seq", type=int, default=512)
parser.add_argument("--lengths", choices=["fixed", "varied"], default="fixed")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--layers", type=int, help="fewer layers than the model has, of the same shape")
parser.add_argument("--allocator", choices=["caching", "expandable", "stitching"], default="caching")
parser.add_argument("--limit-gib", type=float, help="memory that the allocator may take from the driver")
parser.add_argument("--device", default="cuda")
parser.add_argument("--snapshot", help="record the history of the allocator and keep it in this file")
given = parser.parse_args()
if given.allocator == "expandable":
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # the same sums in every run

from dataclasses import replace  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from decoder import SHAPES, Decoder  # noqa: E402

rank, n_gpus = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
stitching = None
if given.allocator == "stitching":
    from gpubloat.memory import stitching as module

    stitching = module.install(record=bool(given.snapshot))


def driver_calls() -> int:
    """Calls of the allocator to the driver until now."""
    if given.device == "cpu":
        return 0
    if stitching is not None:
        return stitching.n_driver_calls
    stats = torch.cuda.memory_stats()
    return stats["num_device_alloc"] + stats["num_device_free"]


def lengths() -> list[int]:
    """Tokens per sample of each step: always the longest, or from a quarter of it up, in no order."""
    if given.lengths == "fixed":
        return [given.seq] * given.steps
    draw = random.Random(0)
    return [draw.randrange(given.seq // 4, given.seq + 1) for _ in range(given.steps)]


def share(model: Decoder) -> None:
    """Every GPU keeps its part of each layer, and has the whole only while the layer is used."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)


def train(out: dict) -> None:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    shape = SHAPES[given.model]
    shape = replace(shape, n_layers=given.layers or shape.n_layers, length=max(shape.length, given.seq))
    out["n_layers"] = shape.n_layers
    if given.limit_gib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(given.limit_gib * 2**30 / total)
    model = Decoder(shape, given.strategy, given.device)
    if n_gpus > 1:
        share(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    for length in lengths():
        begun = time.perf_counter()
        tokens = torch.randint(0, shape.vocabulary, (given.batch, length), device=given.device)
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        out["loss"] = loss.item()  # waits for the GPU
        del loss, tokens
        out["steps"].append([time.perf_counter() - begun, driver_calls()])


def main() -> None:
    out = {**vars(given), "n_gpus": n_gpus, "n_layers": None, "is_oom": False, "loss": None, "steps": []}
    if given.snapshot and stitching is None:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=200_000)
    if n_gpus > 1:
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    try:
        train(out)
    except torch.OutOfMemoryError as error:
        out["is_oom"] = True
        out["message"] = str(error).splitlines()[0]
    if given.device != "cpu":
        stats = torch.cuda.memory_stats()
        for name in ("reserved", "active", "requested"):
            out[f"{name}_peak_bytes"] = stats[f"{name}_bytes.all.peak"]
        out["n_driver_calls"] = driver_calls()
        if stitching is not None:
            out["stitching"] = stitching.stats()
    if given.snapshot:
        (stitching.dump_snapshot if stitching is not None else torch.cuda.memory._dump_snapshot)(given.snapshot)
    if n_gpus > 1:
        dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(out))
        sys.stdout.flush()


main()
