"""A real framework, on the CPU: trace, debloat, run on the copies; what tracing costs; workers; late loading.

Runs where the interpreter of the tests has torch (any build: without a GPU it computes on the CPU).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpubloat.libraries import attach
from gpubloat.libraries.debloat import debloat
from gpubloat.libraries.execute import environment, execute
from gpubloat.libraries.trace import Sources, trace
from gpubloat.run import Run
from tests.native.programs import SAMPLE, needs_compiler, shared

pytestmark = [
    needs_compiler,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: pip install torch"),
]
SOURCES = Sources(cupti=False)
MAX_ROUNDS = 12
LIBTORCH = "torch/lib/libtorch_cpu.so"
# One thread: sums come out the same, and the cores of the machine do not matter.
TRAIN = """
import os, sys, time
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
    nn.Flatten(), nn.Linear(32, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
images, labels = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
steps, started = int(sys.argv[1]), []
for step in range(steps):
    started.append(time.process_time())
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("loss", repr(loss.item()))
if steps > 100:  # the later steps, each of which does what the one before did
    times = [after - before for before, after in zip(started[50:], started[51:])]
    print("step", sorted(times)[len(times) // 10], file=sys.stderr)
"""
LOADERS = """
import os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, n):
        return torch.linalg.vector_norm(torch.full((8, 8), float(n)).matmul(torch.ones(8, 8)))

if __name__ == "__main__":
    for context in ("fork", "spawn"):
        loader = DataLoader(Squares(), batch_size=8, num_workers=2, multiprocessing_context=context)
        print(context, repr(sum(batch.sum().item() for batch in loader)))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch")
    (folder / "train.py").write_text(TRAIN)
    (folder / "loaders.py").write_text(LOADERS)
    return folder


def plain(place: Path, script: str, *words: str) -> tuple[str, float]:
    """Output and wall seconds of a run that nobody observes."""
    started = time.monotonic()
    done = subprocess.run([sys.executable, str(place / script), *words], capture_output=True, text=True, check=True)
    return done.stdout, time.monotonic() - started


@pytest.fixture(scope="module")
def original(place: Path) -> tuple[str, float]:
    plain(place, "train.py", "1")  # files into memory
    return plain(place, "train.py", "100")


@pytest.fixture(scope="module")
def traced(place: Path, original: tuple[str, float]) -> Run:
    assert original[0]  # before this one: its time is that of warm files, too
    return trace([sys.executable, str(place / "train.py"), "100"], out=place / "run", repeat=2, sources=SOURCES)


@pytest.fixture(scope="module")
def copies(place: Path, traced: Run) -> Path:
    debloat(traced, place / "out")
    return place / "out"


def test_the_loss_is_identical_on_the_copies(
    place: Path, original: tuple[str, float], copies: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert re.fullmatch(r"loss \d\.\d+\n", original[0])
    for guard in ("restore", "off"):
        capfd.readouterr()
        status, run = execute(copies, [sys.executable, str(place / "train.py"), "100"], guard=guard)
        # Garbage collection and hash seeds differ from run to run: without the guard that can be a trap.
        if guard == "restore" or status != -signal.SIGTRAP:
            assert (status, capfd.readouterr().out) == (0, original[0])
        assert run.provenance["n_swapped"] > 10
        assert run.provenance["problems"] == []


def test_most_of_libtorch_goes(copies: Path) -> None:
    row = Run.load(copies)["reduction"].set_index("library").loc[LIBTORCH]
    print(f"{row['cpu_removed_bytes'] / row['function_bytes']:.4f} of {row['function_bytes']} bytes")
    assert row["cpu_removed_bytes"] >= 0.9 * row["function_bytes"]
    assert row["n_functions_removed"] > 0.5 * row["n_functions"]


def test_what_tracing_costs(original: tuple[str, float], traced: Run) -> None:
    assert traced.provenance["exit_status"] == 0
    assert traced.provenance["record_problems"] == []
    print(f"traced {traced.provenance['wall_s']} s, untraced {original[1]:.3f} s, scan {traced.provenance['scan_s']} s")
    assert traced.provenance["wall_s"] <= 2 * original[1] + 2
    row = traced["loaded"].set_index("library").loc[LIBTORCH]
    assert (row["cpu_problem"], row["n_processes"]) == ("", 2)
    assert 1000 < row["n_functions_used"] < 0.3 * row["n_functions_watched"]


def test_the_steady_state_is_not_slower(place: Path, copies: Path, tmp_path: Path) -> None:
    """Traced, and on guarded copies, in rounds with runs that nobody observes.

    The best round of each counts, in CPU time: on a shared machine one process takes a third more than the next, traced
    or not. A slower program has no round that is as good. Rounds go on while they would still fail.
    """
    command = [sys.executable, str(place / "train.py"), "200"]
    best: dict[str, float] = {}
    with environment(copies, "restore") as on_copies:
        for number in range(MAX_ROUNDS):
            folder = tmp_path / str(number)
            folder.mkdir()
            observed = attach.audited({}, GPUBLOAT_DIR=str(folder), GPUBLOAT_FUNCTIONS="1", GPUBLOAT_PAGES="1")
            variants: list[tuple[str, dict[str, str]]] = [("plain", {}), ("traced", observed), ("copies", on_copies)]
            for variant, env in variants[number % 3 :] + variants[: number % 3]:
                done = subprocess.run(command, env={**clean(), **env}, capture_output=True, text=True, check=True)
                seconds = float(done.stderr.split()[-1])
                best[variant] = min(best.get(variant, seconds), seconds)
            shutil.rmtree(folder)
            if number >= 2 and max(best["traced"], best["copies"]) <= 1.1 * best["plain"]:
                break
    print({variant: f"{1000 * seconds:.2f} ms a step" for variant, seconds in best.items()}, f"{number + 1} rounds")
    # Wide, for machines that others use, too: breakpoints that stayed would cost many times as much.
    assert best["traced"] <= 1.3 * best["plain"]
    assert best["copies"] <= 1.3 * best["plain"]


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in (*attach.OURS, "LD_AUDIT")}


def test_data_loaders_that_fork_and_spawn(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text, _ = plain(place, "loaders.py")
    assert [line.split()[0] for line in text.splitlines()] == ["fork", "spawn"]
    command = [sys.executable, str(place / "loaders.py")]
    run = trace(command, out=place / "loaders", repeat=2, sources=SOURCES)
    assert capfd.readouterr().out == 2 * text
    assert len(run["processes"]) >= 2 * 5  # itself, two workers of each kind
    debloat(run, place / "loaders-out")
    status, done = execute(place / "loaders-out", command)
    assert (status, capfd.readouterr().out) == (0, text)
    assert done.provenance["problems"] == []


def test_what_one_workload_did_not_use_comes_back_for_another(
    place: Path, copies: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "other.py").write_text(
        "import torch\ntorch.manual_seed(1)\nx = torch.randn(16, 16, dtype=torch.float64)\n"
        "print(torch.linalg.svdvals(x).sum().item(), torch.fft.rfft(x).abs().sum().item(), x.sort()[0][0, 0].item())\n"
    )
    text, _ = plain(tmp_path, "other.py")
    status, run = execute(copies, [sys.executable, str(tmp_path / "other.py")], out=tmp_path / "misses")
    assert (status, capfd.readouterr().out) == (0, text)
    assert len(run["misses"]) > 10
    debloat([place / "run", tmp_path / "misses"], tmp_path / "out")
    status, again = execute(tmp_path / "out", [sys.executable, str(tmp_path / "other.py")])
    assert (status, capfd.readouterr().out) == (0, text)
    assert len(again["misses"]) < 0.2 * len(run["misses"])


def test_a_library_that_is_loaded_late(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """After the model has run, by a custom operator's way: torch.ops.load_library is dlopen."""
    library = shared(tmp_path, SAMPLE)
    (tmp_path / "late.py").write_text(
        "import ctypes, sys, torch\nx = torch.ones(4, 4).matmul(torch.ones(4, 4))\n"
        "torch.ops.load_library(sys.argv[1])\nlate = ctypes.CDLL(sys.argv[1])\n"
        "print(x.sum().item(), late.also_used(1), late.read_page(3))\n"
        "if len(sys.argv) > 2:\n    print(late.unused(1), late.read_page(5))\n"
    )
    command = [sys.executable, str(tmp_path / "late.py"), str(library)]
    run = trace(command, out=tmp_path / "run", sources=SOURCES)
    loaded, used = run["loaded"], run["used_functions"]
    (name,) = loaded.loc[loaded["path"] == str(library), "library"]
    names = set(used.loc[used["library"] == name, "function"])
    assert {"also_used", "used", "read_page"} <= names
    assert "unused" not in names
    debloat(run, tmp_path / "out")
    capfd.readouterr()
    for words, text in (([], "64.0 4 3\n"), (["more"], "64.0 4 3\n4 5\n")):
        status, found = execute(tmp_path / "out", [*command, *words])
        assert (status, capfd.readouterr().out) == (0, text)
    assert "unused" in set(found["misses"]["function"])
