"""Blocks and comparisons on a card whose joules are known."""

from __future__ import annotations

import dataclasses
import math

import pytest

from gpubloat.energy import blocks
from gpubloat.energy.compare import compare, null
from gpubloat.energy.engines import IN_A_GRAPH, Work
from gpubloat.energy.meter import NotMeasured, Reading
from gpubloat.energy.statistics import WASTE, Saved, null_band, verdict
from gpubloat.errors import DeviceError
from gpubloat.tables import schema
from tests.energy.cards import IDLE_W, Changed, no_counter
from tests.energy.rigs import CALLS, Costs, Rig


@pytest.mark.parametrize("watts", [140.0, 470.0, 690.0])
@pytest.mark.parametrize("call_s", [3e-5, 0.004, 0.9])
def test_a_block_gives_the_joules_of_a_call(watts: float, call_s: float) -> None:
    rig = Rig(seed=int(watts))
    cost = Costs(call_s, watts)
    found = blocks.block(Work(cost, 1, IN_A_GRAPH), rig.meter, rig, 2.0, "one")
    assert found.call_s == pytest.approx(call_s, rel=1e-9)
    assert found.call_j is not None
    assert found.error_j is not None
    assert abs(found.call_j - cost.call_j) <= found.error_j < 0.02 * cost.call_j
    assert found.is_checked
    assert found.refused is None


def test_rows_of_blocks_fit_their_table_and_add_up() -> None:
    rig = Rig()
    result = compare(Costs(0.001, 600), Costs(0.001, 500), rig.meter, rig, seconds=2.0)
    rows = schema("energy", "blocks").check(result.rows(), "blocks")
    assert "".join(rows["side"]) == "ABBA" * 3
    assert rows["order"].tolist() == list(range(12))
    assert (rows["energy_j"] / rows["power_w"]).tolist() == pytest.approx(rows["seconds_s"].tolist())
    assert (rows["seconds_s"] / rows["n_calls"]).tolist() == pytest.approx(rows["call_time_s"].tolist())


def test_a_window_is_twenty_ticks_if_they_are_far_apart() -> None:
    slow = Rig(counter_period_s=0.25)
    assert blocks.window_s(slow.meter, slow) == pytest.approx(5.0, rel=0.02)
    quick = Rig()
    assert blocks.window_s(quick.meter, quick) == pytest.approx(blocks.LEAST_S, rel=0.05)
    assert blocks.window_s(Changed(quick.meter, no_counter), quick) == blocks.LEAST_S


def test_what_is_saved_is_known_with_its_interval() -> None:
    rig = Rig(noise=0.002, seed=1)
    result = compare(Costs(0.002, 600, 3e-6), Costs(0.0015, 640, 1e-6), rig.meter, rig)
    assert isinstance(result.saved, Saved)
    truth = 1 - 0.0015 * 640 / (0.002 * 600)
    assert result.saved.low_frac <= truth <= result.saved.high_frac
    assert result.saved.wasteful == "A"
    assert result.time_ratio == pytest.approx(0.75)
    assert isinstance(result.times, Saved)
    assert (result.times.wasteful, result.times.saved_frac) == ("A", pytest.approx(0.25))
    assert result.a.call_j == pytest.approx(1.2, rel=0.01)
    assert result.a.active_j == pytest.approx(0.002 * (600 - IDLE_W), rel=0.01)
    assert result.idle_w == pytest.approx(IDLE_W, rel=0.01)
    assert isinstance(result.active, Saved)
    assert result.active.saved_frac == pytest.approx(1 - 0.0015 * (640 - IDLE_W) / (0.002 * (600 - IDLE_W)), abs=0.01)
    assert (result.a.host_s, result.b.host_s) == (pytest.approx(3e-6), pytest.approx(1e-6))


def test_the_time_ratio_is_that_of_the_side_that_takes_less() -> None:
    rig = Rig()
    result = compare(Costs(0.001, 400), Costs(0.0012, 600), rig.meter, rig, seconds=1.0)
    assert isinstance(result.saved, Saved)
    assert result.saved.wasteful == "B"
    assert result.time_ratio == pytest.approx(1 / 1.2)


@pytest.mark.parametrize("seed", range(20))
def test_a_against_a_is_never_waste(seed: int) -> None:
    rig = Rig(noise=0.01, seed=seed)
    work = Costs(0.001, 600)
    band = null_band(null(work, rig.meter, rig, seconds=1.0).saved)
    result = compare(work, work, rig.meter, rig, seconds=1.0)
    said = verdict(result.saved, result.time_ratio, True, band)
    assert said.verdict == "no difference", said
    assert isinstance(band, float)
    assert 0 < band < 0.06


def test_a_difference_over_the_band_is_waste() -> None:
    rig = Rig(noise=0.003, seed=4)
    slow, fast = Costs(0.001, 600), Costs(0.0009, 560)
    band = null_band(null(slow, rig.meter, rig, seconds=1.0).saved)
    result = compare(slow, fast, rig.meter, rig, seconds=1.0)
    assert verdict(result.saved, result.time_ratio, True, band).verdict == WASTE


def test_drift_cancels() -> None:
    rig = Rig(drift=0.002)  # 8 % in 40 s
    result = compare(Costs(0.001, 500), Costs(0.001, 500), rig.meter, rig, n_blocks=3, seconds=2.0)
    energies = [block.call_j or 0.0 for block in result.blocks]
    assert max(energies) / min(energies) > 1.05
    assert isinstance(result.saved, Saved)
    assert result.saved.saved_frac < 0.001


