"""Joules of processors from a tree like /sys/class/powercap, and CPU seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubloat.energy.host import HostEnergy, cpu_seconds

RANGE = 262_143_328_850  # of a package of an Intel server


class Zone:
    def __init__(self, root: Path, folder: str, name: str, energy_uj: int, range_uj: int = RANGE) -> None:
        self.folder = root / folder
        self.folder.mkdir(parents=True)
        (self.folder / "name").write_text(f"{name}\n")
        (self.folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
        self.set(energy_uj)

    def set(self, energy_uj: int) -> None:
        (self.folder / "energy_uj").write_text(f"{energy_uj}\n")


def test_packages_and_memory_are_summed_and_nothing_twice(tmp_path: Path) -> None:
    summed = [
        Zone(tmp_path, "intel-rapl:0", "package-0", 100),
        Zone(tmp_path, "intel-rapl:1", "package-1", 200),
        Zone(tmp_path, "intel-rapl:0:1", "dram", 300),
    ]
    others = [
        Zone(tmp_path, "intel-rapl:0:0", "core", 5),
        Zone(tmp_path, "intel-rapl:2", "psys", 5),
        Zone(tmp_path, "intel-rapl-mmio:0", "package-0", 5),
    ]
    (tmp_path / "intel-rapl").mkdir()
    host = HostEnergy(tmp_path)
    assert host.joules() == 0
    for zone, more in zip(summed, (1_000_000, 2_000_000, 500_000), strict=True):
        zone.set(int((zone.folder / "energy_uj").read_text()) + more)
    for zone in others:
        zone.set(9_000_000)
    assert host.joules() == 3.5
    assert host.reason is None


@given(steps=st.lists(st.integers(0, RANGE), min_size=1, max_size=20), start=st.integers(0, RANGE))
def test_joules_are_the_sum_of_all_steps_however_often_it_wraps(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], start: int
) -> None:
    zone = Zone(tmp_path_factory.mktemp("powercap"), "intel-rapl:0", "package-0", start)
    host = HostEnergy(zone.folder.parent)
    level = start
    for step in steps:
        level += step
        zone.set(level % (RANGE + 1))
        host.joules()
    assert host.joules() == sum(steps) / 1e6


def test_no_powercap(tmp_path: Path) -> None:
    host = HostEnergy(tmp_path / "none")
    assert host.joules() is None
    assert "/sys/class/powercap" in str(host.reason)
    assert "counts no energy" in str(HostEnergy(tmp_path).reason)


def test_counters_that_only_root_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Zone(tmp_path, "intel-rapl:0", "package-0", 1)
    read = Path.read_text

    def as_a_user(path: Path, *arguments: str) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *arguments)

    monkeypatch.setattr(Path, "read_text", as_a_user)
    host = HostEnergy(tmp_path)
    assert host.joules() is None
    assert host.reason == "energy counters of the processors may be read by root only"


@pytest.mark.parametrize("broken", ["", "many\n"])
def test_a_counter_that_cannot_be_read_any_more(tmp_path: Path, broken: str) -> None:
    zone = Zone(tmp_path, "intel-rapl:0", "package-0", 1)
    host = HostEnergy(tmp_path)
    (zone.folder / "energy_uj").write_text(broken)
    assert host.joules() is None
    zone.set(2)
    assert host.joules() is None
    assert "cannot be read any more" in str(host.reason)


def test_cpu_seconds_have_those_of_children() -> None:
    before, own = cpu_seconds(), os.times()
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    spent = cpu_seconds() - before
    now = os.times()
    children = now.children_user + now.children_system - own.children_user - own.children_system
    assert children > 0
    assert spent >= children - 0.011  # clock ticks
