"""The name of a library in the tables of traced runs, from where it was loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

DRIVER = ("libcuda.so", "libnvidia-", "libcudadebugger")  # the list of native/audit/sites.c
PACKAGES = ("site-packages", "dist-packages")


def library_name(path: str) -> str:
    """The path below the innermost site-packages, so that runs on different machines agree; else the path itself."""
    parts = PurePosixPath(path).parts
    for number in range(len(parts) - 2, 0, -1):
        if parts[number] in PACKAGES:
            return "/".join(parts[number + 1 :])
    return path.lstrip("/")


def library_names(paths: Sequence[str]) -> dict[str, str]:
    """Name of each path; where two would have the same one, their whole paths."""
    names = {path: library_name(path) for path in paths}
    seen: dict[str, int] = {}
    for name in names.values():
        seen[name] = seen.get(name, 0) + 1
    return {path: name if seen[name] == 1 else path.lstrip("/") for path, name in names.items()}


def is_driver(path: str) -> bool:
    """Whether a library belongs to the NVIDIA driver, by its name."""
    return PurePosixPath(path).name.startswith(DRIVER)
