"""The meter of NVML on a stand-in for nvidia-ml-py: what answers, which GPU is meant, what is released."""

from __future__ import annotations

import sys
import types

import pytest

from gpubloat import energy
from gpubloat.energy.meter import NoDevice, ProbedMeter
from gpubloat.energy.sampler import sampled
from gpubloat.energy.slope import slope
from gpubloat.errors import DeviceError
from tests.energy.fakenvml import (
    DRIVER_NOT_LOADED,
    GPU_IS_LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNINITIALIZED,
    Card,
    FakeNvml,
    Refused,
)

COUNTER = "nvmlDeviceGetTotalEnergyConsumption"


@pytest.fixture(autouse=True)
def _no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def install(monkeypatch: pytest.MonkeyPatch, *cards: Card, init: int = 0) -> FakeNvml:
    fake = FakeNvml(*cards, init=init)
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    return fake


def opened(index: int = 0) -> ProbedMeter:
    meter = energy.open_meter(index)
    assert not isinstance(meter, NoDevice), meter.reason
    return meter


def refused(index: int = 0) -> NoDevice:
    found = energy.open_meter(index)
    assert isinstance(found, NoDevice)
    assert not found
    assert not found.reason.endswith(".")
    assert found.hint
    return found


def test_a_reading_has_all_signals_in_watts_and_millijoules(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, Card())
    meter = opened()
    found = meter.read()
    assert (found.counter_mj, found.instant_w, found.average_w) == (5_000_000_123.0, 601.0, 602.0)
    assert (found.sm_mhz, found.temperature_c, found.throttle_bits) == (1980.0, 51.0, 4.0)
    assert 0 <= found.call_s < 10
    assert fake.n_open == 1


def test_every_kind_of_value_of_a_field_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    members = ["dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal"]
    for kind, member in enumerate(members):
        install(monkeypatch, Card(values={(186, 0): (kind, member, 42_000)}))
        assert opened().read().instant_w == 42.0


def test_the_description_names_the_card_and_not_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Card(uuid="GPU-secret"))
    told = opened().describe()
    assert (told["name"], told["driver"], told["power_limit_w"]) == ("NVIDIA H200", "580.1", 700.0)
    assert "secret" not in str(told)


def test_what_is_not_supported_is_none_and_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = dict.fromkeys([COUNTER, (83, 0), (186, 0), "nvmlDeviceGetTemperature"], Refused(NOT_SUPPORTED))
    fake = install(monkeypatch, Card("GRID A100-10C", values=missing))
    meter = opened()
    fake.asked.clear()
    found = meter.read()
    assert (found.counter_mj, found.instant_w, found.temperature_c) == (None, None, None)
    assert (found.average_w, found.sm_mhz) == (602.0, 1980.0)
    assert not set(missing) & set(fake.asked)
    assert meter.describe()["missing"]["counter"] == "not supported by this GPU"


def test_a_virtual_gpu_without_a_counter_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Card(values={COUNTER: Refused(NOT_SUPPORTED), (83, 0): Refused(NOT_SUPPORTED)}))
    with sampled(opened(), 0.001) as sampling:
        pass
    assert "no energy counter that answers" in str(slope(sampling.samples()))


def test_the_field_stands_in_for_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Card(values={COUNTER: Refused(NOT_SUPPORTED), (83, 0): (3, "ullVal", 77)}))
    assert opened().read().counter_mj == 77.0


@pytest.mark.parametrize("code", [NO_PERMISSION, 999, 10])
def test_a_signal_that_fails_once_is_none_that_time(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    card = Card()
    install(monkeypatch, card)
    meter = opened()
    card.values |= {COUNTER: Refused(code), (186, 0): Refused(code)}
    found = meter.read()
    assert (found.counter_mj, found.instant_w, found.average_w) == (None, None, 602.0)
    card.values.clear()
    assert meter.read().counter_mj == 5_000_000_123.0


@pytest.mark.parametrize("signal", [COUNTER, (185, 0), "nvmlDeviceGetClockInfo"])
def test_a_lost_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch, signal: object) -> None:
    card = Card()
    fake = install(monkeypatch, card)
    meter = opened()
    card.values[signal] = Refused(GPU_IS_LOST)
    with pytest.raises(DeviceError, match="the GPU is gone") as caught:
        meter.read()
    assert caught.value.reason == "absent"
    meter.close()
    assert fake.n_open == 0


def test_nvml_shut_down_by_somebody_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, Card())
    meter = opened()
    fake.nvmlShutdown()
    with pytest.raises(DeviceError, match="Uninitialized"):
        meter.read()
    meter.close()
    assert fake.n_open == 0


