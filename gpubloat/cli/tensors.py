"""`gpubloat tensors ...`: which bits never change, what leaving them out saves, and packed files and back."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpubloat.cli.common import (
    Csv,
    Force,
    ForceFile,
    Json,
    Out,
    command_line,
    print_table,
    records,
    refuse_missing,
    shown,
    two_folders,
)
from gpubloat.errors import GpubloatError, printable
from gpubloat.run import refuse_to_replace

if TYPE_CHECKING:
    import pandas as pd

    from gpubloat.tensors import Packed

app = typer.Typer(
    no_args_is_help=True,
    help="Bits of tensors that never change: how many, what leaving them out saves, and files without them.",
)
COMPILING = "gpubloat: the first use compiles loops for this machine, which takes up to half a minute"
Files = Annotated[
    list[Path],
    typer.Argument(metavar="FILE...", help="safetensors (an index or a folder, too), npy, npz, zip .pth, .pt or .bin."),
]
Rows = Annotated[
    int | None, typer.Option("--max-rows", metavar="N", min=1, help="Look at N rows of each tensor instead of all.")
]
Chunk = Annotated[
    str, typer.Option("--chunk-bits", metavar="auto|8|16|32|64", help="Width of what is packed or kept whole.")
]


@app.command("stats")
def stats(
    files: Files,
    max_rows: Rows = None,
    columns: Annotated[bool, typer.Option("--columns", help="Also count every bit of every column.")] = False,
    top: Annotated[int, typer.Option(min=1, help="Tensors to print, the largest first.")] = 20,
    csv: Csv = None,
    out: Out = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Say which bits of which tensors never change, what packing would save, and what no code could do better than."""
    refuse_missing(*files)
    two_folders(csv, out, force)
    from gpubloat import tensors
    from gpubloat.analysis import tensors as analysis

    with _compiling_is_said():
        run = tensors.stats(files, columns=columns, max_rows=max_rows, out=out, force=force, command=command_line())
    if csv is not None:
        run.to_csv(csv, force=force)
    table = analysis.against_bounds(run["tensors"], run["savings"])
    hidden = analysis.hidden_precision(run["tensors"], run["bits"])
    total = analysis.total(table)
    if as_json:
        print(json.dumps({"total": total, "tensors": records(table), "hidden_precision": records(hidden)}))
        return
    print_table(_stats(table.head(top)), title="what leaving out invariant bits saves, and bounds of other codes")
    if len(table) > top:
        print(f"{len(table) - top} smaller tensors are not shown (--top, --csv)")
    for row in hidden.head(top).itertuples():
        print(f"hidden precision: {printable(str(row.label))}: {row.finding}")
    raw, packed = total["raw_bytes"], total["packed_bytes"]
    share = f", {total['saving_frac']:.1%} less" if raw else ""
    print(
        f"together: {raw / 1e6:,.2f} MB, packed {packed / 1e6:,.2f} MB{share}; what packing makes larger counts as is"
    )
    for place in (csv, out):
        if place is not None:
            print(f"wrote {place}")


def _stats(table: pd.DataFrame) -> pd.DataFrame:
    names = ["label", "dtype", "raw_bytes", "best_frac", "paper_frac", "chunk_bits"]
    bounds = ["marginal_bound_frac", "exponent_bound_frac", "joint_bound_frac"]
    return _savings(table[names + bounds].rename(columns={"label": "tensor", "best_frac": "saving_frac"}))


def _savings(table: pd.DataFrame) -> pd.DataFrame:
    """As `shown`; what packing makes larger saves nothing, and its table says so."""
    readable = shown(table)
    for name in readable.columns.intersection(["saving %", "paper %"]):
        readable[name] = readable[name].astype(object).mask(readable[name] < 0, "larger")
    return readable


@app.command("pack")
def pack(
    files: Files,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.ibp", help="Write the packed tensors here (required).")
    ] = None,
    chunk_bits: Chunk = "auto",
    layout: Annotated[
        str, typer.Option(metavar="condensed|slots", help="Rows back to back, or each at its old distance.")
    ] = "condensed",
    force: ForceFile = False,
    as_json: Json = False,
) -> None:
    """Pack all tensors of the files without loss into one file.

    A row that would grow keeps its bytes, and takes four more for its length: tensors of one dimension, whose rows are
    single elements, grow.
    """
    if out is None:
        raise GpubloatError("the packed tensors would be lost", "say where to keep them: --out FILE.ibp")
    if chunk_bits not in ("auto", "8", "16", "32", "64"):
        raise GpubloatError(f"chunks of {chunk_bits!r} bits cannot be packed", "use auto, 8, 16, 32 or 64")
    refuse_to_replace(out, force)
    if out.exists() and any(file.exists() and out.samefile(file) for file in files):
        raise GpubloatError(f"{out} is one of the files to pack", "name another file")
    refuse_missing(*files)
    from gpubloat import tensors

    width: Any = chunk_bits if chunk_bits == "auto" else int(chunk_bits)
    packed: dict[str, Packed] = {}
    with _compiling_is_said():
        for file in files:
            for tensor in tensors.tensors_in(file):
                name = tensor.name if len(files) == 1 else f"{file.name}/{tensor.name}"
                if name in packed:
                    raise GpubloatError(f"{name} is there twice", "pack the files one by one")
                packed[name] = tensors.pack(tensor, tensors.fit(tensor, chunk_bits=width), layout)  # type: ignore[arg-type]
    tensors.save(out, packed, force=force)
    _say_packed(packed, as_json, f"wrote {out}")


@app.command("unpack")
def unpack(
    file: Annotated[Path, typer.Argument(metavar="FILE.ibp", help="What `pack` wrote.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.safetensors", help="Write the tensors, bit for bit, here.")
    ] = None,
    force: ForceFile = False,
    as_json: Json = False,
) -> None:
    """Check a packed file and list it; with --out, write its tensors as they were."""
    refuse_missing(file)
    from gpubloat import tensors
    from gpubloat.tensors import unpacked

    packed = tensors.load(file)
    if out is not None:
        with _compiling_is_said():
            unpacked.write(out, packed, force)
    _say_packed(packed, as_json, f"{file} is whole" if out is None else f"wrote {out}")


def _compiling_is_said() -> AbstractContextManager[None]:
    from gpubloat.tensors.jit import compiling

    return compiling(lambda: print(COMPILING, file=sys.stderr))


def _say_packed(packed: dict[str, Packed], as_json: bool, last: str) -> None:
    import pandas as pd

    names = ["dtype", "raw_bytes", "packed_bytes", "saving_frac", "n_raw_rows"]
    rows = [
        {"tensor": name, "shape": "x".join(map(str, p.shape)), "chunk_bits": p.codebook.chunk_bits}
        | {column: getattr(p, column) for column in names}
        for name, p in packed.items()
    ]
    table = pd.DataFrame(rows, columns=["tensor", "shape", "chunk_bits", *names])
    raw, small = int(table["raw_bytes"].sum()), int(table["packed_bytes"].sum())
    if as_json:
        print(json.dumps({"raw_bytes": raw, "packed_bytes": small, "tensors": records(table)}))
        return
    print_table(_savings(table), title="packed tensors")
    share = f" ({abs(1 - small / raw):.1%} {'less' if small <= raw else 'more'})" if raw else ""
    print(f"{raw / 1e6:,.2f} MB, packed {small / 1e6:,.2f} MB{share}")
    print(last)
