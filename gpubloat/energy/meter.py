"""What a meter is: one reading of a GPU's energy counter and its power signals, and columns of readings.

A signal that does not answer is None in a reading and NaN in a column, never 0. What could not be measured at all is
a `NotMeasured` or a `NoDevice`: both are false, and say why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from gpubloat.errors import DeviceError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class NotMeasured:
    """In place of a number. reason : one clause, as in "not measured: the energy counter stood still for 2.0 s"."""

    reason: str

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"not measured: {self.reason}"


@dataclass(frozen=True)
class NoDevice:
    """In place of a meter. reason : one sentence without full stop; hint : what to do about it.

    kind : that of the error which says the same: ``absent``, ``permission`` or ``unsupported``.
    """

    reason: str
    hint: str
    kind: str = "absent"

    def __bool__(self) -> bool:
        return False

    def error(self) -> DeviceError:
        return DeviceError(self.kind, self.reason, self.hint)


@dataclass(frozen=True)
class Reading:
    """All signals at one time; None where one does not answer.

    t_s : middle of the call that read the counter, on the meter's clock.
    call_s : how long that call took; the value is that of some instant within.
    counter_mj : energy since the driver was loaded, in millijoules; it changes at ticks, about 100 ms apart.
    instant_w, average_w : power as the card gives it, and its mean over about one second.
    sm_mhz, temperature_c : clock of the SMs, temperature of the GPU.
    throttle_bits : why clocks are held down, as NVML's bit mask.
    """

    t_s: float
    call_s: float
    counter_mj: float | None = None
    instant_w: float | None = None
    average_w: float | None = None
    sm_mhz: float | None = None
    temperature_c: float | None = None
    throttle_bits: float | None = None


NAMES = tuple(field.name for field in fields(Reading))


@dataclass(frozen=True)
class Samples:
    """Readings as columns: float64 arrays of one length in the order of time, NaN where a signal did not answer."""

    t_s: np.ndarray
    call_s: np.ndarray
    counter_mj: np.ndarray
    instant_w: np.ndarray
    average_w: np.ndarray
    sm_mhz: np.ndarray
    temperature_c: np.ndarray
    throttle_bits: np.ndarray

    def __len__(self) -> int:
        return len(self.t_s)

    def between(self, start_s: float, end_s: float) -> Samples:
        """Those read from `start_s` to `end_s`, both included."""
        kept = (self.t_s >= start_s) & (self.t_s <= end_s)
        return Samples(*(getattr(self, name)[kept] for name in NAMES))


class Meter(Protocol):
    """What reads one GPU. `close` may be called twice; `read` raises DeviceError when the GPU is gone."""

    def describe(self) -> dict[str, Any]: ...

    def read(self) -> Reading: ...

    def close(self) -> None: ...


class ProbedMeter(Meter, Protocol):
    """A meter whose signals can be asked one by one.

    Each function of `signals` gives the present value, in mJ for a counter and in W for a power, or raises DeviceError
    with the reason why there is none.
    """

    def signals(self) -> Mapping[str, Callable[[], float]]: ...


def open_meter(index: int = 0) -> ProbedMeter | NoDevice:
    """The meter of a GPU, by NVML. Reads only: no clock, limit or mode is ever set.

    Parameters
    ----------
    index : number of the GPU among those that CUDA_VISIBLE_DEVICES shows, as PyTorch and JAX count.

    Returns
    -------
    The meter, to be closed; or NoDevice, which is false, without nvidia-ml-py, driver, GPU or permission.
    """
    from gpubloat.energy.nvml import open_nvml

    return open_nvml(index)
