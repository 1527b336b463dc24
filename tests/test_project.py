"""The repository keeps its promises: catalog, notebooks, README and environment say what is there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# A path of somebody's machine; /usr/local/cuda in README is everybody's.
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|work|tmp|Users|mnt|opt)/\w")


def test_the_catalog_lists_every_file_as_it_is() -> None:
    subprocess.run([sys.executable, str(ROOT / "campaigns" / "catalog.py"), "--check"], check=True)


def test_measured_runs_are_named_and_described() -> None:
    for path in (ROOT / "data" / "measured").iterdir():
        record = json.loads((path / "run.json").read_text("utf-8"))
        assert record["command"]
        assert record["packages"]
        assert not MACHINE_PATH.search(json.dumps(record))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_were_executed_top_to_bottom(path: Path) -> None:
    cells = [c for c in json.loads(path.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]
    assert [c["execution_count"] for c in cells] == list(range(1, len(cells) + 1))
    outputs = [o for c in cells for o in c["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error"]
    assert not [o for o in outputs if o.get("name") == "stderr"]
    assert path.stat().st_size < 1_000_000
    for cell in cells:
        if "style.save(" in "".join(cell["source"]):
            assert any("image/png" in o.get("data", {}) for o in cell["outputs"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_thin_and_name_no_machine(path: Path) -> None:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    assert not [c for c in cells if "pip install" in "".join(c["source"]) and c["cell_type"] == "code"]
    assert not [
        c for c in cells if c["cell_type"] == "code" and re.search(r"^def ", "".join(c["source"]), re.MULTILINE)
    ]
    assert not MACHINE_PATH.search(path.read_text("utf-8"))


def test_every_figure_has_its_numbers_and_is_shown_by_a_notebook() -> None:
    told = "".join(p.read_text("utf-8") for p in NOTEBOOKS)
    figures = sorted((ROOT / "figures").glob("*.png"))
    assert figures
    for path in figures:
        assert path.with_suffix(".csv").exists()
        assert path.with_suffix(".pdf").exists()
        assert json.loads(path.with_suffix(".json").read_text())["source"]
        assert f'\\"{path.stem}\\"' in told


def test_readme_shows_pictures_that_exist_and_commands_that_exist() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert not re.search(r"[A-Z]{4,}_[A-Z]{4,}", text), "a placeholder"
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / link).exists(), link
    verbs = set(re.findall(r"gpubloat ((?:libraries|tensors|memory|energy) \w+|doctor|report|reproduce)", text))
    assert verbs
    for verb in verbs:
        assert (
            subprocess.run([sys.executable, "-m", "gpubloat", *verb.split(), "--help"], capture_output=True).returncode
            == 0
        )


def test_readme_python_runs(sample_wheel: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL):
        code = block.replace('".cache/wheels"', repr(str(sample_wheel)))
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)


def test_environment_is_python_pip_and_this_project() -> None:
    text = (ROOT / "environment.yml").read_text("utf-8")
    floor = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["requires-python"]
    assert f"python{floor}" in text
    listed = re.findall(r"^\s*- (?!pip)(\S+)", text, re.MULTILINE)
    assert listed == [f"python{floor}", "-e"]


def test_every_test_folder_mirrors_the_package() -> None:
    known = {p.name for p in (ROOT / "gpubloat").iterdir() if p.is_dir()} | {"build", "__pycache__"}
    assert {p.name for p in (ROOT / "tests").iterdir() if p.is_dir()} <= known