def test_closing_twice_shuts_down_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, Card())
    one, other = opened(), opened()
    one.close()
    one.close()
    assert fake.n_open == 1
    other.read()
    with pytest.raises(DeviceError, match="the meter is closed"):
        one.read()
    other.close()
    assert (fake.n_open, fake.n_inits) == (0, 2)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = refused()
    assert "nvidia-ml-py is not installed" in found.reason
    assert "pip install nvidia-ml-py" in found.hint
    assert isinstance(found.error(), DeviceError)


@pytest.mark.parametrize(
    ("code", "kind"), [(DRIVER_NOT_LOADED, "absent"), (12, "absent"), (NO_PERMISSION, "permission")]
)
def test_without_a_driver(monkeypatch: pytest.MonkeyPatch, code: int, kind: str) -> None:
    fake = install(monkeypatch, init=code)
    assert refused().kind == kind
    assert fake.n_open == 0


@pytest.mark.parametrize(
    ("card", "kind", "reason"),
    [
        (Card(is_mig=True), "unsupported", "divided by MIG"),
        (Card(values={COUNTER: Refused(GPU_IS_LOST)}), "absent", "the GPU is gone"),
        (Card(values={"nvmlDeviceGetClockInfo": Refused(UNINITIALIZED)}), "absent", "the GPU is gone"),
    ],
)
def test_a_card_that_cannot_be_measured_leaves_nvml_shut_down(
    monkeypatch: pytest.MonkeyPatch, card: Card, kind: str, reason: str
) -> None:
    fake = install(monkeypatch, card)
    found = refused()
    assert reason in found.reason
    assert found.kind == kind
    assert (fake.n_open, fake.n_inits) == (0, 1)


def test_no_gpu_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert refused().reason == "NVML finds no GPU"


def test_old_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-ml-py before 12.535 has the older name of throttle reasons only; a function it lacks is no answer."""
    fake = install(monkeypatch, Card())
    lacking = types.SimpleNamespace(
        **{
            name: getattr(fake, name) for name in dir(fake) if name.startswith(("nvml", "NVML")) and "Field" not in name
        },
        nvmlDeviceGetTotalEnergyConsumption=fake.nvmlDeviceGetTotalEnergyConsumption,
        nvmlDeviceGetClockInfo=fake.nvmlDeviceGetClockInfo,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 32,
    )
    monkeypatch.setitem(sys.modules, "pynvml", lacking)
    meter = opened()
    found = meter.read()
    assert (found.counter_mj, found.instant_w, found.throttle_bits) == (5_000_000_123.0, None, 32.0)
    assert "nvidia-ml-py is too old" in meter.describe()["missing"]["instant"]


CARDS = (
    Card(uuid="GPU-aa11", values={COUNTER: 1}),
    Card(uuid="GPU-bb22", values={COUNTER: 2}),
    Card(uuid="GPU-bb33", values={COUNTER: 3}),
)


@pytest.mark.parametrize(
    ("visible", "index", "counter"),
    [
        (None, 0, 1),
        (None, 2, 3),
        ("2,0", 0, 3),
        ("2,0", 1, 1),
        (" 1 , 2", 1, 3),
        ("GPU-bb33,GPU-aa11", 0, 3),
        ("GPU-bb33,GPU-aa11", 1, 1),
        ("GPU-aa", 0, 1),
        ("1,-1,2", 0, 2),
    ],
)
def test_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int, counter: int) -> None:
    install(monkeypatch, *CARDS)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert opened(index).read().counter_mj == counter


@pytest.mark.parametrize(
    ("visible", "index"),
    [(None, 3), (None, -1), ("", 0), ("-1", 0), ("1,-1,2", 1), ("7", 0), ("GPU-bb", 0), ("GPU-zz", 0), ("MIG-zz", 0)],
)
def test_hidden_devices(monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int) -> None:
    """A number outside, the start of two UUIDs, and what follows an entry that names no GPU."""
    fake = install(monkeypatch, *CARDS)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert f"there is no GPU {index}" in refused(index).reason
    assert fake.n_open == 0


def test_a_slice_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Card(is_mig=True), Card(uuid="MIG-1", is_slice=True))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert "divided by MIG" in refused().reason


UNLIKE = (Card("NVIDIA T4", "GPU-t4", values={COUNTER: 1}), Card("NVIDIA H200", "GPU-h200", values={COUNTER: 2}))


def test_numbers_of_unlike_gpus_are_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA counts the fastest first, NVML by the bus."""
    install(monkeypatch, *UNLIKE)
    found = refused()
    assert "cannot be known" in found.reason
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in found.hint
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert opened().read().counter_mj == 1
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-h200")
    assert opened().read().counter_mj == 2


def test_pytorch_tells_which_gpu_is_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *UNLIKE)
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        get_device_properties=lambda index: types.SimpleNamespace(uuid=["h200", "t4"][index]),
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    assert opened(0).read().counter_mj == 2
    assert opened(1).read().counter_mj == 1
