"""The model of the stitching allocator and the compiled one make the same calls to the driver for the same requests."""

from __future__ import annotations

import ctypes
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from gpubloat import memory
from gpubloat.memory import trace as traces_of
from gpubloat.memory.allocators.base import Driver
from gpubloat.memory.allocators.caching import Caching
from gpubloat.memory.start import infer
from gpubloat.native import stitching as native
from tests.native import stitched

model = pytest.importorskip("gpubloat.memory.allocators.stitching", reason="there is no model of stitching yet")
pieces = pytest.importorskip("gpubloat.memory.allocators.pieces", reason="there is no model of stitching yet")

MIB = 1 << 20
UNLIMITED = 1 << 41
TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
SNAPSHOTS = sorted(TRACES.rglob("*.pickle")) if TRACES.is_dir() else []
ALLOC, FREE, RELEASE = 0, 1, 2
GRAPH = (3, 1)
Step = tuple[int, int, int, int, int, int]  # kind, block, size, stream, and two numbers of the pool
Call = tuple[str, int, int]
KINDS = ("reserve", "create", "map", "set_access", "unmap", "release", "address_free")


def by_model(
    steps: list[Step], limit: int | None, settings: Any
) -> tuple[list[list[Call]], list[tuple[int, int]], Any]:
    """For each step: the calls that it led to, and (reserved, active) after it; and the model."""
    driver = Driver(limit)
    allocator = model.Stitching(driver, settings)
    blocks: dict[int, int | None] = {}
    calls, sums = [], []
    for kind, name, size, stream, pool0, pool1 in steps:
        if kind == ALLOC:
            blocks[name] = allocator.malloc(size, stream, f"{pool0}.{pool1}")
        elif kind == RELEASE:
            allocator.release()
        elif (address := blocks.pop(name)) is not None:
            allocator.free(address)
        calls.append(effective(driver.calls))
        driver.calls.clear()
        sums.append((driver.used, allocator.active))
    return calls, sums, allocator


def effective(calls: list[tuple[int, str, int, int, int]]) -> list[Call]:
    """Without attempts that were undone: the compiled allocator knows how much there is, and does not make them."""
    out: list[tuple[str, int, int, int]] = []
    for _, call, address, size, n in calls:
        if call == "address_free" and ("reserve", address, size, 0) in out:
            first = out.index(("reserve", address, size, 0))
            if not any(made[0] in ("map", "unmap") for made in out[first:]):
                del out[first:]
                continue
        out.append((call, address, size, n))
    return [(call, size, n) for call, _, size, n in out]


def by_library(fake: stitched.Fake, steps: list[Step]) -> tuple[list[list[Call]], list[tuple[int, int]], native.Report]:
    """The same of the compiled allocator."""
    flat = (ctypes.c_int64 * (6 * len(steps)))(*(value for step in steps for value in step))
    after = (ctypes.c_int64 * (4 * len(steps)))()
    room = 40 * len(steps) + 100_000
    log = (native.Logged * room)()
    n = fake.lib.replay(flat, len(steps), log, room, after)
    assert n >= 0
    found = [
        (KINDS[row.kind], row.bytes, 0 if KINDS[row.kind] in ("reserve", "address_free") else row.n) for row in log[:n]
    ]
    ends = [0, *after[1::4]]
    calls = [found[start:end] for start, end in itertools.pairwise(ends)]
    return calls, list(zip(after[2::4], after[3::4])), fake.report()


def compare(fake: stitched.Fake, steps: list[Step], limit: int | None, settings: Any) -> native.Report:
    expected, sums, allocator = by_model(steps, limit, settings)
    calls, found, report = by_library(fake, steps)
    for i, (mine, theirs) in enumerate(zip(calls, expected)):
        assert mine == theirs, f"step {i} of {len(steps)}: {steps[i]}"
        assert found[i] == sums[i], f"step {i} of {len(steps)}: {steps[i]}"
    assert list(report.states) == [allocator.counts[f"n_s{i}"] for i in range(1, 6)]
    return report


