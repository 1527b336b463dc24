"""Recordings come back as they were, and cards made of formulas obey the conservation of energy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubloat.energy.meter import NAMES, Samples
from gpubloat.energy.recording import Recorded, Simulated, Steps, VirtualClock, load, save
from gpubloat.energy.sampler import sampled
from gpubloat.energy.slope import Slope, slope
from gpubloat.errors import DeviceError, FormatError, GpubloatError
from tests.energy.cards import readings

STEADY = readings(Steps(432.0), 3.0)
moves = st.lists(st.tuples(st.floats(0.001, 2), st.floats(0, 1000)), max_size=8)


def stepped(moves: list[tuple[float, float]]) -> tuple[Steps, float]:
    power, at = Steps(100.0), 0.0
    for seconds, watts in moves:
        at += seconds
        power.draw(watts, at)
    return power, at


@pytest.mark.parametrize("name", ["run.parquet", "run.csv"])
def test_what_is_saved_is_read_again(tmp_path: Path, name: str) -> None:
    save(tmp_path / name, STEADY)
    again = load(tmp_path / name)
    for column in NAMES:
        np.testing.assert_array_equal(getattr(again, column), getattr(STEADY, column))
    with pytest.raises(GpubloatError, match="exists"):
        save(tmp_path / name, STEADY)
    save(tmp_path / name, STEADY.between(0, 1), force=True)
    assert len(load(tmp_path / name)) < len(STEADY)


@pytest.mark.parametrize("name", ["run.parquet", "run.csv"])
@pytest.mark.parametrize("content", [b"", b"PAR1 nothing", b"t_s,call_s\n1,2\n", b"\xff\xfe\x00"])
def test_what_is_no_recording(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FormatError, match="holds no readings"):
        load(tmp_path / name)
    with pytest.raises(GpubloatError, match="cannot be read"):
        load(tmp_path / f"missing-{name}")


def test_a_recording_that_goes_backwards_in_time(tmp_path: Path) -> None:
    save(tmp_path / "run.csv", Samples(*(getattr(STEADY, name)[::-1] for name in NAMES)))
    with pytest.raises(FormatError, match="times are not in order"):
        load(tmp_path / "run.csv")


def test_a_recording_measures_what_was_measured() -> None:
    meter = Recorded(STEADY)
    with sampled(meter, 0.001, clock=meter.clock) as sampling:
        meter.clock.sleep(2.9)
    found, first = slope(sampling.samples()), slope(STEADY.between(0, 2.9))
    assert isinstance(found, Slope)
    assert isinstance(first, Slope)
    assert found.power_w == pytest.approx(first.power_w, rel=1e-3)
    assert abs(found.power_w - 432.0) <= found.error_w


def test_a_recording_ends() -> None:
    meter = Recorded(STEADY)
    meter.clock.sleep(10.0)
    with pytest.raises(DeviceError, match="the recording has ended"):
        meter.read()
    with pytest.raises(GpubloatError, match="holds no readings"):
        Recorded(STEADY.between(5, 6))


@given(moves, st.floats(0, 5), st.floats(0, 5), st.floats(0, 5))
def test_energy_of_parts_sums_to_the_whole(moves: list[tuple[float, float]], a: float, b: float, c: float) -> None:
    power, _ = stepped(moves)
    start, middle, end = sorted((a, b, c))
    parts = sum(power.energy_j(y) - power.energy_j(x) for x, y in ((start, middle), (middle, end)))
    assert parts == pytest.approx(power.energy_j(end) - power.energy_j(start), abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(moves, st.floats(0.01, 0.2), st.floats(0, 0.2))
def test_the_counter_has_the_energy_of_the_last_tick(
    moves: list[tuple[float, float]], period_s: float, phase_s: float
) -> None:
    power, end = stepped(moves)
    clock = VirtualClock()
    card = Simulated(power, clock, counter_period_s=period_s, phase_s=phase_s, call_s=0.0)
    first = card.read().counter_mj
    clock.sleep(end + 0.5)
    last = card.read().counter_mj
    assert first is not None
    assert last is not None
    start_tick = np.floor((0.0 - phase_s) / period_s + 1e-9) * period_s + phase_s
    end_tick = np.floor((end + 0.5 - phase_s) / period_s + 1e-9) * period_s + phase_s
    assert last - first == pytest.approx(1000 * (power.energy_j(end_tick) - power.energy_j(start_tick)), abs=1.01)
    assert last >= first


def test_the_means_rise_as_those_of_an_h200() -> None:
    """90 % of a step after 0.9 to 1.0 s in the 1-s mean, and at the next tick in the instant power."""
    power = Steps(126.0)
    power.draw(690.0, 1.03)
    seen = readings(power, 4.0, period_s=0.001, call_s=0.0)
    high = 126 + 0.9 * (690 - 126)
    rise = [seen.t_s[values >= high][0] - 1.03 for values in (seen.instant_w, seen.average_w)]
    assert rise == pytest.approx([0.07, 0.97], abs=0.011)
