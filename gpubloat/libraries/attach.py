"""The environment that attaches the native libraries to a command, and running it there.

Variables (read by `native/audit/audit.c` and `native/cupti.c`): LD_AUDIT and CUDA_INJECTION64_PATH load them;
GPUBLOAT_DIR is where they write; GPUBLOAT_FUNCTIONS, GPUBLOAT_PAGES, GPUBLOAT_PLAN, GPUBLOAT_GUARD say what to do.
"""

from __future__ import annotations

import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpubloat.errors import GpubloatError, MissingToolError
from gpubloat.native import build

AUDIT_SOURCES = tuple(f"audit/{name}.c" for name in ("audit", "log", "sites", "plant", "swap", "trap"))
OURS = ("GPUBLOAT_DIR", "GPUBLOAT_FUNCTIONS", "GPUBLOAT_PAGES", "GPUBLOAT_PLAN", "GPUBLOAT_GUARD")


def audit_library() -> Path:
    """The compiled audit library. GpubloatError where the dynamic loader has no such interface."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        raise GpubloatError(
            "running programs under observation needs Linux on x86-64 with glibc",
            "run it on the machine that has the GPU, and read the run folder here",
        )
    return build.library("audit", AUDIT_SOURCES)


def audited(given: Mapping[str, str], **variables: str) -> dict[str, str]:
    """`given` with the audit library in front of others, and our variables; those that are not named are removed."""
    env = {name: value for name, value in given.items() if name not in OURS}
    env["LD_AUDIT"] = ":".join([str(audit_library()), *filter(None, [given.get("LD_AUDIT")])])
    return env | variables


def run(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run `command` with our stdin, stdout and stderr; its exit status (negative: the signal that ended it).

    GpubloatError if it cannot be started. A keyboard interrupt goes to the command, which decides.
    """
    if not command:
        raise GpubloatError("no command was given", "write it behind --, as in: -- python train.py")
    if shutil.which(command[0], path=env.get("PATH")) is None:
        raise GpubloatError(f"{command[0]} is no program that can be run", "check its name, or give its whole path")
    try:
        process = subprocess.Popen(list(command), env=dict(env))
    except OSError as error:
        raise GpubloatError(f"{command[0]} cannot be started: {error.strerror}") from None
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGINT, before)


def cupti_library() -> tuple[Path | None, str]:
    """The compiled CUPTI injection, or None and why there is none."""
    from gpubloat.native import headers

    try:
        return build.library("cupti", ["cupti.c"], headers.flags()), ""
    except (MissingToolError, GpubloatError) as error:
        return None, f"{error.message} ({error.hint})" if error.hint else error.message
