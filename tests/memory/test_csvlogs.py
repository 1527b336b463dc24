"""Logs of RMM and buffers of MiniMalloc."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubloat import memory
from gpubloat.errors import FormatError
from gpubloat.memory import csvlogs
from gpubloat.run import Run

RMM = """Thread,Time,Action,Pointer,Size,Stream
1,23:59:59.999999,allocate,0x7f0000000000,1024,0x0
1,00:00:00:000001,allocate,0x7f0000000400,5,0xffffffffffffffff
2,00:00:00.5,free,0x7f0000000000,1024,0
2,00:00:01.000000,allocate failure,(nil),99999,0
"""


def load(path: Path, text: str) -> Run:
    (path / "log.csv").write_text(text)
    return memory.load(path / "log.csv")


def test_rmm(tmp_path: Path) -> None:
    run = load(tmp_path, RMM)
    events = run["events"]
    assert events["action"].tolist() == ["alloc", "alloc", "free_completed", "oom"]
    assert events["address"].tolist() == [0x7F00_0000_0000, 0x7F00_0000_0400, 0x7F00_0000_0000, 0]
    assert events["size_bytes"].tolist() == [1024, 5, 1024, 99999]
    assert events["stream"].tolist() == [0, 2**64 - 1, 0, 0]
    assert events["time_us"].diff().tolist()[1:] == [2, 499_999, 500_000]  # over midnight
    assert run.provenance["format"] == "rmm"
    assert run.provenance["history"]["0"]["starts_mid_run"] is False
    assert "rmm" in run.provenance["empty"]["segments"]
    found = memory.replay(run, "native")["replays"].iloc[0]
    assert found["peak_requested_bytes"] == 1029


def test_minimalloc(tmp_path: Path) -> None:
    run = load(tmp_path, "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\n")
    assert run["events"]["action"].tolist() == ["alloc", "alloc", "free_completed", "alloc", *["free_completed"] * 2]
    assert run.provenance["has_addresses"] is False
    replayed = memory.replay(run, "native")
    assert replayed["usage"]["requested_bytes"].tolist() == [4, 8, 4, 8, 4, 0]


def test_headers_alone(tmp_path: Path) -> None:
    for head in ("Thread,Time,Action,Pointer,Size,Stream", "id,lower,upper,size\n"):
        run = load(tmp_path, head)
        assert len(run["events"]) == 0
        assert "no row" in run.provenance["empty"]["events"]


BAD = [
    RMM + "1,x,allocate,0x1,5",
    RMM + "1,x,allocate,0x1,5,0,0",
    RMM + "1,x,explode,0x1,5,0",
    RMM + "1,x,allocate,0x1ffffffffffffffff,5,0",
    RMM + "1,x,allocate,7f00zz,5,0",
    RMM + "1,x,allocate,0x1,-5,0",
    RMM + "1,x,allocate,0x1,1e3,0",
    RMM + "1,x,allocate,0x1,٣,0",
    RMM + "1,x,allocate,0x1,5,",
    RMM + "1," + "x" * 5000 + ",allocate,0x1,5,0",
    "id,lower,upper,size\na,5,5,1",
    "id,lower,upper,size\na,5,4,1",
    "id,lower,upper,size\na,-1,4,1",
    f"id,lower,upper,size\na,1,4,{1 << 63}",
    "id,lower,upper,size\n" + '"' * 3 + "\n",
]


@pytest.mark.parametrize("text", BAD)
def test_bad_lines_are_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(FormatError) as caught:
        load(tmp_path, text)
    assert caught.value.offset == len(text.rstrip("\n").rpartition("\n")[0].encode()) + 1


@given(st.text(max_size=100), st.sampled_from([RMM, "id,lower,upper,size\n"]))
@settings(max_examples=200, deadline=None)
def test_any_text(tmp_path_factory: pytest.TempPathFactory, text: str, head: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes((head + text).encode("utf-8", "replace"))
    with contextlib.suppress(FormatError):
        for events in csvlogs.events(path, "rmm" if head == RMM else "minimalloc"):
            assert set(events["action"]) <= {"alloc", "free_completed", "oom"}
