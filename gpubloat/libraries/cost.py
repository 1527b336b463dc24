"""What a command costs: wall time, peak memory of its processes and of the GPU; and a digest of what it prints."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import pandas as pd

from gpubloat.errors import GpubloatError
from gpubloat.libraries import launcher
from gpubloat.libraries.sampling import INTERVAL_S, gpu_memory, sampled

TAIL_BYTES = 64 << 10
LINE_BYTES = 1 << 20  # a longer line is matched in pieces
MISSING = "-"
METHOD = {
    "wall_s": "monotonic clock from fork to the exit of the command",
    "peak_rss_bytes": "ru_maxrss of the command and of every descendant, the largest; floor: 10 MB of the launcher",
    "peak_gpu_bytes": (
        "NVML: memory of the command's processes on the visible GPUs; where it does not list them, used memory of "
        f"these GPUs minus the level before; read every {INTERVAL_S * 1e3:.0f} ms, what is taken and freed between two "
        "looks is missed"
    ),
}


class Cost(NamedTuple):
    """One run of a command.

    `exit_status` is negative for the signal that ended it. `peak_rss_bytes` is the largest resident set of any single
    process; `peak_tree_bytes` the largest sum over the processes, sampled, in which pages that processes share count
    for each (None where /proc does not tell). `peak_gpu_bytes` is None without NVML or without a visible GPU,
    and of the command's own processes where NVML lists them: others may use the same GPU. `peak_gpu_of` says which:
    "processes", "gpus", None if neither was seen.
    `files_sha256` has one digest a file, in order, `MISSING` for one that the command did not write.
    """

    exit_status: int
    wall_s: float
    peak_rss_bytes: int
    peak_tree_bytes: int | None
    peak_gpu_bytes: int | None
    stdout_sha256: str
    stdout_tail: bytes
    stderr_tail: bytes
    files_sha256: tuple[str, ...]
    is_ended: bool
    peak_gpu_of: str | None = None


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    files: Sequence[str | os.PathLike[str]] = (),
    ignore: Sequence[str] = (),
    limit_s: float | None = None,
    is_stderr_shown: bool = False,
) -> Cost:
    """Run `command` once, with nothing on stdin, and measure it.

    Parameters
    ----------
    env : its whole environment; default, this process's. cwd : where it runs, and where `files` are looked up.
    files : digested after the run; one that the run did not write anew (same inode, mtime and ctime) is `MISSING`.
    ignore : regular expressions; lines of stdout that one of them matches anywhere are left out of digest and tail.
    limit_s : end the command and its descendants after so many seconds (`is_ended`).
    is_stderr_shown : let stderr through; else its last 64 KiB are kept.

    What the command leaves running is ended two seconds after its exit. An exception here, Ctrl-C too, ends all of it.

    Raises
    ------
    GpubloatError : the command cannot be started, or a regular expression is none.
    """
    patterns = compiled(ignore)
    paths = [Path(cwd or ".") / file for file in files]
    stamps = [_stamp(path) for path in paths]
    whole = dict(os.environ if env is None else env)
    if not command:
        raise GpubloatError("there is no command to run", "put it behind --")
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as errors,
        gpu_memory(whole) as used,
        _launched(command, whole, cwd, out, None if is_stderr_shown else errors) as (process, report),
    ):
        with sampled(process.pid, used) as peaks:
            answer, is_ended = _answer(process, report, limit_s)
        status, wall, rss = _parsed(answer, command[0])
        digest, tail = _digest(out, patterns)
        return Cost(
            exit_status=status,
            wall_s=wall,
            peak_rss_bytes=max(rss, peaks.process),
            peak_tree_bytes=None if peaks.tree is None else max(rss, peaks.tree),
            peak_gpu_bytes=peaks.gpu,
            stdout_sha256=digest,
            stdout_tail=tail,
            stderr_tail=b"" if is_stderr_shown else _tail(errors),
            files_sha256=tuple(_file_digest(p) if _stamp(p) != s else MISSING for p, s in zip(paths, stamps)),
            is_ended=is_ended,
            peak_gpu_of=peaks.gpu_of,
        )


def measure(
    command: Sequence[str],
    variants: Mapping[str, Mapping[str, str]],
    *,
    repeat: int = 5,
    cwd: str | os.PathLike[str] | None = None,
) -> pd.DataFrame:
    """Run `command` in several environments, `repeat` rounds, every other round in reverse order.

    `variants` gives a name to the variables added to this process's environment. One row = one run: variant, repeat,
    wall_s, peak_rss_bytes, peak_gpu_bytes (Int64, empty without a GPU), exit_status.
    """
    rows = []
    for number in range(repeat):
        for name in list(variants) if number % 2 == 0 else list(variants)[::-1]:
            cost = run(command, env={**os.environ, **variants[name]}, cwd=cwd)
            rows.append((name, number, cost.wall_s, cost.peak_rss_bytes, cost.peak_gpu_bytes, cost.exit_status))
    columns = ["variant", "repeat", "wall_s", "peak_rss_bytes", "peak_gpu_bytes", "exit_status"]
    return pd.DataFrame(rows, columns=columns).astype({"peak_gpu_bytes": "Int64"})


def compiled(ignore: Sequence[str]) -> list[re.Pattern[str]]:
    """The regular expressions; GpubloatError names the one that is none."""
    patterns = []
    for text in ignore:
        try:
            patterns.append(re.compile(text))
        except re.error as error:
            raise GpubloatError(f"{text!r} is no regular expression: {error}") from None
    return patterns


@contextlib.contextmanager
def _launched(
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: str | os.PathLike[str] | None,
    out: IO[bytes],
    errors: IO[bytes] | None,
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The launcher, told what to run, and the end of the pipe where it will report; ends it with the block."""
    words = [str(len(command)), *command, *(f"{name}={value}" for name, value in env.items())]
    if any("\0" in word for word in words):
        raise GpubloatError("the command or its environment has a NUL character in it")
    orders, order = os.pipe()
    report, reported = os.pipe()
    try:
        # Not the command's environment: what is preloaded there is not meant for the launcher.
        own = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PATH") if name in os.environ}
        argv = [sys.executable, "-I", "-S", launcher.__file__, str(orders), str(reported)]
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                pass_fds=(orders, reported),
                process_group=0,
                env=own,
                cwd=cwd,
            )
        except OSError as error:
            raise GpubloatError(f"{command[0]} cannot be run: {error.strerror}: {error.filename}") from None
        os.close(reported)
        reported = -1
        try:
            with contextlib.suppress(BrokenPipeError), open(order, "wb", closefd=False) as file:
                file.write("\0".join(words).encode("utf-8", "surrogateescape"))
            os.close(order)
            order = -1
            yield process, report
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait()
    finally:
        for handle in (orders, order, report, reported):
            if handle >= 0:
                os.close(handle)


