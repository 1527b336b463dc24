"""Fragmentation, pinning, stacks and what-if: conservation on generated and real traces, and known small ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubloat import memory
from gpubloat.analysis import memory as analysis
from gpubloat.analysis import pinning, stacks, whatif
from gpubloat.errors import GpubloatError
from gpubloat.memory.allocators import Caching, Driver, Expandable, Settings
from gpubloat.run import Run
from gpubloat.tables.memory import Blocks, Events, Segments
from tests.build import snapshot
from tests.build.snapshot import MIB, block, segment
from tests.memory.test_real_traces import EXACT, TRACES, needs_traces

KB = 1024
FIRST = 1 << 40  # as a device has them: what is replayed goes elsewhere
OPERATION = st.one_of(
    st.tuples(st.just("alloc"), st.integers(0, 30), st.integers(1, 40 * MIB), st.sampled_from([0, 7]), st.just("0.0")),
    st.tuples(st.just("alloc"), st.integers(31, 60), st.integers(1, 600 * KB), st.just(0), st.just("0.0")),
    st.tuples(st.just("free"), st.integers(0, 60)),
    st.just(("empty_cache",)),
)


def operations(drawn: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Each name is allocated once at a time."""
    live: set[int] = set()
    kept = []
    for op in drawn:
        if op[0] == "alloc" and op[1] in live:
            continue
        live = live | {op[1]} if op[0] == "alloc" else live - {op[1]} if op[0] == "free" else live
        kept.append(op)
    return kept


def run_of(tmp: Path, content: snapshot.Snapshot) -> Run:
    return memory.load(snapshot.write(tmp, content))


def pinned(run: Run) -> pd.DataFrame:
    return pinning.by_segment(run["segments"], run["blocks"])


# Over time


@settings(max_examples=12, deadline=None)
@given(st.lists(OPERATION, max_size=80), st.booleans(), st.integers(0, 40))
def test_the_history_is_what_the_allocator_had(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[Any, ...]], is_expandable: bool, skip: int
) -> None:
    """Reserved bytes to the byte; active ones too where every block is a multiple of 512 without an unsplit rest."""
    model = Expandable(Driver(first=FIRST)) if is_expandable else Caching(Driver(first=FIRST))
    file = tmp_path_factory.mktemp("a") / "a.pickle"
    run = run_of(file, snapshot.recorded(model, operations(drawn), skip))
    if not len(run["events"]):
        return
    found = analysis.history(run["events"], run["segments"], run["blocks"])
    replayed = memory.replay(run, model.name, start="recorded")["usage"]
    assert len(found) == len(run["events"])
    assert (found["reserved_bytes"] - found["active_bytes"] == found["free_bytes"]).all()
    end = found.iloc[-1]
    assert end["reserved_bytes"] == run["segments"]["size_bytes"].sum()
    assert end["active_bytes"] == run["segments"]["active_bytes"].sum()
    own = sum(s.size for s in model.segments())
    assert end["reserved_bytes"] == own
    gap = found["active_bytes"].astype(float) - replayed["active_bytes"].astype(float)
    assert (gap.abs() <= MIB * (run["events"]["action"] == "alloc").sum() + MIB * len(run["blocks"])).all()


@settings(max_examples=12, deadline=None)
@given(st.lists(OPERATION, max_size=80), st.integers(0, 40), st.floats(0, 1))
def test_an_earlier_moment_is_what_the_allocator_had(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[Any, ...]], skip: int, share: float
) -> None:
    """Wound back to any event: the segments of the history, each filled without a gap, and the blocks of `live`."""
    model = Caching(Driver(first=FIRST))
    run = run_of(tmp_path_factory.mktemp("a") / "a.pickle", snapshot.recorded(model, operations(drawn), skip))
    if not len(run["events"]):
        return
    event = round(share * (len(run["events"]) - 1))
    found, inside = analysis.rewound(run["events"], run["segments"], run["blocks"], event)
    history = analysis.history(run["events"], run["segments"], run["blocks"]).iloc[event]
    assert found["size_bytes"].sum() == history["reserved_bytes"]
    filled = inside.groupby("segment")["size_bytes"].sum()
    assert (
        filled.astype(int).tolist() == found.set_index("segment")["size_bytes"].loc[filled.index].astype(int).tolist()
    )
    held = inside[inside["state"] != "inactive"]
    lives = analysis.live(run["events"], run["blocks"], {0: event})
    assert sorted(held["address"]) == sorted(lives["address"])
    sums = pinning.totals(pinning.by_segment(found, inside))
    if len(sums):
        one = sums.iloc[0]
        assert one["reserved_bytes"] == one["held_bytes"] + one["pinned_bytes"] + one["releasable_bytes"]


