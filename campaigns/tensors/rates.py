"""One run out of the CSV files of codec.py and kvcache.py: data/measured/tensors-h200.

    python campaigns/tensors/rates.py FOLDER --out RUN [--force]

FOLDER and the folders below it hold the files; those that are not there are left out, and a later one of a name is
added to an earlier one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from gpubloat.run import RunWriter
from gpubloat.tables.tensors import Rates

TIMES = ["median_s", "least_s", "most_s"]
HALF = 12  # of the 24 batches of the embedding: by then the cache has seen what is popular


def link(table: pd.DataFrame) -> pd.DataFrame:
    parts = table["variant"].str.split("_")
    way = parts.map(lambda words: words[0] if len(words) == 1 else f"read, {words[2]}")
    return table.assign(way=way, row_bytes=parts.map(lambda words: int(words[1]) if len(words) == 3 else None))


def codec(table: pd.DataFrame) -> pd.DataFrame:
    return table.rename(columns={"tensor": "subject", "variant": "way"})


def savings(table: pd.DataFrame) -> pd.DataFrame:
    """Packing on the CPU, and whether whole tensors and rows came back with the right bits."""
    packing = table.rename(columns={"tensor": "subject", "packed_bytes": "moved_bytes", "pack_s": "median_s"})
    equal = packing["whole_equal"].astype(str).eq("True") & packing["rows_equal"].astype(str).eq("True")
    notes = [f"chunks of {bits} bits" for bits in packing["chunk_bits"]]
    return packing.assign(way="pack on the CPU", is_equal=equal, notes=notes)


def peers(table: pd.DataFrame) -> pd.DataFrame:
    if "algorithm" not in table:  # the package was not there
        return table.iloc[:0]
    both = []
    for what in ("encode", "decode"):
        way = table["algorithm"] + ", " + table["items"].map({"whole": "64 KiB chunks", "rows": "one item per row"})
        both.append(table.assign(way=way + f", {what}", median_s=pd.to_numeric(table[f"{what}_s"], errors="coerce")))
    return pd.concat(both).rename(columns={"tensor": "subject", "packed_bytes": "moved_bytes", "equal": "is_equal"})


def embedding(table: pd.DataFrame) -> pd.DataFrame:
    table = table.reindex(columns=table.columns.union(["moved_bytes", "equal", "hits", "misses", "held"]))
    rows = []
    for (kind, source), group in table.groupby(["kind", "source"], sort=False):
        late = group[group["batch"] >= min(HALF, group["batch"].max())]
        before = group[group["batch"] < late["batch"].min()].tail(1)
        hits, misses = (late[n].iloc[-1] - before[n].sum() for n in ("hits", "misses"))
        is_cached = source.startswith("cache") and hits > 0
        told = (
            f"{hits / (hits + misses):.1%} of look-ups hit, {late['held'].iloc[-1]:.0f} rows held" if is_cached else ""
        )
        times = late["batch_s"]
        rows.append({"subject": "embedding", "way": f"{kind}, {source}", "raw_bytes": late["raw_bytes"].iloc[0],
                     "moved_bytes": late["moved_bytes"].median(), "is_equal": late["equal"].iloc[0],
                     "median_s": times.median(), "least_s": times.min(), "most_s": times.max(),
                     "notes": told})  # fmt: skip
    return pd.DataFrame(rows)


def linear(table: pd.DataFrame) -> pd.DataFrame:
    subject = [f"16 layers of 8192 x 8192, {rows} rows" for rows in table["rows"]]
    return table.assign(subject=subject).rename(columns={"variant": "way", "equal": "is_equal"})


def gnn(table: pd.DataFrame) -> pd.DataFrame:
    both = [
        table.assign(subject=table["kind"] + f", {what}", median_s=table[f"{what}_s"], notes=notes)
        for what, notes in (("fetch", ""), ("step", "sampling, fetch and training"))
    ]
    return pd.concat(both).rename(columns={"equal": "is_equal"})


def kvcache(table: pd.DataFrame) -> pd.DataFrame:
    notes = [f"peak memory of the GPU {size / 1e9:.2f} GB" for size in table["gpu_bytes"]]
    if "is_lossless" in table:
        told = ["; packed tokens come back bit by bit" if same else "; DAMAGED" for same in table["is_lossless"]]
        notes = [note + (more if way == "packed" else "") for note, more, way in zip(notes, told, table["cache"])]
    named = table.rename(columns={"cache": "way", "token_s": "median_s", "packed_bytes": "moved_bytes"})
    return named.assign(subject="one token of a decoder", notes=notes)


FILES: dict[str, tuple[str, Callable[[pd.DataFrame], pd.DataFrame]]] = {
    "link": ("link", link), "codec": ("codec", codec), "savings": ("codec", savings), "peers": ("nvcomp", peers),
    "embedding": ("embedding", embedding), "linear": ("linear", linear), "gnn": ("gnn", gnn),
    "kvcache": ("kv cache", kvcache),
}  # fmt: skip


def texts(table: pd.DataFrame, name: str) -> pd.Series:
    """A column of texts, empty where there is none."""
    column = table[name].astype(object) if name in table else pd.Series("", table.index, dtype=object)
    return column.where(column.notna(), "")


def rates(folder: Path) -> pd.DataFrame:
    """Table rates of all files."""
    names = list(Rates.to_schema().columns)
    tables = []
    for name, (part, of) in FILES.items():
        for path in sorted(folder.rglob(f"{name}.csv")):
            table = of(pd.read_csv(path)).reset_index(drop=True)
            failed, notes = (texts(table, column) for column in ("failed", "notes"))
            table["notes"] = failed.where(failed != "", notes)
            tables.append(table.assign(part=part).reindex(columns=names))
    found = pd.concat(tables, ignore_index=True)
    for name in ("subject", "dtype", "notes"):
        found[name] = texts(found, name)
    known = {True: True, False: False, "True": True, "False": False}
    found["is_equal"] = found["is_equal"].map(known).astype("boolean")
    for name in ("n_rows", "row_bytes", "memory_bytes"):
        found[name] = found[name].astype("float64").round().astype("Int64")
    for name in ("raw_bytes", "moved_bytes", *TIMES):
        found[name] = pd.to_numeric(found[name], errors="coerce")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--force", action="store_true")
    given = parser.parse_args()
    about = json.loads(sorted(given.folder.rglob("about.json"))[0].read_text("utf-8"))
    with RunWriter("tensors", ["rates"], given.out, given.force) as writer:
        writer.append("rates", rates(given.folder))
        writer.finish(about)


if __name__ == "__main__":
    main()
