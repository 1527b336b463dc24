"""The command `gpubloat energy`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gpubloat import Run
from gpubloat.energy import measuring
from gpubloat.energy.recording import Simulated, Steps, VirtualClock
from tests.commands import Command, command
from tests.energy.cards import IDLE_W, PRODUCT_W, Changed, Loads
from tests.energy.rigs import Costs, Rig


@pytest.fixture
def energy(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return command("energy", capfd, monkeypatch)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Changed:
    """A simulated card in place of the GPU."""
    clock = VirtualClock()
    power = Steps(IDLE_W)
    meter = Changed(Simulated(power, clock), lambda reading: reading)
    monkeypatch.setattr("gpubloat.energy.meter.open_meter", lambda _: meter)
    monkeypatch.setattr("gpubloat.energy.loads.TorchLoads", lambda _: Loads(power, clock))
    monkeypatch.setattr("gpubloat.energy.probing.WallClock", lambda: clock)
    return meter


def test_without_a_gpu_it_says_one_sentence(energy: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    sentence, hint = energy("probe", "--out", tmp_path / "run").refused()
    assert "this needs an NVIDIA GPU that can be measured: nvidia-ml-py is not installed" in sentence
    assert "pip install nvidia-ml-py" in hint
    assert not (tmp_path / "run").exists()


def test_probe_prints_and_writes_what_it_found(energy: Command, card: Changed, tmp_path: Path) -> None:
    done = energy("probe", "--csv", tmp_path / "csv", "--out", tmp_path / "run")
    assert (done.status, done.error) == (0, "")
    assert "signals of simulated card" in done.out
    assert "joules: to be believed, within 5 %" in done.out
    run = Run.load(tmp_path / "run")
    assert run.provenance["command"].startswith("gpubloat energy probe")
    assert len(pd.read_csv(tmp_path / "csv" / "loads.csv")) == len(run["loads"]) == 11
    assert card.n_closed == 1


@pytest.mark.usefixtures("card")
def test_probe_as_json(energy: Command) -> None:
    found = json.loads(energy("probe", "--json").out)
    assert found["joules"] == {"is_trusted": True, "reason": None}
    assert found["idle_w"] == pytest.approx(IDLE_W, rel=0.01)
    assert {row["signal"] for row in found["signals"]} == {"counter", "instant", "average"}
    products = [row["slope_w"] for row in found["loads"] if row["load"] == "product"]
    assert products == pytest.approx([PRODUCT_W] * 3, rel=0.01)


@pytest.mark.parametrize("option", ["--csv", "--out"])
def test_folders_are_not_replaced_unasked(energy: Command, card: Changed, tmp_path: Path, option: str) -> None:
    (tmp_path / "kept").write_text("mine")
    sentence, hint = energy("probe", option, tmp_path).refused()
    assert "is not empty" in sentence
    assert "--force" in hint
    assert card.n_reads == 0
    assert energy("probe", option, tmp_path, "--force").status == 0
    assert (tmp_path / "kept").read_text() == "mine"


def test_one_folder_for_two_things(energy: Command, tmp_path: Path) -> None:
    sentence, _ = energy("probe", "--csv", tmp_path / "a", "--out", tmp_path / "a").refused()
    assert "--csv and --out are both" in sentence


def test_the_meter_is_closed_when_there_is_no_load(
    energy: Command, card: Changed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("gpubloat.energy.meter.open_meter", lambda _: card)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sys, "argv", [])
    assert "PyTorch is not installed" in energy("probe").refused()[0]
    assert card.n_closed == 1


MODEL = """
import torch


def inputs(seed):
    return (torch.full((4, 4), float(seed + 1)),)


