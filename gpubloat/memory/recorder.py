"""Record what PyTorch's allocator does: around a block of code, or around a whole command and its children."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpubloat.errors import DeviceError, GpubloatError, MissingToolError
from gpubloat.memory import agent

MAX_ENTRIES = 1_000_000
STACKS = ("python", "all")
HOOK = Path(__file__).parent / "hook"

Files = dict[Path, tuple[int, int] | None]  # what tells a file from one that replaced it: inode, and time in ns


@dataclass
class Recording:
    """A recording, and what it cost, once it is over; `about` is also in ``<path>.json``.

    `about`: reason (end, exception, exit, oom), n_entries per GPU, max_entries, is_ring_full, was_recording (the
    history was on before: its settings were left alone, and it goes on), snapshot_s, write_s, file_bytes,
    oom_snapshot (name of the file with the state at the first out-of-memory error), versions.
    """

    path: Path
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether the snapshot is there and its history was not full."""
        return bool(self.about) and not self.about["is_ring_full"]


@contextmanager
def record(
    path: str | os.PathLike[str], *, max_entries: int = MAX_ENTRIES, stacks: str = "python", force: bool = False
) -> Iterator[Recording]:
    """Record the allocator's history while the block runs, and save a snapshot at its end.

    Parameters
    ----------
    path : file for the snapshot: a pickle of protocol 4, written whole or not at all, also if the block raises. At
        the first out-of-memory error the state of that moment goes to ``<stem>.oom<suffix>``, too.
    max_entries : how many events are kept per GPU; older ones are dropped, and `about` says so.
    stacks : ``"python"``, about 2 µs per allocation, or ``"all"`` with C++ frames, which take minutes to name.
    force : replace the file, and remove all others of an older recording, once there is a new snapshot.

    Raises
    ------
    MissingToolError : no PyTorch. DeviceError : PyTorch has no CUDA, or there is no GPU. GpubloatError : the file
    exists, or the block did not use CUDA.

    CUDA is not initialised here: recording starts when the block does that. A history that was on before is left on.
    """
    place, old = _checked(path, max_entries, stacks, force)
    torch = _torch()
    if agent._current is not None:
        raise GpubloatError("the memory of this process is being recorded already", "end that recording first")
    recording = Recording(place)
    recorder = agent.Recorder(torch, str(place), max_entries, stacks)
    recorder.begin()
    try:
        yield recording
    except BaseException:
        _save(recorder, recording, "exception", torch)
        raise
    else:
        _save(recorder, recording, "end", torch)
        if not recorder.is_started:
            raise GpubloatError("nothing was recorded: the block did not use CUDA", "put the work on a GPU into it")
    finally:
        recorder.end()
        if recorder.about:
            _remove(old)


def _save(recorder: agent.Recorder, recording: Recording, reason: str, torch: Any) -> None:
    if not recorder.is_started:
        return
    if reason == "exception" and isinstance(sys.exc_info()[1], getattr(torch.cuda, "OutOfMemoryError", ())):
        reason = "oom"
    try:
        recording.about = recorder.save(reason)
    except OSError as error:
        if reason == "end":
            raise GpubloatError(f"{recording.path} cannot be written: {error.strerror}") from None
        print(f"gpubloat: {recording.path} was not written: {error}", file=sys.stderr)  # the block's own error goes on


def _torch() -> Any:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise MissingToolError("PyTorch", "pip install torch") from None
    if not (getattr(torch.version, "cuda", None) or getattr(torch.version, "hip", None)):
        raise DeviceError(
            "unsupported", "this PyTorch has no CUDA, so there is nothing to record", "install a build for CUDA"
        )
    if not torch.cuda.is_available():
        raise DeviceError("absent", "PyTorch finds no GPU, so there is nothing to record", "see gpubloat doctor")
    return torch


