"""Replays: recorded traces come out exact, also those that begin in the middle; what-ifs say what they count."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gpubloat import memory
from gpubloat.errors import GpubloatError
from gpubloat.memory import pickles
from gpubloat.memory.allocators import NAMES, Caching, Driver, Expandable, Settings, choose, make, settings
from gpubloat.memory.allocators.settings import recorded
from gpubloat.memory.replay import begin, pack, play
from gpubloat.memory.snapshot import Snapshot
from gpubloat.memory.trace import Trace, of_device
from gpubloat.memory.verify import verify_one
from gpubloat.run import Run
from tests.build import snapshot
from tests.build.snapshot import MIB, block, event, segment

BASE = 0x7F00_0000_0000


def model(limit: int | None = None, **given: Any) -> Caching:
    chosen = settings(**given)
    return (Expandable if chosen.expandable_segments else Caching)(Driver(limit, 1 << 40), chosen)


def parsed(content: snapshot.Snapshot) -> Trace:
    """The trace of device 0, without files and checks of tables: hypothesis asks thousands of times."""
    pieces: dict[str, list[pd.DataFrame]] = {}
    found = Snapshot(pickles.loads(pickle.dumps(content, 4), "x"), "x", 1 << 20)
    for tables in found.tables():
        for name, frame in tables.items():
            pieces.setdefault(name, []).append(frame)
    events, segments, blocks = (pd.concat(pieces[name]) for name in ("events", "segments", "blocks"))
    return of_device(0, events, segments, blocks, recorded(found.settings))


def verified(content: snapshot.Snapshot) -> dict[str, Any]:
    return verify_one(parsed(content))[0]


def exact(found: dict[str, Any]) -> bool:
    return bool(
        found["n_exact"] == found["n_allocations"]
        and found["n_segment_predicted"] == found["n_segment_events"]
        and found["n_calls_unrecorded"] == found["n_segments_at_odds"] == 0
    )


CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "limit": {"limit": 150 * MIB},
    "split": {"max_split_size_mb": 24},
    "split, limit": {"max_split_size_mb": 24, "limit": 150 * MIB},
    "divisions": {"roundup_power2_divisions": "[1:4,16:8,>:2]"},
    "expandable": {"expandable_segments": True},
    "large pages": {"expandable_segments": True, "large_segment_size_mb": 32},
}
sizes = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(MIB, 48 * MIB))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), st.integers(), sizes, st.sampled_from([0, 7]), st.sampled_from(["0.0", "0.3"])),
        st.tuples(st.just("free"), st.integers(0, 60)),
        st.tuples(st.just("empty_cache")),
    ),
    max_size=60,
)


def named(given: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Names that are used once: an allocation is named by its number, a free names one that is held."""
    found: list[tuple[Any, ...]] = []
    live: list[int] = []
    for i, operation in enumerate(given):
        if operation[0] == "alloc":
            found.append(("alloc", i, *operation[2:]))
            live.append(i)
        elif operation[0] == "free" and live:
            found.append(("free", live.pop(operation[1] % len(live))))
        elif operation[0] == "empty_cache":
            found.append(operation)
    return found


@pytest.mark.parametrize("case", CASES)
@given(operations)
@hypothesis_settings(max_examples=40, deadline=None)
def test_a_whole_trace_is_exact(case: str, given: Any) -> None:
    content = snapshot.recorded(model(**CASES[case]), named(given))
    if content["device_traces"][0]:
        assert exact(verified(content))


