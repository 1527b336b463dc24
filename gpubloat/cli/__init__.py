"""The command: ``gpubloat <instrument> <verb>``. It parses, calls the library, and prints."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from gpubloat import __version__
from gpubloat.cli import energy, libraries, memory, tensors
from gpubloat.cli.common import ForceFile, Json
from gpubloat.errors import GpubloatError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Where a GPU's bytes and joules go, and how to take them back.",
)
app.add_typer(libraries.app, name="libraries")
app.add_typer(tensors.app, name="tensors")
app.add_typer(memory.app, name="memory")
app.add_typer(energy.app, name="energy")


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
    force: ForceFile = False,
) -> None:
    """Write one self-contained HTML page about a run: its figures, its tables, where it came from."""
    from gpubloat.run import Run

    opened = Run.load(run)
    from gpubloat import report  # after what may be refused: it loads Matplotlib

    report.write(opened, html, force=force)
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


INTERRUPTED = 130  # exit status after Ctrl-C


def _ended(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    """Entry point: a GpubloatError is one sentence and a hint on stderr, and exit status 1; bad usage is 2."""
    for name in ("SIGTERM", "SIGHUP"):  # leave nothing half-written behind, as after Ctrl-C
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _ended)
    try:
        app()
    except GpubloatError as error:
        print(f"gpubloat: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"  hint: {error.hint}", file=sys.stderr)
        raise SystemExit(1) from None
    except (KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code != INTERRUPTED:  # what typer makes of the former
            raise
        print("gpubloat: interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
