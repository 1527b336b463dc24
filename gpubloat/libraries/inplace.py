"""Put the copies of a debloated folder in the place of the originals, and the originals back: for container images.

Each file is replaced by renaming, so that a program that has it open keeps the old one, and nobody sees half a file.
The original is kept in originals/ of the folder, and is checked by its sha256 before anything happens.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpubloat.errors import GpubloatError
from gpubloat.libraries import manifest
from gpubloat.libraries.elf import PAGE
from gpubloat.libraries.locate import CPU
from gpubloat.libraries.manifest import ORIGINALS, Entry

_CHUNK = 4 << 20


def apply(folder: str | os.PathLike[str]) -> list[str]:
    """Replace the originals by their copies; returns the names of the libraries that were replaced.

    Libraries that are replaced already are left alone, and those `in_use`. If one fails, those replaced before it are
    put back.

    Raises
    ------
    GpubloatError : an original or a copy is not what the manifest says (sha256), or cannot be written.
    """
    root = Path(os.path.abspath(folder))
    own = set(in_use(root))
    entries = [entry for entry in manifest.read(root).libraries if entry.library not in own]
    todo = []
    for entry in entries:
        _checked(manifest.inside(root, entry.copy), entry.sha256_copy, f"the copy of {entry.library}", "debloat again")
        found = _digest(Path(entry.path), entry.library)
        if found not in (entry.sha256, entry.sha256_copy):
            hint = "trace again, with the libraries that are there now"
            raise GpubloatError(f"{entry.library} is not the file that was debloated: its sha256 differs", hint)
        if found == entry.sha256:
            todo.append(entry)
    done: list[Entry] = []
    try:
        for entry in todo:
            kept = _kept(root, entry)
            if not kept.exists():
                with _writing(entry, kept.parent):
                    _put(Path(entry.path), kept, entry.sha256)
            with _writing(entry, Path(entry.path).parent):
                _put(root / entry.copy, Path(entry.path), entry.sha256_copy, like=Path(entry.path))
            done.append(entry)
    except BaseException:
        for entry in reversed(done):
            _back(root, entry)
        raise
    return [entry.library for entry in done]


def in_use(folder: str | os.PathLike[str]) -> list[str]:
    """Names of the libraries that this very process runs on, and whose copies lack CPU code.

    With the copy in its place the next gpubloat would end at a function that is gone, `restore` included.
    """
    root = Path(os.path.abspath(folder))
    mapped = set()
    try:
        with open("/proc/self/maps", "rb") as file:
            mapped = {line.split(None, 5)[5].rstrip(b"\n") for line in file if line.count(b"/")}
    except OSError:  # not Linux: `exec` is not for this system, and there is nothing to trace here
        return []
    own = [e for e in manifest.read(root).libraries if _as_mapped(e.path) in mapped]
    return [e.library for e in own if (manifest.ranges(root, e)["kind"] == CPU).any()]


def _as_mapped(path: str) -> bytes:
    return os.fsencode(os.path.realpath(path)).replace(b"\n", b"\\012")


def restore(folder: str | os.PathLike[str], library: str | None = None) -> list[str]:
    """Put the originals back, byte for byte; all, or the one named. Returns the names of those put back.

    Libraries that are not replaced are left alone.

    Raises
    ------
    GpubloatError : `library` is not in the folder; what is in its place is neither original nor copy (somebody else has
    changed it since); the kept original is damaged; a file cannot be written.
    """
    root = Path(os.path.abspath(folder))
    entries = manifest.read(root).libraries
    if library is not None:
        names = [e.library for e in entries]
        if library not in names:
            raise GpubloatError(
                f"{library} has no copy in {folder}", f"libraries with one: {', '.join(names) or 'none'}"
            )
        entries = [e for e in entries if e.library == library]
    todo = []
    for entry in entries:
        kept = _kept(root, entry)
        path = Path(entry.path)
        found = _digest(path, entry.library) if os.path.exists(path) else ""
        if found == entry.sha256 or (not found and not kept.exists()):
            continue
        if found not in ("", entry.sha256_copy):
            hint = "it was installed anew since; there is nothing to put back"
            raise GpubloatError(f"{entry.path} is neither the original nor the debloated copy", hint)
        _checked(kept, entry.sha256, f"the kept original of {entry.library}", "install the package again")
        todo.append(entry)
    for entry in todo:
        _back(root, entry)
    return [entry.library for entry in todo]


def _back(root: Path, entry: Entry) -> None:
    kept = _kept(root, entry)
    with _writing(entry, Path(entry.path).parent):
        _put(kept, Path(entry.path), entry.sha256, like=kept)
        kept.unlink()
    for parent in kept.parents:  # so that the folder is as before
        if parent == root or any(parent.iterdir()):
            break
        parent.rmdir()


def _kept(root: Path, entry: Entry) -> Path:
    return manifest.inside(root, f"{ORIGINALS}/{entry.path.lstrip('/')}")


def _put(source: Path, target: Path, sha256: str, *, like: Path | None = None) -> None:
    """Copy `source` over `target` (a link is followed) by way of a temporary file beside it; holes stay holes."""
    target = Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name[:64]}-", dir=target.parent)
    try:
        with open(source, "rb") as old, open(handle, "wb") as new:
            digest = hashlib.sha256()
            while data := old.read(_CHUNK):
                digest.update(data)
                _write(new.fileno(), data)
            os.truncate(new.fileno(), os.fstat(old.fileno()).st_size)
            _dress(new.fileno(), os.stat(like or source))
            os.fsync(new.fileno())
        if digest.hexdigest() != sha256:
            raise GpubloatError(f"{source} changed while it was copied", "try again")
        os.replace(name, target)
    except BaseException:
        if os.path.exists(name):
            os.unlink(name)
        raise


def _write(file: int, data: bytes) -> None:
    """Write `data`, pages of zeros excepted: the file ends up sparse."""
    zero = bytes(PAGE)
    for at in range(0, len(data), PAGE):
        page = data[at : at + PAGE]
        if page == zero[: len(page)]:
            os.lseek(file, len(page), os.SEEK_CUR)
            continue
        view = memoryview(page)
        while view:
            view = view[os.write(file, view) :]


def _dress(file: int, model: os.stat_result) -> None:
    """Rights, times, and the owner where that is allowed."""
    os.fchmod(file, stat.S_IMODE(model.st_mode))
    os.utime(file, ns=(model.st_atime_ns, model.st_mtime_ns))
    if (model.st_uid, model.st_gid) != (os.geteuid(), os.getegid()):
        os.fchown(file, model.st_uid, model.st_gid)


def _checked(path: Path, sha256: str, what: str, hint: str) -> None:
    if not path.is_file():
        raise GpubloatError(f"{what} is missing: no file {path}", hint)
    if _digest(path, what) != sha256:
        raise GpubloatError(f"{what} is damaged: the sha256 of {path} differs", hint)


def _digest(path: Path, what: str) -> str:
    try:
        manifest.refuse_endless(path)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise GpubloatError(f"{what} cannot be read: {path}: {error.strerror}") from None


@contextmanager
def _writing(entry: Entry, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise GpubloatError(f"{entry.library} cannot be replaced: {folder}: {error.strerror or error}") from None
