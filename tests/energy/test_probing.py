"""The probe on cards whose signals are known: what it finds, when it refuses joules, and that it sets nothing."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpubloat import Run, energy
from gpubloat.energy import recording
from gpubloat.energy.loads import TorchLoads
from gpubloat.energy.meter import Reading
from gpubloat.energy.recording import Simulated, Steps, VirtualClock
from gpubloat.energy.slope import Slope, slope
from gpubloat.errors import DeviceError, GpubloatError, MissingToolError
from tests.energy.cards import COPY_W, IDLE_W, PRODUCT_W, Changed, Loads, frozen, no_counter


def probed(change: Callable[[Reading], Reading] = lambda r: r, out: Path | None = None) -> Run:
    clock = VirtualClock()
    power = Steps(IDLE_W)
    meter = Changed(Simulated(power, clock), change)
    run = energy.probe(meter, Loads(power, clock), clock=clock, out=out)
    assert meter.n_closed == 0
    n = meter.n_reads
    clock.sleep(10.0)
    assert meter.n_reads == n
    return run


@pytest.fixture(scope="module")
def run() -> Run:
    return probed()


def test_signals_are_those_of_the_card(run: Run) -> None:
    signals = run["signals"].set_index("signal")
    assert signals["is_answering"].all()
    assert signals.loc[["counter", "instant", "average"], "period_s"].tolist() == pytest.approx([0.1] * 3, abs=0.004)
    assert signals.loc["counter", "call_s"] == pytest.approx(0.0035)
    assert signals.loc["instant", "rise_s"] < 0.13
    assert signals.loc["average", "rise_s"] == pytest.approx(0.95, abs=0.06)


def test_loads_have_the_power_that_was_drawn(run: Run) -> None:
    loads = run["loads"]
    drawn = {"idle": IDLE_W, "product": PRODUCT_W, "copy": COPY_W}
    held = loads[loads["load"].isin(drawn)]
    assert held.groupby("load")["repeat"].apply(list).to_dict() == {name: [0, 1, 2] for name in drawn}
    for row in held.itertuples():
        assert abs(row.slope_w - drawn[row.load]) <= row.slope_error_w < 0.01 * row.slope_w
        assert row.instant_w == pytest.approx(drawn[row.load])
        assert row.average_w == pytest.approx(drawn[row.load])
        assert row.agreement_frac < 0.005
        assert row.is_steady
        assert row.n_ticks >= 28
    assert run.provenance["idle_w"] == pytest.approx(IDLE_W, rel=0.005)
    assert run.provenance["joules"] == {"is_trusted": True, "reason": None}


def test_a_square_wave_of_the_sensors_period_misleads_the_instant_power(run: Run) -> None:
    """As on an H200; the counter and the 1-s mean, which look at all of the time, agree."""
    wave = run["loads"].set_index("load").loc["square 100 ms"]
    mean_w = (PRODUCT_W + IDLE_W) / 2
    assert wave["slope_w"] == pytest.approx(mean_w, rel=0.03)
    assert wave["average_w"] == pytest.approx(mean_w, rel=0.03)
    assert abs(wave["instant_w"] / mean_w - 1) > 0.3
    assert not wave["is_steady"]


def test_samples_measure_again_what_the_table_says(run: Run) -> None:
    samples = run["samples"]
    product = recording.from_frame(samples[samples["part"] == "product, 1"])
    found = slope(product.between(float(product.t_s[0]) + 2.0, float(product.t_s[-1])))
    assert isinstance(found, Slope)
    loads = run["loads"].set_index(["load", "repeat"])
    assert found.power_w == pytest.approx(loads.loc[("product", 1), "slope_w"], rel=1e-3)
    assert samples["t_s"].iloc[0] == 0


def test_the_run_is_kept(tmp_path: Path) -> None:
    kept = probed(out=tmp_path / "run")
    again = Run.load(tmp_path / "run")
    assert again.instrument == "energy"
    assert list(again) == ["signals", "loads", "samples"]
    assert len(again["samples"]) == len(kept["samples"]) > 1000
    assert again.provenance["gpus"] == ["simulated card"]
    assert "no clock, limit or mode" in again.provenance["method"]["settings"]


def gain(factor: float) -> Callable[[Reading], Reading]:
    def change(reading: Reading) -> Reading:
        assert reading.counter_mj is not None
        return dataclasses.replace(reading, counter_mj=factor * reading.counter_mj)

    return change


def mute(reading: Reading) -> Reading:
    return dataclasses.replace(reading, instant_w=None, average_w=None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (gain(0.5), "refused: "),
        (gain(1.07), "they differ by 7%, and 5% is the most"),
        (no_counter, "not measured: the GPU has no energy counter that answers"),
        (frozen, "not measured: the energy counter stood still"),
        (mute, "refused: no power signal answers"),
    ],
)
def test_joules_are_refused(change: Callable[[Reading], Reading], reason: str) -> None:
    run = probed(change)
    joules = run.provenance["joules"]
    assert not joules["is_trusted"]
    assert reason in joules["reason"]
    measured = run["loads"]["slope_w"]
    assert not (measured == 0).any()
    assert measured.isna().all() == (change in (no_counter, frozen))


def test_five_percent_are_not_refused() -> None:
    assert probed(gain(1.045)).provenance["joules"]["is_trusted"]


def test_signals_that_do_not_answer_say_why() -> None:
    class Virtual(Simulated):
        def signals(self) -> dict[str, Callable[[], float]]:
            def none() -> float:
                raise DeviceError("unsupported", "not supported by this GPU")

            return {**super().signals(), "counter": none}

    clock = VirtualClock()
    power = Steps(IDLE_W)
    meter = Changed(Virtual(power, clock), no_counter)
    run = energy.probe(meter, Loads(power, clock), clock=clock)
    counter = run["signals"].set_index("signal").loc["counter"]
    assert not counter["is_answering"]
    assert counter["notes"] == "nvmlDeviceGetTotalEnergyConsumption: not supported by this GPU"
    assert counter[["period_s", "call_s", "rise_s", "resolution"]].isna().all()


def test_a_gpu_that_is_lost_ends_the_probe() -> None:
    def lost(reading: Reading) -> Reading:
        if reading.t_s > 7.0:
            raise DeviceError("absent", "the GPU is gone: GPU is lost")
        return reading

    with pytest.raises(DeviceError, match="reading the GPU ended: the GPU is gone: GPU is lost"):
        probed(lost)


def test_pytorch_without_a_gpu_has_no_loads() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceError, match="PyTorch finds no CUDA device"):
        TorchLoads()


def test_without_pytorch_there_are_no_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingToolError, match="PyTorch is not installed") as caught:
        TorchLoads()
    assert isinstance(caught.value, GpubloatError)


def test_importing_it_loads_neither_nvml_nor_pytorch() -> None:
    code = (
        "import sys, gpubloat.energy as e; from gpubloat.energy import windows, probing, meter;"
        "assert callable(e.window) and callable(e.probe) and callable(e.open_meter), 'hidden by a module';"
        "assert dir(e) == sorted(e.__all__); print(*{'torch', 'pynvml', 'jax'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
