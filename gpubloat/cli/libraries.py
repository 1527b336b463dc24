"""`gpubloat libraries ...`: what is in libraries, what a run uses of them, and taking the rest away."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from gpubloat.cli.common import (
    Command,
    Csv,
    Force,
    Jobs,
    Json,
    Out,
    command_line,
    executor,
    print_problems,
    print_table,
    records,
    refuse_missing,
    shown,
)
from gpubloat.errors import GpubloatError, printable
from gpubloat.run import Run, refuse_overwrite

app = typer.Typer(
    no_args_is_help=True, help="Code in shared libraries: what is there, what a run uses, and taking the rest away."
)
Guard = Annotated[
    str,
    typer.Option(
        metavar="restore|restore-cpu|report|off",
        help="Removed code that is met: bring it back; functions only; say what it was and stop; nothing (a trap).",
    ),
]
# Where nothing was found: what could be looked at instead.
_NOTHING = (
    "give a library, a wheel or a folder with .so files; the CUDA libraries of torch are in packages named nvidia-*"
)


@app.command("scan")
def scan(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH...", help="Files, folders, wheels, or names of installed packages."),
    ],
    target: Annotated[
        str | None, typer.Option(metavar="GPU", help="Say which elements this GPU could be given, for example sm_90.")
    ] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Decompress all elements and list their kernels.")] = False,
    functions: Annotated[bool, typer.Option(help="List CPU functions.")] = True,
    digests: Annotated[bool, typer.Option(help="Compute sha256 of files and elements.")] = True,
    jobs: Jobs = 1,
    csv: Csv = None,
    out: Out = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """List where every byte of GPU libraries goes: sections, CPU functions, fatbin elements, kernels."""
    refuse_missing(*(Path(path) for path in paths if "/" in path))  # others may be names of packages
    for folder in (csv, out):  # refuse before the work, not after it
        if folder is not None:
            refuse_overwrite(folder, force)
    from gpubloat import libraries as instrument
    from gpubloat.analysis import libraries as analysis
    from gpubloat.tables import targets

    with executor(jobs) as pool:
        run = instrument.scan(
            paths,
            target=target,
            kernels=kernels,
            functions=functions,
            digests=digests,
            executor=pool,
            progress=True,
            out=out,
            force=force,
            command=command_line(),
        )
    if csv is not None:
        run.to_csv(csv, force=force)
    if run["libraries"].empty:
        raise GpubloatError(f"no library in {', '.join(paths)}: {run.provenance['empty']['libraries']}", _NOTHING)
    summary = analysis.overview(run["libraries"], run["elements"])
    fits, gpu = analysis.fits(run["elements"]), run.provenance["target"]
    if as_json:
        details = {"target": gpu, "n_problems": len(run["problems"]), "fits": records(fits)}
        print(json.dumps(records(summary.tail(1))[0] | details | {"libraries": records(run["libraries"])}))
        return
    print_table(shown(summary), title="libraries")
    if gpu and len(fits):
        print_table(shown(fits), title=f"elements on {gpu}")
    elif gpu:
        print(f"no GPU code in these files, so nothing to choose for {gpu}")
    if gpu and targets.gpu(gpu) not in targets.KNOWN:
        print(f"note: no GPU is known to be {gpu}; the rule was applied all the same")
    print_problems(run["problems"])
    for place in (csv, out):
        if place is not None:
            print(f"wrote {place}")


@app.command("trace")
def trace(
    command: Command = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="RUN", help="Keep the run here (this or --csv is required).")
    ] = None,
    workload: Annotated[str, typer.Option(metavar="NAME", help="Name of the workload in the run.")] = "",
    target: Annotated[
        str | None, typer.Option(metavar="GPU", help="The GPU, where the run does not tell, for example sm_90.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Run it so often: what any of the runs used counts.")] = 1,
    functions: Annotated[bool, typer.Option(help="Record which CPU functions are entered.")] = True,
    pages: Annotated[bool, typer.Option(help="Record first touches of GPU code.")] = True,
    cupti: Annotated[
        bool, typer.Option(help="Record look-ups of kernels; --no-cupti leaves CUPTI to a profiler.")
    ] = True,
    jobs: Jobs = 1,
    csv: Csv = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Run a command unchanged, with its children, and record what it uses of its libraries.

    Ends with the exit status of the command.
    """
    if out is None and csv is None:
        raise GpubloatError("the run would be lost", "say where to keep it: --out RUN")
    if csv is not None:
        refuse_overwrite(csv, force)
    from gpubloat.analysis import usage
    from gpubloat.libraries.trace import Sources
    from gpubloat.libraries.trace import trace as collect

    with executor(jobs) as pool:
        run = collect(
            command or [],
            out=out,
            force=force,
            workload=workload,
            target=target,
            repeat=repeat,
            sources=Sources(functions, pages, cupti),
            executor=pool,
            progress=True,
            stdout=sys.stderr.fileno() if as_json else None,  # one JSON object and nothing else
            command_line=command_line(),
        )
    if csv is not None:
        run.to_csv(csv, force=force)
    summary = usage.overview(run)
    if as_json:
        print(json.dumps(records(summary.tail(1))[0] | _about(run)))
    else:
        # The command's own output may be on stdout.
        print_table(shown(summary), title="used in this run", to_stderr=True)
        for process in run["processes"].itertuples():
            if process.problem:
                print(f"note: {process.program}: {printable(str(process.problem))}", file=sys.stderr)
        for place in filter(None, (csv, out)):
            print(f"wrote {place}", file=sys.stderr)
    status = _status(run.provenance["exit_status"])
    if status:
        print(f"note: the command ended with status {status}; the run records what it used until then", file=sys.stderr)
    raise typer.Exit(status)


