"""Analyses of energy: steps close, what was not measured stays empty, and papers' shares are put as ours."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubloat import published
from gpubloat.analysis import energy as analysis
from gpubloat.energy import statistics
from gpubloat.energy.recording import Simulated, Steps, VirtualClock, to_frame
from gpubloat.energy.sampler import sampled
from gpubloat.errors import GpubloatError
from gpubloat.tables.energy import Blocks, Closure, Comparisons, Loads, Operators, Regions, Samples, Table

NAN = math.nan


def rows(schema: type[Table], usual: dict[str, Any], *given: dict[str, Any]) -> pd.DataFrame:
    """A checked table: each row is the usual one with its own differences."""
    if not given:
        return schema.none()
    texts = {n: "" if str(c.dtype).startswith("str") else None for n, c in schema.to_schema().columns.items()}
    return schema.check(pd.DataFrame([texts | usual | row for row in given]), schema.__name__)


def operators(*given: dict[str, Any]) -> pd.DataFrame:
    """Operators of 0.1 J +- 0.01 J each; joules of the group follow from those of a call."""
    usual = {"subject": "step", "side": "A", "name": "aten::mm.default", "n_same": 1, "call_time_s": 1e-3}
    usual |= {"step_time_s": 1e-3, "call_j": 0.1, "error_j": 0.01, "method": "replayed in a graph"}
    full = [usual | {"operator": number} | row for number, row in enumerate(given)]
    return rows(Operators, {}, *(row | {"step_j": row["n_same"] * row["call_j"]} for row in full))


def closure(*given: dict[str, Any]) -> pd.DataFrame:
    usual = {"subject": "step", "side": "A", "step_time_s": 0.01, "step_j": 1.0, "error_j": 0.02, "n_operators": 3}
    return rows(Closure, usual | {"n_not_measured": 0, "idle_w": 112.0}, *given)


def comparisons(*given: dict[str, Any]) -> pd.DataFrame:
    """Comparisons in which A takes 10 mJ and wastes half of it."""
    usual = {"framework": "torch", "a": "cases/gelu.py:slow", "b": "cases/gelu.py:fast", "verdict": "waste"}
    usual |= {"saved_frac": 0.5, "low_frac": 0.48, "high_frac": 0.52, "wasteful": "A", "time_ratio": 0.5}
    usual |= {"band_frac": 0.01, "a_call_j": 0.01, "b_call_j": 0.005, "outputs_equal": True, "cause": "unfused chain"}
    usual |= {"evidence": "8 kernels and 1", "a_line": "gelu.py:23 slow", "b_line": "gelu.py:40 fast"}
    usual |= {"fix": "gelu.py:fast", "fix_saved_frac": 0.49, "fix_low_frac": 0.47, "fix_high_frac": 0.51}
    return rows(Comparisons, usual, *({"subject": row.get("case", "gelu")} | row for row in given))


def loads(*given: dict[str, Any]) -> pd.DataFrame:
    usual = {"load": "product", "repeat": 0, "seconds_s": 3.0, "n_ticks": 29, "slope_w": 600.0, "slope_error_w": 0.5}
    usual |= {"instant_w": 606.0, "average_w": 594.0, "agreement_frac": 0.01, "is_steady": True}
    return rows(Loads, usual, *given)


def blocks(*energies: float, subject: str = "same", order: str = "ABBA") -> pd.DataFrame:
    usual = {"subject": subject, "seconds_s": 2.0, "n_calls": 10}
    sides = (order * len(energies))[: len(energies)]
    table = [{"side": s, "order": i, "energy_j": e} for i, (s, e) in enumerate(zip(sides, energies))]
    return rows(Blocks, usual, *table)


def samples(seconds: float = 5.0) -> pd.DataFrame:
    """What a card of 115 W tells from the instant on at which it draws 600 W."""
    clock, power = VirtualClock(), Steps(115)
    clock.sleep(2)
    power.draw(600, 2.0)
    with sampled(Simulated(power, clock), 0.002, clock=clock) as sampling:
        clock.sleep(seconds)
    return Samples.check(to_frame(sampling.samples()).assign(part="product, 0"), "samples")


# operators


def test_rows_sum_to_the_step() -> None:
    table = analysis.by_operator(
        operators({"n_same": 4}, {"name": "aten::gelu.default", "call_j": 0.3}, {"call_j": NAN, "error_j": NAN}),
        closure({"not_measured_time_frac": 0.125}),
    )
    assert table["kind"].tolist() == ["operator", "operator", "not measured", "remainder"]
    assert table["step_j"].tolist() == pytest.approx([0.4, 0.3, NAN, 0.3], nan_ok=True)
    assert table["step_frac"].sum() == pytest.approx(1)
    assert table["error_j"].tolist() == pytest.approx([0.04, 0.01, NAN, math.hypot(0.02, 0.04, 0.01)], nan_ok=True)
    assert table["error_frac"][0] == pytest.approx(math.hypot(0.04, 0.4 * 0.02))
    assert table["error_frac"][3] == pytest.approx(math.hypot(0.04, 0.01, 0.7 * 0.02))
    last = table.iloc[-1]
    assert last["name"] == "not in kernels, or not measured"
    assert last["notes"] == "with 1 operators that were not measured, 12.5% of the step's time"


def test_operators_without_a_kernel_are_not_missing() -> None:
    view = {"name": "aten::view.default", "call_j": NAN, "error_j": NAN, "method": "no kernel"}
    given = operators({}, view)
    table = analysis.by_operator(given, closure({}))
    assert table["kind"].tolist() == ["operator", "no kernel", "remainder"]
    assert table["name"].iloc[-1] == "not in kernels"
    assert analysis.by_name(given, closure({}))["kind"].tolist() == ["operator", "remainder"]


def test_a_remainder_may_be_negative() -> None:
    last = analysis.by_operator(operators({"call_j": 1.5}), closure({})).iloc[-1]
    assert (last["step_j"], last["step_frac"]) == (-0.5, -0.5)
    assert last["notes"] == "operators take more alone than inside the step"


def test_a_step_that_was_not_measured_has_no_shares() -> None:
    table = analysis.by_operator(operators({}), closure({"step_j": None, "error_j": None}))
    assert table["step_j"].isna().tolist() == [False, True]
    assert table["step_frac"].isna().all()
    assert table["notes"].iloc[-1] == "the step was not measured"


def test_operators_need_their_step() -> None:
    with pytest.raises(GpubloatError, match="the step of step, side B, was not measured"):
        analysis.by_operator(operators({"side": "B"}), closure({}))


def test_layers_stand_together() -> None:
    given = operators(
        {"module": "h.0.mlp", "n_same": 2}, {"module": "h.11.mlp"}, {"module": "h.1.attn.qkv2"}, {"module": ""}
    )
    table = analysis.by_module(given, closure({}))
    assert dict(zip(table["name"], table["n_operators"])) == {
        "h.*.mlp": 3, "h.*.attn.qkv2": 1, "(no module)": 1, "not in kernels": 1
    }  # fmt: skip
    assert analysis.by_module(given, closure({}), depth=1)["name"].tolist() == ["h", "(no module)", "not in kernels"]


def test_a_group_of_which_nothing_was_measured_is_empty() -> None:
    missing = {"call_j": NAN, "error_j": NAN}
    given = operators({}, missing, {"name": "aten::mul.Tensor", "n_same": 3} | missing)
    table = analysis.by_name(given, closure({})).set_index("name")
    assert table.loc["aten::mm.default", ["n_operators", "n_not_measured", "step_j"]].tolist() == [2, 1, 0.1]
    assert math.isnan(table.loc["aten::mul.Tensor", "step_j"])
    assert table.loc["aten::mul.Tensor", "kind"] == "not measured"


part = st.tuples(
    st.sampled_from(["mm", "mul", "add"]), st.sampled_from(["h.0", "h.1", ""]), st.integers(1, 50),
    st.one_of(st.none(), st.floats(1e-7, 10)), st.sampled_from("AB"),
)  # fmt: skip


@settings(deadline=None, max_examples=10)
@given(parts=st.lists(part, max_size=8), whole=st.tuples(st.floats(1e-6, 100), st.floats(1e-6, 100)))
def test_all_groupings_close(parts: list[Any], whole: tuple[float, float]) -> None:
    # Not checked against the schema, which takes longer than what is tested.
    given = pd.DataFrame(parts, columns=["name", "module", "n_same", "call_j", "side"]).astype({"call_j": float})
    given = given.assign(subject="step", line="", call_time_s=1e-3, step_time_s=1e-3, error_j=0.1 * given["call_j"])
    given = given.assign(step_j=given["n_same"] * given["call_j"], step_frac=NAN, method="", notes="")
    steps = pd.DataFrame({"subject": "step", "side": ["A", "B"], "step_j": whole, "error_j": 0.0})
    steps[["not_measured_time_frac", "waiting_j"]] = NAN
    size = max(*whole, given["step_j"].sum())
    for table in (analysis.by_operator(given, steps), analysis.by_name(given, steps), analysis.by_module(given, steps)):
        for side, whole_j in zip("AB", whole):
            mine = table[table["side"] == side]
            assert math.fsum(mine["step_j"].dropna()) == pytest.approx(whole_j, abs=1e-12 * size)
            assert mine["kind"].iloc[-1] == "remainder"
            assert (mine["error_frac"].dropna() >= 0).all()
    for by in ("name", "module"):
        table = analysis.two_systems(given, steps, by)
        for side, whole_j in zip("ab", whole):
            assert math.fsum(table[f"{side}_step_j"].dropna()) == pytest.approx(whole_j, abs=1e-12 * size)


def test_two_systems_tell_absent_from_not_measured() -> None:
    gelu = {"name": "aten::gelu.default", "call_j": 0.6}
    tanh = {"name": "aten::tanh.default", "side": "B", "call_j": NAN, "error_j": NAN}
    steps = closure({}, {"side": "B", "step_j": 0.5})
    table = analysis.two_systems(operators({}, {"side": "B", "call_j": 0.2}, gelu, tanh), steps).set_index("name")
    assert table.index.tolist()[:2] == ["aten::gelu.default", "aten::mm.default"]  # by the size of the difference
    assert table.loc["aten::gelu.default", ["a_n", "b_n", "b_step_j"]].tolist() == [1, 0, 0]
    assert table.loc["aten::tanh.default", ["a_step_j", "b_n"]].tolist() == [0, 1]
    assert math.isnan(table.loc["aten::tanh.default", "b_step_j"])
    assert math.isnan(table.loc["aten::tanh.default", "more_j"])
    assert table["kind"].iloc[-1] == "remainder"
    assert table["more_j"].iloc[-1] == pytest.approx(0.0)
    with pytest.raises(GpubloatError, match="not grouped by 'kernel'"):
        analysis.two_systems(Operators.none(), Closure.none(), "kernel")


# signals


def test_power_of_loads() -> None:
    table = analysis.power_of_loads(loads({}, {"repeat": 1, "slope_w": 610.0, "instant_w": None, "average_w": None},
                                          {"load": "idle", "average_w": None}))  # fmt: skip
    assert table["load"].tolist() == ["product"] * 3 + ["idle"] * 3
    slope = table.iloc[0]
    assert slope.tolist() == ["product", "counter, slope", 2, 605, 600, 610, 0.5]
    assert table["n"].tolist() == [2, 1, 1, 1, 1, 0]
    assert table.loc[5, ["mean_w", "low_w", "high_w"]].isna().all()


def test_agreement_of_signals() -> None:
    square = {"load": "square 100 ms", "instant_w": 900.0, "agreement_frac": 0.5, "is_steady": False}
    silent = {"load": "idle", "slope_w": None, "agreement_frac": None}
    table = analysis.agreement(loads({}, {"repeat": 1, "instant_w": 612.0}, square, silent)).set_index("load")
    assert table.loc["product", ["instant_frac", "average_frac"]].tolist() == pytest.approx([0.015, -0.01])
    assert table["agrees"].tolist() == [True, False, pd.NA]
    assert table["is_steady"].tolist() == [True, False, True]


def test_the_counter_over_time_is_the_true_power() -> None:
    table = analysis.power_over_time(samples(), "product, 0")
    assert table["signal"].unique().tolist() == ["counter, slope", "instant", "1-s mean"]
    assert analysis.mean_power(table, "counter, slope", 0.5, 4) == pytest.approx(600, rel=0.02)
    # Simulated: after a step of 115 to 600 W the mean over 1 s is short of half the step, over the first second.
    first = analysis.mean_power(table, "1-s mean", 0, 1)
    assert first == pytest.approx(600 - 485 * 0.55, rel=0.02)
    assert math.isnan(analysis.mean_power(table, "1-s mean", 4, 8))
    for _, stretches in table.groupby("signal"):
        assert (stretches["start_s"].to_numpy()[1:] >= stretches["end_s"].to_numpy()[:-1] - 1e-9).all()
    with pytest.raises(GpubloatError, match="no part 'copy, 0'"):
        analysis.power_over_time(samples(0.1), "copy, 0")


def test_a_signal_that_did_not_answer_has_no_power() -> None:
    table = analysis.power_over_time(samples(1.0).assign(average_w=NAN), "product, 0")
    assert "1-s mean" not in set(table["signal"])


# cases


def test_shares_of_the_paper_as_ours() -> None:
    table = analysis.paper_cases(published.load("magneton")).set_index(["case", "paper_case"])
    gelu = table.loc[("D1", "hf-39073")]
    assert gelu[["paper_frac", "part_frac"]].tolist() == [0.12, 0.774]
    tf32 = table.loc[("D3", "hf-14450")]  # printed as a share of the wasteful side, as its artifact shows
    assert (tf32["paper_frac"], tf32["paper_diagnosed"]) == (0.588, "yes")
    assert math.isnan(tf32["paper_least_frac"])
    assert "TF32" in tf32["paper_notes"]
    fold = table.loc[("D4", "pytorch-76012")]
    assert fold["paper_least_frac"] == pytest.approx(0.163 / 1.163)
    assert fold["part_frac"] == pytest.approx(0.2303)
    spin = table.loc[("T3", "pytorch-28224")]
    assert spin[["paper_printed", "paper_diagnosed", "paper_frac", "paper_least_frac"]].tolist() == [
        "<1",
        "no",
        0.01,
        0,
    ]
    assert table.loc[("D6", "hf-38977"), "paper_notes"] == "the paper gives no energy"


def test_a_share_of_the_efficient_side_is_smaller_of_the_other() -> None:
    whole = {"status": "stated", "value": 12.5, "upper": NAN, "item": "Table 2"}
    share, least, notes = analysis._as_ours(whole, "excess / efficient")
    assert share == pytest.approx(1 / 9)
    assert math.isnan(least)
    assert "efficient" in notes


def test_all_named_cases_are_published() -> None:
    theirs = set(published.load("magneton")["subject"])
    names = {name for names in analysis.PAPER_CASES.values() for name in names}
    assert names <= theirs
    assert set(analysis.CONTRADICTIONS) <= names


def test_cases_by_verdict_beside_the_paper() -> None:
    given = comparisons(
        {"case": "T4", "verdict": "no difference", "saved_frac": 0.001, "low_frac": -0.01, "high_frac": 0.01},
        {"case": "D3"}, {"case": "D1", "saved_frac": 0.8, "high_frac": 0.9},
        {"case": "D2", "verdict": "not measured", "saved_frac": None, "low_frac": None, "high_frac": None},
    )  # fmt: skip
    table = analysis.cases(given, published.load("magneton"))
    assert table["case"].tolist() == ["D1", "D3", "D3", "T4", "D2"]
    assert table["paper_case"].tolist() == ["hf-39073", "hf-14450", "pytorch-153195", "", "pytorch-141822"]
    assert table.loc[3, ["paper_frac", "part_frac"]].isna().all()
    alone = analysis.cases(given)
    assert alone["case"].tolist() == ["D1", "D3", "T4", "D2"]
    assert alone.columns.tolist() == table.columns.tolist()
    assert (alone["paper_case"] == "").all()


def test_a_story_from_flag_to_fix() -> None:
    usual = {"subject": "D1", "is_same": False, "verdict": "waste", "a_line": "gelu.py:9 slow", "saved_frac": 0.6}
    mine = {"a_operators": "mul + tanh", "b_operators": "gelu"}
    regions = rows(Regions, usual, {"region": 0, "a_time_s": 1.0}, {"region": 1, "a_time_s": 2.0} | mine,
                   {"region": 2, "is_same": True}, {"region": 0, "subject": "D2"})  # fmt: skip
    table = analysis.story(comparisons({"case": "D1"}, {"case": "D2"}), regions, "D1")
    assert table["part"].tolist() == ["A", "B", "region", "region", "cause", "fix"]
    assert table["what"].tolist()[2:] == ["mul + tanh | gelu", " | ", "unfused chain: 8 kernels and 1", "gelu.py:fast"]
    assert table["call_j"].tolist()[:2] == [0.01, 0.005]
    assert table.loc[1, ["low_j", "high_j"]].tolist() == pytest.approx([0.0048, 0.0052])
    assert table.loc[5, ["call_j", "low_j", "high_j"]].tolist() == pytest.approx([0.0051, 0.0049, 0.0053])
    assert table.loc[0, ["low_j", "high_j", "saved_frac"]].isna().all()
    with pytest.raises(GpubloatError, match="case 'D9' was compared 0 times"):
        analysis.story(comparisons({"case": "D1"}), regions, "D9")


def test_a_story_of_what_was_not_measured() -> None:
    nothing = dict.fromkeys(["saved_frac", "low_frac", "high_frac", "a_call_j", "b_call_j", "fix_saved_frac"])
    given = comparisons(
        {"case": "D1", "wasteful": "", "verdict": "not measured", "fix": "", "remedy": "gelu"} | nothing
    )
    table = analysis.story(given, Regions.none(), "D1")
    assert table["part"].tolist() == ["A", "B", "cause", "fix"]
    assert table["call_j"].isna().all()
    assert table["what"].iloc[-1] == "gelu"


# A against A


def test_the_band_is_that_of_the_instrument() -> None:
    energies = [100, 101, 99, 102, 103, 100, 101, 99, 98, 100, 102, 101]
    found = analysis.null_band(blocks(*energies)).iloc[0]
    sides = list("ABBA" * 3)
    saved = statistics.saved(statistics.log_ratios(sides, energies))
    assert found["band_frac"] == pytest.approx(statistics.null_band(saved), rel=1e-3)
    assert math.log1p(found["mean_frac"]) == pytest.approx(saved.log_ratio)
    assert found["least_frac"] <= found["mean_frac"] <= found["most_frac"]
    assert found["call_j"] == pytest.approx(np.mean(energies) / 10)


@pytest.mark.parametrize("n", range(1, len(analysis.T_QUANTILES) + 1))
def test_quantiles_are_those_of_student(n: int) -> None:
    assert analysis.T_QUANTILES[n - 1] == pytest.approx(statistics.t_quantile(0.975, n), abs=6e-4)


def test_a_band_says_why_it_is_empty() -> None:
    table = pd.concat([blocks(1, 1, 1, 1, subject="one"), blocks(1, NAN, 1, 1, subject="gap"),
                       blocks(1, 1, 1, 1, subject="order", order="ABAB")])  # fmt: skip
    found = analysis.null_band(table)
    assert found["band_frac"].isna().all()
    assert found["notes"].tolist() == [
        "1 blocks were measured, and 3 are needed", "a block has no energy", "the order of measurements is not A B B A",
    ]  # fmt: skip


@given(joules=st.floats(0, 1e6), times=st.floats(0, 1e9), grid=st.floats(0, 2000))
def test_a_footprint_is_a_product(joules: float, times: float, grid: float) -> None:
    found = analysis.footprint(joules, times, grid)
    assert found["energy_kwh"] * 3.6e6 == pytest.approx(joules * times)
    assert found["emitted_gco2e"] == pytest.approx(found["energy_kwh"] * grid)


def test_a_footprint_needs_a_grid() -> None:
    with pytest.raises(GpubloatError, match="grid_g_per_kwh is nan"):
        analysis.footprint(1, 1, NAN)
    assert math.isnan(analysis.footprint(NAN, 10, 300)["energy_kwh"])


def test_empty_tables_give_empty_tables() -> None:
    pairs = (Operators.none(), Closure.none())
    empty = [
        analysis.by_operator(*pairs), analysis.by_name(*pairs), analysis.by_module(*pairs),
        analysis.two_systems(*pairs),
        analysis.power_of_loads(Loads.none()), analysis.agreement(Loads.none()), analysis.null_band(Blocks.none()),
        analysis.cases(Comparisons.none()), analysis.cases(Comparisons.none(), published.load("magneton")),
    ]  # fmt: skip
    assert [len(table) for table in empty] == [0] * len(empty)
    # A step without operators is all remainder.
    assert analysis.by_operator(Operators.none(), closure({}))["step_j"].tolist() == [1.0]
