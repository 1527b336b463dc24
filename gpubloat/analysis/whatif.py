"""Several replays of one trace beside each other: what another allocator or another setting would have saved."""

from __future__ import annotations

import pandas as pd

NO_GAIN = 0.01  # of the reserved peak: less is no reason to change anything
COLUMNS = [
    "device",
    "allocator",
    "settings",
    "is_recorded",
    "peak_reserved_bytes",
    "peak_active_bytes",
    "utilisation_frac",
    "fragmentation_frac",
    "reserved_saved_bytes",
    "reserved_saved_frac",
    "n_calls",
    "limit_bytes",
    "n_oom",
    "oom_event",
]


def what_if(
    replays: pd.DataFrame, recorded: tuple[str, str] | None = None, bounds: pd.DataFrame | None = None
) -> pd.DataFrame:
    """One row per GPU and allocator with settings; what it saves against the allocator that recorded the trace.

    Parameters
    ----------
    replays : rows of the table `replays`, of one trace, one after the other.
    recorded : allocator and settings to compare with; default, those of the first row.
    bounds : the table `bounds` of the same trace: what no allocator, or none of a kind, can go below.

    Returns
    -------
    `COLUMNS`, then other columns of `replays` that end in ``_s`` (modelled seconds in the driver). Saved bytes are
    negative where an allocator reserves more. They are empty where either replay ran out of memory: what a trace
    needs is not known of an allocator that could not serve it.
    """
    allocator, settings = recorded or tuple(replays.iloc[0][["allocator", "settings"]]) if len(replays) else ("", "")
    table = replays.drop_duplicates(["device", "allocator", "settings"], ignore_index=True)
    table = table.assign(is_recorded=(table["allocator"] == allocator) & (table["settings"] == settings))
    seconds = [str(column) for column in table if str(column).endswith("_s")]
    if bounds is not None and len(bounds):
        extra = bounds[bounds["peak_reserved_bytes"].notna()]
        extra = extra.assign(allocator="bound: " + extra["bound"], settings="", is_recorded=False, n_oom=0)
        extra = extra[["device", "allocator", "settings", "is_recorded", "n_oom", "peak_reserved_bytes"]]
        table = pd.concat([table.astype(object), extra.astype(object)], ignore_index=True)
    table["is_recorded"] = table["is_recorded"].astype(bool)
    for name in ("peak_reserved_bytes", "peak_active_bytes", "limit_bytes", "n_calls", "n_oom", "oom_event"):
        table[name] = table[name].astype("Int64")
    for name in ("utilisation_frac", *seconds):
        table[name] = table[name].astype(float)
    base = table[table["is_recorded"]].set_index("device")
    served = table["n_oom"].eq(0) & table["device"].map(base["n_oom"]).eq(0)
    reference = table["device"].map(base["peak_reserved_bytes"]).astype("Int64")
    saved = (reference - table["peak_reserved_bytes"]).where(served)
    table["reserved_saved_bytes"] = saved
    table["reserved_saved_frac"] = (saved.astype("Float64") / reference.where(reference > 0)).astype(float)
    table["fragmentation_frac"] = 1 - table["utilisation_frac"]
    return table[[*COLUMNS, *seconds]]


def name(allocator: str, settings: str) -> str:
    """``caching`` or ``caching (max_split_size_mb=128)``; that expandable has expandable segments is not repeated."""
    if allocator == "expandable":
        settings = ",".join(part for part in settings.split(",") if part != "expandable_segments=True")
    return f"{allocator} ({settings})" if settings else allocator


def verdict(table: pd.DataFrame, *, threshold: float = NO_GAIN) -> str:
    """One sentence about `what_if`: the largest saving, or that there is none of at least `threshold`.

    Replays of ``native`` do not count: it is a bound, not a choice (it calls the driver for every tensor).
    """
    parts = []
    for device, rows in table.groupby("device"):
        gpu = f"GPU {device}: " if table["device"].nunique() > 1 else ""
        parts.append(gpu + _sentence(rows, threshold))
    return "; ".join(parts) or "nothing was replayed"


def _sentence(rows: pd.DataFrame, threshold: float) -> str:
    base = rows[rows["is_recorded"]]
    others = rows[~rows["is_recorded"] & (rows["allocator"] != "native") & rows["n_calls"].notna()]
    if not len(base) or not len(others):
        return "nothing to compare: replay more than one allocator"
    first = base.iloc[0]
    label = name(first["allocator"], first["settings"])
    if first["n_oom"]:
        fits = others[others["n_oom"] == 0]
        if not len(fits):
            return f"{label} runs out of memory under this limit, and so does every other allocator that was replayed"
        best = fits.sort_values("peak_reserved_bytes", kind="stable").iloc[0]
        return (
            f"{label} runs out of memory under this limit at event {first['oom_event']}; "
            f"{name(best['allocator'], best['settings'])} does not"
        )
    known = others[others["reserved_saved_frac"].notna()]
    if not len(known):
        return f"every other allocator that was replayed runs out of memory under this limit; {label} does not"
    best = known.sort_values("reserved_saved_frac", ascending=False, kind="stable").iloc[0]
    share = float(best["reserved_saved_frac"])
    which = name(best["allocator"], best["settings"])
    if share < threshold:
        best_of = f"the best, {which}, saves {share:.1%}"
        return f"no gain: no other allocator saves {threshold:.0%} of what {label} reserves; {best_of}"
    said = f"{which} would reserve {_saving(best)} less at the peak than {label}"
    own = known[known["allocator"].isin(["caching", "expandable"]) & (known["reserved_saved_frac"] >= threshold)]
    if best["allocator"] in ("caching", "expandable") or not len(own):
        return said
    setting = own.sort_values("reserved_saved_frac", ascending=False, kind="stable").iloc[
        0
    ]  # no other allocator needed
    return f"{said}; PyTorch's own {name(setting['allocator'], setting['settings'])}, {_saving(setting)}"


def _saving(row: pd.Series) -> str:
    return f"{int(row['reserved_saved_bytes']) / 1e9:.2f} GB ({float(row['reserved_saved_frac']):.1%})"