@pytest.mark.parametrize("case", ["default", "divisions", "expandable", "large pages"])
@given(operations, st.integers(1, 60))
@hypothesis_settings(max_examples=60, deadline=None)
def test_a_trace_that_lost_its_first_events_is_exact(case: str, given: Any, skip: int) -> None:
    """Only for blocks whose size a trace can tell: here no large block owns more than it was asked for."""
    plain = [
        (*o[:2], -(-o[2] // (4 * MIB)) * 4 * MIB if o[2] > MIB else o[2], *o[3:]) if len(o) > 2 else o for o in given
    ]
    content = snapshot.recorded(model(**CASES[case]), named(plain), skip)
    if content["device_traces"][0]:
        found = verified(content)
        assert found["n_exact"] == found["n_allocations"]
        assert found["n_segments_at_odds"] == 0


@pytest.mark.parametrize("case", CASES)
def test_long_traces_are_exact(case: str) -> None:
    """600 operations on two streams and two pools; with max_split_size only from their beginning."""
    for seed in range(3):
        chance = random.Random(seed)
        ops: list[tuple[Any, ...]] = []
        for i in range(600):
            size = chance.choice([chance.randint(1, 4096), chance.randint(1, 3 * MIB), chance.randint(MIB, 48 * MIB)])
            new = ("alloc", i, size, chance.choice([0, 0, 7]), chance.choice(["0.0", "0.0", "0.3"]))
            old = ("free", chance.randrange(100)) if chance.random() < 0.97 else ("empty_cache",)
            ops.append(new if chance.random() < 0.52 else old)
        given = CASES[case] | ({"limit": 500 * MIB} if "limit" in case else {})
        for skip in (0, 50, 300):
            if not skip or "split" not in case:
                found = verified(snapshot.recorded(model(**given), named(ops), skip))
                assert found["n_exact"] == found["n_allocations"] > 100
                assert found["n_segments_at_odds"] == 0


def test_the_owner_of_a_small_gap() -> None:
    """A block of 19.5 MiB in a segment of 20 MiB owns the rest: when it is freed, 20 MiB are free."""
    ops = [("alloc", 1, 9 * MIB, 0, "0.0"), ("alloc", 2, 10 * MIB + MIB // 2, 0, "0.0"), ("free", 2)]
    ops += [("alloc", 3, 11 * MIB, 0, "0.0"), ("free", 1)]
    found = verified(snapshot.recorded(model(), ops, skip=3))
    assert exact(found)
    assert (found["n_preexisting"], found["n_owners_of_gaps"]) == (2, 1)


def test_the_owner_of_a_part_of_a_large_gap() -> None:
    """a owns 0.5 MiB behind its request, and behind that 10 MiB are free: the first block there tells where."""
    a, b, c = BASE, BASE + 10 * MIB, BASE + 20 * MIB
    free = [event("free_completed", c, 10 * MIB)]
    trace = [*free, event("alloc", b, 6 * MIB), event("free_completed", b, 6 * MIB)]
    trace += [event("free_completed", a, 19 * MIB // 2), event("alloc", a, 30 * MIB)]
    end = [segment(BASE, [block(30 * MIB, "active_allocated", address=BASE)])]
    found = verified(snapshot.snapshot(end, trace))
    assert exact(found)
    assert found["n_owners_of_gaps"] == 1


def test_a_model_that_is_wrong_is_seen() -> None:
    ops = [("alloc", i, (i % 7 + 1) * MIB, 0, "0.0") for i in range(40)]
    content = snapshot.recorded(model(large_segment_size_mb=32), ops)
    content["allocator_settings"] = snapshot.allocator_settings(Settings())
    found = verified(content)
    assert found["address_exact_frac"] < 1
    assert found["n_segment_predicted"] < found["n_segment_events"]
    assert found["n_calls_unrecorded"] > 0
    assert found["first_inexact_event"] is not None


def trace(path: Path, *, skip: int = 0, limit: int | None = None) -> Run:
    """20 blocks of 3 MiB, every second one freed, then 12 of 5 MiB."""
    ops: list[tuple[Any, ...]] = [("alloc", i, 3 * MIB, 0, "0.0") for i in range(20)]
    ops += [("free", i) for i in range(0, 20, 2)]
    ops += [("alloc", i, 5 * MIB, 0, "0.0") for i in range(20, 32)]
    return memory.load(snapshot.write(path / "s.pickle", snapshot.recorded(model(limit), ops, skip)))


def test_what_if(tmp_path: Path) -> None:
    run = trace(tmp_path)
    rows = {}
    for name in NAMES:
        found = memory.replay(run, name)
        assert list(found) == ["usage", "allocations", "calls", "replays"]
        rows[name] = found["replays"].iloc[0]
        usage = found["usage"]
        assert (usage["reserved_bytes"] == usage["active_bytes"] + usage["free_bytes"]).all()
        assert len(usage) == len(run["events"])
        assert usage["reserved_bytes"].max() == rows[name]["peak_reserved_bytes"]
        assert rows[name]["peak_requested_bytes"] == 90 * MIB
        assert rows[name]["n_allocations"] == len(found["allocations"]) == 32
        change = found["calls"].merge(usage, on="event", how="left", suffixes=("", "_then"))
        sign = change["call"].map({"malloc": 1, "create": 1, "free": -1, "release": -1}).fillna(0)
        assert (sign * change["size_bytes"].astype("int64")).sum() == usage["reserved_bytes"].iloc[-1]
    assert rows["native"]["utilisation_frac"] == 1
    assert rows["expandable"]["peak_reserved_bytes"] == 120 * MIB
    assert rows["caching"]["peak_reserved_bytes"] == memory.load(tmp_path / "s.pickle")["segments"]["size_bytes"].sum()
    assert rows["native"]["n_calls"] == 42


def test_addresses_of_the_same_allocator_are_the_recorded_ones(tmp_path: Path) -> None:
    found = memory.replay(trace(tmp_path, skip=30), "caching")["allocations"]
    assert len(found) < 32
    in_place = found["address"] == found["replayed"]
    assert in_place.any()
    packed = memory.replay(trace(tmp_path, skip=30), "caching", start="packed")["replays"].iloc[0]
    assert packed["n_preexisting"] > 0


def test_out_of_memory(tmp_path: Path) -> None:
    run = trace(tmp_path)
    row = memory.replay(run, "caching", limit_bytes=80 * MIB)["replays"].iloc[0]
    assert row["n_oom"] > 0
    assert run["events"]["action"][row["oom_event"]] == "alloc"
    assert row["peak_reserved_bytes"] <= row["limit_bytes"] == 80 * MIB
    found = memory.replay(run, "caching", limit_bytes=80 * MIB)["allocations"]
    assert found["replayed"].isna().sum() == row["n_oom"]
    assert memory.replay(run, "caching", limit_bytes=0)["replays"]["n_oom"][0] == 32
    assert memory.replay(run, "expandable", limit_bytes=120 * MIB)["replays"]["n_oom"][0] == 0


def test_settings_of_a_replay_and_of_the_trace(tmp_path: Path) -> None:
    content = snapshot.recorded(model(large_segment_size_mb=32), [("alloc", 1, 2 * MIB, 0, "0.0")])
    path = snapshot.write(tmp_path / "s.pickle", content)
    row = memory.replay(path)["replays"].iloc[0]
    assert (row["settings"], row["peak_reserved_bytes"]) == ("large_segment_size_mb=32", 32 * MIB)
    row = memory.replay(path, large_segment_size_mb=40)["replays"].iloc[0]
    assert (row["settings"], row["peak_reserved_bytes"]) == ("large_segment_size_mb=40", 40 * MIB)
    row = memory.replay(path, "expandable")["replays"].iloc[0]
    assert (row["settings"], row["peak_reserved_bytes"]) == ("expandable_segments=True", 20 * MIB)


def test_several_devices_each_have_their_own_memory(tmp_path: Path) -> None:
    traces = [[event("alloc", BASE, 30 * MIB)], [event("alloc", BASE, 50 * MIB), event("free_completed", 5, 5)]]
    run = memory.load(snapshot.write(tmp_path / "s.pickle", snapshot.snapshot([], [], *traces)))
    found = memory.replay(run, "caching", limit_bytes=40 * MIB)
    assert found["replays"]["device"].tolist() == [1, 2]
    assert found["replays"]["n_oom"].tolist() == [0, 1]
    assert found["replays"]["n_preexisting"].tolist() == [0, 1]


def test_the_pair_of_settings_that_grows(tmp_path: Path) -> None:
    """max_split_size_mb without expandable segments keeps what it holds; blocks above the limit are not split."""
    ops: list[tuple[Any, ...]] = []
    for i in range(20):
        ops += [("alloc", (i, n), size, 0, "0.0") for n, size in enumerate((91 * MIB, 91 * MIB // 2, 2 * MIB))]
        ops += [("free", (i, 0)), ("free", (i, 1))]
    path = snapshot.write(tmp_path / "s.pickle", snapshot.recorded(model(), ops))
    row = memory.replay(path, "caching", max_split_size_mb=128)["replays"].iloc[0]
    assert row["utilisation_frac"] > 0.5
    assert memory.replay(path, "expandable")["replays"]["utilisation_frac"][0] > 0.8


def test_where_there_is_nothing_to_replay(tmp_path: Path) -> None:
    path = snapshot.write(tmp_path / "s.pickle", snapshot.snapshot([segment(BASE, [block(512)])], []))
    for do in (memory.replay, memory.verify):
        with pytest.raises(GpubloatError, match="nothing to replay") as caught:
            do(path)
        assert "_record_memory_history" in str(caught.value.hint)
    (tmp_path / "b.csv").write_text("id,lower,upper,size\na,1,2,3\n")
    with pytest.raises(GpubloatError, match="no segments"):
        memory.verify(tmp_path / "b.csv")
    for wrong in ({"start": "x"}, {"limit_bytes": -1}, {"limit_bytes": "x"}, {"allocator": "odd"}, {"odd": 1}):
        with pytest.raises(GpubloatError):
            memory.replay(tmp_path / "b.csv", **wrong)
    for name in ("native", "bfc", "stitching", "gmlake"):
        with pytest.raises(GpubloatError, match=f"{name} cannot start"):
            memory.replay(tmp_path / "b.csv", name, start="recorded")
    with pytest.raises(GpubloatError, match="how much"):
        memory.replay(tmp_path / "b.csv", "bfc", allow_growth=False)


addresses = st.integers(0, 6).map(lambda n: n * 512) | st.integers(0, 2**64 - 1)
amounts = st.sampled_from([0, 1, 512, 2 * MIB, 20 * MIB, 2**63, 2**64 - 1])
actions = st.sampled_from(
    [
        "alloc",
        "free_completed",
        "segment_alloc",
        "segment_free",
        "segment_map",
        "segment_unmap",
        "oom",
        "free_requested",
    ]
)
segments = st.builds(
    lambda address, sizes, kind, expandable: segment(
        address, [block(s, "active_allocated") for s in sizes], kind, is_expandable=expandable
    ),
    addresses,
    st.lists(amounts, max_size=3),
    st.sampled_from(["small", "large"]),
    st.booleans(),
)


@given(
    st.lists(st.builds(event, actions, addresses, amounts, st.integers(0, 1)), min_size=1, max_size=20),
    st.lists(segments, max_size=3),
    st.booleans(),
)
@hypothesis_settings(max_examples=200, deadline=None)
def test_traces_that_no_allocator_made(events: Any, given: Any, expandable: bool) -> None:
    """A GpubloatError or a replay whose sums are right; never another exception, never without end."""
    content = snapshot.snapshot(given, events, settings=settings(expandable_segments=expandable))
    try:
        trace = parsed(content)
        before = begin(trace)
    except GpubloatError:
        return
    verify_one(trace)
    for name in NAMES:
        for limit in (None, 100 * MIB):
            one = make(name, Driver(limit), choose(name, {})[1])
            played = play(trace, one, pack(one, before))
            assert len(played.reserved) == len(played.at) + 1
            assert all(r >= a >= q for r, a, q in zip(played.reserved, played.active, played.requested))
            assert max(played.reserved) < 1 << 62
            free = sum(size for s in one.segments() for _, size, held in s.blocks if not held)
            assert one.driver.used == one.active + free
