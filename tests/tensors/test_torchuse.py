"""Packed tensors in PyTorch on the CPU; what needs a GPU is in test_gpu.py."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from gpubloat.errors import DeviceError, GpubloatError
from gpubloat.tensors import packing
from gpubloat.tensors.gpu.hostmemory import pieces

torch: Any = pytest.importorskip("torch")

from gpubloat.tensors.gpu import rowcache  # noqa: E402
from gpubloat.tensors.gpu.offload import OffloadedLinear, offload  # noqa: E402
from gpubloat.tensors.gpu.rowcache import RowCache  # noqa: E402
from gpubloat.tensors.gpu.torchuse import PackedEmbedding, PackedTensor  # noqa: E402

DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int16", "int32",
    "int64", "bool",
)  # fmt: skip


def weights(*shape: int, dtype: str = "float32", seed: int = 0) -> Any:
    """Normal numbers, as weights are."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02
    return (x * 1000).to(getattr(torch, dtype)) if "int" in dtype or dtype == "bool" else x.to(getattr(torch, dtype))


def same(a: Any, b: Any) -> bool:
    """Equal shapes, dtypes and bits."""
    flat = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*flat)


@pytest.mark.parametrize("layout", packing.LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tensor_and_its_rows_come_back(dtype: str, layout: Any) -> None:
    x = weights(70, 3, 11, dtype=dtype)
    packed = PackedTensor(packing.pack(x, layout=layout))
    assert (packed.shape, packed.dtype) == (x.shape, x.dtype)
    assert same(packed.to("cpu"), x)
    for indices in (torch.tensor([[3, 3, 69], [0, 1, 3]]), torch.tensor([], dtype=torch.int64), torch.tensor(5)):
        assert same(packed.gather(indices), x[indices])
    out = torch.empty(2, 3, 11, dtype=x.dtype)
    assert packed.gather(torch.tensor([1, 2]), out=out) is out
    assert same(out, x[1:3])


def test_wrong_indices_and_outputs_are_refused() -> None:
    packed = PackedTensor(packing.pack(weights(10, 4)))
    for indices in ([10], [-1]):
        with pytest.raises(GpubloatError, match="10"):
            packed.gather(torch.tensor(indices))
    with pytest.raises(GpubloatError, match="out is no contiguous"):
        packed.gather(torch.tensor([1]), out=torch.empty(1, 4, dtype=torch.float64))


def test_numbers_of_rows_may_be_a_list_or_an_array() -> None:
    x = weights(20, 8)
    packed = packing.pack(x)
    for given in ([1, 2], (2, 2), np.array([19, 0]), range(3)):
        assert same(packed.gather(given), x[list(given)])
        assert same(PackedTensor(packed).gather(given), x[list(given)])
    assert packed.gather([]).shape == (0, 8)
    for given in (["a"], [[1], [2, 3]], None):
        with pytest.raises(GpubloatError, match="no numbers of rows"):
            packed.gather(given)
    with pytest.raises(GpubloatError, match=r"integers, not torch\.float"):
        packed.gather([1.5])


def test_chunks_cover_all_rows_once() -> None:
    packed = PackedTensor(packing.pack(weights(100, 33)))
    for most in (0, 1, 40, 1000, 1 << 30):
        chunks = packed._chunks(most)
        assert [c[0] for c in chunks] == [0, *(c[1] for c in chunks[:-1])]
        assert chunks[-1][1] == 100
        assert sum(c[3] for c in chunks) == len(packed.packed.words)
        assert all(c[3] <= most or c[1] == c[0] + 1 for c in chunks)
    assert PackedTensor(packing.pack(weights(0, 33)))._chunks(10) == []


def test_an_embedding_gives_the_rows_of_its_table() -> None:
    table = weights(300, 48, dtype="bfloat16")
    indices = torch.randint(0, 300, (4, 50), generator=torch.Generator().manual_seed(1))
    for cache_bytes in (0, 4000):
        layer = PackedEmbedding.from_pretrained(table, cache_bytes=cache_bytes)
        for _ in range(3):
            assert same(layer(indices), torch.nn.functional.embedding(indices, table))
        assert "saving" in repr(layer)


def test_offloaded_layers_compute_the_same() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 64), torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)),
        torch.nn.LayerNorm(64), torch.nn.Linear(64, 7),
    )  # fmt: skip
    x = torch.randn(5, 40)
    with torch.no_grad():
        expected = model(x)
        assert offload(model, "cpu") is model
        assert sum(isinstance(m, OffloadedLinear) for m in model.modules()) == 3
        for _ in range(2):
            assert torch.equal(model(x), expected)
        assert torch.equal(model[4](torch.ones(1, 64)), model[4](torch.ones(1, 64)))  # out of order
        assert torch.equal(model(x), expected)
    with pytest.raises(GpubloatError, match="backward"):
        model(x.requires_grad_())
    with pytest.raises(GpubloatError, match="alone"):
        offload(torch.nn.Linear(2, 2), "cpu")
    with pytest.raises(GpubloatError, match="no linear layer"):
        offload(torch.nn.ReLU(), "cpu")


