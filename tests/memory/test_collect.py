"""Snapshots that come compressed."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import zstandard

from gpubloat import memory
from gpubloat.errors import FormatError
from tests.build.snapshot import MIB, block, event, segment

CONTENT = {
    "segments": [segment(2 * MIB, [block(MIB, "active_allocated"), block(MIB)])],
    "device_traces": [[event("segment_alloc", 2 * MIB, 2 * MIB), event("alloc", 2 * MIB, MIB)]],
}


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_compressed_is_the_same(tmp_path: Path) -> None:
    plain = pickle.dumps(CONTENT, protocol=4)
    one = memory.load(write(tmp_path / "a.pickle", plain))
    other = memory.load(write(tmp_path / "a.pickle.zst", zstandard.compress(plain)))
    for name in ("events", "segments", "blocks"):
        assert one[name].equals(other[name])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (zstandard.compress(pickle.dumps(CONTENT))[:-9], "damaged|no pickle|truncated|ends|is no pickle"),
        (zstandard.compress(b"x" * 1000), "holds no pickle"),
        (b"\x28\xb5\x2f\xfd" + b"\xff" * 40, "damaged"),
        (zstandard.compress(b"\x80\x04" + b"\0" * (100 << 20)), "more than"),
        (zstandard.compress(b"\x80\x04" + b"}" * (9 << 20) + b"."), "more than"),
        (zstandard.compress(pickle.dumps(print)), "opcode|refused|class|function"),
    ],
)
def test_bad_compressed_files(tmp_path: Path, data: bytes, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        memory.load(write(tmp_path / "a.zst", data))


@pytest.mark.parametrize(
    ("place", "size"), [("event", 1 << 63), ("event", (1 << 64) - 1), ("segment", 1 << 63), ("expandable", 7 << 40)]
)
def test_sizes_that_no_device_has(tmp_path: Path, place: str, size: int) -> None:
    parts = [segment(2 * MIB, [block(MIB)])]
    if place != "event":
        parts.append(segment(64 * MIB, [block(size)], is_expandable=place == "expandable"))
    trace = [event("alloc", 2 * MIB, size if place == "event" else MIB)]
    path = write(tmp_path / "a.pickle", pickle.dumps({"segments": parts, "device_traces": [trace]}, protocol=4))
    with pytest.raises(FormatError, match="than any device"):
        memory.load(path)
