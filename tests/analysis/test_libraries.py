"""Analysis on small tables with answers worked by hand."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from gpubloat.analysis import libraries as analysis
from gpubloat.errors import GpubloatError
from gpubloat.tables.libraries import TABLES


def elements(*rows: dict[str, Any]) -> pd.DataFrame:
    base = {
        "library": "a.so", "section": ".nv_fatbin", "region": 0, "element": 0, "member": None, "kind": "cubin",
        "kind_code": 2, "target": "sm_90", "identifier": "", "offset_bytes": 0, "header_bytes": 64,
        "payload_bytes": 1000, "uncompressed_bytes": 4000, "compression": "zstd", "flags": 0, "n_kernels": None,
        "digest": "", "fit": None, "is_loadable": None,
    }  # fmt: skip
    return TABLES["elements"].check(pd.DataFrame([base | row for row in rows]), "elements")


def libraries(*rows: dict[str, Any]) -> pd.DataFrame:
    base = {
        "library": "a.so", "root": "w", "format": "elf", "file_bytes": 100, "cpu_code_bytes": 20, "gpu_code_bytes": 50,
        "function_bytes": 10, "n_functions": 3, "n_cold": None, "n_function_names": 4, "n_regions": 1, "n_elements": 2,
        "n_kernels": None, "build_id": "", "sha256": "",
    }  # fmt: skip
    return TABLES["libraries"].check(pd.DataFrame([base | row for row in rows]), "libraries")


def test_loadable_is_decided_by_region() -> None:
    table = elements(
        {"region": 0, "element": 0, "target": "sm_80"},
        {"region": 0, "element": 1, "target": "sm_90"},
        {"region": 0, "element": 2, "target": "compute_90", "kind": "ptx", "kind_code": 1},
        {"region": 1, "element": 0, "target": "sm_80", "payload_bytes": 436},
        {"region": 1, "element": 1, "target": "compute_80", "kind": "ptx", "kind_code": 1, "payload_bytes": 136},
    )
    answer = analysis.loadable(table, ["sm_90", "8.6"]).set_index("gpu")
    assert list(analysis.loadable(table, "sm_90")["gpu"]) == ["sm_90"]
    # sm_90: the cubin of region 0; region 1 has no Hopper cubin, so its PTX is compiled.
    assert answer.loc["sm_90", "loadable_bytes"] == 1064 + 200
    # sm_86: the sm_80 cubins of both regions, no PTX.
    assert answer.loc["sm_86", "loadable_bytes"] == 1064 + 500
    assert (answer["loadable_bytes"] + answer["unloadable_bytes"] == answer["stored_bytes"]).all()
    assert answer["stored_bytes"].tolist() == [3 * 1064 + 500 + 200] * 2
    assert answer["n_loadable"].tolist() == [2, 2]


def test_members_of_a_concatenated_element_count_once() -> None:
    table = elements(
        {"kind": "concat", "kind_code": 256, "target": None, "uncompressed_bytes": 0},
        {"member": 0, "target": "sm_80", "header_bytes": 0, "payload_bytes": 0},
        {"member": 1, "target": "sm_90", "header_bytes": 0, "payload_bytes": 0},
    )
    answer = analysis.loadable(table, ["sm_90", "sm_70"]).set_index("gpu")
    assert answer["n_elements"].tolist() == [1, 1]
    assert answer["loadable_bytes"].tolist() == [1064, 0]
    by_target = analysis.bytes_by_target(table)
    assert by_target["stored_bytes"].sum() == 1064
    assert by_target["uncompressed_bytes"].sum() == 8000


def test_overview_folds_and_totals() -> None:
    table = libraries({"library": "a"}, {"library": "b", "file_bytes": 300}, {"library": "c", "n_kernels": 7})
    answer = analysis.overview(table, elements({"library": "a"}), top=1)
    assert answer["library"].tolist() == ["b", "(2 smaller files)", "total of 3 files"]
    assert answer["file_bytes"].tolist() == [300, 200, 500]
    assert answer["other_bytes"].tolist() == [230, 60, 290]
    assert answer["n_kernels"].tolist()[1:] == [7, 7]
    assert pd.isna(answer["n_kernels"].iloc[0])
    assert "loadable_bytes" not in answer


def test_one_file_needs_no_total() -> None:
    one = libraries({"library": "a"})
    assert analysis.overview(one, elements({"library": "a"}))["library"].tolist() == ["a"]
    folded = analysis.overview(one, elements({"library": "a"}), top=0)
    assert folded["library"].tolist() == ["(1 smaller file)", "total of 1 file"]


def test_pareto_names_the_columns_there_are() -> None:
    table = libraries({"library": "a"})[["library", "file_bytes"]]
    with pytest.raises(GpubloatError, match="the table has no column 'nope'") as caught:
        analysis.pareto(table, "nope")
    assert caught.value.hint == "columns: library, file_bytes"
    with pytest.raises(GpubloatError, match="no column 'element'"):
        analysis.pareto(table, "file_bytes", "element")


def test_labels_close() -> None:
    sections = pd.DataFrame(
        [("a", ".text", "cpu_code", 0, 30), ("a", ".x", "gpu_code", 30, 60), ("a", ".init", "cpu_code", 90, 10)],
        columns=["library", "section", "label", "offset_bytes", "size_bytes"],
    )
    answer = analysis.bytes_by_label(sections)
    assert answer["label"].tolist() == ["cpu_code", "gpu_code"]
    assert answer["size_bytes"].tolist() == [40, 60]
    assert answer["share_frac"].sum() == pytest.approx(1)


def test_targets_are_in_order_of_their_numbers() -> None:
    names = ["sm_120", "sm_90a", "compute_90", "sm_90", "sm_80"]
    answer = analysis.bytes_by_target(elements(*({"target": t} for t in names)))
    assert answer["target"].tolist() == ["sm_80", "compute_90", "sm_90", "sm_90a", "sm_120"]


def test_fits_says_why() -> None:
    table = elements(
        {"fit": "same_target", "is_loadable": True}, {"fit": "other_major", "is_loadable": False, "payload_bytes": 2936}
    )
    answer = analysis.fits(table)
    assert answer["fit"].tolist() == ["same_target", "other_major"]
    assert answer["stored_bytes"].tolist() == [1064, 3000]
    assert answer["share_frac"].sum() == pytest.approx(1)


def test_duplicates_compare_stored_code() -> None:
    table = elements(
        {"digest": "x"}, {"digest": "x", "library": "b.so"}, {"digest": "x", "element": 1}, {"digest": "y"},
        {"digest": "", "element": 2}, {"digest": "", "element": 3},
    )  # fmt: skip
    answer = analysis.duplicates(table)
    assert len(answer) == 1
    assert answer.loc[0, ["n_copies", "n_libraries", "extra_bytes", "libraries"]].tolist() == [3, 2, 2000, "a.so, b.so"]


def test_by_root_sums_wheels() -> None:
    table = pd.DataFrame({"library": ["a", "b", "c"], "gpu": "sm_90", "stored_bytes": [1, 2, 4], "x_frac": 0.5})
    roots = libraries({"library": "a"}, {"library": "b"}, {"library": "c", "root": "v"})
    answer = analysis.by_root(table, roots, ["gpu"])
    assert answer["root"].tolist() == ["w", "v"]
    assert answer["stored_bytes"].tolist() == [3, 4]
    assert "x_frac" not in answer


def test_pareto_runs_to_one() -> None:
    answer = analysis.pareto(pd.DataFrame({"library": ["a", "b", "c"], "n": [1, 6, 3]}), "n")
    assert answer["library"].tolist() == ["b", "c", "a"]
    assert answer["cumulative_frac"].tolist() == pytest.approx([0.6, 0.9, 1.0])
    assert analysis.pareto(pd.DataFrame({"library": [], "n": []}), "n").empty
