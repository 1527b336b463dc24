"""What packed rows are worth on a GPU: table `rates` of a campaign in, tables out. GB are 10^9 bytes.

Every rate is of the bytes that arrive (`raw_bytes`), unless it says otherwise. What was not measured, or failed, is
empty; `notes` says why.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from gpubloat.tables.tensors import PARTS

GB = 1e9
# What a way is compared with -> what that shows.
FEWER_BYTES = "fewer bytes"
GPU_READS = "reads by the GPU"
BOTH = "both"
CONTROLS = (
    ("packed", "raw", FEWER_BYTES),  # one kernel, rows packed or not
    ("packed", "copied", FEWER_BYTES),  # both by the copy engine, one decoded there
    ("raw", "cpu_gather_copy", GPU_READS),
    ("packed", "cpu_gather_copy", BOTH),
)
# Our workloads -> the paper's.
PAPER = {"gnn": "GNN training", "embedding": "DLRM embedding lookup", "linear": "LLM weight offload (BF16)"}
PACKING, PLAIN = "packing", "no codec"
ITEMS = {"one item per row": "rows", "64 KiB chunks": "whole"}  # of nvCOMP
# Items -> columns with the rates of plain bytes, of packed ones, and of the decoder.
FETCHED = {
    "rows": ("plain_gb_per_s", "packed_gb_per_s", "device_decode_rows_gb_per_s"),
    "whole": ("bulk_plain_gb_per_s", "bulk_best_gb_per_s", "device_decode_gb_per_s"),
}
_KEYS = ["subject", "dtype"]
_DECODE = {
    "plain": "gather_plain", "raw": "gather_raw", "packed": "gather_packed", "packed_sorted": "gather_packed_sorted",
    "bulk_plain": "bulk_plain", "bulk_packed": "bulk_packed", "bulk_zero_copy": "bulk_zero_copy",
    "device_decode_rows": "device_decode_rows", "device_copy": "device_copy", "device_count": "device_count",
    "device_pack": "device_pack",
}  # fmt: skip


def coverage(rates: pd.DataFrame) -> pd.DataFrame:
    """What a campaign measured, one row per part, also of those that it left out.

    Columns: part, ways (rows of the table), failed, compared (those whose bits were compared), unequal, state
    (measured, failed, not measured yet).
    """
    failed = rates["median_s"].isna()
    rows = []
    for part in PARTS:
        of = rates["part"] == part
        equal = rates.loc[of, "is_equal"].dropna().astype(bool)
        n, lost = int(of.sum()), int((of & failed).sum())
        state = "not measured yet" if not n else "failed" if lost == n else "measured"
        rows.append((part, n, lost, len(equal), int((~equal).sum()), state))
    return pd.DataFrame(rows, columns=["part", "ways", "failed", "compared", "unequal", "state"])


def link_rates(rates: pd.DataFrame) -> pd.DataFrame:
    """Plain bytes out of host memory: by reads of the GPU, and by the copy engine, which knows no rows.

    Columns: memory_bytes (that is read from), order (sorted, random, or copy engine), row_bytes (empty for the copy
    engine), gb_per_s, million_rows_per_s, notes.
    """
    table = _latest(rates, "link", ["way", "memory_bytes", "row_bytes"])
    order = table["way"].str.removeprefix("read, ").where(table["way"] != "copy", "copy engine")
    row_bytes = table["row_bytes"].astype("Float64")
    found = table[["memory_bytes"]].assign(
        order=order, row_bytes=table["row_bytes"], gb_per_s=_gb(table["raw_bytes"], table["median_s"]),
        million_rows_per_s=table["raw_bytes"] / table["median_s"] / row_bytes.to_numpy(float, na_value=np.nan) / 1e6,
        notes=table["notes"],
    )  # fmt: skip
    return found.sort_values(["memory_bytes", "order", "row_bytes"], ignore_index=True)


def decode_rates(rates: pd.DataFrame) -> pd.DataFrame:
    """What arrives of each matrix by each way, one row per subject and dtype; dense ones (that save least) first.

    From host memory, rows by number: plain_gb_per_s (a kernel that copies plain rows), raw_gb_per_s (the control: the
    decoder on rows that are all stored raw), packed_gb_per_s; fewer_bytes_ratio (packed over raw), bound_gb_per_s
    (plain over 1 - saving: the packed bytes at the rate of plain ones), link_frac (packed over that bound),
    beyond_bytes (the time of a packed row less that of its bytes at the plain rate, as bytes at that rate), and of row
    numbers that are sorted first packed_sorted_gb_per_s and sorted_link_frac. Of the whole matrix: bulk_plain_gb_per_s
    (copied), bulk_packed_gb_per_s (copied packed, then decoded), bulk_zero_copy_gb_per_s (read packed and decoded).

    In memory of the GPU: device_decode_gb_per_s (the best of the widths a lane decodes), device_decode_rows_gb_per_s
    (in any order), device_pack_gb_per_s, device_count_gb_per_s (bits are counted) and device_copy_gb_per_s, which
    counts every byte once although it is read and written; count_frac (count over copy). pack_cpu_gb_per_s is of the
    CPU.

    Also row_bytes, n_rows, raw_bytes, saving_frac (of the bytes that `gather_packed` reads), is_equal (whole matrix and
    rows came back with the right bits), notes (of what failed).
    """
    table = _latest(rates, "codec", [*_KEYS, "way"])
    table = table.assign(gb=_gb(table["raw_bytes"], table["median_s"]))
    rows = []
    for (subject, dtype), of in table.groupby(_KEYS, sort=False):
        ways = of.drop_duplicates("way", keep="last").set_index("way")
        gb = ways["gb"].astype(float)
        moved = (ways["moved_bytes"] / ways["raw_bytes"]).astype(float)
        row = {"subject": subject, "dtype": dtype}
        row |= {name: of[name].max() for name in ("row_bytes", "n_rows", "raw_bytes")}
        kept = float(moved.get("gather_packed", np.nan))
        row["saving_frac"] = 1 - kept
        row |= {f"{name}_gb_per_s": float(gb.get(way, np.nan)) for name, way in _DECODE.items()}
        row["device_decode_gb_per_s"] = gb[gb.index.str.fullmatch(r"device_decode_\d+")].max()
        row["pack_cpu_gb_per_s"] = float(gb.get("pack on the CPU", np.nan))
        row["is_equal"] = _all(of["is_equal"])
        row["notes"] = _failures(of)
        rows.append(row)
    names = [*_KEYS, "row_bytes", "n_rows", "raw_bytes", "saving_frac", *(f"{n}_gb_per_s" for n in _DECODE)]
    names += ["device_decode_gb_per_s", "pack_cpu_gb_per_s", "is_equal", "notes"]
    found = pd.DataFrame(rows, columns=names)
    number = [name for name in names if name.endswith(("_gb_per_s", "_frac"))]
    found[number] = found[number].astype(float)
    left, plain, packed = 1 - found["saving_frac"], found["plain_gb_per_s"], found["packed_gb_per_s"]
    found["bound_gb_per_s"] = plain / left
    found["link_frac"] = packed / found["bound_gb_per_s"]
    found["sorted_link_frac"] = found["packed_sorted_gb_per_s"] / found["bound_gb_per_s"]
    found["fewer_bytes_ratio"] = packed / found["raw_gb_per_s"]
    found["beyond_bytes"] = found["row_bytes"].astype(float) * (plain / packed - left)
    found["count_frac"] = found["device_count_gb_per_s"] / found["device_copy_gb_per_s"]
    return found.sort_values(["saving_frac", *_KEYS], ignore_index=True)


def beside_codecs(rates: pd.DataFrame) -> pd.DataFrame:
    """Packing beside the codecs of nvCOMP, one row per matrix, items and codec; those that fetch fastest first.

    Columns: subject, dtype, items ("rows": each can be read alone; "whole": the matrix, in chunks of 64 KiB), codec (of
    nvCOMP, "typed" if it was told the type of the elements, else it sees bytes; PACKING; PLAIN for no codec),
    saving_frac, decode_gb_per_s and encode_gb_per_s (in memory of the GPU), fetched_gb_per_s (that arrive decoded out
    of host memory), is_equal, notes.

    What a codec of nvCOMP fetches was not measured but is bounded from above: the slower of its decoding and of its
    packed bytes at the rate of plain ones, as if both overlapped and finding the items took nothing. Packing and plain
    bytes were measured: rows in random order by reads of the GPU; the whole by the better of copying and reading.
    """
    columns = [*_KEYS, "items", "codec", "saving_frac", "decode_gb_per_s", "encode_gb_per_s", "fetched_gb_per_s"]
    columns += ["is_equal", "notes"]
    ours = decode_rates(rates)
    ours["bulk_best_gb_per_s"] = ours[["bulk_packed_gb_per_s", "bulk_zero_copy_gb_per_s"]].max(axis=1)
    theirs = _codecs(_latest(rates, "nvcomp", [*_KEYS, "way"]))
    found = []
    for items, (plain, packed, decode) in FETCHED.items():
        of = theirs[theirs["items"] == items].merge(ours[[*_KEYS, plain]], on=_KEYS)
        at_link_rate = of[plain] / (1 - of["saving_frac"])
        of["fetched_gb_per_s"] = of["decode_gb_per_s"].where(of["decode_gb_per_s"] < at_link_rate, at_link_rate)
        of.loc[of["decode_gb_per_s"].isna(), "fetched_gb_per_s"] = np.nan
        own = ours.merge(of[_KEYS].drop_duplicates(), on=_KEYS).assign(items=items)
        none = own[[*_KEYS, "items"]].assign(codec=PLAIN, saving_frac=0.0, fetched_gb_per_s=own[plain], notes="")
        own = own.assign(
            codec=PACKING, decode_gb_per_s=own[decode], encode_gb_per_s=own["device_pack_gb_per_s"],
            fetched_gb_per_s=own[packed],
        )  # fmt: skip
        found += [part.reindex(columns=columns) for part in (none, own, of)]
    table = pd.concat(found, ignore_index=True)
    number = [name for name in columns if name.endswith(("_gb_per_s", "_frac"))]
    table[number] = table[number].astype(float)
    keys = ["items", *_KEYS, "fetched_gb_per_s"]
    return table.sort_values(keys, ascending=[True, True, True, False], ignore_index=True)


def _codecs(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of nvCOMP, encoding and decoding side by side: codec, items, saving_frac, decode_gb_per_s..."""
    words = table["way"].astype(str).str.extract(r"^(?P<codec>[^,]*), (?P<named>.*), (?P<what>encode|decode)$")
    words["codec"] = words["codec"].str.replace(r" <[fu]\d$", " typed", regex=True)
    table = table.assign(**words, gb=_gb(table["raw_bytes"], table["median_s"]), items=words["named"].map(ITEMS))
    keys = [*_KEYS, "items", "codec"]
    encode, decode = (table[table["what"] == what] for what in ("encode", "decode"))
    decode = decode.assign(
        saving_frac=1 - (decode["moved_bytes"] / decode["raw_bytes"].where(decode["raw_bytes"] > 0)).astype(float),
        decode_gb_per_s=decode["gb"],
        notes=decode["notes"].where(decode["median_s"].isna(), ""),
    )  # fmt: skip
    return decode.merge(encode[[*keys, "gb"]].rename(columns={"gb": "encode_gb_per_s"}), on=keys, how="left")


