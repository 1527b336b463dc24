"""Other readers of the same files, to compare with: cuobjdump, cubloaty, LIEF, readelf. No tests in here.

Each function returns plain counters in the words of `gpubloat.tables.libraries`. What cuobjdump can see at all is
said once, in `visible`; everything that it can see must be equal.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pandas as pd

Path = str | os.PathLike[str]
NO_DEVICE_CODE = "does not contain device code"
NO_CUOBJDUMP = "cuobjdump is missing: pip install nvidia-cuda-cuobjdump, or put the CUDA toolkit on PATH"
NO_CUBLOATY = "cubloaty is missing: pip install --pre cubloaty"

_LISTED = re.compile(r"^(?:ELF|PTX) file +\d+: .*\.(sm_\w+)\.(cubin|ptx)$")
_PLAIN, _RELOCATABLE = ".nv_fatbin", "__nv_relfatbin"


class OracleError(Exception):
    """An oracle is not installed, or refuses the file. The text serves as reason for a skip."""


def cuobjdump() -> str:
    """Path of the program: from the wheel nvidia-cuda-cuobjdump, else from PATH. OracleError if there is none."""
    try:
        for file in importlib.metadata.files("nvidia-cuda-cuobjdump") or []:
            if file.name == "cuobjdump" and os.access(file.locate(), os.X_OK):
                return str(file.locate())
    except importlib.metadata.PackageNotFoundError:
        pass
    if found := shutil.which("cuobjdump"):
        return found
    raise OracleError(NO_CUOBJDUMP)


def cuobjdump_version(tool: str | None = None) -> str:
    """Version as the program says it: ``13.5.37``."""
    text = subprocess.run([tool or cuobjdump(), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", text)
    return found[1] if found else text.strip().splitlines()[-1]


def _lines(path: Path, option: str, all: bool, tool: str | None) -> Iterator[str]:
    """Output of cuobjdump line by line; nothing for a file without device code. OracleError if it gives up."""
    command = [tool or cuobjdump(), option, *(["-all"] if all else []), os.fspath(path)]
    # Its lists go to hundreds of MB: they are not kept. Its complaints are few lines.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace") as run:
        assert run.stdout is not None
        assert run.stderr is not None
        yield from run.stdout
        complaint = run.stderr.read()
    # It ends with 255 where a file holds nothing for it, and also after real errors: the text tells them apart.
    if run.returncode and NO_DEVICE_CODE not in complaint:
        raise OracleError(f"cuobjdump {option}: {complaint.strip().replace(os.fspath(path), os.path.basename(path))}")


def listed_elements(path: Path, all: bool = False, tool: str | None = None) -> Counter[tuple[str, str]]:
    """What ``cuobjdump -lelf`` and ``-lptx`` list, counted by (kind, target as cuobjdump writes it)."""
    found: Counter[tuple[str, str]] = Counter()
    for option in ("-lelf", "-lptx"):
        for line in _lines(path, option, all, tool):
            if match := _LISTED.match(line.rstrip("\n")):
                target, kind = match.groups()
                # Version 12 takes a bit in cubins of CUDA 11 for the suffix a, which begins with sm_90; its -symbols
                # writes the right target.
                found[kind, target if int(re.sub(r"\D", "", target)) >= 90 else target.removesuffix("a")] += 1
    return found


def cubins(path: Path, all: bool = False, tool: str | None = None) -> list[tuple[str, list[str]]]:
    """(target, sorted entry symbols) of each cubin that ``cuobjdump -symbols`` shows, in its order."""
    found: list[tuple[str, list[str]]] = []
    is_elf = False
    for line in _lines(path, "-symbols", all, tool):
        if line.startswith("Fatbin "):
            is_elf = line.startswith("Fatbin elf")
        elif is_elf and line.startswith("arch = "):
            found.append((line[7:].strip(), []))
        elif is_elf and (name := _entry(line)):
            found[-1][1].append(name)
    for _, names in found:
        names.sort()
    return found


def _entry(line: str) -> str | None:
    """The name if `line` of ``-symbols`` shows an entry symbol that is defined there.

    CUDA 13: ``FUNC GLOBAL DEFAULT ENTRY name``, with a U before an undefined name. Before: ``STT_FUNC STB_WEAK
    STO_ENTRY name``.
    """
    if not line.startswith(("FUNC ", "STT_FUNC ")):
        return None
    *words, name = line.split()
    return name if words[-1] in ("ENTRY", "STO_ENTRY") else None


def bare_kernels(path: Path, tool: str | None = None) -> list[str]:
    """Sorted entry symbols of a file that is a cubin itself: cuobjdump names no target there."""
    return sorted(name for line in _lines(path, "-symbols", False, tool) if (name := _entry(line)))


def kernels(path: Path, all: bool = False, tool: str | None = None) -> Counter[tuple[str, str]]:
    """Entry symbols that ``cuobjdump -symbols`` shows, counted by (target, mangled name)."""
    return Counter((target, name) for target, names in cubins(path, all, tool) for name in names)


class Totals(NamedTuple):
    """What one kind and target has in a file."""

    n_elements: int
    stored_bytes: int
    n_kernels: int


CUBLOATY_KINDS = {
    "sass": "cubin",
    "ptx": "ptx",
    "ltoir": "lto_ir",
    "kind0x40": "relocatable_ptx",
    "kind0x80": "tile_ir",
    "kind0x100": "concat",
}


class Images(NamedTuple):
    """All GPU code of a file: elements of fatbins by (kind, target), bare cubins as (target, kernels, bytes), sorted.

    Stored bytes are those of element headers and payloads.
    """

    elements: dict[tuple[str, str], Totals]
    raw: list[tuple[str, int, int]]


def cubloaty(path: Path) -> Images:
    """What cubloaty finds in all sections."""
    try:
        from cubloaty import analysis
    except ImportError:
        raise OracleError(NO_CUBLOATY) from None
    try:
        images = analysis.analyze_file(os.fspath(path)).images
    except ValueError as error:
        raise OracleError(f"cubloaty: {error}") from None
    rows = [
        (
            CUBLOATY_KINDS.get(image.kind, "unknown"),
            image.arch,
            image.fatbin is None,
            image.file_size,
            sum(function.is_kernel for function in image.functions.values()),
        )
        for image in images
    ]
    return _images(rows)


def our_images(elements: pd.DataFrame, regions: pd.DataFrame) -> Images:
    """The same of our own tables (of one library). Packed bare cubins are left out: cubloaty does not unpack them."""
    own = elements[elements["member"].isna()]
    is_raw = own["region"].map(regions.set_index("region")["is_raw_cubin"]).astype(bool)
    own, is_raw = own[~is_raw | (own["compression"] == "none")], is_raw[~is_raw | (own["compression"] == "none")]
    stored = own["header_bytes"] + own["payload_bytes"]
    return _images(zip(own["kind"], own["target"], is_raw, stored, own["n_kernels"].fillna(0)))


def _images(rows: Iterable[tuple[str, str, bool, int, int]]) -> Images:
    found = Images({}, [])
    for kind, target, is_raw, size, entries in rows:
        if is_raw:
            found.raw.append((target, int(entries), int(size)))
            continue
        n, stored, kernels = found.elements.get((kind, target), Totals(0, 0, 0))
        found.elements[kind, target] = Totals(n + 1, stored + int(size), kernels + int(entries))
    found.raw.sort()
    return found


def shown_target(target: str) -> str:
    """A target as ``-lelf`` and ``-lptx`` write it: PTX as ``sm_``, and a cubin's ``sm_100f`` as ``sm_100``.

    The suffix a stays, and so does the f of PTX since CUDA 13. ``-symbols`` writes the targets of cubins in full.
    """
    prefix, _, number = target.partition("_")
    return "sm_" + (number.removesuffix("f") if prefix == "sm" else number)


def visible(elements: pd.DataFrame, regions: pd.DataFrame, all: bool = False) -> pd.DataFrame:
    """The rows of `elements` (of one library) that cuobjdump lists. The only place where its limits are written down.

    - It reads the sections ``.nv_fatbin`` and ``__nv_relfatbin`` only. Fatbins in other sections (``.ldata``,
      ``.rodata``, ``.cask_resource``...), which libraries load by hand, are not seen.
    - ``__nv_relfatbin`` is shown with ``-all``, or if the object (in an archive: the member) has no ``.nv_fatbin``.
    - A bare cubin in host data, plain or packed, without a fatbin around it, is not seen.
    - Only cubins and PTX are listed: no LTO-IR, no Tile IR.
    - A file that is a fatbin or a cubin itself has no sections, and is shown whole.
    """
    raw = regions.set_index("region")["is_raw_cubin"]
    section = elements["section"].map(lambda name: name.rpartition(":")[2])
    member = elements["section"].map(lambda name: name.rpartition(":")[0])
    plain = section == _PLAIN
    relocatable = section == _RELOCATABLE
    if not all:
        relocatable &= ~member.isin(set(member[plain]))
    alone = (section == "(no section)") & (not _has_sections(elements))
    seen = (plain | relocatable) & ~elements["region"].map(raw).astype(bool)
    return elements[(seen | alone) & elements["kind"].isin(["cubin", "ptx"])]


def _has_sections(elements: pd.DataFrame) -> bool:
    return bool((elements["section"] != "(no section)").any())


def our_elements(seen: pd.DataFrame) -> Counter[tuple[str, str]]:
    """`listed_elements` of our own table, of the rows that `visible` gave."""
    return Counter(zip(seen["kind"], seen["target"].map(shown_target)))


def our_cubins(seen: pd.DataFrame, kernels: pd.DataFrame) -> list[tuple[str, list[str]]]:
    """`cubins` of our own tables, in file order."""
    key = ["region", "element", "member"]
    names: dict[tuple[int, ...], list[str]] = {}
    for *place, name in kernels[[*key, "kernel"]].fillna({"member": -1}).itertuples(index=False, name=None):
        names.setdefault(tuple(place), []).append(name)
    rows = seen[seen["kind"] == "cubin"].fillna({"member": -1})
    return [
        (target, sorted(names.get(tuple(place), [])))
        for *place, target in rows[[*key, "target"]].itertuples(index=False, name=None)
    ]
