"""The tables of the instrument: what is not measured is empty, and 0 is not an energy."""

from __future__ import annotations

import math

import pandas as pd
import pytest
from matplotlib.figure import Figure

from gpubloat.errors import SchemaError
from gpubloat.plots import energy as plots
from gpubloat.tables import schema

BLOCK = {"subject": "mlp", "side": "A", "order": 0, "seconds_s": 2.0, "n_calls": 900, "energy_j": 1200.0,
         "error_j": 6.0, "power_w": 600.0, "call_time_s": 0.0022, "sm_mhz": 1500.0, "temperature_c": 60.0,
         "throttle_bits": 4, "notes": ""}  # fmt: skip


def test_a_block_that_was_not_measured_is_empty() -> None:
    missing = dict.fromkeys(("energy_j", "error_j", "power_w", "sm_mhz", "throttle_bits"))
    rows = pd.DataFrame([BLOCK, BLOCK | missing | {"notes": "not measured: no counter"}])
    checked = schema("energy", "blocks").check(rows, "blocks")
    assert checked["energy_j"].isna().tolist() == [False, True]


@pytest.mark.parametrize("wrong", [{"energy_j": 0.0}, {"power_w": 0.0}, {"side": "C"}, {"n_calls": -1}])
def test_what_is_no_block(wrong: dict[str, object]) -> None:
    with pytest.raises(SchemaError, match=next(iter(wrong))):
        schema("energy", "blocks").check(pd.DataFrame([BLOCK | wrong]), "blocks")


def test_two_systems_of_which_nothing_was_measured_are_drawn() -> None:
    names = ["step_j", "error_j", "frac"]
    row = {"subject": "s", "kind": "not measured", "name": "x$_y", "more_j": math.nan, "a_n": 1, "b_n": 1}
    table = pd.DataFrame([row | {f"{side}_{name}": math.nan for side in "ab" for name in names}])
    ax = plots.two_systems(table, ax=Figure().subplots())
    assert ax.get_xlim()[1] > 0
