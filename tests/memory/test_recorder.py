"""Recording without a GPU: a fake PyTorch keeps the contract, a real one without CUDA says no."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pickletools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from gpubloat import memory
from gpubloat.errors import DeviceError, GpubloatError, MissingToolError
from gpubloat.memory import agent, recorder
from tests.memory import fake_torch

Torch = Callable[..., ModuleType]


@pytest.fixture
def torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Torch]:
    """Imports a fake torch into this process; it is gone afterwards."""

    def forget() -> None:
        for name in [n for n in sys.modules if n == "torch" or n.startswith("torch.")]:
            monkeypatch.delitem(sys.modules, name)

    def make(**kind: object) -> ModuleType:
        forget()
        monkeypatch.syspath_prepend(str(fake_torch.write(tmp_path / "site", **kind)))  # type: ignore[arg-type]
        return importlib.import_module("torch")

    yield make
    forget()
    assert agent._current is None


def protocol(path: Path) -> int:
    opcode, argument, _ = next(pickletools.genops(path.read_bytes()))
    assert opcode.name == "PROTO"
    return int(argument)


def test_a_block_is_recorded_and_read_back(torch: Torch, tmp_path: Path) -> None:
    t = torch()
    file = tmp_path / "run.pickle"
    with recorder.record(file) as recording:
        assert not file.exists()
        t.cuda.use(3)
    assert t._C.log == ["init", "history all", "snapshot", "history None"]
    assert t.cuda.memory._history_calls[0] == ("all", "alloc", "python", 1_000_000)
    assert protocol(file) == 4
    run = memory.load(file)
    assert run["events"]["action"].tolist() == ["alloc"] * 3
    assert run["frames"]["function"].tolist() == ["step"]
    about = recording.about
    assert about == json.loads((tmp_path / "run.pickle.json").read_text())
    assert (about["reason"], about["n_entries"], about["is_ring_full"]) == ("end", [3, 0], False)
    assert about["file_bytes"] == file.stat().st_size
    assert about["snapshot_s"] >= 0
    assert about["write_s"] > 0
    assert recording.is_complete
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.pickle", "run.pickle.json", "site"]


def test_cuda_is_never_initialised_here(torch: Torch, tmp_path: Path) -> None:
    t = torch()
    with (
        pytest.raises(GpubloatError, match="nothing was recorded: the block did not use CUDA"),
        recorder.record(tmp_path / "a.pickle"),
    ):
        pass
    assert t._C.log == []
    assert not (tmp_path / "a.pickle").exists()
    t.cuda.use()  # the queued call of a recording that is over does nothing
    assert t._C.log == ["init"]


def test_cuda_in_use_is_recorded_at_once(torch: Torch, tmp_path: Path) -> None:
    t = torch()
    t.cuda.use()
    with recorder.record(tmp_path / "a.pickle", max_entries=10, stacks="all"):
        t.cuda.use(2)
    assert t.cuda.memory._history_calls == [("all", "alloc", "all", 10), (None, "all", "all", 1 << 60)]


def test_a_history_of_somebody_else_goes_on(torch: Torch, tmp_path: Path) -> None:
    t = torch()
    t.cuda.use()
    t.cuda.memory._record_memory_history(max_entries=5)
    t._C.log.clear()
    with recorder.record(tmp_path / "a.pickle") as recording:
        t.cuda.use(2)
    assert t._C.log == ["snapshot"]
    assert t._C.history == 5
    assert recording.about["was_recording"]
    assert recording.about["max_entries"] is None


def test_a_full_ring_is_said(torch: Torch, tmp_path: Path) -> None:
    t = torch()
    with recorder.record(tmp_path / "a.pickle", max_entries=4) as recording:
        t.cuda.use(9)
    assert recording.about["is_ring_full"]
    assert recording.about["n_entries"] == [4, 0]
    assert not recording.is_complete


def test_an_exception_leaves_a_snapshot(torch: Torch, tmp_path: Path) -> None:
    t = torch()
    recordings = []

    def block() -> None:
        with recorder.record(tmp_path / "a.pickle") as recording:
            recordings.append(recording)
            t.cuda.use()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    assert recordings[0].about["reason"] == "exception"
    assert len(memory.load(tmp_path / "a.pickle")["events"]) == 1
    assert t._C.history is None


def test_running_out_of_memory_leaves_two(torch: Torch, tmp_path: Path) -> None:
    """The state at the error, before anything is unwound, and the end."""
    t = torch()
    recordings = []

    def block() -> None:
        with recorder.record(tmp_path / "a.pickle") as recording:
            recordings.append(recording)
            t.cuda.use()
            with pytest.raises(t.cuda.OutOfMemoryError):
                t.cuda.fail()  # caught: the program goes on
            t.cuda.use(2)
            t.cuda.fail()

    with pytest.raises(t.cuda.OutOfMemoryError):
        block()
    (recording,) = recordings
    assert recording.about["reason"] == "oom"
    assert recording.about["oom_snapshot"] == "a.oom.pickle"
    first, last = (memory.load(tmp_path / name)["events"] for name in ("a.oom.pickle", "a.pickle"))
    assert first["action"].tolist() == ["alloc", "oom"]
    assert last["action"].tolist() == ["alloc", "oom", "alloc", "alloc", "oom"]
    assert first["address"].iloc[1] == 1 << 20
    assert protocol(tmp_path / "a.oom.pickle") == 4
    assert json.loads((tmp_path / "a.oom.pickle.json").read_text())["reason"] == "oom"


def test_the_observer_of_a_recording_that_is_over_is_silent(torch: Torch, tmp_path: Path) -> None:
    t = torch()
    with recorder.record(tmp_path / "a.pickle"):
        t.cuda.use()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(t.cuda.OutOfMemoryError):
        t.cuda.fail()
    assert sorted(tmp_path.iterdir()) == before
    with recorder.record(tmp_path / "b.pickle"):
        t.cuda.use()
    assert len(t._C.observers) == 1


def test_one_recording_at_a_time(torch: Torch, tmp_path: Path) -> None:
    t = torch()
    with recorder.record(tmp_path / "a.pickle"):
        t.cuda.use()
        with pytest.raises(GpubloatError, match="being recorded already"), recorder.record(tmp_path / "b.pickle"):
            pass
    assert (tmp_path / "a.pickle").exists()


def test_the_names_of_torch_2_0(torch: Torch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t = torch()
    calls = []

    def old(enabled, record_context=True, trace_alloc_max_entries=1, trace_alloc_record_context=False):  # type: ignore[no-untyped-def]  # noqa: ARG001
        calls.append((enabled, trace_alloc_max_entries, trace_alloc_record_context))

    monkeypatch.setattr(t.cuda.memory, "_record_memory_history", old)
    with recorder.record(tmp_path / "a.pickle", max_entries=7):
        t.cuda.use()
    assert calls == [(True, 7, True), (None, 1, False)]


def test_what_cannot_be_recorded_is_one_sentence(torch: Torch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch(cuda=None)
    with pytest.raises(DeviceError, match="this PyTorch has no CUDA"), recorder.record(tmp_path / "a.pickle"):
        pass
    torch(available=False)
    with pytest.raises(DeviceError, match="finds no GPU"), recorder.record(tmp_path / "a.pickle"):
        pass
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingToolError, match="PyTorch is not installed"), recorder.record(tmp_path / "a.pickle"):
        pass
    assert not (tmp_path / "a.pickle").exists()


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("old.pickle", {}, "old.pickle exists"),
        ("none/a.pickle", {}, "is no folder"),
        (".", {}, "is a folder"),
        ("a.pickle", {"stacks": "c"}, "stacks='c'"),
        ("a.pickle", {"max_entries": 0}, "a number of events is wanted"),
        ("a.pickle", {"max_entries": 1.5}, "a number of events is wanted"),
    ],
)
def test_bad_arguments(torch: Torch, tmp_path: Path, name: str, more: dict[str, object], message: str) -> None:
    torch()
    (tmp_path / "old.pickle").write_bytes(b"mine")
    with pytest.raises(GpubloatError, match=message), recorder.record(tmp_path / name, **more):  # type: ignore[arg-type]
        pass
    assert (tmp_path / "old.pickle").read_bytes() == b"mine"


def test_force_replaces_all_of_an_older_recording(torch: Torch, tmp_path: Path) -> None:
    t = torch()
    for name in ("a.pickle", "a.1.pickle", "a.oom.pickle", "a.oom.pickle.json", "ab.pickle", "a.x.pickle"):
        (tmp_path / name).write_bytes(b"old")
    with recorder.record(tmp_path / "a.pickle", force=True):
        t.cuda.use()
    left = sorted(p.name for p in tmp_path.iterdir() if p.is_file())
    assert left == ["a.pickle", "a.pickle.json", "a.x.pickle", "ab.pickle"]


def test_an_older_recording_stays_until_there_is_a_new_one(
    torch: Torch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = torch()
    old = {"a.pickle": b"old", "a.pickle.json": b"{}", "a.1.pickle": b"older"}
    for name, content in old.items():
        (tmp_path / name).write_bytes(content)

    def there() -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}

    with (
        pytest.raises(GpubloatError, match="did not use CUDA"),
        recorder.record(tmp_path / "a.pickle", force=True),
    ):
        assert there() == old
    assert there() == old

    def dump(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for module, name in ((agent.pickle, "dump"), (agent.json, "dumps")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, dump)
            with (
                pytest.raises(GpubloatError, match="No space left"),
                recorder.record(tmp_path / "a.pickle", force=True),
            ):
                t.cuda.use()
        assert there() == old
    with recorder.record(tmp_path / "a.pickle", force=True):
        t.cuda.use()
    assert set(there()) == {"a.pickle", "a.pickle.json"}
    assert len(memory.load(tmp_path / "a.pickle")["events"]) == 3  # the fake keeps its history


def test_a_full_disk_leaves_no_half_file(torch: Torch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t = torch()

    def dump(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(agent.pickle, "dump", dump)
    with (
        pytest.raises(GpubloatError, match="cannot be written: No space left on device"),
        recorder.record(tmp_path / "a.pickle"),
    ):
        t.cuda.use()
    assert [p.name for p in tmp_path.iterdir()] == ["site"]
    assert t._C.history is None


# Commands


def command(tmp_path: Path, program: str, *words: str, force: bool = False, **kind: object) -> recorder.Recorded:
    """Run a program with the fake torch on its path, recorded into out.pickle."""
    site = fake_torch.write(tmp_path / "site", **kind)  # type: ignore[arg-type]
    script = tmp_path / "train.py"
    script.write_text(program, "utf-8")
    env = {**os.environ, "PYTHONPATH": str(site)}
    return recorder.run([sys.executable, str(script), *words], tmp_path / "out.pickle", env=env, force=force)


def names(done: recorder.Recorded) -> list[str]:
    return [p.name for p in done.snapshots]


def test_a_command_is_recorded_unchanged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = """
import sys
assert sys.argv[1:] == ["--lr", "0.1"] and __name__ == "__main__" and __file__ == sys.argv[0]
import torch
assert torch._C.log == []
torch.cuda.use(4)
assert torch._C.log == ["init", "history all"]
print("said")
"""
    done = command(tmp_path, program, "--lr", "0.1")
    assert (done.status, names(done), done.n_lost) == (0, ["out.pickle"], 0)
    assert capfd.readouterr() == ("said\n", "")
    assert len(memory.load(done.snapshots[0])["events"]) == 4
    about = json.loads((tmp_path / "out.pickle.json").read_text())
    assert (about["reason"], about["program"], about["max_entries"]) == ("exit", "train.py", 1_000_000)


def test_an_uncaught_error_is_recorded_and_its_status_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = command(tmp_path, "import torch\ntorch.cuda.use()\ntorch.cuda.fail()\n")
    assert (done.status, names(done)) == (1, ["out.pickle", "out.oom.pickle"])
    assert "OutOfMemoryError: CUDA out of memory" in capfd.readouterr().err
    assert memory.load(done.snapshots[0])["events"]["action"].tolist() == ["alloc", "oom"]


def test_every_process_has_its_own_file(tmp_path: Path) -> None:
    program = """
