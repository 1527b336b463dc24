"""The name of a library in the tables of traced runs, from where it was loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

DRIVER = ("libcuda.so", "libnvidia-", "libcudadebugger")  # the list of native/audit/sites.c
PACKAGES = ("site-packages", "dist-packages")
SYSTEM = ("usr", "lib", "lib64")
LIB = ("lib", "lib64")


def library_name(path: str) -> str:
    """Name of a library that was loaded from the absolute `path`, the same on every machine and without a user's name.

    The path below the innermost site-packages; of system folders the whole path without its slash; elsewhere the path
    from the first folder named lib or lib64, or the last two parts.
    """
    parts = PurePosixPath(path).parts[1:]
    for number in range(len(parts) - 2, -1, -1):
        if parts[number] in PACKAGES:
            return "/".join(parts[number + 1 :])
    if not parts or parts[0] in SYSTEM:
        return "/".join(parts)
    start = next((number for number, part in enumerate(parts[:-1]) if part in LIB), len(parts) - 2)
    return "/".join(parts[max(start, 0) :])


def library_names(paths: Sequence[str]) -> dict[str, str]:
    """Name of each absolute path; where two would have the same one, their whole paths."""
    names = {path: library_name(path) for path in dict.fromkeys(paths)}
    counts = Counter(names.values())
    return {path: name if counts[name] == 1 else path for path, name in names.items()}


def is_driver(path: str) -> bool:
    """Whether a library belongs to the NVIDIA driver, by its name."""
    return PurePosixPath(path).name.startswith(DRIVER)
