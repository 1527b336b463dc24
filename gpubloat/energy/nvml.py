"""The meter that reads an NVIDIA GPU through NVML (package nvidia-ml-py, module `pynvml`). It sets nothing."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from gpubloat.energy import visible
from gpubloat.energy.meter import NoDevice, Reading
from gpubloat.errors import DeviceError

INSTALL = "pip install nvidia-ml-py"
# Fields by their numbers in nvml.h, which older bindings do not name.
COUNTER, AVERAGE, INSTANT = 83, 185, 186
GPU, MODULE, MEMORY = 0, 1, 2  # scopes of a power field
_VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # member of the union, by type of value
_GONE = {1, 9, 15, 16, 28}  # uninitialized, driver not loaded, GPU lost, reset required, GPU not found
_ABSENT = {2: "an argument is not valid", 3: "not supported by this GPU", 4: "no permission", 6: "not found",
           13: "the driver is too old for it", 999: "unknown error"}  # fmt: skip


def open_nvml(index: int) -> NvmlMeter | NoDevice:
    """The meter of GPU `index` of those that CUDA_VISIBLE_DEVICES shows; NVML is shut down again if there is none."""
    try:
        import pynvml
    except ImportError:
        return NoDevice("nvidia-ml-py is not installed, so no GPU can be read", f"install it with: {INSTALL}")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        kind = "permission" if error.value == 4 else "absent"
        return NoDevice(f"NVML finds no driver: {error}", "an NVIDIA driver is needed; run `gpubloat doctor`", kind)
    meter: NvmlMeter | NoDevice = NoDevice("the GPU cannot be read", "run `gpubloat doctor`")
    try:
        found = visible.handle_of(pynvml, index)
        if not isinstance(found, NoDevice):
            found = visible.whole(pynvml, found, index)
        meter = found if isinstance(found, NoDevice) else NvmlMeter(pynvml, found, index)
    except DeviceError as error:
        meter = NoDevice(error.message, error.hint or "look at nvidia-smi", error.reason)
    except pynvml.NVMLError as error:
        kind = "permission" if error.value == 4 else "absent"
        meter = NoDevice(f"GPU {index} cannot be read: {error}", "look at nvidia-smi", kind)
    finally:
        if not meter:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    return meter


class NvmlMeter:
    """Reads one GPU. Owns one initialization of NVML, which `close` gives back."""

    def __init__(self, nvml: Any, handle: Any, index: int) -> None:
        self._nvml = nvml
        self._handle = handle
        self._index = index
        self._is_open = True
        self._counter: str | None = None
        self._fields: list[tuple[int, int]] = []
        self._others: dict[str, Callable[[], float]] = {}
        # Signals that do not answer now are not asked again: asking costs as much as an answer.
        self.missing: dict[str, str] = {}
        self._signals = signals = self.signals()
        for name in ("counter", "counter field"):
            if self._counter is None and self._answers(name, signals):
                self._counter = name
        for field, name in ((INSTANT, "instant"), (AVERAGE, "average")):
            if self._answers(name, signals):
                self._fields.append((field, GPU))
        for name in ("sm_mhz", "temperature_c", "throttle_bits"):
            if self._answers(name, signals):
                self._others[name] = signals[name]

    def describe(self) -> dict[str, Any]:
        """Name of the GPU, versions, power limit, which signals do not answer and why. Nothing names the machine."""
        nvml = self._nvml

        def told(name: str, *arguments: Any) -> Any:
            try:
                value = getattr(nvml, name)(*arguments)
            except (nvml.NVMLError, AttributeError):
                return None
            return visible.text(value)

        limit = told("nvmlDeviceGetEnforcedPowerLimit", self._handle)
        return {
            "meter": "NVML",
            "index": self._index,
            "name": told("nvmlDeviceGetName", self._handle),
            "driver": told("nvmlSystemGetDriverVersion"),
            "nvml": told("nvmlSystemGetNVMLVersion"),
            "power_limit_w": None if limit is None else limit / 1000,
            "missing": dict(self.missing),
        }

    def read(self) -> Reading:
        """All signals that answered at the start; one that fails this time is None. DeviceError if the GPU is gone."""
        signals = self._signals
        start = time.perf_counter()
        counter = None if self._counter is None else self._or_none(signals[self._counter])
        end = time.perf_counter()
        powers = self._powers()
        others = {name: self._or_none(function) for name, function in self._others.items()}
        return Reading(
            (start + end) / 2,
            end - start,
            counter,
            instant_w=powers.get((INSTANT, GPU)),
            average_w=powers.get((AVERAGE, GPU)),
            **others,
        )

    def signals(self) -> Mapping[str, Callable[[], float]]:
        """Every signal by its name: mJ of counters, W of powers, MHz, degrees, bits, samples kept by the driver.

        usage is nvmlDeviceGetPowerUsage, which on most GPUs since Ampere is a mean over one second.
        """
        nvml, gpu = self._nvml, self._handle

        def throttle() -> float:
            name = "nvmlDeviceGetCurrentClocksEventReasons"
            # Older bindings have only the older name.
            reasons = getattr(nvml, name, None) or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
            return float(reasons(gpu))

        plain: dict[str, Callable[[], float]] = {
            "counter": lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)),
            "counter field": lambda: self._field(COUNTER, GPU),
            "instant": lambda: self._field(INSTANT, GPU) / 1000,
            "average": lambda: self._field(AVERAGE, GPU) / 1000,
            "usage": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            "instant, module": lambda: self._field(INSTANT, MODULE) / 1000,
            "average, memory": lambda: self._field(AVERAGE, MEMORY) / 1000,
            "samples": lambda: float(len(nvml.nvmlDeviceGetSamples(gpu, 0, 0)[1])),
            "sm_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            "temperature_c": lambda: float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
            "throttle_bits": throttle,
        }
        return {name: self._explained(function) for name, function in plain.items()}

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _explained(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """The same function, with DeviceError in place of what NVML or its bindings raise."""

        def call() -> Any:
            if not self._is_open:
                raise DeviceError("absent", "the meter is closed", "open another")
            try:
                return function()
            except self._nvml.NVMLError as error:
                raise _error(error.value, str(error)) from None
            except AttributeError as error:
                raise DeviceError("unsupported", f"nvidia-ml-py is too old: {error}", INSTALL + " --upgrade") from None

        return call

    def _field(self, field: int, scope: int) -> float:
        value = self._nvml.nvmlDeviceGetFieldValues(self._handle, [(field, scope)])[0]
        return self._value(value)

    def _watts(self, value: Any) -> float:
        return self._value(value) / 1000

    @staticmethod
    def _value(value: Any) -> float:
        if value.nvmlReturn:
            raise _error(value.nvmlReturn, f"NVML error {value.nvmlReturn}")
        return float(getattr(value.value, _VALUES[value.valueType]))

    def _powers(self) -> dict[tuple[int, int], float | None]:
        """The power fields, in one call."""
        if not self._fields:
            return {}

        def ask() -> Any:
            return self._nvml.nvmlDeviceGetFieldValues(self._handle, self._fields)

        values: Any
        try:
            values = self._explained(ask)()
        except DeviceError as error:
            if error.reason == "absent":
                raise
            return {}
        return {
            field: self._or_none(functools.partial(self._watts, value))
            for field, value in zip(self._fields, values, strict=True)
        }

    def _answers(self, name: str, signals: Mapping[str, Callable[[], float]]) -> bool:
        try:
            signals[name]()
        except DeviceError as error:
            if error.reason == "absent":
                raise
            self.missing[name] = error.message
            return False
        return True

    def _or_none(self, function: Callable[[], float]) -> float | None:
        try:
            return function()
        except DeviceError as error:
            if error.reason == "absent":
                raise
            return None


def _error(code: int, text: str) -> DeviceError:
    if code in _GONE:
        return DeviceError("absent", f"the GPU is gone: {text}", "look at nvidia-smi and the kernel's log")
    return DeviceError("permission" if code == 4 else "unsupported", _ABSENT.get(code, text))
