"""Which side may be blamed where only times are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpubloat.energy.causes import Cause
from gpubloat.energy.differences.blame import blamed, is_fair, scatter_note, slow_in, slow_side, time_told
from gpubloat.energy.meter import NotMeasured
from gpubloat.energy.statistics import Saved, saved

NONE = NotMeasured("only times were asked for")


def of_times(*log_ratios: float) -> Saved:
    found = saved(log_ratios)
    assert isinstance(found, Saved)
    return found


def whole(times: Any = NONE, energy: Any = NONE) -> Any:
    return SimpleNamespace(saved=energy, times=times)


def pair(a_us: list[float], b_us: list[float], times: Any = NONE, *, is_traced: bool = True) -> tuple[Any, Any]:
    """Two functions of one operator each, timed so often, and the region of both."""
    timings = [
        SimpleNamespace(op_us={0: us[0]} if is_traced else {}, repeats_us=[{0: one} for one in us])
        for us in (a_us, b_us)
    ]
    captures = [SimpleNamespace(ops=[SimpleNamespace(is_view=False)])] * 2
    region = SimpleNamespace(a_ops=(0,), b_ops=(0,))
    return SimpleNamespace(timings=timings, captures=captures, whole=whole(times)), region


A_SLOW, B_SLOW, UNSURE = of_times(0.4, 0.41, 0.39), of_times(-0.4, -0.41, -0.39), of_times(0.4, 1.2, -0.7)


def test_energy_decides_and_time_only_without_it_and_if_it_is_sure() -> None:
    assert slow_side(None) == ""
    assert slow_side(whole(A_SLOW, B_SLOW)) == "b"
    assert slow_side(whole(A_SLOW)) == "a"
    assert slow_side(whole(B_SLOW)) == "b"
    assert slow_side(whole(UNSURE)) == slow_side(whole(NONE)) == ""
    assert slow_side(whole(of_times(0.03, 0.03, 0.03))) == ""  # surely, but by less than 5 %


@pytest.mark.parametrize(
    ("a_us", "b_us", "slow"),
    [
        ([10, 11, 10, 30, 10], [8, 8, 9, 8, 50], "a"),
        ([8, 8, 9, 8, 50], [10, 11, 10, 30, 10], "b"),
        ([10, 12, 14, 16, 18], [9, 11, 13, 15, 17], ""),
        ([10.3] * 5, [10.0] * 5, ""),
        ([2.0] * 5, [0.0] * 5, "a"),
    ],
)
def test_a_region_is_slow_if_its_times_are_apart(a_us: list[float], b_us: list[float], slow: str) -> None:
    for times in (A_SLOW, B_SLOW, UNSURE):
        assert slow_in(*pair(a_us, b_us, times), is_only=False) == slow
    assert slow_in(*pair(a_us, b_us, B_SLOW), is_only=True) == (slow or "b")


def test_what_the_trace_does_not_have_is_not_fast() -> None:
    """Operators of compiled code are not in it."""
    assert slow_in(*pair([5.0] * 5, [0.0] * 5, B_SLOW, is_traced=False), is_only=False) == "b"


def test_only_the_slow_side_is_blamed() -> None:
    copy = Cause("extra copy", "A copies", None, None, "leave it out", side="a")
    chain = Cause("unfused chain", "B passes", None, None, "fuse", side="b", also=(copy,))
    assert blamed(chain, "b") is chain
    assert blamed(chain, "a") is copy
    assert blamed(chain, "") is None
    alone = blamed(copy, "b")
    assert alone is not None
    assert (alone.kind, alone.remedy, alone.side) == ("unknown", "none known", "b")
    data = Cause("input data", "other values", None, None, "compare on equal inputs")
    assert blamed(data, "") is data
    assert is_fair(data, "")
    assert not is_fair(copy, "")


def test_times_are_told_as_a_ratio() -> None:
    assert time_told(A_SLOW, False) == "B takes 67.0% of A's time (65.4% to 68.7%), on the CPU"
    assert time_told(B_SLOW, True) == "A takes 67.0% of B's time (65.4% to 68.7%)"
    assert time_told(UNSURE, True).endswith("): neither surely takes over 5 % more")
    assert time_told(NONE, False) == ""


def test_only_times_of_the_cpu_that_scatter_have_a_note() -> None:
    assert "OMP_NUM_THREADS=1" in scatter_note(UNSURE, False)
    assert scatter_note(UNSURE, True) == scatter_note(A_SLOW, False) == scatter_note(NONE, False) == ""
