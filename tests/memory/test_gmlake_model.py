"""The model of GMLake's code: where it differs from its paper, by hand, and what is conserved."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gpubloat.errors import GpubloatError
from gpubloat.memory.allocators import Driver, Gmlake, choose
from gpubloat.memory.allocators.gmlake import settings as gmlake_settings
from tests.memory.conserved import operated

MIB = 1 << 20


def gmlake(limit: int | None = None, **given: Any) -> Gmlake:
    return Gmlake(Driver(limit), gmlake_settings(**{"fragmentation_limit_mb": 16} | given))


def alloc(model: Gmlake, *sizes: int) -> list[int]:
    """Of MiB."""
    found = [model.malloc(size * MIB) for size in sizes]
    assert None not in found
    return [address for address in found if address is not None]


def calls(model: Gmlake) -> list[tuple[str, int]]:
    """(call, MiB) since the last time."""
    found = [(call, size // MIB) for _, call, _, size, _ in model.driver.calls]
    model.driver.calls.clear()
    return found


def new(size: int) -> list[tuple[str, int]]:
    return [("reserve", size), ("create", size), ("map", size), ("set_access_each", size)]


def fuse(size: int) -> list[tuple[str, int]]:
    return [("reserve", size), ("map", size), ("set_access_each", size)]


def free(model: Gmlake, *addresses: int) -> None:
    for address in addresses:
        model.free(address)


def test_new_memory_is_whole_segments() -> None:
    model = gmlake()
    (a,) = alloc(model, 3)  # 4 in multiples of 2 MiB, of a segment of 20
    assert calls(model) == new(20)
    assert alloc(model, 16) == [a + 4 * MIB]
    assert model.active == 19 * MIB
    assert model.malloc(MIB) is not None
    assert calls(model) == [("malloc", 2)]


def test_fusing_from_the_largest_down() -> None:
    model = gmlake()
    a, b, _ = alloc(model, 20, 30, 40)
    free(model, a, b)
    calls(model)
    (c,) = alloc(model, 44)
    assert calls(model) == fuse(44)
    assert alloc(model, 6) == [a + 14 * MIB]  # what is left of `a`
    free(model, c)
    assert alloc(model, 44) == [c]
    assert calls(model) == []
    assert model.counts == {"n_stitchable": 5, "n_stitched": 1}


def test_below_the_limit_nothing_is_fused() -> None:
    model = gmlake(fragmentation_limit_mb=512)
    a, b = alloc(model, 20, 30)
    free(model, a, b)
    calls(model)
    alloc(model, 44)
    assert calls(model) == new(44)
    assert model.counts == {"n_stitchable": 0, "n_stitched": 0}


def test_it_never_takes_only_what_is_missing() -> None:
    model = gmlake()
    a, b = alloc(model, 20, 30)
    free(model, a, b)
    calls(model)
    alloc(model, 60)
    assert calls(model) == new(60)


def test_one_block_alone_is_not_fused() -> None:
    model = gmlake()
    (a,) = alloc(model, 20)
    free(model, a)
    calls(model)
    alloc(model, 30)
    assert calls(model) == new(30)


def test_a_larger_block_is_split_although_a_fused_range_fits() -> None:
    model = gmlake()
    a, b, _, d = alloc(model, 20, 24, 40, 100)
    free(model, a, b)
    (e,) = alloc(model, 44)
    free(model, e, d)
    assert alloc(model, 44) == [d]


def test_a_larger_fused_range_serves_within_the_reuse_limit() -> None:
    for limit, is_reused in ((10, True), (2, True), (1.5, False)):
        model = gmlake(reuse_limit=limit)
        a, b = alloc(model, 20, 24)
        free(model, a, b)
        (c,) = alloc(model, 44)
        free(model, c)
        held = model.driver.used
        (d,) = alloc(model, 26)
        assert (d == c) == is_reused
        if is_reused:  # only its first 26 MiB are held
            assert alloc(model, 18) != [c]
            assert model.driver.used == held


def test_it_fuses_late_where_it_is_told_to() -> None:
    for level in (1, 2):
        model = gmlake(100 * MIB, defrag_level=level)
        a, b = alloc(model, 30, 30)
        keep = alloc(model, 6)
        free(model, a, b)
        calls(model)
        if level == 1:
            alloc(model, 40)  # the driver has 20 MiB left: half of what is wanted, then fused
            assert ("map", 40) in calls(model)
            assert model.counts["n_stitched"] == 1
        else:
            alloc(model, 40)  # both segments go back first
            assert calls(model)[-4:] == new(40)
            assert model.counts["n_stitched"] == 0
        free(model, *keep)


def test_segments_that_go_back_take_their_fused_ranges_along() -> None:
    model = gmlake()
    a, b = alloc(model, 20, 24)
    free(model, a, b)
    (c,) = alloc(model, 44)
    free(model, c)
    calls(model)
    model.release()
    found = calls(model)
    assert found.count(("address_free", 44)) == 1
    assert model.driver.used == 0
    assert not model.ranges


def test_fused_addresses_have_a_limit() -> None:
    model = gmlake(auto_gc_gb=0)
    a, b = alloc(model, 20, 24)
    free(model, a, b)
    (c,) = alloc(model, 44)
    free(model, c)
    d, e = alloc(model, 60, 70)
    free(model, d, e)
    calls(model)
    alloc(model, 100)
    assert calls(model) == [*fuse(100), ("unmap", 44), ("address_free", 44)]


sizes = st.one_of(st.integers(0, 4096), st.integers(0, 3 * MIB), st.integers(MIB, 48 * MIB))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), sizes, st.integers(0, 1), st.sampled_from(["0.0", "0.0", "0.1"])),
        st.tuples(st.just("free"), st.integers(0, 100)),
        st.tuples(st.just("free"), st.integers(0, 100)),
        st.tuples(st.just("empty_cache")),
    ),
    max_size=60,
)


@pytest.mark.parametrize(
    ("limit", "given_settings"),
    [
        (None, {}),
        (None, {"fragmentation_limit_mb": 4, "reuse_limit": 1}),
        (120, {"fragmentation_limit_mb": 4}),
        (120, {"fragmentation_limit_mb": 4, "defrag_level": 1}),
        (120, {"fragmentation_limit_mb": 4, "defrag_level": 2, "auto_gc_gb": 0.05}),
    ],
)
@given(operations)
@hypothesis_settings(max_examples=60, deadline=None)
def test_nothing_is_lost_and_nobody_shares_a_chunk(
    limit: int | None, given_settings: dict[str, Any], given: list[tuple[Any, ...]]
) -> None:
    model = gmlake(None if limit is None else limit * MIB, **given_settings)
    held: dict[int, int] = {}
    for _ in operated(model, given, held):
        blocks = [b for owned, _, _ in model._held.values() for b in owned]
        assert len({b.address for b in blocks}) == len(blocks)
        for owned, rounded, _ in model._held.values():
            assert sum(b.size for b in owned) == rounded
        busy = sum(flags.count(1) for flags in model.busy.values())
        assert busy * 2 * MIB == sum(rounded for _, rounded, _ in model._held.values())
    for address in held:
        model.free(address)
    assert model.active == 0
    for base, flags in model.busy.items():  # all merged again
        assert model.blocks[base].size == len(flags) * 2 * MIB


@pytest.mark.parametrize(
    "given",
    [
        {"fragmentation_limit_mb": -1},
        {"fragmentation_limit_mb": "x"},
        {"reuse_limit": 0.5},
        {"defrag_level": 3},
        {"defrag_level": 0.5},
        {"auto_gc_gb": -1},
        {"chunk_bytes": 1 << 21},
    ],
)
def test_settings_that_are_none(given: dict[str, Any]) -> None:
    with pytest.raises(GpubloatError):
        choose("gmlake", given)


def test_settings_are_named() -> None:
    assert choose("gmlake", {"fragmentation_limit_mb": 128, "defrag_level": 1})[1].changed() == (
        "fragmentation_limit_mb=128,defrag_level=1"
    )


def test_only_what_was_given_out_can_be_freed() -> None:
    model = gmlake()
    a, b = alloc(model, 20, 24)
    free(model, a, b)
    (c,) = alloc(model, 44)
    for address in (a, b, c + 2 * MIB):
        with pytest.raises(KeyError):
            model.free(address)
    model.free(c)
    with pytest.raises(KeyError):
        model.free(c)
