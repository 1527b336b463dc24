"""A module `pynvml` that behaves as nvidia-ml-py does: same names, same structures, errors by code."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

NOT_SUPPORTED, NO_PERMISSION, UNINITIALIZED, NOT_FOUND, DRIVER_NOT_LOADED, GPU_IS_LOST = 3, 4, 1, 6, 9, 15
TEXTS = {1: "Uninitialized", 3: "Not Supported", 4: "Insufficient Permissions", 6: "Not Found",
         9: "Driver Not Loaded", 15: "GPU is lost", 999: "Unknown Error"}  # fmt: skip


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return TEXTS.get(self.value, f"error {self.value}")


class Value(ctypes.Union):
    _fields_ = (
        ("dVal", ctypes.c_double),
        ("uiVal", ctypes.c_uint),
        ("ulVal", ctypes.c_ulong),
        ("ullVal", ctypes.c_ulonglong),
        ("sllVal", ctypes.c_longlong),
        ("siVal", ctypes.c_int),
        ("usVal", ctypes.c_ushort),
    )


@dataclass
class Card:
    """values : what answers, by name of the function or (field, scope): a number, or an error's code as `Refused`."""

    name: str = "NVIDIA H200"
    uuid: str = "GPU-aaaa"
    is_mig: bool = False
    is_slice: bool = False
    values: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    code: int


ANSWERS: dict[Any, Any] = {
    "nvmlDeviceGetTotalEnergyConsumption": 5_000_000_123,
    "nvmlDeviceGetPowerUsage": 600_500,
    "nvmlDeviceGetClockInfo": 1980,
    "nvmlDeviceGetTemperature": 51,
    "nvmlDeviceGetCurrentClocksEventReasons": 4,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetSamples": (1, [0] * 119),
    (83, 0): (3, "ullVal", 5_000_000_123),
    (186, 0): (1, "uiVal", 601_000),
    (185, 0): (1, "uiVal", 602_000),
    (185, 2): (1, "uiVal", 90_000),
}


class FakeNvml:
    """Give it to `sys.modules` as pynvml."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *cards: Card, init: int = 0) -> None:
        self.cards = cards
        self.init = init
        self.n_open = 0
        self.n_inits = 0
        self.asked: list[Any] = []

    def nvmlInit(self) -> None:
        if self.init:
            raise NVMLError(self.init)
        self.n_open += 1
        self.n_inits += 1

    def nvmlShutdown(self) -> None:
        if not self.n_open:
            raise NVMLError(UNINITIALIZED)
        self.n_open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len([c for c in self.cards if not c.is_slice])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:
        for card in self.cards:
            if card.uuid == uuid:
                return card
        raise NVMLError(NOT_FOUND)

    def nvmlDeviceGetUUID(self, card: Card) -> str:
        return card.uuid

    def nvmlDeviceGetName(self, card: Card) -> bytes:
        return card.name.encode()

    def nvmlDeviceIsMigDeviceHandle(self, card: Card) -> int:
        return int(card.is_slice)

    def nvmlDeviceGetMigMode(self, card: Card) -> list[int]:
        if card.is_slice:
            raise NVMLError(NOT_SUPPORTED)
        return [int(card.is_mig), 0]

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlSystemGetNVMLVersion(self) -> str:
        return "13.580"

    def nvmlDeviceGetFieldValues(self, card: Card, fields: list[tuple[int, int]]) -> list[Any]:
        values = []
        self._check()
        for wanted in fields:
            self.asked.append(wanted)
            found = (ANSWERS | card.values).get(wanted, Refused(NOT_SUPPORTED))
            if callable(found):
                found = found()
            value = Value()
            if isinstance(found, Refused):
                values.append(SimpleNamespace(nvmlReturn=found.code, valueType=0, value=value))
            else:
                kind, member, number = found
                setattr(value, member, number)
                values.append(SimpleNamespace(nvmlReturn=0, valueType=kind, value=value))
        return values

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in ANSWERS:
            raise AttributeError(f"module 'pynvml' has no attribute {name!r}")

        def function(card: Card, *_: Any) -> Any:
            self._check()
            self.asked.append(name)
            found = (ANSWERS | card.values)[name]
            if callable(found):
                found = found()
            if isinstance(found, Refused):
                raise NVMLError(found.code)
            return found

        return function

    def _check(self) -> None:
        if not self.n_open:
            raise NVMLError(UNINITIALIZED)
