"""What `gpubloat memory report` and `replay` say: their tables, their sentences, and how they are printed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpubloat.cli.common import print_table, records, shown
from gpubloat.errors import printable

if TYPE_CHECKING:
    import pandas as pd

    from gpubloat.run import Run

MOST_REPLAYED = 3  # out-of-memory events
_GIVE_LIMIT = "if it was a limit, give it: --limit SIZE judges within it, and says what would have helped"


def tables(run: Run, is_at_peak: bool = False) -> dict[str, pd.DataFrame]:
    """The tables of a report, by the names of `analysis.diagnosis.TITLES`."""
    from gpubloat.analysis import diagnosis

    events, segments, blocks = run["events"], run["segments"], run["blocks"]
    return diagnosis.tables(events, segments, blocks, run["stacks"], run["frames"], is_at_peak)


def about(run: Run, limit_bytes: int | None = None) -> dict[str, Any]:
    """What is not a table: how complete the history is, warnings about settings, out-of-memory events."""
    from gpubloat.memory import oomtrace
    from gpubloat.memory.allocators import lint

    about = run.provenance
    oom: list[dict[str, Any]] = []
    for (device, event), verdict in oomtrace.of_trace(run, limit_bytes).items() if len(run["segments"]) else ():
        # Each takes several replays; a program that tries again and again fails for one reason.
        is_worth_it = verdict.verdict == "fragmentation" and len(oom) < MOST_REPLAYED
        helped = records(oomtrace.would_have_helped(run, device, event, limit_bytes=limit_bytes)) if is_worth_it else []
        oom.append({"device": device, "event": event} | verdict.as_dict() | {"would_have_helped": helped})
        if limit_bytes is None and verdict.verdict == "driver_or_limit_refused":
            oom[-1]["advice"].insert(0, _GIVE_LIMIT)
    return {
        "format": about.get("format"),
        "history": about.get("history", {}),
        "no_events": about.get("empty", {}).get("events"),
        "lint": lint(about.get("allocator_settings", {}), run["segments"]["pool"].unique()),
        "oom": oom,
    }


def print_report(found: dict[str, Any], tables: dict[str, pd.DataFrame], top: int) -> None:
    from gpubloat.analysis.diagnosis import TITLES, summary
    from gpubloat.analysis.whatif import name

    if "oom_message" in found:
        print_oom(found["oom_message"], "the message")
    for device, history in found.get("history", {}).items():
        print(f"GPU {device}: {printable(history['why'])}")
    if found.get("no_events") and not found["history"]:
        print(printable(found["no_events"]))
    for warning in found.get("lint", ()):
        print(f"warning: {printable(str(warning))}")
    for sentence in summary(tables) if tables else ():
        print(sentence)
    for part, title in TITLES.items() if tables else ():
        table = tables[part]
        if part == "peaks":
            table = table[[c for c in table if not str(c).startswith("end_")]].drop(
                columns=["n_events"], errors="ignore"
            )
        if part in ("owners", "blocks", "live"):
            table = table.drop(columns=["stack", "block", "age_us", "address"], errors="ignore").head(top)
        if len(table):
            print_table(shown(table.dropna(axis="columns", how="all")), title=title)
    for oom in found.get("oom", ())[:top]:
        print_oom(oom, f"GPU {oom['device']}, event {oom['event']}")
        for row in oom["would_have_helped"]:
            said = "would have failed, too"
            if row["is_served"]:
                said = f"would have served it, with {row['spare_bytes'] / 1e6:,.0f} MB to spare"
            print(f"  {name(row['allocator'], row['settings'])}: {said}")


def print_oom(oom: dict[str, Any], what: str) -> None:
    print(f"out of memory, {what}: {oom['verdict']}: {oom['why']}")
    for line in oom["advice"]:
        print(f"  - {line}")


def export(run: Run, tables: dict[str, pd.DataFrame], folder: Path, force: bool) -> None:
    run.to_csv(folder, force=force, more={f"report_{name}": table for name, table in tables.items()})


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """`analysis.whatif.what_if` for a terminal: settings beside the name, * for the recorded one, driver time in ms."""
    from gpubloat.analysis.whatif import name

    marks = table["is_recorded"].map({True: " *", False: ""})
    labels = [name(a, s) + mark for a, s, mark in zip(table["allocator"], table["settings"], marks)]
    shorter = table.assign(allocator=labels).drop(columns=["settings", "is_recorded", "limit_bytes"])
    if "driver_s" in shorter:
        shorter = shorter.assign(driver_s=(shorter["driver_s"].astype(float) * 1e3).round(2))
        shorter = shorter.rename(columns={"driver_s": "driver ms"})
    if not (shorter["n_oom"] > 0).any():
        shorter = shorter.drop(columns=["n_oom", "oom_event"])
    return shown(shorter.rename(columns={"allocator": "allocator (* recorded it)"}))


def of_the_model(run: Run, table: pd.DataFrame, exact: float | None) -> list[str]:
    """Why the figures of a replay are less than certain: blocks elsewhere than recorded, another peak than recorded."""
    from gpubloat.analysis import memory as analysis

    notes = []
    if exact is not None and exact < 1:
        notes.append(f"only {exact:.1%} of the allocations are where they were recorded: take these figures as a guess")
    if not len(run["segments"]):
        return notes
    peaks = analysis.peaks(analysis.history(run["events"], run["segments"], run["blocks"]))
    recorded = dict(zip(peaks["device"].tolist(), peaks["peak_reserved_bytes"].tolist()))
    base = table[table["is_recorded"]]
    for device, replayed in zip(base["device"].tolist(), base["peak_reserved_bytes"].tolist()):
        peak = recorded.get(device, 0)
        if peak and abs(replayed - peak) > 0.01 * peak:
            notes.append(
                f"the trace itself shows a peak of {peak / 1e6:,.1f} MB on GPU {device}; savings are counted from "
                f"the replay's {replayed / 1e6:,.1f}. A memory limit (give --limit) or pools that went back explain it"
            )
    return notes


def of_the_segments(table: pd.DataFrame, limit: str | None) -> list[str]:
    """What may explain segment events that a verification did not predict, if there are any."""
    missed = int((table["n_segment_events"] - table["n_segment_predicted"]).sum())
    if not missed:
        return []
    if limit is not None:
        return [f"another limit than {printable(limit)} may explain the other {missed:,}"]
    why = "no trace records what the allocator was allowed to take"
    if table["settings"].str.contains("garbage_collection_threshold").any():
        why += ", and garbage collection depends on it"
    return [f"with --limit SIZE the other {missed:,} may be predicted, too: {why}"]


def of_the_start(run: Run, table: pd.DataFrame) -> str:
    """Where a trace starts mid-run, the recorded allocator begins with what came before, and the others do not."""
    from gpubloat import memory

    begun = [d for d, history in run.provenance.get("history", {}).items() if history.get("starts_mid_run")]
    if not begun or not len(run["segments"]):
        return ""
    base = table[table["is_recorded"] & (table["device"] == int(begun[0]))].iloc[0]
    packed = memory.replay(run, base["allocator"], start="packed")["replays"]
    row = packed[packed["device"] == int(begun[0])].iloc[0]
    return (
        "the trace starts mid-run: others begin with the blocks of that moment packed, the recorded allocator with "
        f"its segments; {base['allocator']} begun packed, too, reserves {int(row['peak_reserved_bytes']) / 1e6:,.1f} MB"
    )
