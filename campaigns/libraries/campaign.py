"""The workloads, and what the steps of `debloat.py` have in common: trace once, debloat once, verify, keep."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from gpubloat.errors import GpubloatError
from gpubloat.libraries import cost, manifest, union
from gpubloat.libraries.debloat import debloat
from gpubloat.libraries.trace import trace
from gpubloat.libraries.verdicts import last_line
from gpubloat.libraries.verify import verify
from gpubloat.run import Run, RunWriter

HERE = Path(__file__).parent / "workloads"
COMMANDS = {
    "mobilenet-infer": ["mobilenet.py", "infer", "--steps", "30"],
    "mobilenet-train": ["mobilenet.py", "train", "--steps", "30"],
    "transformer-infer": ["transformer.py", "infer", "--steps", "30"],
    "transformer-train": ["transformer.py", "train", "--steps", "30"],
    "jax-mobilenet-infer": ["jax_mobilenet.py", "infer", "--steps", "30"],
    "jax-mobilenet-train": ["jax_mobilenet.py", "train", "--steps", "30"],
    "jax-transformer-infer": ["jax_transformer.py", "infer", "--steps", "30"],
    "jax-transformer-train": ["jax_transformer.py", "train", "--steps", "30"],
    "tensorflow-mobilenet-infer": ["tf_mobilenet.py", "infer", "--steps", "30"],
    "tensorflow-mobilenet-train": ["tf_mobilenet.py", "train", "--steps", "30"],
    "tensorflow-transformer-infer": ["tf_transformer.py", "infer", "--steps", "30"],
    "tensorflow-transformer-train": ["tf_transformer.py", "train", "--steps", "30"],
    "llama-infer": ["llama.py"],
    "vllm-llama-infer": ["vllm_llama.py"],
    "llama-13b-tp2-infer": ["llama.py", "--model", "13b", "--gpus", "2"],
    "calls": ["calls.py"],
}
# Tables of a traced run that are kept: the others can be had from the same libraries by a scan.
KEPT = (
    "loaded", "used_functions", "evidence", "used_kernels", "modules", "processes", "libraries", "elements", "problems",
)  # fmt: skip
PREFIX = "libraries-h200-"
LIMIT_S = 500.0  # of one run of a workload
EAGER = {"CUDA_MODULE_LOADING": "EAGER"}


def command(workload: str) -> list[str]:
    script, *arguments = COMMANDS[workload]
    return [sys.executable, str(HERE / script), *arguments]


class Campaign:
    """Folders of one campaign: runs to keep in `out`; traces with all tables and copies in `work`, used again.

    at_once : campaigns that run on the machine at the same time; kept in each run.json.
    """

    def __init__(
        self, out: Path, work: Path, workloads: Sequence[str], repeat: int, loadings: Sequence[str], ends: float,
        at_once: int = 1,
    ) -> None:  # fmt: skip
        self.out, self.work, self.workloads, self.repeat = out, work, tuple(workloads), repeat
        self.at_once = at_once
        self.loadings, self.ends = tuple(loadings), ends
        self.pool = ProcessPoolExecutor(min(os.cpu_count() or 1, 12))

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.ends - time.monotonic()

    def keep(self, run: Run, name: str, tables: tuple[str, ...] | None = None) -> None:
        """Save a run without paths of this machine, and of what was removed only the elements: functions are many."""
        about = dict(run.provenance) | {"at_once": self.at_once}
        names = [n for n in about.pop("tables") if tables is None or n in tables]
        with RunWriter("libraries", names, self.out / f"{PREFIX}{name}", True) as writer:
            for table in names:
                frame = run[table]
                if table == "removed":
                    frame = frame[frame["what"] == "element"]
                writer.append(table, frame.assign(path="") if "path" in frame else frame)
            writer.finish({k: v for k, v in about.items() if k != "instrument"})

    def plain(self, workload: str, env: Mapping[str, str]) -> cost.Cost:
        """One run as it is. GpubloatError if it fails: a GPU too few, a package that is not there."""
        found = cost.run(command(workload), env={**os.environ, **env}, limit_s=max(1.0, min(LIMIT_S, self.left())))
        if found.is_ended or found.exit_status:
            how = "did not end in time" if found.is_ended else f"fails: {last_line(found.stderr_tail)}"
            raise GpubloatError(f"{workload} {how}")
        return found

    def traced(self, workload: str, is_eager: bool = False) -> Run:
        """Traced between two runs as it is, for what tracing costs; from `work` if it was before. Keeps a lazy trace.

        An eager trace stays in `work`: what it used is in the copies made from both, and it is no workload of its own.
        """
        name = f"{workload}-eager" if is_eager else workload
        kept = self.work / f"{name}-trace"
        if (kept / "run.json").exists() and "plain_s" in Run.load(kept).provenance:
            return Run.load(kept)
        env = EAGER if is_eager else {}
        before = self.plain(workload, env)
        run = trace(
            command(workload), out=kept, force=True, workload=workload, env={**os.environ, **env},
            executor=self.pool, command_line=f"gpubloat libraries trace --workload {workload}",
        )  # fmt: skip
        if run.provenance["exit_status"]:
            raise GpubloatError(f"{workload} fails when traced: exit status {run.provenance['exit_status']}")
        after = self.plain(workload, env)
        run.provenance |= {
            "plain_s": [round(found.wall_s, 3) for found in (before, after)],
            "plain_steady_s": [steady(found) for found in (before, after)],
            "number": last_line(after.stdout_tail),
        }
        run = run.save(kept, force=True)
        about = run.provenance
        print(f"{name}: plain {about['plain_s']} s, traced {about['wall_s']} s, scanned in {about['scan_s']} s")
        if not is_eager:
            self.keep(run, f"{name}-trace", KEPT)
        return run

    def debloated(self, name: str, runs: Sequence[Run]) -> Path:
        """Folder of the copies made from `runs`; from `work` if they were made from the same runs before."""
        folder = self.work / name
        if (folder / manifest.NAME).exists() and manifest.read(folder).runs == [union.record(run) for run in runs]:
            return folder
        started = time.monotonic()
        run = debloat(runs, folder, force=True, executor=self.pool, command="gpubloat libraries debloat")
        run.provenance["debloat_s"] = round(time.monotonic() - started, 3)
        self.keep(run, f"{name}-debloat", ("libraries", "removed", "reduction", "problems"))
        print(f"{name}: debloated in {run.provenance['debloat_s']} s", flush=True)
        return folder

    def copies(self, workload: str) -> Path:
        """Copies for all loading modes of this campaign."""
        runs = [self.traced(workload)]
        runs += [self.traced(workload, is_eager=True)] if "eager" in self.loadings else []
        return self.debloated(workload, runs)

    def verified(self, workload: str, folder: Path, name: str, before: Callable[[], None] | None = None) -> Run:
        """Originals against copies in all loading modes, in as many of the asked rounds as there is time for.

        before : called before each run.
        """
        # Of the runs around tracing, the second: the first of a machine may have caches to fill.
        slowest = max(
            self.traced(workload, is_eager=mode == "eager").provenance["plain_s"][-1] for mode in self.loadings
        )
        slowest *= 1.0 if before is None else 2.0  # such as from a cold page cache
        fit = self.left() / (2 * len(self.loadings) * slowest)
        if fit < 1:
            raise GpubloatError(f"no time left to verify {name}")
        repeat = int(min(self.repeat, fit))
        words = f"--repeat {repeat} --loading {','.join(self.loadings)} --guard restore-cpu"
        run = verify(
            folder, command(workload), repeat=repeat, loadings=self.loadings, guard="restore-cpu",
            before=before, command_line=f"gpubloat libraries verify {words}",
        )  # fmt: skip
        run.provenance["workload"] = workload
        self.keep(run, f"{name}-verify")
        print(run["verdicts"].T.to_string())
        print(*(run.provenance.get(key) for key in ("n_swapped", "n_misses", "numbers", "complaints", "problems")))
        return run

    def usual_s(self, workload: str) -> float:
        return min(self.traced(workload).provenance["plain_s"])  # the first of a machine may have caches to fill


def page_cache_dropped() -> None:
    """What was read from disks is forgotten, on this machine: a host of virtual ones may keep it."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        raise GpubloatError(f"the page cache cannot be dropped: {error.strerror}", "run as root") from None


