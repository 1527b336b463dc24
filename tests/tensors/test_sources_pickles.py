"""PyTorch's files with pickles written by hand: views of storages, lies, and what would run something and does not."""

from __future__ import annotations

import contextlib
import pickle
import random
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpubloat.errors import FormatError, GpubloatError
from gpubloat.tensors.sources import tensors_in

MARK, STOP = b"(", b"."


def text(word: str) -> bytes:
    return b"X" + len(word.encode()).to_bytes(4, "little") + word.encode()


def number(n: int) -> bytes:
    return b"\x8a\x0a" + n.to_bytes(10, "little", signed=True)


def group(*items: bytes) -> bytes:
    return MARK + b"".join(items) + b"t"


def numbers(values: Any) -> bytes:
    return group(*(number(n) for n in values))


def storage(key: str = "0", n: int = 6, kind: str = "FloatStorage") -> bytes:
    return group(text("storage"), b"ctorch\n" + kind.encode() + b"\n", text(key), text("cpu"), number(n)) + b"Q"


def tensor(
    offset: int = 0, shape: Any = (2, 3), stride: Any = (3, 1), held: bytes | None = None, more: bytes = b""
) -> bytes:
    ordered = b"ccollections\nOrderedDict\n)R"
    rest = (number(offset), numbers(shape), numbers(stride), b"\x89", ordered, more)
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + group(held or storage(), *rest) + b"R"


def dictionary(**items: bytes) -> bytes:
    return b"}(" + b"".join(text(name) + value for name, value in items.items()) + b"u"


DATA = np.arange(6, dtype="<f4")


def saved(path: Path, body: bytes, method: int = zipfile.ZIP_STORED, **members: bytes) -> Path:
    """A file with this pickle and a storage 0 of six floats."""
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("archive/data.pkl", b"\x80\x02" + body + STOP)
        file.writestr("archive/data/0", DATA.tobytes())
        for name, data in members.items():
            file.writestr(f"archive/{name.replace('__', '/')}", data)
    return path


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("suffix", ["pth", "pt", "bin", "PTH"])
def test_a_pickle_written_by_hand(method: int, suffix: str, tmp_path: Path) -> None:
    body = dictionary(a=tensor(), model=dictionary(b=tensor(2, (2,), (1,))), epoch=number(3))
    a, b = tensors_in(saved(tmp_path / f"m.{suffix}", body, method))
    assert (a.name, a.dtype, a.shape) == ("a", "fp32", (2, 3))
    assert a.words.tobytes() == DATA.tobytes()
    assert (b.name, b.shape, b.words.tobytes()) == ("model.b", (2,), DATA[2:4].tobytes())


def test_a_tensor_alone_and_tensors_in_lists(tmp_path: Path) -> None:
    (found,) = tensors_in(saved(tmp_path / "alone.pt", tensor()))
    assert found.name == "alone"
    found_in_list = tensors_in(saved(tmp_path / "list.pt", b"](" + tensor() + number(1) + tensor() + b"e"))
    assert [t.name for t in found_in_list] == ["0", "2"]
    assert tensors_in(saved(tmp_path / "none.pt", dictionary(a=number(1)))) == []


@pytest.mark.parametrize(
    ("offset", "shape", "stride"),
    [
        (0, (3, 2), (1, 3)), (1, (2, 2), (3, 1)), (0, (2,), (5,)), (5, (), ()), (5, (1, 1), (9, 9)),
        (0, (0, 4), (4, 1)), (6, (0,), (1,)), (2**60, (0,), (1,)),
        (0, (2, 1, 3), (3, 77, 1)), (0, (3, 2), (0, 1)), (0, (2, 2), (1, 1)),
    ],
)  # fmt: skip
def test_views_of_a_storage(offset: int, shape: Any, stride: Any, tmp_path: Path) -> None:
    (found,) = tensors_in(saved(tmp_path / "m.pt", tensor(offset, shape, stride)))
    places = np.zeros(shape, int) + offset
    for axis, step in enumerate(stride):
        places += step * np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    expected = DATA[places] if places.size else np.empty(shape, "f4")
    assert found.shape == shape
    assert found.words.tobytes() == expected.tobytes()
    assert found.words.flags.c_contiguous


