"""The models: each rule by a hand-worked example, and what must hold after any sequence of operations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gpubloat.errors import GpubloatError
from gpubloat.memory.allocators import (
    NAMES,
    Allocator,
    Caching,
    Driver,
    Expandable,
    Native,
    Segment,
    choose,
    make,
    settings,
)
from gpubloat.memory.allocators.settings import NO_LIMIT, recorded

KIB = 1 << 10
MIB = 1 << 20


def caching(limit: int | None = None, **given: Any) -> Caching:
    return Caching(Driver(limit), settings(**given))


def expandable(limit: int | None = None, **given: Any) -> Expandable:
    return Expandable(Driver(limit), settings(expandable_segments=True, **given))


def alloc(model: Allocator, *sizes: int, stream: int = 0) -> list[int]:
    found = [model.malloc(size, stream) for size in sizes]
    assert None not in found
    return [address for address in found if address is not None]


def calls(model: Allocator) -> list[tuple[str, int]]:
    """(call, MiB) since the last time."""
    names = ("malloc", "free", "map", "unmap")
    found = [(call, size // MIB) for _, call, _, size, _ in model.driver.calls if call in names]
    model.driver.calls.clear()
    return found


@pytest.mark.parametrize(
    ("size", "rounded"),
    [(0, 512), (1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512), (10 * MIB - 1, 10 * MIB)],
)
def test_sizes(size: int, rounded: int) -> None:
    assert caching().round(size) == rounded


@pytest.mark.parametrize(
    ("size", "divisions", "rounded"),
    [
        (1200 * KIB, 4, 1280 * KIB),  # steps of 256 KiB between 1 and 2 MiB
        (1280 * KIB, 4, 1280 * KIB),
        (1281 * KIB, 4, 1536 * KIB),
        (1920 * KIB, 4, 2 * MIB),
        (MIB, 4, MIB),
        (2048, 4, 2048),  # at most 512 * 4: as without
        (2100, 4, 2560),
        (5 * MIB, 2, 6 * MIB),
        (5 * MIB, 1, 5 * MIB),
        (5 * MIB + 1, 1, 5 * MIB + 512),
    ],
)
def test_roundup_power2_divisions(size: int, divisions: int, rounded: int) -> None:
    assert caching(roundup_power2_divisions=divisions).round(size) == rounded


def test_divisions_by_interval() -> None:
    model = caching(roundup_power2_divisions="[2:2,4:4,>:8]")
    assert model.settings.roundup_power2_divisions == (2, 2, 4, *[8] * 13)
    assert model.round(65 * KIB) == 96 * KIB
    assert model.round(5 * MIB - 1) == 5 * MIB
    assert model.round(8 * MIB + 1) == 9 * MIB
    assert model.settings.changed().startswith("roundup_power2_divisions=[1:2,2:2,4:4,8:8")


@pytest.mark.parametrize(
    ("size", "segment"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 1, 12), (33 * MIB, 34)],
)
def test_segments(size: int, segment: int) -> None:
    model = caching()
    alloc(model, size)
    assert calls(model) == [("malloc", segment)]


def test_large_segment_size() -> None:
    model = caching(large_segment_size_mb=32)
    alloc(model, 2 * MIB)
    assert calls(model) == [("malloc", 32)]


def test_best_fit_takes_the_smallest_then_the_lowest() -> None:
    model = caching()
    a, b, c, d = alloc(model, 20 * MIB, 14 * MIB, 12 * MIB, 12 * MIB)
    for address in (a, b, d, c):
        model.free(address)
    assert alloc(model, 11 * MIB) == [min(c, d)]
    assert alloc(model, 11 * MIB) == [max(c, d)]
    assert alloc(model, 11 * MIB) == [b]
    assert alloc(model, 11 * MIB) == [a]


def test_splits_give_the_low_part_and_keep_what_is_large_enough() -> None:
    model = caching()
    (a, b) = alloc(model, 2 * MIB, 3 * MIB)
    assert b == a + 2 * MIB
    (c,) = alloc(model, 14 * MIB + 512)  # 15 MiB are left: a rest of 1 MiB less 512 bytes is not split off
    assert c == b + 3 * MIB
    assert [size for _, size, _ in next(iter(model.segments())).blocks] == [2 * MIB, 3 * MIB, 15 * MIB]
    assert model.active == 20 * MIB
    (d, e) = alloc(model, 1, MIB)
    assert e == d + 512  # small blocks are split down to 512 bytes


def test_neighbours_merge() -> None:
    model = caching()
    a, b, c, d = alloc(model, 5 * MIB, 5 * MIB, 5 * MIB, 5 * MIB)
    for address in (a, c, b):
        model.free(address)
    assert alloc(model, 15 * MIB) == [a]
    model.free(a)
    model.free(d)
    assert [s.blocks for s in model.segments()] == [[(a, 20 * MIB, False)]]


def test_streams_and_pools_do_not_mix() -> None:
    model = caching()
    (a,) = alloc(model, 2 * MIB)
    model.free(a)
    alloc(model, 2 * MIB, stream=9)
    assert model.malloc(2 * MIB, 0, "0.1") is not None
    assert calls(model) == [("malloc", 20)] * 3
    model.release()
    assert calls(model) == [("free", 20)]


def test_without_memory_the_cache_is_given_back_and_then_there_is_none() -> None:
    model = caching(50 * MIB)
    a, b, c = alloc(model, 20 * MIB, 10 * MIB, 2 * MIB)
    model.free(a)
    model.free(b)
    calls(model)
    assert model.malloc(28 * MIB) is not None
    assert calls(model) == [("free", 10), ("free", 20), ("malloc", 28)]
    assert model.malloc(3 * MIB) == c + 2 * MIB
    assert model.malloc(20 * MIB) is None
    assert model.driver.used == 48 * MIB


def test_oversize_blocks_are_neither_split_nor_given_to_small_requests() -> None:
    model = caching(max_split_size_mb=32)
    (a,) = alloc(model, 64 * MIB)
    model.free(a)
    alloc(model, 10 * MIB)
    assert calls(model) == [("malloc", 64), ("malloc", 10)]
    assert alloc(model, 50 * MIB) == [a]  # within max_non_split_rounding: given whole
    assert model.active == 74 * MIB
    model.free(a)
    alloc(model, 44 * MIB)
    assert calls(model) == [("malloc", 44)]


def test_one_oversize_block_is_given_back_or_several_from_the_largest() -> None:
    model = caching(200 * MIB, max_split_size_mb=32)
    a, b, c = alloc(model, 40 * MIB, 60 * MIB, 80 * MIB)
    (small,) = alloc(model, 20 * MIB)
    for address in (a, b, c, small):
        model.free(address)
    calls(model)
    alloc(model, 36 * MIB)  # 40 MiB is there, and fits within the slack
    assert calls(model) == []
    model.free(a)
    (d,) = alloc(model, 60 * MIB)
    assert d == b
    model.free(d)
    assert model.malloc(130 * MIB) is not None
    assert calls(model) == [("free", 80), ("free", 60), ("malloc", 130)]


def test_garbage_collection_gives_back_what_is_old() -> None:
    model = caching(140 * MIB, garbage_collection_threshold=0.5)
    a, b = alloc(model, 20 * MIB, 30 * MIB)
    model.free(a)
    model.free(b)
    model.free(*alloc(model, 30 * MIB))  # `b` is one look-up younger
    alloc(model, 40 * MIB)
    calls(model)
    alloc(model, 34 * MIB)  # 20 MiB above the threshold
    assert calls(model) == [("free", 20), ("malloc", 34)]
    alloc(model, 36 * MIB)
    assert calls(model) == [("free", 30), ("malloc", 36)]


def test_expandable_blocks_grow_into_what_is_not_mapped() -> None:
    model = expandable()
    (a,) = alloc(model, 15 * MIB)
    assert calls(model) == [("map", 20)]
    (b,) = alloc(model, 30 * MIB)  # 5 MiB are free behind `a`: two pages more
    assert (b, calls(model)) == (a + 15 * MIB, [("map", 40)])
    model.free(a)
    (c,) = alloc(model, 16 * MIB)  # 15 MiB free at the front, 15 MiB at the end
    assert (c, calls(model)) == (b + 30 * MIB, [("map", 20)])
    assert [s.size for s in model.segments()] == [80 * MIB]
    small = alloc(model, 5)
    assert calls(model) == [("map", 2)]
    assert abs(small[0] - a) > MIB


def test_expandable_unmaps_whole_pages_and_maps_holes_again() -> None:
    model = expandable()
    a, b, c = alloc(model, 10 * MIB, 60 * MIB, 10 * MIB)
    model.free(b)
    calls(model)
    model.release()
    assert calls(model) == [("unmap", 40)]  # of [10, 70) MiB, the pages [20, 60)
    assert [(s.address - a, s.size) for s in model.segments()] == [(0, 20 * MIB), (60 * MIB, 20 * MIB)]
    assert alloc(model, 55 * MIB) == [b]
    assert calls(model) == [("map", 40)]
    for address in (a, b, c):
        model.free(address)
    model.release()
    assert model.driver.used == 0
    assert not list(model.segments())


def test_expandable_under_a_limit() -> None:
    model = expandable(100 * MIB)
    a, b = alloc(model, 50 * MIB, 40 * MIB)
    assert model.malloc(30 * MIB) is None
    model.free(a)
    assert alloc(model, 50 * MIB) == [a]
    model.free(b)
    assert model.malloc(60 * MIB) is None
    assert alloc(model, 50 * MIB) == [b]
    assert model.driver.used <= 100 * MIB


def test_native() -> None:
    model = Native(Driver(10 * MIB))
    a, b = alloc(model, 3 * MIB, 100)
    assert (model.active, model.driver.used) == (4 * MIB + 512,) * 2
    model.free(a)
    assert model.driver.used == 512
    assert model.malloc(11 * MIB) is None
    with pytest.raises(KeyError):
        model.free(a)
    assert [s.address for s in model.segments()] == [b]


def check(model: Allocator, held: dict[int, int]) -> None:
    """What holds after every operation."""
    found = list(model.segments())
    n_held = 0
    active = 0
    end = 0
    for segment in found:
        assert segment.address >= end
        at = segment.address
        free_before = False
        for address, size, is_held in segment.blocks:
            assert address == at
            assert size > 0
            if is_held:
                assert size >= held[address]
                n_held += 1
                active += size
            else:
                assert not free_before, "free neighbours did not merge"
            free_before = not is_held
            at += size
        end = segment.address + segment.size
        assert at == end
    free = sum(size for s in found for _, size, is_held in s.blocks if not is_held)
    assert n_held == len(held)
    assert model.active == active
    assert model.driver.used == sum(s.size for s in found) == active + free
    if isinstance(model, Caching):
        keys = sorted(key for pool in model.pools.values() for key in pool.free)
        assert keys == sorted(size << 64 | a for s in found for a, size, is_held in s.blocks if not is_held)


MODELS = {
    "native": lambda: Native(Driver(200 * MIB)),
    "caching": lambda: caching(),
    "caching, limit": lambda: caching(150 * MIB),
    "caching, split": lambda: caching(200 * MIB, max_split_size_mb=24, roundup_power2_divisions=4),
    "caching, collect": lambda: caching(200 * MIB, garbage_collection_threshold=0.4),
    "expandable": lambda: expandable(),
    "expandable, limit": lambda: expandable(150 * MIB),
    "expandable, large pages": lambda: expandable(300 * MIB, large_segment_size_mb=32),
}
sizes = st.one_of(
    st.integers(0, 4 * KIB), st.integers(0, 3 * MIB), st.integers(MIB, 48 * MIB), st.just(MIB), st.just(10 * MIB)
)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), sizes, st.integers(0, 1), st.sampled_from(["0.0", "0.0", "0.1"])),
        st.tuples(st.just("free"), st.integers(0, 100)),
        st.tuples(st.just("empty_cache")),
    ),
    max_size=60,
)


@pytest.mark.parametrize("name", MODELS)
@given(operations)
@hypothesis_settings(max_examples=60, deadline=None)
def test_reserved_is_live_and_free_after_every_operation(name: str, given: list[tuple[Any, ...]]) -> None:
    model = MODELS[name]()
    held: dict[int, int] = {}
    for operation in given:
        if operation[0] == "alloc":
            address = model.malloc(*operation[1:])
            if address is not None:
                assert address not in held
                held[address] = operation[1]
            else:
                assert model.driver.limit is not None
        elif operation[0] == "free" and held:
            address = sorted(held)[operation[1] % len(held)]
            del held[address]
            model.free(address)
        else:
            model.release()
        check(model, held)
    for address in held:
        model.free(address)
    check(model, {})


def test_freeing_twice_is_an_error() -> None:
    for model in (caching(), expandable()):
        a, _ = alloc(model, 512, 512)
        model.free(a)
        with pytest.raises(KeyError):
            model.free(a)


def test_sizes_that_no_driver_has() -> None:
    for name in NAMES:
        model = make(name, Driver(), choose(name, {})[1])
        for size in (1 << 57, 1 << 63, (1 << 64) - 1, 1 << 64):
            assert model.malloc(size) is None
        assert model.driver.used == 0


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("odd", {}),
        ("native", {"max_split_size_mb": 100}),
        ("caching", {"max_split_size": 100}),
        ("caching", {"max_split_size_mb": 19}),
        ("caching", {"max_split_size_mb": 30, "large_segment_size_mb": 32}),
        ("caching", {"large_segment_size_mb": 10}),
        ("caching", {"expandable_segments": "maybe"}),
        ("caching", {"max_split_size_mb": "x"}),
        ("caching", {"max_split_size_mb": float("nan")}),
        ("caching", {"garbage_collection_threshold": 1.0}),
        ("caching", {"garbage_collection_threshold": -0.1}),
        ("caching", {"large_segment_size_mb": 3}),
        ("caching", {"large_segment_size_mb": 0}),
        ("caching", {"max_non_split_rounding_mb": -1}),
        ("caching", {"roundup_power2_divisions": 3}),
        ("caching", {"roundup_power2_divisions": "[1"}),
        ("caching", {"roundup_power2_divisions": [2, 2]}),
        ("caching", {"roundup_power2_divisions": None}),
    ],
)
def test_settings_that_are_none(name: str, given: dict[str, Any]) -> None:
    with pytest.raises(GpubloatError):
        choose(name, given)


def test_settings_of_snapshots() -> None:
    conf = "max_split_size_mb:64,large_segment_size_mb:32,roundup_power2_divisions:[256:1,512:2,>:4],backend:native"
    found = recorded({"PYTORCH_CUDA_ALLOC_CONF": conf, "max_split_size": 64 * MIB, "expandable_segments": True})
    assert (found.max_split_size, found.large_segment_size, found.expandable_segments) == (64 * MIB, 32 * MIB, True)
    assert recorded({"max_split_size": -1}).max_split_size == NO_LIMIT
    divided = {str(1 << i): 2 for i in range(16)}
    assert recorded({"roundup_power2_divisions": divided}).roundup_power2_divisions == (2,) * 16
    for odd in ({"max_split_size": "x", "PYTORCH_CUDA_ALLOC_CONF": 5}, {"roundup_power2_divisions": {"a": "b"}}):
        assert recorded(odd) == settings()
    assert settings(max_split_size_mb=64, expandable_segments=True).changed() == (
        "max_split_size_mb=64,expandable_segments=True"
    )
    assert choose("caching", {"expandable_segments": True})[0] == "expandable"


def test_segments_that_are_there_already() -> None:
    model = caching()
    base = 1 << 40
    model.adopt(Segment(base, 20 * MIB, 0, "0.0", False, False, [(base, MIB, True), (base + MIB, 19 * MIB, False)]))
    assert alloc(model, 2 * MIB) == [base + MIB]
    model.free(base)
    assert model.driver.used == 20 * MIB
