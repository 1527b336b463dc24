"""Energy of a block: true within its error on cards whose energy is known, and a reason wherever it is not."""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpubloat import energy
from gpubloat.energy.host import HostEnergy
from gpubloat.energy.meter import Reading
from gpubloat.energy.recording import Simulated, Steps, VirtualClock
from gpubloat.energy.windows import Window
from gpubloat.errors import DeviceError
from tests.energy.cards import COPY_W, IDLE_W, PRODUCT_W, Changed, frozen, no_counter

NOWHERE = Path("no-powercap")


class Bench:
    """A card that idles, a window on it, and blocks of work."""

    def __init__(self, change: Callable[[Reading], Reading] = lambda r: r, **card: float) -> None:
        self.clock = VirtualClock()
        self.power = Steps(IDLE_W)
        self.meter = Changed(Simulated(self.power, self.clock, **card), change)
        self.window = Window(self.meter, clock=self.clock, host=HostEnergy(NOWHERE))

    def run(self, *work: tuple[float, float]) -> Window:
        """Draw each (watts, seconds) in a block; what it drew is `drawn_j`."""
        with self.window as window:
            start_s = self.clock.now()
            for watts, seconds in work:
                self.power.draw(watts, self.clock.now())
                self.clock.sleep(seconds)
            self.drawn_j = self.power.energy_j(self.clock.now()) - self.power.energy_j(start_s)
            self.power.draw(IDLE_W, self.clock.now())
        return window


@settings(deadline=None, max_examples=80)
@given(
    work=st.lists(st.tuples(st.floats(100, 1000), st.floats(0.01, 2)), min_size=1, max_size=5),
    phase_s=st.floats(0, 0.1),
    period_s=st.floats(0.05, 0.11),
    call_s=st.floats(0.0001, 0.008),
    before_s=st.floats(0, 1),
)
@example([(100.0, 0.375), (194.0, 2.0), (205.0, 2.0)], 0.0, 0.0625, 1 / 512, 0.0)  # a start that no reading saw
def test_the_energy_drawn_is_within_the_error(
    work: list[tuple[float, float]], phase_s: float, period_s: float, call_s: float, before_s: float
) -> None:
    bench = Bench(phase_s=phase_s, counter_period_s=period_s, call_s=call_s)
    bench.clock.sleep(before_s)
    window = bench.run(*work)
    assert window.reason is None
    assert window.energy_j is not None
    assert window.error_j is not None
    assert abs(window.energy_j - bench.drawn_j) <= window.error_j
    assert window.error_j < 10 * IDLE_W * max(call_s, 0.001)  # each of four ticks by a call, weighed by its tail
    assert window.seconds == pytest.approx(sum(seconds for _, seconds in work))
    assert window.mean_w == pytest.approx(window.energy_j / sum(seconds for _, seconds in work))


def test_two_seconds_of_an_h200_are_known_to_a_third_of_a_percent() -> None:
    window = Bench().run((PRODUCT_W, 2.0))
    assert window.energy_j == pytest.approx(2 * PRODUCT_W, rel=0.003)
    assert window.error_j == pytest.approx(0.003 * 2 * PRODUCT_W, rel=0.5)


def test_it_costs_half_a_percent_while_open_and_less_than_half_a_second_around() -> None:
    bench = Bench()
    window = bench.run((COPY_W, 100.0))
    assert window.samples is not None
    assert window.samples.call_s.sum() < 0.0055 * 100
    assert bench.clock.now() - 100.0 < 0.5


def test_it_may_be_used_again() -> None:
    bench = Bench()
    first = bench.run((PRODUCT_W, 1.0)).energy_j
    second = bench.run((PRODUCT_W, 3.0)).energy_j
    assert first == pytest.approx(PRODUCT_W, rel=0.01)
    assert second == pytest.approx(3 * PRODUCT_W, rel=0.01)
    assert bench.meter.n_closed == 0


def test_a_block_that_was_never_left_ends_with_the_next() -> None:
    bench = Bench()
    bench.window.__enter__()
    assert bench.window.reason == "not measured: the window is still open"
    bench.clock.sleep(5.0)
    assert bench.run((PRODUCT_W, 1.0)).energy_j == pytest.approx(PRODUCT_W, rel=0.01)
    n = bench.meter.n_reads
    bench.clock.sleep(5.0)
    assert bench.meter.n_reads == n


def backwards(reading: Reading) -> Reading:
    return dataclasses.replace(reading, counter_mj=0.0 if reading.t_s > 1.0 else reading.counter_mj)


def doubled(reading: Reading) -> Reading:
    assert reading.counter_mj is not None
    return dataclasses.replace(reading, counter_mj=2 * reading.counter_mj)


def lost(reading: Reading) -> Reading:
    if reading.t_s > 1.0:
        raise DeviceError("absent", "the GPU is gone: GPU is lost")
    return reading


