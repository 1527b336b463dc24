"""The project's own snapshots, recorded on one H200 with torch 2.11: every address and every segment event."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpubloat import memory
from gpubloat.memory import oomtrace

SAMPLES = Path(__file__).parents[2] / "data" / "samples" / "memory"
# What the allocator was allowed to take, which a trace does not hold and garbage collection depends on.
LIMITS = {"settings": 1500 << 20, "oom": 1200 << 20, "expandable-oom": 1200 << 20}
ALL = sorted(path.name.removesuffix(".pickle.zst") for path in SAMPLES.glob("*.pickle.zst"))


def test_they_have_what_public_ones_lack() -> None:
    runs = {name: memory.load(SAMPLES / f"{name}.pickle.zst") for name in ("expandable", "streams", "graphs", "oom")}
    assert runs["expandable"]["segments"]["is_expandable"].any()
    assert runs["streams"]["events"]["stream"].nunique() > 3
    assert runs["graphs"]["segments"]["pool"].nunique() == 3
    assert (runs["oom"]["events"]["action"] == "oom").any()


@pytest.mark.parametrize("name", ALL)
def test_replay_is_exact(name: str) -> None:
    run = memory.verify(SAMPLES / f"{name}.pickle.zst", limit_bytes=LIMITS.get(name))
    row = run["verifications"].iloc[0]
    assert row["n_allocations"] > 900
    assert row["n_exact"] == row["n_allocations"]
    assert row["n_segment_predicted"] == row["n_segment_events"] > 25
    assert (row["n_calls_unrecorded"], row["n_segments_at_odds"]) == (0, 0)


def test_without_its_limit_garbage_collection_is_followed() -> None:
    row = memory.verify(SAMPLES / "settings.pickle.zst")["verifications"].iloc[0]
    assert row["n_exact"] == row["n_allocations"]
    assert row["n_segment_predicted"] < row["n_segment_events"]


def test_the_model_makes_the_calls_of_the_real_allocator() -> None:
    """OPT-1.3B, N, 8 x 1024 under the installed allocator on the H200: 30,955 calls in its first steps, then none."""
    replayed = memory.replay(SAMPLES / "opt-n.pickle.zst", "stitching")["replays"].iloc[0]
    assert replayed["n_calls"] == 30955
    assert replayed["n_oom"] == 0


def test_the_verdict_on_the_recorded_oom_needs_its_limit() -> None:
    run = memory.load(SAMPLES / "oom.pickle.zst")
    (device, event), without = next(iter(oomtrace.of_trace(run).items()))
    assert without.verdict == "driver_or_limit_refused"
    told = oomtrace.of_trace(run, LIMITS["oom"])[device, event]
    assert told.verdict == "fragmentation"
    assert "of them within the limit of 1.17 GiB" in told.why
    helped = oomtrace.would_have_helped(run, device, event, limit_bytes=LIMITS["oom"])
    best = helped.set_index("allocator").loc["expandable"]
    assert best["is_served"]
    assert best["limit_bytes"] == LIMITS["oom"]
