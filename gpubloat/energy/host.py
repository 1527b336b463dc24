"""What the host spends: joules of the processors by RAPL, CPU seconds of this process. None where it cannot be read."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
# Packages, and the memory beside them. Cores are part of a package, psys and the mmio zones count packages again.
_PACKAGE, _PART = re.compile(r"intel-rapl:\d+$"), re.compile(r"intel-rapl:\d+:\d+$")


@dataclass
class _Zone:
    name: str
    file: Path
    range_uj: int
    last_uj: int
    sum_uj: int = 0


class HostEnergy:
    """Joules of all processor packages and their memory since the object was made, as RAPL of Linux counts them.

    A counter wraps around at `max_energy_range_uj`, after some minutes at full power: `joules` has to be called more
    often than that.

    Attributes
    ----------
    reason : why there are no joules, None if there are. Most systems let only root read the counters.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self.reason: str | None = None
        self._zones: list[_Zone] = []
        try:
            folders = sorted(root.iterdir())
        except OSError:
            self.reason = "this system has no /sys/class/powercap"
            return
        try:
            for folder in folders:
                name = _name(folder)
                if name is not None:
                    limit = int((folder / "max_energy_range_uj").read_text())
                    file = folder / "energy_uj"
                    self._zones.append(_Zone(name, file, limit, int(file.read_text())))
        except PermissionError:
            self.reason = "energy counters of the processors may be read by root only"
        except (OSError, ValueError) as error:
            self.reason = f"energy counters of the processors cannot be read: {error}"
        if self.reason is None and not self._zones:
            self.reason = "this system counts no energy of its processors (RAPL)"

    def joules(self) -> float | None:
        """Since the object was made; None if a counter cannot be read, now or at any time before."""
        if self.reason is not None:
            return None
        try:
            for zone in self._zones:
                now = int(zone.file.read_text())
                # The largest value is reached: one more is 0.
                zone.sum_uj += (now - zone.last_uj) % (zone.range_uj + 1)
                zone.last_uj = now
        except (OSError, ValueError) as error:
            self.reason = f"energy counters of the processors cannot be read any more: {error}"
            return None
        return sum(zone.sum_uj for zone in self._zones) / 1e6


def _name(folder: Path) -> str | None:
    """What the zone is, if it is one that is summed."""
    if not (_PACKAGE.match(folder.name) or _PART.match(folder.name)):
        return None
    name = (folder / "name").read_text().strip()
    if _PACKAGE.match(folder.name):
        return name if name.startswith("package") else None
    return name if name == "dram" else None


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended and were waited for, user and system."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system
