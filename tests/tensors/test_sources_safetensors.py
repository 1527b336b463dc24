"""Files of safetensors: as the library reads them, and nothing of hostile ones."""

from __future__ import annotations

import contextlib
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from gpubloat.errors import FormatError, GpubloatError
from gpubloat.tensors.dtypes import DTYPES
from gpubloat.tensors.sources import tensors_in
from tests.tensors.test_sources_memory import SHAPES, some


def written(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refused(path: Path, what: str | None = None) -> None:
    """Read by neither; here with one sentence."""
    with pytest.raises(FormatError, match=what) as caught:
        tensors_in(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 3000
    if path.suffix == ".safetensors" and what != "stands in it twice":  # there, the later one counts
        with pytest.raises((SafetensorError, ValueError)):
            load_file(path)


def test_every_type_and_shape_as_the_library_writes_it(tmp_path: Path) -> None:
    arrays = {f"{dtype} {shape}": some(dtype, shape, i) for dtype in DTYPES for i, shape in enumerate(SHAPES)}
    save_file(arrays, tmp_path / "all.safetensors", {"made": "here"})
    found = tensors_in(tmp_path / "all.safetensors")
    assert {t.name for t in found} == arrays.keys()
    for tensor in found:
        assert tensor.dtype == tensor.name.split()[0]
        assert tensor.shape == arrays[tensor.name].shape
        assert tensor.words.tobytes() == arrays[tensor.name].tobytes()
        assert tensor.words.flags.aligned


def test_values_as_the_library_reads_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    save_file({"a": rng.normal(size=(7, 3)).astype("f4"), "b.c": rng.normal(size=5)}, tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", "np") as file:
        for tensor in tensors_in(os.fspath(tmp_path / "m.safetensors")):
            assert tensor.words.tobytes() == file.get_tensor(tensor.name).tobytes()


def test_files_are_mapped_and_not_read(tmp_path: Path) -> None:
    size = 1 << 40  # more than any memory; the file has holes where the zeros are
    path = written(tmp_path / "big.safetensors", {"a": entry("U8", [size], 0, size)})
    try:
        os.truncate(path, path.stat().st_size + size)
    except OSError:
        pytest.skip("this file system has no files of such a size")
    (tensor,) = tensors_in(path)
    assert tensor.n_bytes == size
    assert int(tensor.words[-1]) == 0


def test_a_tensor_that_is_not_aligned_is_copied(tmp_path: Path) -> None:
    x = np.arange(3, dtype="<f4")
    header = {"a": entry("U8", [1], 0, 1), "b": entry("F32", [3], 1, 13)}
    _, b = tensors_in(written(tmp_path / "a.safetensors", header, b"\7" + x.tobytes()))
    assert b.words.flags.aligned
    assert b.words.tobytes() == x.tobytes()


A = entry("F32", [2], 0, 8)
HOSTILE = {
    "offsets outside": ({"a": entry("F32", [4], 0, 16)}, "does not fit"),
    "far outside": ({"a": entry("F32", [2], 2**63, 2**63 + 8)}, "does not fit"),
    "beyond 64 bits": ({"a": entry("F32", [2], 2**70, 2**70 + 8)}, "does not fit"),
    "negative": ({"a": entry("F32", [2], -8, 0)}, "are no F32"),
    "reversed": ({"a": entry("F32", [2], 8, 0)}, "are no F32"),
    "overlap": ({"a": A, "b": entry("F32", [1], 4, 8)}, "overlaps"),
    "twice the same": ({"a": A, "b": A}, "overlaps"),
    "hole": ({"a": entry("F32", [1], 4, 8)}, "bytes of no tensor"),
    "rest": ({"a": entry("F32", [1], 0, 4)}, "after the last tensor"),
    "nothing": ({}, "after the last tensor"),
    "shape": ({"a": entry("F32", [3], 0, 8)}, "are no F32"),
    "overflowing shape": ({"a": entry("F32", [2**62, 8], 0, 8)}, "larger than memory"),
    "overflowing empty shape": ({"a": entry("F32", [2**62, 0, 2**62], 0, 0), "b": A}, "larger than memory"),
    "huge size": ({"a": entry("F32", [2**64], 0, 8)}, "something else than sizes"),
    "negative size": ({"a": entry("F32", [-2], 0, 8)}, "something else than sizes"),
    "size of true": ({"a": entry("F32", [True, 2], 0, 8)}, "something else than sizes"),
    "size of text": ({"a": entry("F32", ["2"], 0, 8)}, "something else than sizes"),
    "size of 2.0": ({"a": entry("F32", [2.0], 0, 8)}, "something else than sizes"),
    "dtype": ({"a": entry("F33", [2], 0, 8)}, "'F33' cannot be read"),
    "dtype of number": ({"a": {"dtype": 3, "shape": [2], "data_offsets": [0, 8]}}, "cannot be read"),
    "dtype of list": ({"a": {"dtype": [], "shape": [2], "data_offsets": [0, 8]}}, "cannot be read"),
    "offsets of three": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, "no two numbers"),
    "offset of text": ({"a": entry("F32", [2], "0", 8)}, "no two numbers"),
    "shape of number": ({"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, "no list"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, "does not give"),
    "no object": ({"a": [1]}, "does not give"),
    "header of list": ([], "no JSON object"),
    "header of text": (b"hello!!!", "no JSON"),
    "header cut": (b'{"a": {"dtype"', "no JSON"),
    "header of bytes": (b'{"\xff": 3}', "no JSON"),
    "long number": (b'{"a": ' + b"9" * 5000 + b"}", "no JSON"),
    "nested": (b"[" * 200_000, "no JSON"),
    "name twice": (b'{"a": %s, "a": %s}' % ((json.dumps(A).encode(),) * 2), "stands in it twice"),
    "half a character": (b'{"\\ud800": %s}' % json.dumps(A).encode(), "no valid Unicode"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused(case: str, tmp_path: Path) -> None:
    header, what = HOSTILE[case]
    refused(written(tmp_path / "a.safetensors", header, bytes(8)), what)


def test_names_and_dimensions_have_an_end(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(FormatError, match="no text of up to"):
        tensors_in(written(path, {"n" * 2000: A}, bytes(8)))
    with pytest.raises(FormatError, match="no list of up to 64"):
        tensors_in(written(path, {"a": entry("F32", [1] * 1000 + [2], 0, 8)}, bytes(8)))


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 33 << 20, 200, 2**31])
def test_lengths_of_headers_are_checked_before_memory_is_taken(length: int, tmp_path: Path) -> None:
    refused(written(tmp_path / "a.safetensors", {"a": A}, bytes(8), length))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole.safetensors", {"a": A, "b": entry("BF16", [2, 2], 8, 16)}, bytes(16)).read_bytes()
    path = tmp_path / "a.safetensors"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        refused(path)
    path.write_bytes(whole)
    assert len(tensors_in(path)) == 2


def test_flipped_bytes_are_refused_or_read_within_the_file(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole.safetensors", {"a": A, "b": entry("BF16", [2, 2], 8, 16)}, bytes(16)).read_bytes()
    path = tmp_path / "a.safetensors"
    rng = random.Random(0)
    for _ in range(1000):
        changed = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        path.write_bytes(changed)
        with contextlib.suppress(FormatError):
            assert sum(t.n_bytes for t in tensors_in(path)) <= len(whole)


def shards(folder: Path) -> Path:
    save_file({"a": np.arange(3, dtype="f4"), "c": np.ones(2)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": np.arange(4, dtype="i8")}, folder / "model-00002-of-00002.safetensors")
    return index(folder, {f: f"model-0000{n}-of-00002.safetensors" for f, n in (("a", 1), ("b", 2), ("c", 1))})


def index(folder: Path, weights: Any) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 60}, "weight_map": weights}))
    return path


def test_an_index_leads_to_its_shards(tmp_path: Path) -> None:
    path = shards(tmp_path)
    for source in (path, tmp_path):
        found = tensors_in(source)
        assert [(t.name, t.dtype, t.shape) for t in found] == [
            ("a", "fp32", (3,)), ("b", "int64", (4,)), ("c", "fp64", (2,)),
        ]  # fmt: skip
        assert found[1].words.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "shard",
    ["/etc/passwd.safetensors", "../a.safetensors", "..\\a.safetensors", "b/a.safetensors", "a\0.safetensors", "..",
     ".", "", "passwd", 3, None, ["a.safetensors"]],
    ids=str,
)  # fmt: skip
def test_an_index_leads_nowhere_else(shard: Any, tmp_path: Path) -> None:
    inner = tmp_path / "model"
    inner.mkdir()
    save_file({"a": np.ones(2)}, tmp_path / "a.safetensors")
    refused(index(inner, {"a": shard}), "no file beside the index")


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    path = shards(tmp_path)
    index(tmp_path, {"z": "model-00001-of-00002.safetensors"})
    refused(path, "is not in")
    index(tmp_path, {"a": "gone.safetensors"})
    with pytest.raises(GpubloatError, match="which is not there"):
        tensors_in(path)
    for weights in ({}, [], None, 3):
        refused(index(tmp_path, weights), "no weight_map")
    path.write_text("[]")
    refused(path, "no JSON object")
    path.write_text("")
    refused(path, "empty")


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(GpubloatError, match=r"holds no .safetensors"):
        tensors_in(tmp_path)
    save_file({"a": np.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": np.ones(2)}, tmp_path / "2.safetensors")
    assert [t.name for t in tensors_in(tmp_path)] == ["a", "b"]
    save_file({"a": np.ones(2)}, tmp_path / "3.safetensors")
    with pytest.raises(GpubloatError, match=r"'a' is in 1.safetensors and in 3.safetensors"):
        tensors_in(tmp_path)
    for name in ("x", "y"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(GpubloatError, match="2 indexes"):
        tensors_in(tmp_path)


@pytest.mark.parametrize(
    "name", ["gone.npy", "gone", "a\0b.npy", "n" * 5000, "text.txt", "pipe.npy"], ids=lambda n: n[:9]
)
def test_paths_that_are_no_files_of_tensors(name: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    os.mkfifo(tmp_path / "pipe.npy")
    with pytest.raises(GpubloatError) as caught:
        tensors_in(tmp_path / name)
    assert str(caught.value).isprintable()
