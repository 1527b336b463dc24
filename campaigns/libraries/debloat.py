"""Trace, debloat and verify workloads on a GPU, and what follows from it: data/measured/libraries-h200-*.

python campaigns/libraries/debloat.py --out OUT [--work DIR] [--steps whole,largest,...] [--workloads NAME,...]
                                      [--loading lazy,eager] [--repeat N] [--pairs B-on-A,...] [--deadline SECONDS]
                                      [--at-once N]

Needs a GPU, the packages of the workloads, a C compiler and the CUPTI headers. Steps, with times on one H200 and 16
cores; those of `largest`, `cold`, `union` and of two GPUs are estimates:

trace      traced between two runs as they are, debloated: 1 minute a workload, vLLM 2.5, JAX 0.7 to 3
whole      the same lazily and eagerly, then verified: with 5 rounds 5 minutes a workload of PyTorch; lazily alone 4.5
           of Llama, 7 of vLLM, 8 on two GPUs; of JAX, four at once, 2 for inference, 5 to 9 for training
largest    verified with the 8 largest libraries replaced and no others: as whole without its first 1.5 minutes
cold       verified with an empty page cache before each run, but for Python: twice the time of largest
transfer   workload B under the guard on the copies made for A: half a minute a pair
union      copies from all traces in DIR, verified with the first of the workloads: 4 minutes
image      bytes of the folder of packages with each set of copies in DIR: 35 seconds each, 50 without any
guard      a mode that was not traced: 2 minutes
prune      the CUDA stack for one target, and three workloads on it: 2 minutes
overhead   400 steps under each collector: 5 minutes

With 5 rounds all of it is over two hours, so ask for a few workloads at a time. DIR keeps traces and copies from
call to call: nothing is traced twice, and transfer, union and image take what is there. Each workload leaves its runs
in OUT as soon as it is done, without paths of the machine. One that fails says so and the next one goes on. After the
deadline nothing is started, and a verification takes as few rounds as fit before it. What Table 8 needs is in the
run.json of a trace (plain_s, wall_s, scan_s) and of copies (debloat_s).

Several campaigns may run at once, of other workloads each, also on one GPU: memory is counted by process, times are
longer for originals and copies alike. Say how many with --at-once; each run.json keeps it.
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
from pathlib import Path

import pandas as pd
import site_packages
from campaign import (
    COMMANDS,
    EAGER,
    HERE,
    PREFIX,
    Campaign,
    about_transfer,
    command,
    page_cache_dropped,
    printing_into,
    restricted,
    steady,
)  # fmt: skip

from gpubloat.errors import GpubloatError
from gpubloat.libraries import cost, manifest
from gpubloat.libraries.attach import audited, cupti_library
from gpubloat.libraries.execute import execute
from gpubloat.libraries.prune import prune
from gpubloat.libraries.verify import verify
from gpubloat.run import Run, RunWriter, provenance

N_LARGEST = 8
PAIRS = (
    "mobilenet-infer-on-mobilenet-train", "mobilenet-train-on-mobilenet-infer", "transformer-infer-on-mobilenet-infer",
    "mobilenet-infer-on-transformer-infer", "llama-infer-on-transformer-infer",
    "jax-mobilenet-infer-on-mobilenet-infer", "jax-transformer-infer-on-jax-mobilenet-infer",
    "vllm-llama-infer-on-llama-infer",
)  # fmt: skip


def traced(campaign: Campaign, workload: str) -> None:
    """Traced lazily and debloated, for what workloads share."""
    campaign.debloated(workload, [campaign.traced(workload)])


def whole(campaign: Campaign, workload: str) -> None:
    """Traced, debloated and verified in each loading mode."""
    campaign.verified(workload, campaign.copies(workload), workload)


def largest(campaign: Campaign, workload: str) -> None:
    """As the paper did: only the largest libraries are replaced."""
    folder = campaign.work / f"{workload}-largest"
    print("replaced:", *restricted(campaign.copies(workload), folder, N_LARGEST))
    campaign.verified(workload, folder, f"{workload}-largest")


def cold(campaign: Campaign, workload: str) -> None:
    """Time until the results are there when nothing of any library is in the page cache yet."""
    campaign.verified(workload, campaign.copies(workload), f"{workload}-cold", before=page_cache_dropped)


def transfer(campaign: Campaign, pair: str) -> None:
    """A workload on copies that were made without it: what has to be brought back, and the time."""
    workload, _, made_for = pair.partition("-on-")
    folder = campaign.copies(made_for)
    campaign.traced(workload)
    # The time limit is that of verify, from outside: a driver that meets a damaged element can loop for ever.
    limit = 60 + 10 * campaign.usual_s(workload)
    with tempfile.TemporaryFile() as printed:
        with printing_into(printed):
            status, run = execute(
                folder, ["timeout", f"{limit:.0f}", *command(workload)], guard="restore",
                command_line="gpubloat libraries exec --guard restore",
            )  # fmt: skip
        printed.seek(0)
        run.provenance |= about_transfer(campaign, workload, printed.read()) | {"copies": made_for}
    campaign.keep(run, pair)
    about = run.provenance
    print(f"{pair}: exit status {status}, {len(run['misses'])} misses, {about['wall_s']} s, plain {about['plain_s']} s")
    print(run["misses"]["what"].value_counts().to_dict(), about["number"], about["number_plain"], about["problems"])


def union(campaign: Campaign) -> None:
    """Copies for all workloads that were traced, lazily or eagerly."""
    runs = [Run.load(path.parent) for path in sorted(campaign.work.glob("*-trace/run.json"))]
    runs = [run for run in runs if "plain_s" in run.provenance] or [campaign.traced(campaign.workloads[0])]
    print("union of", *(f"{run.provenance['workload']} ({run.provenance['loading']})" for run in runs))
    campaign.verified(campaign.workloads[0], campaign.debloated("union", runs), "union")


def image(campaign: Campaign) -> None:
    """The folder of packages as it is, and with each set of copies in its place. Saved after each."""
    import torch

    root = Path(torch.__file__).parents[1]
    folders = [campaign.work / name for name in ("union", *campaign.workloads)]
    rows = []
    for folder in [None, *(f for f in folders if (f / manifest.NAME).exists())]:
        if campaign.left() < 0:
            break
        found = site_packages.size(root, site_packages.copies(folder) if folder else {})
        rows.append({"copies": folder.name if folder else "", **found._asdict()})
        print(rows[-1], flush=True)
        with RunWriter("libraries", [], campaign.out / f"{PREFIX}image", True) as writer:
            about = provenance("campaigns/libraries/debloat.py --steps image", site_packages.METHOD, [])
            writer.finish(about | {"workload": "image", "sizes": rows})


def guard(campaign: Campaign) -> None:
    """Copies made from a lazy run alone, run eagerly: the mode that was not traced."""
    workload = "mobilenet-infer"
    lazy = campaign.traced(workload)
    folder = campaign.debloated(f"{workload}-lazy", [lazy])
    os.environ.update(EAGER)
    try:
        for mode in ("off", "report", "restore"):
            started = time.monotonic()
            status, run = execute(folder, command(workload), guard=mode)
            taken = time.monotonic() - started
            print(f"guard {mode}: exit status {status}, {len(run['misses'])} misses, {taken:.1f} s")
            run.provenance["workload"] = workload
            campaign.keep(run, f"{workload}-eager-on-{workload}-guard-{mode}")
        again = campaign.debloated(f"{workload}-with-misses", [lazy, run])
        status, run = execute(again, command(workload), guard="report")
        print(f"debloated again with the misses: exit status {status}, {len(run['misses'])} misses")
    finally:
        for name in EAGER:
            del os.environ[name]


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
        found.provenance["workload"] = workload
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
            rows.append((name, number, found.exit_status, found.wall_s, steady(found)))
            print(*rows[-1], flush=True)
    table = pd.DataFrame(rows, columns=["variant", "repeat", "exit_status", "wall_s", "step_s"])
    table["step_s"] = table["step_s"].astype(float)
    with RunWriter("libraries", ["overhead"], campaign.out / f"{PREFIX}overhead", True) as writer:
        writer.append("overhead", table)
        about = provenance("campaigns/libraries/debloat.py --steps overhead", {"step_s": "mean of steps 11 to 400"}, [])
        writer.finish(about | {"workload": "mobilenet-train", "steps": 400})
    middle = table.groupby("variant")[["wall_s", "step_s"]].median()
    print((middle / middle.loc["none"]).to_string())


EACH: dict[str, Callable[[Campaign, str], None]] = {
    "trace": traced, "whole": whole, "largest": largest, "cold": cold,
}  # fmt: skip
ONCE: dict[str, Callable[[Campaign], None]] = {
    "union": union, "image": image, "guard": guard, "prune": pruned, "overhead": overhead,
}  # fmt: skip


def jobs(steps: list[str], workloads: list[str], pairs: list[str]) -> list[tuple[str, Callable[[Campaign], None]]]:
    """What to do, in order, with the name that is printed."""
    found: list[tuple[str, Callable[[Campaign], None]]] = []
    for step in steps:
        if step in EACH:
            found += [(f"{step} {name}", lambda c, step=step, name=name: EACH[step](c, name)) for name in workloads]
        elif step == "transfer":
            found += [(f"{step} {pair}", lambda c, pair=pair: transfer(c, pair)) for pair in pairs]
        else:
            found.append((step, ONCE[step]))
    return found


def listed(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """For argparse: names with commas between, all of them known."""

    def parse(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return text.split(",")

    return parse


def pair_list(text: str) -> list[str]:
    """For argparse: B-on-A, of known workloads."""
    for pair in text.split(","):
        listed(tuple(COMMANDS))(pair.replace("-on-", ","))
        if pair.count("-on-") != 1:
            raise argparse.ArgumentTypeError(f"{pair!r} is no pair: name it B-on-A")
    return text.split(",")


def main() -> None:
    """Command line."""
    steps = (*EACH, "transfer", *ONCE)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs to keep")
    parser.add_argument("--work", type=Path, help="folder for traces and copies; default: a temporary one")
    parser.add_argument("--steps", type=listed(steps), default=[name for name in steps if name != "trace"])
    parser.add_argument("--workloads", type=listed(tuple(COMMANDS)), default=[n for n in COMMANDS if n != "calls"])
    parser.add_argument("--loading", type=listed(("lazy", "eager")), default=["lazy", "eager"])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--pairs", type=pair_list, help="default: some, of the chosen workloads")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="start nothing after this many seconds")
    parser.add_argument("--at-once", type=int, default=1, help="campaigns that run on this machine now, this one too")
    given = parser.parse_args()
    ends = time.monotonic() + given.deadline
    given.out.mkdir(parents=True, exist_ok=True)
    work = given.work or Path(tempfile.mkdtemp(prefix="campaign-"))
    work.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(given.out, work, given.workloads, given.repeat, given.loading, ends, given.at_once)
    pairs = given.pairs or [pair for pair in PAIRS if {*pair.split("-on-")} <= {*given.workloads}]
    for name, do in jobs(given.steps, given.workloads, pairs):
        if campaign.left() < 0:
            print(f"no time left for {name}")
            continue
        begun = time.monotonic()
        print(f"== {name}", flush=True)
        try:
            do(campaign)
        except GpubloatError as error:
            print(f"{name}: {error}")
        except Exception:
            traceback.print_exc(limit=4)
        print(f"== {name}: {time.monotonic() - begun:.1f} s", flush=True)
    campaign.pool.shutdown()
    if given.work is None:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
