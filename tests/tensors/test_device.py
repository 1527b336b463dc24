"""What device.py asks of the kernels, on the emulated warp: CPU tensors in place of those of a GPU."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np
import pytest

from gpubloat.errors import DeviceError, GpubloatError, MissingToolError
from gpubloat.native import build
from gpubloat.tensors import codebook, counting, packing
from gpubloat.tensors.gpu import device, hostmemory, kernels, launch
from tests.tensors import emulator

torch: Any = pytest.importorskip("torch")

from gpubloat.tensors.gpu.rowcache import RowCache  # noqa: E402
from gpubloat.tensors.gpu.torchuse import PackedTensor  # noqa: E402
from tests.tensors.test_torchuse import same, weights  # noqa: E402


class FakeGpu(launch.Gpu):
    @property
    def device(self) -> Any:
        return torch.device("cpu")


class Emulator:
    """In place of `launch.launch`: the call that kernels.cpp has for a kernel, with the same arguments."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.lib = lib
        self.launched: list[str] = []

    def __call__(self, kernel: Any, grid: Any, threads: int, shared_bytes: int, arguments: Any) -> None:
        name, _, given = kernel.kernel.name.rstrip(">").partition("<")
        self.launched.append(name)
        words = [arg.strip() for arg in given.split(",") if arg]
        assert all(value is not None for _, value in arguments)  # cuda.bindings refuses it
        values = [kind(value) for kind, value in arguments]
        first = [int(re.sub(r"\D", "", w)) for w in words[:1]]
        if name == "unpack":
            first = [int(words[0]), int(words[1]), int(words[2]), int(words[3] == "true")]
            assert (*first[:3], bool(first[3])) in emulator.DECODERS
            shape = [grid[0], threads, ctypes.c_size_t(shared_bytes)]
        elif name == "count":
            shape = [*grid, threads, ctypes.c_size_t(shared_bytes)]
        elif name == "read_rows":
            first = [16 if words[0] == "uint4" else first[0] // 8]
            shape = [grid[0], threads]
        else:
            shape = [grid[0], threads]
        short = {"row_sizes": "sizes", "read_rows": "read", "move_rows": "move"}.get(name, name)
        assert not getattr(self.lib, f"emulate_{short}")(*first, *shape, *values) or name != "unpack"


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    try:
        build.compiler(cpp=True)
    except MissingToolError as error:
        pytest.skip(str(error))
    return emulator.library(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def fake(lib: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Emulator:
    gpu = FakeGpu(0, "90", 1)
    monkeypatch.setattr(launch, "gpu", lambda *_: gpu)
    monkeypatch.setattr(launch, "load", lambda on, kernel, *_: launch.Loaded(on, kernel, None, 1))
    found = Emulator(lib)
    monkeypatch.setattr(launch, "launch", found)
    monkeypatch.setattr(hostmemory, "is_readable", lambda _: True)
    monkeypatch.setattr(device, "THREADS", 64)
    return found


def on_gpu(packed: packing.Packed) -> device.Rows:
    return device.rows(packed, torch.from_numpy(packed.words.astype("<i4")))


@pytest.mark.parametrize("layout", packing.LAYOUTS)
@pytest.mark.parametrize("width", [8, 16, 32, 64])
def test_packed_as_the_reference_packs_and_decoded(fake: Emulator, width: int, layout: Any) -> None:
    for shape in ((60, 40), (1, 2), (7, 1100)):
        x = weights(*shape)
        book = codebook.fit(x, width)
        expected = packing.pack(x, book, layout)
        rows = device.pack(x, book, layout)
        np.testing.assert_array_equal(rows.row_words.numpy().view("<u4"), expected.row_words)
        np.testing.assert_array_equal(rows.owner.numpy().view("<u4"), expected.words)
        for source in (rows, on_gpu(expected)):
            out = torch.full_like(x, 7)
            source.decode(out)
            source.check()
            assert same(out, x)
        indices = torch.randint(0, shape[0], (30,))
        out = torch.empty(40, shape[1])
        places = torch.randperm(40)[:30]
        on_gpu(expected).decode(out, indices, places)
        assert same(out[places], x[indices])
    assert set(fake.launched) == {"row_sizes", "pack", "unpack"}


def test_a_part_from_a_staging_buffer(fake: Emulator) -> None:
    x = weights(50, 64, dtype="bfloat16")
    packed = packing.pack(x)
    rows, begin = device.rows(packed, None), int(packed.offsets[20])
    stage = torch.from_numpy(packed.words[begin : int(packed.offsets[35])].astype("<i4"))
    out = torch.empty(15, 64, dtype=x.dtype)
    rows.part(20, 35, stage, begin).decode(out)
    rows.check()
    assert same(out, x[20:35])
    assert fake.launched == ["unpack"]


def test_counts_plain_rows_and_what_is_wrong(fake: Emulator) -> None:
    shapes = ((100, 33), "float32"), ((101, 7), "int8"), ((3000,), "float16"), ((3, 1001), "int16"), ((1, 1), "int8")
    for shape, dtype in shapes:
        x = weights(*shape, dtype=dtype)
        words = x.view(shape[0], -1).view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[x.element_size()])
        np.testing.assert_array_equal(device.count(x).numpy(), counting.ones(words.numpy()).reshape(-1))
    odd = weights(301, 9, dtype="int8")[1:]  # begins inside of a word
    np.testing.assert_array_equal(device.count(odd), counting.ones(odd.view(torch.uint8).numpy()).reshape(-1))
    x, error = weights(20, 10), torch.zeros(1, dtype=torch.int32)
    out, indices = torch.empty(3, 10), torch.tensor([4, 4, 19])
    device.read_rows(x.data_ptr(), 20, 40, indices, out, error)
    assert same(out, x[indices])
    assert set(fake.launched) == {"count", "read_rows"}
    rows = on_gpu(packing.pack(x))
    rows.decode(out, torch.tensor([1, 20, 2]))
    with pytest.raises(GpubloatError, match="out of range: there are 20"):
        rows.check()
    rows.check()
    for wrong in (torch.empty(3, 9), torch.empty(6, 10)[::2]):
        with pytest.raises(GpubloatError, match="contiguous"):
            rows.decode(wrong, indices)
    with pytest.raises(GpubloatError, match="int64"):
        rows.decode(out, indices.double())
    with pytest.raises(DeviceError, match="a tensor is on meta"):
        rows.decode(torch.empty(3, 10, device="meta"), indices)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_what_a_gpu_can_read(monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    class Driver:
        class CUpointer_attribute:
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2

        @staticmethod
        def cuPointerGetAttributes(n: int, which: list[int], address: int) -> tuple[int, list[int]]:
            assert (n, which, address) == (1, [2], 4096)
            return 0, [kind]  # no error, and 0 for what CUDA does not know

    monkeypatch.setattr(launch, "driver", Driver)
    assert hostmemory.is_readable(4096) == (kind != 0)


def test_pageable_memory_is_refused(fake: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostmemory, "is_readable", lambda _: False)
    with pytest.raises(GpubloatError, match="pageable"):
        on_gpu(packing.pack(weights(4, 4)))
    with pytest.raises(GpubloatError, match="pageable"):
        device.read_rows(64, 1, 4, torch.tensor([0]), torch.empty(1), torch.zeros(1, dtype=torch.int32))
    with pytest.raises(GpubloatError, match="pageable"):
        PackedTensor(packing.pack(weights(4, 4))).rows("cuda:0")
    assert fake.launched == []


def test_rows_of_a_cache_move_and_decode(fake: Emulator) -> None:
    x = weights(200, 32)
    cache = RowCache(PackedTensor(packing.pack(x)), 20_000, ways=4, device="cpu")
    source, short = on_gpu(cache.source.packed), cache.kinds[0]
    indices, places = torch.tensor([5, 90, 13]), torch.tensor([0, 3, 9])
    device.move_rows(source, indices, short.slots, places, short.lengths)
    fits = source.row_words[indices] <= short.slot_words
    assert torch.equal(short.lengths[places], torch.where(fits, source.row_words[indices], 0))
    assert fake.launched == ["move_rows"]


def test_a_row_of_the_book_is_a_multiple_of_what_a_warp_reads() -> None:
    for m, width in ((1, 8), (127, 16), (128, 32), (129, 32), (65, 64)):
        zeros = np.zeros(m, f"<u{width // 8}")
        mask = zeros + zeros.dtype.type(1)
        book = kernels.book_words(zeros, mask, zeros)
        assert book.shape[1] % kernels.PAD == 0
        assert book[0].view(zeros.dtype)[m:].all()
        assert not book[0].view(zeros.dtype)[:m].any()
        assert book[3, -1] in (m, m - 1)
