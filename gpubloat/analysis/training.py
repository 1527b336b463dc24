"""Training runs under several allocators, and the GMLake paper's charts beside them.

The paper's rows and ours get the same columns. They never describe the same machine: theirs are A100 with 80 GB.
"""

from __future__ import annotations

import pandas as pd

KEYS = ["model", "strategy", "platform", "gpus", "batch"]
COLUMNS = [*KEYS, "allocator", "reserved_bytes", "utilisation_frac", "fragmentation_frac", "is_oom", "source"]
# The paper's two allocators by the names of our models.
ALLOCATORS = {"PyTorch": "caching", "GMLake": "stitching"}
CHARTS = ("chart strategies", "chart GPUs", "chart platforms", "chart batch size")
# What makes a configuration with its allocator, whatever was measured of it.
RUN = ["model", "n_layers", "strategy", "n_gpus", "batch", "seq", "lengths", "limit_bytes", "allocator"]


def charts(published: pd.DataFrame, items: tuple[str, ...] = CHARTS) -> pd.DataFrame:
    """The charts of the paper, one row per bar pair: `COLUMNS` and `item`.

    `published` : ``gpubloat.published.load("gmlake")``. Batch is empty where a chart does not say it; is_oom marks the
    bars that the paper hatches, whose height is what was reserved when memory ran out.
    """
    rows = published[published["item"].isin(items)].reset_index(drop=True)
    parts = pd.DataFrame(
        [dict(part.split("=", 1) for part in subject.split(" | ")) for subject in rows["subject"]], index=rows.index
    ).reindex(columns=["model", "strategy", "platform", "gpus", "batch_size", "allocator"])
    parts = parts.rename(columns={"batch_size": "batch"}).assign(item=rows["item"])
    value = rows["value"] * rows["unit"].map({"GB": 1e9, "ratio": 1.0}).astype(float)
    hatched = rows["note"].str.contains("PyTorch OOM", regex=False) & (parts["allocator"] == "PyTorch")
    keys = [*KEYS, "allocator", "item"]
    long = parts.assign(quantity=rows["quantity"], value=value, is_oom=hatched)
    wide = long.pivot_table(index=keys, columns="quantity", values="value", sort=False, dropna=False, observed=True)
    wide = wide.reindex(columns=["reserved", "utilisation"]).dropna(how="all").reset_index()
    oom = long.groupby(keys, dropna=False)["is_oom"].any()
    table = wide.merge(oom.reset_index(), on=keys).rename(columns={"utilisation": "utilisation_frac"})
    return table.assign(
        allocator=table["allocator"].map(ALLOCATORS),
        gpus=table["gpus"].astype("Int64"),
        batch=pd.to_numeric(table["batch"]).astype("Int64"),
        reserved_bytes=table["reserved"].mul(1).round().astype("Int64"),
        fragmentation_frac=1 - table["utilisation_frac"],
        source="published",
    )[[*COLUMNS, "item"]]


def measured(training: pd.DataFrame, platform: str = "PyTorch") -> pd.DataFrame:
    """Rows of the table `training` in the same `COLUMNS`."""
    return training.rename(columns={"n_gpus": "gpus", "reserved_peak_bytes": "reserved_bytes"}).assign(
        platform=platform,
        gpus=training["n_gpus"].astype("Int64"),
        batch=training["batch"].astype("Int64"),
        reserved_bytes=training["reserved_peak_bytes"].astype("Int64"),
        source="measured",
    )[COLUMNS]


def beside(training: pd.DataFrame, published: pd.DataFrame, item: str, platform: str = "PyTorch") -> pd.DataFrame:
    """One chart of the paper with our rows of the same models, theirs first: `COLUMNS`.

    Ours join by model and, in all charts but those of GPUs and strategies, by strategy; nothing is matched by number
    of GPUs or batch, in which the machines differ.
    """
    theirs = charts(published, (item,))
    ours = measured(training, platform)
    on = ["model"] if item in ("chart strategies", "chart GPUs") else ["model", "strategy"]
    wanted = theirs[on].drop_duplicates()
    return pd.concat([theirs[COLUMNS], ours.merge(wanted, on=on)[COLUMNS]], ignore_index=True)


def gains(table: pd.DataFrame, *, baseline: str = "caching", allocator: str = "stitching") -> pd.DataFrame:
    """What `allocator` saves against `baseline`, per configuration of `charts`, `measured` or `beside`.

    Columns: `KEYS`, source, reserved_bytes and utilisation_frac of both (``_baseline`` is the other), saved_bytes,
    saved_frac, utilisation_gain_frac (points over 100), is_oom_baseline, is_oom. Saved bytes are empty where one of
    the two ran out of memory.
    """
    keys = [*KEYS, "source", *(["item"] if "item" in table else [])]
    values = [*keys, "reserved_bytes", "utilisation_frac", "is_oom"]
    two = [table.loc[table["allocator"] == name, values].drop_duplicates(keys) for name in (allocator, baseline)]
    both = two[0].merge(two[1], on=keys, suffixes=("", "_baseline"))
    ran = ~(both["is_oom"].astype(bool) | both["is_oom_baseline"].astype(bool))
    saved = (both["reserved_bytes_baseline"] - both["reserved_bytes"]).where(ran)
    share = saved.astype("Float64") / both["reserved_bytes_baseline"].astype("Float64")
    points = (both["utilisation_frac"] - both["utilisation_frac_baseline"]).where(ran)
    return both.assign(saved_bytes=saved, saved_frac=share.astype(float), utilisation_gain_frac=points)