def test_a_cache_keeps_rows_and_counts() -> None:
    x = weights(200, 32)
    packed = PackedTensor(packing.pack(x))
    cache = RowCache(packed, 20_000, ways=4, device="cpu")
    assert [kind.slot_words for kind in cache.kinds] == [
        int(np.quantile(packed.packed.row_words, 0.95, method="higher")), packed.packed.row_words.max()
    ]  # fmt: skip
    assert 15_000 < cache.stats()["capacity_bytes"] <= 20_000
    few = torch.arange(10)
    assert same(cache.gather(few), x[few])
    assert cache.stats()["hits"] == 0
    assert same(cache.gather(few), x[few])
    assert cache.stats()["hits"] == 10
    rng = torch.Generator().manual_seed(3)
    for _ in range(50):
        indices = torch.randint(0, 200, (64,), generator=rng)
        assert same(cache.gather(indices.view(8, 8)), x[indices].view(8, 8, 32))
    tags = torch.cat([kind.tags.flatten() for kind in cache.kinds])
    tags = tags[tags >= 0]
    assert len(tags) == len(tags.unique()) == cache.n_held
    for kind in cache.kinds:
        assert ((kind.tags % kind.n_sets == torch.arange(kind.n_sets)[:, None]) | (kind.tags < 0)).all()
        assert (packed.packed.row_words[kind.tags[kind.tags >= 0]] <= kind.slot_words).all()
    with pytest.raises(GpubloatError, match="out of range"):
        cache.gather(torch.tensor([200]))
    with pytest.raises(GpubloatError, match="less than one set"):
        RowCache(packed, 10, device="cpu")


def test_a_cache_holds_more_packed_rows_than_plain_ones() -> None:
    x = torch.zeros(1000, 64)
    x[:, :4] = weights(1000, 4)
    cache = RowCache(PackedTensor(packing.pack(x)), 64 * 256, device="cpu")
    for _ in range(64):
        cache.gather(torch.arange(1000))
    assert cache.n_held > 3 * 64


def test_a_cache_keeps_a_row_that_does_not_shrink() -> None:
    x = torch.zeros(1000, 64)
    x[7] = torch.randint(1 << 30, (64,), generator=torch.Generator().manual_seed(1)).int().view(torch.float32)
    packed = PackedTensor(packing.pack(x))
    cache = RowCache(packed, 4000, device="cpu")
    assert [kind.slot_words for kind in cache.kinds] == [packed.packed.row_words.min(), packed.packed.row_words[7]]
    for _ in range(3):
        assert same(cache.gather(torch.tensor([7, 7])), x[[7, 7]])
    assert cache.stats()["hits"] == 4
    never = RowCache(packed, 4000, slot_words=8, device="cpu")  # one length, as was asked for
    for _ in range(3):
        assert same(never.gather(torch.tensor([7, 7])), x[[7, 7]])
    assert never.stats()["hits"] == 0


