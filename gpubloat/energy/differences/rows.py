"""Rows of the tables of a diff."""

from __future__ import annotations

from typing import Any

from gpubloat.energy.causes import Cause
from gpubloat.energy.compare import Comparison
from gpubloat.energy.differences.pair import Pair
from gpubloat.energy.differences.regions import Found, region_s
from gpubloat.energy.match.regions import Region
from gpubloat.energy.meter import NotMeasured
from gpubloat.energy.statistics import NO_DIFFERENCE, Saved

_MOST_NAMES = 6  # of operators


def _share(comparison: Comparison | None) -> dict[str, Any]:
    saved = None if comparison is None else comparison.saved
    if not isinstance(saved, Saved):
        return {"saved_frac": None, "low_frac": None, "high_frac": None, "wasteful": ""}
    return {
        "saved_frac": saved.saved_frac, "low_frac": saved.low_frac, "high_frac": saved.high_frac,
        "wasteful": saved.wasteful,
    }  # fmt: skip


def _told(cause: Cause | None) -> dict[str, str]:
    if cause is None:
        return {"cause": "", "evidence": "", "remedy": "", "a_line": "", "b_line": ""}
    return {
        "cause": cause.kind, "evidence": cause.evidence, "remedy": cause.remedy,
        "a_line": str(cause.a_line or ""), "b_line": str(cause.b_line or ""),
    }  # fmt: skip


def region_row(subject: str, number: int, pair: Pair, region: Region, found: Found | None) -> dict[str, Any]:
    """Of table regions."""
    row: dict[str, Any] = {"subject": subject, "region": number, "is_same": region.is_same, "notes": ""}
    for side, letter in enumerate("ab"):
        ops = [pair.captures[side].ops[i] for i in (region.a_ops if side == 0 else region.b_ops)]
        row |= {f"{letter}_operators": _named([op.name for op in ops if not op.is_view] or [op.name for op in ops])}
        row |= {f"{letter}_line": str(next((op.lines[0] for op in ops if op.lines), ""))}
        row |= {f"{letter}_time_s": region_s(pair, side, region), f"{letter}_call_j": None}
    row |= _share(None) | {"cause": "", "evidence": "", "remedy": ""}
    if found is None:
        return row | {"verdict": NO_DIFFERENCE, "reason": "the same operators"}
    row |= {"verdict": found.said.verdict, "reason": found.said.reason, "notes": found.note} | _share(found.comparison)
    row |= {key: text for key, text in _told(found.cause).items() if text}
    if found.comparison is not None:
        return row | {"a_call_j": found.comparison.a.call_j, "b_call_j": found.comparison.b.call_j}
    if found.alone is not None and found.alone.call_j is not None:
        whole = {"saved_frac": 1.0, "low_frac": 1.0, "high_frac": 1.0, "wasteful": "AB"[found.alone.side]}
        return row | {f"{'ab'[found.alone.side]}_call_j": found.alone.call_j} | whole
    return row


def _named(names: list[str]) -> str:
    more = [f"{len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
    return " + ".join([*names[:_MOST_NAMES], *more])


def comparison_row(pair: Pair, whole: Comparison, cause: Cause | None, names: tuple[str, str]) -> dict[str, Any]:
    """Of table comparisons, but for the fix and the notes."""
    errors = pair.output_errors
    row: dict[str, Any] = {"framework": pair.captures[0].framework, "a": names[0], "b": names[1]}
    row |= {"verdict": pair.said.verdict, "reason": pair.said.reason} | _share(whole) | _told(cause)
    row |= {"time_ratio": whole.time_ratio if whole.time_ratio > 0 else None}
    row |= {"band_frac": None if isinstance(pair.band, NotMeasured) else pair.band}
    for letter, side in (("a", whole.a), ("b", whole.b)):
        row |= {f"{letter}_call_j": side.call_j, f"{letter}_active_j": side.active_j}
        row |= {f"{letter}_call_s": side.call_s, f"{letter}_host_s": side.host_s}
    row |= {"outputs_equal": pair.outputs_equal, "output_error": max(errors) if errors else None}
    return row
