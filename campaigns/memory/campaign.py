"""Fragmentation of training under three allocators; what the calls to the driver cost; snapshots to keep.

python campaigns/memory/campaign.py --out OUT [--steps vmm,samples,...,fsdp] [--deadline SECONDS]

Needs a GPU of 140 GB (fsdp: two), PyTorch, a C++ compiler. What is measured in bytes runs several processes side by
side; what is measured in seconds has the GPU for itself. On a host with two H200 and 32 cores, about 10 minutes:
fsdp, then samples and batches (CUDA_VISIBLE_DEVICES=1) beside throughput (0), then vmm alone, then strategies.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd

from gpubloat.run import RunWriter, provenance

HERE = Path(__file__).parent
ALLOCATORS = ("caching", "expandable", "stitching")
STRATEGIES = ("N", "R", "LR", "RO", "LRO")
# Layers fewer than the model has, where one GPU or the time does not hold them all: the shapes stay.
MODELS: dict[str, dict[str, Any]] = {
    "OPT-1.3B": {"batch": 8, "seq": 1024},
    "GPT-2": {"batch": 16, "seq": 1024},
    "OPT-13B": {"batch": 8, "seq": 1024, "layers": 6},
    "GPT-NeoX-20B": {"batch": 8, "seq": 1024, "layers": 4},
}
PREFIX = "memory-h200-"
METHOD = {
    "peaks": "torch.cuda.memory_stats of the process after its last step; of stitching, the allocator's own",
    "active_peak_bytes": "blocks rounded to 512 bytes, also for stitching, whose rounding to chunks counts as lost",
    "step_s": "median of the steps after the first three, each timed until its loss is on the CPU",
    "n_driver_calls": "caching and expandable: num_device_alloc + num_device_free; stitching: every call to the driver",
    "loss": "of the last step; random weights and tokens, the same seed and deterministic kernels",
}


def train(configuration: dict[str, Any], n_gpus: int = 1) -> dict[str, Any]:
    """One process for each GPU; {"failed": ...} where none printed JSON."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in configuration.items() if value is not None]
    python = [sys.executable]
    if n_gpus > 1:
        python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_gpus)]
    env = os.environ | {"OMP_NUM_THREADS": "6"}  # several run side by side
    script = [str(HERE / "train.py"), *words]
    done = subprocess.run([*python, *script], capture_output=True, text=True, timeout=300, env=env)
    lines = done.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        return {**configuration, "failed": done.stderr[-800:]}
    return json.loads(lines[-1])


def several(configurations: Iterable[dict[str, Any]], at_once: int, n_gpus: int = 1) -> Iterator[dict[str, Any]]:
    with ThreadPoolExecutor(at_once) as pool:
        for found in pool.map(lambda one: train(one, n_gpus), configurations):
            if "failed" in found:
                print("failed:", found)
                continue
            row = summary(found)
            shown = (row["model"], row["strategy"], row["batch"], row["seq"], row["lengths"], row["allocator"])
            peaks = [round(row[f"{name}_peak_bytes"] / 2**30, 2) for name in ("reserved", "active", "requested")]
            more = (row["utilisation_frac"], row["step_s"], row["n_driver_calls"], row["converged_step"], row["is_oom"])
            print(*shown, *peaks, *more, row["loss"], found.get("message", ""), flush=True)
            yield found


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Row of the table training."""
    times = [step[0] for step in found["steps"]]
    calls = [step[1] for step in found["steps"]]
    last = max((i for i, (a, b) in enumerate(zip([0, *calls], calls, strict=False)) if a != b), default=-1)
    reserved, active = found["reserved_peak_bytes"], found["active_peak_bytes"]
    return {
        "model": found["model"],
        "n_layers": found["n_layers"],
        "strategy": found["strategy"],
        "n_gpus": found["n_gpus"],
        "batch": found["batch"],
        "seq": found["seq"],
        "lengths": found["lengths"],
        "limit_bytes": int(found["limit_gib"] * 2**30) if found["limit_gib"] else None,
        "allocator": found["allocator"],
        "repeat": found.get("repeat", 0),
        "reserved_peak_bytes": reserved,
        "active_peak_bytes": active,
        "requested_peak_bytes": found["requested_peak_bytes"],
        "utilisation_frac": active / reserved if reserved else None,
        "fragmentation_frac": 1 - active / reserved if reserved else None,
        "step_s": statistics.median(times[3:]) if len(times) > 3 else None,
        "n_steps": len(times),
        "n_driver_calls": found["n_driver_calls"],
        "converged_step": last + 1 if last + 1 < len(times) else None,
        "is_oom": found["is_oom"],
        "loss": found["loss"],
    }


def per_step(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of the table driver_steps."""
    row = summary(found)
    before = 0
    keys = ("model", "n_layers", "strategy", "n_gpus", "batch", "seq", "lengths", "limit_bytes", "allocator", "repeat")
    for step, (seconds, calls) in enumerate(found["steps"]):
        yield {name: row[name] for name in keys} | {
            "step": step,
            "n_driver_calls": calls - before,
            "step_s": seconds,
        }
        before = calls


def keep(out: Path, name: str, tables: dict[str, pd.DataFrame], more: dict[str, Any] | None = None) -> None:
    with RunWriter("memory", list(tables), out / f"{PREFIX}{name}", True) as writer:
        for table, frame in tables.items():
            writer.append(table, frame)
        writer.finish(provenance(f"campaigns/memory/campaign.py --steps {name}", METHOD, []) | (more or {}))


