"""The cause of a difference: every rule looks at both sides, and what explains most of the difference comes first."""

from __future__ import annotations

from dataclasses import replace

from gpubloat.energy.capture.records import Capture
from gpubloat.energy.causes import chains, compiled, copies, formats, hosts, kernels, precision, rows, same
from gpubloat.energy.causes.findings import Cause, Finding
from gpubloat.energy.causes.sides import Side, leftover, lines, named
from gpubloat.energy.match.regions import Region
from gpubloat.energy.timing import Timing

_RULES = (
    hosts.fallback, copies.found, rows.found, precision.found, chains.found, formats.found, compiled.found,
    kernels.found,
)  # fmt: skip
_OTHER_SIDE = 0.3  # what is left of the confidence if the excess is on the side that is not the slow one


def causes(
    a: Capture,
    b: Capture,
    region: Region | None,
    a_timing: Timing | None = None,
    b_timing: Timing | None = None,
    host: tuple[float, float] | None = None,
    *,
    slow: str = "",
) -> Cause:
    """Why the two sides of a region differ, or whole functions (region None).

    host : CPU seconds per call of A and of B. slow : "a" or "b", the side that took more energy or time, if it was
    measured; else it is the one that took longer in the timings, if there are any.
    """
    sides = (
        Side("A", a, a.ops if region is None else tuple(a.ops[i] for i in region.a_ops), a_timing),
        Side("B", b, b.ops if region is None else tuple(b.ops[i] for i in region.b_ops), b_timing),
    )
    gap = _gap(*sides)
    slow = slow or ("" if gap is None else "a" if gap > 0 else "b")
    found: list[tuple[float, Cause]] = []
    for own, letter in ((0, "a"), (1, "b")):
        mine, other = sides[own], sides[1 - own]
        for rule in _RULES:
            for finding in rule(mine, other):
                confidence = _confidence(finding, mine, gap)
                if slow not in ("", letter) and not finding.is_host:
                    confidence *= _OTHER_SIDE
                found.append((confidence, _reported(finding, letter, confidence)))
    if same.are_same(*sides) and not found:
        for finding in (*same.data(*sides), *hosts.wait(*sides, host)):
            found.append((finding.strength, _reported(finding, _side_of(finding, host), finding.strength)))
    ranked = [cause for _, cause in sorted(found, key=lambda pair: -pair[0])]
    if not ranked:
        return _unknown(*sides)
    return replace(ranked[0], also=tuple(ranked[1:]))


def _gap(a: Side, b: Side) -> float | None:
    """Microseconds of GPU time that A takes longer; None if not both were timed."""
    if not (a.has_kernels and b.has_kernels):
        return None
    return a.us(a.works) - b.us(b.works)


def _confidence(finding: Finding, side: Side, gap: float | None) -> float:
    """Strength of the facts times how much of the difference they explain.

    Half of it goes by the strength alone: a guess of times, and a time next to an energy, say little.
    """
    if finding.is_host:
        return finding.strength
    whole = abs(gap) if gap else side.us(side.works)
    return finding.strength * (0.5 + 0.5 * (min(1.0, finding.us / whole) if whole else 0.0))


def _reported(finding: Finding, letter: str, confidence: float) -> Cause:
    own, other = lines(finding.slow_op, finding.fast_op)
    a_line, b_line = (other, own) if letter == "b" else (own, other)
    return Cause(
        finding.kind, finding.evidence, a_line, b_line, finding.remedy, finding.switch, round(confidence, 3), letter
    )


def _side_of(finding: Finding, host: tuple[float, float] | None) -> str:
    if finding.kind != "host wait" or host is None:
        return ""
    return "a" if host[0] > host[1] else "b"


def _unknown(a: Side, b: Side) -> Cause:
    """Said plainly, with what was compared."""
    firsts = [side.works[0] if side.works else None for side in (a, b)]
    what = "names, shapes, strides, types and values of operators"
    what += " and their kernels" if a.has_kernels and b.has_kernels else "; kernels were not seen"
    if "jax" in (a.capture.framework, b.capture.framework):
        what += ", nor what XLA fuses"
    if same.are_same(a, b):
        evidence = (
            f"both sides ran the same {len(a.works)} operators ({named(a.works) or 'none'}): compared were {what}"
        )
    elif leftover(a, b) == ([], []):
        evidence = f"both sides ran the same {len(a.works)} operators in another order: compared were {what}"
    else:
        evidence = (
            f"A ran {named(a.works) or 'nothing'} and B {named(b.works) or 'nothing'}, and no known cause fits: "
            f"compared were {what}"
        )
    return Cause("unknown", evidence, *lines(*firsts), "none known")
