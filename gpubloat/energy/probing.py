"""What a GPU tells of its own power, and whether to believe it: measured before any joule is printed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import pandas as pd

from gpubloat.energy.meter import NotMeasured, ProbedMeter, Samples
from gpubloat.energy.recording import to_frame
from gpubloat.energy.sampler import Clock, WallClock, sampled
from gpubloat.energy.slope import disagreement, is_steady, mean_w, slope
from gpubloat.errors import DeviceError
from gpubloat.run import Run, RunWriter, provenance

CLOSE_S = 0.002  # of readings during the probe; a call of the counter that takes longer sets the distance
HOLD_S = 5.0  # of a load
SETTLED_S = 2.0  # after which the load is steady and the 1-s mean has forgotten what was before
REPEATS = 3
CALLS = 20  # of each signal, to time it
WAVES_S = (0.1, 0.073)  # periods of the square waves: that of the sensor, and one that is no part of it
WAVE_HOLD_S = 8.0
RISEN = 0.9
KEPT = {"counter": "counter_mj", "instant": "instant_w", "average": "average_w", "sm_mhz": "sm_mhz",
        "temperature_c": "temperature_c"}  # fmt: skip
ABOUT = {
    "counter": "nvmlDeviceGetTotalEnergyConsumption",
    "counter field": "field 83",
    "instant": "field 186, scope GPU",
    "average": "field 185, scope GPU",
    "usage": "nvmlDeviceGetPowerUsage, a mean over 1 s on most GPUs since Ampere",
    "instant, module": "field 186, scope MODULE",
    "average, memory": "field 185, scope MEMORY",
    "samples": "nvmlDeviceGetSamples: powers that the driver keeps",
}
METHOD = {
    "loads": f"{REPEATS} times product, copy and idle for {HOLD_S:g} s each, of which the first {SETTLED_S:g} s settle",
    "slope": "weighted least squares of the energy counter against time at the instants at which it changes",
    "agreement": "joules are refused if the slope and a mean differ by over 5 % in a steady load",
    "settings": "no clock, limit or mode of the card was set",
}


class Load(Protocol):
    """What the probe lets the GPU do. Each call takes a few milliseconds and leaves no gap to the next one.

    product : full power; copy : full memory bandwidth; idle : nothing, with a context on the GPU.
    """

    def product(self) -> None: ...

    def copy(self) -> None: ...

    def idle(self) -> None: ...


def probe(
    meter: ProbedMeter,
    load: Load,
    *,
    clock: Clock | None = None,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    command: str = "gpubloat.energy.probe",
) -> Run:
    """Find out which signals a GPU has, how often they change, how long they take, and whether they agree.

    Takes about 70 s of the GPU, and sets nothing on it. Nothing else should run there.

    Parameters
    ----------
    meter : of `open_meter`; is not closed. load : of `gpubloat.energy.loads.TorchLoads`.
    clock : default, that of the wall. out, force : as in other instruments.

    Returns
    -------
    Run with signals, loads, samples. Its provenance has `meter` (what the meter says of itself), `idle_w` (power with a
    context, None if not measured) and `joules`: `is_trusted` and `reason`. Joules are refused where the counter was not
    measured, or where it differs from the card's own power by over 5 % in a steady load.

    Raises
    ------
    DeviceError : the GPU is gone. What `load` raises.
    """
    clock = clock or WallClock()
    load.idle()
    signals = {name: _timed(function, clock) for name, function in meter.signals().items()}
    recorded: list[tuple[str, int, Samples, float, float]] = []
    for repeat in range(REPEATS):
        for name in ("idle", "product", "copy"):
            recorded.append((name, repeat, *_held(meter, getattr(load, name), HOLD_S, SETTLED_S, clock)))
    for period_s in WAVES_S:
        wave = _wave(load, period_s, clock)
        recorded.append((f"square {1000 * period_s:.0f} ms", 0, *_held(meter, wave, WAVE_HOLD_S, SETTLED_S, clock)))
    load.idle()
    loads = pd.DataFrame([_row(*held) for held in recorded])
    close = {(name, repeat): samples for name, repeat, samples, _, _ in recorded}
    rise = _rise(close[("idle", 0)], close[("product", 0)], recorded[1][3] - SETTLED_S)
    record = provenance(command, METHOD, [])
    told = meter.describe()
    record |= {"gpus": [told.get("name")], "meter": told, "idle_w": _idle_w(loads), "joules": _trusted(loads)}
    with RunWriter("energy", ["signals", "loads", "samples"], out, force) as writer:
        writer.append("signals", _signals(signals, [held[2] for held in recorded], rise))
        writer.append("loads", loads)
        start_s = float(recorded[0][2].t_s[0]) if len(recorded[0][2]) else 0.0
        for name, repeat, samples, _, _ in recorded:
            frame = to_frame(samples).assign(part=f"{name}, {repeat}")
            writer.append("samples", frame.assign(t_s=frame["t_s"] - start_s))
        return writer.finish(record)


def _timed(function: Callable[[], float], clock: Clock) -> tuple[float | None, str]:
    """Median time of a call, None and the reason where the signal does not answer."""
    times = []
    for _ in range(CALLS):
        start_s = clock.now()
        try:
            function()
        except DeviceError as error:
            if error.reason == "absent":
                raise
            return None, error.message
        times.append(clock.now() - start_s)
    return float(np.median(times)), ""


def _held(
    meter: ProbedMeter, work: Callable[[], None], hold_s: float, settled_s: float, clock: Clock
) -> tuple[Samples, float, float]:
    """Readings while `work` is done again and again; start and end of the part in which it is steady."""
    with sampled(meter, CLOSE_S, clock=clock) as sampling:
        start_s = clock.now()
        while clock.now() < start_s + hold_s:
            work()
        end_s = clock.now()
    if sampling.reason is not None:
        raise DeviceError("absent", f"reading the GPU ended: {sampling.reason}", "look at nvidia-smi")
    return sampling.samples(), start_s + settled_s, end_s


def _wave(load: Load, period_s: float, clock: Clock) -> Callable[[], None]:
    """Half a period at full power, half a period idle; edges stay in step with the clock, however long calls take."""
    start_s = clock.now()

    def work() -> None:
        if (clock.now() - start_s) % period_s < period_s / 2:
            load.product()
        else:
            load.idle()

    return work


def _row(name: str, repeat: int, samples: Samples, start_s: float, end_s: float) -> dict[str, Any]:
    """A row of table loads."""
    late = samples.between(start_s, end_s)
    found = slope(late)
    instant_w, average_w = (mean_w(samples, signal, start_s, end_s) for signal in ("instant_w", "average_w"))
    row: dict[str, Any] = {"load": name, "repeat": repeat, "seconds_s": end_s - start_s, "n_ticks": 0}
    row |= {"slope_w": None, "slope_error_w": None, "instant_w": instant_w, "average_w": average_w}
    row |= {"agreement_frac": None, "is_steady": not name.startswith("square") and is_steady(late)}
    row |= {"sm_mhz": _middle(late.sm_mhz), "temperature_c": _middle(late.temperature_c)}
    row |= {"throttle_bits": any_bits(late.throttle_bits), "notes": ""}
    if isinstance(found, NotMeasured):
        return row | {"notes": str(found)}
    apart, refused = disagreement(found.power_w, instant_w, average_w)
    row |= {"n_ticks": found.n_ticks, "slope_w": found.power_w, "slope_error_w": found.error_w}
    return row | {"agreement_frac": apart, "notes": refused or ""}


def _middle(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None


def any_bits(values: np.ndarray) -> int | None:
    """All bits that were set at any time; None if the signal never answered."""
    known = values[~np.isnan(values)]
    return int(np.bitwise_or.reduce(known.astype(np.int64))) if len(known) else None


def _rise(idle: Samples, product: Samples, start_s: float) -> dict[str, float]:
    """Seconds from the start of the product to 90 % of the step, of each power signal."""
    found = {}
    for signal in ("instant", "average"):
        before = getattr(idle, KEPT[signal])
        after = getattr(product, KEPT[signal])
        if np.isnan(before).all() or np.isnan(after).all():
            continue
        # The last quarter of the load is its level: the 1-s mean has reached it by then.
        low, high = np.nanmedian(before[-len(before) // 4 :]), np.nanmedian(after[-len(after) // 4 :])
        risen = product.t_s[(after >= low + RISEN * (high - low)) & (product.t_s >= start_s)]
        if high > low and len(risen):
            found[signal] = float(risen[0] - start_s)
    return found


def _signals(
    timed: dict[str, tuple[float | None, str]], recorded: list[Samples], rise: dict[str, float]
) -> pd.DataFrame:
    rows = []
    for name, (call_s, reason) in timed.items():
        period_s, smallest = _changes(recorded, KEPT.get(name))
        rows.append(
            {
                "signal": name,
                "is_answering": call_s is not None,
                "period_s": period_s,
                "call_s": call_s,
                "rise_s": rise.get(name),
                "resolution": smallest,
                "notes": ABOUT.get(name, "") + (f": {reason}" if reason else ""),
            }
        )
    return pd.DataFrame(rows)


def _changes(recorded: list[Samples], column: str | None) -> tuple[float | None, float | None]:
    """Median distance of the changes of a column within a recording, and the smallest change."""
    distances, sizes = [], []
    if column is None:
        return None, None
    for samples in recorded:
        values = getattr(samples, column)
        change = np.abs(np.diff(values))
        at = np.flatnonzero(change > 0) + 1
        distances.append(np.diff(samples.t_s[at]))
        sizes.append(change[at - 1])
    distance, size = np.concatenate(distances), np.concatenate(sizes)
    return (float(np.median(distance)) if len(distance) >= 3 else None, float(size.min()) if len(size) else None)


def _idle_w(loads: pd.DataFrame) -> float | None:
    values = loads.loc[loads["load"] == "idle", "slope_w"].dropna().astype(float)
    return float(values.median()) if len(values) else None


def _trusted(loads: pd.DataFrame) -> dict[str, Any]:
    """Whether joules of this GPU are believed, and why not."""
    held = loads[~loads["load"].str.startswith("square")]  # steady, as the probe made them
    missing = held[held["slope_w"].isna()]
    refused = held[held["notes"] != ""]
    if len(missing):
        return {"is_trusted": False, "reason": str(missing["notes"].iloc[0])}
    if len(refused):
        worst = refused.sort_values("agreement_frac").iloc[-1]
        return {"is_trusted": False, "reason": f"refused: {worst['load']}: {worst['notes']}"}
    if held["agreement_frac"].isna().any():
        return {"is_trusted": False, "reason": "refused: no power signal answers that the counter could be held to"}
    return {"is_trusted": True, "reason": None}