def as_measured(training: pd.DataFrame) -> pd.DataFrame:
    """Rows for `analysis.compare.beside`, on model, strategy and allocator: subject, quantity, value, unit.

    Subject is ``model | strategy | allocator``; give the published rows the same with `as_published`.
    """
    table = measured(training)
    return _long(table[~table["is_oom"].astype(bool)])[["subject", "quantity", "value"]].assign(unit="")


def as_published(published: pd.DataFrame, item: str = "chart strategies") -> pd.DataFrame:
    """Published rows of one chart under the subjects of `as_measured`; everything else stays as it was."""
    rows = published[published["item"] == item]
    parts = [dict(part.split("=", 1) for part in subject.split(" | ")) for subject in rows["subject"]]
    names = [_subject(p["model"], p["strategy"], ALLOCATORS.get(p.get("allocator", ""), "")) for p in parts]
    return rows.assign(subject=names).reset_index(drop=True)


def _subject(model: str, strategy: str, allocator: str) -> str:
    return f"{model} | {strategy} | {allocator}"


def _long(table: pd.DataFrame) -> pd.DataFrame:
    """The configuration with most bytes of each subject: the paper's charts have one bar."""
    best = table.sort_values("reserved_bytes").drop_duplicates(["model", "strategy", "allocator"], keep="last")
    names = [_subject(*row) for row in best[["model", "strategy", "allocator"]].itertuples(index=False)]
    wide = best.assign(subject=names, reserved_bytes=best["reserved_bytes"].astype(float))
    return wide.melt("subject", ["reserved_bytes", "utilisation_frac"], var_name="quantity")


def middle(training: pd.DataFrame) -> pd.DataFrame:
    """One row per configuration: the median step_s of its processes (`repeat`), the first one's other columns."""
    if training.empty:
        return training
    first = training.drop_duplicates(RUN)
    step = training.groupby(RUN, dropna=False, sort=False)["step_s"].median()
    return first.assign(step_s=step.to_numpy())


def throughput(training: pd.DataFrame, *, baseline: str = "caching") -> pd.DataFrame:
    """Samples per second of all GPUs, and relative to the same configuration under `baseline`; rows of `middle`.

    Adds samples_per_s (empty where no step was finished) and relative_ratio (1.0: as fast).
    """
    keys = [name for name in RUN if name != "allocator"]
    training = middle(training)
    step = training["step_s"].astype(float)
    table = training.assign(samples_per_s=training["batch"] * training["n_gpus"] / step.where(step > 0))
    base = table.loc[table["allocator"] == baseline, [*keys, "samples_per_s"]].drop_duplicates(keys)
    both = table.merge(base.rename(columns={"samples_per_s": "base"}), on=keys, how="left")
    return both.assign(relative_ratio=both["samples_per_s"] / both["base"]).drop(columns="base")


def largest_batch(training: pd.DataFrame) -> pd.DataFrame:
    """The largest batch that ran, per configuration: batch (0 if none), reserved_bytes,
    utilisation_frac, samples_per_s, and next_batch_oom: the smallest larger one that ran out of memory."""
    table = throughput(training)
    keys = [name for name in RUN if name != "batch"]
    rows = []
    for key, group in table.groupby(keys, sort=False, dropna=False):
        ran = group[~group["is_oom"].astype(bool)].sort_values("batch")
        batch = int(ran["batch"].max()) if len(ran) else 0
        failed = group[group["is_oom"].astype(bool) & (group["batch"] > batch)]["batch"]
        best = ran.iloc[-1] if len(ran) else None
        rows.append(
            dict(zip(keys, key))
            | {
                "batch": batch,
                "reserved_bytes": None if best is None else best["reserved_peak_bytes"],
                "utilisation_frac": None if best is None else best["utilisation_frac"],
                "samples_per_s": None if best is None else best["samples_per_s"],
                "next_batch_oom": int(failed.min()) if len(failed) else None,
            }
        )
    columns = [*keys, "batch", "reserved_bytes", "utilisation_frac", "samples_per_s", "next_batch_oom"]
    found = pd.DataFrame(rows, columns=columns)
    return found.astype({"next_batch_oom": "Int64", "reserved_bytes": "Int64"})


def vmm_table(costs: pd.DataFrame, *, is_busy: bool = False) -> pd.DataFrame:
    """Time by call and chunk size, as the paper's table had it: per 2 GiB in µs, and relative to malloc of the whole.

    `costs` : table `vmm_costs`; medians of repeated rows. Columns: call, chunk_bytes, n_handles (per 2 GiB),
    time_per_2gib_us, time_per_handle_us, relative_ratio (over malloc of the same total; empty if it was not measured).
    """
    whole = 2 << 30
    rows = costs[costs["is_busy"] == is_busy]
    scale = whole / rows["total_bytes"].astype(float)
    rows = rows.assign(time_per_2gib_us=rows["time_us"] * scale, time_per_handle_us=rows["time_us"] / rows["n_handles"])
    groups = rows.groupby(["call", "chunk_bytes"], as_index=False, sort=True)
    table = groups[["time_per_2gib_us", "time_per_handle_us"]].median()
    table.insert(2, "n_handles", (whole / table["chunk_bytes"].astype(float)).round().clip(lower=1).astype(int))
    malloc = table.loc[table["call"] == "malloc", "time_per_2gib_us"]
    base = float(malloc.median()) if len(malloc) else float("nan")
    return table.assign(relative_ratio=table["time_per_2gib_us"] / base)
