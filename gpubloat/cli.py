"""The command: ``gpubloat <instrument> <verb>``. It parses, calls the library, and prints."""

from __future__ import annotations

import json
import os
import shlex
import sys
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpubloat import __version__
from gpubloat.errors import GpubloatError, printable

if TYPE_CHECKING:
    import pandas as pd

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Where a GPU's bytes and joules go, and how to take them back.",
)
libraries = typer.Typer(no_args_is_help=True, help="Code in shared libraries: what is there, and what a GPU can use.")
app.add_typer(libraries, name="libraries")

Csv = Annotated[Path | None, typer.Option("--csv", metavar="DIR", help="Write every table as CSV into this folder.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="RUN", help="Keep the run (parquet, run.json) here.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is in the folder.")]
# Where nothing was found: what could be looked at instead.
_NOTHING = (
    "give a library, a wheel or a folder with .so files; the CUDA libraries of torch are in packages named nvidia-*"
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


@libraries.command("scan")
def libraries_scan(
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
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Files to read at the same time.")] = 1,
    csv: Csv = None,
    out: Out = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """List where every byte of GPU libraries goes: sections, CPU functions, fatbin elements, kernels."""
    from gpubloat.analysis import libraries as analysis
    from gpubloat.libraries import scan
    from gpubloat.run import refuse_overwrite
    from gpubloat.tables import targets

    for folder in (csv, out):  # refuse before the work, not after it
        if folder is not None:
            refuse_overwrite(folder, force)
    with _executor(jobs) as executor:
        run = scan(
            paths,
            target=target,
            kernels=kernels,
            functions=functions,
            digests=digests,
            executor=executor,
            progress=True,
            out=out,
            force=force,
            command=_command(),
        )
    if csv is not None:
        run.to_csv(csv, force=force)
    if run["libraries"].empty:
        raise GpubloatError(f"no library in {', '.join(paths)}: {run.provenance['empty']['libraries']}", _NOTHING)
    summary = analysis.overview(run["libraries"], run["elements"])
    fits, gpu = analysis.fits(run["elements"]), run.provenance["target"]
    if as_json:
        details = {"target": gpu, "n_problems": len(run["problems"]), "fits": _records(fits)}
        print(json.dumps(_records(summary.tail(1))[0] | details | {"libraries": _records(run["libraries"])}))
        return
    _print_table(_shown(summary), title="libraries")
    if gpu and len(fits):
        _print_table(_shown(fits), title=f"elements on {gpu}")
    elif gpu:
        print(f"no GPU code in these files, so nothing to choose for {gpu}")
    if gpu and targets.gpu(gpu) not in targets.KNOWN:
        print(f"note: no GPU is known to be {gpu}; the rule was applied all the same")
    _print_problems(run["problems"])
    for place in (csv, out):
        if place is not None:
            print(f"wrote {place}")


@app.command("doctor")
def doctor_command(as_json: Json = False) -> None:
    """Say what this machine can measure, and the remedy for what it cannot."""
    from gpubloat import doctor

    checks = doctor.examine()
    if as_json:
        print(json.dumps([c._asdict() for c in checks]))
        return
    for check in checks:
        mark = {"yes": "ok", "no": "--", "limited": "! "}[check.state]
        print(f"{mark}  {check.what}: {check.found}" + (f"\n      -> {check.remedy}" if check.remedy else ""))


@app.command("reproduce")
def reproduce_command(
    notebooks: Annotated[Path, typer.Option(metavar="DIR", help="Folder with the notebooks.")] = Path("notebooks"),
) -> None:
    """Execute all notebooks top to bottom; they write figures and reports beside them."""
    from gpubloat import reproduce

    for name, seconds in reproduce.execute(notebooks):
        print(f"{name}: {seconds:.1f} s")


@app.command("report")
def report_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    html: Annotated[Path, typer.Option("--html", metavar="FILE", help="Where to write the page.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
) -> None:
    """Write one self-contained HTML page about a run: its figures, its tables, where it came from."""
    from gpubloat import report
    from gpubloat.run import Run

    report.write(Run.load(run), html, force=force)
    print(f"wrote {html}")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"gpubloat {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Where a GPU's bytes and joules go, and how to take them back."""


def main() -> None:
    """Entry point: a GpubloatError is one sentence and a hint on stderr, and exit status 1; bad usage is 2."""
    try:
        app()
    except GpubloatError as error:
        print(f"gpubloat: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"  hint: {error.hint}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("gpubloat: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


class _executor:
    """A process pool of `jobs` workers, or nothing for one."""

    def __init__(self, jobs: int) -> None:
        self.pool: Executor | None = ProcessPoolExecutor(jobs) if jobs > 1 else None

    def __enter__(self) -> Executor | None:
        return self.pool

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)


def _command() -> str:
    """The command line as run.json keeps it: paths cut to their names, which tell no machine."""
    words = [w if w.startswith("-") or not os.path.isabs(w) else os.path.basename(w.rstrip("/")) for w in sys.argv[1:]]
    return shlex.join(["gpubloat", *words])


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): _plain(value) for name, value in row.items()} for row in frame.to_dict("records")]


def _plain(value: Any) -> Any:
    """A NumPy or pandas scalar as JSON has it; missing values are null."""
    import pandas as pd

    if pd.isna(value):
        return None
    return value.item() if hasattr(value, "item") else value


def _shown(frame: pd.DataFrame) -> pd.DataFrame:
    """Bytes as MB and fractions as percent, with the unit in the heading."""
    import pandas as pd

    shown = {}
    for name in frame.columns:
        if name.endswith("_bytes"):
            shown[name.removesuffix("_bytes") + " MB"] = (frame[name] / 1e6).round(2)
        elif name.endswith("_frac"):
            shown[name.removesuffix("_frac") + " %"] = (frame[name] * 100).round(1)
        else:
            shown[name] = frame[name]
    return pd.DataFrame(shown)


def _print_table(frame: pd.DataFrame, title: str) -> None:
    import pandas as pd
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for name in frame.columns:
        is_text = pd.api.types.is_string_dtype(frame[name])
        table.add_column(
            name.replace("_", " "), justify="left" if is_text else "right", no_wrap=is_text, overflow="ellipsis"
        )
    for row in frame.itertuples(index=False, name=None):
        table.add_row(*(escape(_cell(v)) for v in row))
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width: show names whole
        console = Console(width=200)
    console.print(table)


def _cell(value: Any) -> str:
    import pandas as pd

    if pd.isna(value):
        return "-"
    if isinstance(value, str):
        return printable(value)
    if str(value) in ("True", "False"):
        return "yes" if value else "no"
    return f"{value:,.1f}" if float(value) != int(value) else f"{int(value):,}"


def _print_problems(problems: pd.DataFrame) -> None:
    if problems.empty:
        return
    print(f"{len(problems)} problems (table problems), the first of them:")
    for library, offset, problem, detail in problems.head(5).itertuples(index=False, name=None):
        print(f"  {printable(library)}, byte {offset}: {problem}: {printable(detail)}")
