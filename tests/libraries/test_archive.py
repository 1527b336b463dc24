"""Static libraries: GNU and BSD names, indexes, duplicates, and what lies, against `ar` where it is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gpubloat.errors import FormatError
from gpubloat.libraries import archive
from gpubloat.libraries.reader import Reader
from tests import oracles
from tests.build import containers, elf, fatbin
from tests.build.containers import header
from tests.libraries.common import scanned, tables

MEMBERS = [("a.o", b"first"), ("a_name_of_more_than_16_characters.o", b"second one"), ("b c.o", b"x" * 100), ("e", b"")]


def members(data: bytes) -> list[tuple[str, bytes]]:
    return [(n, data[at : at + size]) for n, at, size in archive.members(Reader("lib.a", data))]


def unit(name: str, target: int = 90) -> bytes:
    """An object with one function and one fatbin."""
    file = elf.Elf(elf.ET_REL)
    text = file.text(f".text.{name}")
    file.symbols([elf.Symbol(name, text, 0, 8)])
    file.rodata(".nv_fatbin", fatbin.region([fatbin.element(elf.cubin([(name, 128)], number=target), number=target)]))
    return file.bytes()


@pytest.mark.parametrize("style", ["gnu", "bsd"])
@pytest.mark.parametrize("index", [True, False])
def test_members(style: str, index: bool) -> None:
    assert members(containers.archive(MEMBERS, style=style, index=index)) == MEMBERS


@pytest.mark.skipif(shutil.which("ar") is None, reason="binutils is not installed")
def test_members_are_those_of_ar(tmp_path: Path) -> None:
    for name, data in MEMBERS:
        (tmp_path / name).write_bytes(data)
    subprocess.run(["ar", "qc", "lib.a", *(n for n, _ in MEMBERS)], cwd=tmp_path, check=True)
    assert members((tmp_path / "lib.a").read_bytes()) == MEMBERS
    (tmp_path / "ours.a").write_bytes(containers.archive(MEMBERS))
    listed = subprocess.run(["ar", "t", "ours.a"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert listed.splitlines() == [n for n, _ in MEMBERS]


def test_an_empty_archive() -> None:
    assert members(b"!<arch>\n") == []


def test_names_that_are_no_text() -> None:
    assert members(b"!<arch>\n" + header(b"\xff.o/", b"")) == [("\\xff.o", b"")]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (header(b"a/", b"abc", size=4000), "does not fit"),
        (header(b"a/", b"abc", end=b"??"), "no archive member header"),
        (header(b"/99", b"abc"), "not in the name table"),
        (header(b"a/", b"abcd") + b"\n" + header(b"b/", b""), "no archive member header"),
        (header(b"a/", b"").replace(b"0         `", b"-1        `"), "no archive member header"),
        (header(b"a/", b"").replace(b"0         `", b"          `"), "no archive member header"),
    ],
)
def test_archives_that_lie(made: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        members(b"!<arch>\n" + made)


def test_a_name_longer_than_its_member_stays_a_name() -> None:
    assert members(b"!<arch>\n" + header(b"#1/40", b"short")) == [("#1/40", b"short")]


@pytest.mark.parametrize("style", ["gnu", "bsd"])
def test_a_static_library_of_cuda_objects(style: str, tmp_path: Path) -> None:
    objects = [("one.o", unit("one")), ("a_rather_long_object_name.o", unit("two", 80)), ("one.o", unit("three"))]
    path = tmp_path / "libkernels.a"
    path.write_bytes(containers.archive([*objects, ("notes.txt", b"no object")], style=style))
    run = scanned(path, kernels=True)
    assert run["libraries"]["format"].tolist() == ["archive"]
    assert run["functions"]["function"].tolist() == ["one", "two", "three"]
    assert run["kernels"]["kernel"].tolist() == ["one", "two", "three"]
    assert run["regions"]["section"].tolist() == [f"{name}:.nv_fatbin" for name, _ in objects]
    assert len(run["problems"]) == 0
    data = path.read_bytes()
    for at in run["regions"]["offset_bytes"]:
        assert data[at : at + 4] == fatbin.MAGIC.to_bytes(4, "little")
    for at, size in run["functions"][["offset_bytes", "size_bytes"]].itertuples(index=False):
        assert data[at : at + size] == b"\x90" * 8
    if style == "gnu":  # cuobjdump reads no BSD names
        seen = oracles.visible(run["elements"], run["regions"])
        assert oracles.our_elements(seen) == oracles.listed_elements(path)


def test_a_damaged_member_does_not_hide_the_others(tmp_path: Path) -> None:
    path = tmp_path / "libkernels.a"
    objects = [("good.o", unit("good")), ("bad.o", unit("bad")[:-70]), ("last.o", unit("last"))]
    path.write_bytes(containers.archive(objects))
    found = tables(path, kernels=True)
    assert found["kernels"]["kernel"].tolist() == ["good", "last"]
    assert found["functions"]["function"].tolist() == ["good", "last"]
    assert found["problems"]["problem"].tolist() == ["unreadable"]
    bad = found["sections"].loc[found["sections"]["section"] == "bad.o:(unreadable)"]
    assert bad["label"].tolist() == ["unattributed"]
    assert bad["size_bytes"].tolist() == [len(unit("bad")) - 70]


def test_a_thin_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "thin.a"
    path.write_bytes(b"!<thin>\n" + header(b"a.o/", b"", size=5000))
    with pytest.raises(FormatError, match="thin archive") as caught:
        tables(path)
    assert caught.value.hint == "scan the object files that it names"
