"""The stitching model: each step by hand, the same calls as a naive reading of the algorithm, and what is conserved."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gpubloat.errors import GpubloatError
from gpubloat.memory.allocators import Driver, Stitching, choose
from gpubloat.memory.allocators.pieces import Piece
from gpubloat.memory.allocators.pieces import settings as stitching_settings
from tests.memory.conserved import conserved, operated
from tests.memory.naive_stitching import CHUNK, MIB, Naive


def stitching(limit: int | None = None, **given: Any) -> Stitching:
    return Stitching(Driver(limit), stitching_settings(**given))


def alloc(model: Stitching, *sizes: int) -> list[int]:
    """Of MiB."""
    found = [model.malloc(size * MIB) for size in sizes]
    assert None not in found
    return [address for address in found if address is not None]


def calls(model: Stitching) -> list[tuple[str, int]]:
    """(call, handles or MiB of addresses) since the last time."""
    found = [
        (call, size // MIB if call in ("reserve", "address_free") else n) for _, call, _, size, n in model.driver.calls
    ]
    model.driver.calls.clear()
    return found


def steps(model: Stitching) -> list[int]:
    return [model.counts[f"n_s{i}"] for i in range(1, 6)]


NEW_10 = [("reserve", 10), ("create", 5), ("map", 5), ("set_access", 5)]


def test_new_memory_then_an_exact_piece() -> None:
    model = stitching()
    (a,) = alloc(model, 10)
    assert calls(model) == NEW_10
    model.free(a)
    assert alloc(model, 10) == [a]
    assert (calls(model), steps(model)) == ([], [1, 0, 0, 1, 0])


def test_a_split_calls_nothing_and_the_whole_stays_in_reach() -> None:
    model = stitching()
    (a,) = alloc(model, 10)
    model.free(a)
    calls(model)
    (b,) = alloc(model, 4)
    assert b == a
    (c,) = alloc(model, 6)
    assert c == a + 4 * MIB
    model.free(b)
    model.free(c)
    assert alloc(model, 10) == [a]  # the range of both
    assert calls(model) == []
    assert steps(model) == [2, 1, 0, 1, 0]
    assert model.malloc(4 * MIB) not in (a, None)  # its pieces are held


def test_stitching_from_the_largest_down() -> None:
    model = stitching()
    a, b, c, _ = alloc(model, 4, 8, 4, 2)
    for address in (a, b, c):
        model.free(address)
    calls(model)
    (d,) = alloc(model, 14)  # 8 and 4 of `a`, and the first 2 of `c`
    assert calls(model) == [("reserve", 14), ("map", 7), ("set_access", 7)]
    assert alloc(model, 2) == [c + 2 * MIB]
    assert steps(model) == [1, 0, 1, 4, 0]
    model.free(d)
    assert alloc(model, 14) == [d]
    assert calls(model) == []
    model.free(d)
    assert alloc(model, 4) == [a]
    assert alloc(model, 12) != [d]


def test_only_what_is_missing_is_new() -> None:
    model = stitching()
    a, b = alloc(model, 6, 4)
    model.free(a)
    model.free(b)
    calls(model)
    alloc(model, 20)
    stitch = [("reserve", 20), ("map", 10), ("set_access", 10)]
    assert calls(model) == [*NEW_10, *stitch]
    assert model.driver.used == 20 * MIB
    assert steps(model) == [0, 0, 0, 3, 0]


def test_blocks_below_the_limit_are_not_stitched() -> None:
    model = stitching(stitch_min_bytes=6 * MIB)
    a, b = alloc(model, 4, 6)
    model.free(a)
    model.free(b)
    calls(model)
    alloc(model, 8)
    assert calls(model)[:2] == [("reserve", 2), ("create", 1)]
    assert model.driver.used == 12 * MIB


def test_without_memory_all_that_is_free_goes_back() -> None:
    model = stitching(20 * MIB)
    a, b, c = alloc(model, 10, 4, 4)
    model.free(a)
    (d,) = alloc(model, 4)  # the first part of `a`
    calls(model)
    assert model.malloc(12 * MIB) is None
    # 2 MiB were there for 6 that are missing; then 6 of `a` go, and 8 are left for 12.
    failed = [("reserve", 6), ("create", 1), ("release", 1), ("address_free", 6)]
    again = [("reserve", 12), ("create", 4), ("release", 4), ("address_free", 12)]
    assert calls(model) == [*failed, ("unmap", 3), ("release", 3), *again]
    assert steps(model)[4] == 1
    model.free(b)
    assert model.malloc(12 * MIB) is not None
    model.free(c)
    model.free(d)
    calls(model)
    model.release()  # the addresses of `a` go with the last of its chunks
    assert ("address_free", 10) in calls(model)
    assert model.driver.used == 12 * MIB


def test_stitched_addresses_have_a_limit() -> None:
    model = stitching(stitch_limit_bytes=28 * MIB)
    a, b, c, d = alloc(model, 2, 4, 10, 12)
    model.free(a)
    model.free(b)
    model.free(*alloc(model, 6))  # stitched, and free again
    model.free(c)
    model.free(d)
    calls(model)
    (e,) = alloc(model, 22)  # of 12 and 10: 28 MiB are stitched
    assert calls(model) == [("reserve", 22), ("map", 11), ("set_access", 11)]
    model.free(e)
    alloc(model, 24)  # 12, 10 and half of 4: all of the others are in use, and stay
    assert calls(model) == [("reserve", 24), ("map", 12), ("set_access", 12)]
    assert model.stitched_bytes == 52 * MIB
    model = stitching(stitch_limit_bytes=27 * MIB)
    a, b, c, d = alloc(model, 2, 4, 10, 12)
    model.free(a)
    model.free(b)
    model.free(*alloc(model, 6))
    model.free(c)
    model.free(d)
    calls(model)
    alloc(model, 22)
    assert calls(model)[3:] == [("unmap", 3), ("address_free", 6)]
    assert model.stitched_bytes == 22 * MIB
    assert model.driver.used == 28 * MIB


def test_small_blocks() -> None:
    model = stitching()
    a = model.malloc(1)
    assert a is not None
    assert model.malloc(MIB + 1) == a + 512  # the best fit, although it is more than 1 MiB
    assert calls(model) == [("reserve", 2), ("create", 1), ("map", 1), ("set_access", 1)]
    b = model.malloc(MIB + 1)
    assert calls(model) == [("reserve", 20), ("create", 10), ("map", 10), ("set_access", 10)]
    assert b is not None
    assert model.malloc(2 * MIB - 512) == b + MIB + 512
    model.free(a + 512)
    model.free(a)
    model.release()
    assert calls(model) == [("unmap", 1), ("release", 1), ("address_free", 2)]
    assert model.counts["n_stitchable"] == 0
    assert model.malloc(2 * MIB - 511) is not None  # 2 MiB when rounded: large
    assert model.counts["n_stitchable"] == 1


def test_active_counts_what_was_asked_for() -> None:
    model = stitching()
    (a,) = alloc(model, 3)
    assert (model.active, model.driver.used) == (3 * MIB, 4 * MIB)
    assert next(iter(model.segments())).blocks == [(a, 3 * MIB, True), (a + 3 * MIB, MIB, False)]


def test_private_pools_keep_their_memory() -> None:
    model = stitching()
    a, b = model.malloc(4 * MIB, 0, "0.7"), model.malloc(4 * MIB, 9)
    assert a is not None
    assert b is not None
    model.free(a)
    model.free(b)
    model.release()
    assert model.driver.used == 4 * MIB
    assert model.malloc(4 * MIB) != a
    assert model.malloc(4 * MIB, 0, "0.7") == a


operations = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), st.integers(1, 16)),
        st.tuples(st.just("alloc"), st.sampled_from([1, 2, 3, 5, 8])),
        st.tuples(st.just("free"), st.integers(0, 60)),
        st.tuples(st.just("free"), st.integers(0, 60)),
        st.tuples(st.just("empty_cache"), st.just(0)),
    ),
    max_size=80,
)


@pytest.mark.parametrize(
    ("limit", "least", "most"), [(None, 1, None), (40, 1, None), (60, 1, 30), (None, 3, 20), (50, 2, 40)]
)
@given(operations)
@hypothesis_settings(max_examples=80, deadline=None)
def test_the_same_calls_as_the_naive_reading(
    limit: int | None, least: int, most: int | None, given: list[tuple[str, int]]
) -> None:
    bytes_of = [None if n is None else n * CHUNK for n in (limit, most)]
    stitch = bytes_of[1] if most is not None else None if limit is None else 8 * limit * CHUNK
    naive = Naive(Driver(bytes_of[0]), least * CHUNK, stitch)
    model = stitching(bytes_of[0], stitch_min_bytes=least * CHUNK, stitch_limit_bytes=bytes_of[1])
    live: list[int] = []
    for what, n in given:
        if what == "alloc":
            found = model.malloc(n * CHUNK)
            assert found == naive.malloc(n * CHUNK)
            if found is not None:
                live.append(found)
        elif what == "free" and live:
            address = live.pop(n % len(live))
            model.free(address)
            naive.free(address)
        elif what == "empty_cache":
            model.release()
            naive.release()
        assert model.driver.calls == naive.driver.calls
        assert model.driver.used == naive.driver.used


sizes = st.one_of(st.integers(0, 4096), st.integers(0, 3 * MIB), st.integers(MIB, 48 * MIB))
mixed = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), sizes, st.integers(0, 1), st.sampled_from(["0.0", "0.0", "0.1"])),
        st.tuples(st.just("free"), st.integers(0, 100)),
        st.tuples(st.just("empty_cache")),
    ),
    max_size=60,
)


@pytest.mark.parametrize(("limit", "chunk"), [(None, 2), (120, 2), (200, 6)])
@given(mixed)
@hypothesis_settings(max_examples=60, deadline=None)
def test_nothing_is_lost_and_nobody_shares_a_chunk(limit: int | None, chunk: int, given: list[tuple[Any, ...]]) -> None:
    model = stitching(None if limit is None else limit * MIB, chunk_bytes=chunk * MIB)
    held: dict[int, int] = {}
    for _ in operated(model, given, held):
        owners = Counter(
            (piece.mapping.address, chunk_number)
            for block, _ in model._held.values()
            for piece in ([block] if isinstance(block, Piece) else model._over(block))
            for chunk_number in range(piece.start, piece.start + piece.n)
        )
        assert not owners or max(owners.values()) == 1
    for address in held:
        model.free(address)
    assert model.active == 0
    model.release()
    assert model.driver.used == sum(s.size for s in model.segments() if s.pool != "0.0")
    conserved(model, {})


@pytest.mark.parametrize(
    "given",
    [
        {"chunk_bytes": 3 * MIB},
        {"chunk_bytes": 0},
        {"chunk_bytes": "x"},
        {"stitch_min_bytes": -1},
        {"stitch_limit_bytes": -5},
        {"max_split_size_mb": 100},
        {"fragmentation_limit_mb": 100},
    ],
)
def test_settings_that_are_none(given: dict[str, Any]) -> None:
    with pytest.raises(GpubloatError):
        choose("stitching", given)


def test_freeing_twice_is_an_error() -> None:
    model = stitching()
    (a,) = alloc(model, 4)
    model.free(a)
    with pytest.raises(KeyError):
        model.free(a)
