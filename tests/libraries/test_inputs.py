"""What a user names as files to scan: files, folders, wheels, packages; and what in them cannot be read."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpubloat.errors import FormatError, GpubloatError
from gpubloat.libraries import inputs
from gpubloat.libraries.inputs import Input, discover, opened
from tests.build import containers, elf, fatbin
from tests.build.containers import DEFLATED, STORED
from tests.libraries.common import library

FATBIN = fatbin.region([fatbin.element(elf.cubin())])
LIBRARY = library(FATBIN)


def names(*paths: os.PathLike[str] | str) -> list[str]:
    return [f.library for f in discover(paths).files]


def content(entry: Input) -> bytes:
    with opened(entry) as reader:
        return bytes(reader.view(0, reader.size))


def test_a_file_is_itself(tmp_path: Path) -> None:
    path = tmp_path / "anything"
    path.write_bytes(b"any bytes")
    (found,) = discover([path]).files
    assert found == Input("anything", "anything", str(path), is_named=True)
    assert content(found) == b"any bytes"


def test_a_folder_gives_its_files_with_code(tmp_path: Path) -> None:
    for name, data in {
        "lib/libb.so.1": LIBRARY,
        "lib/liba.a": b"!<arch>\n",
        "c.fatbin": FATBIN,
        "old.fatbin": (0x1EE55A01).to_bytes(4, "little") + bytes(12),
        "notes.txt": b"text",
        "empty": b"",
        "short": b"\x7fE",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    found = discover([tmp_path])
    assert [f.library for f in found.files] == ["c.fatbin", "old.fatbin", "lib/liba.a", "lib/libb.so.1"]
    assert {f.root for f in found.files} == {tmp_path.name}
    assert found.n_skipped == 3
    assert not any(f.is_named for f in found.files)


def test_links_are_not_followed_and_files_are_listed_once(tmp_path: Path) -> None:
    (tmp_path / "libx.so.1.2").write_bytes(LIBRARY)
    (tmp_path / "libx.so").symlink_to("libx.so.1.2")
    os.link(tmp_path / "libx.so.1.2", tmp_path / "same_file.so")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "dangling.so").symlink_to("nowhere")
    assert names(tmp_path) == ["libx.so.1.2"]
    assert names(tmp_path, tmp_path / "libx.so") == ["libx.so.1.2"]
    assert names(tmp_path / "libx.so") == ["libx.so"]


@pytest.mark.parametrize("bad", ["a", "missing", "x" * 300, "with\0nul", "no_such_package_at_all", "pa/th", ""])
def test_paths_that_do_not_exist(bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").symlink_to("a")
    if bad == "":
        assert names(bad) == []  # the working directory
        return
    with pytest.raises(GpubloatError) as caught:
        discover([bad])
    assert caught.value.message.isprintable()


def test_pipes_and_devices_are_refused_and_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.whl")
    os.mkfifo(tmp_path / "pipe.so")
    (tmp_path / "libx.so").write_bytes(LIBRARY)
    assert names(tmp_path) == ["libx.so"]
    for name in ("pipe.whl", "pipe.so"):
        with pytest.raises(GpubloatError, match="neither a file nor a folder"):
            discover([tmp_path / name])
    with pytest.raises(GpubloatError, match="neither a file nor a folder"):
        discover(["/dev/null"])


def test_names_with_any_bytes(tmp_path: Path) -> None:
    for name in (b"new\nline.so", b"\x1b[31mred.so", b"\xff\xfe.so", b"caf\xc3\xa9.so", b"a,b\"c'.so"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(LIBRARY)
    found = discover([tmp_path]).files
    assert {f.library for f in found} == {"new\nline.so", "\x1b[31mred.so", "\\xff\\xfe.so", "café.so", "a,b\"c'.so"}
    assert all(content(f) == LIBRARY for f in found)


def test_names_that_collide(tmp_path: Path) -> None:
    for folder in ("one", "two", "three/two"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "libx.so").write_bytes(LIBRARY)
    found = names(tmp_path / "one/libx.so", tmp_path / "two/libx.so", tmp_path / "three/two/libx.so")
    assert found == ["one/libx.so", "two/libx.so", "two/libx.so#2"]
    assert names(tmp_path / "one", tmp_path / "two") == ["one/libx.so", "two/libx.so"]


def test_an_installed_package_by_name() -> None:
    found = discover(["lz4"]).files
    assert all(f.library.startswith("lz4/") and f.root == "lz4" for f in found)
    assert any("_block" in f.library for f in found)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    members = {
        "pkg/libstored.so": (LIBRARY, STORED),
        "pkg/libdeflated.so": (LIBRARY, DEFLATED),
        "pkg/kernels.fatbin": (FATBIN, DEFLATED),
        "pkg/code.py": (LIBRARY, STORED),  # not opened: no library has this ending
        "pkg/data.bin": (b"data", DEFLATED),
        "pkg/empty.so": (b"", STORED),
        "pkg/folder/": (b"", STORED),
    }
    return containers.wheel(tmp_path / "pkg-1.0-py3-none-any.whl", members)


def test_a_wheel(wheel: Path) -> None:
    found = discover([wheel])
    assert [f.library for f in found.files] == ["pkg/kernels.fatbin", "pkg/libdeflated.so", "pkg/libstored.so"]
    assert {f.root for f in found.files} == {wheel.name}
    assert found.n_skipped == 3
    assert [content(f) for f in found.files] == [FATBIN, LIBRARY, LIBRARY]


def test_a_wheel_in_a_folder(wheel: Path) -> None:
    assert names(wheel.parent) == [f"{wheel.name}/{f.library}" for f in discover([wheel]).files]


def test_a_stored_member_is_mapped_in_place(wheel: Path) -> None:
    entry = next(f for f in discover([wheel]).files if f.member == "pkg/libstored.so")
    with opened(entry) as reader:
        assert reader.map is not None
        assert reader.base == wheel.read_bytes().index(LIBRARY)


def test_a_large_member_is_unpacked_beside_memory(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "IN_MEMORY", 100)
    entry = next(f for f in discover([wheel]).files if f.member == "pkg/libdeflated.so")
    with opened(entry) as reader:
        assert reader.map is not None
        reader.release()
    assert content(entry) == LIBRARY


def test_a_member_can_be_damaged_without_harm_to_its_reader(tmp_path: Path) -> None:
    """The map of an unpacked member must not be closed under the views that an error still holds."""
    path = containers.wheel(tmp_path / "x.whl", {"bad.so": (LIBRARY[:-70], DEFLATED)})
    (entry,) = discover([path]).files
    with pytest.raises(FormatError, match="behind the end"), opened(entry) as reader:
        raise reader.error(0, "a section ends behind the end")


def test_two_members_of_one_name_are_the_later_one(tmp_path: Path) -> None:
    path = tmp_path / "twice.whl"
    with pytest.warns(UserWarning, match="Duplicate name"):
        containers.wheel(path, [("lib.so", b"\x7fELF first", STORED), ("lib.so", LIBRARY, STORED)])
    (entry,) = discover([path]).files
    assert content(entry) == LIBRARY


LIES = [
    ("stored", {"file_size": 1 << 30}, "which cannot be"),
    ("stored", {"file_size": 1 << 30, "compress_size": 1 << 30}, "cannot be read"),
    ("deflated", {"file_size": 0xFFFFFFF0}, "which cannot be"),
    ("deflated", {"file_size": len(LIBRARY) + 1}, "cannot be read"),
    ("deflated", {"compress_size": 20}, "cannot be read"),
    ("deflated", {"method": 0}, "cannot be read"),
    ("deflated", {"method": 12}, "compressed by method 12"),
    ("deflated", {"method": 14}, "compressed by method 14"),
    ("deflated", {"method": 99}, "compressed by method 99"),
    ("stored", {"flags": 1}, "encrypted"),
    ("stored", {"header_offset": 1 << 31}, "cannot be read"),
    ("stored", {"header_offset": 1}, "cannot be read"),
]


@pytest.mark.parametrize(("kind", "lie", "message"), LIES)
def test_wheels_that_lie(kind: str, lie: dict[str, int], message: str, tmp_path: Path) -> None:
    method = STORED if kind == "stored" else DEFLATED
    path = containers.wheel(tmp_path / "x.whl", {"lib.so": (LIBRARY, method)})
    containers.patch_directory(path, "lib.so", **lie)
    with pytest.raises(FormatError, match=message):
        _ = [content(entry) for entry in discover([path]).files]


def test_a_damaged_wheel_in_a_folder_does_not_hide_the_rest(tmp_path: Path) -> None:
    containers.wheel(tmp_path / "bad.whl", {"lib.so": (LIBRARY, DEFLATED)})
    containers.patch_directory(tmp_path / "bad.whl", "lib.so", method=0)
    (tmp_path / "cut.whl").write_bytes((tmp_path / "bad.whl").read_bytes()[:200])
    (tmp_path / "good.so").write_bytes(LIBRARY)
    found = discover([tmp_path]).files
    assert [f.library for f in found] == ["bad.whl", "cut.whl", "good.so"]
    for entry in found[:2]:
        assert "cannot be read" in entry.error
        with pytest.raises(FormatError, match="cannot be read"):
            content(entry)
    assert content(found[2]) == LIBRARY


@pytest.mark.parametrize("name", ["cut.whl", "cut.zip"])
def test_a_wheel_cut_short(name: str, tmp_path: Path) -> None:
    path = containers.wheel(tmp_path / name, {"lib.so": (LIBRARY, DEFLATED)})
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(FormatError, match="the wheel cannot be read") as caught:
        discover([path])
    assert caught.value.hint == "download it again"


def test_bytes_in_front_of_a_wheel(tmp_path: Path) -> None:
    """Python's zipfile reads it as it is; then the members must be found where they are."""
    path = containers.wheel(tmp_path / "x.zip", {"lib.so": (LIBRARY, STORED)})
    path.write_bytes(b"PK" + b"#" * 1000 + path.read_bytes())
    (entry,) = discover([path]).files
    assert content(entry) == LIBRARY


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A folder that is not ours, seen by a user without rights (root reads everything)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for path in ("open.so", "closed.so", "closed.whl", "closed/lib.so"):
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_bytes(LIBRARY)
        for path in ("closed.so", "closed.whl", "closed"):
            (folder / path).chmod(0)
        is_root = os.geteuid() == 0
        try:
            if is_root:
                os.seteuid(65534)
            if not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
                pytest.skip("a user without rights cannot enter the folder for temporary files")
            yield folder
        finally:
            if is_root:
                os.seteuid(0)
            (folder / "closed").chmod(0o755)


def test_what_cannot_be_read_is_listed_with_the_reason(as_nobody: Path) -> None:
    found = {f.library: f for f in discover([as_nobody]).files}
    assert set(found) == {"open.so", "closed.so", "closed.whl", "closed"}
    assert content(found["open.so"]) == LIBRARY
    for name in ("closed.so", "closed.whl", "closed"):
        with pytest.raises(FormatError, match="Permission denied"):
            content(found[name])
    with pytest.raises(GpubloatError, match="Permission denied"):
        discover([as_nobody / "closed" / "lib.so"])


def test_the_wheel_reader_agrees_with_zipfile(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        assert all(content(f) == file.read(f.member or "") for f in discover([wheel]).files)
