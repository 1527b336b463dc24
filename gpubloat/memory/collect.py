"""A file that some allocator wrote -> Run: snapshots of PyTorch, logs of RMM, buffers of MiniMalloc."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

import zstandard

from gpubloat.errors import FormatError, GpubloatError
from gpubloat.memory import csvlogs, pickles
from gpubloat.memory.history import NO_HISTORY, History
from gpubloat.memory.snapshot import Snapshot, Tables
from gpubloat.run import Run, RunWriter, provenance
from gpubloat.tables.memory import TABLES

HINT = "give a snapshot of torch.cuda.memory._dump_snapshot, a log of RMM or a CSV of MiniMalloc"
_ZSTD = b"\x28\xb5\x2f\xfd"
_MOST_RATIO, _SMALL = 200, 8 << 20  # snapshots are compressed 10 to 50 times; a bomb is, 10,000 times
METHOD = {
    "events": "as recorded; sizes are what the program asked for, those of segments are real",
    "starts_mid_run": "some block was freed, or is there at the end, whose allocation the trace does not hold",
    "pickle": "only opcodes of plain data; nothing was imported or called",
}


def load(path: str | os.PathLike[str], *, out: str | os.PathLike[str] | None = None, force: bool = False) -> Run:
    """Read a memory snapshot of PyTorch, also compressed by zstd, a log of RMM or a CSV of MiniMalloc.

    Parameters
    ----------
    path : the file. It is not trusted: a pickle that would need a class or a function is refused.
    out : keep the run in this folder; default, a temporary one that goes with the Run.
    force : replace a run that is in `out` already.

    Returns
    -------
    Run with events, segments, blocks, stacks, frames. Its provenance has `format`, `allocator_settings`,
    `has_addresses`, and `history`: by device, whether the trace starts mid-run and why that is known.

    Raises
    ------
    FormatError : the file is damaged, foreign or hostile. GpubloatError : it cannot be read.
    """
    file = Path(path)
    if not file.exists():
        raise GpubloatError(f"{file} does not exist", HINT)
    if not file.is_file():
        raise GpubloatError(f"{file} is no file", HINT)
    try:
        return _load(file, out, force)
    except OSError as error:
        raise GpubloatError(f"{file} cannot be read: {error.strerror}") from None


def _load(file: Path, out: str | os.PathLike[str] | None, force: bool) -> Run:
    with file.open("rb") as opened:
        head = opened.read(256)
        opened.seek(0)
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if head[:1] == b"\x80" or head[:4] == _ZSTD:
        kind = "pytorch"
    elif head[:2] == b"PK" or head[:1] in (b"{", b"["):
        raise FormatError(str(file), 0, "is no pickle: a zip or JSON file", HINT)
    else:
        kind = csvlogs.kind(head.decode("utf-8", "replace").split("\n")[0]) or ""
    if not kind:
        raise FormatError(str(file), 0, "is no memory snapshot, and its first line is no known header", HINT)
    record = provenance(
        "gpubloat.memory.load", METHOD, [{"name": file.name, "bytes": file.stat().st_size, "sha256": digest}]
    )
    record |= {"format": kind, "has_addresses": kind != "minimalloc", "allocator_settings": {}}
    history = History()
    state: Tables = {name: TABLES[name].none() for name in ("segments", "blocks")}
    with RunWriter("memory", list(TABLES), out, force) as writer:
        for tables in _pytorch(file, record) if kind == "pytorch" else _csv(file, kind):
            if "events" in tables:
                history.add(tables["events"])
            for name in ("segments", "blocks"):
                if name in tables:
                    state[name] = tables[name]
            for name, frame in tables.items():
                writer.append(name, frame)
        record["history"] = history.summary(state["blocks"], state["segments"])
        record["empty"] = _why_empty(kind, record["history"])
        return writer.finish(record)


def _pytorch(file: Path, record: dict[str, Any]) -> Iterator[Tables]:
    data = _content(file)
    content = pickles.loads(data, str(file))
    size = len(data)
    del data
    snapshot = Snapshot(content, str(file), size)
    del content
    record["allocator_settings"] = _plain(snapshot.settings)
    yield from snapshot.tables()


def _content(file: Path) -> bytes:
    """The bytes of the file, decompressed."""
    data = file.read_bytes()
    if data[:4] != _ZSTD:
        return data
    most = max(_MOST_RATIO * len(data), _SMALL)
    try:
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            plain = reader.read(most + 1)
    except zstandard.ZstdError as error:
        raise FormatError(str(file), 0, f"is damaged: {error}", "compress it again: zstd FILE") from None
    if len(plain) > most:
        raise FormatError(str(file), 0, f"would be more than {most} bytes", "decompress it by hand if you trust it")
    if plain[:1] != b"\x80":
        raise FormatError(str(file), 0, "holds no pickle", HINT)
    return plain


def _csv(file: Path, kind: str) -> Iterator[Tables]:
    for events in csvlogs.events(file, kind):
        yield {"events": events}


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings as JSON can hold them: names, numbers and short texts, one level deep."""

    def value(thing: Any) -> Any:
        if isinstance(thing, str):
            return thing[:1000].encode("utf-8", "backslashreplace").decode("utf-8")
        return thing if isinstance(thing, (bool, int)) or (isinstance(thing, float) and isfinite(thing)) else None

    found: dict[str, Any] = {}
    for name, thing in list(settings.items())[:200]:
        if isinstance(name, str):
            if isinstance(thing, dict):
                found[value(name)] = {value(str(k)): value(v) for k, v in list(thing.items())[:64]}
            else:
                found[value(name)] = value(thing)
    return found


def _why_empty(kind: str, history: dict[str, Any]) -> dict[str, str]:
    reasons: dict[str, str] = {}
    if kind != "pytorch":
        reasons |= dict.fromkeys(("segments", "blocks", "stacks", "frames"), f"a {kind} file holds events only")
    if not any(device["n_events"] for device in history.values()):
        reasons["events"] = NO_HISTORY if kind == "pytorch" else "the file has no row below its header"
    return reasons