import subprocess, sys, torch
n = int(sys.argv[1])
torch.cuda.use(n)
if n < 4:
    subprocess.run([sys.executable, __file__, str(n + 1)], check=True)
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
"""
    done = command(tmp_path, program, "1")
    assert (done.status, names(done)) == (0, ["out.pickle", "out.1.pickle", "out.2.pickle", "out.3.pickle"])
    assert [len(memory.load(p)["events"]) for p in done.snapshots] == [1, 2, 3, 4]
    assert not list(tmp_path.glob("*.part"))


def test_spawned_workers_are_recorded_and_forked_ones_do_not_write_twice(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = """
import multiprocessing, os, sys, torch
def work():
    torch.cuda.use(2)
if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=work)
    worker.start(); worker.join()
    torch.cuda.use()
    if os.fork() == 0:
        sys.exit()
    os.wait()
    print("written by the fork:", os.path.exists(os.environ["GPUBLOAT_MEMORY_OUT"].replace(".pickle", ".1.pickle")))
"""
    done = command(tmp_path, program)
    assert capfd.readouterr() == ("written by the fork: False\n", "")
    assert (done.status, names(done)) == (0, ["out.pickle", "out.1.pickle"])
    assert [len(memory.load(p)["events"]) for p in done.snapshots] == [2, 1]


def test_forked_workers_that_start_cuda_themselves_are_recorded(tmp_path: Path) -> None:
    """They end by os._exit, without what is registered for the end of Python."""
    program = """
