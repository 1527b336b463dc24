"""The test of a project that watches its energy: it fails, passes, or is skipped with the reason."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpubloat.energy.regression import regression
from gpubloat.errors import GpubloatError
from tests.energy.test_diff import Charged, costing

TEST = """
import pytest

def test_energy(assert_no_energy_regression):
    assert_no_energy_regression(lambda: 1, lambda: 1)

def test_that_needs_no_energy():
    import sys
    assert not {"torch", "pynvml", "pandas"} & set(sys.modules)
"""


def checked(watts: float, **options: Any) -> Any:
    torch, rig = pytest.importorskip("torch"), Charged()
    given = {"meter": rig.meter, "engine": rig, "seconds": 1.0} | options
    new, old = costing(rig, torch.tanh, 2e-3, watts), costing(rig, torch.sinh, 2e-3, 500.0)
    return regression(new, old, torch.ones(4), **given)


def test_more_energy_fails_and_says_how_much() -> None:
    found = checked(600.0)
    assert not found.skipped
    assert re.match(r"takes (1198|1199|1200) mJ a call where the baseline takes", found.failed)
    assert re.search(r"16\.[5-8]% of it would be saved", found.failed)
    assert found.comparison.saved.wasteful == "A"


@pytest.mark.parametrize(("watts", "options"), [(400.0, {}), (510.0, {}), (600.0, {"most_frac": 0.2})])
def test_less_or_little_more_passes(watts: float, options: dict[str, float]) -> None:
    found = checked(watts, **options)
    assert (found.skipped, found.failed) == ("", "")


def test_without_energies_it_is_skipped() -> None:
    torch = pytest.importorskip("torch")
    rig = Charged()
    found = regression(torch.tanh, torch.tanh, torch.ones(4), meter=rig.meter)
    assert found.skipped == "energy is not measured: the function uses no GPU"
    with pytest.raises(GpubloatError, match="most_frac is 5"):
        regression(torch.tanh, torch.tanh, most_frac=5)


def test_without_a_gpu_the_fixture_skips(tmp_path: Path) -> None:
    """In a program of its own; the plugin imports nothing until it is asked."""
    (tmp_path / "test_it.py").write_text(TEST)
    plugin = ["-p", "no:gpubloat", "-p", "gpubloat.energy.pytestplugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-rs", *plugin, "test_it.py::test_that_needs_no_energy"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['pynvml'] = None")
    command[-1] = "test_it.py::test_energy"
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env={"PYTHONPATH": f"{tmp_path}:."}
    )
    assert "1 skipped" in done.stdout, done.stdout + done.stderr
    assert "energy is not measured: nvidia-ml-py is not installed" in done.stdout
