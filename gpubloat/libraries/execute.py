"""A command on debloated copies, without touching the environment it lives in; the guard that survives a miss.

The audit library maps the bytes of a copy over the original when the loader opens it, so paths stay what they were
(`native/audit/swap.c`). The guard: a removed function traps at its first byte, and a removed element is on pages that
nobody may read. `report` says what was met, and stops before the function runs; `restore` brings the original bytes
back and goes on; `restore-cpu` does so for functions only, since a driver that loads eagerly reads all elements, used
or not, and would have all of them back. What was met becomes a Run that `debloat` takes as one more.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from gpubloat.errors import GpubloatError
from gpubloat.libraries import attach, evidence, functions, manifest, record
from gpubloat.libraries.elf import MAGIC, PF_W, PT_LOAD, Array, Elf
from gpubloat.libraries.inputs import Input, opened
from gpubloat.libraries.locate import RANGE
from gpubloat.libraries.manifest import Entry, Manifest
from gpubloat.libraries.record import Miss, Record
from gpubloat.run import Run, RunWriter, provenance
from gpubloat.tables.usage import Misses

GUARDS = ("off", "report", "restore", "restore-cpu")
METHOD = {
    "functions": "each call of a removed function, at its first byte",
    "elements": "first touch of a page that holds nothing but one element's payload; all pages of smaller ones",
}
CHANGED = 3  # kind of a range that the guard leaves alone
_CHUNK = 64 << 20
_BLOCK = 64


def execute(
    folder: str | os.PathLike[str],
    command: Sequence[str],
    *,
    guard: str = "restore",
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    command_line: str = "gpubloat.libraries.execute",
) -> tuple[int, Run]:
    """Run `command` on the copies in `folder`.

    Parameters
    ----------
    folder : what `debloat` wrote. command : program and arguments.
    guard : restore, restore-cpu, report: see above; off: nothing is watched, a removed function is a SIGTRAP.
    out, force : keep the run of misses in this folder; replace what is there.

    Returns
    -------
    Exit status of the command (negative: the signal that ended it), and a Run with the table misses. Its provenance has
    `n_swapped`, the libraries that ran from their copies in any process, and `problems`.

    Raises
    ------
    GpubloatError : no debloated folder, a library that changed since, a command that cannot be started.
    """
    if out is not None:
        attach.check_out(out, force)
    about = manifest.read(folder)
    with tempfile.TemporaryDirectory(prefix="gpubloat-record-") as logs:
        with environment(folder, guard, logs) as variables:
            started = time.monotonic()
            status = attach.run(command, {**os.environ, **variables})
            wall = time.monotonic() - started
        found = record.read(Path(logs))
    with RunWriter("libraries", ["misses"], out, force) as writer:
        writer.append("misses", misses(folder, about, found.misses))
        details = provenance(command_line, METHOD, [{"name": e.library, "sha256": e.sha256} for e in about.libraries])
        details |= {
            "trace": "guard",
            "guard": guard,
            "targets": about.targets,
            "exit_status": status,
            "wall_s": round(wall, 3),
            "n_swapped": len({path for p in found.processes for path in p.swapped}),
            "problems": problems(found),
            "empty": {"misses": "the guard was off" if guard == "off" else "no removed code was met"},
        }
        return status, writer.finish(details)


@contextmanager
def environment(
    folder: str | os.PathLike[str], guard: str = "restore", logs: str | None = None
) -> Iterator[dict[str, str]]:
    """Variables that put a command onto the copies of `folder`; records go to the folder `logs`.

    GpubloatError where an original is gone or is not the file that was debloated.
    """
    if guard not in GUARDS:
        raise GpubloatError(f"{guard!r} is no mode of the guard", f"known: {', '.join(GUARDS)}")
    place, about = Path(folder).resolve(), manifest.read(folder)
    if not about.libraries:
        raise GpubloatError(f"{folder} has no copies to run on", "install a repacked wheel with pip")
    with tempfile.TemporaryDirectory(prefix="gpubloat-plan-") as made:
        lines = [_line(place, entry, Path(made) / f"{n}.npy") for n, entry in enumerate(about.libraries)]
        plan = Path(made) / "plan"
        plan.write_text("".join(lines), encoding="utf-8", errors="surrogateescape")
        variables = {"GPUBLOAT_PLAN": str(plan), "GPUBLOAT_GUARD": guard}
        variables |= {"GPUBLOAT_DIR": logs} if logs else {}
        env = attach.audited(os.environ, **variables)
        yield {name: env[name] for name in ("LD_AUDIT", *variables)}


def _line(place: Path, entry: Entry, changed: Path) -> str:
    """One line of the plan that the audit library reads."""
    try:
        now = os.stat(entry.path)
    except OSError as error:
        raise GpubloatError(
            f"the original {entry.path} cannot be read: {error.strerror}", "copies run in the place of their originals"
        ) from None
    copy = manifest.inside(place, entry.copy)
    size = entry.bytes
    if not copy.is_file() or copy.stat().st_size != size:
        raise GpubloatError(f"the copy of {entry.library} is damaged", "debloat again")
    if now.st_size != size or (now.st_ctime_ns > (place / manifest.NAME).stat().st_mtime_ns and not _is_same(entry)):
        raise GpubloatError(f"{entry.library} is not the version that was debloated", "trace and debloat it again")
    if any(character in f"{entry.path}{copy}" for character in "\t\n"):
        raise GpubloatError(f"{entry.library} has a tab or a newline in its path", "rename its folder")
    ranges = place / entry.ranges
    with copy.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return ""  # an archive: no loader ever sees it
    if entry.layout == "moved":  # kept elements lie elsewhere, so nothing can be brought back: no guard
        np.save(changed, _changed(entry.path, copy))
        ranges = changed
    else:
        manifest.ranges(place, entry)
    return f"{os.path.realpath(entry.path)}\t{copy}\t{ranges}\t{size}\n"


def _is_same(entry: Entry) -> bool:
    """By content: for files that somebody touched since, as `apply` does."""
    try:
        with open(entry.path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise GpubloatError(f"the original {entry.path} cannot be read: {error.strerror}") from None
    if found == entry.sha256_copy:
        hint = "run the command as it is, or put the originals back first: gpubloat libraries restore DIR"
        raise GpubloatError(f"{entry.library} is replaced by its copy already", hint)
    return found == entry.sha256


def _changed(original: str, copy: Path) -> Array:
    """Where two files of one size differ in writable segments, as ranges (dtype of `manifest.ranges`).

    To the byte: beside them can be what the loader has written already (.dynamic). Other segments are mapped whole.
    Moved elements differ in more than what was removed.
    """
    with opened(Input(original, "", original)) as reader:
        segments = Elf(reader).segments
        writable = segments[(segments["p_type"] == PT_LOAD) & (segments["p_flags"] & PF_W != 0)]
    before, after = np.memmap(original, np.uint8, "r"), np.memmap(copy, np.uint8, "r")
    found: list[tuple[int, int]] = []
    for segment in writable:
        start, stop = int(segment["p_offset"]), int(segment["p_offset"] + segment["p_filesz"])
        for at in range(start, stop, _CHUNK):
            differs = before[at : min(at + _CHUNK, stop)] != after[at : min(at + _CHUNK, stop)]
            found += [(at + begin, end - begin) for begin, end in _runs(differs)]
    ranges = np.zeros(len(found), RANGE)
    for row, (begin, size) in enumerate(found):
        ranges[row] = (begin, size, CHANGED, row)
    return np.sort(ranges, order="offset")


def _runs(differs: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Begin and end of runs of True, over gaps that are too small for anything the loader writes as a whole."""
    if not len(differs):
        return
    blocks = np.logical_or.reduceat(differs, np.arange(0, len(differs), _BLOCK))
    for first, last in np.flatnonzero(np.diff(blocks, prepend=False, append=False)).reshape(-1, 2).tolist():
        inside = differs[first * _BLOCK : last * _BLOCK]
        yield first * _BLOCK + int(inside.argmax()), first * _BLOCK + len(inside) - int(inside[::-1].argmax())