import multiprocessing, torch
def work(n):
    torch.cuda.use(n)
workers = [multiprocessing.get_context("fork").Process(target=work, args=(n,)) for n in (3, 5)]
for worker in workers:
    worker.start()
    worker.join()
"""
    done = command(tmp_path, program)
    assert (done.status, names(done), done.n_lost) == (0, ["out.pickle", "out.1.pickle"], 0)
    assert [len(memory.load(p)["events"]) for p in done.snapshots] == [3, 5]


def test_a_killed_process_is_counted(tmp_path: Path) -> None:
    done = command(tmp_path, "import os, torch\ntorch.cuda.use()\nos.kill(os.getpid(), 9)\n")
    assert (done.status, done.snapshots, done.n_lost) == (-9, (), 1)
    assert not list(tmp_path.glob("out*"))


def test_a_command_that_records_nothing_leaves_the_older_recording(tmp_path: Path) -> None:
    old = {"out.pickle": b"old", "out.pickle.json": b"{}", "out.1.pickle": b"older"}
    for name, content in old.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(GpubloatError, match="no-such-program cannot be run"):
        recorder.run(["no-such-program"], tmp_path / "out.pickle", force=True)
    done = command(tmp_path, "import torch\n", force=True)
    assert (done.status, done.snapshots, done.n_lost) == (0, (), 0)
    done = command(tmp_path, "import os, torch\ntorch.cuda.use()\nos.kill(os.getpid(), 9)\n", force=True)
    assert (done.status, done.snapshots, done.n_lost) == (-9, (), 1)
    assert {p.name: p.read_bytes() for p in tmp_path.glob("out*")} == old
    program = "import os, torch\nassert os.path.exists(os.environ['GPUBLOAT_MEMORY_OUT'])\ntorch.cuda.use(3)\n"
    done = command(tmp_path, program, force=True)
    assert (done.status, names(done), done.n_lost) == (0, ["out.pickle"], 0)
    assert len(memory.load(done.snapshots[0])["events"]) == 3
    assert sorted(p.name for p in tmp_path.glob("out*")) == ["out.pickle", "out.pickle.json"]


def test_processes_of_a_forced_recording_do_not_replace_each_other(tmp_path: Path) -> None:
    """The second begins when the first has written its file, in the place of an older one."""
    program = """
