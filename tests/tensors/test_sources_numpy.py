"""NumPy's files: as numpy.load reads them, and nothing of hostile ones; zip files that lie."""

from __future__ import annotations

import contextlib
import pickle
import random
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from gpubloat.errors import FormatError, GpubloatError
from gpubloat.tensors.dtypes import DTYPES
from gpubloat.tensors.sources import Tensor, tensors_in
from tests.tensors.test_sources_memory import SHAPES, some

PLAIN = [name for name in DTYPES if name not in ("bf16", "fp8_e4m3", "fp8_e5m2")]


def one(path: Path) -> Tensor:
    (tensor,) = tensors_in(path)
    return tensor


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("order", "CF")
def test_arrays_as_numpy_reads_them(dtype: str, shape: tuple[int, ...], order: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array(some(dtype, shape), order=order))
    tensor = one(tmp_path / "a.npy")
    assert (tensor.name, tensor.dtype, tensor.shape) == ("a", dtype, shape)
    assert tensor.words.tobytes() == np.load(tmp_path / "a.npy").tobytes(order="C")
    assert tensor.words.flags.c_contiguous


@pytest.mark.parametrize("order", "CF")
def test_big_endian_files_are_turned(order: str, tmp_path: Path) -> None:
    x = np.arange(12, dtype=">f4").reshape(3, 4)
    np.save(tmp_path / "a.npy", np.array(x, order=order))
    assert one(tmp_path / "a.npy").words.tobytes() == x.astype("<f4").tobytes()


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version(version: tuple[int, int], tmp_path: Path) -> None:
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array(file, np.arange(5), version)
    assert one(tmp_path / "a.npy").words.tolist() == [0, 1, 2, 3, 4]


