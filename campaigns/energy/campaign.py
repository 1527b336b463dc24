"""Measure the energy instrument and, with it, cases that are known: one GPU, nothing is set on it.

    python campaigns/energy/campaign.py --out DIR [--steps probe,repeats,null,cases,gpt2,pairs,overhead]
                                        [--cases gelu,tf32] [--pairs "gpt2 and torch.compile,..."] [--deadline S]
                                        [--null-repeats 20] [--band FRAC]

probe 70 s; repeats, six of each of three operators, 55 s; null, A against A, 35 s each; cases 50 to 180 s each; gpt2
by operator 150 s; pairs up to 350 s each; overhead 170 s, most of it the capture of 32 sequences. Runs are written to
DIR as they end; called again with the same DIR, null and pairs go on where they stopped. Cases of JAX run in programs
of their own. What fails is told in DIR/failed.json and does not stop the rest.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CASES, SYSTEMS = HERE / "cases", HERE / "systems"
sys.path[:0] = [str(HERE), str(CASES)]

import models  # noqa: E402
import pandas as pd  # noqa: E402
import torch  # noqa: E402

from gpubloat import energy  # noqa: E402
from gpubloat.energy import blocks  # noqa: E402
from gpubloat.energy.capture import capture  # noqa: E402
from gpubloat.energy.compare import null  # noqa: E402
from gpubloat.energy.engines import TorchEngine  # noqa: E402
from gpubloat.energy.loads import TorchLoads  # noqa: E402
from gpubloat.energy.meter import Meter, NoDevice, NotMeasured, open_meter  # noqa: E402
from gpubloat.energy.statistics import null_band, verdict  # noqa: E402
from gpubloat.energy.timing import time as timed  # noqa: E402
from gpubloat.energy.workload import kinds, workload  # noqa: E402
from gpubloat.run import Run, RunWriter, provenance  # noqa: E402

CASE_SECONDS = 240.0
CAPTURE_SECONDS = 150.0  # of 32 sequences, all values kept; less time left, and it is not made


class Campaign:
    """Where results go, and when it has to end."""

    def __init__(self, out: Path, deadline_s: float, cases: list[str], pairs: list[str], n_null: int) -> None:
        self.out, self.cases, self.pairs, self.n_null = out, cases, pairs, n_null
        self.end_s = time.monotonic() + deadline_s
        self.failed: dict[str, str] = {}
        self.band: float | None = None
        out.mkdir(parents=True, exist_ok=True)
        found = open_meter()
        if isinstance(found, NoDevice):
            raise found.error()
        self.meter: Meter = found
        self.engine = TorchEngine(0)

    def left_s(self) -> float:
        return self.end_s - time.monotonic()

    def attempt(self, name: str, act: Callable[[], Any]) -> None:
        started = time.monotonic()
        try:
            act()
        except Exception:
            self.failed[name] = traceback.format_exc(limit=8)
            (self.out / "failed.json").write_text(json.dumps(self.failed, indent=1))
        finally:
            torch.cuda.empty_cache()
        print(f"{name}: {time.monotonic() - started:.1f} s{' FAILED' if name in self.failed else ''}", flush=True)

    def about(self) -> dict[str, Any]:
        card = self.meter.describe()
        return {"gpus": [card["name"]], "meter": card}

    def folder(self, name: str) -> Path:
        return self.out / f"energy-h200-{name}"


def product() -> Callable[[], Any]:
    """At the power limit, where clocks and power vary most."""
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.tanh(x @ x)


def copy() -> Callable[[], Any]:
    """Bound by memory."""
    x = torch.randn(1 << 28, device="cuda")
    y = torch.empty_like(x)
    return lambda: y.copy_(x)


def layer_norm() -> Callable[[], Any]:
    """Small: 6 microseconds."""
    x = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(1024, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.nn.functional.layer_norm(x, (1024,), weight)


WORKS = {"product": product, "copy": copy, "layer_norm": layer_norm}


def probe(campaign: Campaign) -> None:
    energy.probe(campaign.meter, TorchLoads(0), out=campaign.folder("probe"), force=True, command="campaign probe")


def write_blocks(campaign: Campaign, name: str, rows: pd.DataFrame, told: dict[str, Any]) -> None:
    with RunWriter("energy", ["blocks"], campaign.folder(name), True) as writer:
        writer.append("blocks", rows)
        writer.finish(provenance(f"campaign {name}", {}, []) | campaign.about() | told)


def repeats(campaign: Campaign) -> None:
    """Six measurements of each of three operators, one after the other."""
    rows, spread = [], {}
    for name, make in WORKS.items():
        work = campaign.engine.prepared(make(), True)
        found = [blocks.block(work, campaign.meter, campaign.engine, 2.0, name, order=n) for n in range(6)]
        energies = [one.call_j for one in found if one.call_j is not None]
        spread[name] = (max(energies) - min(energies)) / statistics.mean(energies) if len(energies) == 6 else None
        rows += [one.row() for one in found]
        print(f"six repeats of {name}: spread {spread[name]}")
    write_blocks(campaign, "repeats", pd.DataFrame(rows), {"spread_frac": spread})


def null_band_of(campaign: Campaign) -> float:
    """Of one comparison of A with itself at the usual length; measured once."""
    if campaign.band is None:
        band = null_band(null(product(), campaign.meter, campaign.engine).saved)
        if isinstance(band, NotMeasured):
            raise RuntimeError(str(band))
        campaign.band = band
        print(f"A against A: band {band:.3%}")
    return campaign.band


def a_against_a(campaign: Campaign) -> None:
    """How often identical functions are called different, three kinds of them in turn; and the band of each.

    Goes on where an earlier call with the same folder stopped.
    """
    rows, told = [], []
    if (campaign.folder("null") / "run.json").exists():
        before = Run.load(campaign.folder("null"))
        rows, told = [before["blocks"]], list(before.provenance["comparisons"])
    for n in range(len(told), campaign.n_null):
        if campaign.left_s() < 45:
            break
        name = list(WORKS)[n % len(WORKS)]
        found = null(WORKS[name](), campaign.meter, campaign.engine, subject=f"{name} {n}")
        band = null_band(found.saved)
        said = verdict(found.saved, found.time_ratio, True, band)
        told.append({"work": name, "verdict": said.verdict, "saved": str(found.saved), "band": str(band)})
        print(f"A against A, {name}: {said.verdict}, band {band}", flush=True)
        rows.append(found.rows())
        write_blocks(campaign, "null", pd.concat(rows), {"comparisons": told})
    print(f"A against A: {sum(t['verdict'] == 'waste' for t in told)} of {len(told)} flagged")


def all_cases(campaign: Campaign) -> None:
    names = campaign.cases or [p.stem for p in sorted(CASES.glob("*.py")) if p.stem != "common"]
    for name in names:
        if campaign.left_s() < 60:
            campaign.failed[name] = "the deadline was reached"
            continue
        act = one_of_jax if name.startswith("jax_") else one_case
        campaign.attempt(name, lambda act=act, name=name: act(campaign, name))  # type: ignore[misc]


def one_case(campaign: Campaign, name: str) -> None:
    file = CASES / f"{name}.py"
    band = null_band_of(campaign)
    with workload(f"{file}:slow") as a, workload(f"{file}:fast", given=a.args) as b:
        again = a.make(1)
        run = energy.diff(
            a.fn, b.fn, *a.args, again=(again, again), meter=campaign.meter, band=band, names=(a.name, b.name),
            subject=name, case=case_id(file), deadline_s=min(CASE_SECONDS, campaign.left_s()),
            out=campaign.folder(f"case-{name}"), force=True, command=f"gpubloat energy diff {a.name} {b.name}",
        )  # fmt: skip
        assert kinds(a.args) == {"torch"}
    told(run)


def case_id(file: Path) -> str:
    """ID of a case without importing it."""
    line = next(line for line in file.read_text("utf-8").splitlines() if line.startswith("ID = "))
    return line.partition("=")[2].strip().strip('"')


def told(run: Any) -> None:
    row = run["comparisons"].iloc[0]
    print(row[["case", "verdict", "saved_frac", "low_frac", "cause", "a_line", "fix"]].to_dict(), flush=True)


def one_of_jax(campaign: Campaign, name: str) -> None:
    file, out = CASES / f"{name}.py", campaign.folder(f"case-{name}")
    in_a_program(campaign, f"{file}:slow", f"{file}:fast", out)
    name_case(out, name, case_id(file))


def in_a_program(campaign: Campaign, a: str, b: str, out: Path, *options: str) -> None:
    """`gpubloat energy diff`: JAX, where this program has PyTorch's memory and CUPTI already, would find neither."""
    command = [sys.executable, "-m", "gpubloat", "energy", "diff", a, b, "--out", str(out), "--force", *options]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    subprocess.run(command, env=environment, check=True, timeout=max(1.0, min(400.0, campaign.left_s())))