def kv_caches(rates: pd.DataFrame) -> pd.DataFrame:
    """A decoder with its KV cache kept in different ways. Columns: way, token_s, saving_frac (of what is packed, empty
    where nothing is), is_equal (the tokens are those of the plain cache), notes."""
    table = _latest(rates, "kv cache", ["subject", "way"])
    raw = table["raw_bytes"].where(table["raw_bytes"] > 0)
    return pd.DataFrame({
        "way": table["way"], "token_s": table["median_s"].astype(float),
        "saving_frac": (1 - table["moved_bytes"] / raw).astype(float), "is_equal": table["is_equal"],
        "notes": table["notes"],
    })  # fmt: skip


def workloads(rates: pd.DataFrame) -> pd.DataFrame:
    """The workloads, one row per way. Columns: part, subject, way, time_s, gb_per_s (that arrive), saving_frac (empty
    where no bytes were counted), is_equal, notes. With and without a cache are subjects of their own."""
    table = rates[rates["part"].isin(["embedding", "linear", "gnn"])]
    table = table.drop_duplicates(["part", "subject", "way"], keep="last")
    way = table["way"].str.split(", ", n=1)
    with_cache = way.str[1].astype(object).fillna("")
    subject = table["subject"] + (", " + with_cache).where(with_cache != "", "")
    saving = 1 - (table["moved_bytes"] / table["raw_bytes"]).astype(float)
    found = pd.DataFrame({
        "part": table["part"], "subject": subject, "way": way.str[0], "time_s": table["median_s"].astype(float),
        "gb_per_s": _gb(table["raw_bytes"], table["median_s"]), "saving_frac": saving,
        "is_equal": table["is_equal"], "notes": table["notes"],
    })  # fmt: skip
    return found.reset_index(drop=True)


