"""The rule of `targets.fit` against what a real driver took (data/measured/driver-rule-h200)."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from gpubloat import Run
from gpubloat.tables import targets

RUN = Path(__file__).parents[2] / "data" / "measured" / "driver-rule-h200"


@pytest.fixture(scope="module")
def asked() -> pd.DataFrame:
    table = Run.load(RUN)["choices"]
    return table[~table["is_jit_forced"]]


def test_the_stored_verdict_is_todays_rule(asked: pd.DataFrame) -> None:
    elements = asked.rename(columns={"gpu": "library"}).drop(columns=["fit", "is_loadable"]).assign(member=None)
    today = targets.fit(elements, "sm_90")
    assert today["fit"].tolist() == asked["fit"].tolist()


def test_the_driver_takes_only_what_the_rule_calls_loadable(asked: pd.DataFrame) -> None:
    assert asked["is_chosen"].sum() == 22
    assert not (asked["is_chosen"] & ~asked["is_loadable"]).any()


def test_a_region_loads_exactly_when_the_rule_finds_something(asked: pd.DataFrame) -> None:
    regions = asked.groupby("region")[["is_loadable", "is_chosen"]].any()
    assert (regions["is_loadable"] == regions["is_chosen"]).all()
    assert set(regions["is_loadable"]) == {True, False}


def test_forcing_jit_takes_no_cubin() -> None:
    table = Run.load(RUN)["choices"]
    forced = table[table["is_jit_forced"] & table["is_chosen"]]
    assert len(forced)
    assert set(forced["kind"]) == {"ptx"}