def test_a_cache_keeps_first_what_is_asked_for_most_often() -> None:
    x = weights(64, 16)
    cache = RowCache(PackedTensor(packing.pack(x)), 2 * 64, ways=1, slot_words=16, device="cpu")
    assert (cache.kinds[0].n_sets, len(cache.kinds)) == (2, 1)
    asked = torch.tensor([0, 2, 4, 4, 4, 6, 1, 3, 3, 5])
    assert same(cache.gather(asked), x[asked])
    assert cache.kinds[0].tags.flatten().tolist() == [4, 3]


def test_a_cache_takes_the_indices_and_the_room_that_packed_rows_take() -> None:
    x = weights(50, 8)
    cache = RowCache(PackedTensor(packing.pack(x)), 2000, device="cpu")
    i = torch.tensor([1, 2, 3, 1])
    assert same(cache.gather(i.int()), x[i])
    out = torch.empty(4, 8)
    assert cache.gather(i, out=out) is out
    assert same(out, x[i])
    wrong = (torch.zeros(4, 16)[:, :8], torch.zeros(8, 4).t(), torch.zeros(2, 16), torch.zeros(4, 8).int())
    for room in wrong:
        with pytest.raises(GpubloatError, match="out is no contiguous"):
            cache.gather(i, out=room)
    with pytest.raises(GpubloatError, match="are integers"):
        cache.gather(i.float())
    for name in ("ways", "slot_words"):
        with pytest.raises(GpubloatError, match=f"{name} is 0"):
            RowCache(cache.source, 2000, device="cpu", **{name: 0})


def test_a_cache_that_was_interrupted_holds_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    x = weights(50, 8)
    cache = RowCache(PackedTensor(packing.pack(x)), 8 * 4, ways=1, slot_words=8, device="cpu")
    assert same(cache.gather(torch.tensor([0])), x[[0]])
    move = rowcache.move_rows

    def interrupted(*given: Any) -> None:
        move(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rowcache, "move_rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.gather(torch.tensor([1]))
    assert same(cache.gather(torch.tensor([0])), x[[0]])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so() -> None:
    packed = PackedTensor(packing.pack(weights(10, 4)))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    for act in (packed.pin, packed.to, lambda: offload(model), lambda: RowCache(packed, 1 << 20)):
        with pytest.raises(DeviceError, match="finds no CUDA device") as error:
            act()
        assert error.value.reason == "absent"


def test_copies_do_not_cross_pieces() -> None:
    assert pieces(0, 0, 10) == []
    assert pieces(5, 3, 10) == [(5, 3)]
    assert pieces(5, 20, 10) == [(5, 5), (10, 10), (20, 5)]


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, gpubloat.tensors.gpu.device; print('torch' in sys.modules, 'cuda' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]


def test_bits_of_nan_and_zero_survive() -> None:
    patterns = np.array([0x7F800001, 0xFFC12345, 0x80000000, 0, 0x7F800000, 1], np.uint32).repeat(4)
    x = torch.from_numpy(patterns.view(np.float32)).reshape(6, 4)
    packed = PackedTensor(packing.pack(x))
    assert same(packed.to("cpu"), x)
    assert same(packed.gather(torch.tensor([5, 0])), x[[5, 0]])


def test_what_pack_gives_moves_and_gathers_by_itself() -> None:
    weight = torch.randn(64, 48).to(torch.bfloat16)
    packed = packing.pack(weight)
    assert torch.equal(packed.to("cpu").view(torch.int16), weight.view(torch.int16))
    indices = torch.tensor([[3, 3], [63, 0]])
    out = torch.empty(2, 2, 48, dtype=torch.bfloat16)
    assert packed.gather(indices, out=out) is out
    assert torch.equal(out.view(torch.int16), weight[indices].view(torch.int16))