@app.command("debloat")
def debloat(
    inputs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...|PATH...", help="Runs of trace and of exec; with --targets alone: files."),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Write copies and manifest.json here.")],
    targets: Annotated[
        str | None, typer.Option(metavar="GPU,...", help="GPUs to keep code for: sm_80,sm_90 or A100,H100.")
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="zeroed|moved",
            help="Same offsets (default for runs), or kept elements moved to the front (default for targets alone).",
        ),
    ] = None,
    zstd: Annotated[bool, typer.Option("--zstd", help="Also measure how well originals and copies compress.")] = False,
    jobs: Jobs = 1,
    csv: Csv = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the whole debloated folder; with --csv, older tables.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write copies without what was unused in these runs, or without what no GPU of the targets can use.

    The originals are not touched. RUN is what trace --out or exec --out wrote; PATH is a library, a folder or a wheel.
    """
    is_run = [(path / "run.json").exists() for path in inputs]
    if csv is not None:
        refuse_overwrite(csv, force)
    if any(is_run) and not all(is_run):
        other = inputs[is_run.index(False)]
        raise GpubloatError(f"{other} is no run, and others are", "give only runs, or only paths with --targets")
    if not any(is_run) and targets is None:
        raise GpubloatError(
            f"{inputs[0]} is no run folder", "trace a command first, or name GPUs to keep code for: --targets sm_90"
        )
    from gpubloat.analysis import debloat as analysis
    from gpubloat.libraries.debloat import debloat as remove_unused
    from gpubloat.libraries.prune import prune

    names = None if targets is None else targets.split(",")
    with executor(jobs) as pool:
        if all(is_run):
            run = remove_unused(
                inputs, out, targets=names, layout=layout or "zeroed", zstd=zstd, executor=pool, force=force,
                progress=True, command=command_line(),
            )  # fmt: skip
        else:
            run = prune(
                inputs, names or [], out, layout=layout or "moved", zstd=zstd, executor=pool, force=force,
                progress=True, command=command_line(),
            )  # fmt: skip
    if csv is not None:
        run.to_csv(csv, force=force)
    summary = analysis.overview(run["reduction"])
    if as_json:
        print(json.dumps(records(summary.tail(1))[0] | {"libraries": records(run["reduction"])}))
        return
    print_table(shown(summary), title="unused in these runs, and removed" if all(is_run) else "removed")
    for place in filter(None, (csv, out)):
        print(f"wrote {place}")


@app.command("exec")
def execute(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What debloat wrote.")],
    command: Command = None,
    guard: Guard = "restore",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="RUN", help="Keep the misses here; debloat takes them as a run.")
    ] = None,
    force: Force = False,
) -> None:
    """Run a command on the copies, without touching its environment. Ends with the exit status of the command."""
    _refuse_other(folder)
    from gpubloat.libraries.execute import execute as run_on_copies

    status, run = run_on_copies(folder, command or [], guard=guard, out=out, force=force, command_line=command_line())
    about = run.provenance
    for problem in about["problems"]:
        print(f"note: {printable(problem)}", file=sys.stderr)
    if not about["n_swapped"]:
        print("note: no library of this folder was loaded: the command ran on its originals", file=sys.stderr)
    missed = run["misses"]
    if len(missed):
        n = missed.groupby("what").size()
        what = " and ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in n.items())
        print(f"note: removed code was met and {missed['action'].iloc[0]}: {what}", file=sys.stderr)
    elif status == -5 and guard == "off":
        print("note: ended by a trap: removed code may have been called; --guard report says which", file=sys.stderr)
    raise typer.Exit(_status(status))


@app.command("verify")
def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What debloat wrote.")],
    command: Command = None,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds of originals and copies.")] = 5,
    compare: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A file that the command writes, to be compared, too.")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="REGEX", help="Lines of output that may differ, such as times.")
    ] = None,
    loading: Annotated[
        str, typer.Option(metavar="MODE,...", help="default, lazy, eager: CUDA_MODULE_LOADING of the runs.")
    ] = "default",
    guard: Guard = "restore",
    csv: Csv = None,
    out: Out = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Run a command on the originals and on the copies, and compare output, time and memory.

    Exit status 1 unless the copies did what the originals did.
    """
    _refuse_other(folder)
    if csv is not None:
        refuse_overwrite(csv, force)
    from gpubloat.libraries.verify import verify as compare_runs

    run = compare_runs(
        folder, command or [], repeat=repeat, compare=compare or (), ignore=ignore or (),
        loadings=loading.split(","), guard=guard, out=out, force=force, progress=True, command_line=command_line(),
    )  # fmt: skip
    if csv is not None:
        run.to_csv(csv, force=force)
    verdict = run.provenance["verdict"]
    if as_json:
        details = {"verdict": verdict, "n_misses": run.provenance.get("n_misses")}
        print(json.dumps(details | {"verdicts": records(run["verdicts"])}))
    else:
        print_table(shown(run["verdicts"]), title="originals against copies")
        about = run.provenance
        for loading, complaint in about.get("complaints", {}).items():
            if complaint:
                print(f"note: {loading}: {printable(complaint)}")
        if about.get("n_misses"):
            n = about["n_misses"]
            print(f"note: the copies met removed code {'once' if n == 1 else f'{n} times'}, and the guard acted:")
            print("      `gpubloat libraries exec COPIES --out RUN -- COMMAND` records where")
        if repeat == 1 and verdict == "differs":
            print("note: one round cannot tell whether the originals differ among themselves, too: use --repeat")
        print(f"verdict: {verdict}")
    raise typer.Exit(0 if verdict in ("equal", "not_deterministic") else 1)


