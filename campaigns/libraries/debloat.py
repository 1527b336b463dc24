"""Trace, debloat and verify workloads on a GPU; prune whole environments by target; cost of the collectors.

python campaigns/libraries/debloat.py --out OUT [--steps mobilenet-infer,guard,prune,...] [--deadline SECONDS]

Needs a GPU, PyTorch with torchvision, a C compiler and the CUPTI headers. About 4 minutes for each of the MobileNetV2
workloads, 2 for pruning, 5 for the overhead, on one H200 with 16 cores. Every step leaves runs in OUT, without paths
of the machine; a step that fails says so and the next one goes on.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pandas as pd

from gpubloat.libraries import cost
from gpubloat.libraries.attach import audited, cupti_library
from gpubloat.libraries.debloat import debloat
from gpubloat.libraries.execute import execute
from gpubloat.libraries.prune import prune
from gpubloat.libraries.trace import trace
from gpubloat.libraries.verify import verify
from gpubloat.run import Run, RunWriter, provenance

HERE = Path(__file__).parent / "workloads"
COMMANDS = {
    "mobilenet-infer": ["mobilenet.py", "infer", "--steps", "30"],
    "mobilenet-train": ["mobilenet.py", "train", "--steps", "30"],
    "transformer-infer": ["transformer.py", "infer"],
    "transformer-train": ["transformer.py", "train"],
    "calls": ["calls.py"],
}
# Tables of a traced run that are kept: the others can be had from the same libraries by a scan.
KEPT = (
    "loaded", "used_functions", "evidence", "used_kernels", "modules", "processes", "libraries", "elements", "problems",
)  # fmt: skip
PREFIX = "libraries-h200-"


def command(workload: str) -> list[str]:
    script, *arguments = COMMANDS[workload]
    return [sys.executable, str(HERE / script), *arguments]


class Campaign:
    """Folders of one campaign: runs to keep, and everything else."""

    def __init__(self, out: Path, repeat: int) -> None:
        self.out, self.repeat = out, repeat
        self.work = Path(tempfile.mkdtemp(prefix="campaign-"))
        self.pool = ProcessPoolExecutor(min(os.cpu_count() or 1, 12))

    def keep(self, run: Run, name: str, tables: tuple[str, ...] | None = None) -> None:
        """Save a run without paths of this machine, and of what was removed only the elements: functions are many."""
        about = dict(run.provenance)
        names = [n for n in about.pop("tables") if tables is None or n in tables]
        with RunWriter("libraries", names, self.out / f"{PREFIX}{name}", True) as writer:
            for table in names:
                frame = run[table]
                if table == "removed":
                    frame = frame[frame["what"] == "element"]
                writer.append(table, frame.assign(path="") if "path" in frame else frame)
            writer.finish({k: v for k, v in about.items() if k != "instrument"})

    def traced(self, workload: str, name: str, loading: str = "") -> Run:
        env = dict(os.environ) | ({"CUDA_MODULE_LOADING": loading} if loading else {})
        run = trace(
            command(workload), out=self.work / f"{name}-trace", force=True, workload=workload, env=env,
            executor=self.pool, command_line=f"gpubloat libraries trace --workload {workload}",
        )  # fmt: skip
        self.keep(run, f"{name}-trace", KEPT)
        return run

    def debloated(self, name: str, runs: list[Run], zstd: bool = False) -> Run:
        started = time.monotonic()
        words = "gpubloat libraries debloat"
        run = debloat(runs, self.work / name, force=True, zstd=zstd, executor=self.pool, command=words)
        run.provenance["debloat_s"] = round(time.monotonic() - started, 3)
        self.keep(run, f"{name}-debloat", ("libraries", "removed", "reduction", "problems"))
        return run


def whole(campaign: Campaign, workload: str) -> None:
    """Lazily and eagerly traced, debloated, verified in both modes."""
    lazy = campaign.traced(workload, workload)
    eager = campaign.traced(workload, f"{workload}-eager", "EAGER")
    campaign.debloated(workload, [lazy, eager])
    run = verify(
        campaign.work / workload, command(workload), repeat=campaign.repeat, loadings=("lazy", "eager"),
        guard="restore-cpu",
        command_line=f"gpubloat libraries verify --repeat {campaign.repeat} --loading lazy,eager --guard restore-cpu",
    )  # fmt: skip
    campaign.keep(run, f"{workload}-verify")
    show(run["verdicts"])
    print(run.provenance["numbers"], run.provenance.get("complaints"), run.provenance.get("problems"))


def traced_only(campaign: Campaign, workload: str) -> None:
    """Traced and debloated, for what workloads share."""
    campaign.debloated(workload, [campaign.traced(workload, workload)])


def guard(campaign: Campaign) -> None:
    """Copies made from a lazy run alone, run eagerly: the mode that was not traced."""
    workload = "mobilenet-infer"
    kept = campaign.work / f"{workload}-trace"
    lazy = Run.load(kept) if kept.exists() else campaign.traced(workload, workload)
    campaign.debloated(f"{workload}-lazy", [lazy])
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    try:
        for mode in ("off", "report", "restore"):
            started = time.monotonic()
            status, run = execute(campaign.work / f"{workload}-lazy", command(workload), guard=mode)
            taken = time.monotonic() - started
            print(f"guard {mode}: exit status {status}, {len(run['misses'])} misses, {taken:.1f} s")
            campaign.keep(run, f"{workload}-eager-on-{workload}-guard-{mode}")
        again = campaign.debloated(f"{workload}-with-misses", [lazy, run])
        status, run = execute(campaign.work / f"{workload}-with-misses", command(workload), guard="report")
        print(f"debloated again with the misses: exit status {status}, {len(run['misses'])} misses", again)
    finally:
        del os.environ["CUDA_MODULE_LOADING"]


def pruned(campaign: Campaign) -> None:
    """The whole CUDA stack for one target, then four workloads on it."""
    import torch

    site = Path(torch.__file__).parents[1]
    folder = campaign.work / "pruned"
    started = time.monotonic()
    run = prune([site / "torch", site / "nvidia"], "sm_90", folder, zstd=True, executor=campaign.pool, force=True)
    print(f"pruned in {time.monotonic() - started:.1f} s")
    campaign.keep(run, "pruned-sm90", ("libraries", "removed", "reduction", "problems"))
    columns = [c for c in run["reduction"] if c.endswith(("_bytes", "_after")) or c.startswith("n_")]
    print((run["reduction"][columns].astype("Float64").sum() / 1e6).to_string())
    for workload in ("calls", "transformer-infer", "mobilenet-infer"):
        rounds = campaign.repeat if workload == "calls" else 1  # some of its numbers may differ between originals
        words = f"gpubloat libraries verify --repeat {rounds}"
        found = verify(folder, command(workload), repeat=rounds, command_line=words)
        campaign.keep(found, f"pruned-sm90-{workload}-verify")
        print(workload, *(found.provenance.get(name) for name in ("verdict", "n_swapped", "complaints", "numbers")))


def overhead(campaign: Campaign) -> None:
    """400 training steps under each collector, rounds interleaved; the two that cost most in the first two only."""
    records = campaign.work / "records"
    cupti, why = cupti_library()
    print("CUPTI:", cupti, why)
    inject = {"CUDA_INJECTION64_PATH": str(cupti), "GPUBLOAT_DIR": str(records)}
    audit = audited(os.environ, GPUBLOAT_DIR=str(records), GPUBLOAT_FUNCTIONS="1", GPUBLOAT_PAGES="1")
    ours = {name: audit[name] for name in ("LD_AUDIT", "GPUBLOAT_DIR", "GPUBLOAT_FUNCTIONS", "GPUBLOAT_PAGES")}
    variants = {
        "none": {},
        "callbacks": inject,
        "all": ours | inject,
        "domains": inject | {"GPUBLOAT_CUPTI_MODE": "domains"},
        "profiler": {"WITH_PROFILER": "1"},
    }
    rows = []
    for number in range(campaign.repeat):
        names = [name for name in variants if number < 2 or name not in ("domains", "profiler")]
        for name in names[:: 1 if number % 2 == 0 else -1]:
            shutil.rmtree(records, ignore_errors=True)
            records.mkdir()
            words = [sys.executable, str(HERE / "mobilenet.py"), "train", "--steps", "400"]
            found = cost.run(words, env={**os.environ, **variants[name]})
            lines = found.stderr_tail.decode().splitlines()
            steady = [float(line.split()[1]) for line in lines if line.startswith("steady")]
            rows.append((name, number, found.exit_status, found.wall_s, *(steady or [float("nan")])))
            print(*rows[-1], flush=True)
    table = pd.DataFrame(rows, columns=["variant", "repeat", "exit_status", "wall_s", "step_s"])
    with RunWriter("libraries", ["overhead"], campaign.out / f"{PREFIX}overhead", True) as writer:
        writer.append("overhead", table)
        about = provenance("campaigns/libraries/debloat.py --steps overhead", {"step_s": "mean of steps 11 to 400"}, [])
        writer.finish(about | {"workload": "mobilenet-train", "steps": 400})
    middle = table.groupby("variant")[["wall_s", "step_s"]].median()
    print((middle / middle.loc["none"]).to_string())


def show(table: pd.DataFrame) -> None:
    print(table.T.to_string())


STEPS: dict[str, Callable[[Campaign], None]] = {
    "mobilenet-infer": lambda c: whole(c, "mobilenet-infer"),
    "mobilenet-train": lambda c: whole(c, "mobilenet-train"),
    "guard": guard,
    "prune": pruned,
    "overhead": overhead,
    "transformer-infer": lambda c: traced_only(c, "transformer-infer"),
    "transformer-train": lambda c: traced_only(c, "transformer-train"),
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--deadline", type=float, default=float("inf"), help="start no step after this many seconds")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    campaign = Campaign(given.out, given.repeat)
    for name in given.steps.split(","):
        if time.monotonic() - started > given.deadline:
            print(f"no time left for {name}")
            continue
        begun = time.monotonic()
        print(f"== {name}", flush=True)
        try:
            STEPS[name](campaign)
        except Exception:
            traceback.print_exc(limit=4)
        print(f"== {name}: {time.monotonic() - begun:.1f} s", flush=True)
    shutil.rmtree(campaign.work, ignore_errors=True)


if __name__ == "__main__":
    main()
