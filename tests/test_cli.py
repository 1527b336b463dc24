"""The command: exit codes, one sentence and a hint, refusals before work, JSON that parses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest


def gpubloat(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "gpubloat", *words], capture_output=True, text=True, cwd=cwd)


@pytest.fixture(scope="module")
def library() -> str:
    """A small real shared library that every test environment has."""
    import lz4.block

    return next(str(p) for p in Path(lz4.block.__file__).parent.glob("_block*.so"))


def test_scan_prints_a_table_and_writes_csv_and_run(library: str, tmp_path: Path) -> None:
    done = gpubloat("libraries", "scan", library, "--csv", str(tmp_path / "csv"), "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert Path(library).name in done.stdout
    table = pd.read_csv(tmp_path / "csv" / "libraries.csv")
    wanted = ["library", "file_bytes", "cpu_code_bytes", "gpu_code_bytes", "n_functions", "n_elements"]
    assert set(wanted) <= set(table.columns)
    assert table["file_bytes"].tolist() == [Path(library).stat().st_size]
    assert {p.name for p in (tmp_path / "run").iterdir()} >= {"run.json", "elements.parquet"}
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert str(tmp_path) not in json.dumps(record)
    assert str(Path(library).parent) not in json.dumps(record)

    again = gpubloat("libraries", "scan", library, "--csv", str(tmp_path / "csv"))
    assert again.returncode == 1
    assert "not empty" in again.stderr
    assert "hint" in again.stderr
    forced = gpubloat("libraries", "scan", library, "--csv", str(tmp_path / "csv"), "--force")
    assert forced.returncode == 0


def test_json_is_one_object(library: str) -> None:
    done = gpubloat("libraries", "scan", library, "--json", "--target", "sm_90")
    answer = json.loads(done.stdout)
    assert answer["file_bytes"] == Path(library).stat().st_size
    assert answer["n_kernels"] is None
    assert [row["library"] for row in answer["libraries"]] == [Path(library).name]
    assert answer["target"] == "sm_90"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("libraries", "scan", "no-such-thing"), "no such file or folder"),
        (("libraries", "scan", __file__), "no ELF file"),
        (("libraries", "scan", ".", "--target", "hopper"), "is no compute capability"),
        (("report", "no-such-run", "--html", "x.html"), "no run folder"),
        (("reproduce", "--notebooks", "no-such-folder"), "no notebooks"),
    ],
)
def test_bad_input_is_one_sentence_and_a_hint(words: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    done = gpubloat(*words, cwd=tmp_path)
    assert done.returncode == 1
    first, hint = done.stderr.strip().splitlines()
    assert first.startswith("gpubloat: ")
    assert sentence in first
    assert hint.startswith("  hint: ")
    assert done.stdout == ""


@pytest.mark.parametrize("words", [("libraries", "scan"), ("nonsense",), ("libraries", "scan", ".", "--jobs", "0")])
def test_bad_usage_is_exit_2(words: tuple[str, ...]) -> None:
    assert gpubloat(*words).returncode == 2


def test_hostile_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "evil\x1b[31m[bold]\n.so").write_bytes(b"\x7fELF\x02\x01\x01" + bytes(5))
    done = gpubloat("libraries", "scan", str(tmp_path))
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "[bold]" in done.stdout


def test_an_empty_folder_says_why(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("no library")
    done = gpubloat("libraries", "scan", str(tmp_path), "--out", str(tmp_path / "run"))
    assert done.returncode == 1
    assert "none of the 1 files" in done.stderr
    reason = json.loads((tmp_path / "run" / "run.json").read_text())["empty"]["libraries"]
    assert "none of the 1 files" in reason


def test_report_is_one_self_contained_page(library: str, tmp_path: Path) -> None:
    gpubloat("libraries", "scan", library, "--out", str(tmp_path / "run"), "--target", "sm_90")
    done = gpubloat("report", str(tmp_path / "run"), "--html", str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    assert "data:image/png;base64," in page
    assert "http" not in page
    assert gpubloat("report", str(tmp_path / "run"), "--html", str(tmp_path / "page.html")).returncode == 1


def test_report_of_rates_measured_on_a_gpu(tmp_path: Path) -> None:
    run = Path(__file__).parents[1] / "data" / "measured" / "tensors-h200"
    done = gpubloat("report", str(run), "--html", str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    assert "Rates of matrices" in page
    assert page.count("data:image/png;base64,") == 1


def test_doctor_and_version() -> None:
    checks = json.loads(gpubloat("doctor", "--json").stdout)
    assert {c["state"] for c in checks} <= {"yes", "no", "limited"}
    assert all(c["remedy"] for c in checks if c["state"] != "yes")
    assert gpubloat("--version").stdout.startswith("gpubloat ")
