"""One entry from a function to its joules by operator, on a simulated card; PyTorch runs on the CPU."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpubloat import Run
from gpubloat.energy import measuring
from gpubloat.energy.capture import Store
from gpubloat.energy.meter import NoDevice, Reading
from gpubloat.errors import DeviceError, GpubloatError
from tests.energy.cards import IDLE_W, Changed, no_counter
from tests.energy.rigs import Costs, Rig

DEFAULT = Costs(0.001, 500.0)  # of every replay and of the step: no function of PyTorch takes virtual time


@pytest.fixture
def gpt(torch: Any) -> Any:
    """Two blocks as in GPT-2, small."""
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            b, t, d = x.shape
            q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
            heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(heads.transpose(1, 2).reshape(b, t, d))
            return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))

    torch.manual_seed(0)
    model = nn.Sequential(Block(16), Block(16)).requires_grad_(False)
    return model, torch.randn(2, 8, 16)


def measured(rig: Rig, model: Any, *args: Any, **options: Any) -> Run:
    return measuring.measure(model, *args, **({"meter": rig.meter, "engine": rig, "seconds": 1.0} | options))


def test_joules_by_operator_of_a_small_model(gpt: Any, tmp_path: Path) -> None:
    rig = Rig(cost=DEFAULT)
    run = measured(rig, *gpt, subject="gpt", out=tmp_path / "run", deadline_s=60.0)
    assert Run.load(tmp_path / "run").provenance == run.provenance
    assert run.provenance["joules"] == {"is_trusted": True, "reason": None}
    assert run.provenance["idle_w"] == pytest.approx(IDLE_W, rel=0.02)
    rows, closure = run["operators"], run["closure"].iloc[0]
    done = rows[rows["call_j"].notna()]
    assert {"aten::addmm.default", "aten::gelu.default", "aten::native_layer_norm.default"} <= set(done["name"])
    assert (abs(done["call_j"] - DEFAULT.call_j) <= done["error_j"]).all()
    assert done["line"].str.contains("test_measuring.py:").all()
    assert rows["step_j"].sum() + closure["remainder_j"] == closure["step_j"]
    assert rows.set_index("name").loc["aten::gelu.default", "n_same"] == 2
    blocks = run["blocks"]
    assert blocks["order"].tolist() == list(range(len(blocks)))
    assert blocks["subject"].tolist()[:2] == ["gpt", "idle"]
    assert blocks["subject"].tolist()[-1] == "gpt"
    assert (blocks["subject"] == "gpt").sum() == 2
    assert "operators" in measuring.closing(run["closure"])


def test_the_deadline_is_kept(gpt: Any) -> None:
    rig = Rig(cost=DEFAULT)
    start_s = rig.clock.now()
    run = measured(rig, *gpt, deadline_s=12.0)
    assert rig.clock.now() - start_s <= 12.0
    late = run["operators"]["method"] == "not replayed: the deadline was reached"
    assert late.any()
    assert run["operators"]["call_j"].notna().any()
    assert run["closure"]["n_not_measured"].iloc[0] > 0
    assert "operators were not measured, " in measuring.closing(run["closure"])


def test_the_step_is_measured_even_if_there_is_no_time(gpt: Any) -> None:
    run = measured(Rig(cost=DEFAULT), *gpt, deadline_s=0.1)
    closure = run["closure"].iloc[0]
    assert closure["step_j"] == pytest.approx(DEFAULT.call_j, rel=0.05)
    assert closure.isna()["operators_j"]
    assert any("measured once" in note for note in run.provenance["notes"])
    assert "no operator was measured" in measuring.closing(run["closure"])


def test_joules_are_refused_where_the_card_contradicts_its_counter(gpt: Any) -> None:
    rig = Rig(cost=DEFAULT)
    liar = Changed(rig.meter, lambda r: dataclasses.replace(r, instant_w=1.1 * (r.instant_w or 0.0)))
    run = measured(rig, *gpt, meter=liar)
    assert not run.provenance["joules"]["is_trusted"]
    assert "differ by 9%" in run.provenance["joules"]["reason"]
    assert run.provenance["idle_w"] is None
    for table, column in (
        ("operators", "call_j"),
        ("closure", "step_j"),
        ("closure", "idle_w"),
        ("blocks", "energy_j"),
    ):
        assert run[table][column].isna().all()
    assert run["closure"]["step_time_s"].iloc[0] == pytest.approx(DEFAULT.call_s)
    assert run["operators"]["call_time_s"].notna().any()
    assert "refused: the energy counter says" in run["closure"]["notes"].iloc[0]
    assert "not measured: refused" in measuring.closing(run["closure"])
    assert measuring.total(run["closure"], 5, 400.0) == {"kwh": None, "g_co2e": None}


def test_a_card_without_a_counter_gives_times(gpt: Any) -> None:
    rig = Rig(cost=DEFAULT)
    run = measured(rig, *gpt, meter=Changed(rig.meter, no_counter))
    assert "no energy counter" in run.provenance["joules"]["reason"]
    assert run["closure"]["step_j"].isna().all()
    assert run["closure"]["step_time_s"].notna().all()


def test_times_only_need_no_gpu(gpt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    run = measuring.measure(*gpt, times_only=True, seconds=0.02)
    rows = run["operators"]
    work = rows[rows["method"] == "not replayed: times only"]
    assert (work["step_time_s"] > 0).all()
    assert len(work) >= 6
    assert work["step_time_s"].sum() > 0
    for column in ("call_j", "error_j", "active_j", "step_j", "step_frac"):
        assert rows[column].isna().all()
    closure = run["closure"].iloc[0]
    assert closure["step_time_s"] > 0
    assert closure["n_not_measured"] == closure["n_operators"] > 0
    assert "only times were asked for" in closure["notes"]


def test_without_a_gpu_one_sentence_before_the_function_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = NoDevice("NVML finds no GPU", "look at nvidia-smi")
    monkeypatch.setattr("gpubloat.energy.meter.open_meter", lambda _: gone)

    def function() -> None:
        raise AssertionError

    with pytest.raises(DeviceError, match="NVML finds no GPU"):
        measuring.measure(function)


@pytest.mark.usefixtures("torch")
def test_a_function_that_uses_no_gpu_is_refused_and_the_meter_closed(gpt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Changed(Rig().meter, lambda reading: reading)
    monkeypatch.setattr("gpubloat.energy.meter.open_meter", lambda _: meter)
    with pytest.raises(GpubloatError, match="the function uses no GPU"):
        measuring.measure(*gpt)
    assert meter.n_closed == 1


def test_a_folder_that_is_not_empty_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    with pytest.raises(GpubloatError, match="is not empty"):
        measuring.measure(lambda: None, out=tmp_path)


@pytest.mark.parametrize("option", [{"seconds": 0.0}, {"deadline_s": -1.0}])
def test_times_have_to_be_positive(option: dict[str, float]) -> None:
    with pytest.raises(GpubloatError, match="greater than 0"):
        measuring.measure(lambda: None, **option)  # type: ignore[arg-type]


@pytest.fixture
def failing(torch: Any, tmp_path: Path) -> Callable[[int, BaseException], Run]:
    """Measure two operators; the run of that number raises: 1 and 2 are the step, 3 to 6 operators, 7 and 8 the step.

    Afterwards nothing may read the meter any more, and nothing be kept in memory or files.
    """

    def measure(number: int, error: BaseException) -> Run:
        rig = Rig(cost=DEFAULT)
        meter = Changed(rig.meter, lambda reading: reading)

        def fail(_: object) -> None:
            if rig.n_runs == number:
                raise error

        rig.fails = fail
        x = torch.ones(4, 4)
        try:
            return measured(rig, lambda: (x @ x).exp(), meter=meter, out=tmp_path / "run")
        finally:
            n_reads = meter.n_reads
            rig.clock.sleep(5)
            assert meter.n_reads == n_reads

    return measure


@pytest.mark.parametrize("number", [1, 2, 7, 8])
def test_a_function_that_fails_later_is_told_in_one_sentence(
    failing: Callable[[int, BaseException], Run], number: int, tmp_path: Path
) -> None:
    with pytest.raises(GpubloatError, match=r"failed at .*test_measuring.py:\d+ while it was measured.*: OSError: the"):
        failing(number, OSError("the file is gone"))
    assert list(tmp_path.iterdir()) == []


def test_an_operator_that_fails_is_left_out(failing: Callable[[int, BaseException], Run]) -> None:
    methods = failing(5, OSError("the file is gone"))["operators"]["method"].tolist()
    assert sorted(methods) == ["not replayed: it failed: OSError: the file is gone", "replayed eagerly"]


@pytest.mark.parametrize("number", [1, 4, 8])
def test_ctrl_c_leaves_nothing_behind(
    failing: Callable[[int, BaseException], Run], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Store] = []
    close = Store.close
    monkeypatch.setattr(Store, "close", lambda store: (closed.append(store), close(store)))
    with pytest.raises(KeyboardInterrupt):
        failing(number, KeyboardInterrupt())
    assert list(tmp_path.iterdir()) == []
    assert closed


def test_what_returns_nothing_is_told(torch: Any) -> None:
    x = torch.ones(2)

    def nothing() -> None:
        x.exp()

    with pytest.raises(GpubloatError, match="returns no tensor"):
        measured(Rig(cost=DEFAULT), nothing)


def test_a_meter_that_dies_in_the_middle(gpt: Any, tmp_path: Path) -> None:
    rig = Rig(cost=DEFAULT)

    def dies(reading: Reading) -> Reading:
        if reading.t_s > 12:
            raise DeviceError("absent", "the GPU is lost")
        return reading

    with pytest.raises(DeviceError, match="the GPU is lost"):
        measured(rig, *gpt, meter=Changed(rig.meter, dies), out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_energy_of_many_calls_at_an_intensity_that_was_given(gpt: Any) -> None:
    closure = measured(Rig(cost=DEFAULT), *gpt, deadline_s=0.1)["closure"]
    step_j = float(closure["step_j"].iloc[0])
    assert measuring.total(closure, 7_200_000) == {"kwh": pytest.approx(2 * step_j), "g_co2e": None}
    assert measuring.total(closure, 7_200_000, 450.0)["g_co2e"] == pytest.approx(900 * step_j)
