"""Every form that snapshots have had, and files that only look like one."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from gpubloat import memory
from gpubloat.errors import FormatError, GpubloatError
from gpubloat.run import Run
from gpubloat.tables.memory import TABLES
from tests.build import snapshot
from tests.build.snapshot import MIB, block, event, segment

BASE = 0x7F00_0000_0000


def load(tmp_path: Path, content: Any, protocol: int = 4) -> Run:
    run = memory.load(snapshot.write(tmp_path / "s.pickle", content, protocol))
    assert list(run) == list(TABLES)
    return run


def row(run: Run, table: str, n: int = 0) -> dict[str, Any]:
    return run[table].astype(object).iloc[n].to_dict()


def current() -> snapshot.Snapshot:
    blocks = [
        block(1024, "active_allocated", 1000, address=BASE, frames=[snapshot.FRAME]),
        block(512, "active_pending_free", 3, address=BASE + 1024, frames=[]),
        block(2 * MIB - 1536, address=BASE + 1536),
    ]
    trace = [
        event("segment_alloc", BASE, 2 * MIB, time_us=5, frames=[]),
        event("alloc", BASE, 1000, time_us=6, frames=[snapshot.FRAME, {**snapshot.FRAME, "line": 1}]),
        event("alloc", BASE + 1024, 3, time_us=7, frames=[snapshot.FRAME]),
        event("free_requested", BASE + 1024, 3, time_us=8),
        {"action": "oom", "device_free": 77, "size": 1 << 40, "stream": 0},
        event("teleport", 1, 1, new_key={"a": [1]}),
    ]
    return snapshot.snapshot([segment(BASE, blocks, "small", new_key=1)], trace)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_current_form(tmp_path: Path, protocol: int) -> None:
    run = load(tmp_path, current(), protocol)
    first = row(run, "segments")
    assert (first["size_bytes"], first["allocated_bytes"], first["active_bytes"]) == (2 * MIB, 1024, 1536)
    assert (first["free_bytes"], first["unattributed_bytes"]) == (2 * MIB - 1536, 0)
    assert (first["kind"], first["pool"], first["n_blocks"], first["requested_bytes"]) == ("small", "0.0", 3, 1000)
    assert run["blocks"]["address"].tolist() == [BASE, BASE + 1024, BASE + 1536]
    assert run["events"]["action"].tolist()[-3:] == ["free_requested", "oom", "unknown"]
    assert row(run, "events", 4)["address"] == 77
    assert run["events"]["time_us"].isna().tolist() == [False] * 4 + [True] * 2
    stack = int(run["events"]["stack"][1])
    frames = run["stacks"][run["stacks"]["stack"] == stack].merge(run["frames"], on="frame")
    assert frames["line"].tolist() == [7, 1]
    assert run["events"]["stack"][2] == run["blocks"]["stack"][0]
    assert run.provenance["history"]["0"]["starts_mid_run"] is False
    assert run.provenance["allocator_settings"]["max_split_size"] == -1
    assert run.provenance["inputs"][0]["name"] == "s.pickle"


def test_the_form_of_2023(tmp_path: Path) -> None:
    history = [{"addr": BASE, "real_size": 1000, "frames": [snapshot.FRAME]}]
    blocks = [block(1024, "active_allocated", 1000, history=history), block(1024), block(512, "active_allocated")]
    old = segment(BASE, blocks, "small")
    for key in ("is_expandable", "segment_pool_id", "frames"):
        del old[key]
    trace = [{"action": "free_completed", "addr": BASE, "size": 5, "stream": 0}]
    run = load(tmp_path, {"segments": [old], "device_traces": [trace]}, 2)
    assert run["blocks"]["address"].tolist() == [BASE, BASE + 1024, BASE + 2048]
    assert run["blocks"]["stack"].isna().tolist() == [False, True, True]
    assert run["events"]["time_us"].isna().all()
    assert run.provenance["history"]["0"]["starts_mid_run"] is True


def test_segments_alone_and_without_addresses(tmp_path: Path) -> None:
    one = segment(BASE, [block(512), block(1536)], "small")
    two = segment(2 * BASE, [block(512, history=[{"addr": 2 * BASE}]), block(1536)])
    del two["address"]
    run = load(tmp_path, [one, two])  # torch.cuda.memory_snapshot()
    assert run["segments"]["address"].tolist() == [BASE, 2 * BASE]
    assert run["blocks"]["address"].tolist() == [BASE, BASE + 512, 2 * BASE, 2 * BASE + 512]
    assert "without history" in run.provenance["empty"]["events"]
    assert "_record_memory_history" in run.provenance["history"]["0"]["why"]


def test_devices_streams_and_pools(tmp_path: Path) -> None:
    segments = [
        segment(BASE, [block(2 * MIB)], device=0, stream=7),
        segment(BASE, [block(2 * MIB)], device=3, stream=2**64 - 1, segment_pool_id=[0, 9], is_expandable=True),
    ]
    on = [event("alloc", BASE + 512, 5, stream=-1), event("alloc", 5, 5, pool_id=(1, 2)), event("alloc", 5, 5)]
    run = load(tmp_path, snapshot.snapshot(segments, [], [], [], on[:1]))
    assert run["segments"]["device"].tolist() == [0, 3]
    assert run["segments"]["pool"].tolist() == ["0.0", "0.9"]
    assert run["segments"]["is_expandable"].tolist() == [False, True]
    # Old traces have no pool: that of the segment at the address. Negative streams are addresses above 2**63.
    assert (row(run, "events")["pool"], row(run, "events")["stream"]) == ("0.9", 2**64 - 1)
    run = load(tmp_path, snapshot.snapshot(segments, on))
    assert run["events"]["pool"].tolist() == ["0.0", "1.2", "0.0"]
    assert {d: h["n_events"] for d, h in run.provenance["history"].items()} == {"0": 3, "3": 0}


def test_nothing_in_it(tmp_path: Path) -> None:
    run = load(tmp_path, snapshot.snapshot())
    assert [len(run[name]) for name in run] == [0] * len(TABLES)
    assert set(run.provenance["empty"]) >= {"events"}


def test_a_ring_that_lost_its_oldest_events_is_said(tmp_path: Path) -> None:
    content = current()
    content["device_traces"][0] = content["device_traces"][0][2:]
    found = load(tmp_path, content).provenance["history"]["0"]
    assert found["starts_mid_run"]
    assert found["n_blocks_without_alloc"] == 1
    assert "starts mid-run: 1 block" in found["why"]


def test_at_odds_with_itself(tmp_path: Path) -> None:
    one = segment(BASE, [block(512, "strange"), block(512, "active_awaiting_free")], total_size=4096)
    first = row(load(tmp_path, snapshot.snapshot([one])), "segments")
    assert (first["active_bytes"], first["unattributed_bytes"]) == (512, 4096 - 512)


def bad(**changes: Any) -> snapshot.Snapshot:
    content = current()
    for key, value in changes.items():
        where, _, name = key.partition("_")
        at = {
            "top": content,
            "segment": content["segments"][0],
            "block": content["segments"][0]["blocks"][0],
            "event": content["device_traces"][0][1],
            "frame": content["device_traces"][0][1]["frames"][1],
        }[where]
        at[name] = value
    return content


BAD: dict[str, Any] = {
    "a number": 5,
    "None": None,
    "empty dict": {},
    "empty text": "",
    "traces are numbers": bad(top_device_traces=[1]),
    "traces are a dict": bad(top_device_traces={}),
    "events are numbers": bad(top_device_traces=[[1, 2]]),
    "segments are numbers": bad(top_segments=[1]),
    "blocks are a number": bad(segment_blocks=1),
    "blocks are numbers": bad(segment_blocks=[1]),
    "size is text": bad(event_size="12"),
    "size is a fraction": bad(event_size=1.5),
    "size is true": bad(event_size=True),
    "size is negative": bad(event_size=-1),
    "size of 65 bits": bad(event_size=1 << 64),
    "address of 65 bits": bad(event_addr=1 << 64),
    "address is None": bad(event_addr=None),
    "time of 65 bits": bad(event_time_us=1 << 64),
    "time is text": bad(event_time_us="now"),
    "frames are a number": bad(event_frames=5),
    "frames are numbers": bad(event_frames=[5]),
    "too many frames": bad(event_frames=[snapshot.FRAME] * 20_000),
    "line is text": bad(frame_line="x"),
    "name is a list": bad(frame_name=[]),
    "pool is text": bad(event_pool_id="00", top_device_traces=[[event("alloc", 1, 1, pool_id="00")]]),
    "pool of one": bad(segment_segment_pool_id=(0,)),
    "pool of 80 bits": bad(segment_segment_pool_id=[0, 1 << 65]),
    "device of 32 bits": bad(segment_device=1 << 31),
    "device is negative": bad(segment_device=-1),
    "total is None": bad(segment_total_size=None),
    "blocks of 2**64": bad(segment_blocks=[block((1 << 64) - 1, address=0)] * 3),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(FormatError) as caught:
        load(tmp_path, BAD[name])
    assert caught.value.hint


def test_one_thing_many_times_does_not_multiply(tmp_path: Path) -> None:
    trace = [event("alloc", i, 1) for i in range(2000)]
    blocks = [block(512) for _ in range(2000)]
    one = segment(BASE, blocks)
    for content in ({"segments": [], "device_traces": [trace] * 2000}, {"segments": [one] * 3000}):
        with pytest.raises(FormatError, match="many times"):
            load(tmp_path, content)
    frames = [{"name": "n" * 1_000_000, "filename": "f", "line": i} for i in range(500)]
    frames = [{**f, "name": frames[0]["name"]} for f in frames]
    with pytest.raises(FormatError, match="far more than the file"):
        load(tmp_path, {"segments": [], "device_traces": [[event("alloc", 1, 1, frames=frames)]]})


def test_files_that_are_none(tmp_path: Path) -> None:
    for path, match in ((tmp_path / "none", "does not exist"), (tmp_path, "is no file")):
        with pytest.raises(GpubloatError, match=match):
            memory.load(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(GpubloatError, match="is no file"):
        memory.load(tmp_path / "pipe")
    for data in (b"", b"PK\3\4", b'{"segments": []}', b"\x7fELF", b"a,b,c\n1,2,3\n", b"\0" * 100):
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(FormatError):
            memory.load(tmp_path / "x")


def test_the_run_is_kept_where_it_is_asked_for(tmp_path: Path) -> None:
    path = snapshot.write(tmp_path / "s.pickle", current())
    run = memory.load(path, out=tmp_path / "run")
    assert Run.load(tmp_path / "run")["events"].equals(run["events"])
    with pytest.raises(GpubloatError, match="not empty"):
        memory.load(path, out=tmp_path / "run")
    memory.load(path, out=tmp_path / "run", force=True)
    assert str(tmp_path) not in (tmp_path / "run" / "run.json").read_text()


def test_many_events_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubloat.memory.snapshot.CHUNK", 7)
    trace = [event("alloc", i, 1, frames=[{**snapshot.FRAME, "line": i % 5}]) for i in range(100)]
    run = load(tmp_path, snapshot.snapshot([], trace))
    assert run["events"]["event"].tolist() == list(range(100))
    assert (len(run["stacks"]), len(run["frames"])) == (5, 5)
    assert run["events"]["stack"].tolist() == [i % 5 for i in range(100)]


def test_strings_that_no_table_can_hold(tmp_path: Path) -> None:
    frame = {"name": "a\ud800b", "filename": "\0", "line": -1}
    content = snapshot.snapshot([], [event("alloc", 1, 1, frames=[frame])])
    content["allocator_settings"] = {"\ud800": "\ud800", 5: 5, "deep": {"a": {"b": 1}}, "nan": float("nan")}
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(content, 4))
    run = memory.load(tmp_path / "s.pickle")
    assert row(run, "frames")["function"] == "a\\ud800b"
    assert row(run, "frames")["line"] == 0
