"""Reports of users, by their number in ../shared/facts/cases/gmlake_bug_cases.csv: what must come out of each."""

from __future__ import annotations

import csv
import os
import pickle
import re
from pathlib import Path

import pandas as pd
import pytest

from gpubloat import memory
from gpubloat.analysis import memory as analysis
from gpubloat.analysis import pinning, stacks, whatif
from gpubloat.errors import GpubloatError
from gpubloat.memory import oom, oomtrace
from gpubloat.memory.allocators import Caching, Driver, lint
from tests.build import snapshot
from tests.build.snapshot import MIB
from tests.memory.test_oom import REAL

FIRST = 1 << 40
CASES = Path(__file__).resolve().parents[3] / "shared" / "facts" / "cases" / "gmlake_bug_cases.csv"
POSTED = {4: "pytorch/pytorch #152135", 5: "murong-xu/CADS #4", 7: "zju3dv/Diffuman4D #20", 8: "huggingface/meshgen #7"}
SIZE = re.compile(r"([\d.]+) ?(GiB|MiB)")


def rows() -> dict[int, dict[str, str]]:
    if not CASES.exists():
        pytest.skip("../shared/facts/cases is absent")
    with CASES.open(encoding="utf-8") as file:
        return {int(row["id"]): row for row in csv.DictReader(file)}


@pytest.mark.parametrize("number", POSTED)
def test_the_numbers_of_the_report_are_those_of_the_message(number: int) -> None:
    """The collected report and the posted text were written down apart from each other."""
    row = rows()[number]
    assert POSTED[number] in row["where"]
    text = next(text for where, text, _, _ in REAL if where.startswith(POSTED[number]))
    units = {"GiB": 1 << 30, "MiB": 1 << 20}
    reported = {round(float(n) * units[unit]) for n, unit in SIZE.findall(row["symptom"])}
    found = set(filter(None, (getattr(oom.parse(text), name) for name in oom._FIELDS)))
    assert reported <= found | {round(8 * units["GiB"])}


def test_case_1_small_survivors_pin_a_large_segment(tmp_path: Path) -> None:
    """The large segment of the first step is split by what the second one keeps: its request then fails."""
    model = Caching(Driver(1200 * MIB, first=FIRST))
    operations: list[snapshot.Operation] = [("alloc", "step1", 1000 * MIB, 0, "0.0"), ("free", "step1")]
    for i in range(4):
        operations += [("alloc", f"tmp{i}", 200 * MIB, 0, "0.0"), ("alloc", f"kept{i}", 2 * MIB, 0, "0.0")]
    operations += [("free", f"tmp{i}") for i in range(4)]
    operations += [("alloc", "step2", 1000 * MIB, 0, "0.0")]
    made = snapshot.recorded(model, operations)
    made["device_traces"][0][-1]["device_free"] = 200 * MIB
    run = memory.load(snapshot.write(tmp_path / "a.pickle", made))
    blocks = stacks.of_blocks(run["events"], run["blocks"])
    (row,) = pinning.by_owner(run["segments"], blocks, run["stacks"], run["frames"], by="place").to_dict("records")
    assert row["place"] == "step (train.py:7)"
    assert (row["n_blocks"], row["held_bytes"], row["pinned_bytes"]) == (4, 8 * MIB, 992 * MIB)
    assert row["unlocked_bytes"] == 992 * MIB
    ((_, event),) = oomtrace.of_trace(run)
    verdict = oomtrace.of_trace(run)[0, event]
    assert verdict.verdict == "fragmentation"
    helped = oomtrace.would_have_helped(run, 0, event).set_index("allocator")
    assert helped.loc["stitching", "is_served"]
    assert helped.loc["stitching", "spare_bytes"] <= 1200 * MIB - 1000 * MIB - 8 * MIB


def test_case_2_the_pair_of_settings_is_flagged() -> None:
    given = {"expandable_segments": True, "max_split_size": 128 * MIB}
    assert any("max_split_size" in sentence for sentence in lint(given))
    assert not lint({"expandable_segments": True, "max_split_size": -1})


def test_case_10_protocols_2_to_5_are_read(tmp_path: Path) -> None:
    made = snapshot.recorded(Caching(Driver(first=FIRST)), [("alloc", 0, MIB, 0, "0.0")])
    counts = {
        len(memory.load(snapshot.write(tmp_path / f"{p}.pickle", made, p))["events"])
        for p in range(2, pickle.HIGHEST_PROTOCOL + 1)
    }
    assert counts == {2}


def test_case_13_a_ring_that_dropped_its_start_is_said(tmp_path: Path) -> None:
    operations = [("alloc", 0, MIB, 0, "0.0"), ("alloc", 1, MIB, 0, "0.0"), ("free", 0)]
    whole = snapshot.recorded(Caching(Driver(first=FIRST)), operations)
    cut = snapshot.recorded(Caching(Driver(first=FIRST)), operations, skip=3)
    history = [
        memory.load(snapshot.write(tmp_path / f"{i}.pickle", made)).provenance["history"]["0"]
        for i, made in enumerate((whole, cut))
    ]
    assert [h["starts_mid_run"] for h in history] == [False, True]
    assert "starts mid-run: 1 frees of blocks whose allocation is not in the trace" in history[1]["why"]


def test_case_14_no_history_is_explained_and_the_end_still_diagnosed(tmp_path: Path) -> None:
    made = snapshot.recorded(Caching(Driver(first=FIRST)), [("alloc", 0, MIB, 0, "0.0")])
    made["device_traces"] = [[]]
    run = memory.load(snapshot.write(tmp_path / "a.pickle", made))
    assert "call torch.cuda.memory._record_memory_history()" in run.provenance["history"]["0"]["why"]
    with pytest.raises(GpubloatError, match="there is nothing to replay"):
        memory.replay(run)
    assert analysis.now(run["segments"])["reserved_bytes"].tolist() == [2 * MIB]
    assert pinning.by_segment(run["segments"], run["blocks"])["pinned_bytes"].tolist() == [MIB]
    assert analysis.history(run["events"], run["segments"], run["blocks"]).empty


def test_case_28_no_gain_is_a_result(tmp_path: Path) -> None:
    """Requests that all fit exactly: no allocator can save anything, and the sentence says so."""
    operations = [("alloc", i, 20 * MIB, 0, "0.0") for i in range(5)]
    made = snapshot.recorded(Caching(Driver(first=FIRST)), operations)
    run = memory.load(snapshot.write(tmp_path / "a.pickle", made))
    names = ("caching", "expandable", "stitching", "gmlake")
    played = pd.concat([memory.replay(run, name)["replays"] for name in names])
    assert whatif.verdict(whatif.what_if(played)).startswith("no gain: ")


def test_the_reports_are_covered() -> None:
    """Those that are about snapshots, messages and recording; the others are about allocators."""
    text = "".join(p.read_text("utf-8") for p in Path(os.path.dirname(__file__)).glob("test_*.py"))
    for number in (1, 2, 10, 13, 14, 28):
        assert number in rows()
        assert f"def test_case_{number}_" in text