import subprocess, sys, torch
if len(sys.argv) < 2:
    for n in ("2", "3"):
        subprocess.run([sys.executable, __file__, n], check=True)
else:
    torch.cuda.use(int(sys.argv[1]))
"""
    (tmp_path / "out.pickle").write_bytes(b"old")
    done = command(tmp_path, program, force=True)
    assert names(done) == ["out.pickle", "out.1.pickle"]
    assert [len(memory.load(p)["events"]) for p in done.snapshots] == [2, 3]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    others = {
        "out_of_mine.tar.part", "out2.pickle.part", "out.pickle.part", "out.1.pickle.part", "out.pickle.json.part",
        "out.2.pickle.0123abcd.part", "out.2.pickle.0123abcd.claim", "out.tar.claim",
    }  # fmt: skip
    for name in others:
        (tmp_path / name).write_bytes(b"theirs")
    done = command(tmp_path, "import os, torch\ntorch.cuda.use()\nos.kill(os.getpid(), 9)\n")
    assert (done.snapshots, done.n_lost) == ((), 1)
    assert {p.name for p in tmp_path.glob("out*")} == others
    done = command(tmp_path, "import torch\ntorch.cuda.use()\n")
    assert (names(done), done.n_lost) == (["out.pickle"], 0)
    assert {p.name for p in tmp_path.glob("out*")} == others | {"out.pickle", "out.pickle.json"}
    assert all((tmp_path / name).read_bytes() == b"theirs" for name in others)


def test_a_file_that_another_command_is_recording_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "out.pickle.0123abcd.claim").touch()
    done = command(tmp_path, "import torch\ntorch.cuda.use()\n")
    assert names(done) == ["out.1.pickle"]


def test_a_process_killed_after_it_ran_out_of_memory_leaves_that_state(tmp_path: Path) -> None:
    program = """
