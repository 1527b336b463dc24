"""What a user names, as files to scan: a file, a folder, a wheel, or an installed package."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import mmap
import os
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from struct import Struct
from typing import IO

from gpubloat.errors import FormatError, GpubloatError
from gpubloat.libraries.elf import MAGIC as ELF_MAGIC
from gpubloat.libraries.fatbin import MAGIC as FATBIN_MAGIC
from gpubloat.libraries.fatbin import OLD_MAGIC
from gpubloat.libraries.reader import Reader

AR_MAGIC = b"!<arch>\n"
THIN_MAGIC = b"!<thin>\n"
MAGICS = (ELF_MAGIC, AR_MAGIC, THIN_MAGIC, FATBIN_MAGIC.to_bytes(4, "little"), OLD_MAGIC.to_bytes(4, "little"))
MAX_NAME = 1024  # characters of a wheel member's name: it stands in every row of the tables
IN_MEMORY = 256 << 20  # a compressed wheel member up to this size is unpacked in memory, a larger one beside it
_LOCAL_HEADER = Struct("<4s22xHH")
# What Python's zipfile raises for damaged archives.
_WHEEL_ERRORS = (
    zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, RuntimeError, EOFError, OSError, ValueError,
    LookupError, OverflowError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Input:
    """One file to scan. `library` is its name in the tables; `member` is set for a file inside a wheel."""

    library: str
    root: str
    path: str
    member: str | None = None
    is_named: bool = False  # the user named this very file, so an error in it is the user's error
    error: str = ""  # why it cannot be read, where that was found while listing


@dataclass(frozen=True, slots=True)
class Inputs:
    """All files of a scan in a stable order, and how many files of the folders and wheels hold no code."""

    files: list[Input]
    n_skipped: int


def discover(paths: Sequence[str | os.PathLike[str]]) -> Inputs:
    """List the files behind `paths`.

    In folders and wheels, a file counts if its first bytes are those of ELF, of an archive or of a fatbin. Symbolic
    links inside folders are not followed; a file that is reached twice is listed once. Raises GpubloatError for a path
    that does not exist and is no installed package, and for a wheel that cannot be read.
    """
    files: list[Input] = []
    seen: set[tuple[int, int]] = set()
    skipped = 0
    roots = [(os.fspath(p), *_resolve(os.fspath(p))) for p in paths]
    for name, path, members in roots:
        if members is not None:
            found, other = _package(name, members)
        elif path.is_dir():
            found, other = _folder(path)
        elif not path.is_file():
            raise GpubloatError(f"{name} is neither a file nor a folder", "a pipe or a device cannot be scanned")
        elif _is_wheel(path):
            found, other = _wheel(path, path.name)
        else:
            found, other = [Input(path.name, path.name, str(path), is_named=True)], 0
        skipped += other
        for entry in found:
            if entry.member is None:
                place = _identity(entry.path)
                if place in seen:
                    continue
                seen |= {place} if place else set()
            files.append(replace(entry, library=_text(entry.library), root=_text(entry.root)))
    return Inputs(_unique(files), skipped)


def _resolve(name: str) -> tuple[Path, list[Path] | None]:
    """A path that exists, or the files of an installed package of that name."""
    path = Path(name)
    try:
        if path.exists():
            return path, None
    except OSError as error:
        raise GpubloatError(f"{name}: {error.strerror}") from None
    if "/" not in name and os.sep not in name:
        try:
            listed = importlib.metadata.files(name) or []
            return path, [Path(str(f.locate())) for f in listed]
        except (importlib.metadata.PackageNotFoundError, ValueError):
            pass
        try:
            spec = importlib.util.find_spec(name) if name.isidentifier() else None
        except (ImportError, ValueError):
            spec = None
        if spec and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations))), None
    raise GpubloatError(
        f"{name}: no such file or folder, and no installed package of that name",
        "give a library, a folder, a wheel, or the name of a package installed beside gpubloat",
    )


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:  # the scan will say why
        return None
    return found.st_dev, found.st_ino


def _text(name: str) -> str:
    """A file name as text: Linux allows any bytes in it, tables hold UTF-8."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _is_wheel(path: Path) -> bool:
    return path.suffix.lower() in (".whl", ".zip") and _has_code(path, (b"PK",))


def _folder(root: Path) -> tuple[list[Input], int]:
    found: list[Input] = []
    skipped = 0
    home = root.resolve().name or "/"
    errors: list[OSError] = []
    for folder, folders, names in os.walk(root, onerror=errors.append):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            if not _is_regular(path):
                continue
            relative = path.relative_to(root).as_posix()
            if path.suffix.lower() == ".whl" and _is_wheel(path):
                try:
                    inner, other = _wheel(path, name)
                    found += [replace(i, library=f"{relative}/{i.member}") for i in inner]
                    skipped += other
                except FormatError as error:
                    found.append(Input(relative, home, str(path), error=error.detail))
            elif _has_code(path):
                found.append(Input(relative, home, str(path)))
            else:
                skipped += 1
    for unlisted in errors:
        relative, reason = (
            Path(unlisted.filename).relative_to(root).as_posix(),
            f"cannot be listed: {unlisted.strerror}",
        )
        found.append(Input(relative, home, unlisted.filename, error=reason))
    return found, skipped