def name_case(folder: Path, name: str, case: str) -> None:
    """Put what the table calls the pair into a run that the command has written."""
    run = Run.load(folder)
    tables = {table: run[table] for table in run.provenance["tables"]}
    tables["comparisons"] = tables["comparisons"].assign(subject=name, case=case)
    tables["regions"] = tables["regions"].assign(subject=name)
    with RunWriter("energy", list(tables), folder, True) as writer:
        for table, rows in tables.items():
            writer.append(table, rows)
        writer.finish({k: v for k, v in run.provenance.items() if k not in ("tables", "instrument")})


def gpt2(campaign: Campaign) -> None:
    for name, attention in (("gpt2", "sdpa"), ("gpt2-eager", "eager")):
        run = energy.measure(
            models.gpt2(attention), models.prompts(0), meter=campaign.meter, subject=name, out=campaign.folder(name),
            deadline_s=min(150.0, campaign.left_s()), force=True, command=f"campaign {name}",
        )  # fmt: skip
        print(run["closure"].to_string(), flush=True)
        torch.cuda.empty_cache()


def pairs(campaign: Campaign) -> None:
    for subject, pair in models.PAIRS.items():
        folder = campaign.folder("pair-" + subject.replace(" ", "-"))
        if subject not in campaign.pairs or (folder / "run.json").exists():
            continue
        if campaign.left_s() < 90:
            break

        def act(subject: str = subject, pair: models.Pair = pair, folder: Path = folder) -> None:
            a, b = pair.make()
            again = (pair.given(1),)
            run = energy.diff(
                a, b, pair.given(0), again=(again, again), tolerance=pair.tolerance, meter=campaign.meter,
                band=null_band_of(campaign), subject=subject, names=("A", "B"),
                deadline_s=min(300.0, campaign.left_s()), out=folder, force=True, command="campaign pairs",
            )  # fmt: skip
            told(run)

        campaign.attempt(subject, act)
    for subject, (one, other) in models.FRAMEWORKS.items():
        out = campaign.folder("pair-" + subject.replace(" ", "-"))

        def frameworks(subject: str = subject, one: str = one, other: str = other, out: Path = out) -> None:
            tolerance = ("--tolerance", str(models.OF_TWELVE_LAYERS), "--deadline", "150")
            in_a_program(campaign, f"{SYSTEMS / one}:step", f"{SYSTEMS / other}:step", out, *tolerance)
            name_case(out, subject, "")
            told(Run.load(out))

        if subject in campaign.pairs and not (out / "run.json").exists() and campaign.left_s() > 90:
            campaign.attempt(subject, frameworks)


