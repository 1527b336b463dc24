"""The compiled stitching allocator on a fake driver, whose chunks are real memory that can be mapped twice."""

from __future__ import annotations

import ctypes
import os
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gpubloat.native import stitching as native
from tests.native import stitched
from tests.native.stitched import ACCESS, CHUNK, CREATE, MAP, MIB, OUT_OF_MEMORY, RELEASE, RESERVE, UNMAP, Fake

Make = Callable[..., Fake]
OTHER_ERROR = 719


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda **settings: stitched.fresh(tmp_path, monkeypatch, **settings)


def states(fake: Fake) -> list[int]:
    return list(fake.report().states)


def calls(fake: Fake, before: list[int]) -> dict[int, int]:
    return {kind: now - then for kind, (then, now) in enumerate(zip(before, fake.calls())) if now != then}


def held(fake: Fake, *chunks: int) -> list[int]:
    """Blocks in mappings of their own, each held."""
    found = [fake.alloc(n * CHUNK) for n in chunks]
    assert all(found)
    return found


def test_new_memory_takes_one_access_call(make: Make) -> None:
    fake = make()
    (block,) = held(fake, 8)
    assert calls(fake, [0] * 7) == {RESERVE: 1, CREATE: 8, MAP: 8, ACCESS: 1}
    assert states(fake) == [0, 0, 0, 1, 0]
    before = fake.calls()
    fake.free(block)
    assert fake.alloc(8 * CHUNK) == block  # S1
    fake.free(block)
    assert fake.calls() == before
    fake.close()


def test_a_split_costs_nothing_and_the_whole_stays_reachable(make: Make) -> None:
    fake = make()
    (whole,) = held(fake, 8)
    fake.free(whole)
    before = fake.calls()
    low, high = fake.alloc(3 * CHUNK), fake.alloc(5 * CHUNK)
    assert (low, high) == (whole, whole + 3 * CHUNK)
    assert states(fake) == [1, 1, 0, 1, 0]
    fake.free(low)
    assert fake.alloc(8 * CHUNK, stream=1) != whole  # half of it is held, and the other stream has none of it
    fake.free(high)
    assert fake.alloc(8 * CHUNK) == whole
    assert calls(fake, before) == {RESERVE: 1, CREATE: 8, MAP: 8, ACCESS: 1}  # the other stream's


def test_free_blocks_are_stitched_largest_first(make: Make) -> None:
    fake = make()
    blocks = held(fake, 3, 5, 4)
    for block, mark in zip(blocks, b"abc"):
        n = {0: 3, 1: 5, 2: 4}[blocks.index(block)] * CHUNK
        ctypes.memset(block, mark, n)
        fake.free(block)
    before = fake.calls()
    wide = fake.alloc(10 * CHUNK)
    assert calls(fake, before) == {RESERVE: 1, MAP: 10, ACCESS: 1}
    assert states(fake) == [0, 0, 1, 3, 0]
    # The content tells which chunks lie where: 5 of b, 4 of c, and the first of a's three.
    marks = "".join(chr(ctypes.string_at(wide + i * CHUNK + 12345, 1)[0]) for i in range(10))
    assert marks == "bbbbbcccca"
    ctypes.memset(wide, ord("x"), 10 * CHUNK)
    assert ctypes.string_at(blocks[1] + 5 * CHUNK - 1, 1) == b"x"
    rest = fake.alloc(2 * CHUNK)  # what is left of a
    assert rest == blocks[0] + CHUNK
    assert ctypes.string_at(rest, 1) == b"a"
    before = fake.calls()
    fake.free(wide)
    assert fake.alloc(10 * CHUNK) == wide
    assert fake.calls() == before
    fake.free(wide)
    fake.free(rest)
    fake.close()


def test_only_what_is_missing_is_created(make: Make) -> None:
    fake = make()
    for block in held(fake, 3, 5):
        fake.free(block)
    before = fake.calls()
    wide = fake.alloc(10 * CHUNK)
    assert calls(fake, before) == {RESERVE: 2, CREATE: 2, MAP: 2 + 10, ACCESS: 2}
    assert states(fake) == [0, 0, 0, 3, 0]
    assert fake.now("reserved_bytes") == 10 * CHUNK
    fake.free(wide)
    fake.close()


def test_small_free_blocks_are_left_out_where_the_user_wants_it(make: Make) -> None:
    fake = make(least=4 * CHUNK)
    for block in held(fake, 3, 5):
        fake.free(block)
    before = fake.calls()
    fake.alloc(8 * CHUNK)
    assert calls(fake, before)[CREATE] == 3  # the block of 3 is below the limit