OUTSIDE = {
    "offset": tensor(1),
    "far offset": tensor(2**60),
    "stride": tensor(0, (2, 3), (4, 1)),
    "large stride": tensor(0, (2, 3), (2**61, 1)),
    "shape": tensor(0, (7,), (1,)),
    "huge shape": tensor(0, (2**61, 2**61), (0, 0)),
    "expanded": tensor(0, (2**40,), (0,)),
    "expanded a little": tensor(0, (7,), (0,)),
    "negative offset": tensor(-1),
    "negative size": tensor(0, (-2, 3), (3, 1)),
    "negative stride": tensor(5, (2, 3), (-3, -1)),
    "fewer strides": tensor(0, (2, 3), (1,)),
    "more dimensions": tensor(0, (1,) * 100, (1,) * 100),
    "size of text": tensor().replace(number(2), text("2")),
    "longer storage": tensor(held=storage(n=7)),
    "shorter storage": tensor(held=storage(n=5)),
    "negative storage": tensor(held=storage(n=-6)),
    "no storage": tensor(held=storage(key="1")),
    "storage outside": tensor(held=storage(key="../data.pkl")),
    "wider storage": tensor(held=storage(kind="DoubleStorage")),
    "complex": tensor(held=storage(n=3, kind="ComplexFloatStorage")),
    "untyped": tensor(held=storage(n=24, kind="UntypedStorage")),
    "negative to be": tensor(more=dictionary(neg=b"\x88")),
    "key of a pair": b"}" + group(number(1)) + tensor() + b"s",
    "key of nothing": b"}N" + tensor() + b"s",
    "long key": b"}" + text("k" * 2000) + tensor() + b"s",
    "half a character": b"}X\x03\0\0\0\xed\xa0\x80" + tensor() + b"s",
    "key twice": b"}(" + (text("a") + tensor()) * 2 + b"u",
    "same path": dictionary(**{"a.b": tensor(), "a": dictionary(b=tensor())}),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_tensors_that_are_not_in_the_file_are_refused(case: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError) as caught:
        tensors_in(saved(tmp_path / "m.pt", OUTSIDE[case]))
    assert str(caught.value).isprintable()


RUNS = {
    "os.system": b"cos\nsystem\n" + group(text("touch ran")) + b"R",
    "posix.system": b"cposix\nsystem\n" + group(text("touch ran")) + b"R",
    "builtins.eval": b"cbuiltins\neval\n" + group(text("open('ran', 'w')")) + b"R",
    "builtins.getattr": b"cbuiltins\ngetattr\n" + group(tensor(), text("x")) + b"R",
    "torch.load": b"ctorch\nload\n" + group(text("x")) + b"R",
    "torch._utils._rebuild_qtensor": b"ctorch._utils\n_rebuild_qtensor\n)R",
    "numpy.core.multiarray._reconstruct": b"cnumpy.core.multiarray\n_reconstruct\n)R",
    "__main__.Model": b"c__main__\nModel\n)\x81}b",
    "os.system (stack)": text("os") + text("system") + b"\x93" + group(text("touch ran")) + b"R",
    "os.system (parts)": text("torch._utils.os") + text("system") + b"\x93)R",
}


@pytest.mark.parametrize("case", RUNS)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a tensor"])
def test_pickles_that_would_run_something_are_refused_and_do_not(
    case: str, beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path / "m.pt", dictionary(a=tensor(), b=RUNS[case]) if beside else RUNS[case])
    with pytest.raises(FormatError, match="nothing of it was run") as caught:
        tensors_in(path)
    assert case.split(" ")[0] in str(caught.value)
    assert not Path("ran").exists()


DAMAGED = {
    "empty": b"",
    "nothing on the stack": b"a",
    "no mark": number(1) + b"t",
    "mark alone": MARK,
    "odd pairs": b"}(" + text("a") + b"u",
    "items of a list": b"](" + text("a") + number(1) + b"u",
    "append to a dictionary": b"}" + tensor() + b"a",
    "extend a dictionary": b"}(" + tensor() + b"e",
    "append to a number": number(1) + number(2) + b"a",
    "memo": b"h\x07",
    "call of a number": number(1) + b")R",
    "call of a storage class": b"ctorch\nFloatStorage\n)R",
    "call with a list": b"ctorch\nSize\n]R",
    "size of two": b"ctorch\nSize\n" + group(number(3), number(3)) + b"R",
    "tensor of nothing": b"ctorch._utils\n_rebuild_tensor_v2\n)R",
    "tensor of a number": tensor(held=number(7)),
    "dictionary of items": b"ccollections\nOrderedDict\n" + group(b"]") + b"R",
    "reference to a number": number(1) + b"Q",
    "reference to a class": group(text("module"), number(1), number(1), number(1), number(1)) + b"Q",
    "storage of a function": storage().replace(b"FloatStorage", b"Size"),
    "state of a number": number(1) + b"}b",
    "rebuilt twice": b"ctorch._tensor\n_rebuild_from_type_v2\n"
    + group(b"ctorch._tensor\n_rebuild_from_type_v2\n", b"N", b")", b"N")
    + b"R",
    "opcode": b"\xff",
    "opcode of old pickles": b"I3\n",
    "text outside": b"X\xff\xff\xff\x7fabc",
    "text far outside": b"\x8d" + b"\xff" * 8,
    "long number": b"\x8b\xff\xff\xff\x7f",
    "global without an end": b"cos",
    "bytes that are no text": b"X\1\0\0\0\xff",
    "name of a number": number(1) + number(2) + b"\x93",
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_pickles_are_refused(case: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError) as caught:
        tensors_in(saved(tmp_path / "m.pt", DAMAGED[case]))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_lists_of_lists_of_lists_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubloat.tensors.files.torchzip._MAX_OBJECTS", 10000)  # as many as it takes, in less time
    laughs = tensor() + b"q\0" + b"](h\0h\0eq\0" * 60
    numbers_again = b"](" + number(1) * 500 + b"eq\0](" + b"h\0" * 500 + b"e"
    for body in (laughs, numbers_again, b"]q\0h\0a", b"]" * 5000 + tensor() + b"a" * 5000):
        with pytest.raises(FormatError, match="nested deeper"):
            tensors_in(saved(tmp_path / "m.pt", body))


def test_copies_have_an_end(tmp_path: Path) -> None:
    def turned(k: int) -> bytes:
        return tensor(held=storage("1", 1000), offset=k % 2, shape=(9, 100), stride=(1, 9))

    for n in (3, 50):
        body = b"](" + b"".join(turned(k) for k in range(n)) + b"e"
        path = saved(tmp_path / "m.pt", body, data__1=bytes(4000))
        assert len(tensors_in(path)) == n  # the same view again is not copied again
    body = b"](" + b"".join(tensor(k, (9, 100), (1, 9), storage("1", 1000)) for k in range(100)) + b"e"
    small = saved(tmp_path / "m.pt", body, zipfile.ZIP_DEFLATED, data__1=bytes(4000))
    with pytest.raises(FormatError, match="more elements than are stored"):
        tensors_in(small)


def test_files_that_are_no_archive_of_pytorch(tmp_path: Path) -> None:
    path = tmp_path / "m.pth"
    path.write_bytes(pickle.dumps({"a": 1}, 2))
    with pytest.raises(FormatError, match=r"before 1\.6") as caught:
        tensors_in(path)
    assert "torch.save" in str(caught.value.hint)
    path.write_bytes(b"P")
    with pytest.raises(FormatError):
        tensors_in(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.txt", "b")
    with pytest.raises(FormatError, match=r"0 members are called data.pkl"):
        tensors_in(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", b"N.")
        file.writestr("b/data.pkl", b"N.")
    with pytest.raises(FormatError, match=r"2 members are called data.pkl"):
        tensors_in(path)
    with pytest.raises(FormatError, match="big-endian"):
        tensors_in(saved(path, tensor(), byteorder=b"big"))
    assert len(tensors_in(saved(path, tensor(), byteorder=b"little"))) == 1


def test_large_pickles_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubloat.tensors.files.picklewalk._MAX_SIZE", 100)
    with pytest.raises(FormatError, match="at most 100"):
        tensors_in(saved(tmp_path / "m.pt", tensor()))


def test_flipped_bytes_of_a_pickle(tmp_path: Path) -> None:
    whole = dictionary(a=tensor(), b=tensor(0, (3, 2), (1, 3)))
    rng = random.Random(0)
    for _ in range(2000):
        changed = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        with contextlib.suppress(GpubloatError), warnings.catch_warnings(action="error"):
            assert len(tensors_in(saved(tmp_path / "m.pt", bytes(changed)))) <= 2