def _checked(path: str | os.PathLike[str], max_entries: int, stacks: str, force: bool) -> tuple[Path, Files]:
    """The file's whole name, and what is there of an older recording."""
    place = Path(path).absolute()
    if stacks not in STACKS:
        raise GpubloatError(f"stacks={stacks!r}", f"known: {', '.join(STACKS)}")
    if isinstance(max_entries, bool) or not isinstance(max_entries, int) or not 1 <= max_entries < 1 << 40:
        raise GpubloatError(f"max_entries={max_entries}: a number of events is wanted")
    if place.is_dir():
        raise GpubloatError(f"{place} is a folder", "name a file, such as run.pickle")
    if not place.parent.is_dir():
        raise GpubloatError(f"{place.parent} is no folder", "make it first")
    old = snapshots(place)
    if old and not force:
        raise GpubloatError(f"{old[0]} exists", "name another file, or add --force (in Python, force=True)")
    return place, {file: _identity(file) for file in old}


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _remove(old: Files) -> None:
    """What is left of an older recording when there is a newer one: the two are not to be mixed up."""
    for file, identity in old.items():
        if identity is not None and _identity(file) == identity:
            file.unlink()
            Path(f"{file}.json").unlink(missing_ok=True)


def snapshots(path: Path) -> list[Path]:
    """The snapshots of one recording: `path`, those of its other processes, and those of out-of-memory errors."""
    name = re.compile(_names(path))
    found = [p for p in path.parent.iterdir() if name.fullmatch(p.name) and p.is_file()]
    return sorted(found, key=lambda p: (p.name != path.name, len(p.name), p.name))


def _names(path: Path) -> str:
    stem, suffix = os.path.splitext(path.name)
    return rf"{re.escape(stem)}(\.[0-9]+)?(\.oom)?{re.escape(suffix)}"


@dataclass(frozen=True)
class Recorded:
    """What a command left: its exit status (negative: the signal), its snapshots, and how many were lost."""

    status: int
    snapshots: tuple[Path, ...]
    n_lost: int  # processes that started to record and ended without Python's exit


def run(
    command: Sequence[str],
    path: str | os.PathLike[str],
    *,
    max_entries: int = MAX_ENTRIES,
    stacks: str = "python",
    force: bool = False,
    env: Mapping[str, str] | None = None,
) -> Recorded:
    """Run a command unchanged, and record each of its Python processes that starts CUDA.

    The recorder comes in by PYTHONPATH, so it also reaches what a launcher starts (torchrun, accelerate, spawned
    workers); ``python -I``, ``-E`` and ``-S`` keep it out. The first process to start CUDA gets `path`, the others
    ``<stem>.1<suffix>``, ``<stem>.2<suffix>``... A process ends by its own exit or exception, or its history is lost.
    With `force`, an older recording is replaced once there is a new snapshot, and kept if there is none.

    Raises
    ------
    GpubloatError : nothing to run, the program is not there, or the file exists and `force` is not set.
    """
    if not command:
        raise GpubloatError("no command is given", "put it behind two dashes: -- python train.py")
    place, old = _checked(path, max_entries, stacks, force)
    run_id = agent.new_run()
    variables = dict(os.environ if env is None else env)
    before = variables.get("PYTHONPATH")
    variables |= {
        "PYTHONPATH": os.pathsep.join([str(HOOK), *([before] if before else [])]),
        agent.OUT: str(place),
        agent.MAX_ENTRIES: str(max_entries),
        agent.STACKS: stacks,
        agent.RUN: run_id,
        agent.FORCE: "1" if force else "",
    }
    try:
        process = subprocess.Popen(list(command), env=variables)
    except OSError as error:
        raise GpubloatError(f"{command[0]} cannot be run: {error.strerror}") from None
    try:
        status = _wait(process)
    finally:
        written, n_lost = _collect(place, run_id)
        if written:
            _remove(old)
    return Recorded(status, tuple(file for file in snapshots(place) if file.name in written), n_lost)


def _collect(place: Path, run_id: str) -> tuple[set[str], int]:
    """The names that this command's processes wrote, and how many of them did not end; removes what they left."""
    left = re.compile(rf"(?P<of>{_names(place)})(\.json)?\.{run_id}(?P<kind>{agent.PART}|{agent.CLAIM})")
    written: set[str] = set()
    n_lost = 0
    for file in list(place.parent.iterdir()):
        match = left.fullmatch(file.name)
        if match is None:
            continue
        if match["kind"] == agent.CLAIM:
            notes = file.read_bytes().split(b"\0")[:-1]
            written |= {os.fsdecode(note) for note in notes if note != agent.END}
            n_lost += agent.END not in notes
        file.unlink(missing_ok=True)
    return written, n_lost


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The status of the command. Ctrl-C reaches it through the terminal; it ends as it likes."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue
        except BaseException:
            process.terminate()
            process.wait()
            raise
