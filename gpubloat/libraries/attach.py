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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpubloat.errors import GpubloatError
from gpubloat.native import build, headers
from gpubloat.run import refuse_overwrite

AUDIT_SOURCES = tuple(f"audit/{name}.c" for name in ("audit", "log", "sites", "plant", "swap", "trap", "waits"))
_TO_US = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_TO_ALL = [getattr(signal, name) for name in ("SIGINT", "SIGQUIT") if hasattr(signal, name)]
OURS = ("GPUBLOAT_DIR", "GPUBLOAT_FUNCTIONS", "GPUBLOAT_PAGES", "GPUBLOAT_PLAN", "GPUBLOAT_GUARD")


def audit_library() -> Path:
    """The compiled audit library. GpubloatError where the dynamic loader has no such interface."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        raise GpubloatError(
            "running programs under observation needs Linux on x86-64 with glibc",
            "run it on the machine that has the GPU, and read the run folder here",
        )
    return build.library("audit", AUDIT_SOURCES)


def is_injection(path: str) -> bool:
    """Whether a library that a command loaded is the compiled CUPTI injection, no part of the command."""
    return Path(path).name.startswith("cupti-") and Path(path).parent == build.cache().resolve()


def audited(given: Mapping[str, str], **variables: str) -> dict[str, str]:
    """`given` with the audit library in front of others, and our variables; those that are not named are removed."""
    env = {name: value for name, value in given.items() if name not in OURS}
    ours = str(audit_library())
    others = [name for name in given.get("LD_AUDIT", "").split(":") if name not in ("", ours)]  # we run inside another
    env["LD_AUDIT"] = ":".join([ours, *others])
    return env | variables


def run(command: Sequence[str], env: Mapping[str, str], stdout: int | None = None) -> int:
    """Run `command` with our stdin, stdout and stderr; its exit status (negative: the signal that ended it).

    GpubloatError if it cannot be started. What a terminal or a service manager sends to end us goes to the command,
    which decides; we end after it, and leave nothing behind.
    """
    if not command:
        raise GpubloatError("no command was given", "write it behind --, as in: -- python train.py")
    if shutil.which(command[0], path=env.get("PATH")) is None:
        raise GpubloatError(f"{command[0]} is no program that can be run", "check its name, or give its whole path")
    with _passing_signals() as started:
        try:
            process = subprocess.Popen(list(command), env=dict(env), stdout=stdout)
        except OSError as error:
            raise GpubloatError(f"{command[0]} cannot be started: {error.strerror}") from None
        started(process)
        return process.wait()


@contextmanager
def _passing_signals() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Signals that would end us go to the process that the block names, also those that came before it did.

    A terminal sends SIGINT and SIGQUIT to the command itself. A signal that is ignored (nohup) stays so, here and
    there; a handler, unlike that, does not survive exec.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda _: None  # only the main thread gets signals, and only it may say what they do
        return
    waiting: list[int] = []
    running: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: object) -> None:
        if number in _TO_US and not running:
            waiting.append(number)
        elif number in _TO_US:
            running[0].send_signal(number)

    def started(process: subprocess.Popen[bytes]) -> None:
        running.append(process)
        for number in waiting:
            process.send_signal(number)

    before = {number: signal.getsignal(number) for number in (*_TO_US, *_TO_ALL)}
    before = {number: how for number, how in before.items() if how not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, pass_on)
    try:
        yield started
    finally:
        for number, how in before.items():
            signal.signal(number, how)


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
    try:
        return headers.injection(), ""
    except GpubloatError as error:
        return None, f"{error.message} ({error.hint})" if error.hint else error.message