def test_both_sides_run_in_the_same_way() -> None:
    rig = Rig()
    result = compare(Costs(0.001, 500), Costs(0.001, 500, waits=True), rig.meter, rig, seconds=0.8)
    assert result.b.how == "as called: it waits for the GPU"
    assert result.a.how == f"as called, since the other side is: {result.b.how}"
    plain = compare(Costs(0.001, 500), Costs(0.001, 500), rig.meter, rig, seconds=0.8)
    assert plain.a.how == plain.b.how == IN_A_GRAPH


def test_copies_that_restore_inputs_are_taken_off() -> None:
    rig = Rig()
    copies = Costs(0.0005, 460)
    # A call of 1 ms at 500 W and its copies.
    both = Costs(0.0015, (0.5 + copies.call_j) / 0.0015)
    work = Work(both, CALLS, IN_A_GRAPH, copies)
    result = compare(work, Costs(0.001, 500), rig.meter, rig, seconds=1.0)
    assert result.a.call_s == pytest.approx(0.001)
    assert result.a.call_j == pytest.approx(0.5, rel=0.01)
    assert isinstance(result.saved, Saved)
    assert result.saved.saved_frac < 0.01
    assert result.a.host_s is None


def test_an_energy_that_is_hardly_over_idle_is_not_called_active() -> None:
    rig = Rig()
    result = compare(Costs(0.001, IDLE_W + 10), Costs(0.001, IDLE_W + 5), rig.meter, rig, seconds=1.0)
    assert isinstance(result.active, NotMeasured)
    assert "under 20 W" in str(result.active)
    assert isinstance(result.saved, Saved)


def test_joules_that_the_card_contradicts_are_refused_and_times_are_kept() -> None:
    rig = Rig()
    first: list[float] = []

    def slow_counter(reading: Reading) -> Reading:  # 10 % of the energy is not counted
        assert reading.counter_mj is not None
        first.append(reading.counter_mj)
        return dataclasses.replace(reading, counter_mj=math.floor(first[0] + 0.9 * (reading.counter_mj - first[0])))

    result = compare(Costs(0.001, 500), Costs(0.002, 500), Changed(rig.meter, slow_counter), rig, seconds=2.0)
    assert not result.joules["is_trusted"]
    assert "differ by 10%" in result.joules["reason"]
    assert isinstance(result.saved, NotMeasured)
    assert "differ by 10%" in str(result.saved)
    assert (result.a.call_j, result.idle_w) == (None, None)
    assert result.a.call_s == pytest.approx(0.001)
    assert result.rows()["energy_j"].isna().all()
    assert result.rows()["notes"].str.contains("refused: the energy counter says").all()


@pytest.mark.parametrize("meter", ["without a counter", "none"])
def test_times_without_energies(meter: str) -> None:
    rig = Rig()
    given = None if meter == "none" else Changed(rig.meter, no_counter)
    result = compare(Costs(0.001, 500), Costs(0.002, 500), given, rig, seconds=1.0)
    assert isinstance(result.saved, NotMeasured)
    assert result.time_ratio == pytest.approx(2.0)
    assert result.b.call_j is None
    schema("energy", "blocks").check(result.rows(), "blocks")


def test_a_card_without_a_power_of_its_own_is_refused() -> None:
    rig = Rig()
    blind = Changed(rig.meter, lambda r: dataclasses.replace(r, instant_w=None, average_w=None))
    result = compare(Costs(0.001, 500), Costs(0.002, 500), blind, rig, seconds=1.0)
    assert "no power signal answers" in result.joules["reason"]
    assert result.rows()["energy_j"].isna().all()


def test_a_meter_that_dies_ends_it_in_one_sentence() -> None:
    rig = Rig()

    def dies(reading: Reading) -> Reading:
        if reading.t_s > 20:
            raise DeviceError("absent", "the GPU is lost")
        return reading

    meter = Changed(rig.meter, dies)
    with pytest.raises(DeviceError, match="reading the GPU ended: the GPU is lost"):
        compare(Costs(0.001, 500), Costs(0.002, 500), meter, rig)
    n_reads = meter.n_reads
    rig.clock.sleep(5)
    assert meter.n_reads == n_reads > 100


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_nothing_goes_on_after_an_exception(error: BaseException) -> None:
    rig = Rig()

    def fail(_: Work) -> None:
        if rig.n_runs == 6:
            raise error

    rig.fails = fail
    meter = Changed(rig.meter, lambda reading: reading)
    with pytest.raises(type(error)):
        compare(Costs(0.001, 500), Costs(0.002, 500), meter, rig)
    n_reads = meter.n_reads
    rig.clock.sleep(5)
    assert meter.n_reads == n_reads > 100


def test_the_rig_itself_knows_its_energy() -> None:
    rig = Rig()
    start_s = rig.clock.now()
    before = rig.power.energy_j(start_s)
    ran = rig.run(Work(Costs(0.001, 500), 10, ""), 2.0)
    assert rig.power.energy_j(ran.end_s) - before == pytest.approx(500 * (ran.end_s - start_s))


def test_long_blocks_end_early_but_not_before_there_are_three() -> None:
    def n_blocks(most_s: float | None) -> int:
        rig = Rig()
        found = compare(Costs(0.5, 600), Costs(0.5, 500), None, rig, n_blocks=10, seconds=0.5, most_s=most_s)
        assert isinstance(found.times, Saved)
        return found.times.n_blocks

    calls_s = 4 * 7 * 0.5  # of each A B B A
    assert n_blocks(None) == 10
    assert n_blocks(1.0) == 3
    assert n_blocks(4.5 * calls_s) == 5
