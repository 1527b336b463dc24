"""The published numbers: the schema holds, gaps stay gaps, and known numbers are where they should be."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from gpubloat import published
from gpubloat.errors import GpubloatError
from gpubloat.tables.published import TABLES, Published

FOLDER = Path(__file__).parents[1] / "data" / "published"
FILES = sorted(FOLDER.glob("*/*.csv"))
# paper, item, subject, quantity, unit, column, number
ANCHORS = """
negativa_ml; Table 2; PyTorch/Train/MobileNetV2; file_reduction; percent; value; 55
negativa_ml; Table 2; PyTorch/Train/MobileNetV2; n_libraries; count; value; 113
negativa_ml; Table 2; TensorFlow/Inference/MobileNetV2; element_reduction; percent; lower; 99
negativa_ml; Table 5; PyTorch/Inference/MobileNetV2; execution_time_reduction; percent; value; 44.6
negativa_ml; text 4.3; library=libtorch_cuda.so | workload=each of 5; used_function_share; percent; upper; 10
gmlake; abstract; A100 80 GB, eight LLMs; reserved_saved_mean; GB; value; 9.2
gmlake; chart GPUs; model=OPT-13B | platform=DeepSpeed ZeRO-3 | strategy=LR | gpus=16 | allocator=GMLake; reserved; GB; upper; 39
gmlake; issue 22; operation=stitch | chunks=477; time; ms; value; 40.207251
ibp; EuroSys'26 abstract; workload=LLM inference | baseline=FlexGen / InfiniGen | hardware=A100, PCIe Gen4; faster_by_mean; percent; value; 25
ibp; data sets; Products (ogbn); row_size; bytes; value; 400
magneton; Table 2; vllm-9471; energy_difference; percent; value; 12.6
magneton; Table 2; pytorch-28224; energy_difference; percent; upper; 1
magneton; Figure 5d; workload=Conv2D | system=TF; relative_energy; ratio; value; 3.35
magneton; artifact; pytorch-181115; energy_before; mJ; value; 18224
"""  # noqa: E501


@pytest.fixture(scope="module")
def numbers() -> pd.DataFrame:
    return published.load()


def test_there_are_four_papers() -> None:
    assert published.papers() == ["gmlake", "ibp", "magneton", "negativa_ml"]
    assert {"published": Published} == TABLES


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_schema_holds_for_every_file(path: Path) -> None:
    frame = pd.read_csv(path, dtype=str, keep_default_na=False).assign(paper=path.parent.name)
    frame[published.NUMBERS] = frame[published.NUMBERS].apply(pd.to_numeric)
    assert len(Published.check(frame, path.stem)) > 0


def test_load_reads_every_row_of_every_file(numbers: pd.DataFrame) -> None:
    assert len(numbers) == sum(len(pd.read_csv(path, dtype=str)) for path in FILES)
    assert list(numbers.columns) == list(Published.to_schema().columns)


def test_a_missing_number_is_empty_and_any_other_is_not(numbers: pd.DataFrame) -> None:
    missing = numbers["status"] == "missing"
    has_number = numbers[published.NUMBERS].notna().any(axis=1)
    assert not (missing & (has_number | (numbers["printed"] != ""))).any()
    assert (missing | (numbers["printed"] != "") | numbers["value"].notna()).all()
    assert (numbers.loc[missing, "note"] != "").all()


def test_bounds_enclose_the_value(numbers: pd.DataFrame) -> None:
    value, lower, upper = (numbers[name] for name in published.NUMBERS)
    assert not ((lower > value) | (value > upper) | (lower > upper)).any()
    # A limit said in words only ("hundreds of ms") would be approximate, not a bound.
    assert (lower.notna() | upper.notna())[numbers["status"] == "bound"].all()
    assert (lower.notna() & value.notna() & upper.notna())[numbers["status"] == "digitised"].all()


def test_no_number_is_there_twice(numbers: pd.DataFrame) -> None:
    assert not numbers.duplicated(["paper", "item", "subject", "quantity", "unit"]).any()


def test_a_plain_printed_number_is_its_value(numbers: pd.DataFrame) -> None:
    plain = numbers[numbers["printed"].str.fullmatch(r"-?\d+(\.\d+)?") & numbers["value"].notna()]
    assert len(plain) > 250
    assert (plain["printed"].astype(float) == plain["value"]).all()


def test_printed_text_is_kept_as_text(numbers: pd.DataFrame) -> None:
    zeus = numbers[(numbers["subject"] == "vllm-9471") & (numbers["quantity"] == "rank_zeus")]
    assert zeus["printed"].tolist() == ["-"]
    sglang = numbers[numbers["subject"] == "workload=Llama-3-8B (512,0) | system=SGLang"]
    assert sglang["printed"].tolist() == ["1.00"]


def test_no_cell_names_a_machine_or_a_private_source() -> None:
    for path in [*FILES, *FOLDER.glob("*/source.toml")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search("seed", text, re.IGNORECASE), path
        assert not re.search(r"(^|[\s\"'(=,;:])(/[\w.+-]+/|~/|[A-Za-z]:\\)", text, re.MULTILINE), path


@pytest.mark.parametrize("anchor", ANCHORS.strip().splitlines())
def test_anchor(anchor: str) -> None:
    paper, item, subject, quantity, unit, column, number = anchor.split("; ")
    table = published.load(paper, item)
    row = table[(table["subject"] == subject) & (table["quantity"] == quantity) & (table["unit"] == unit)]
    assert row[column].tolist() == [float(number)]


def test_the_caller_can_see_what_could_not_be_had() -> None:
    table = published.load("negativa_ml", "Table 8")
    assert table["status"].unique().tolist() == ["missing"]
    assert len(table) == 10


@pytest.mark.parametrize("paper", published.papers())
def test_source_lists_every_item_with_what_is_missing(paper: str) -> None:
    source = published.source(paper)
    assert {"paper", "year", "arxiv", "read", "how", "licence", "items"} <= set(source)
    assert sorted(i["item"] for i in source["items"]) == sorted(published.load(paper)["item"].unique())
    assert all(i["missing"] for i in source["items"])


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(GpubloatError) as paper:
        published.load("gmlak")
    assert "gmlake" in str(paper.value.hint)
    with pytest.raises(GpubloatError) as item:
        published.load("magneton", "Table 99")
    assert "Table 4" in str(item.value.hint)
    with pytest.raises(GpubloatError):
        published.source("nobody")


def test_the_data_of_a_wheel_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lib" / "gpubloat"
    monkeypatch.setattr(published, "__file__", str(package / "published.py"))
    with pytest.raises(GpubloatError, match="not installed"):
        published.papers()
    shutil.copytree(FOLDER / "ibp", tmp_path / "lib" / "data" / "published" / "ibp")
    assert published.papers() == ["ibp"]
    shutil.copytree(FOLDER / "gmlake", package / "_data" / "published" / "gmlake")
    assert published.papers() == ["gmlake"]
