"""Costs of driver calls: the documented constants, constants fitted to a measured table, and their sums in a replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gpubloat import memory
from gpubloat.errors import GpubloatError
from gpubloat.memory.costs import CONSTANTS, fit
from gpubloat.run import Run
from tests.build import snapshot
from tests.memory.test_replay import model

MIB = 1 << 20
MEASURED = Path(__file__).parents[2] / "data" / "measured" / "memory-h200-vmm"


def cost(costs: Any, call: str, n: int) -> float:
    return float(costs.of(pd.Series([call]), pd.Series([n]))[0])


def measured(**lines: tuple[float, float]) -> pd.DataFrame:
    """Rows of a table whose times lie on these lines, with handles of two sizes."""
    rows = [
        (call, chunk, n, (fixed + each * n) * (1 if chunk == 2 * MIB else 9))
        for call, (fixed, each) in lines.items()
        for chunk in (2 * MIB, 64 * MIB)
        for n in (1, 8, 64, 1024)
    ]
    return pd.DataFrame(rows, columns=["call", "chunk_bytes", "n_handles", "time_us"])


def test_the_constants_are_the_measured_ones() -> None:
    """What `fit` finds in the campaign's table; reserve and address_free have no handles, so a sum of them is fixed."""
    table = Run.load(MEASURED)["vmm_costs"]
    fitted = fit(table[~table["is_busy"]])
    for call in ("malloc", "free", "create", "map", "set_access", "set_access_each", "unmap", "release"):
        assert cost(CONSTANTS, call, 1024) == pytest.approx(cost(fitted, call, 1024), rel=0.02)
    assert cost(CONSTANTS, "reserve", 0) == pytest.approx(cost(fitted, "reserve", 1024), rel=0.02)
    assert CONSTANTS.record()["not_measured"] == []


def test_fitting_finds_the_line() -> None:
    found = fit(measured(create=(5.0, 9.5), set_access=(12.0, 0.25), reserve=(3.0, 0.0), odd=(1.0, 1.0)))
    assert found.us["create"] == pytest.approx((5.0, 9.5))
    assert found.us["reserve"] == pytest.approx((3.0, 0.0), abs=1e-9)
    assert "odd" not in found.us
    assert cost(found, "set_access", 100) == pytest.approx(37)
    assert cost(found, "set_access_each", 100) == pytest.approx(1225)  # 100 calls of one handle
    assert fit(measured(create=(5.0, 9.5)), 64 * MIB).us["create"] == pytest.approx((45.0, 85.5))
    assert "measured" in found.source


def test_fitted_constants_are_never_negative() -> None:
    rows = [("map", 2 * MIB, 1, 1.0), ("map", 2 * MIB, 2, 8.0), ("map", 2 * MIB, 4, 32.0)]
    table = pd.DataFrame(rows, columns=["call", "chunk_bytes", "n_handles", "time_us"])
    fixed, each = fit(table).us["map"]
    assert fixed == 0 < each
    fixed, each = fit(table.assign(time_us=[8.0, 4.0, 1.0])).us["map"]
    assert each == 0 < fixed
    one = fit(table[table["n_handles"] == 4])
    assert one.us["map"] == (0.0, pytest.approx(8.0))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.drop(columns="time_us"),
        lambda t: t.assign(call="odd"),
        lambda t: t.assign(time_us=0.0),
        lambda t: t.assign(time_us=float("nan")),
    ],
)
def test_tables_that_are_none(change: Any) -> None:
    with pytest.raises(GpubloatError):
        fit(change(measured(create=(1.0, 1.0))))


def test_a_replay_sums_them(tmp_path: Path) -> None:
    ops: list[tuple[Any, ...]] = []
    for _ in range(3):
        ops += [("alloc", 1, 40 * MIB, 0, "0.0"), ("alloc", 2, 60 * MIB, 0, "0.0"), ("free", 1), ("free", 2)]
    ops += [("alloc", 3, 100 * MIB, 0, "0.0")]
    run = memory.load(snapshot.write(tmp_path / "s.pickle", snapshot.recorded(model(), ops)))
    found = memory.replay(run, "stitching")
    row, calls = found["replays"].iloc[0], found["calls"]
    assert row["driver_s"] == pytest.approx(calls["cost_us"].sum() / 1e6)
    # 20 and 30 chunks are made, mapped and opened; then 50 are mapped and opened once more.
    assert row["driver_s"] * 1e6 == pytest.approx(3 * 19 + 9.6 * 50 + 2.1 * 100 + 23.2 * 100)
    assert (row["n_create"], row["n_map"], row["n_set_access"], row["n_reserve"]) == (50, 100, 3, 3)
    assert row["n_calls"] == 156
    assert row["last_call_event"] == len(run["events"]) - 1
    assert (row["n_s1"], row["n_s3"], row["n_s4"], row["n_stitched"]) == (4, 1, 2, 1)
    assert found.provenance["costs"]["source"].startswith("constants")
    dear = memory.replay(run, "stitching", costs=measured(create=(0.0, 1000.0)))
    assert dear["replays"]["driver_s"][0] == pytest.approx(0.05)
    assert "fitted" in dear.provenance["costs"]["source"]
    caching = memory.replay(run, "caching")["replays"].iloc[0]
    assert caching["n_calls"] == caching["n_malloc"] == 3
    assert pd.isna(caching["n_s1"])


def test_one_access_for_each_handle_is_dearer(tmp_path: Path) -> None:
    ops = [("alloc", i, 40 * MIB, 0, "0.0") for i in range(2)] + [("free", 0), ("free", 1)]
    run = memory.load(
        snapshot.write(tmp_path / "s.pickle", snapshot.recorded(model(), [*ops, ("alloc", 9, 80 * MIB, 0, "0.0")]))
    )
    table = measured(set_access=(20.0, 5.0))
    once = memory.replay(run, "stitching", costs=table)["replays"].iloc[0]
    each = memory.replay(run, "gmlake", fragmentation_limit_mb=64, costs=table)["replays"].iloc[0]
    assert once["n_stitched"] == each["n_stitched"] == 1
    assert (once["n_set_access"], each["n_set_access"]) == (3, 80)
    assert once["driver_s"] * 1e6 == pytest.approx(3 * 20 + 80 * 5)
    assert each["driver_s"] * 1e6 == pytest.approx(80 * 25)


def test_settings_of_one_model_do_not_reach_another(tmp_path: Path) -> None:
    run = memory.load(
        snapshot.write(tmp_path / "s.pickle", snapshot.recorded(model(), [("alloc", 1, 9 * MIB, 0, "0.0")]))
    )
    assert memory.replay(run, "stitching")["replays"]["settings"][0] == ""
    row = memory.replay(run, "stitching", chunk_bytes=8 * MIB)["replays"].iloc[0]
    assert (row["settings"], row["peak_reserved_bytes"]) == (
        f"chunk_bytes={8 * MIB},stitch_min_bytes={8 * MIB}",
        16 * MIB,
    )
    for name, given in (("stitching", {"reuse_limit": 3}), ("caching", {"chunk_bytes": 2 * MIB})):
        with pytest.raises(GpubloatError, match=f"{name} has no setting"):
            memory.replay(run, name, **given)
