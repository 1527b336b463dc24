"""`gpubloat memory ...`: record an allocator, say where its memory is, and replay it through other allocators."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpubloat.cli import diagnosis
from gpubloat.cli.common import (
    Command,
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
)
from gpubloat.errors import GpubloatError
from gpubloat.run import Run, RunWriter, refuse_overwrite

if TYPE_CHECKING:
    import pandas as pd

app = typer.Typer(
    no_args_is_help=True,
    help="GPU memory that is reserved and unusable: whose it is, and what another allocator saves.",
)
Snapshot = Annotated[Path, typer.Argument(metavar="SNAPSHOT|RUN", help="A snapshot, a log of RMM, or a run folder.")]


@app.command("record")
def record(
    command: Command = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the snapshot here (required).")
    ] = None,
    max_entries: Annotated[
        int, typer.Option(min=1, help="Events to keep per GPU; older ones are dropped.")
    ] = 1_000_000,
    stacks: Annotated[str, typer.Option(metavar="python|all", help="Frames to record; all adds C++.")] = "python",
    force: ForceFile = False,
) -> None:
    """Run a Python command unchanged and record what PyTorch's allocator does, from the start of CUDA to the end.

    Each further process that starts CUDA gets a file of its own, with a number. Ends with the command's exit status.
    """
    if out is None:
        raise GpubloatError("the recording would be lost", "say where to keep it: --out FILE")
    from gpubloat.memory import recorder

    done = recorder.run(command or [], out, max_entries=max_entries, stacks=stacks, force=force)
    for path in done.snapshots:
        print(f"wrote {path}", file=sys.stderr)
    if done.n_lost:
        print(f"note: {done.n_lost} processes were killed before they could write their history", file=sys.stderr)
    if not done.snapshots and not done.status:
        from gpubloat import doctor

        gpu = doctor.driver()
        hint = (
            "a PyTorch without CUDA starts none (see gpubloat doctor), and python -I, -E and -S keep the recorder out"
        )
        if gpu.state != "yes":
            hint = f"no NVIDIA GPU can be used here ({gpu.found}): record where there is one, and read it anywhere"
        raise GpubloatError("nothing was recorded: no Python process of the command started CUDA", hint)
    raise typer.Exit(done.status if done.status >= 0 else 128 - done.status)


@app.command("report")
def report(
    snapshot: Annotated[
        Path | None, typer.Argument(metavar="SNAPSHOT|RUN", help="A snapshot, a log of RMM, or a run folder.")
    ] = None,
    oom_message: Annotated[
        str | None, typer.Option(metavar="TEXT|-", help="An out-of-memory message of PyTorch; - reads it from stdin.")
    ] = None,
    limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What the allocator was allowed to take, such as 40GiB.")
    ] = None,
    at_peak: Annotated[
        bool, typer.Option("--at-peak", help="Who pinned what when most was reserved, instead of at the end.")
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="Rows of the tables of owners and blocks.")] = 8,
    csv: Csv = None,
    out: Out = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Say how fragmented memory is, which blocks keep which segments, and what an out-of-memory error was about."""
    if snapshot is None and oom_message is None:
        raise GpubloatError("there is nothing to report on", "give a snapshot, or --oom-message TEXT")
    if snapshot is None and (csv or out):
        raise GpubloatError("an out-of-memory message has no tables", "leave --csv and --out away")
    for folder in (csv, out):
        if folder is not None:
            refuse_overwrite(folder, force)
    if snapshot is not None:
        refuse_missing(snapshot)
    from gpubloat.memory import oom

    found: dict[str, Any] = {}
    if oom_message is not None:
        found["oom_message"] = oom.diagnose(sys.stdin.read() if oom_message == "-" else oom_message).as_dict()
    tables: dict[str, pd.DataFrame] = {}
    if snapshot is not None:
        run = _opened(snapshot, out, force)
        tables = diagnosis.tables(run, at_peak)
        found |= diagnosis.about(run, _size(limit)) | {name: records(table.head(top)) for name, table in tables.items()}
        if csv is not None:
            diagnosis.export(run, tables, csv, force)
    if as_json:
        print(json.dumps(found))
        return
    diagnosis.print_report(found, tables, top)
    for place in (csv, out):
        if place is not None:
            print(f"wrote {place}")