def keep_trained(out: Path, name: str, found: list[dict[str, Any]]) -> None:
    tables = {
        "training": pd.DataFrame([summary(one) for one in found]),
        "driver_steps": pd.DataFrame([row for one in found for row in per_step(one)]),
    }
    stitching = {
        "/".join(str(one[key]) for key in ("model", "strategy", "batch", "seq", "lengths")): one["stitching"]
        for one in found
        if "stitching" in one
    }
    keep(out, name, tables, {"workload": name, "stitching": stitching})


def strategies(out: Path) -> None:
    """Peaks and driver calls of every model and strategy, with lengths that vary; of one also with the same length."""
    found: list[dict[str, Any]] = []
    for model, shape in MODELS.items():
        wanted = [
            {"model": model, **shape, "strategy": strategy, "lengths": lengths, "steps": 10, "allocator": allocator}
            for strategy in STRATEGIES
            for lengths in (("varied", "fixed") if model == "OPT-1.3B" else ("varied",))
            for allocator in ALLOCATORS
        ]
        found += several(wanted, 4)
        keep_trained(out, "strategies", found)


def throughput(out: Path) -> None:
    """Time of a step once the driver is not called any more, rounds interleaved, one process at a time."""
    found = []
    for number in range(3):
        wanted = [
            {**MODELS["OPT-1.3B"], "model": "OPT-1.3B", "strategy": strategy, "steps": 20, "allocator": allocator}
            for strategy in ("N", "LR")
            for allocator in ALLOCATORS[:: 1 if number % 2 == 0 else -1]
        ]
        found += [{**one, "repeat": number} for one in several(wanted, 1)]
        keep_trained(out, "throughput", found)


def fsdp(out: Path) -> None:
    """Two GPUs that share the parameters."""
    wanted = [
        {
            "model": model,
            **MODELS[model],
            "strategy": strategy,
            "lengths": "varied",
            "steps": 12,
            "allocator": allocator,
        }
        for model, strategy in (("OPT-1.3B", "N"), ("OPT-13B", "LR"))
        for allocator in ALLOCATORS
    ]
    keep_trained(out, "fsdp", list(several(wanted, 3, n_gpus=2)))


def batches(out: Path) -> None:
    """Larger and larger batches under a limit of memory, until one does not fit."""
    wanted = [
        {"model": "OPT-1.3B", "strategy": "LR", "seq": 1024, "lengths": "varied", "steps": 12, "batch": batch,
         "limit_gib": 24.0, "allocator": allocator}
        for batch in (20, 24, 28, 32, 36, 40)
        for allocator in ALLOCATORS
    ]  # fmt: skip
    keep_trained(out, "batches", list(several(wanted, 5)))


def vmm(out: Path) -> None:
    done = subprocess.run([sys.executable, str(HERE / "vmm.py")], capture_output=True, text=True, timeout=200)
    if done.returncode:
        raise RuntimeError(done.stderr[-800:])
    found = json.loads(done.stdout.splitlines()[-1])
    costs = pd.DataFrame(found["vmm_costs"])
    speeds = pd.DataFrame(found["bandwidth"])
    keep(out, "vmm", {"vmm_costs": costs, "bandwidth": speeds})
    print(costs.groupby(["is_busy", "chunk_bytes", "call"])["time_us"].median().unstack().round(0).to_string())
    print(speeds.groupby("chunk_bytes")["gb_per_s"].median().to_string())


def samples(out: Path) -> None:
    """Small snapshots of what public ones lack, and the first steps of four training runs."""
    folder = out / "samples"
    subprocess.run([sys.executable, str(HERE / "samples.py"), str(folder)], check=True, timeout=200)
    recorded: dict[str, dict[str, Any]] = {
        "opt-lro": {**MODELS["OPT-1.3B"], "model": "OPT-1.3B", "layers": 6, "strategy": "LRO", "steps": 6},
        "opt-13b-lro": {**MODELS["OPT-13B"], "model": "OPT-13B", "layers": 8, "strategy": "LRO", "steps": 8},
        "opt-n": {**MODELS["OPT-1.3B"], "model": "OPT-1.3B", "strategy": "N", "lengths": "fixed", "steps": 8},
        "gpt2-n": {**MODELS["GPT-2"], "model": "GPT-2", "strategy": "N", "lengths": "fixed", "steps": 10},
    }
    for name, configuration in recorded.items():
        raw = folder / f"{name}.pickle"
        train({"lengths": "varied", **configuration, "snapshot": str(raw)})
        words = [sys.executable, str(HERE / "samples.py"), str(folder), str(raw)]
        subprocess.run(words, check=True, timeout=200)
        raw.unlink()


def stress(out: Path) -> None:
    """A million random operations of the stitching allocator; what was found is in run.json."""
    words = [sys.executable, str(HERE / "stress.py"), "--operations", "1000000", "--share", "0.2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    found = json.loads(done.stdout.splitlines()[-1])
    keep(out, "stress", {}, {"workload": "stress", "stress": found})
    print(found["n_operations"], "operations, clean:", found["clean"])


STEPS: dict[str, Callable[[Path], None]] = {
    "vmm": vmm,
    "stress": stress,
    "samples": samples,
    "throughput": throughput,
    "batches": batches,
    "strategies": strategies,
    "fsdp": fsdp,
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--deadline", type=float, default=float("inf"), help="start no step after this many seconds")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    for name in given.steps.split(","):
        if time.monotonic() - started > given.deadline:
            print(f"no time left for {name}")
            continue
        begun = time.monotonic()
        print(f"== {name}", flush=True)
        try:
            STEPS[name](given.out)
        except Exception:
            traceback.print_exc(limit=4)
        print(f"== {name}: {time.monotonic() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()
