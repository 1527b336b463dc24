"""From energies of blocks A B B A to a share saved with its interval, and from that to a verdict. Numbers only.

A block's log ratio is that of the geometric means of its two A and its two B: a drift that is linear in the logarithm
cancels. saved_frac is 1 - E_fast / E_slow, always, where "slow" is the side that took more energy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpubloat.energy.meter import NotMeasured

LEAST_BLOCKS = 3
CLAIM = 0.05  # the least share saved that is called waste
MOST_TIME = 1.01  # of the slow side's time that the fast one may take

WASTE, TRADE_OFF, NO_DIFFERENCE, UNKNOWN = "waste", "trade-off", "no difference", "not measured"


@dataclass(frozen=True)
class Saved:
    """Share of the energy that one side saves, with its 95 % interval.

    saved_frac : 1 - E_fast / E_slow, not negative. low_frac, high_frac : its interval; low is negative where it is not
        certain which side takes more.
    wasteful : "A" or "B", the side that took more.
    log_ratio, half_width : mean of log(E_A / E_B) over the blocks, and half of its interval; n_blocks : how many.
    """

    saved_frac: float
    low_frac: float
    high_frac: float
    wasteful: str
    log_ratio: float
    half_width: float
    n_blocks: int


@dataclass(frozen=True)
class Verdict:
    """verdict : waste, trade-off, no difference or not measured. reason : one clause that says why."""

    verdict: str
    reason: str


def t_cdf(t: float, degrees: int) -> float:
    """Student's t distribution for whole degrees of freedom: finite sums, Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine2 = math.cos(angle) ** 2
    total, term = 0.0, 1.0
    if degrees % 2:
        if degrees > 1:
            term = total = math.cos(angle)
            for k in range(3, degrees - 1, 2):
                term *= cosine2 * (k - 1) / k
                total += term
        inside = 2 / math.pi * (angle + math.sin(angle) * total)
    else:
        total = term
        for k in range(2, degrees - 1, 2):
            term *= cosine2 * (k - 1) / k
            total += term
        inside = math.sin(angle) * total
    return (1 + inside) / 2


def t_quantile(probability: float, degrees: int) -> float:
    """The value that a Student t variable stays below with `probability`, between 0.5 and 1; `degrees` is 1 or more."""
    low, high = 0.0, 1.0
    while t_cdf(high, degrees) < probability:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, degrees) < probability else (low, middle)
    return high


def log_ratios(sides: Sequence[str], energies: Sequence[float]) -> np.ndarray | NotMeasured:
    """log(E_A / E_B) of each block of four.

    Parameters
    ----------
    sides : "A" or "B" in the order in which they were measured: A B B A or B A A B, again and again.
    energies : J, or J per call, of the same length; NaN where one was not measured.

    Returns
    -------
    float64[n_blocks]; NotMeasured if an energy is missing or not positive, or if the order is another.
    """
    if len(sides) != len(energies) or len(sides) % 4:
        return NotMeasured(f"{len(sides)} measurements are no whole number of blocks A B B A")
    order = "".join(sides)
    blocks = [order[i : i + 4] for i in range(0, len(order), 4)]
    if not set(blocks) <= {"ABBA", "BAAB"}:
        return NotMeasured("the order of measurements is not A B B A")
    values = np.asarray(energies, dtype=np.float64)
    if not (np.isfinite(values).all() and (values > 0).all()):
        return NotMeasured("a block has no energy")
    signs = np.array([1.0 if side == "A" else -1.0 for side in order])
    ratios: np.ndarray = (signs * np.log(values)).reshape(-1, 4).sum(axis=1) / 2
    return ratios


def saved(ratios: Sequence[float] | np.ndarray | NotMeasured) -> Saved | NotMeasured:
    """The share saved and its 95 % interval, by Student's t over blocks; NotMeasured with fewer than 3 blocks."""
    if isinstance(ratios, NotMeasured):
        return ratios
    values = np.asarray(ratios, dtype=np.float64)
    n = len(values)
    if n < LEAST_BLOCKS:
        return NotMeasured(f"{n} blocks were measured, and {LEAST_BLOCKS} are needed")
    mean = float(values.mean())
    half = t_quantile(0.975, n - 1) * float(values.std(ddof=1)) / math.sqrt(n)
    size = abs(mean)
    return Saved(
        saved_frac=-math.expm1(-size),
        low_frac=-math.expm1(-(size - half)),
        high_frac=-math.expm1(-(size + half)),
        wasteful="B" if mean < 0 else "A",
        log_ratio=mean,
        half_width=half,
        n_blocks=n,
    )


def null_band(same: Saved | NotMeasured) -> float | NotMeasured:
    """The smallest share that may be claimed: half the 95 % interval of A against A, as a share."""
    return same if isinstance(same, NotMeasured) else math.expm1(same.half_width)


def verdict(
    result: Saved | NotMeasured,
    time_ratio: float,
    outputs_equal: bool | None,
    band: float | NotMeasured,
) -> Verdict:
    """What may be said about two sides.

    Parameters
    ----------
    result : of `saved`. time_ratio : time of the side that took less energy over that of the other.
    outputs_equal : within the tolerance of their type; None if they were not compared.
    band : of `null_band`: A against A, measured in the same session.

    Returns
    -------
    waste : the lower end of the share saved is over 5 % and over the band, outputs are equal, and the time is at most
        1 % longer. trade-off : energy is saved as surely, but outputs differ or were not compared, or it takes longer.
    no difference : otherwise. not measured : a part is missing, and why.
    """
    if isinstance(result, NotMeasured):
        return Verdict(UNKNOWN, result.reason)
    if isinstance(band, NotMeasured):
        return Verdict(UNKNOWN, f"A against A: {band.reason}")
    if not (math.isfinite(time_ratio) and time_ratio > 0):
        return Verdict(UNKNOWN, "times were not measured")
    least = max(CLAIM, band)
    if not result.low_frac > least:
        what = "5 %" if band <= CLAIM else f"{band:.1%}, what A against A differs by"
        return Verdict(NO_DIFFERENCE, f"the lower end of the share saved, {result.low_frac:.1%}, is not over {what}")
    if outputs_equal is None:
        return Verdict(TRADE_OFF, "outputs were not compared")
    if not outputs_equal:
        return Verdict(TRADE_OFF, "outputs differ")
    if time_ratio > MOST_TIME:
        return Verdict(TRADE_OFF, f"what saves energy takes {time_ratio - 1:.1%} longer")
    return Verdict(WASTE, f"at least {result.low_frac:.1%} of the energy of {result.wasteful} is saved")