def problems(found: Record) -> list[str]:
    """What kept libraries from running on their copies."""
    return list(dict.fromkeys([*found.problems, *(problem for p in found.processes for problem in p.problems)]))


def misses(folder: str | os.PathLike[str], about: Manifest, met: Sequence[Miss]) -> pd.DataFrame:
    """Table `misses` from what the guard wrote, with the functions and elements that lay there."""
    if not met:
        return Misses.none()
    removed = Run.load(folder)["removed"]
    parts = []
    for entry in about.libraries:
        mine = [m for m in met if m.path == os.path.realpath(entry.path)]
        if mine:
            rows = removed[removed["library"] == entry.library]
            parts += [_functions(entry, mine, rows), _elements(mine, rows)]
    found = pd.concat([p for p in parts if len(p)], ignore_index=True) if any(map(len, parts)) else None
    return Misses.none() if found is None else Misses.check(found[list(Misses.to_schema().columns)], "misses")


def _functions(entry: Entry, met: Sequence[Miss], removed: pd.DataFrame) -> pd.DataFrame:
    counts = _processes(m for m in met if m.what == "function")
    rows = removed[(removed["what"] == "function") & removed["offset_bytes"].isin(list(counts))]
    names: Mapping[int, str] = {}
    if len(rows):
        with opened(Input(entry.library, "", entry.path)) as reader:
            table, _ = functions.read(Elf(reader), entry.library)
            names = dict(zip(table["offset_bytes"], table["function"], strict=True))
    offsets = rows["offset_bytes"].tolist()
    return rows.assign(
        function=[names.get(offset, "") for offset in offsets],
        action=[counts[offset][1] for offset in offsets],
        n_processes=[counts[offset][0] for offset in offsets],
    )


def _elements(met: Sequence[Miss], removed: pd.DataFrame) -> pd.DataFrame:
    """Elements of which a page of their own was met; those without one, if all their pages were."""
    pages = [m for m in met if m.what == "page"]
    rows = removed[removed["what"] == "element"]
    payloads = rows.rename(columns={"size_bytes": "payload_bytes"}).assign(
        header_bytes=0, member=None, is_loadable=True
    )
    payloads["member"] = payloads["member"].astype("Int64")
    library = str(rows["library"].iloc[0]) if len(rows) else ""
    used = evidence.from_pages({library: [m.offset for m in pages]}, payloads)
    used = used.drop_duplicates(["region", "element"])[["region", "element"]].astype("Int64")
    rows = rows.merge(used, on=["region", "element"])
    n_processes = len({m.tag for m in pages})
    return rows.assign(function="", action=pages[0].action if pages else "", n_processes=n_processes)


def _processes(met: Iterator[Miss]) -> dict[int, tuple[int, str]]:
    """By offset: how many processes met it, and what the guard did."""
    tags: dict[int, set[str]] = {}
    actions: dict[int, str] = {}
    for miss in met:
        tags.setdefault(miss.offset, set()).add(miss.tag)
        actions[miss.offset] = miss.action
    return {offset: (len(found), actions[offset]) for offset, found in tags.items()}
