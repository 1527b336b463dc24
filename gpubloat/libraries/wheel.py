"""Repack a wheel with some members replaced: RECORD is valid again, all else stays as it was.

Source: PyPA, "Binary distribution format" (PEP 427) and "Recording installed projects" (PEP 376): RECORD has one line a
file, path, ``sha256=`` and the digest in URL-safe base64 without padding, size; its own line has neither.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import shutil
import zipfile
from collections.abc import Mapping
from copy import copy
from pathlib import Path, PurePosixPath

from gpubloat.errors import FormatError

_CHUNK = 1 << 20
# Signatures over a RECORD that is no longer there.
_SIGNATURES = ("RECORD.jws", "RECORD.p7s")


def repack(wheel: Path, replaced: Mapping[str, Path], out: Path) -> None:
    """Write `wheel` to `out` with the members `replaced` (name -> file). The same input gives the same bytes.

    Order, names, times, rights and compression methods of the members stay; signatures over the old RECORD go.
    Raises FormatError if the wheel has no RECORD (a plain .zip needs none) or cannot be read.
    """
    try:
        with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(out, "x", allowZip64=True) as new:
            last = {info.filename: info for info in old.infolist()}  # of two with one name, the later one counts
            records = [n for n in last if _is_record(n, "RECORD")]
            if wheel.suffix.lower() == ".whl" and len(records) != 1:
                raise FormatError(wheel.name, 0, f"a wheel has one RECORD, this one has {len(records)}")
            new.comment = old.comment
            for info in last.values():
                if any(_is_record(info.filename, name) for name in _SIGNATURES):
                    continue
                made = _header(info)
                if info.filename in records:
                    text = _record(old.read(info).decode("utf-8"), replaced)
                    new.writestr(made, text, info.compress_type)
                    continue
                path = replaced.get(info.filename)
                made.file_size = info.file_size if path is None else path.stat().st_size
                with old.open(info) if path is None else path.open("rb") as source, new.open(made, "w") as target:
                    shutil.copyfileobj(source, target, _CHUNK)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise FormatError(wheel.name, 0, f"the wheel cannot be read: {error}", "download it again") from None


def _header(info: zipfile.ZipInfo) -> zipfile.ZipInfo:
    made = copy(info)
    made.extra = b""  # zip64 sizes, which zipfile writes itself where they are needed
    return made


def _is_record(name: str, ending: str) -> bool:
    path = PurePosixPath(name)
    return path.name == ending and len(path.parts) == 2 and path.parts[0].endswith(".dist-info")


def _record(text: str, replaced: Mapping[str, Path]) -> str:
    """RECORD with the lines of the replaced members corrected and those of signatures left out."""
    rows = [r for r in csv.reader(io.StringIO(text)) if r and not any(_is_record(r[0], n) for n in _SIGNATURES)]
    for row in rows:
        if row[0] in replaced:
            path = replaced[row[0]]
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").digest()
            row[1:] = ["sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode(), str(path.stat().st_size)]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()