def overhead(campaign: Campaign) -> None:
    """Time of a step of GPT-2 of over 20 ms alone, inside an open window, and in the passes of a measurement."""
    step, rows = functools.partial(models.gpt2("eager"), models.prompts(0, batch=32)), []

    def seconds(n: int = 40) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(n):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / n

    seconds(20)
    for number in range(8):
        rows.append({"what": "plain", "step_s": seconds()})
        with energy.window(campaign.meter):
            rows.append({"what": "window", "step_s": seconds()})
        if number < 3:
            timing = timed(step, repeats=10)
            rows.append({"what": "timing pass, under the profiler", "step_s": timing.step_us / 1e6})
            # Its own steps without the profiler: each is waited for, which steps in a row are not.
            rows.append({"what": "timing pass, plain", "step_s": (timing.wall_us or 0) / 1e6})
    if campaign.left_s() > CAPTURE_SECONDS:
        start = time.perf_counter()
        with capture(step):
            rows.append({"what": "capture pass", "step_s": time.perf_counter() - start})
    with RunWriter("energy", [], campaign.folder("overhead"), True) as writer:
        writer.finish(provenance("campaign overhead", {}, []) | campaign.about() | {"steps": rows})
    print(pd.DataFrame(rows).groupby("what")["step_s"].agg(["median", "min", "max"]).to_string(), flush=True)


STEPS: dict[str, Callable[[Campaign], None]] = {
    "probe": probe, "repeats": repeats, "null": a_against_a, "cases": all_cases, "gpt2": gpt2, "pairs": pairs,
    "overhead": overhead,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", default=",".join(STEPS), help="in this order")
    parser.add_argument("--cases", default="", help="names of files in cases/; default, all")
    known = [*models.PAIRS, *models.FRAMEWORKS]
    parser.add_argument("--pairs", default=",".join(known), help=f"of {', '.join(known)}; default, all")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds for all")
    parser.add_argument("--null-repeats", type=int, default=20)
    parser.add_argument("--band", type=float, help="what A against A differed by on this GPU; default, it is measured")
    given = parser.parse_args()
    pairs = given.pairs.split(",")
    if unknown := set(pairs) - set(known):
        parser.error(f"no pair is called {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    cases = [c for c in given.cases.split(",") if c]
    campaign = Campaign(given.out, given.deadline, cases, pairs, given.null_repeats)
    campaign.band = given.band
    try:
        for name in given.steps.split(","):
            campaign.attempt(name, lambda name=name: STEPS[name](campaign))  # type: ignore[misc]
    finally:
        campaign.meter.close()


if __name__ == "__main__":
    main()