def _is_regular(path: Path) -> bool:
    """A file, and no link to one. True if that cannot be told: the scan then says why."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return True


def _package(name: str, paths: list[Path]) -> tuple[list[Input], int]:
    regular = sorted(p for p in paths if p.exists() and _is_regular(p))
    with_code = [p for p in regular if _has_code(p)]
    home = Path(os.path.commonpath([p.parent.resolve() for p in with_code])) if with_code else Path()
    site = next((p for p in [home, *home.parents] if p.name in ("site-packages", "dist-packages")), home)
    found = []
    for path in with_code:
        resolved = path.resolve()
        inside = resolved.is_relative_to(site)
        found.append(Input(resolved.relative_to(site).as_posix() if inside else path.name, name, str(path)))
    return found, len(regular) - len(with_code)


def _has_code(path: Path, magics: tuple[bytes, ...] = MAGICS) -> bool:
    """Whether the file starts with one of `magics`. True if it cannot be read: the scan then says why."""
    try:
        with path.open("rb") as file:
            return file.read(8).startswith(magics)
    except OSError:
        return True


def _wheel(path: Path, root: str) -> tuple[list[Input], int]:
    found, skipped = [], 0
    try:
        with zipfile.ZipFile(path) as wheel:
            # Of two members with one name, the later one is what unpacking the wheel leaves.
            for _, info in sorted({i.filename: i for i in wheel.infolist()}.items()):
                if info.is_dir():
                    continue
                # Only what can hold code is opened: reading the first bytes of 10,000 .py members costs seconds.
                if PurePosixPath(info.filename).suffix in (".py", ".pyi", ".h", ".hpp", ".cuh", ".txt", ".json", ".md"):
                    skipped += 1
                    continue
                with _member(wheel, info) as member:
                    has_code = member.read(8).startswith(MAGICS)
                if has_code:
                    found.append(Input(info.filename, root, str(path), info.filename))
                else:
                    skipped += 1
    except _WHEEL_ERRORS as error:
        raise FormatError(_text(path.name), 0, f"the wheel cannot be read: {error}", "download it again") from None
    return found, skipped


def _member(wheel: zipfile.ZipFile, info: zipfile.ZipInfo) -> IO[bytes]:
    """A member to read from. Wheels are stored or deflated; the sizes are checked as far as they can be."""
    if len(info.filename) > MAX_NAME:
        raise zipfile.BadZipFile(f"a member has a name of {len(info.filename)} characters")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise zipfile.BadZipFile(f"{info.filename} is compressed by method {info.compress_type}")
    # Deflate packs 1032 to 1 at most: a larger claim is a lie, refused before memory is taken for it.
    most = info.compress_size if info.compress_type == zipfile.ZIP_STORED else 1032 * info.compress_size + 1024
    if info.file_size > most:
        raise zipfile.BadZipFile(f"{info.filename} claims {info.file_size} bytes, which cannot be")
    return wheel.open(info)


def _unique(files: list[Input]) -> list[Input]:
    """Names that collide get the name of their root in front, and a number where that is not enough."""
    counts: dict[str, int] = {}
    for entry in files:
        counts[entry.library] = counts.get(entry.library, 0) + 1
    taken: set[str] = set()
    result = []
    for entry in files:
        name = entry.library
        if counts[name] > 1:
            parent = entry.root if entry.root != name else Path(entry.path).resolve().parent.name
            name = f"{parent}/{name}"
        base, number = name, 2
        while name in taken:
            name, number = f"{base}#{number}", number + 1
        taken.add(name)
        result.append(replace(entry, library=name))
    return result


@contextmanager
def opened(entry: Input) -> Iterator[Reader]:
    """The bytes of one input, mapped. A stored wheel member is mapped in place, a compressed one unpacked first."""
    try:
        if entry.error:
            raise FormatError(entry.library, 0, entry.error)
        reader = _reader(entry)
    except _WHEEL_ERRORS as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise FormatError(entry.library, 0, f"cannot be read: {reason}") from None
    yield reader


def _reader(entry: Input) -> Reader:
    with open(entry.path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if entry.member is None:
            return _mapped(entry.library, file, 0, size)
        with zipfile.ZipFile(file) as wheel:
            info = wheel.getinfo(entry.member)
            with _member(wheel, info) as member:
                if info.compress_type != zipfile.ZIP_STORED:
                    return _unpacked(entry.library, member, info.file_size)
                file.seek(info.header_offset)
                _, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
                start = info.header_offset + _LOCAL_HEADER.size + name + extra
                if start + info.file_size > size:
                    raise zipfile.BadZipFile(f"{entry.member} runs out of the wheel")
                return _mapped(entry.library, file, start, info.file_size)


def _mapped(name: str, file: IO[bytes], start: int, size: int) -> Reader:
    if not size:
        return Reader(name, b"")
    # The map lives as long as the reader, also when the file is closed (and, without a name, gone).
    return Reader(name, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), start, size)


def _unpacked(name: str, member: IO[bytes], size: int) -> Reader:
    """Unpack `member` into memory, or into an unnamed temporary file when it is large, so that pages can be dropped."""
    if not size:
        return Reader(name, b"")
    if size <= IN_MEMORY:
        memory = mmap.mmap(-1, size)
        _copy(member, memory, size)
        reader = Reader(name, memory)
        reader.map = None  # its pages have no file behind them and must not be dropped
        return reader
    with tempfile.TemporaryFile() as file:
        _copy(member, file, size)
        file.flush()
        return _mapped(name, file, 0, size)


def _copy(member: IO[bytes], target: IO[bytes] | mmap.mmap, size: int) -> None:
    done = 0
    while piece := member.read(1 << 20):
        done += target.write(piece)
    if done != size:
        raise zipfile.BadZipFile(f"a member has {done} bytes instead of {size}")
