"""The BFC model: rules of bfc_allocator.cc by hand, and what is conserved."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gpubloat.errors import GpubloatError
from gpubloat.memory.allocators import Bfc, Driver, choose
from gpubloat.memory.allocators.bfc import settings as bfc_settings
from tests.memory.conserved import operated

MIB = 1 << 20


def bfc(limit: int | None = None, **given: Any) -> Bfc:
    return Bfc(Driver(limit), bfc_settings(**given))


def alloc(model: Bfc, *sizes: int) -> list[int]:
    found = [model.malloc(size) for size in sizes]
    assert None not in found
    return [address for address in found if address is not None]


def regions(model: Bfc) -> list[int]:
    """Bytes of the regions so far."""
    return [size for _, call, _, size, _ in model.driver.calls if call == "malloc"]


def test_regions_double() -> None:
    model = bfc()
    alloc(model, 256, 2 * MIB, MIB, 20 * MIB, 30 * MIB)
    # 2; 4, the next one; 1 MiB fits; 8 is doubled to 32 for 20, which is then tried again; 30 wants a new one.
    assert regions(model) == [2 * MIB, 4 * MIB, 32 * MIB, 32 * MIB]
    alloc(model, 60 * MIB)
    assert regions(model)[4:] == [64 * MIB]


def test_the_last_region_is_what_is_left() -> None:
    model = bfc(100 * MIB)
    alloc(model, 60 * MIB, 33 * MIB)
    assert regions(model) == [64 * MIB, 36 * MIB]
    assert model.active == 100 * MIB  # given whole: less than 128 MiB are left of each
    assert model.malloc(256) is None


def test_the_driver_has_less_than_the_limit() -> None:
    """Nine tenths of 64 MiB, and of that, until it fits into 50 MiB, in multiples of 256 bytes."""
    model = bfc(50 * MIB, memory_limit_bytes=1 << 40)
    alloc(model, 40 * MIB)
    size = 64 * MIB
    while size > 50 * MIB:
        size = -(-int(size * 0.9) // 256) * 256
    assert regions(model) == [size]
    assert model.malloc(40 * MIB) is None


def test_without_growth_there_is_one_region() -> None:
    model = bfc(100 * MIB, allow_growth=False)
    alloc(model, 1, 90 * MIB)
    assert regions(model) == [100 * MIB]
    assert model.malloc(10 * MIB) is None
    model = bfc(100 * MIB, allow_growth=False, memory_limit_bytes=75 * MIB)
    alloc(model, 1)
    assert regions(model) == [75 * MIB]
    with pytest.raises(GpubloatError, match="how much"):
        bfc(allow_growth=False)


def test_a_chunk_is_split_where_it_is_twice_as_large_or_much_larger() -> None:
    model = bfc(1 << 30, allow_growth=False)
    a, _, b, _, d, _ = alloc(model, 300 * MIB, 1, 100 * MIB, 1, 60 * MIB, 1)
    for address in (a, b, d):
        model.free(address)
    used = model.active
    assert alloc(model, 51 * MIB) == [d]  # the best fit; 60 is less than 2 x 51: it is given whole
    assert model.active - used == 60 * MIB
    assert alloc(model, 50 * MIB) == [b]  # 100 is twice as much
    assert alloc(model, 50 * MIB) == [b + 50 * MIB]
    assert alloc(model, 173 * MIB) == [a]  # 127 MiB more: whole
    model.free(a)
    assert alloc(model, 172 * MIB) == [a]  # 128 MiB more: split
    assert alloc(model, 128 * MIB) == [a + 172 * MIB]


def test_fragmentation_fraction() -> None:
    model = bfc(1000 * MIB, allow_growth=False, fragmentation_fraction=0.01)
    a, _ = alloc(model, 100 * MIB, 1)
    model.free(a)
    alloc(model, 90 * MIB)  # 10 MiB more, which is 1 % of the limit
    assert model.active == 90 * MIB + 256


def test_chunks_merge_with_both_neighbours() -> None:
    model = bfc(100 * MIB, allow_growth=False)
    a, b, c, _ = alloc(model, 10 * MIB, 10 * MIB, 10 * MIB, 256)
    for address in (a, c, b):
        model.free(address)
    assert alloc(model, 30 * MIB) == [a]


def test_streams_and_pools_are_one_heap() -> None:
    model = bfc(100 * MIB, allow_growth=False)
    a = model.malloc(MIB, 7, "0.3")
    assert a is not None
    assert model.malloc(MIB, 0) == a + MIB


def test_regions_go_back_only_with_garbage_collection() -> None:
    """A pool that holds 256 of 1024 MiB as one free region cannot serve 1024, as in RMM's report 1957."""
    for collects in (False, True):
        model = bfc(1024 * MIB, memory_limit_bytes=1024 * MIB, garbage_collection=collects)
        (a,) = alloc(model, 256 * MIB)
        model.free(a)
        model.release()
        assert model.driver.used == 256 * MIB
        assert (model.malloc(1024 * MIB) is not None) == collects


sizes = st.one_of(st.integers(0, 4096), st.integers(0, 3 * MIB), st.integers(MIB, 48 * MIB))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), sizes, st.integers(0, 1)),
        st.tuples(st.just("free"), st.integers(0, 100)),
        st.tuples(st.just("empty_cache")),
    ),
    max_size=60,
)


@pytest.mark.parametrize(
    ("limit", "given_settings"),
    [
        (None, {}),
        (150, {}),
        (150, {"allow_growth": False, "fragmentation_fraction": 0.05}),
        (100, {"memory_limit_bytes": 1 << 40, "garbage_collection": True}),
    ],
)
@given(operations)
@hypothesis_settings(max_examples=60, deadline=None)
def test_nothing_is_lost(limit: int | None, given_settings: dict[str, Any], given: list[tuple[Any, ...]]) -> None:
    model = bfc(None if limit is None else limit * MIB, **given_settings)
    held: dict[int, int] = {}
    for _ in operated(model, given, held):
        pass


@pytest.mark.parametrize(
    "given",
    [
        {"allow_growth": "maybe"},
        {"fragmentation_fraction": 2},
        {"fragmentation_fraction": -1},
        {"memory_limit_bytes": 0},
        {"memory_limit_bytes": "x"},
        {"max_split_size_mb": 100},
    ],
)
def test_settings_that_are_none(given: dict[str, Any]) -> None:
    with pytest.raises(GpubloatError):
        choose("bfc", given)


def test_settings_are_named() -> None:
    assert choose("bfc", {"allow_growth": "false", "fragmentation_fraction": 0.5})[1].changed() == (
        "allow_growth=False,fragmentation_fraction=0.5"
    )
