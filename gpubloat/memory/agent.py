"""Recording inside the process whose memory it is: starts PyTorch's history, saves snapshots, says what that cost.

This file is also loaded alone, into programs that have no gpubloat: it needs the standard library and their PyTorch,
and nothing else. It never initialises CUDA, and never stops a history that somebody else started.
"""

from __future__ import annotations

import atexit
import inspect
import json
import os
import pickle
import re
import sys
import time
from typing import Any

OUT, MAX_ENTRIES, STACKS = "GPUBLOAT_MEMORY_OUT", "GPUBLOAT_MEMORY_MAX_ENTRIES", "GPUBLOAT_MEMORY_STACKS"
RUN, FORCE = "GPUBLOAT_MEMORY_RUN", "GPUBLOAT_MEMORY_FORCE"
PROTOCOL = 4  # what viewers read; the default of Python 3.14 is 5
PART, CLAIM = ".part", ".claim"
END = b""  # in a claim: the process came to its end

_observed: set[int] = set()  # ids of torch modules that have our observer: it cannot be taken away again
_current: Recorder | None = None


class Recorder:
    """One recording of this process into one file. `about` is what is stored beside the snapshot.

    `run` is in the names of files that are not yet whole, so that nobody else's are touched; `claim` is the file by
    which a process of a command tells what it wrote.
    """

    def __init__(
        self, torch: Any, path: str, max_entries: int, stacks: str, run: str = "", claim: str | None = None
    ) -> None:
        self.torch = torch
        self.path = path
        self.max_entries = max_entries
        self.stacks = stacks
        self.run = run or new_run()
        self.claim = claim
        self.pid = os.getpid()
        self.is_started = False
        self.is_ours = False
        self.oom_path: str | None = None
        self.about: dict[str, Any] = {}

    def begin(self, is_initialising: bool = False) -> None:
        """Start now if CUDA is initialised or about to be, else as soon as the program does that."""
        global _current
        _current = self
        # While it initialises, PyTorch holds the lock that `_lazy_call` would wait for.
        if is_initialising or self.torch.cuda.is_initialized():
            self.start()
        else:
            self.torch.cuda._lazy_call(self.start)

    def start(self) -> None:
        if self.is_started or _current is not self:
            return
        self.is_started = True
        was_on = getattr(self.torch._C, "_cuda_isHistoryEnabled", None)
        self.is_ours = not (was_on is not None and was_on())
        if self.is_ours:
            switch(self.torch, self.max_entries, self.stacks)
        attach = getattr(self.torch._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is not None and id(self.torch) not in _observed:
            _observed.add(id(self.torch))
            attach(_on_oom)

    def save(self, reason: str, path: str | None = None) -> dict[str, Any]:
        """Write the snapshot and, beside it, a JSON file with what is known about it. Returns the latter's content.

        What was there before is replaced when both are whole, and else left alone.
        """
        before = time.perf_counter()
        snapshot = self.torch.cuda.memory._snapshot()
        taken = time.perf_counter()
        place = path or self.path
        part, about_part = (f"{name}.{self.run}{PART}" for name in (place, f"{place}.json"))
        n_bytes = write(snapshot, part)
        entries = [len(trace) for trace in snapshot.get("device_traces", [])]
        about = {
            "reason": reason,
            "n_entries": entries,
            "max_entries": self.max_entries if self.is_ours else None,
            "is_ring_full": self.is_ours and max(entries, default=0) >= self.max_entries,
            "was_recording": not self.is_ours,
            "stacks": self.stacks if self.is_ours else None,
            "snapshot_s": round(taken - before, 6),
            "write_s": round(time.perf_counter() - taken, 6),
            "file_bytes": n_bytes,
            "oom_snapshot": self.oom_path and os.path.basename(self.oom_path),
            "torch": str(self.torch.__version__),
            "python": sys.version.split()[0],
            "program": os.path.basename(sys.argv[0]) if sys.argv else "",
            "rank": os.environ.get("RANK"),
        }
        try:
            with open(about_part, "w", encoding="utf-8") as file:
                file.write(json.dumps(about, indent=1) + "\n")
            os.replace(part, place)
            os.replace(about_part, place + ".json")
        except BaseException:
            _unlink(part)
            _unlink(about_part)
            raise
        self.about = about
        self.note(os.fsencode(os.path.basename(place)))
        return about

    def note(self, what: bytes) -> None:
        """Tell the command's recorder: the name of a file that was written, or `END`."""
        if self.claim is not None:
            try:
                with open(os.open(self.claim, os.O_WRONLY | os.O_APPEND), "wb") as file:
                    file.write(what + b"\0")
            except OSError:  # gone, as the command ended before this process; the snapshot is there all the same
                return

    def end(self) -> None:
        """Stop the history, if it was started here."""
        global _current
        if _current is self:
            _current = None
        if self.is_started and self.is_ours:
            self.torch.cuda.memory._record_memory_history(enabled=None)


def switch(torch: Any, max_entries: int, stacks: str) -> None:
    """Turn the history on. PyTorch before 2.1 names the arguments otherwise."""
    record = torch.cuda.memory._record_memory_history
    if "max_entries" in inspect.signature(record).parameters:
        record(enabled="all", context="alloc", stacks=stacks, max_entries=max_entries)
    else:
        record(True, trace_alloc_max_entries=max_entries, trace_alloc_record_context=True)


def new_run() -> str:
    """What tells the files of one recording from those of all others."""
    return os.urandom(4).hex()


def write(snapshot: Any, path: str) -> int:
    """Pickle into `path`, which is there whole or not at all. Returns its size in bytes."""
    try:
        with open(path, "wb") as file:
            pickle.dump(snapshot, file, protocol=PROTOCOL)
            return file.tell()
    except BaseException:
        _unlink(path)
        raise


def _unlink(path: str) -> None:
    if os.path.exists(path):
        os.unlink(path)


def numbered(path: str, n: int) -> str:
    """a.pickle, a.1.pickle, a.2.pickle..."""
    stem, suffix = os.path.splitext(path)
    return path if n == 0 else f"{stem}.{n}{suffix}"


def _on_oom(_device: int, _size: int, _total: int, _free: int) -> None:
    """The state at the first failure, which a program that goes on, or is killed, would lose."""
    recorder = _current
    if recorder is None or recorder.oom_path is not None or recorder.pid != os.getpid():
        return
    stem, suffix = os.path.splitext(recorder.path)
    recorder.oom_path = f"{stem}.oom{suffix}"
    try:
        recorder.save("oom", recorder.oom_path)
    except OSError as error:  # the program's own exception is what it must see
        print(f"gpubloat: the snapshot at the out-of-memory error was not written: {error}", file=sys.stderr)


def install() -> None:
    """Record this process as its environment says: from the start of CUDA to the end of Python."""
    if not os.environ.get(OUT):
        return
    if "torch" in sys.modules:
        _torch_is_there(sys.modules["torch"])
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Notices when the program imports torch, and then is gone."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if name != "torch":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        import importlib.util

        spec = importlib.util.find_spec(name) if path is None else None
        run = getattr(getattr(spec, "loader", None), "exec_module", None)
        if spec is None or run is None:
            return spec

        def exec_module(module: Any) -> None:
            run(module)
            _torch_is_there(module)

        spec.loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
        return spec


def _torch_is_there(torch: Any) -> None:
    version = getattr(torch, "version", None)
    if not (getattr(version, "cuda", None) or getattr(version, "hip", None)):
        print("gpubloat: this PyTorch has no CUDA, so its memory is not recorded", file=sys.stderr)
        return
    try:
        torch.cuda._lazy_call(lambda: _claim(torch))
    except Exception as error:  # a recorder must not end the program that it watches
        print(f"gpubloat: the memory of this process is not recorded: {error}", file=sys.stderr)


def _claim(torch: Any) -> None:
    """CUDA starts: take the first file name that no other process of this command has, and record."""
    try:
        out, run = os.environ[OUT], os.environ[RUN]
        for n in range(1 << 16):
            path = numbered(out, n)
            if not os.environ.get(FORCE) and _is_taken(path, run):
                continue
            claim = f"{path}.{run}{CLAIM}"
            try:
                os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                break
            except FileExistsError:
                continue
        recorder = Recorder(torch, path, int(os.environ[MAX_ENTRIES]), os.environ[STACKS], run, claim)
        recorder.begin(is_initialising=True)
        _register(recorder)
    except Exception as error:
        print(f"gpubloat: the memory of this process is not recorded: {error}", file=sys.stderr)


def _is_taken(path: str, run: str) -> bool:
    """Whether the file is there, or another command's process is about to write it."""
    folder, name = os.path.split(path)
    claims = re.compile(rf"{re.escape(name)}\.(?!{run})[0-9a-f]{{8}}{re.escape(CLAIM)}")
    return os.path.exists(path) or any(map(claims.fullmatch, os.listdir(folder)))


def _register(recorder: Recorder) -> None:
    """At the end of Python; a forked worker of multiprocessing ends without that, but runs its finalizers."""
    atexit.register(_at_exit, recorder)
    util = sys.modules.get("multiprocessing.util")
    process = sys.modules.get("multiprocessing.process")
    if util is not None and process is not None and process.parent_process() is not None:
        util.Finalize(None, _at_exit, args=(recorder,), exitpriority=-100)


def _at_exit(recorder: Recorder) -> None:
    # A forked child has no CUDA of its own: what it inherited is not its to write.
    if recorder.pid != os.getpid() or recorder.about.get("reason") == "exit":
        return
    try:
        about = recorder.save("exit")
    except Exception as error:
        print(f"gpubloat: the snapshot was not written: {error}", file=sys.stderr)
        return
    finally:
        recorder.note(END)
    if about["is_ring_full"]:
        print(f"gpubloat: the history was full at {recorder.max_entries} entries: it starts mid-run", file=sys.stderr)
