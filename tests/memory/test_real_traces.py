"""Snapshots that others recorded, by path; skipped where the folder is absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpubloat import memory
from gpubloat.memory.allocators import NAMES
from gpubloat.memory.replay import begin
from gpubloat.memory.trace import traces

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="../shared/traces, with public snapshots, is absent")
EXACT = {
    "cs336_wedsonlin/medium_128_training_memory_snapshot.pickle": (6526, 6900, 4),
    "cs336_wedsonlin/medium_1024_training_memory_snapshot.pickle": (7591, 24012, 4),
    "cs336_wedsonlin/medium_1024_inference_memory_snapshot.pickle": (1280, 3056, 0),
}


@needs_traces
@pytest.mark.parametrize("name", EXACT)
def test_every_allocation_is_at_its_recorded_address(name: str) -> None:
    n, reserved_mib, n_owners = EXACT[name]
    run = memory.load(TRACES / name)
    row = memory.verify(run)["verifications"].iloc[0]
    assert (row["n_allocations"], row["n_exact"], row["address_exact_frac"]) == (n, n, 1.0)
    assert row["n_segments_at_odds"] == row["n_calls_unrecorded"] == 0
    assert row["n_owners_of_gaps"] == n_owners
    assert (run["segments"]["unattributed_bytes"] == 0).all()
    replayed = memory.replay(run, "caching")
    assert replayed["replays"]["peak_reserved_bytes"][0] >> 20 == reserved_mib
    assert (replayed["allocations"]["address"] == replayed["allocations"]["replayed"]).all()
    tight = memory.replay(run, "expandable")["replays"].iloc[0]
    assert tight["peak_requested_bytes"] <= tight["peak_active_bytes"] <= tight["peak_reserved_bytes"]
    assert tight["peak_reserved_bytes"] < replayed["replays"]["peak_reserved_bytes"][0]


@needs_traces
def test_the_form_of_2023() -> None:
    run = memory.load(TRACES / "yiyi_llm_inference" / "1.3b_snapshot.pickle")
    assert (len(run["segments"]), len(run["events"])) == (257, 1)
    assert (run["segments"]["unattributed_bytes"] == 0).all()
    assert run["segments"]["size_bytes"].sum() >> 20 == 7256
    assert run["segments"]["allocated_bytes"].sum() >> 20 == 5420
    assert run.provenance["history"]["0"]["starts_mid_run"]
    oom = memory.load(TRACES / "yiyi_llm_inference" / "oom_snapshot.pickle")
    assert oom["events"]["action"].tolist() == ["snapshot"]
    assert oom["events"]["size_bytes"][0] == oom["segments"]["active_bytes"].sum()


@needs_traces
def test_invented_addresses_are_read_and_not_exact() -> None:
    run = memory.load(TRACES / "mosaic" / "output.pickle")
    assert len(run["events"]) == 1040
    assert run["segments"]["unattributed_bytes"].abs().sum() > 0
    assert memory.verify(run)["verifications"]["address_exact_frac"][0] == 0


@needs_traces
@pytest.mark.parametrize("letter", "ABCDEFGHIJK")
def test_buffers_of_minimalloc(letter: str) -> None:
    """Their capacity, 1 MiB, is known to be enough: no moment can need more."""
    run = memory.load(TRACES / "minimalloc" / "benchmarks" / "challenging" / f"{letter}.1048576.csv")
    found = memory.replay(run, "native")
    assert 0 < found["replays"]["peak_requested_bytes"][0] <= 1 << 20
    assert found["usage"]["requested_bytes"].iloc[-1] == 0


@needs_traces
@pytest.mark.parametrize("name", EXACT)
def test_every_model_on_real_traces(name: str) -> None:
    """What each reserves is never less than what no allocator can do without; the sums hold after every event."""
    run = memory.load(TRACES / name)
    bounds = memory.bounds(run)["bounds"].set_index("bound")["peak_reserved_bytes"]
    for allocator in NAMES:
        found = memory.replay(run, allocator)
        usage, row = found["usage"], found["replays"].iloc[0]
        assert (usage["reserved_bytes"] == usage["active_bytes"] + usage["free_bytes"]).all()
        assert (usage["active_bytes"] >= usage["requested_bytes"]).all()
        assert row["peak_requested_bytes"] == bounds["live"]
        assert row["peak_reserved_bytes"] >= bounds["live"]
        assert (row["peak_reserved_bytes"] >= bounds["chunks"]) or allocator == "native"
        assert row["n_oom"] == 0
        tight = memory.replay(run, allocator, limit_bytes=int(bounds["live"]) - 1)["replays"].iloc[0]
        assert tight["n_oom"] > 0
        assert tight["peak_reserved_bytes"] < bounds["live"]


@needs_traces
@pytest.mark.parametrize("name", EXACT)
def test_native_is_what_is_live_in_whole_pages(name: str) -> None:
    run = memory.load(TRACES / name)
    events = run["events"]
    held: dict[int, int] = {}
    for address, (_, size) in begin(traces(run)[0]).held.items():
        held[address] = size
    live = most = sum(map(rounded, held.values()))
    for action, address, size in zip(events["action"], events["address"], events["size_bytes"]):
        if action in ("alloc", "free_completed") and address in held:
            live -= rounded(held.pop(address))
        if action == "alloc":
            held[address] = size
            live += rounded(size)
            most = max(most, live)
    assert memory.replay(run, "native")["replays"]["peak_reserved_bytes"][0] == most


def rounded(size: int) -> int:
    page = 2 << 20 if size > 1 << 20 else 512
    return -(-int(size) // page) * page
