"""Compile the sources of this folder on first use; the result is kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpubloat.errors import GpubloatError, MissingToolError

FOLDER = Path(__file__).parent
_FLAGS = (
    "-O2", "-g", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2", "-Wall", "-Wextra", "-fPIC", "-shared",
    "-fvisibility=hidden",
)  # fmt: skip


def cache() -> Path:
    """Where compiled libraries are kept: $GPUBLOAT_CACHE, else gpubloat in the user's cache folder."""
    given = os.environ.get("GPUBLOAT_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpubloat"


def compiler(cpp: bool = False) -> str:
    """The C compiler: $CC, else the first of cc, gcc and clang. MissingToolError if there is none.

    With `cpp`, that of C++: $CXX, c++, g++, clang++.
    """
    names = ("CXX", "c++", "g++", "clang++") if cpp else ("CC", "cc", "gcc", "clang")
    for name in (os.environ.get(names[0]), *names[1:]):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise MissingToolError(f"a {'C++' if cpp else 'C'} compiler", f"apt install {names[2]}, or set {names[0]}")


def library(name: str, sources: Sequence[str], flags: Sequence[str] = ()) -> Path:
    """Path of the shared library `name` built from `sources` (names in this folder), compiled if need be.

    Sources in C, or in C++ (``.cpp``).
    `flags` go to the compiler behind its usual ones. The file name holds a digest of sources, headers, flags and
    compiler, so that a changed source is compiled anew. Raises MissingToolError without a compiler, GpubloatError with
    the compiler's first complaint.
    """
    tool = compiler(any(source.endswith(".cpp") for source in sources))
    digest = hashlib.sha256("\0".join([tool, *_FLAGS, *flags, *sources]).encode())
    for path in [*(FOLDER / source for source in sources), *sorted(FOLDER.rglob("*.h"))]:
        digest.update(path.read_bytes())
    target = cache() / f"{name}-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, built = tempfile.mkstemp(prefix=f".{name}-", suffix=".so", dir=target.parent)
    except OSError as error:
        raise GpubloatError(
            f"{target.parent} cannot be written: {error.strerror}", "set GPUBLOAT_CACHE to another folder"
        ) from None
    os.close(handle)
    try:
        command = [tool, *_FLAGS, "-o", built, *(str(FOLDER / source) for source in sources), *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            complaint = lines[0] if lines else "no message"
            raise GpubloatError(f"{name} cannot be compiled: {complaint}", f"compiler: {tool}")
        os.chmod(built, 0o755)
        os.replace(built, target)
    finally:
        Path(built).unlink(missing_ok=True)
    return target