def steady(found: cost.Cost) -> float | None:
    """Seconds a step, or a token, after the first ones: what the workload says on stderr."""
    lines = found.stderr_tail.decode("utf-8", "replace").splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith("steady ")), None)


def restricted(folder: Path, to: Path, count: int) -> list[str]:
    """A folder with the copies of the `count` largest libraries alone, as links to those in `folder`; their names."""
    about = manifest.read(folder)
    largest = sorted(about.libraries, key=lambda entry: (-entry.bytes, entry.library))[:count]
    shutil.rmtree(to, ignore_errors=True)
    for name in [name for entry in largest for name in (entry.copy, entry.ranges)]:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(folder / name, to / name)
    manifest.write(to, dataclasses.replace(about, libraries=largest))
    return [entry.library for entry in largest]


@contextlib.contextmanager
def printing_into(file: BinaryIO) -> Iterator[None]:
    """What commands print goes into `file` while the block runs."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(file.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(own, 1)
        os.close(own)


def about_transfer(campaign: Campaign, workload: str, printed: bytes) -> dict[str, Any]:
    """What run.json of a run on the copies of another says beside its misses."""
    number, before = last_line(printed), campaign.traced(workload).provenance["number"]
    plain = campaign.usual_s(workload)
    about = {"workload": workload, "number": number, "number_plain": before, "plain_s": plain}
    return about | {"copies_from": list(campaign.loadings)}
