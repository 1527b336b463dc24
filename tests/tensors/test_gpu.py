"""Kernels and their use on a real GPU: bit for bit what the reference gives."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from gpubloat.errors import DeviceError, GpubloatError
from gpubloat.tensors import codebook, counting, packing
from gpubloat.tensors.gpu import device, hostmemory, kernels, launch

torch: Any = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("PyTorch finds no GPU", allow_module_level=True)

from gpubloat.tensors.gpu.offload import offload  # noqa: E402
from gpubloat.tensors.gpu.rowcache import RowCache  # noqa: E402
from gpubloat.tensors.gpu.torchuse import PackedEmbedding, PackedTensor  # noqa: E402
from tests.tensors.test_torchuse import DTYPES, same, weights  # noqa: E402

pytestmark = pytest.mark.gpu
WIDTHS = (8, 16, 32, 64)


def pinned(x: Any, chunk_bits: Any = "auto", layout: Any = "condensed") -> PackedTensor:
    return PackedTensor(packing.pack(x, codebook.fit(x, chunk_bits), layout)).pin()


def numbers(n: int, of: int, seed: int = 0) -> Any:
    return torch.randint(0, of, (n,), generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.parametrize("layout", packing.LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(dtype: str, layout: Any) -> None:
    x = weights(5000, 96, dtype=dtype)
    packed = pinned(x, layout=layout)
    assert same(packed.to("cuda").cpu(), x)
    indices = numbers(7000, 5000)
    for presorted in (False, True):
        wanted = indices.sort().values if presorted else indices
        assert same(packed.gather(wanted, presorted=presorted).cpu(), x[wanted.cpu()])
    packed.check()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 1000), (7, 3), (1000, 129), (33, 5000), (3, 200_000), (100_000, 1)])
def test_every_width_and_shape(width: int, shape: tuple[int, int]) -> None:
    x = weights(shape[0], shape[1] * 2, dtype="float32")
    book = codebook.fit(x, width)
    on_gpu = device.pack(x.cuda(), book)
    expected = packing.pack(x, book)
    np.testing.assert_array_equal(on_gpu.row_words.cpu().numpy().view("<u4"), expected.row_words)
    np.testing.assert_array_equal(on_gpu.owner.cpu().numpy().view("<u4"), expected.words)
    for lane in (1, 2, 4):
        if width < 64 or lane > 1:
            out = torch.full_like(x, 7, device="cuda")
            on_gpu.decode(out, words_per_lane=lane)
            on_gpu.check()
            assert same(out.cpu(), x)
    slots = device.pack(x.cuda(), book, "slots")
    np.testing.assert_array_equal(slots.owner.cpu().numpy().view("<u4"), packing.pack(x, book, "slots").words)


@pytest.mark.parametrize("n", [1, 3, 5, 7, 127, 257])
def test_odd_rows_of_bytes(n: int) -> None:
    x = weights(999, n, dtype="int8")
    packed = pinned(x, 8)
    assert same(packed.to("cuda").cpu(), x)
    assert same(packed.gather(numbers(500, 999)).cpu(), x[numbers(500, 999).cpu()])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_patterns_of_16_bits(dtype: str) -> None:
    patterns = torch.arange(1 << 16, dtype=torch.int32)[torch.randperm(1 << 16)].to(torch.int16)
    x = patterns.view(getattr(torch, dtype)).reshape(-1, 64)
    assert same(pinned(x).to("cuda").cpu(), x)
    mostly = weights(5000, 64, dtype=dtype)
    book = codebook.fit(mostly, 16, always=False)
    packed = PackedTensor(packing.pack(x, book)).pin()
    assert same(packed.to("cuda").cpu(), x)


def test_empty_and_wrong() -> None:
    assert pinned(weights(0, 5)).to("cuda").shape == (0, 5)
    packed = pinned(weights(10, 5))
    assert packed.gather(torch.empty(0, dtype=torch.int64, device="cuda")).shape == (0, 5)
    packed.gather(torch.tensor([0, 10], device="cuda"))
    with pytest.raises(GpubloatError, match="out of range"):
        packed.check()
    packed.check()
    with pytest.raises(GpubloatError, match="int64"):
        packed.gather(torch.tensor([0, 1], device="cuda").double().view(torch.float64), presorted=True)


def test_pageable_memory_and_wrong_devices_are_refused() -> None:
    packed = PackedTensor(packing.pack(weights(10, 5)))
    with pytest.raises(GpubloatError, match="pageable"):
        packed.gather(torch.tensor([1], device="cuda"))
    host = torch.zeros(10, 4)
    error = torch.zeros(1, dtype=torch.int32, device="cuda")
    indices = torch.tensor([1], device="cuda")
    with pytest.raises(GpubloatError, match="pageable"):
        device.read_rows(host.data_ptr(), 10, 16, indices, torch.empty(1, 4, device="cuda"), error)
    with pytest.raises(DeviceError, match="no CUDA device"):
        device.count(host)
    with pytest.raises(DeviceError, match="there is no device"):
        launch.gpu("cuda:99")
    rows = packed.pin().rows("cuda")
    with pytest.raises(DeviceError, match="a tensor is on cpu"):
        rows.decode(torch.empty(1, 5), indices)
    with pytest.raises(GpubloatError, match="contiguous"):
        rows.decode(torch.empty(2, 5, device="cuda"), indices)


def test_memory_is_unregistered_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.arange(5000, dtype=np.uint32)
    with hostmemory.Pinned(data, piece=4096) as held:
        address = held.address
        assert hostmemory.is_readable(address)
        assert hostmemory.is_readable(address + data.nbytes - 4)
        target = torch.zeros(4000, dtype=torch.int32, device="cuda")
        held.copy_to(target, 2000, 16_000)
        np.testing.assert_array_equal(target.cpu().numpy(), data[500:4500])
    assert not hostmemory.is_readable(address)
    lost = hostmemory.Pinned(data)
    address = lost.address
    del lost
    gc.collect()
    assert not hostmemory.is_readable(address)
    original, calls = launch.call, []

    def failing(name: str, *arguments: Any) -> Any:
        if name == "cuMemHostRegister":
            calls.append(arguments[0])
            if len(calls) == 3:
                raise GpubloatError("cuMemHostRegister failed: CUDA_ERROR_OUT_OF_MEMORY")
        return original(name, *arguments)

    monkeypatch.setattr(launch, "call", failing)
    with pytest.raises(GpubloatError, match="OUT_OF_MEMORY"):
        hostmemory.Pinned(data, piece=4096)
    assert len(calls) == 3
    assert not any(map(hostmemory.is_readable, calls))


def test_streams_are_respected() -> None:
    x = weights(20_000, 256, dtype="bfloat16")
    packed = pinned(x)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        indices = numbers(10_000, 20_000).clone()
        found = packed.gather(indices)
        whole = packed.to("cuda", chunk_bytes=1 << 18)
    side.synchronize()
    assert same(found.cpu(), x[indices.cpu()])
    assert same(whole.cpu(), x)


def test_counts() -> None:
    for shape, dtype in (
        ((10_000, 33), "float32"),
        ((1001, 7), "int8"),
        ((100_000,), "float16"),
        ((3, 70_001), "int16"),
        ((700_000, 24), "int8"),
        ((1, 1), "int8"),
    ):
        x = weights(*shape, dtype=dtype)
        words = x.view(shape[0], -1).view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[x.element_size()]).numpy()
        found = device.count(x.cuda()).cpu().numpy()
        np.testing.assert_array_equal(found, counting.ones(words).reshape(-1))
    odd = weights(30_001, 9, dtype="int8")[1:]  # begins inside of a word
    found = device.count(odd.cuda().new_empty(odd.numel() + 1)[1:].view_as(odd).copy_(odd)).cpu().numpy()
    np.testing.assert_array_equal(found, counting.ones(odd.view(torch.uint8).numpy()).reshape(-1))


def test_plain_rows_by_index() -> None:
    for n in (1, 5, 24, 64, 1000):
        x = weights(300, n, dtype="int8")
        with hostmemory.Pinned(x.numpy()) as held:
            error = torch.zeros(1, dtype=torch.int32, device="cuda")
            out = torch.zeros(500, n, dtype=torch.int8, device="cuda")
            device.read_rows(held.address, 300, n, numbers(500, 300), out, error)
            assert same(out.cpu(), x[numbers(500, 300).cpu()])


def test_embedding_cache_and_offload() -> None:
    table = weights(3000, 128, dtype="bfloat16")
    indices = numbers(4096, 3000).view(64, 64)
    for cache_bytes in (0, 100_000):
        layer = PackedEmbedding.from_pretrained(table, cache_bytes=cache_bytes, device="cuda")
        for _ in range(4):
            assert same(layer(indices).cpu(), table[indices.cpu()])
    cache = RowCache(pinned(table), 1 << 19)
    for _ in range(40):
        cache.gather(indices)
    assert cache.stats()["hits"] > 0
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)]).cuda()
    x = torch.randn(32, 512, device="cuda")
    with torch.no_grad():
        expected = model(x)
        offload(model.cpu())
        for _ in range(3):
            assert torch.equal(model(x), expected)


@pytest.mark.slow
def test_more_than_4_gib() -> None:
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of GPU memory")
    n, d = (5 << 30) // 1024, 512
    x = torch.randn(1 << 16, d, device="cuda").mul_(0.02).bfloat16().repeat(n // (1 << 16), 1)
    book = codebook.fit(x[: 1 << 16].cpu(), 16)
    for layout in packing.LAYOUTS:
        rows = device.pack(x, book, layout)
        assert rows.n_words * 4 > 3 << 30
        out = torch.empty_like(x)
        rows.decode(out)
        rows.check()
        assert torch.equal(out.view(torch.int16), x.view(torch.int16))
        last = torch.arange(n - 1000, n, device="cuda")
        few = torch.empty(1000, d, dtype=x.dtype, device="cuda")
        rows.decode(few, last)
        assert torch.equal(few.view(torch.int16), x[-1000:].view(torch.int16))
        del rows, out


def test_kernels_take_no_local_memory() -> None:
    gpu = launch.gpu()
    attribute = launch.driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
    for kernel in kernels.ALL:
        loaded = launch.load(gpu, kernel, 256, 0)
        assert launch.call("cuFuncGetAttribute", attribute, loaded.function) == 0