@app.command("replay")
def replay(
    snapshot: Snapshot,
    allocator: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,k=v]...",
            help="native, bfc, caching, expandable, stitching or gmlake, with settings such as "
            "caching,max_split_size_mb=128; can be given several times.",
        ),
    ] = None,
    limit: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of the GPU, such as 40GiB.")] = None,
    csv: Csv = None,
    out: Out = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Replay a trace through other allocators, and say what each would have reserved.

    Without --allocator: the one that recorded it, expandable segments, stitching, and native cudaMalloc.
    """
    refuse_missing(snapshot)
    for folder in (csv, out):
        if folder is not None:
            refuse_overwrite(folder, force)
    wanted = [_allocator(text) for text in allocator or ()]
    from gpubloat import memory
    from gpubloat.analysis import whatif

    run = _opened(snapshot, None, False)
    replays, checked, first = _replayed(run, wanted, _size(limit))
    table = whatif.what_if(replays, bounds=memory.bounds(run)["bounds"])
    verdict = whatif.verdict(table)
    notes = diagnosis.of_the_model(run, table, _exact(checked))
    if start := "" if limit else diagnosis.of_the_start(run, table):
        notes.append(start)
    if csv is not None or out is not None:
        kept = _keep(run, replays, checked, out, force)
        if csv is not None:
            kept.to_csv(csv, force=force)
    if as_json:
        print(
            json.dumps(
                _answer(table, first, checked) | {"verdict": verdict, "notes": notes, "allocators": records(table)}
            )
        )
        return
    print_table(diagnosis.readable(table), title="what each allocator would have reserved")
    if checked is not None:
        print(_how_exact(checked))
    print(f"verdict: {verdict}")
    for note in notes:
        print(f"note: {note}")
    for place in (csv, out):
        if place is not None:
            print(f"wrote {place}")


@app.command("verify")
def verify(
    snapshot: Snapshot,
    limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What the allocator was allowed to take, such as 40GiB.")
    ] = None,
    csv: Csv = None,
    out: Out = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Replay a trace through the model of the allocator that recorded it, and compare every address.

    Garbage collection (garbage_collection_threshold) can only be predicted with the limit, which no trace records.
    Exit status 1 unless all allocations are at their recorded address.
    """
    refuse_missing(snapshot)
    if csv is not None:
        refuse_overwrite(csv, force)
    from gpubloat import memory

    run = memory.verify(_opened(snapshot, None, False), limit_bytes=_size(limit), out=out, force=force)
    if csv is not None:
        run.to_csv(csv, force=force)
    table = run["verifications"]
    exact = _exact(table)
    notes = diagnosis.of_the_segments(table, limit)
    if as_json:
        print(json.dumps({"address_exact_frac": exact, "verifications": records(table), "notes": notes}))
    elif exact is None:
        print("the trace holds no allocation: there is nothing to compare")
    else:
        hidden = ["n_preexisting", "n_owners_of_gaps", "n_events"]
        print_table(shown(table.drop(columns=hidden)), title="recorded against replayed")
        print(_how_exact(table))
        n, predicted = int(table["n_segment_events"].sum()), int(table["n_segment_predicted"].sum())
        print(f"it predicted {predicted:,} of {n:,} segment events (memory taken from the driver or given back)")
        for note in notes:
            print(f"note: {note}")
    raise typer.Exit(0 if exact in (None, 1.0) else 1)


def _opened(path: Path, out: Path | None, force: bool) -> Run:
    from gpubloat import memory
    from gpubloat.memory.trace import opened

    if not path.is_dir():
        return memory.load(path, out=out, force=force)
    run = opened(path)
    return run if out is None else run.save(out, force=force)