def random_steps(seed: int, n: int) -> list[Step]:
    chance = random.Random(seed)
    sizes = [chance.randrange(1, 40 * MIB) for _ in range(6)] + [2 * MIB, 2 * MIB - 512, MIB + 1, 700]
    steps: list[Step] = []
    live: list[int] = []
    for i in range(n):
        if live and chance.random() < 0.47:
            steps.append((FREE, live.pop(chance.randrange(len(live))), 0, 0, 0, 0))
        elif chance.random() < 0.005:
            steps.append((RELEASE, 0, 0, 0, 0, 0))
        else:
            size = chance.choice(sizes) if chance.random() < 0.7 else chance.randrange(1, 30 * MIB)
            pool = (0, 0) if chance.random() < 0.8 else GRAPH
            steps.append((ALLOC, i, size, chance.choice([0, 0, 0, 8]), *pool))
            live.append(i)
    return steps + [(FREE, i, 0, 0, 0, 0) for i in live] + [(RELEASE, 0, 0, 0, 0, 0)]


@pytest.mark.parametrize(
    ("limit", "least", "most", "chunk"),
    [
        (None, None, None, 2 * MIB),
        (400 * MIB, None, None, 2 * MIB),
        (300 * MIB, 8 * MIB, 600 * MIB, 2 * MIB),
        (None, None, 256 * MIB, 2 * MIB),
        (420 * MIB, 6 * MIB, 600 * MIB, 6 * MIB),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_random_requests(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    limit: int | None,
    least: int | None,
    most: int | None,
    chunk: int,
) -> None:
    settings = pieces.settings(stitch_min_bytes=least, stitch_limit_bytes=most, chunk_bytes=chunk)
    fake = stitched.fresh(
        tmp_path, monkeypatch, memory=limit or UNLIMITED, backed=False, flags=native.CHECK | native.LOG,
        least=least or 0, limit=most or 0, chunk=chunk,
    )  # fmt: skip
    report = compare(fake, random_steps(seed, 3000), limit, settings)
    assert all(report.states[: 3 if least else 4])
    assert bool(report.states[4]) == (limit is not None)
    fake.lib.release_pool(0, *GRAPH)
    fake.close()


@pytest.mark.parametrize("path", SNAPSHOTS or [None], ids=lambda p: p.stem if p else "none")
def test_real_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Path | None) -> None:
    """Whatever is held before a trace begins is allocated first."""
    if path is None:
        pytest.skip("the recorded traces are not here")
    run = memory.load(path)
    if not len(run["events"]):
        pytest.skip("has no history")
    for one in traces_of.traces(run):
        fake = stitched.fresh(tmp_path, monkeypatch, memory=UNLIMITED, backed=False, flags=native.LOG)
        compare(fake, recorded_steps(one), None, pieces.settings())
        assert fake.misuse() == ""


def recorded_steps(trace: traces_of.Trace) -> list[Step]:
    before = infer(trace, Caching(Driver(), trace.settings).round)
    steps: list[Step] = []
    live: dict[int, int] = {}

    def allocate(address: int, size: int, stream: int, pool: str) -> None:
        pool0, pool1 = (int(part) for part in pool.split("."))
        live[address] = len(steps)
        steps.append((ALLOC, live[address], size, stream, pool0, pool1))

    for address in sorted(before.held):
        allocate(address, before.held[address][1], *before.streams[address])
    columns = (trace.actions, trace.addresses, trace.sizes, trace.streams, trace.pools)
    for action, address, size, stream, pool in zip(*columns):
        if action in ("alloc", "free_completed") and address in live:
            steps.append((FREE, live.pop(address), 0, 0, 0, 0))
        if action == "alloc":
            allocate(address, size, stream, pool)
    return steps
