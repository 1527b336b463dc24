"""Find the headers of CUDA and CUPTI, and libcupti: in NVIDIA's wheels, else in an installed toolkit."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gpubloat.errors import MissingToolError
from gpubloat.native import build

TOOLKIT = Path("/usr/local/cuda")
# One file of each package: they come apart as nvidia-cuda-runtime and nvidia-cuda-cupti, with CUDA 13 into one folder.
_NEEDED = ("cuda.h", "cupti_callbacks.h")


def folders() -> list[Path]:
    """Folders to compile `cupti.c` with. MissingToolError if the headers are not to be found.

    CUPTI's headers name types of their own CUDA version, so both are taken from one installation where one has both.
    """
    groups = _installations("include", "extras/CUPTI/include", "targets/x86_64-linux/include")
    for group in [*groups, [folder for each in groups for folder in each]]:
        found = [next((f for f in group if (f / name).is_file()), None) for name in _NEEDED]
        if None not in found:
            return list(dict.fromkeys(f for f in found if f is not None))
    raise MissingToolError("the CUPTI headers", "pip install nvidia-cuda-cupti nvidia-cuda-runtime")


def flags() -> list[str]:
    """What the compiler needs for `cupti.c` beside the usual flags."""
    return [*(f"-I{folder}" for folder in folders()), "-ldl", "-pthread"]


def injection() -> Path:
    """The CUPTI injection library, compiled if need be: the value of CUDA_INJECTION64_PATH.

    Raises MissingToolError without headers or compiler, GpubloatError if it does not compile.
    """
    return build.library("cupti", ["cupti.c"], flags())


def libcupti() -> Path | None:
    """The newest libcupti of an installation, for programs that bring none; None if there is none."""
    for group in _installations("lib", "lib64", "extras/CUPTI/lib64"):
        names = ("libcupti.so.13", "libcupti.so.12", "libcupti.so")
        for path in (folder / name for name in names for folder in group):
            if path.is_file():
                return path
    return None


def _installations(*inside: str) -> list[list[Path]]:
    """Folders that can hold headers (or libraries), in groups that belong together: wheels first, then toolkits."""
    groups = []
    for entry in dict.fromkeys(sys.path):
        wheels = Path(entry or ".") / "nvidia"
        # cu13 holds all of CUDA 13; CUDA 12 has a folder for each wheel.
        names = sorted((p.name for p in wheels.glob("cu[0-9]*")), reverse=True)
        groups += [[wheels / name / inside[0]] for name in names]
        groups.append([wheels / name / inside[0] for name in ("cuda_cupti", "cuda_runtime")])
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    groups += [[home / name for name in inside] for home in [*homes, TOOLKIT]]
    return [group for group in groups if any(folder.is_dir() for folder in group)]