def test_without_memory_cached_blocks_go_and_then_it_says_so(make: Make) -> None:
    fake = make(memory=16 * CHUNK)
    a, b = held(fake, 6, 6)
    c = fake.alloc(4 * CHUNK, stream=1)
    fake.free(a)
    fake.free(c, stream=1)
    d = fake.alloc(8 * CHUNK, stream=2)  # neither's own stream has it free
    assert d
    assert states(fake)[4] == 1
    assert fake.now("reserved_bytes") == 14 * CHUNK
    assert fake.alloc(8 * CHUNK) == 0
    assert fake.report().n_oom == 1
    message = native.error(fake.lib)
    words = r"Tried to allocate 16\.00 MiB\. GPU 0 has a total capacity of 32\.00 MiB of which 4\.00 MiB is free\."
    assert re.search(words, message)
    assert "28.00 MiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated" in message
    assert fake.alloc(2 * CHUNK)
    assert fake.alloc(1 << 62) == 0
    assert fake.alloc(512) == 0
    fake.free(b)
    assert fake.alloc(512)


def test_a_free_part_of_a_mapping_goes_and_what_is_held_stays(make: Make) -> None:
    fake = make()
    (whole,) = held(fake, 9)
    fake.free(whole)
    low, middle, high = held(fake, 3, 3, 3)
    ctypes.memset(middle, 7, 3 * CHUNK)
    fake.free(low)
    fake.free(high)
    wide = fake.alloc(6 * CHUNK)
    assert states(fake)[2] == 1
    fake.free(wide)
    before = fake.calls()
    fake.empty()
    # The stitched range, and one call for each side; addresses of the stitched range only.
    assert calls(fake, before) == {UNMAP: 3, RELEASE: 6, 6: 1}
    assert fake.now("reserved_bytes") == 3 * CHUNK
    assert ctypes.string_at(middle, 3 * CHUNK) == b"\7" * (3 * CHUNK)
    fake.free(middle)
    fake.close()


@pytest.mark.parametrize("seed", range(8))
def test_what_repeats_converges(make: Make, seed: int) -> None:
    """The same requests over and over, in the same order: no driver call after at most six rounds."""
    fake = make(memory=2048 * MIB, backed=False)
    random_ = random.Random(seed)
    script: list[tuple[int, int]] = []
    live: list[int] = []
    for i in range(200):
        script.append((i, random_.choice([700, 30_000, MIB, 3 * MIB, random_.randrange(2 * MIB, 60 * MIB)])))
        live.append(i)
        while len(live) > 12 or (live and random_.random() < 0.5):
            script.append((live.pop(random_.randrange(len(live))), 0))
    script += [(i, 0) for i in live]
    history = []
    for _ in range(10):
        held_: dict[int, int] = {}
        for name, size in script:
            if size:
                held_[name] = fake.alloc(size)
            else:
                fake.free(held_.pop(name))
        history.append(sum(fake.calls()))
    assert history[5] == history[-1]
    fake.close()


def test_beyond_the_limit_the_least_recently_used_range_goes(make: Make) -> None:
    fake = make(limit=20 * CHUNK)
    a, b, c, d, e, f = held(fake, 2, 3, 2, 4, 8, 7)
    for block in (a, b):
        fake.free(block)
    first = fake.alloc(5 * CHUNK)
    for block in (c, d):
        fake.free(block)
    second = fake.alloc(6 * CHUNK)
    assert states(fake) == [0, 0, 2, 6, 0]
    fake.free(first)
    fake.cuda.fake_work(0, second, 6 * CHUNK)  # that must be waited for
    fake.free(second)
    assert fake.alloc(5 * CHUNK) == first
    fake.free(first)
    for block in (e, f):
        fake.free(block)
    third = fake.alloc(15 * CHUNK)
    assert fake.report().stitched_bytes == 20 * CHUNK
    assert fake.report().n_stitched == 2
    before = fake.calls()
    assert fake.alloc(5 * CHUNK) == first
    fake.free(first)
    assert fake.calls() == before
    again = fake.alloc(6 * CHUNK)
    assert calls(fake, before)[MAP] == 6
    for block in (third, again):
        fake.free(block)
    fake.close()