def speedups(rates: pd.DataFrame) -> pd.DataFrame:
    """The workloads beside their controls, one row per pair of ways of one subject.

    Columns: part, subject, gained_by, way, control, way_s, control_s, speedup (control_s over way_s), saving_frac and
    bound (1 / (1 - saving), what fewer bytes give at best; empty for other gains), notes. gained_by: "fewer bytes" is
    packed beside the same kernel on raw rows, or beside plain copies where both go by the copy engine; "reads by the
    GPU" is raw rows beside a gather by the CPU; "both" is their product.
    """
    columns = ["part", "subject", "gained_by", "way", "control", "way_s", "control_s"]
    columns += ["speedup", "saving_frac", "bound", "notes"]
    rows = []
    for (part, subject), of in workloads(rates).groupby(["part", "subject"], sort=False):
        ways = of.set_index("way")
        for way, control, gained_by in CONTROLS:
            if way not in ways.index or control not in ways.index:
                continue
            one, other = ways.loc[way], ways.loc[control]
            saving = one["saving_frac"] if gained_by == FEWER_BYTES else np.nan
            notes = "; ".join(f"{x.name}: {x['notes']}" for x in (one, other) if x["notes"] and np.isnan(x["time_s"]))
            times = one["time_s"], other["time_s"], other["time_s"] / one["time_s"]
            rows.append((part, subject, gained_by, way, control, *times, saving, 1 / (1 - saving), notes))
    return pd.DataFrame(rows, columns=columns)


