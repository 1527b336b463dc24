"""Bytes of a folder of packages, with some of its files replaced by copies: logical, on disk, and as a zstd tar."""

from __future__ import annotations

import os
import stat
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import zstandard

from gpubloat.libraries import manifest

LEVEL = 3
PIECE = 1 << 20
METHOD = {
    "folder": "the folder of packages that torch is in; copies: whose copies replaced libraries in it, or none",
    "allocated_bytes": "blocks of 512 bytes, each file once",
    "zstd_bytes": f"a tar of the folder through zstd, level {LEVEL}",
}


class Size(NamedTuple):
    """Of all files below a folder; one with several names counts once. `zstd_bytes` is of the whole tar."""

    n_files: int
    n_replaced: int
    logical_bytes: int
    allocated_bytes: int
    tar_bytes: int
    zstd_bytes: int
    wall_s: float


class Counter:
    """A file that only counts what is written, and may pass it on."""

    def __init__(self, to: zstandard.ZstdCompressionWriter | None = None) -> None:
        self.to, self.bytes = to, 0

    def write(self, data: bytes) -> int:
        self.bytes += len(data)
        if self.to is not None:
            self.to.write(data)
        return len(data)


def copies(folder: Path) -> dict[tuple[int, int], Path]:
    """Device and inode of an original -> its copy, of a debloated folder."""
    return {_file(os.stat(entry.path)): folder / entry.copy for entry in manifest.read(folder).libraries}


def size(root: Path, replaced: Mapping[tuple[int, int], Path]) -> Size:
    """One pass over `root`, in the order of names. Nothing is written."""
    started = time.monotonic()
    packed = Counter()
    seen: set[tuple[int, int]] = set()
    n_files = n_replaced = logical = allocated = 0
    with zstandard.ZstdCompressor(level=LEVEL, threads=-1).stream_writer(packed, write_size=PIECE) as stream:
        plain = Counter(stream)
        with tarfile.open(fileobj=plain, mode="w|", bufsize=PIECE) as tar:
            for path in _below(root):
                found = path.lstat()
                if _file(found) in seen:
                    continue
                seen.add(_file(found))
                copy = replaced.get(_file(found), path)
                tar.add(copy, arcname=path.relative_to(root), recursive=False)
                if not stat.S_ISDIR(found.st_mode):
                    found = copy.lstat()
                    n_files, n_replaced = n_files + 1, n_replaced + (copy != path)
                    logical, allocated = logical + found.st_size, allocated + 512 * found.st_blocks
    taken = round(time.monotonic() - started, 3)
    return Size(n_files, n_replaced, logical, allocated, plain.bytes, packed.bytes, taken)


def _file(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _below(root: Path) -> list[Path]:
    found = []
    for folder, folders, files in os.walk(root):
        found += [Path(folder, name) for name in (*folders, *files)]
    return sorted(found)
