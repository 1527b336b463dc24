"""Rates of packed rows: what is compared with what, and what stays empty."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from gpubloat.analysis import compare
from gpubloat.analysis import rates as analysis
from gpubloat.tables.published import Published
from gpubloat.tables.tensors import PARTS, Rates

NO_TIME = float("nan")


def rates(*rows: dict[str, Any]) -> pd.DataFrame:
    """A table of rates: 1 GB arrives in a second, and as much is read, unless a row says otherwise."""
    table = []
    for given in rows:
        row = dict.fromkeys(Rates.to_schema().columns)
        row |= {"subject": "", "dtype": "", "raw_bytes": 1e9, "median_s": 1.0, "notes": ""} | given
        row.setdefault("moved_bytes", None)
        table.append(row | {"moved_bytes": given.get("moved_bytes", row["raw_bytes"])})
    found = pd.DataFrame(table, columns=list(Rates.to_schema().columns))
    for name in ("n_rows", "row_bytes", "memory_bytes"):
        found[name] = found[name].astype("Int64")
    return Rates.check(found.astype({"is_equal": "boolean"}), "rates")


def codec(subject: str, ways: dict[str, tuple[float, float]], **about: Any) -> list[dict[str, Any]]:
    """Rows of one matrix: way -> share of the raw bytes that is read, GB/s that arrive."""
    given = {"part": "codec", "subject": subject, "dtype": "bf16", "row_bytes": 1000, "n_rows": 1_000_000} | about
    return [{**given, "way": way, "moved_bytes": kept * 1e9, "median_s": 1 / gb} for way, (kept, gb) in ways.items()]


DENSE = {
    "gather_packed": (0.75, 60.0), "gather_packed_sorted": (0.75, 54.0), "gather_raw": (1.0, 48.0),
    "gather_plain": (1.0, 50.0), "bulk_packed": (0.75, 70.0), "bulk_plain": (1.0, 55.0), "bulk_zero_copy": (0.75, 64.0),
    "device_copy": (1.0, 2000.0), "device_count": (1.0, 500.0), "device_pack": (1.0, 250.0),
    "device_decode_rows": (0.75, 600.0), "device_decode_1": (0.75, 500.0), "device_decode_2": (0.75, 800.0),
    "device_decode_4": (0.75, 700.0),
}  # fmt: skip
SPARSE = {"gather_packed": (0.1, 300.0), "gather_raw": (1.0, 50.0), "gather_plain": (1.0, 50.0)}


def workload(part: str, subject: str, **seconds: float) -> list[dict[str, Any]]:
    """Rows of one workload: way=seconds; packed rows are three quarters."""
    kept = {way: 0.75e9 if way == "packed" else 1e9 for way in seconds}
    return [
        {"part": part, "subject": subject, "way": way, "median_s": took, "moved_bytes": kept[way]}
        for way, took in seconds.items()
    ]


WORK = [
    *workload("gnn", "words, fetch", packed=0.5, raw=2.0, plain=1.9, cpu_gather_copy=8.0),
    *workload("gnn", "words, step", packed=2.0, raw=3.0, plain=3.0, cpu_gather_copy=9.0),
    *workload("gnn", "normal, step", packed=2.0, raw=2.0, cpu_gather_copy=9.0),
    *workload("linear", "16 layers, 1 rows", packed=3.0, copied=4.0),
    {"part": "embedding", "subject": "embedding", "way": "packed, no cache", "median_s": 2.0, "moved_bytes": None},
    {"part": "embedding", "subject": "embedding", "way": "raw, no cache", "median_s": 1.0, "moved_bytes": None},
]


def test_coverage_names_all_parts_measured_or_not() -> None:
    given = rates(
        {"part": "link", "way": "copy"},
        {"part": "gnn", "subject": "x", "way": "packed", "is_equal": False},
        {"part": "gnn", "subject": "x", "way": "raw", "is_equal": True, "median_s": NO_TIME, "notes": "no memory"},
        {"part": "linear", "subject": "x", "way": "packed", "median_s": NO_TIME, "notes": "no memory"},
    )
    table = analysis.coverage(given).set_index("part")
    assert table.index.tolist() == list(PARTS)
    assert table["ways"].sum() == len(given)
    assert table.loc["gnn", ["ways", "failed", "compared", "unequal"]].tolist() == [2, 1, 2, 1]
    assert table["state"].to_dict() | {"link": "measured", "gnn": "measured", "linear": "failed"} == (
        table["state"].to_dict()
    )
    assert table.loc["nvcomp", "state"] == "not measured yet"


def test_the_link_by_rows_and_by_the_copy_engine() -> None:
    about = {"part": "link", "memory_bytes": 1 << 30}
    given = rates(
        {**about, "way": "read, random", "row_bytes": 1000, "median_s": 0.1},
        {**about, "way": "read, sorted", "row_bytes": 1000, "median_s": 0.05},
        {**about, "way": "copy", "median_s": 0.02},
        {**about, "way": "read, random", "row_bytes": 2000, "median_s": NO_TIME, "notes": "no memory"},
    )
    table = analysis.link_rates(given)
    assert table["order"].tolist() == ["copy engine", "random", "random", "sorted"]
    assert table["gb_per_s"].tolist() == pytest.approx([50, 10, NO_TIME, 20], nan_ok=True)
    assert table["million_rows_per_s"].tolist() == pytest.approx([NO_TIME, 10, NO_TIME, 20], nan_ok=True)
    assert table.loc[2, "notes"] == "no memory"


def test_the_decoder_beside_its_bound_and_its_control() -> None:
    row = analysis.decode_rates(rates(*codec("dense", DENSE))).iloc[0]
    assert row["saving_frac"] == pytest.approx(0.25)
    assert row["bound_gb_per_s"] == pytest.approx(50 / 0.75)
    assert row["link_frac"] == pytest.approx(60 * 0.75 / 50)
    assert row["sorted_link_frac"] == pytest.approx(54 * 0.75 / 50)
    assert row["fewer_bytes_ratio"] == pytest.approx(60 / 48)
    # A row takes the time of its 750 bytes and of those beyond, at the plain rate: so much arrives.
    assert 1000 / (750 + row["beyond_bytes"]) * 50 == pytest.approx(row["packed_gb_per_s"])
    assert row["count_frac"] == pytest.approx(0.25)
    assert row["device_decode_gb_per_s"] == pytest.approx(800)
    assert row["device_decode_rows_gb_per_s"] == pytest.approx(600)
    assert (row["row_bytes"], row["n_rows"], row["raw_bytes"]) == (1000, 1_000_000, 1e9)


def test_what_saves_least_comes_first_and_the_later_of_two_counts() -> None:
    again = codec("dense", {"gather_packed": (0.75, 40.0)})
    table = analysis.decode_rates(rates(*codec("sparse", SPARSE), *codec("dense", DENSE), *again))
    assert table["subject"].tolist() == ["dense", "sparse"]
    assert table["packed_gb_per_s"].tolist() == pytest.approx([40, 300])
    assert np.isnan(table.loc[1, "bulk_plain_gb_per_s"])
    assert np.isnan(table.loc[1, "device_decode_gb_per_s"])


def test_a_way_of_decoding_that_failed_is_empty_and_says_why() -> None:
    rows = codec("dense", DENSE)
    rows[0] |= {"median_s": NO_TIME, "notes": "RuntimeError: no memory"}
    rows.append({**rows[0], "way": "pack on the CPU", "median_s": 0.5, "is_equal": False, "notes": "chunks of 8 bits"})
    row = analysis.decode_rates(rates(*rows)).iloc[0]
    assert np.isnan(row["packed_gb_per_s"])
    assert np.isnan(row["link_frac"])
    assert row["saving_frac"] == pytest.approx(0.25)  # what it would have read is known
    assert row["notes"] == "gather_packed: RuntimeError: no memory"
    assert row["pack_cpu_gb_per_s"] == pytest.approx(2)
    assert not row["is_equal"]


def nvcomp(name: str, items: str, kept: float, encode: float, decode: float, **about: Any) -> list[dict[str, Any]]:
    """Rows of one codec on the matrix `dense`."""
    given = {"part": "nvcomp", "subject": "dense", "dtype": "bf16", "moved_bytes": kept * 1e9} | about
    ways = {"encode": encode, "decode": decode}
    return [{**given, "way": f"{name}, {items}, {what}", "median_s": 1 / gb} for what, gb in ways.items()]


CODECS = [
    *nvcomp("ANS", "one item per row", 0.8, 20.0, 40.0, is_equal=True),  # bound by decoding
    *nvcomp("Bitcomp", "one item per row", 0.5, 30.0, 400.0),  # bound by the link
    *nvcomp("ANS", "64 KiB chunks", 0.7, 90.0, 300.0),
    *nvcomp("ANS <f2", "64 KiB chunks", 0.9, 90.0, 300.0),  # told that elements are halves
    *nvcomp("LZ4", "64 KiB chunks", 1.1, 90.0, NO_TIME, notes="cannot"),
    *nvcomp("ANS", "64 KiB chunks", 0.7, 90.0, 300.0, subject="not packed here"),
]


def test_codecs_fetch_at_best_what_the_link_and_their_decoder_give() -> None:
    table = analysis.beside_codecs(rates(*codec("dense", DENSE), *CODECS)).set_index(["items", "codec"])
    assert table.loc["rows"].index.tolist() == ["Bitcomp", "packing", "no codec", "ANS"]
    assert table.loc["rows", "fetched_gb_per_s"].tolist() == pytest.approx([100, 60, 50, 40])
    assert table.loc["whole"].index.tolist() == ["ANS", "packing", "ANS typed", "no codec", "LZ4"]
    assert table.loc["whole", "fetched_gb_per_s"].tolist()[:4] == pytest.approx([55 / 0.7, 70, 55 / 0.9, 55])
    failed = table.loc[("whole", "LZ4")]
    assert np.isnan(failed["fetched_gb_per_s"])
    assert failed["notes"] == "cannot"
    ans = table.loc[("rows", "ANS")]
    assert (ans["saving_frac"], ans["decode_gb_per_s"], ans["encode_gb_per_s"]) == pytest.approx((0.2, 40, 20))
    assert ans["is_equal"]
    ours = table.loc[("whole", "packing")]
    assert (ours["saving_frac"], ours["decode_gb_per_s"], ours["encode_gb_per_s"]) == pytest.approx((0.25, 800, 250))
    assert set(table["subject"]) == {"dense"}  # what was not packed stands beside nothing


def test_a_cache_that_packs_nothing_saves_nothing_known() -> None:
    part = {"part": "kv cache", "subject": "one token of a decoder"}
    table = analysis.kv_caches(rates(
        {**part, "way": "plain", "raw_bytes": 0.0, "median_s": 0.01, "is_equal": True},
        {**part, "way": "packed", "moved_bytes": 0.8e9, "median_s": 0.02, "is_equal": True, "notes": "peak"},
    ))  # fmt: skip
    assert table["token_s"].tolist() == [0.01, 0.02]
    assert np.isnan(table.loc[0, "saving_frac"])
    assert table.loc[1, "saving_frac"] == pytest.approx(0.2)


def test_fewer_bytes_times_reads_by_the_gpu_is_both() -> None:
    table = analysis.speedups(rates(*WORK))
    wide = table.pivot(index="subject", columns="gained_by", values="speedup").dropna()
    assert len(wide) == 3
    np.testing.assert_allclose(wide["fewer bytes"] * wide["reads by the GPU"], wide["both"])
    assert wide.loc["words, fetch"].to_dict() == pytest.approx({"fewer bytes": 4, "reads by the GPU": 4, "both": 16})


def test_each_speed_up_has_the_control_that_shows_it() -> None:
    table = analysis.speedups(rates(*WORK)).set_index(["subject", "gained_by"])
    layers = table.loc[("16 layers, 1 rows", "fewer bytes")]
    assert (layers["way"], layers["control"]) == ("packed", "copied")
    assert layers["speedup"] == pytest.approx(layers["bound"])
    looked_up = table.loc[("embedding, no cache", "fewer bytes")]
    assert looked_up["speedup"] == pytest.approx(0.5)
    assert np.isnan(looked_up["bound"])  # its bytes were not counted
    assert np.isnan(table.loc[("words, step", "reads by the GPU"), "bound"])
    assert "plain" not in set(table["way"]) | set(table["control"])


def test_a_workload_that_failed_has_no_speed_up_but_a_reason() -> None:
    rows = workload("gnn", "words, fetch", packed=0.5, raw=NO_TIME)
    rows[1]["notes"] = "no time left"
    table = analysis.speedups(rates(*rows))
    assert table["speedup"].isna().tolist() == [True]
    assert table["notes"].tolist() == ["raw: no time left"]
    assert analysis.headline(rates(*rows)).empty


def test_the_papers_figures_stand_beside_ours() -> None:
    given = rates(*WORK, *codec("dense", DENSE), *codec("sparse", SPARSE))
    ours = analysis.headline(given).set_index(["subject", "quantity"])["value"]
    assert ours["GNN training", "faster_by_mean"] == pytest.approx(25)  # 1.5 and 1
    assert ours["GNN training", "speedup_max"] == pytest.approx(1.5)
    assert ours["LLM weight offload (BF16)", "latency_reduction"] == pytest.approx(25)
    assert ours["DLRM embedding lookup", "faster_by_mean"] == pytest.approx(-50)
    assert ours["sparse GNN features", "transfer_throughput_ratio_max"] == pytest.approx(6)
    assert ours["synthetic saving < 50 %", "decompression_throughput_of_ideal"] == pytest.approx(90)
    reads = analysis.headline(given, analysis.GPU_READS)
    assert reads["subject"].unique().tolist() == ["GNN training"]
    row = dict.fromkeys(Published.to_schema().columns, "") | {
        "subject": "workload=GNN training | baseline=uncompressed | hardware=A100", "quantity": "speedup_max",
        "unit": "ratio", "value": 2.7, "lower": NO_TIME, "upper": NO_TIME, "status": "stated",
    }  # fmt: skip
    published = analysis.by_workload(pd.DataFrame([row, {**row, "subject": "Pubmed"}]))
    both = compare.beside(analysis.headline(given), published, on=["subject", "quantity"], conditions="H200")
    assert both["ratio"].tolist() == [pytest.approx(1.5 / 2.7)]


def test_of_nothing_there_is_nothing() -> None:
    none = Rates.none()
    assert set(analysis.coverage(none)["state"]) == {"not measured yet"}
    for function in (
        analysis.link_rates,
        analysis.decode_rates,
        analysis.beside_codecs,
        analysis.kv_caches,
        analysis.workloads,
        analysis.speedups,
        analysis.headline,
    ):
        table = function(none)
        assert table.empty
        assert list(table.columns) == list(function(rates(*WORK, *codec("dense", DENSE))).columns)
