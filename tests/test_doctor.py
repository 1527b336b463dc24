"""What `gpubloat doctor` finds on machines with and without a driver, and with several builds of PyTorch."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from gpubloat import doctor
from gpubloat.doctor import Check
from tests.energy.fakenvml import DRIVER_NOT_LOADED, Card, FakeNvml


class Installed:
    """A distribution of PyTorch whose files lie in `folder`."""

    version = "2.13.0"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def locate_file(self, path: str) -> Path:
        return self.folder / path


def nvml(monkeypatch: pytest.MonkeyPatch, fake: FakeNvml) -> None:
    """nvidia-ml-py is installed, and is this."""
    version = importlib.metadata.version
    metadata = type("M", (), {"metadata": {"Name": "nvidia-ml-py"}})
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [metadata])
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "13.0" if n == "nvidia-ml-py" else version(n))
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]


def test_nvml_counts_only_if_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(monkeypatch, FakeNvml(Card(), init=DRIVER_NOT_LOADED))
    found = doctor._nvml()
    assert (found.state, found.found) == ("no", "nvidia-ml-py 13.0, but NVML does not start: Driver Not Loaded")
    assert "need the NVIDIA driver" in found.remedy
    fake = FakeNvml(Card(), Card())
    nvml(monkeypatch, fake)
    assert doctor._nvml() == Check("NVML", "yes", "nvidia-ml-py 13.0, 2 GPUs")
    assert (fake.n_inits, fake.n_open) == (1, 0)


@pytest.mark.parametrize(
    ("about", "state", "found"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "limited", "2.13.0, a build for CPUs alone"),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "yes", "2.13.0, built for cuda 13.0"),
        ("cuda = None\nhip = '6.4.1'\n", "yes", "2.13.0, built for hip 6.4.1"),
        (None, "yes", "2.13.0"),
    ],
)
def test_the_build_of_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, about: str | None, state: str, found: str
) -> None:
    if about is not None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "version.py").write_text(about, "utf-8")
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: Installed(tmp_path))
    assert doctor._torch()[1:3] == (state, found)


def test_what_torch_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    found = doctor._torch()
    assert (found.state, found.found) == ("no", "not installed")
    assert "`energy` (or JAX)" in found.remedy
    assert found.remedy.endswith(": pip install torch")
