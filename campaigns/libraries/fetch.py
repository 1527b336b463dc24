"""Download pinned wheels of PyPI for x86-64 Linux, on any machine, and check their sha256. Standard library only.

python campaigns/libraries/fetch.py DEST                                    the sample: nvJPEG, 4 MB
python campaigns/libraries/fetch.py DEST NAME==VERSION... --sha256 HEX...   these; without --sha256, as PyPI has them
python campaigns/libraries/fetch.py DEST --census data/measured/census-...  all wheels of a census again

A wheel that is in DEST already is not downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# pip takes the wheels of this very machine unless it is told all the names that x86-64 Linux goes by.
PLATFORMS = ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64", "linux_x86_64"]
PLATFORMS += [f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)]

SAMPLE = "nvidia-nvjpeg"
# Version and sha256 of the wheels that tests and the sample use, chosen for what they show per MB.
PINNED = {
    # All in .nv_fatbin, zstd, 10 targets. 4 MB
    SAMPLE: ("13.3.2.43", "27f9c4a25a73f1d1ad35c342c8d657c8ff43e23877f338ef15fb2602ac2e5aa8"),
    # Cubins that are not compressed, PTX in LZ4. 1 MB
    "nvidia-cufile": ("1.15.1.6", "08a3ecefae5a01c7f5117351c64f17c7c62efa5fffdbe24fc7d298da19cd0b44"),
    # An archive with relocatable code. 2 MB
    "nvidia-cuda-runtime": ("13.0.96", "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548"),
    # Fatbins and bare cubins in .data and .rodata, loaded by hand. 11 MB
    "nvidia-cuda-cupti": ("13.0.85", "4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8"),
    # Relocatable code beside the linked one, in LZ4 and zstd; code for AMD; two GPUs that CUDA 13 has dropped. 43 MB
    "bitsandbytes": ("0.50.2", "55348a9a4a21bfd99cf8c7b32fe67b4030ae5c2a05738e03c1747f65fa6ec283"),
}


class FetchError(Exception):
    """The wheel cannot be downloaded: no network, no pip, or no such file."""


class HashError(Exception):
    """A wheel was downloaded, and it is not the one that was asked for."""


def fetch(name: str, version: str, sha256: str, folder: Path, python: str | None = None) -> Path:
    """The wheel `name`==`version` in `folder`, downloaded with pip if it is not there.

    Parameters
    ----------
    name, version : as on PyPI.
    sha256 : of the wheel, in hex; empty accepts what the index serves.
    folder : where it is kept.
    python : such as ``"3.11"``, for a wheel of one Python version; default, the running one.

    Raises
    ------
    FetchError : it cannot be downloaded. HashError : the file is another one.
    """
    if found := _present(name, version, sha256, folder):
        return found
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
    command += ["--only-binary=:all:", *(f"--platform={p}" for p in PLATFORMS)]
    command += ["--python-version", python] if python else []
    wanted = f"{name}=={version}" + (f" --hash=sha256:{sha256}" if sha256 else "")
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary:
        listed = Path(temporary, "requirements.txt")
        listed.write_text(wanted + "\n", encoding="utf-8")
        ended = subprocess.run([*command, "--dest", temporary, "-r", str(listed)], capture_output=True, text=True)
        for wheel in Path(temporary).glob("*.whl"):  # whole at once: another process may be waiting for it, too
            wheel.replace(folder / wheel.name)
    if ended.returncode:
        complaint = ended.stderr.strip()
        if "DO NOT MATCH THE HASHES" in complaint:
            raise HashError(f"{name}=={version}: {complaint[-500:]}")
        reason = (complaint.splitlines() or ["no reason given"])[-1]
        raise FetchError(f"pip cannot download {name}=={version}: {reason}")
    found = _present(name, version, sha256, folder)
    if found is None:
        raise HashError(f"{name}=={version}: what pip downloaded has another name or sha256")
    return found


def pinned(name: str, folder: Path) -> Path:
    """One of `PINNED` in `folder`, downloaded if it is not there."""
    return fetch(name, *PINNED[name], folder)


def split(wheel: str) -> tuple[str, str, str]:
    """Package, version and Python tag of a wheel's file name: ``("nvidia-nvjpeg", "13.3.2.43", "py3")``."""
    parts = wheel.removesuffix(".whl").split("-")
    return parts[0].replace("_", "-"), parts[1], parts[-3]


def digest(path: Path) -> str:
    """sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _present(name: str, version: str, sha256: str, folder: Path) -> Path | None:
    wanted = re.sub(r"[-_.]+", "-", name).lower()
    for path in sorted(folder.glob("*.whl")):
        package, found, _ = split(path.name)
        same = re.sub(r"[-_.]+", "-", package).lower() == wanted and found == version
        if same and (not sha256 or digest(path) == sha256):
            return path
    return None


def _of_census(folder: Path) -> list[tuple[str, str, str, str | None]]:
    """(name, version, sha256, Python) of the wheels that a census names."""
    record = json.loads((folder / "run.json").read_text("utf-8"))
    found: list[tuple[str, str, str, str | None]] = []
    for wheel in record["inputs"]:
        tag = re.match(r"cp3(\d+)$", split(wheel["name"])[2])
        found.append((wheel["package"], wheel["version"], wheel["sha256"], f"3.{tag[1]}" if tag else None))
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DEST", help="where the wheels are kept")
    parser.add_argument("packages", nargs="*", metavar="NAME==VERSION")
    parser.add_argument("--sha256", nargs="*", default=[], help="one for each package, in the same order")
    parser.add_argument("--python", help="for wheels of one Python version, such as 3.11")
    parser.add_argument("--census", type=Path, help="a folder below data/measured: download all its wheels")
    given = parser.parse_args()
    if given.sha256 and len(given.sha256) != len(given.packages):
        parser.error("give one --sha256 for each package")
    if any(len(p.split("==")) != 2 for p in given.packages):
        parser.error("write packages as NAME==VERSION")
    if not given.packages and not given.census:
        given.packages, given.sha256 = [f"{SAMPLE}=={PINNED[SAMPLE][0]}"], [PINNED[SAMPLE][1]]
    wanted = [
        (*package.split("=="), sha256, given.python)
        for package, sha256 in zip(given.packages, given.sha256 or [""] * len(given.packages), strict=True)
    ]
    try:
        for name, version, sha256, python in wanted + (_of_census(given.census) if given.census else []):
            print(fetch(name, version, sha256, given.folder, python), flush=True)
    except (FetchError, HashError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