def test_at_the_end_nothing_is_wound_back(tmp_path: Path) -> None:
    model = Caching(Driver(first=FIRST))
    ops = [
        ("alloc", 1, 30 * MIB, 0, "0.0"),
        ("alloc", 2, 700 * KB, 0, "0.0"),
        ("free", 1),
        ("alloc", 3, 5 * MIB, 0, "0.0"),
    ]
    run = run_of(tmp_path / "a.pickle", snapshot.recorded(model, ops))
    last = int(run["events"]["event"].max())
    found, inside = analysis.rewound(run["events"], run["segments"], run["blocks"], last)
    keys = ["address", "size_bytes", "kind"]
    assert found[keys].values.tolist() == run["segments"].sort_values("address")[keys].values.tolist()
    keys = ["address", "size_bytes", "state"]
    assert inside[keys].values.tolist() == run["blocks"].sort_values("address")[keys].values.tolist()
    model = Expandable(Driver(first=FIRST))
    run = run_of(tmp_path / "b.pickle", snapshot.recorded(model, ops))
    with pytest.raises(GpubloatError, match="expandable segments cannot be wound back"):
        analysis.rewound(run["events"], run["segments"], run["blocks"], 0)


@needs_traces
@pytest.mark.parametrize("name", EXACT)
def test_real_histories_are_those_of_an_exact_replay(name: str) -> None:
    """Where every address is exact, the replay's bytes are the allocator's own."""
    run = memory.load(TRACES / name)
    found = analysis.history(run["events"], run["segments"], run["blocks"])
    true = memory.replay(run, "caching")["usage"]
    assert (found["reserved_bytes"] == true["reserved_bytes"]).all()
    gap = (found["active_bytes"].astype(float) - true["active_bytes"].astype(float)).abs()
    assert gap.max() <= 0.001 * float(true["active_bytes"].max())
    ours, theirs = analysis.peaks(found).iloc[0], analysis.peaks(true).iloc[0]
    assert ours["peak_reserved_bytes"] == theirs["peak_reserved_bytes"] == EXACT[name][1] * MIB
    assert ours["utilisation_frac"] == pytest.approx(theirs["utilisation_frac"], abs=0.001)


def usage(reserved: list[int], active: list[int]) -> pd.DataFrame:
    frame = pd.DataFrame(
        {"device": 0, "event": range(len(reserved)), "reserved_bytes": reserved, "active_bytes": active}
    )
    return frame.assign(free_bytes=frame["reserved_bytes"] - frame["active_bytes"], requested_bytes=active)


def test_both_fractions_and_both_peaks() -> None:
    table = usage([0, 100, 200, 200], [0, 90, 80, 150])
    assert analysis.fragmentation(table)["fragmentation_frac"].tolist()[1:] == pytest.approx([0.1, 0.6, 0.25])
    assert analysis.fragmentation(table)["fragmentation_frac"].isna()[0]
    row = analysis.peaks(table).iloc[0]
    assert (row["peak_reserved_event"], row["peak_active_event"]) == (2, 3)
    assert row["utilisation_at_peak_frac"] == 0.4  # when reserved first peaked
    assert row["utilisation_frac"] == 0.75  # the paper's: both peaks
    assert row["fragmentation_frac"] == 0.25
    assert row["end_fragmentation_frac"] == 0.25


def test_several_gpus_are_kept_apart() -> None:
    table = pd.concat([usage([10, 20], [10, 10]), usage([5], [1]).assign(device=1)])
    assert analysis.peaks(table)[["device", "peak_reserved_bytes"]].to_numpy().tolist() == [[0, 20], [1, 5]]