def npy(header: bytes | str, data: bytes = bytes(8), version: bytes = b"\1\0", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else header.encode("latin-1")
    wide = 2 if version[0] == 1 else 4
    return b"\x93NUMPY" + version + (len(text) if length is None else length).to_bytes(wide, "little") + text + data


def said(descr: str = "'<f4'", fortran: str = "False", shape: str = "(2,)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}}}\n"


HOSTILE = {
    "magic": (b"\x93NUMPZ" + npy(said())[6:], "not a .npy file"),
    "version": (npy(said(), version=b"\7\0"), "version 7.0"),
    "long header": (npy(said(), version=b"\2\0", length=2**32 - 1), "at most 10000"),
    "header outside": (npy(said(), length=5000), "does not fit"),
    "no literal": (npy("__import__('os').system('touch ran')"), "no Python literal"),
    "nested": (npy("[" * 9000), "no Python literal"),
    "nested signs": (npy("-" * 9000 + "1"), "no Python literal"),
    "null": (npy(b"\0"), "no Python literal"),
    "list": (npy("[]"), "does not give descr"),
    "other key": (npy(said().replace("shape", "shade")), "does not give descr"),
    "order": (npy(said(fortran="1")), "neither True nor False"),
    "object": (npy(said("'|O'")), "elements of type |O cannot be read"),
    "record": (npy(said("[('a', '<f4')]")), "cannot be read"),
    "void": (npy(said("'<V4'")), "cannot be read"),
    "text": (npy(said("'<U2'")), "cannot be read"),
    "complex": (npy(said("'<c8'"), bytes(16)), "cannot be read"),
    "odd": (npy(said("'<i3'")), "no elements of type"),
    "long descr": (npy(said("'" + "x" * 9000 + "'")), "cannot be read"),
    "unhashable": (npy("{[]: 3}"), "no Python literal"),
    "short": (npy(said(shape="(3,)")), "does not fit"),
    "huge": (npy(said(shape=f"({2**40},)")), "does not fit"),
    "overflow": (npy(said(shape=f"({2**62}, 8)")), "larger than memory"),
    "empty overflow": (npy(said(shape=f"({2**62}, 0, {2**62})"), b""), "larger than memory"),
    "negative": (npy(said(shape="(-2,)")), "something else than sizes"),
    "true": (npy(said(shape="(True, 2)")), "something else than sizes"),
    "number": (npy(said(shape="2")), "no list"),
    "dimensions": (npy(said(shape="(" + "1," * 100 + "2)")), "no list"),
    "rest": (npy(said(), bytes(9)), "1 bytes after the array"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_arrays_are_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data, what = HOSTILE[case]
    for suffix in ("npy", "npz"):
        path = tmp_path / f"a.{suffix}"
        if suffix == "npy":
            path.write_bytes(data)
        else:
            with zipfile.ZipFile(path, "w") as file:
                file.writestr("b.npy", data)
        with pytest.raises(FormatError) as caught:
            tensors_in(path)
        assert what in str(caught.value)
        assert len(str(caught.value)) < 500
    assert not Path("ran").exists()


def test_object_arrays_are_refused_and_never_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "ran",)

    np.save(tmp_path / "a.npy", np.array([Evil()], object), allow_pickle=True)
    with pytest.raises(FormatError) as caught:
        tensors_in(tmp_path / "a.npy")
    assert "pickle" in str(caught.value.hint)
    assert not (tmp_path / "ran").exists()
    pickle.loads((tmp_path / "a.npy").read_bytes()[128:])  # the fixture is what it says
    assert (tmp_path / "ran").exists()


def test_every_truncation_of_an_array_is_refused(tmp_path: Path) -> None:
    whole = npy(said())
    for size in range(len(whole)):
        (tmp_path / "a.npy").write_bytes(whole[:size])
        with pytest.raises(FormatError):
            tensors_in(tmp_path / "a.npy")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_archives_as_numpy_reads_them(save: object, tmp_path: Path) -> None:
    arrays = {f"{dtype} {i}": some(dtype, shape, i) for dtype in PLAIN for i, shape in enumerate(SHAPES)}
    arrays["folder/f"] = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    arrays["größe"] = np.arange(3)
    save(tmp_path / "a.npz", **arrays)  # type: ignore[operator]
    found = tensors_in(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as expected:
        assert [t.name for t in found] == expected.files == list(arrays)
        for tensor in found:
            assert tensor.words.tobytes() == expected[tensor.name].tobytes()
            assert tensor.shape == expected[tensor.name].shape


def archive(path: Path, method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("a.npy", npy(said(), b"abcdefgh"))
        file.writestr("b.npy", npy(said("'|u1'", shape="(3,)"), b"xyz"))
        file.writestr("note.txt", "no array")
    return path


def patched(path: Path, sign: bytes, at: int, layout: str, value: int) -> Path:
    """One field of the first record with this signature is changed."""
    data = bytearray(path.read_bytes())
    struct.pack_into(layout, data, data.index(sign) + at, value)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("sign", "at", "layout", "value", "what"),
    [
        (b"PK\1\2", 8, "<H", 1, "encrypted"),
        (b"PK\1\2", 10, "<H", 12, "method 12"),
        (b"PK\1\2", 24, "<I", 9, "which cannot be"),
        (b"PK\1\2", 20, "<I", 9, "which cannot be"),
        (b"PK\1\2", 20, "<I", 2**32 - 1, "without its ZIP64 field"),
        (b"PK\1\2", 42, "<I", 2**31, "does not fit"),
        (b"PK\1\2", 42, "<I", 1, "no header of member"),
        (b"PK\1\2", 28, "<H", 60000, "does not fit"),
        (b"PK\1\2", 46, "<B", ord("b"), "no header of member"),
        (b"PK\1\2", 0, "<I", 0, "no entry of the directory"),
        (b"PK\3\4", 0, "<I", 0, "no header of member"),
        (b"PK\3\4", 28, "<H", 60000, "does not fit"),
        (b"PK\5\6", 4, "<H", 1, "damaged"),
        (b"PK\5\6", 8, "<H", 9, "damaged"),
        (b"PK\5\6", 20, "<H", 9, "damaged"),
        (b"PK\5\6", 16, "<I", 2**31, "does not fit"),
        (b"PK\5\6", 12, "<I", 2**31, "does not fit"),
        (b"PK\5\6", 0, "<I", 0, "no zip file"),
    ],
)
def test_zip_files_that_lie_are_refused(
    sign: bytes, at: int, layout: str, value: int, what: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match=what):
        tensors_in(patched(archive(tmp_path / "a.npz"), sign, at, layout, value))


def test_names_that_come_twice_and_members_that_overlap_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.npy", npy(said()))
        with pytest.warns(UserWarning, match="Duplicate"):
            file.writestr("a.npy", npy(said()))
    with pytest.raises(FormatError, match="two members"):
        tensors_in(path)
    data = archive(path).read_bytes()
    first = data.index(b"PK\1\2")
    second = data.index(b"PK\1\2", first + 1)
    # The second entry becomes the first one under another name, kept in both of its places.
    entry = bytearray(data[first:second])
    path.write_bytes(data[:second] + bytes(entry) + data[second + len(entry) :])
    with pytest.raises(FormatError, match="two members"):
        tensors_in(path)
    inner = bytearray(data)
    begin = data.index(b"PK\3\4", 10)  # the second member, as if the first one reached into it
    longer = begin + 60 - (data.index(b"a.npy") + 5)
    for at in (20, 24):
        struct.pack_into("<I", inner, first + at, longer)
    path.write_bytes(inner)
    with pytest.raises(FormatError, match="overlap"):
        tensors_in(path)


def test_bombs_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.npz", zipfile.ZIP_DEFLATED)
    size = path.read_bytes().index(b"PK\1\2") + 24
    packed = int.from_bytes(path.read_bytes()[size - 4 : size], "little")
    for claim, what in (
        (2**32 - 2, "which cannot be"),
        (1032 * packed + 1025, "which cannot be"),
        (100, "is not the 100"),
    ):
        with pytest.raises(FormatError, match=what):
            tensors_in(patched(path, b"PK\1\2", 24, "<I", claim))


def test_members_that_are_too_much_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros(1 << 16), b=np.zeros(1 << 16))
    assert len(tensors_in(tmp_path / "a.npz")) == 2
    monkeypatch.setattr("gpubloat.tensors.files.zipfiles._MAX_INFLATED", 1 << 20)
    with pytest.raises(FormatError, match="when unpacked"):
        tensors_in(tmp_path / "a.npz")


def test_damage_in_a_packed_member_is_found(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.npz", zipfile.ZIP_DEFLATED)
    data = path.read_bytes()
    start = 30 + data.index(b"PK\3\4") + 5
    stop = data.index(b"PK\3\4", start)
    for at in range(start, stop):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x11]) + data[at + 1 :])
        with pytest.raises(FormatError):
            tensors_in(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_zip_files_with_flipped_bytes_or_cut(method: int, tmp_path: Path) -> None:
    path = archive(tmp_path / "a.npz", method)
    whole = path.read_bytes()
    rng = random.Random(method)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(FormatError):
            tensors_in(path)
    for _ in range(1500):
        changed = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        path.write_bytes(changed)
        with contextlib.suppress(GpubloatError):
            assert sum(t.n_bytes for t in tensors_in(path)) <= len(whole)


def test_zip64_records_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    path = archive(tmp_path / "a.npz")
    assert b"PK\6\6" in path.read_bytes()
    assert [t.words.tobytes() for t in tensors_in(path)] == [b"abcdefgh", b"xyz"]
    with pytest.raises(FormatError, match="ZIP64"):
        tensors_in(patched(path, b"PK\6\6", 24, "<Q", 2**63))