def _answer(process: subprocess.Popen[bytes], report: int, limit_s: float | None) -> tuple[str, bool]:
    """What the launcher reports, and whether the time was up before."""
    is_ended = not select.select([report], [], [], limit_s)[0]
    if is_ended:
        process.send_signal(signal.SIGTERM)
    answer = b""
    while piece := os.read(report, 4096):
        answer += piece
    return answer.decode("ascii"), is_ended


def _parsed(answer: str, program: str) -> tuple[int, float, int]:
    """Exit status, seconds, bytes."""
    match answer.split():
        case ["exec", number, *_]:
            is_absent = int(number) in (errno.ENOENT, errno.ENOTDIR)
            hint = "look at the spelling and at PATH" if is_absent else None
            raise GpubloatError(f"{program} cannot be run: {os.strerror(int(number))}", hint)
        case [status, wall, kib]:
            return int(status), float(wall), int(kib) << 10
        case _:
            raise GpubloatError(f"{program} ended and took the process that measured it along")


def _digest(file: IO[bytes], ignore: Sequence[re.Pattern[str]]) -> tuple[str, bytes]:
    """sha256 and last 64 KiB of a file, in bounded memory, without the lines that `ignore` matches."""
    digest, tail = hashlib.sha256(), b""
    file.seek(0)
    if not ignore:
        while piece := file.read(LINE_BYTES):
            digest.update(piece)
        return digest.hexdigest(), _tail(file)
    while line := file.readline(LINE_BYTES):
        text = line.decode("utf-8", "replace")
        if not any(pattern.search(text) for pattern in ignore):
            digest.update(line)
            tail = (tail + line)[-TAIL_BYTES:]
    return digest.hexdigest(), tail


def _tail(file: IO[bytes]) -> bytes:
    file.seek(max(file.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
    return file.read()


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Changes when a file is written or replaced; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        raise GpubloatError(f"{path} cannot be read: {error.strerror}") from None
