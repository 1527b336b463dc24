"""The committed censuses: what they say of each library adds up, and the other readers agree."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpubloat.run import Run
from gpubloat.tables.libraries import TABLES

MEASURED = Path(__file__).resolve().parents[1] / "data" / "measured"
FOLDERS = sorted(MEASURED.glob("census-*"))
LEFT_OUT = {"functions", "kernels", "variables"}
REGION_HEADER = 16
KEY = ["library", "region"]


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def run(request: pytest.FixtureRequest) -> Run:
    return Run.load(request.param)


def test_all_censuses_are_there_and_small() -> None:
    stacks = {"torch-2.14.1-cu13", "torch-2.9.1-cu12", "torch-2.0.1-cu11", "jax-cuda13", "tensorflow-2.21-cu12"}
    packages = {"vllm", "bitsandbytes", "triton"}
    assert {folder.name for folder in FOLDERS} == {f"census-{name}" for name in stacks | packages}
    sizes = {folder.name: sum(file.stat().st_size for file in folder.iterdir()) for folder in FOLDERS}
    assert max(sizes.values()) < 1_500_000
    assert sum(sizes.values()) < 6_000_000


def test_tables_are_those_of_a_scan_and_the_oracle(run: Run) -> None:
    assert set(run) == {*TABLES, "oracle"}
    for name in run:
        assert len(run[name]) == run.provenance["tables"][name]  # each is checked against its schema here
    assert {name for name in LEFT_OUT if len(run[name])} == set()
    assert set(run.provenance["empty"]) == LEFT_OUT


def test_every_byte_of_every_file_is_in_one_section(run: Run) -> None:
    sections = run["sections"].sort_values(["library", "offset_bytes"])
    stop = sections["offset_bytes"] + sections["size_bytes"]
    before = stop.groupby(sections["library"]).shift(fill_value=0)
    assert (sections["offset_bytes"] == before).all()  # the first at 0, each where the one before ends
    total = sections.groupby("library")["size_bytes"].sum()
    sizes = run["libraries"].set_index("library")["file_bytes"]
    assert total.reindex(sizes.index, fill_value=0).eq(sizes).all()


def test_regions_are_the_gpu_code(run: Run) -> None:
    libraries = run["libraries"].set_index("library")
    sections = run["sections"]
    regions = run["regions"].groupby("library")["size_bytes"].sum().reindex(libraries.index, fill_value=0)
    labelled = sections[sections["label"] == "gpu_code"].groupby("library")["size_bytes"].sum()
    assert regions.eq(libraries["gpu_code_bytes"]).all()
    assert labelled.reindex(libraries.index, fill_value=0).eq(libraries["gpu_code_bytes"]).all()


def test_elements_and_headers_are_the_regions(run: Run) -> None:
    regions = run["regions"].set_index(KEY)
    elements = run["elements"]
    stored = (elements["header_bytes"] + elements["payload_bytes"]).groupby([elements[k] for k in KEY]).sum()
    header = (~regions["is_raw_cubin"]).astype(int) * REGION_HEADER  # a bare cubin has none
    assert (stored.reindex(regions.index, fill_value=0) + header).eq(regions["size_bytes"]).all()


def test_counts_are_those_of_the_rows(run: Run) -> None:
    libraries = run["libraries"].set_index("library")
    elements = run["elements"]
    own = elements[elements["member"].isna()].groupby("library").size().reindex(libraries.index, fill_value=0)
    kernels = elements.groupby("library")["n_kernels"].sum().reindex(libraries.index, fill_value=0)
    regions = run["regions"].groupby("library").size().reindex(libraries.index, fill_value=0)
    assert own.eq(libraries["n_elements"]).all()
    assert kernels.eq(libraries["n_kernels"]).all()
    assert regions.eq(libraries["n_regions"]).all()


def test_other_readers_agree_or_the_difference_is_explained(run: Run) -> None:
    oracle = run["oracle"]
    assert set(oracle["library"]) == set(run["libraries"]["library"])
    differs = ~(oracle["is_elements_equal"] & oracle["is_kernels_equal"] & oracle["is_cubloaty_equal"])
    assert (oracle.loc[differs, "difference"] != "").all()
    # cuobjdump agrees on all that it can see, in both modes. Only the ends of bare cubins differ from cubloaty's.
    assert oracle["is_elements_equal"].all()
    assert oracle["is_kernels_equal"].all()
    assert oracle.loc[~oracle["is_cubloaty_equal"], "difference"].str.contains("ends a bare cubin").all()
    for what in ("cubins", "ptx", "kernels"):
        for mode in ("", "_all"):
            assert oracle[f"n_{what}_visible{mode}"].eq(oracle[f"n_{what}_cuobjdump{mode}"]).all()
    assert oracle["element_bytes"].eq(oracle["element_bytes_cubloaty"]).all()
    assert oracle["n_kernels"].eq(oracle["n_kernels_cubloaty"]).all()


def test_wheels_have_version_and_sha256(run: Run) -> None:
    wheels = run.provenance["inputs"]
    assert {wheel["name"] for wheel in wheels} == set(run["libraries"]["root"])
    for wheel in wheels:
        assert re.fullmatch(r"[0-9a-f]{64}", wheel["sha256"])
        assert wheel["name"].startswith(f"{wheel['package'].replace('-', '_')}-{wheel['version']}-")
        assert wheel["bytes"] > 0


def test_no_path_of_a_machine(run: Run) -> None:
    for text in _texts(run.provenance):
        assert not re.search(r"(^|[\s'\"=:(])(/|~/|[A-Z]:\\)\w", text), text
    for name in ("libraries", "oracle", "problems"):
        for column in run[name].select_dtypes("string"):
            assert not run[name][column].str.contains(r"(?:^|[\s'\"(])/\w").any()
    assert json.dumps(run.provenance).count(str(Path.home())) == 0


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
