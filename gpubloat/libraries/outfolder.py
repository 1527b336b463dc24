"""A folder that appears whole or not at all, however large."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpubloat.errors import GpubloatError
from gpubloat.libraries.manifest import NAME, ORIGINALS
from gpubloat.run import refuse_overwrite


@contextmanager
def appearing(folder: Path, force: bool) -> Iterator[Path]:
    """A new folder beside `folder` to write into; it takes that name if the block succeeds.

    With `force`, a debloated folder that is there already is replaced as a whole, unless originals are kept in it.
    An OSError of the block (full disk, no right to write) becomes a GpubloatError, and nothing is left behind.
    """
    folder = Path(os.path.abspath(folder))
    check(folder, force)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise GpubloatError(f"{folder} cannot be written: {error.strerror}") from None
    try:
        yield new
        new.chmod(0o777 & ~_umask())
        old = None
        if folder.is_dir() and any(folder.iterdir()):
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            os.replace(folder, old)
        os.replace(new, folder)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise GpubloatError(f"{folder} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)


def check(folder: Path, force: bool) -> None:
    """GpubloatError if `folder` may not be written."""
    refuse_overwrite(folder, force)
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / NAME).is_file():
        raise GpubloatError(f"{folder} holds something else than debloated libraries", "name another folder")
    if (folder / ORIGINALS).exists():
        hint = f"put them back first: gpubloat libraries restore {folder}"
        raise GpubloatError(f"{folder} keeps the originals of libraries that were replaced", hint)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