def test_without_segments_bytes_start_at_zero() -> None:
    events = Events.check(
        pd.DataFrame(
            {
                "device": 0, "event": [0, 1, 2], "action": ["alloc", "alloc", "free_completed"],
                "address": np.array([1, 2, 1], np.uint64), "size_bytes": np.array([1000, 10, 1000], np.uint64),
                "stream": np.zeros(3, np.uint64), "pool": "0.0", "time_us": pd.array([None] * 3, "Int64"),
                "stack": pd.array([None] * 3, "Int64"),
            }
        ),
        "events",
    )  # fmt: skip
    found = analysis.history(events, Segments.none(), Blocks.none())
    assert found["requested_bytes"].tolist() == [1000, 1010, 10]
    assert found["active_bytes"].tolist() == found["reserved_bytes"].tolist() == [1000, 1010, 10]


def test_nothing_recorded_is_nothing() -> None:
    none = analysis.history(Events.none(), Segments.none(), Blocks.none())
    assert none.empty
    assert analysis.peaks(none).empty
    assert analysis.now(Segments.none()).empty
    assert analysis.live(Events.none(), Blocks.none()).empty
    assert pinning.by_segment(Segments.none(), Blocks.none()).empty


# Pinning


@settings(max_examples=12, deadline=None)
@given(st.lists(OPERATION, max_size=60), st.booleans())
def test_reserved_is_held_and_pinned_and_releasable(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[Any, ...]], is_expandable: bool
) -> None:
    """What counts as releasable is exactly what the allocator's own empty_cache gives back."""
    model = Expandable(Driver(first=FIRST)) if is_expandable else Caching(Driver(first=FIRST))
    run = run_of(tmp_path_factory.mktemp("a") / "a.pickle", snapshot.recorded(model, operations(drawn)))
    table = pinned(run)
    parts = table[["held_bytes", "pinned_bytes", "releasable_bytes", "unattributed_bytes"]]
    assert (parts >= 0).all(axis=None)
    assert (parts.sum(axis=1) == table["size_bytes"]).all()
    before = model.driver.used
    model.release()
    assert table["releasable_bytes"].sum() == before - model.driver.used
    assert table["pinned_bytes"].sum() == model.driver.used - model.active


@settings(max_examples=10, deadline=None)
@given(st.lists(OPERATION, min_size=10, max_size=60), st.booleans(), st.data())
def test_what_a_block_keeps_is_what_its_end_gives_back(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[Any, ...]], is_expandable: bool, data: st.DataObject
) -> None:
    """Free one block in the model and release: the driver gets just that much more."""
    model = Expandable(Driver(first=FIRST)) if is_expandable else Caching(Driver(first=FIRST))
    run = run_of(tmp_path_factory.mktemp("a") / "a.pickle", snapshot.recorded(model, operations(drawn)))
    args = [run[name] for name in ("events", "segments", "blocks", "stacks", "frames")]
    table = pinning.by_block(*args)
    assert (table["freed_bytes"] >= table["unlocked_bytes"]).all()
    assert (table["pinned_bytes"] >= table["unlocked_bytes"]).all()
    assert (table["pinned_bytes"] > 0).all()
    if not len(table):
        return
    row = table.iloc[data.draw(st.integers(0, len(table) - 1))]
    releasable = int(pinned(run)["releasable_bytes"].sum())
    model.free(int(row["address"]))
    before = model.driver.used
    model.release()
    assert before - model.driver.used == releasable + row["freed_bytes"]


def other(line: int) -> list[dict[str, Any]]:
    return [
        {"filename": "/usr/lib/python3.11/site-packages/torch/nn/functional.py", "name": "linear", "line": 1},
        {"filename": "/home/me/train.py", "name": f"step{line}", "line": line},
        {"filename": "/home/me/main.py", "name": "main", "line": 2},
    ]


