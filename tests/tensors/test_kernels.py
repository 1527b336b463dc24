"""The CUDA kernels without a GPU: their results on an emulated warp, at the edge of memory, and what NVRTC says."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpubloat.errors import MissingToolError
from gpubloat.native import build
from gpubloat.tensors.gpu import kernels
from tests import oracles
from tests.tensors import emulator, layout
from tests.tensors.emulator import DECODERS, call, guarded

WIDTHS = (8, 16, 32, 64)


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    try:
        build.compiler(cpp=True)
    except MissingToolError as error:
        pytest.skip(str(error))
    return emulator.library(tmp_path_factory.mktemp("kernels"))


def decoded(
    lib: ctypes.CDLL, how: tuple[int, int, int, bool], book: layout.Book, words: np.ndarray, row_words: np.ndarray,
    *, slots: bool = False, indices: Any = None, places: Any = None, tile: int = 3, base: int = 0, grid: int = 2,
    errors: int = 0, threads: int = 64,
) -> np.ndarray:  # fmt: skip
    """The rows that a decoder makes, every buffer at the edge of memory. `words` begins with word number `base`."""
    width, _, stages, in_shared = how
    n_rows, row_bytes = len(row_words), book.mask.nbytes
    chosen = None if indices is None else guarded(np.asarray(indices, np.int64))
    n = n_rows if chosen is None else len(chosen)
    out = guarded(np.full((n, row_bytes), 0xEE, np.uint8))
    tables = guarded(book.device())
    offsets = None if slots else guarded(np.cumsum(np.append(0, row_words), dtype=np.uint64)[:-1] + np.uint64(base))
    error = guarded(np.zeros(1, np.uint32))
    padded = tables.size // 4
    shared = tables.nbytes * in_shared + threads // 32 * kernels.warp_bytes(stages)
    done = call(
        lib, "emulate_unpack", *how, grid, threads, shared, words, words.size, base, guarded(row_words), offsets,
        layout.stride_words(row_bytes), n_rows, chosen, None if places is None else guarded(places), n, n, tile, tables,
        padded, book.n_flags, out, row_bytes, error,
    )  # fmt: skip
    assert done == 0
    assert error[0] == errors
    return out.view(f"<u{width // 8}")


@pytest.fixture(params=[False, True], ids=["copies when awaited", "copies at once"])
def eager(request: pytest.FixtureRequest, lib: ctypes.CDLL) -> Any:
    lib.emulate_eager(request.param)
    yield
    lib.emulate_eager(False)


@pytest.mark.parametrize("slots", [False, True], ids=["condensed", "slots"])
@pytest.mark.parametrize("how", DECODERS, ids=lambda how: "-".join(map(str, map(int, how))))
@pytest.mark.usefixtures("eager")
def test_rows_come_back(lib: ctypes.CDLL, how: tuple[int, int, int, bool], slots: bool) -> None:
    for seed, (n, m) in enumerate([(1, 1), (5, 3), (40, 7), (9, 64), (7, 131), (3, 1000), (70, 16), (4, 400)]):
        rows, book = layout.example(np.random.default_rng(seed), n, m, how[0])
        words, row_words = layout.pack(rows, book, slots)
        between = guarded(np.concatenate([words[:3], words]), at_begin=True)[-len(words) :]  # no multiple of 16 bytes
        for source in (guarded(words), guarded(words, at_begin=True), between):
            found = decoded(lib, how, book, source, row_words, slots=slots)
            np.testing.assert_array_equal(found, rows)


@pytest.mark.parametrize("how", DECODERS, ids=lambda how: "-".join(map(str, map(int, how))))
@pytest.mark.usefixtures("eager")
def test_long_rows_and_many_flags(lib: ctypes.CDLL, how: tuple[int, int, int, bool]) -> None:
    for m, flagged in ((5000, 1.0), (2100, 0.5), (1024, 1.0), (1025, 1.0), (1057, 1.0), (3000, 0.0)):
        rows, book = layout.example(np.random.default_rng(m), 5, m, how[0], flagged)
        words, row_words = layout.pack(rows, book)
        assert (row_words < -(-rows.nbytes // 5 // 4)).any()
        np.testing.assert_array_equal(decoded(lib, how, book, guarded(words), row_words, threads=96), rows)


@pytest.mark.usefixtures("eager")
def test_rows_by_index_with_repeats_and_places(lib: ctypes.CDLL) -> None:
    rng = np.random.default_rng(5)
    rows, book = layout.example(rng, 50, 33, 16)
    words, row_words = layout.pack(rows, book)
    indices = rng.integers(0, 50, 200)
    for how in DECODERS[3:6]:
        found = decoded(lib, how, book, guarded(words), row_words, indices=indices)
        np.testing.assert_array_equal(found, rows[indices])
        order = np.argsort(indices)
        found = decoded(lib, how, book, guarded(words), row_words, indices=indices[order], places=order, tile=32)
        np.testing.assert_array_equal(found, rows[indices])
        assert decoded(lib, how, book, guarded(words), row_words, indices=[]).shape == (0, 33)


def test_words_are_copied_by_whole_units(lib: ctypes.CDLL) -> None:
    """Over a link, each copy of a part is a request of its own."""
    rows, book = layout.example(np.random.default_rng(11), 60, 90, 16)
    words, row_words = layout.pack(rows, book)
    assert (np.cumsum(row_words) % 4).any()
    source = guarded(np.append(words, np.zeros(-len(words) % 4, np.uint32)), at_begin=True)
    before = lib.emulate_small_copies()
    np.testing.assert_array_equal(decoded(lib, (16, 2, 4, True), book, source, row_words), rows)
    assert lib.emulate_small_copies() == before
    decoded(lib, (16, 2, 4, True), book, guarded(words, at_begin=True), row_words)
    assert lib.emulate_small_copies() - before == len(words) % 4  # of the last unit


def test_part_of_the_rows_from_a_staging_buffer(lib: ctypes.CDLL) -> None:
    rows, book = layout.example(np.random.default_rng(6), 30, 40, 32)
    words, row_words = layout.pack(rows, book)
    first = int(row_words[:10].sum())
    part = words[first : first + int(row_words[10:20].sum())]
    found = decoded(lib, (32, 2, 4, True), book, guarded(part), row_words[10:20], base=first)
    np.testing.assert_array_equal(found, rows[10:20])


def test_every_pattern_of_16_bits(lib: ctypes.CDLL) -> None:
    rng = np.random.default_rng(7)
    rows = rng.permutation(np.arange(1 << 16, dtype="<u2")).reshape(-1, 256)
    book = layout.example(rng, 1, 256, 16)[1]
    book.value &= book.mask
    book.always[:] = 0
    words, row_words = layout.pack(rows, book)
    np.testing.assert_array_equal(decoded(lib, (16, 2, 4, True), book, guarded(words), row_words), rows)


@pytest.mark.parametrize("how", DECODERS, ids=lambda how: "-".join(map(str, map(int, how))))
def test_extremes_of_the_codebook(lib: ctypes.CDLL, how: tuple[int, int, int, bool]) -> None:
    dtype, ones = f"<u{how[0] // 8}", (1 << how[0]) - 1
    rng = np.random.default_rng(8)
    value = rng.integers(0, ones, 77, np.uint64, endpoint=True).astype(dtype)
    none, all_ = np.zeros(77, dtype), np.full(77, ones, dtype)
    rows = np.tile(value, (40, 1))
    rows[::3] = rng.integers(0, ones, 77, np.uint64, endpoint=True).astype(dtype)
    for always, mask in ((all_, none), (none, all_), (none, none)):
        book = layout.Book(how[0], always, mask, value & (always | mask))
        words, row_words = layout.pack(rows, book)
        np.testing.assert_array_equal(decoded(lib, how, book, guarded(words), row_words, tile=32), rows)


def test_wrong_indices_and_rows_are_reported_and_touch_nothing(lib: ctypes.CDLL) -> None:
    rows, book = layout.example(np.random.default_rng(9), 8, 50, 16)
    words, row_words = layout.pack(rows, book)
    how = (16, 2, 4, True)
    found = decoded(lib, how, book, guarded(words), row_words, indices=[1, 8, -1, 1 << 62, 2], errors=1)
    np.testing.assert_array_equal(found[[0, 4]], rows[[1, 2]])
    assert (found[1:4] == 0xEEEE).all()
    decoded(lib, how, book, guarded(words[:-1]), row_words, errors=2)
    decoded(lib, how, book, guarded(words), np.append(row_words[:-1], np.uint32(1 << 31)), errors=2)


@pytest.mark.parametrize("how", DECODERS, ids=lambda how: "-".join(map(str, map(int, how))))
def test_words_that_no_packer_wrote_stay_inside_their_rows(lib: ctypes.CDLL, how: tuple[int, int, int, bool]) -> None:
    for m in (50, 3000):
        rng = np.random.default_rng(m)
        book = layout.example(rng, 1, m, how[0])[1]
        row_words = rng.integers(0, book.mask.nbytes // 4 + 1, 20).astype(np.uint32)
        words = rng.integers(0, 1 << 32, int(row_words.sum()), np.uint32)
        decoded(lib, how, book, guarded(words), row_words)


@pytest.mark.parametrize("slots", [False, True], ids=["condensed", "slots"])
@pytest.mark.parametrize("width", WIDTHS)
def test_packing_gives_the_words_of_the_reference(lib: ctypes.CDLL, width: int, slots: bool) -> None:
    for seed, (n, m) in enumerate([(1, 1), (5, 3), (9, 64), (7, 131), (3, 1000), (70, 16), (2, 2500)]):
        rows, book = layout.example(np.random.default_rng(seed), n, m, width)
        words, row_words = layout.pack(rows, book, slots)
        tables, plain, found = guarded(book.device()), guarded(rows), guarded(np.full(n, 77, np.uint32))
        shape = (n, book.mask.nbytes, tables, tables.size // 4)
        call(lib, "emulate_sizes", width, 2, 64, plain, *shape, book.n_flags, found)
        np.testing.assert_array_equal(found, row_words)
        offsets = None if slots else guarded(np.cumsum(np.append(0, row_words), dtype=np.uint64)[:-1])
        packed = guarded(np.full(words.size, 0x55555555, np.uint32))
        call(lib, "emulate_pack", width, 2, 64, plain, *shape, found, offsets, layout.stride_words(shape[1]), packed)
        np.testing.assert_array_equal(packed, words)


def test_counts(lib: ctypes.CDLL) -> None:
    threads = kernels.COUNT_COLUMNS
    shared = 4 * kernels.COUNT_PLANES * threads
    # Bytes of a row, rows, rows of a line, lines of a block: rows of part of a word, of less than a block, of several;
    # less than one line; lines that are no multiple of a batch; the most that planes hold.
    for row_bytes, n, joined, slab in (
        (1, 3, 4, 16), (1, 5003, 64, 16), (3, 401, 4, 20), (4, 65_535, 1, 65_535), (6, 70, 2, 33), (7, 30, 400, 16),
        (52, 2000, 40, 16), (1024, 33, 1, 16), (1500, 40, 1, 17), (2866, 20, 2, 16),
    ):  # fmt: skip
        rows = np.random.default_rng(n).integers(0, 256, (n, row_bytes), np.uint8)
        rows[n // 2 :] |= 1
        bits = np.unpackbits(rows, axis=1, bitorder="little").sum(0, dtype=np.uint64)
        columns = row_bytes * joined // 4
        lines = -(-(rows.size // 4) // columns)
        grid = (-(-columns // threads), max(1, -(-lines // slab)))
        for skipped in (0, 1, 3):  # the matrix begins inside of a word
            source = guarded(np.concatenate([np.zeros(skipped, np.uint8), rows.reshape(-1)]), at_begin=True)[skipped:]
            for given in (source, guarded(rows)):
                counts = guarded(np.zeros(8 * row_bytes, np.uint64))
                call(lib, "emulate_count", *grid, threads, shared, given, rows.size, columns, 8 * row_bytes, slab,
                     counts)  # fmt: skip
                np.testing.assert_array_equal(counts, bits)


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16])
def test_plain_rows_by_index(lib: ctypes.CDLL, unit: int) -> None:
    rng = np.random.default_rng(unit)
    for units in (1, 7, 100, 600):
        rows = guarded(rng.integers(0, 256, (20, units * unit), np.uint8))
        indices = guarded(rng.integers(0, 20, 30))
        out, error = guarded(np.zeros((30, units * unit), np.uint8)), guarded(np.zeros(1, np.uint32))
        call(lib, "emulate_read", unit, 2, 64, rows, 20, indices, 30, units * unit, out, error)
        np.testing.assert_array_equal(out, rows[indices])
        assert error[0] == 0


def test_packed_rows_move_into_slots(lib: ctypes.CDLL) -> None:
    rows, book = layout.example(np.random.default_rng(4), 20, 50, 16)
    words, row_words = layout.pack(rows, book)
    offsets = np.cumsum(np.append(0, row_words), dtype=np.uint64)[:-1]
    longest = int(row_words[7])
    row_words[3] = longest + 1
    assert row_words[19] <= longest
    slots, lengths, error = (guarded(np.zeros(n, np.uint32)) for n in (10 * longest, 10, 1))
    indices, places = guarded(np.array([7, 3, 19, 0])), guarded(np.array([9, 0, 4, 10]))
    args = (words.size, guarded(row_words), guarded(offsets), 0, 20, indices, places, 4, longest, 10)
    call(lib, "emulate_move", 1, 64, guarded(words), *args, slots, lengths, error)
    assert error[0] == 1  # there is no slot 10
    for row, slot in ((7, 9), (3, 0), (19, 4)):
        at, n = int(offsets[row]), int(row_words[row])
        fits = n <= longest
        assert lengths[slot] == (n if fits else 0)
        np.testing.assert_array_equal(slots[slot * longest :][: n * fits], words[at : at + n * fits])


def test_reference_of_the_package_agrees() -> None:
    from gpubloat.tensors import codebook, packing

    rows, _ = layout.example(np.random.default_rng(3), 60, 41, 16)
    fitted = codebook.fit(rows, 16)
    book = layout.Book(16, fitted.always, fitted.mask, fitted.value)
    for slots in (False, True):
        packed = packing.pack(rows, fitted, layout="slots" if slots else "condensed")
        words, row_words = layout.pack(rows, book, slots)
        np.testing.assert_array_equal(packed.words, words)
        np.testing.assert_array_equal(packed.row_words, row_words)


@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_nvrtc_compiles_every_kernel_without_a_word(capability: str, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    # All of them for one target, every third for the others: a compilation takes most of a second.
    for kernel in kernels.ALL[:: 1 if capability == "90" else 3]:
        made = kernels.compiled(kernel, capability)
        assert made.log == ""
        try:
            tool = oracles.cuobjdump()
        except oracles.OracleError:
            continue
        path = tmp_path / "kernel.cubin"
        path.write_bytes(made.cubin)
        text = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
        used = re.search(r"REG:(\d+) STACK:(\d+)", text)
        assert used is not None, text
        assert int(used[1]) <= 80
        assert int(used[2]) == 0


def test_what_nvrtc_writes_to_is_no_object_that_others_have() -> None:
    """The log of a clean build is one byte, and Python has one object for all equal single bytes."""
    assert kernels._room(1) is not kernels._room(1)
