"""What the verbs share: common options, running in several processes, and how tables are printed."""

from __future__ import annotations

import os
import shlex
import sys
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpubloat.errors import GpubloatError, printable
from gpubloat.run import refuse_overwrite

if TYPE_CHECKING:
    import pandas as pd

Csv = Annotated[Path | None, typer.Option("--csv", metavar="DIR", help="Write every table as CSV into this folder.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="RUN", help="Keep the run (parquet, run.json) here.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an older run in the folder; other files stay.")]
ForceFile = Annotated[bool, typer.Option("--force", help="Replace the file.")]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, help="Files to read at the same time.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Command = Annotated[
    list[str] | None, typer.Argument(metavar="-- CMD...", help="The command, behind two dashes.", show_default=False)
]


class executor:
    """A process pool of `jobs` workers, or nothing for one."""

    def __init__(self, jobs: int) -> None:
        self.pool: Executor | None = ProcessPoolExecutor(jobs) if jobs > 1 else None

    def __enter__(self) -> Executor | None:
        return self.pool

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)


def command_line() -> str:
    """The command line as run.json keeps it: paths cut to their names, which tell no machine."""
    words = [w if w.startswith("-") or not os.path.isabs(w) else os.path.basename(w.rstrip("/")) for w in sys.argv[1:]]
    return shlex.join(["gpubloat", *words])


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): _plain(value) for name, value in row.items()} for row in frame.to_dict("records")]


def _plain(value: Any) -> Any:
    """A NumPy or pandas scalar as JSON has it; missing values are null."""
    import pandas as pd

    if pd.isna(value):
        return None
    return value.item() if hasattr(value, "item") else value


def two_folders(csv: Path | None, out: Path | None, force: bool) -> None:
    """Refuse --csv and --out before anything is measured: the same folder, or one that is not to be overwritten."""
    if csv is not None and out is not None and csv.resolve() == out.resolve():
        raise GpubloatError(f"--csv and --out are both {csv}", "name two folders")
    for folder in (csv, out):
        if folder is not None:
            refuse_overwrite(folder, force)


def refuse_missing(*paths: Path) -> None:
    """Refuse what is not there at once: what would read it takes up to some seconds to load."""
    for path in paths:
        if not os.path.exists(path):
            raise GpubloatError(f"{path} does not exist", "look at the name, and at the folder you are in")


def shown(frame: pd.DataFrame) -> pd.DataFrame:
    """Bytes as MB and fractions as percent, with the unit in the heading."""
    import pandas as pd

    columns = {}
    for name in frame.columns:
        what, is_bytes, rest = name.partition("_bytes")
        if is_bytes and rest in ("", "_after"):
            columns[f"{what}{rest} MB"] = (frame[name] / 1e6).round(2)
        elif name.endswith("_frac"):
            columns[name.removesuffix("_frac") + " %"] = (frame[name] * 100).round(1)
        else:
            columns[name] = frame[name]
    return pd.DataFrame(columns)


def print_table(frame: pd.DataFrame, title: str, to_stderr: bool = False) -> None:
    """A table that fits the terminal, if need be with the words of its heads one below the other; if it does not fit
    even so, a block of lines per row, so that nothing is cut."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=to_stderr)
    if not console.is_terminal:  # a file or a pipe has no width: show names whole
        console = Console(width=200, stderr=to_stderr)
    cells = [[escape(_cell(value)) for value in row] for row in frame.itertuples(index=False, name=None)]
    for separator in (" ", "\n"):
        table = _table(frame, cells, title, separator)
        if console.measure(table, options=console.options.update(width=1000)).minimum <= console.width or not cells:
            console.print(table)
            return
    names = [str(name).replace("_", " ") for name in frame.columns]
    blocks = ["\n".join(f"{name:{max(map(len, names))}}  {cell}" for name, cell in zip(names, row)) for row in cells]
    console.print(f"[italic]{escape(title)}[/italic]\n\n" + "\n\n".join(blocks) + "\n", highlight=False)


def _table(frame: pd.DataFrame, cells: list[list[str]], title: str, separator: str) -> Any:
    import pandas as pd
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(frame.columns):
        is_text = pd.api.types.is_string_dtype(frame[name])
        head = name.replace("_", separator)
        if not is_text:
            head = head.replace(" ", separator)
        longest = 12 if is_text else max((len(row[number]) for row in cells), default=0)
        table.add_column(
            head,
            justify="left" if is_text else "right",
            no_wrap=not is_text,  # in a narrow terminal names wrap, numbers stay whole
            min_width=max(longest, *map(len, head.split("\n" if not is_text else None))),
            overflow="fold",
        )
    for row in cells:
        table.add_row(*row)
    return table


def _cell(value: Any) -> str:
    import pandas as pd

    if pd.isna(value):
        return "-"
    if isinstance(value, str):
        return printable(value)
    if str(value) in ("True", "False"):
        return "yes" if value else "no"
    return f"{value:,.1f}" if float(value) != int(value) else f"{int(value):,}"


def print_problems(problems: pd.DataFrame) -> None:
    if problems.empty:
        return
    print(f"{len(problems)} problems (table problems), the first of them:")
    for library, offset, problem, detail in problems.head(5).itertuples(index=False, name=None):
        print(f"  {printable(library)}, byte {offset}: {problem}: {printable(detail)}")