def headline(rates: pd.DataFrame, gained_by: str = FEWER_BYTES) -> pd.DataFrame:
    """Our counterparts of the paper's headline figures, as `analysis.compare.beside` takes them.

    Columns: subject (the paper's workload), quantity, value, unit. Speed-ups are those of `gained_by`: of GNN training
    the step, of an embedding look-ups without a cache, of layers out of host memory the forward pass of all; a mean is
    over subjects. Of "fewer bytes", also what arrives against plain zero copy at best, and the least share of the bound
    that is reached where less than half is saved (the paper's is of synthetic rows).
    """
    table = speedups(rates)
    table = table[(table["gained_by"] == gained_by) & table["speedup"].notna()]
    chosen = {
        "gnn": table["subject"].str.endswith(", step"),
        "embedding": table["subject"].str.endswith(", no cache"),
        "linear": table["part"] == "linear",
    }
    rows: list[tuple[str, str, float, str]] = []
    for part, which in chosen.items():
        ratio = table.loc[(table["part"] == part) & which, "speedup"]
        if len(ratio) and part == "linear":
            rows.append((PAPER[part], "latency_reduction", 100 * (1 - 1 / ratio.median()), "percent"))
        elif len(ratio):
            rows.append((PAPER[part], "faster_by_mean", 100 * (ratio.mean() - 1), "percent"))
        if len(ratio) and part == "gnn":
            rows.append((PAPER[part], "speedup_max", ratio.max(), "ratio"))
    decoded = decode_rates(rates)
    if gained_by == FEWER_BYTES and decoded["link_frac"].notna().any():
        sparse = decoded["saving_frac"] >= 0.5
        best = (decoded["packed_gb_per_s"] / decoded["plain_gb_per_s"])[sparse].max()
        least = 100 * decoded.loc[~sparse, "link_frac"].min()
        rows.append(("sparse GNN features", "transfer_throughput_ratio_max", best, "ratio"))
        rows.append(("synthetic saving < 50 %", "decompression_throughput_of_ideal", least, "percent"))
    return pd.DataFrame(rows, columns=["subject", "quantity", "value", "unit"]).dropna(ignore_index=True)


def by_workload(published: pd.DataFrame) -> pd.DataFrame:
    """Rows of ``published.load("ibp")`` that name a workload, which becomes their subject: what `headline` joins."""
    workload = published["subject"].str.extract(r"^workload=(.+?)(?: \||$)", expand=False)
    return published.assign(subject=workload)[workload.notna()].reset_index(drop=True)


def _latest(rates: pd.DataFrame, part: str, keys: list[str]) -> pd.DataFrame:
    """Rows of a part; where one was measured again, the later."""
    return rates[rates["part"] == part].drop_duplicates(keys, keep="last").reset_index(drop=True)


def _gb(size: pd.Series, seconds: pd.Series) -> pd.Series:
    return (size / seconds.where(seconds > 0) / GB).astype(float)


def _all(equal: pd.Series) -> bool | None:
    known = equal.dropna().astype(bool)
    return bool(known.all()) if len(known) else None


def _failures(rows: pd.DataFrame) -> str:
    failed = rows[rows["median_s"].isna()]
    return "; ".join(f"{way}: {note or 'failed'}" for way, note in zip(failed["way"], failed["notes"]))