def silent(reading: Reading) -> Reading:
    return no_counter(reading) if reading.t_s > 1.0 else reading


def late(reading: Reading) -> Reading:
    return frozen(reading) if reading.t_s > 1.0 else reading


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (no_counter, "no energy counter that answers"),
        (silent, "no energy counter that answers"),
        (frozen, "stood still for 1.0 s"),
        (late, "stood still for 1.0 s"),
        (backwards, "stood still for 1.0 s"),
        (lost, "reading ended before the block: the GPU is gone: GPU is lost"),
        (doubled, "they differ by 100%, and 5% is the most"),
    ],
)
def test_what_is_not_measured_has_a_reason_and_no_number(change: Callable[[Reading], Reading], reason: str) -> None:
    window = Bench(change).run((PRODUCT_W, 6.0))
    assert window.reason is not None
    assert window.reason.startswith("not measured: ")
    assert reason in window.reason
    assert (window.energy_j, window.error_j, window.mean_w) == (None, None, None)
    assert window.seconds == pytest.approx(6.0)
    assert "not measured" in repr(window)
    assert "not measured" in window._repr_html_()


def test_a_counter_that_wraps_in_the_block() -> None:
    def wrapped(reading: Reading) -> Reading:
        assert reading.counter_mj is not None
        return dataclasses.replace(reading, counter_mj=math.fmod(reading.counter_mj, 1_000_500_000.0))

    assert "went backwards" in str(Bench(wrapped).run((PRODUCT_W, 3.0)).reason)


def test_a_load_that_changes_is_not_held_to_signals_that_lag() -> None:
    window = Bench().run(*[(watts, 0.3) for watts in (PRODUCT_W, IDLE_W, COPY_W, PRODUCT_W, IDLE_W, COPY_W)])
    assert window.reason is None


def test_a_block_that_raises() -> None:
    bench = Bench()
    with pytest.raises(KeyError), bench.window as window:
        raise KeyError
    assert window.reason == "not measured: the block raised KeyError"
    n = bench.meter.n_reads
    bench.clock.sleep(5.0)
    assert bench.meter.n_reads == n


def test_a_meter_that_fails_at_the_start_leaves_nothing_open() -> None:
    def odd(_: Reading) -> Reading:
        raise RuntimeError("odd")

    bench = Bench(odd)
    with pytest.raises(RuntimeError, match="odd"):
        bench.run((PRODUCT_W, 1.0))
    bench.meter.change = lambda reading: reading
    assert bench.run((PRODUCT_W, 1.0)).reason is None


def test_without_a_gpu_it_says_so_and_times_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with energy.window() as window:
        pass
    assert window.energy_j is None
    assert window.reason == "not measured: nvidia-ml-py is not installed, so no GPU can be read"
    assert window.seconds is not None
    assert window.cpu_s is not None


def test_the_meter_that_it_opened_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr("gpubloat.energy.windows.open_meter", lambda: bench.meter)
    with Window(clock=bench.clock) as window:
        bench.clock.sleep(1.0)
    assert window.energy_j == pytest.approx(IDLE_W, rel=0.01)
    assert bench.meter.n_closed == 1


def test_pytorchs_work_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that was only started in the block is of the block."""
    bench = Bench()

    def synchronize() -> None:
        bench.clock.sleep(2.0)
        bench.power.draw(IDLE_W, bench.clock.now())

    cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    with bench.window as window:
        bench.power.draw(PRODUCT_W, bench.clock.now())
    assert window.seconds == pytest.approx(2.0)
    assert window.energy_j == pytest.approx(2 * PRODUCT_W, rel=0.01)


def test_processors_are_read_before_they_wrap_around(tmp_path: Path) -> None:
    folder = tmp_path / "intel-rapl:0"
    folder.mkdir()
    (folder / "name").write_text("package-0")
    (folder / "max_energy_range_uj").write_text("99999999999")
    bench = Bench()
    bench.window = Window(bench.meter, clock=bench.clock, host=_Driven(tmp_path, bench.clock))
    window = bench.run((COPY_W, 1500.0))
    assert window.host_reason is None
    assert window.host_j == pytest.approx(200.0 * 1500, rel=0.001)  # three times around


class _Driven(HostEnergy):
    """Processors of 200 W, whose counter is set just before it is read."""

    def __init__(self, root: Path, clock: VirtualClock) -> None:
        self._clock, self._root = clock, root
        self._set()
        super().__init__(root)

    def _set(self) -> None:
        (self._root / "intel-rapl:0" / "energy_uj").write_text(str(int(200e6 * self._clock.now()) % 10**11))

    def joules(self) -> float | None:
        self._set()
        return super().joules()


def test_it_shows_itself_in_a_notebook() -> None:
    window = Bench().run((PRODUCT_W, 2.0))
    page = window._repr_html_()
    assert "1,38" in page
    assert "J ± " in page
    assert "this system has no /sys/class/powercap" in page
    assert repr(window).startswith("<window: 138")