def small_case() -> snapshot.Snapshot:
    """20 MiB: 2 held by line 1, 6 free, 2 held by line 2, 10 free; another 20 MiB all free; a third held by line 1
    at both ends; a private one all free."""

    def one(size: int) -> dict[str, Any]:
        return block(size, "active_allocated", frames=other(1))

    def two(size: int) -> dict[str, Any]:
        return block(size, "active_allocated", frames=other(2))

    def born(address: int, time: int) -> dict[str, Any]:
        return snapshot.event("alloc", address, 2 * MIB, time_us=time)

    return snapshot.snapshot(
        [
            segment(0x10000000, [one(2 * MIB), block(6 * MIB), two(2 * MIB), block(10 * MIB)]),
            segment(0x20000000, [block(20 * MIB)]),
            segment(0x30000000, [one(MIB), block(18 * MIB), one(MIB)]),
            segment(0x40000000, [block(20 * MIB)], segment_pool_id=(1, 0)),
        ],
        [born(0x10000000, 100), born(0x10800000, 250)],
    )  # fmt: skip


def test_who_pins_what(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a.pickle", small_case())
    table = pinned(run)
    assert (table["pinned_bytes"] // MIB).tolist() == [16, 0, 18, 20]
    assert (table["releasable_bytes"] // MIB).tolist() == [0, 20, 0, 0]
    assert (table["largest_free_bytes"] // MIB).tolist() == [10, 20, 18, 20]
    assert table["n_held"].tolist() == [2, 0, 2, 0]
    total = pinning.totals(table).iloc[0]
    assert total["n_pinned_segments"] == 3
    assert total["reserved_bytes"] == 80 * MIB == total[["held_bytes", "pinned_bytes", "releasable_bytes"]].sum()
    args = [run[name] for name in ("segments", "blocks", "stacks", "frames")]
    for by in ("stack", "place"):
        owners = pinning.by_owner(*args, by=by)
        assert owners["place"].tolist() == ["step1 (me/train.py:1)", "step2 (me/train.py:2)"]
        assert owners["n_blocks"].tolist() == [3, 1]
        assert owners["n_segments"].tolist() == [2, 1]
        assert (owners["pinned_bytes"] // MIB).tolist() == [34, 16]  # the first segment counts for both
        assert (owners["unlocked_bytes"] // MIB).tolist() == [18, 0]  # only the third is line 1's alone
        assert (owners["freed_bytes"] // MIB).tolist() == [20, 0]
    blocks = pinning.by_block(run["events"], *args)
    assert blocks["unlocked_bytes"].sum() == 0  # no block alone keeps a segment
    first = blocks[blocks["address"] == 0x10000000].iloc[0]
    assert (first["age_events"], first["age_us"]) == (1, 150)
    assert blocks["age_events"].isna().sum() == 2


def test_expandable_segments_go_back_by_the_page(tmp_path: Path) -> None:
    held = "active_allocated"
    one = segment(0x40000000, [block(MIB, held), block(59 * MIB), block(20 * MIB, held)], is_expandable=True)
    run = run_of(tmp_path / "a.pickle", snapshot.snapshot([one]))
    row = pinned(run).iloc[0]
    assert (row["pinned_bytes"] // MIB, row["releasable_bytes"] // MIB) == (19, 40)
    row = pinning.by_segment(run["segments"], run["blocks"], large_page_bytes=2 * MIB).iloc[0]
    assert (row["pinned_bytes"] // MIB, row["releasable_bytes"] // MIB) == (1, 58)


@needs_traces
@pytest.mark.parametrize("name", [*EXACT, "mosaic/output.pickle", "yiyi_llm_inference/1.3b_snapshot.pickle"])
def test_sums_close_on_real_traces(name: str) -> None:
    run = memory.load(TRACES / name)
    table = pinned(run)
    parts = table[["held_bytes", "pinned_bytes", "releasable_bytes", "unattributed_bytes"]]
    assert (parts.sum(axis=1) == table["size_bytes"]).all()
    assert (parts.drop(columns="unattributed_bytes") >= 0).all(axis=None)
    assert pinning.totals(table)["reserved_bytes"].sum() == run["segments"]["size_bytes"].sum()
    args = [run[n] for n in ("segments", "blocks", "stacks", "frames")]
    owners = pinning.by_owner(*args, by="place")
    assert (owners["unlocked_bytes"] <= owners["pinned_bytes"]).all()
    assert owners["unlocked_bytes"].sum() <= table["pinned_bytes"].sum() or name.startswith("mosaic")


@needs_traces
def test_gradients_pin_a_training_run() -> None:
    """Gradients that live on between the activations' segments: what memory.verify finds exact, this explains."""
    run = memory.load(TRACES / "cs336_wedsonlin" / "medium_1024_training_memory_snapshot.pickle")
    args = [run[n] for n in ("segments", "blocks", "stacks", "frames")]
    owner = pinning.by_owner(*args, by="place").iloc[0]
    assert owner["place"] == "torch::autograd::AccumulateGrad::apply"
    assert owner["unlocked_bytes"] > 3e9


# Stacks


@settings(max_examples=12, deadline=None)
@given(st.lists(OPERATION, max_size=80), st.integers(0, 60), st.data())
def test_the_live_set_is_what_is_requested_then(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[Any, ...]], skip: int, data: st.DataObject
) -> None:
    model = Caching(Driver(first=FIRST))
    run = run_of(tmp_path_factory.mktemp("a") / "a.pickle", snapshot.recorded(model, operations(drawn), skip))
    events = run["events"]
    if not len(events):
        return
    event = data.draw(st.integers(0, len(events) - 1))
    found = analysis.live(events, run["blocks"], {0: event})
    replayed = memory.replay(run, "caching", start="recorded")["usage"]
    assert found["size_bytes"].sum() == replayed["requested_bytes"].iloc[event]
    assert not found["address"].duplicated().any()
    end = analysis.live(events, run["blocks"])
    assert len(end) == (run["blocks"]["state"] == "active_allocated").sum()
    assert stacks.by_stack(found, run["stacks"], run["frames"])["size_bytes"].sum() == found["size_bytes"].sum()


def frames(*rows: tuple[str, str, int]) -> tuple[pd.DataFrame, pd.DataFrame]:
    table = pd.DataFrame(rows, columns=["function", "file", "line"])
    n = range(len(table))
    return pd.DataFrame({"stack": 0, "depth": n, "frame": n}), table.assign(frame=n)


@pytest.mark.parametrize(
    ("rows", "place"),
    [
        ([("alloc", "??", 0), ("linear", "/x/torch/nn/f.py", 9), ("f", "/a/b/model.py", 3)], "f (b/model.py:3)"),
        ([("forward", "C:\\site-packages\\peft\\unet.py", 4), ("main", "C:\\me\\run.py", 8)], "main (me/run.py:8)"),
        ([("forward", "/v/lib/python3.12/site-packages/peft/lora.py", 4)], "forward (peft/lora.py:4)"),
        ([("torch::unwind::unwind()", "??", 0), ("torch::autograd::MulBackward0::apply(x)", "??", 0)],
         "torch::autograd::MulBackward0::apply"),
        ([("torch::unwind::unwind()", "??", 0), ("at::_ops::add::call(at::Tensor)", "??", 0)], "at::_ops::add::call"),
        ([("torch::unwind::unwind()", "??", 0)], "torch::unwind::unwind"),
        ([("", "", 0)], "??"),
        ([("cell", "<ipython-input-3-ab>", 2)], "cell (<ipython-input-3-ab>:2)"),
    ],
)  # fmt: skip
def test_the_frame_of_the_user(rows: list[tuple[str, str, int]], place: str) -> None:
    assert stacks.places(*frames(*rows))["place"].tolist() == [place]


def test_blocks_without_a_stack_are_counted() -> None:
    live = pd.DataFrame(
        {
            "device": 0, "address": [1, 2, 3], "event": pd.NA, "time_us": pd.NA, "size_bytes": [10, 20, 70],
            "stack": pd.array([0, None, 0], "Int64"),
        }
    )  # fmt: skip
    found = stacks.by_stack(live, *frames(("f", "a.py", 1)), by="place")
    assert found["place"].tolist() == ["f (a.py:1)", stacks.UNKNOWN]
    assert found["share_frac"].tolist() == [0.8, 0.2]


def test_blocks_get_the_stack_of_their_allocation(tmp_path: Path) -> None:
    """A snapshot may have frames with the events alone; of a free block they would be its last owner's."""
    drawn = [("alloc", 0, MIB, 0, "0.0"), ("alloc", 1, MIB, 0, "0.0"), ("free", 1)]
    run = run_of(tmp_path / "a.pickle", snapshot.recorded(Caching(Driver(first=FIRST)), drawn))
    assert run["blocks"]["stack"].isna().all()
    found = stacks.of_blocks(run["events"], run["blocks"])
    assert found["stack"].notna().tolist() == (run["blocks"]["state"] == "active_allocated").tolist()
    own = run_of(tmp_path / "b.pickle", small_case())
    pd.testing.assert_frame_equal(stacks.of_blocks(own["events"], own["blocks"]), own["blocks"])


# What if


def replays(*rows: tuple[str, str, int, int, int]) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=["allocator", "settings", "peak_reserved_bytes", "peak_active_bytes", "n_oom"])
    share = table["peak_active_bytes"] / table["peak_reserved_bytes"]
    return table.assign(
        device=0, n_calls=3, driver_s=0.5, utilisation_frac=share, limit_bytes=pd.array([None] * len(rows), "UInt64"),
        oom_event=pd.array([9 if n else None for n in table["n_oom"]], "Int64"),
    )  # fmt: skip


def test_what_is_saved_against_the_recorded_one() -> None:
    given_ = replays(("caching", "", 1000, 700, 0), ("expandable", "", 800, 700, 0), ("caching", "x=1", 1100, 700, 0))
    bounds = pd.DataFrame({"device": [0, 0], "bound": ["live", "packing"], "peak_reserved_bytes": [690, None]})
    table = whatif.what_if(given_, bounds=bounds)
    assert table["allocator"].tolist() == ["caching", "expandable", "caching", "bound: live"]
    assert table["reserved_saved_bytes"].tolist() == [0, 200, -100, 310]
    assert table["reserved_saved_frac"].tolist() == pytest.approx([0, 0.2, -0.1, 0.31])
    assert table["fragmentation_frac"].tolist()[:2] == pytest.approx([0.3, 0.125])
    assert table["driver_s"].tolist()[0] == 0.5
    assert whatif.verdict(table) == "expandable would reserve 0.00 GB (20.0%) less at the peak than caching"
    other_base = whatif.what_if(given_, ("expandable", ""))
    assert other_base["reserved_saved_bytes"].tolist() == [-200, 0, -300]


@pytest.mark.parametrize("saved", [0, 9, -50])
def test_no_gain_is_said(saved: int) -> None:
    table = whatif.what_if(
        replays(("caching", "", 1000, 990, 0), ("stitching", "", 1000 - saved, 900, 0), ("native", "", 500, 500, 0))
    )
    assert whatif.verdict(table).startswith(
        "no gain: no other allocator saves 1% of what caching reserves; the best, st"
    )


def test_the_verdict_under_a_limit() -> None:
    caching, fits, fails = ("caching", "", 10, 5, 2), ("expandable", "", 8, 5, 0), ("stitching", "", 9, 5, 1)
    said = whatif.verdict(whatif.what_if(replays(caching, fits, fails)))
    assert said == "caching runs out of memory under this limit at event 9; expandable does not"
    assert "so does every other" in whatif.verdict(whatif.what_if(replays(caching, fails)))
    assert "caching does not" in whatif.verdict(whatif.what_if(replays(("caching", "", 10, 5, 0), fails)))
    assert whatif.what_if(replays(caching, fits))["reserved_saved_bytes"].isna().all()


def test_one_replay_has_nothing_to_compare_with() -> None:
    assert "nothing to compare" in whatif.verdict(whatif.what_if(replays(("caching", "", 10, 5, 0))))
    assert whatif.verdict(whatif.what_if(replays())) == "nothing was replayed"


@needs_traces
def test_a_real_what_if_stays_above_its_bounds() -> None:
    run = memory.load(TRACES / "cs336_wedsonlin" / "medium_1024_inference_memory_snapshot.pickle")
    played = pd.concat([memory.replay(run, name)["replays"] for name in ("caching", "expandable", "native")])
    table = whatif.what_if(played, bounds=memory.bounds(run)["bounds"])
    live = table.loc[table["allocator"] == "bound: live", "peak_reserved_bytes"].iloc[0]
    assert (table["peak_reserved_bytes"] >= live).all()
    row = table[table["allocator"] == "expandable"].iloc[0]
    assert row["reserved_saved_frac"] == pytest.approx(0.096, abs=0.01)
    assert whatif.name("expandable", Settings(expandable_segments=True).changed()) == "expandable"