import os, torch
torch.cuda.use()
try:
    torch.cuda.fail()
except RuntimeError:
    os.kill(os.getpid(), 9)
"""
    done = command(tmp_path, program)
    assert (done.status, names(done), done.n_lost) == (-9, ["out.oom.pickle"], 1)
    assert sorted(p.name for p in tmp_path.glob("out*")) == ["out.oom.pickle", "out.oom.pickle.json"]


def test_the_sitecustomize_of_the_user_still_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("print('customised')\n", "utf-8")
    done = command(tmp_path, "import sitecustomize, torch\nprint(sitecustomize.__file__)\ntorch.cuda.use()\n")
    assert names(done) == ["out.pickle"]
    assert capfd.readouterr().out == f"customised\n{site / 'sitecustomize.py'}\n"


def test_torch_without_cuda_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = command(tmp_path, "import torch\nimport torch.cuda\n", cuda=None)
    assert (done.status, done.snapshots) == (0, ())
    assert capfd.readouterr().err == "gpubloat: this PyTorch has no CUDA, so its memory is not recorded\n"


def test_a_program_without_torch_is_left_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = (
        "import sys\nsys.modules['torch'] = None\n"  # as if it were not installed
        "try:\n    import torch\nexcept ImportError:\n    print('none')\nprint('gpubloat' in sys.modules)\n"
    )
    script = tmp_path / "a.py"
    script.write_text(program, "utf-8")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = recorder.run([sys.executable, str(script)], tmp_path / "out.pickle", env=env)
    out = capfd.readouterr()
    assert (done.status, done.snapshots, out.err) == (0, (), "")
    assert out.out == "none\nFalse\n"


def test_commands_that_cannot_be_run(tmp_path: Path) -> None:
    with pytest.raises(GpubloatError, match="no command is given"):
        recorder.run([], tmp_path / "a.pickle")
    with pytest.raises(GpubloatError, match="no-such-program cannot be run: No such file"):
        recorder.run(["no-such-program"], tmp_path / "a.pickle")
    assert not list(tmp_path.iterdir())


def test_the_agent_needs_the_standard_library_only() -> None:
    """It is loaded by path into programs that have no gpubloat."""
    code = (
        "import importlib.util, sys; before = set(sys.modules);"
        f"spec = importlib.util.spec_from_file_location('a', {agent.__file__!r});"
        "m = importlib.util.module_from_spec(spec); sys.modules['a'] = m; spec.loader.exec_module(m); m.install();"
        "print({n.split('.')[0] for n in set(sys.modules) - before} - set(sys.stdlib_module_names) - {'a'})"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: pip install torch")
def test_a_real_torch_without_cuda(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.version.cuda or torch.version.hip:
        pytest.skip("this PyTorch has CUDA")
    with pytest.raises(DeviceError, match="this PyTorch has no CUDA"), recorder.record(tmp_path / "a.pickle"):
        pass
    done = recorder.run([sys.executable, "-c", "import torch; print(torch.ones(3).sum())"], tmp_path / "a.pickle")
    assert (done.status, done.snapshots) == (0, ())
    out = capfd.readouterr()
    assert out.out == "tensor(3.)\n"
    assert out.err == "gpubloat: this PyTorch has no CUDA, so its memory is not recorded\n"