def step(x):
    return (x @ x).exp()
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A simulated card, on which everything takes 1 ms and 500 W."""
    pytest.importorskip("torch")
    made = Rig(cost=Costs(0.001, 500.0))
    original = measuring.measure

    def measure(fn: Any, *args: Any, **options: Any) -> Run:
        return original(fn, *args, meter=made.meter, engine=made, seconds=1.0, **options)

    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setattr("gpubloat.energy.meter.open_meter", lambda _: made.meter)
    return made


@pytest.mark.usefixtures("rig")
def test_measure_prints_operators_the_closure_and_what_it_emits(energy: Command, model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--times", 7_200_000, "--grid", 450, "--out", run, "--csv", tmp_path / "csv")
    done = energy("measure", f"{model}:step", *options)
    assert done.status == 0
    assert "energy of model.py:step by operator" in done.out
    for word in ("aten::mm.default", "aten::exp.default", "model.py:10 step", "share %"):
        assert word in done.out
    assert re.search(r"one step takes 1 ms and (49\d|50\d)(\.\d)? mJ \+- .*: operators \d+", done.out)
    assert re.search(r"7,200,000 calls: (0\.99|1|1\.0)\d* kWh of the GPU board, 4[45]\d(\.\d)? g CO2e", done.out)
    assert "within 5 %" in done.out
    found = Run.load(run)
    assert found.provenance["command"].startswith("gpubloat energy measure")
    assert found["closure"]["subject"].tolist() == ["model.py:step"]
    assert len(pd.read_csv(tmp_path / "csv" / "operators.csv")) == len(found["operators"]) == 2


@pytest.mark.usefixtures("rig")
def test_measure_as_json_and_no_emissions_unless_asked(energy: Command, model: Path) -> None:
    told = json.loads(energy("measure", f"{model}:step", "--json").out)
    assert told["total"] is None
    assert told["joules"]["is_trusted"]
    shares = [row["step_frac"] for row in told["operators"]]
    assert shares == pytest.approx([1.0, 1.0], rel=0.02)
    assert sum(row["step_j"] for row in told["operators"]) + told["closure"]["remainder_j"] == told["closure"]["step_j"]


def test_what_the_function_prints_is_not_in_the_json_and_it_reads_nothing(energy: Command, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "talks.py"
    file.write_text(
        "import sys, torch\ndef step():\n    print('hello')\n    return torch.ones(3) + len(sys.stdin.read())\n"
    )
    done = energy("measure", f"{file}:step", "--times-only", "--json")
    assert json.loads(done.out)["operators"]
    assert "hello" in done.error


def test_measure_times_only(energy: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    done = energy("measure", f"{model}:step", "--times-only")
    assert done.status == 0
    assert "energy not measured: only times were asked for" in done.out
    assert "mJ" not in done.out
    assert "CO2e" not in done.out


@pytest.mark.parametrize("verb", ["measure", "diff"])
def test_without_a_gpu_it_says_one_sentence_before_the_file_is_run(
    energy: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "torch", None)  # nor is PyTorch looked for
    file = tmp_path / "plain.py"
    file.write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\ndef f(): raise SystemError")
    sentence, hint = energy(verb, *[file] * {"measure": 1, "diff": 2}[verb]).refused()
    assert "this needs an NVIDIA GPU that can be measured: nvidia-ml-py is not installed" in sentence
    assert "without a GPU, take times only (--times-only)" in hint
    assert not (tmp_path / "ran").exists()


def test_help_says_what_needs_a_gpu_and_which_units_and_defaults_there_are(energy: Command) -> None:
    listed = " ".join(re.sub(r"[│\n]", " ", energy("--help").out).split())
    assert listed.count("Needs a GPU") == 3
    assert listed.count("Needs a GPU, or --times-only") == 2
    of_diff = " ".join(re.sub(r"[│\n]", " ", energy("diff", "--help").out).split())
    for words in ("--deadline SECONDS", "[default: 300.0]", "--tolerance FRAC", "fp32 0.00001", "works without a GPU"):
        assert words in of_diff


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("nothing.py:f",), "nothing.py does not exist"),
        (("nothing.py:f", "--grid", 400), "--grid needs --times"),
        (("nothing.py:f", "--csv", "a", "--out", "a"), "--csv and --out are both a"),
    ],
)
def test_what_measure_refuses(energy: Command, words: tuple[object, ...], sentence: str) -> None:
    assert sentence in energy("measure", *words).refused()[0]


FUNCTIONS = """
import torch

def inputs(seed):
    return (torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)),)

def slow(x):
    for _ in range(20):
        x = x.clone()
    return torch.tanh(x @ x)

def fast(x):
    return torch.tanh(x @ x)

def other(x):
    return torch.tanh(x @ x) + 1
"""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small operators on a busy machine wait for the second thread, and then times say nothing."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_diff_without_energies_says_what_differs_and_why(energy: Command, tmp_path: Path) -> None:
    file = tmp_path / "step.py"
    file.write_text(FUNCTIONS)
    (tmp_path / "plain.py").write_text("def fast(x):\n    return (x @ x).tanh()\n")  # with the inputs of A's file
    done = energy("diff", f"{file}:slow", tmp_path / "plain.py", "--times-only", "--out", tmp_path / "run")
    assert done.status == 0, done.error
    said = r"verdict: not measured: B takes [\d.]+% of A's time \(.*\), on the CPU; energy was not measured: only times"
    assert re.search(said, done.out)
    assert "outputs: equal" in done.out
    assert "cause: extra copy" in done.out
    assert re.search(r"A: .*step\.py:9 slow", done.out)
    stages = done.error.splitlines()
    assert stages[0] == "gpubloat: running A once and keeping its values"
    assert stages[-2:] == ["gpubloat: measuring the whole functions", "gpubloat: times by operator"]
    assert all(line.startswith("gpubloat: ") for line in stages)
    assert "one input only" not in done.out
    run = Run.load(tmp_path / "run")
    assert run["comparisons"].iloc[0]["a"] == "step.py:slow"
    found = json.loads(energy("diff", f"{file}:slow", f"{file}:other", "--times-only", "--json").out)
    assert found["comparison"]["outputs_equal"] is False
    assert found["verdict"] == "not measured"
    assert "% of A's time (" in found["comparison"]["reason"]


def test_a_function_that_raises_in_a_diff_is_told_with_its_line(energy: Command, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "step.py"
    file.write_text(FUNCTIONS + "\ndef lost(x):\n    return {}[len(x * 2)]\n")
    done = energy("diff", f"{file}:fast", f"{file}:lost", "--times-only")
    assert done.status == 1
    sentence = done.error.splitlines()[-1]
    assert re.fullmatch(
        r"gpubloat: B: the function failed after aten::mul\.Tensor .* at step\.py:19: KeyError: 32", sentence
    )


def test_diff_refuses_in_one_sentence(energy: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "step.py"
    file.write_text(FUNCTIONS)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for arguments, said in (
        ((f"{file}:slow", f"{file}:gone", "--times-only"), "has no function gone"),
        ((f"{file}:slow", tmp_path / "no.py"), "does not exist"),
        ((f"{file}:slow", f"{file}:fast"), "nvidia-ml-py is not installed"),
        ((f"{file}:slow", f"{file}:fast", "--csv", tmp_path / "x", "--out", tmp_path / "x"), "name two folders"),
    ):
        sentence, hint = energy("diff", *arguments).refused()
        assert said in sentence + " " + str(hint)
    assert not (tmp_path / "x").exists()
