"""Measured runs -> tables: which of them gave what the originals gave, and the verdict of each loading mode."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd

from gpubloat.libraries.cost import Cost

VARIANTS = ("original", "debloated")
VERDICTS = ("crashed", "differs", "not_deterministic", "equal")  # the worst first
_FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/:]+/)+")
_NUMBER = re.compile(rb"(?<![\w.])[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf)(?!\.?\w)", re.IGNORECASE)


class Outcome(NamedTuple):
    """What of a run is compared."""

    exit_status: int
    stdout: str
    files: tuple[str, ...]


class Measured(NamedTuple):
    """One run: which libraries, which loading mode, which round, what it cost."""

    variant: str
    loading: str
    repeat: int
    cost: Cost

    @property
    def outcome(self) -> Outcome:
        return Outcome(self.cost.exit_status, self.cost.stdout_sha256, self.cost.files_sha256)


def repeats(runs: Sequence[Measured]) -> pd.DataFrame:
    """Table repeats, in order of time."""
    first: dict[str, Outcome] = {}
    rows = []
    for run in runs:
        first.setdefault(run.loading, run.outcome)
        rows.append(
            {
                "variant": run.variant,
                "loading": run.loading,
                "repeat": run.repeat,
                "exit_status": run.cost.exit_status,
                "wall_s": run.cost.wall_s,
                "peak_rss_bytes": run.cost.peak_rss_bytes,
                "peak_gpu_bytes": run.cost.peak_gpu_bytes,
                "stdout_sha256": run.cost.stdout_sha256,
                "files_sha256": " ".join(run.cost.files_sha256),
                "is_equal": run.outcome == first[run.loading],
            }
        )
    return pd.DataFrame(rows).astype({"peak_gpu_bytes": "Int64"})


def verdict(loading: str, runs: Sequence[Measured]) -> dict[str, Any]:
    """One row of verdicts, from the runs of one loading mode."""
    originals, copies = ([r for r in runs if r.variant == variant] for variant in VARIANTS)
    known = {r.outcome for r in originals}
    statuses = {r.cost.exit_status for r in originals}
    is_deterministic = len(known) == 1
    # Among originals that differ, the copies may give what any of them gave.
    is_equal = all(r.outcome in known for r in copies)
    odd = [r for r in copies if r.cost.exit_status not in statuses]
    if any(r.cost.exit_status for r in odd):
        found = "crashed"
    elif odd or (is_deterministic and not is_equal):
        found = "differs"
    else:
        found = "equal" if is_deterministic else "not_deterministic"
    row: dict[str, Any] = {
        "loading": loading,
        "n_repeats": len(originals),
        "is_deterministic": is_deterministic if len(originals) > 1 else None,
        "is_equal": is_equal,
        "verdict": found,
    }
    for suffix, group in (("", originals), ("_after", copies)):
        walls = [r.cost.wall_s for r in group]
        gpu = [r.cost.peak_gpu_bytes for r in group if r.cost.peak_gpu_bytes is not None]
        row |= {
            f"wall_s{suffix}": statistics.median(walls),
            f"wall_spread_s{suffix}": max(walls) - min(walls),
            f"peak_rss_bytes{suffix}": round(statistics.median(r.cost.peak_rss_bytes for r in group)),
            f"peak_gpu_bytes{suffix}": round(statistics.median(gpu)) if gpu else None,
        }
    return row


def numbers(runs: Sequence[Measured]) -> dict[str, Any]:
    """The last number that each run printed, as text, and whether the copies' are within the spread of the originals'.

    `within_spread`: the medians differ by no more than the originals among themselves; None if a run printed none.
    """
    original, debloated = ([last_number(r.cost.stdout_tail) for r in runs if r.variant == v] for v in VARIANTS)
    within = None
    if None not in original and None not in debloated:
        ones, others = ([float(text) for text in texts if text] for texts in (original, debloated))
        spread, apart = max(ones) - min(ones), abs(statistics.median(others) - statistics.median(ones))
        within = apart <= spread or set(original) == set(debloated)  # nan is equal to itself here
    return {"original": original, "debloated": debloated, "within_spread": within}


def complaint(runs: Sequence[Measured]) -> str:
    """What the first copy that ended unlike all originals said last on stderr; empty if none did, or silently.

    Of paths only the file name is kept: it goes into run.json, which names no folder of a machine.
    """
    statuses = {r.cost.exit_status for r in runs if r.variant == "original"}
    odd = [r for r in runs if r.cost.exit_status not in statuses]
    return _FOLDERS.sub("", last_line(odd[0].cost.stderr_tail)) if odd else ""


def last_line(printed: bytes) -> str:
    lines = printed.decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def last_number(printed: bytes) -> str | None:
    """The last number in what a program printed, as it stands there: a training loss, say."""
    found: list[bytes] = _NUMBER.findall(printed)
    return found[-1].decode("ascii") if found else None
