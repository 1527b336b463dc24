"""A Run keeps its tables and where they came from, and never overwrites or leaves half a run."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pandas as pd
import pytest

from gpubloat import Run
from gpubloat.errors import FormatError, GpubloatError, SchemaError
from gpubloat.run import FLUSH_ROWS, RunWriter, provenance
from gpubloat.tables import schema

PROBLEM = {"library": "a.so", "offset_bytes": 1, "problem": "unreadable", "detail": 'quote " comma , line\nbreak'}


def write(out: Path | None = None, rows: int = 1, force: bool = False) -> Run:
    with RunWriter("libraries", ["problems", "regions"], out, force) as writer:
        for _ in range(rows):
            writer.append("problems", pd.DataFrame([PROBLEM]))
        return writer.finish(provenance("test", {"bytes": "counted"}, []))


def test_round_trip(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    again = Run.load(tmp_path / "run")
    pd.testing.assert_frame_equal(run["problems"], again["problems"])
    assert list(again) == ["problems", "regions"]
    assert again.provenance["command"] == "test"
    assert again.provenance["tables"] == {"problems": 1, "regions": 0}


def test_empty_tables_are_typed(tmp_path: Path) -> None:
    regions = write(tmp_path / "run")["regions"]
    assert len(regions) == 0
    assert list(regions.columns) == list(schema("libraries", "regions").to_schema().columns)
    assert regions["offset_bytes"].dtype == "int64"


def test_csv_round_trip(tmp_path: Path) -> None:
    write(None, rows=3).to_csv(tmp_path / "csv")
    table = pd.read_csv(tmp_path / "csv" / "problems.csv")
    assert table["detail"].tolist() == [PROBLEM["detail"]] * 3
    assert len(pd.read_csv(tmp_path / "csv" / "regions.csv")) == 0
    assert json.loads((tmp_path / "csv" / "run.json").read_text())["instrument"] == "libraries"


def test_no_table_of_an_older_run_stays_and_no_file_of_the_users_goes(tmp_path: Path) -> None:
    place, run = tmp_path / "place", write()
    run.to_csv(place, more={"report_owners": pd.DataFrame({"n": [1]})})
    assert {p.name for p in place.iterdir()} == {"problems.csv", "regions.csv", "report_owners.csv", "run.json"}
    (place / "mine.csv").write_text("a\n1\n")
    (place / "mine.parquet").write_text("mine")
    with RunWriter("libraries", ["elements"], None, False) as writer:
        other = writer.finish(provenance("test", {}, []))
    other.to_csv(place, force=True)
    assert {p.name for p in place.iterdir()} == {"elements.csv", "mine.csv", "mine.parquet", "run.json"}
    run.save(place, force=True)  # a run in the place of an export, and the other way round
    kept = {"mine.csv", "mine.parquet", "run.json"}
    assert {p.name for p in place.iterdir()} == {"problems.parquet", "regions.parquet"} | kept
    (place / "problems.csv").write_text("of the user")
    other.to_csv(place, force=True)
    assert {p.name for p in place.iterdir()} == {"elements.csv", "problems.csv"} | kept
    assert (place / "problems.csv").read_text() == "of the user"


@pytest.mark.parametrize("content", ["nonsense", "[1]", '{"csv": 7}', '{"csv": ["../out", "/x", 3], "tables": {}}'])
def test_a_foreign_run_json_names_nothing_to_remove(tmp_path: Path, content: str) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (tmp_path / "out.csv").write_text("mine")
    (place / "run.json").write_text(content)
    write().to_csv(place, force=True)
    assert (tmp_path / "out.csv").read_text() == "mine"
    assert json.loads((place / "run.json").read_text())["csv"] == ["problems", "regions"]


def test_a_temporary_run_goes_with_its_object() -> None:
    run = write()
    folder = run.folder
    assert folder.exists()
    del run
    gc.collect()
    assert not folder.exists()


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    write(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(GpubloatError, match="not empty"):
        write(tmp_path / "run")
    assert write(tmp_path / "run", rows=2, force=True).provenance["tables"]["problems"] == 2
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    with pytest.raises(GpubloatError, match="is a file"):
        write(tmp_path / "run" / "notes.txt")


def test_a_failed_run_leaves_nothing(tmp_path: Path) -> None:
    folders = []

    def fail() -> None:
        with RunWriter("libraries", ["problems"], tmp_path / "r", False) as writer:
            folders.append(writer.folder)
            writer.append("problems", pd.DataFrame([PROBLEM | {"problem": "no such class"}]))
            writer.finish({})

    with pytest.raises(SchemaError, match="column problem"):
        fail()
    assert not folders[0].exists()
    assert list(tmp_path.iterdir()) == []


def test_large_tables_are_written_in_pieces(tmp_path: Path) -> None:
    piece = pd.DataFrame([PROBLEM] * (FLUSH_ROWS // 2 + 1))
    with RunWriter("libraries", ["problems"], tmp_path / "run", False) as writer:
        for _ in range(3):
            writer.append("problems", piece)
        assert (writer.folder / "problems.parquet").exists()  # the first two went out together
        run = writer.finish({})
    assert len(run["problems"]) == 3 * len(piece)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"tables": 1, "instrument": "libraries"}', "\0"])
def test_a_folder_that_is_no_run(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(FormatError, match=r"not a run\.json"):
        Run.load(tmp_path)
    with pytest.raises(GpubloatError, match="no run folder"):
        Run.load(tmp_path / "absent")


def test_damaged_and_unknown_tables(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    with pytest.raises(SchemaError, match=r"^table kernels is not in this run") as caught:
        run["kernels"]
    assert caught.value.hint == "tables of this run: problems, regions"
    (tmp_path / "run" / "problems.parquet").write_bytes(b"PAR1")
    with pytest.raises(FormatError, match=r"problems\.parquet"):
        Run.load(tmp_path / "run")["problems"]


def test_display_escapes_and_explains(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    run.provenance["empty"] = {"regions": "<none>"}
    page = run._repr_html_()
    assert "&lt;none&gt;" in page
    assert "One row = one thing that was found" in page
    assert repr(run) == "<Run libraries: problems (1), regions (0)>"
