"""The environment that attaches the native libraries to a command, and running it there.

Variables (read by `native/audit/audit.c` and `native/cupti.c`): LD_AUDIT and CUDA_INJECTION64_PATH load them;
GPUBLOAT_DIR is where they write; GPUBLOAT_FUNCTIONS, GPUBLOAT_PAGES, GPUBLOAT_PLAN, GPUBLOAT_GUARD say what to do.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpubloat.errors import GpubloatError, MissingToolError
from gpubloat.native import build
from gpubloat.run import refuse_overwrite

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
    if threading.current_thread() is not threading.main_thread():
        return process.wait()  # only the main thread gets signals, and only it may say what they do
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGINT, before)


def check_out(out: str | os.PathLike[str], force: bool) -> None:
    """GpubloatError if a run cannot be kept in `out`: said before a command that may run for hours, not after it."""
    folder = Path(os.path.abspath(out))
    refuse_overwrite(folder, force)
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "may not be written" if there.is_dir() else "is a file"
        raise GpubloatError(f"{out} cannot be written: {there} {why}", "name another folder")


def cupti_library() -> tuple[Path | None, str]:
    """The compiled CUPTI injection, or None and why there is none."""
    from gpubloat.native import headers

    try:
        return build.library("cupti", ["cupti.c"], headers.flags()), ""
    except (MissingToolError, GpubloatError) as error:
        return None, f"{error.message} ({error.hint})" if error.hint else error.message