@app.command("apply")
def apply(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What debloat wrote.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the files that would be replaced.")] = False,
) -> None:
    """Put the copies in the place of the originals, which are kept in DIR: for container images.

    System libraries that a run loaded are replaced, too, for every program and without a guard: look with --dry-run.
    """
    _refuse_other(folder)
    from gpubloat.libraries import inplace, manifest

    if dry_run:
        for entry in manifest.read(folder).libraries:
            print(f"would replace {printable(entry.path)}")
        return
    replaced = inplace.apply(folder)
    for library in replaced:
        print(f"replaced {printable(library)}")
    if not replaced:
        print("nothing to replace: the copies are in place already, or the folder holds a wheel")
    for library in inplace.in_use(folder):
        print(f"note: {printable(library)} was left alone: gpubloat itself runs on it", file=sys.stderr)


@app.command("restore")
def restore(folder: Annotated[Path, typer.Argument(metavar="DIR", help="What debloat wrote.")]) -> None:
    """Give the originals back, byte for byte, after apply."""
    _refuse_other(folder)
    from gpubloat.libraries import inplace

    restored = inplace.restore(folder)
    for library in restored:
        print(f"restored {printable(library)}")
    if not restored:
        print("nothing to restore: no copy of this folder is in place")


def _refuse_other(folder: Path) -> None:
    """Refuse a folder that debloat did not write at once: what would read it takes a second to load."""
    if not os.path.exists(folder / "manifest.json"):
        raise GpubloatError(
            f"{folder} is no debloated folder: it has no manifest.json",
            "give what gpubloat libraries debloat wrote with --out",
        )


def _about(run: Run) -> dict[str, object]:
    names = ("workload", "exit_status", "wall_s", "scan_s", "targets", "is_gpu_traced")
    return {name: run.provenance[name] for name in names}


def _status(status: int) -> int:
    """As a shell says it: 128 and the number of the signal."""
    return status if status >= 0 else 128 - status