def scenario(fake: Fake) -> list[tuple[int, int]]:
    """Reaches every step; (address, stream) of what is held at the end. Allocations that fail are passed over."""
    live: list[tuple[int, int]] = []
    for stream in (0, 1):
        blocks = [fake.alloc(n * CHUNK, stream) for n in (3, 5, 2)] + [fake.alloc(5000, stream)]
        for block in blocks[:2]:
            fake.free(block, stream)
        live += [(b, stream) for b in blocks[2:] if b]
        for n in (7, 4, 9):
            block = fake.alloc(n * CHUNK, stream)
            if block and n == 4:
                fake.free(block, stream)
            elif block:
                live.append((block, stream))
    fake.empty()
    live += [(b, 0) for b in [fake.alloc(20 * CHUNK), fake.alloc(MIB)] if b]
    return live


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, OTHER_ERROR])
@pytest.mark.parametrize("kind", [RESERVE, CREATE, MAP, ACCESS])
def test_every_failure_of_the_driver_leaves_nothing_behind(make: Make, kind: int, error: int) -> None:
    whole = make(memory=64 * CHUNK)
    scenario(whole)
    n_calls = whole.calls()[kind]
    assert n_calls > 8
    step = max(n_calls // 12, 1)
    for nth in range(1, n_calls + 1, step):
        fake = make(memory=64 * CHUNK)
        fake.cuda.fake_fail(kind, nth, error)
        live = scenario(fake)
        assert fake.now("active") == len(live)
        chunks = fake.now("reserved_bytes") // CHUNK
        assert fake.cuda.fake_used(0) == chunks * CHUNK
        for address, stream in live:
            fake.free(address, stream)
        fake.close()
        assert fake.report().n_failed_calls >= 1
        if error == OTHER_ERROR:
            assert fake.report().n_oom == 0


@pytest.mark.parametrize("kind", [UNMAP, RELEASE, 6])
def test_what_the_driver_does_not_take_back_is_kept_or_counted(make: Make, kind: int) -> None:
    whole = make(memory=64 * CHUNK)
    scenario(whole)
    for nth in range(1, whole.calls()[kind] + 1):
        fake = make(memory=64 * CHUNK)
        fake.cuda.fake_fail(kind, nth, OTHER_ERROR)
        for address, stream in scenario(fake):
            fake.free(address, stream)
        fake.empty()
        assert fake.now("active_bytes") == 0
        assert fake.now("reserved_bytes") == 0
        # A handle or a range of addresses that a call failed to give back is lost, and nothing else.
        assert (fake.cuda.fake_left() > 0) == (fake.report().n_leaks > 0) == (kind != UNMAP)
        assert fake.misuse() == ""


def test_memory_that_another_stream_reads_waits_for_it(make: Make) -> None:
    fake = make()
    (block,) = held(fake, 4)
    work = fake.cuda.fake_work(7, block, 4 * CHUNK)
    fake.lib.gpubloat_record_stream(block, 7)
    fake.lib.gpubloat_record_stream(block, 0)  # its own: nothing to wait for
    fake.free(block)
    assert fake.now("allocated_bytes") == 0
    assert fake.now("active_bytes") == 4 * CHUNK
    second = fake.alloc(4 * CHUNK)
    assert second != block
    fake.free(block)  # a second time: not the allocator's to give again
    assert fake.report().n_check_failures == 1
    fake.cuda.fake_complete(7, work)
    assert fake.alloc(4 * CHUNK) == block


def test_memory_that_runs_out_waits_for_other_streams(make: Make) -> None:
    fake = make(memory=8 * CHUNK)
    (block,) = held(fake, 6)
    fake.cuda.fake_work(7, block, 6 * CHUNK)
    fake.lib.gpubloat_record_stream(block, 7)
    fake.free(block)
    wide = fake.alloc(8 * CHUNK)
    assert wide
    fake.free(wide)
    fake.close()


def test_nothing_is_taken_away_from_under_a_kernel(make: Make) -> None:
    """Frees on the own stream need no event; before memory goes, the stream is waited for."""
    fake = make(memory=16 * CHUNK)
    blocks = held(fake, 3, 5)
    for block in blocks:
        fake.free(block)
    wide = fake.alloc(8 * CHUNK)
    fake.cuda.fake_work(0, wide, 8 * CHUNK)
    fake.free(wide)
    small = fake.alloc(512)
    fake.cuda.fake_work(0, small, 512)
    fake.free(small)
    assert fake.cuda.fake_count(stitched.RECORD) == fake.cuda.fake_count(stitched.WAIT) == 0
    other = fake.alloc(16 * CHUNK, stream=1)
    assert fake.cuda.fake_count(stitched.WAIT) == 1
    fake.free(other, 1)
    fake.close()


def test_pools_of_graphs_are_kept_apart_until_they_are_released(make: Make) -> None:
    fake = make(memory=16 * CHUNK)
    (outside,) = held(fake, 4)
    fake.free(outside)
    fake.lib.begin_pool(0, 5, 1, 3)
    assert fake.alloc(4 * CHUNK, stream=0) == outside  # the other stream is not in the pool
    fake.free(outside)
    inside = fake.alloc(4 * CHUNK, stream=3)
    other = fake.alloc(4 * CHUNK, stream=3)
    fake.free(inside, 3)
    fake.lib.end_pool(0, 5, 1)
    assert fake.alloc(4 * CHUNK, stream=3) not in (inside, other, 0)
    fake.empty()  # a replay of the graph still writes to its memory
    assert fake.now("reserved_bytes") == 12 * CHUNK
    fake.lib.begin_pool(0, 5, 1, 3)
    assert fake.alloc(4 * CHUNK, stream=3) == inside
    fake.lib.end_pool(0, 5, 1)
    fake.free(inside, 3)
    fake.free(other, 3)
    fake.lib.release_pool(0, 5, 1)
    fake.empty()
    assert fake.now("reserved_bytes") == 12 * CHUNK
    fake.lib.release_pool(0, 5, 1)
    fake.cuda.fake_work(9, inside, 4 * CHUNK)  # the graph, replayed on a stream that the allocator has not seen
    fake.empty()
    assert fake.now("reserved_bytes") == 4 * CHUNK
    assert fake.misuse() == ""


def test_a_capture_sees_no_forbidden_call(make: Make) -> None:
    fake = make(memory=16 * CHUNK)
    shared, plain = held(fake, 4, 4)
    fake.lib.begin_pool(0, 5, 1, 3)
    fake.cuda.fake_capture(3, 1)
    fake.lib.gpubloat_record_stream(shared, 3)
    fake.free(shared)
    inside = fake.alloc(4 * CHUNK, stream=3)
    fake.lib.gpubloat_record_stream(inside, 4)
    fake.free(inside, 3)
    fake.free(plain)
    fake.empty()
    assert fake.alloc(12 * CHUNK, stream=3) == 0
    assert fake.misuse() == ""
    assert fake.report().n_waiting == 2
    fake.cuda.fake_capture(3, 0)
    fake.lib.end_pool(0, 5, 1)
    fake.lib.release_pool(0, 5, 1)
    fake.empty()
    assert fake.report().n_waiting == 0
    fake.close()


def test_streams_outside_of_a_capture_go_on(make: Make) -> None:
    fake = make(memory=16 * CHUNK)
    before, during = held(fake, 5, 6)
    fake.lib.gpubloat_record_stream(before, 7)
    fake.lib.gpubloat_record_stream(during, 7)
    work = fake.cuda.fake_work(7, before, CHUNK)
    fake.free(before)
    fake.cuda.fake_work(7, during, CHUNK)
    fake.lib.begin_pool(0, 5, 1, 3)
    fake.cuda.fake_capture(3, 1)
    fake.free(during)
    fake.cuda.fake_complete(7, work)
    assert fake.alloc(5 * CHUNK) == before
    assert fake.alloc(6 * CHUNK, stream=3)  # waits for the other stream, and takes what it used
    assert fake.report().n_waiting == 0
    assert fake.misuse() == ""


def test_events_of_a_stream_are_not_asked_while_it_is_captured(make: Make) -> None:
    fake = make()
    (block,) = held(fake, 4)
    work = fake.cuda.fake_work(3, block, CHUNK)
    fake.lib.gpubloat_record_stream(block, 3)
    fake.free(block)
    fake.lib.begin_pool(0, 5, 1, 3)
    fake.cuda.fake_capture(3, 1)
    fake.cuda.fake_complete(3, work)
    assert fake.alloc(4 * CHUNK) != block
    fake.cuda.fake_capture(3, 0)
    fake.lib.end_pool(0, 5, 1)
    assert fake.alloc(4 * CHUNK) == block
    assert fake.misuse() == ""


def test_a_capture_that_was_not_announced_puts_frees_off(make: Make) -> None:
    fake = make()
    (block,) = held(fake, 4)
    fake.cuda.fake_capture(3, 1)
    fake.lib.gpubloat_record_stream(block, 3)
    fake.free(block)
    assert fake.alloc(4 * CHUNK) != block
    fake.cuda.fake_capture(3, 0)
    assert fake.alloc(4 * CHUNK) == block
    assert fake.misuse() == ""


def test_gpus_of_one_process_reach_each_other(make: Make) -> None:
    fake = make()
    fake.cuda.fake_peers(1)
    (first,) = held(fake, 2)
    small = fake.alloc(512)
    assert fake.cuda.fake_access(first) == 1
    second = fake.alloc(2 * CHUNK, device=1)
    assert [fake.cuda.fake_access(address) for address in (first, small & -CHUNK, second)] == [3, 3, 3]
    assert fake.cuda.fake_used(1) == 2 * CHUNK
    assert fake.now("reserved_bytes", device=1) == 2 * CHUNK
    fake.free(second, device=1)
    fake.free(first)
    fake.free(small)
    fake.close()


def test_a_share_of_the_memory_can_be_set(make: Make) -> None:
    fake = make(memory=16 * CHUNK)
    fake.lib.gpubloat_memory_fraction(0.5, 0)
    assert fake.alloc(9 * CHUNK) == 0
    assert "16.00 MiB allowed" in native.error(fake.lib)
    assert fake.alloc(8 * CHUNK)


def test_the_block_around_a_pointer(make: Make) -> None:
    fake = make()
    (block,) = held(fake, 2)
    size = ctypes.c_size_t()
    assert fake.lib.gpubloat_base_alloc(block + 12345, ctypes.byref(size)) == block
    assert size.value == 2 * CHUNK


def test_sizes_and_statistics_are_in_multiples_of_512(make: Make) -> None:
    fake = make()
    assert fake.alloc(0) == 0
    a, b = fake.alloc(2 * MIB + 1), fake.alloc(1)
    assert fake.now("requested_bytes") == 2 * MIB + 2
    assert fake.now("active_bytes") == 2 * MIB + 512 + 512
    assert fake.now("reserved_bytes") == 3 * CHUNK
    for address in (a, b):
        fake.free(address)
    assert fake.alloc(1 << 40, device=64) == 0
    assert native.error(fake.lib) == "no device 64"
    fake.close()


def test_a_forked_process_gets_no_memory_and_does_not_hang(make: Make) -> None:
    fake = make()
    (block,) = held(fake, 2)
    stop = threading.Event()
    worker = threading.Thread(target=lambda: [fake.free(fake.alloc(512)) for _ in iter(stop.is_set, True)])
    worker.start()
    child = os.fork()
    if not child:
        fake.free(block)
        os._exit(0 if fake.alloc(512) == 0 and "forked" in native.error(fake.lib) else 1)
    stop.set()
    worker.join()
    assert os.waitpid(child, 0)[1] == 0
    assert fake.now("active") == 1


def test_without_a_driver_there_is_a_reason(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = make()
    monkeypatch.setenv("GPUBLOAT_LIBCUDA", "/nowhere/libcuda.so.1")
    assert fake.alloc(512) == 0
    assert native.error(fake.lib).endswith("libcuda.so.1 cannot be loaded")


def test_settings_cannot_change_once_memory_was_given(make: Make) -> None:
    fake = make()
    config = native.Config(ctypes.sizeof(native.Config), 0, CHUNK, 0, 0, 0)
    assert fake.lib.gpubloat_configure(ctypes.byref(native.Config(1, 0, CHUNK, 0, 0, 0))) == 2
    held(fake, 1)
    assert fake.lib.gpubloat_configure(ctypes.byref(config)) == 1


@pytest.mark.parametrize(
    ("operations", "threads", "devices", "memory", "share"),
    [(800_000, 3, 1, 512, 40), (150_000, 4, 2, 512, 60), (50_000, 2, 1, 128, 90)],
)
def test_a_million_random_operations_on_poisoned_memory(
    make: Make, operations: int, threads: int, devices: int, memory: int, share: int
) -> None:
    """Blocks carry a pattern of their own from allocation to free, or until the last stream has read them."""
    fake = make(memory=memory * MIB, limit=4 * memory * MIB, reuse=True)
    out = (ctypes.c_int64 * 4)()
    most = memory * MIB * devices * share // 100 // threads
    fake.lib.stress(operations // threads, threads, devices, 7, most, out)
    n_alloc, n_none, n_damaged, n_late = out
    assert (n_damaged, n_late) == (0, 0)
    assert n_alloc > operations * 0.45
    assert n_none < n_alloc * 0.1
    total = [sum(values) for values in zip(*(fake.report(device).states for device in range(devices)))]
    assert all(total)
    assert sum(fake.report(device).n_oom for device in range(devices)) == n_none
    for stream in range(20):
        fake.cuda.fake_complete(stream, 1 << 60)
    fake.close()