def _allocator(text: str) -> tuple[str, dict[str, Any]]:
    """``caching,max_split_size_mb=128,roundup_power2_divisions=[256:1,>:8]`` -> name and settings."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    settings = {}
    for part in parts[1:]:
        key, equals, value = part.partition("=")
        if not equals or not key.strip().isidentifier():
            raise GpubloatError(f"{part!r} is no setting", "write NAME,setting=value,setting=value")
        settings[key.strip()] = _value(value.strip())
    return parts[0].strip(), settings


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _size(text: str | None) -> int | None:
    """40GiB, 40GB, 40G (as GB) or a number of bytes, a mebibyte at least."""
    if text is None:
        return None
    units = (
        {"": 1, "b": 1}
        | {u: 1000**n for n, u in enumerate("kmgt", 1)}
        | {f"{u}b": 1000**n for n, u in enumerate("kmgt", 1)}
    )
    units |= {f"{u}ib": 1024**n for n, u in enumerate("kmgt", 1)}
    number = text.strip().rstrip("bBiIkKmMgGtT").strip()
    unit = text.strip()[len(number) :].strip().lower()
    try:
        size = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        raise GpubloatError(f"{text!r} is no size", "write 40GiB, 40GB or a number of bytes") from None
    if size < 1 << 20:
        raise GpubloatError(f"{text!r} is {size} bytes, less than one segment", "write the unit: 40GiB")
    return size


def _replayed(
    run: Run, wanted: list[tuple[str, dict[str, Any]]], limit: int | None
) -> tuple[pd.DataFrame, pd.DataFrame | None, tuple[str, str]]:
    """Rows of `replays`, those of the recording allocator first; `verifications` where there is something to compare
    with; and which allocator was asked for first."""
    import pandas as pd

    from gpubloat import memory
    from gpubloat.memory.allocators import NAMES
    from gpubloat.memory.allocators.settings import recorded

    own = "expandable" if recorded(run.provenance.get("allocator_settings", {})).expandable_segments else "caching"
    standard = [name for name in ("caching", "expandable", "stitching", "native") if name in NAMES and name != own]
    chosen = [(own, {}), *(wanted or [(name, {}) for name in standard])]
    # Under a limit all begin alike: what the recorded one held from before may be more than that.
    starts = ["packed" if limit is not None else "auto"] + ["auto"] * len(chosen[1:])
    tables = [
        memory.replay(run, name, limit_bytes=limit, start=start, **settings)["replays"]
        for (name, settings), start in zip(chosen, starts)
    ]
    first = tables[1 if wanted else 0].iloc[0]
    checked = memory.verify(run)["verifications"] if len(run["segments"]) else None
    return pd.concat(tables, ignore_index=True), checked, (first["allocator"], first["settings"])


def _keep(run: Run, replays: pd.DataFrame, checked: pd.DataFrame | None, out: Path | None, force: bool) -> Run:
    from gpubloat.run import provenance

    with RunWriter("memory", ["replays", "verifications"], out, force) as writer:
        writer.append("replays", replays.drop_duplicates(["device", "allocator", "settings"]))
        if checked is not None:
            writer.append("verifications", checked)
        record = provenance(command_line(), {}, run.provenance.get("inputs", []))
        return writer.finish(record | {"empty": {"verifications": "nothing was recorded to compare with"}})


def _answer(table: pd.DataFrame, first: tuple[str, str], checked: pd.DataFrame | None) -> dict[str, Any]:
    """The numbers of the allocator that was asked for first; of several GPUs, those of the one that reserves most."""
    rows = table[(table["allocator"] == first[0]) & (table["settings"] == first[1])]
    row = records(rows.sort_values("peak_reserved_bytes", ascending=False).head(1))[0]
    names = ("allocator", "settings", "device", "peak_reserved_bytes", "peak_active_bytes", "utilisation_frac", "n_oom")
    return {"address_exact_frac": _exact(checked)} | {name: row[name] for name in names}


def _exact(checked: pd.DataFrame | None) -> float | None:
    n = 0 if checked is None else int(checked["n_allocations"].sum())
    return int(checked["n_exact"].sum()) / n if checked is not None and n else None


def _how_exact(checked: pd.DataFrame) -> str:
    n, exact = int(checked["n_allocations"].sum()), int(checked["n_exact"].sum())
    return f"the model put {exact:,} of {n:,} allocations at their recorded address"
