"""A Run: named tables and where they came from, in a folder of parquet files and one run.json.

pandas and pyarrow are loaded by what reads or writes tables: commands that end before that are quick.
"""

from __future__ import annotations

import datetime
import html
import importlib.metadata
import json
import os
import platform
import secrets
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from gpubloat import __version__
from gpubloat.errors import FormatError, GpubloatError, SchemaError
from gpubloat.tables import schema

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow.parquet as pq

FLUSH_ROWS = 100_000
PACKAGES = (
    "numpy", "pandas", "pyarrow", "numba", "ml_dtypes", "zstandard", "lz4",
    "torch", "jax", "cuda-bindings", "nvidia-ml-py",
)  # fmt: skip


class Run(Mapping[str, "pd.DataFrame"]):
    """Tables by name, read from disk when first asked for, and a provenance record.

    ``run["elements"]`` is a DataFrame; ``run.provenance`` is the content of run.json: command, time, versions, GPUs,
    method, inputs with sha256. Tables are checked against `gpubloat.tables` when they are read.
    """

    def __init__(self, folder: Path, provenance: dict[str, Any]) -> None:
        self.folder = folder
        self.provenance = provenance
        self._read: dict[str, pd.DataFrame] = {}

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Run:
        """Open a run folder. Raises FormatError if it is none."""
        path = Path(folder)
        try:
            provenance = json.loads((path / "run.json").read_text("utf-8"))
            if not isinstance(provenance["tables"], dict) or not isinstance(provenance["instrument"], str):
                raise ValueError("run.json lacks its list of tables")
        except OSError as error:
            raise GpubloatError(
                f"{path} is no run folder: run.json: {error.strerror}", "give what --out wrote"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(str(path / "run.json"), 0, f"not a run.json: {error}") from None
        return cls(path, provenance)

    @property
    def instrument(self) -> str:
        return str(self.provenance["instrument"])

    def __getitem__(self, name: str) -> pd.DataFrame:
        if name not in self.provenance["tables"]:
            known = ", ".join(self.provenance["tables"])
            raise SchemaError(name, None, "is not in this run", f"tables of this run: {known}")
        if name not in self._read:
            declared = schema(self.instrument, name)
            path = self.folder / f"{name}.parquet"
            if not path.exists():
                raise GpubloatError(f"{path} is missing", "CSV exports cannot be read back: keep runs with --out")
            import pyarrow as pa
            import pyarrow.parquet as pq

            try:
                frame = pq.read_table(path).to_pandas()
            except (OSError, pa.ArrowException) as error:
                raise FormatError(str(path), 0, f"cannot be read: {error}") from None
            self._read[name] = declared.check(frame, name)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.provenance["tables"])

    def __len__(self) -> int:
        return len(self.provenance["tables"])

    def save(self, folder: str | os.PathLike[str], *, force: bool = False) -> Run:
        """Copy the run to `folder`; refuses a folder that is not empty unless `force`. Returns the run there."""
        with replacing(Path(folder), force=force) as new:
            for name in self:
                shutil.copyfile(self.folder / f"{name}.parquet", new / f"{name}.parquet")
            _write_json(new / "run.json", self.provenance)
        return Run.load(folder)

    def to_csv(
        self,
        folder: str | os.PathLike[str],
        *,
        force: bool = False,
        more: Mapping[str, pd.DataFrame] = MappingProxyType({}),
    ) -> None:
        """Write every table, and those of `more`, as CSV, and run.json beside them, which lists them as `csv`.

        Refuses a folder that is not empty unless `force`.
        """
        import pyarrow.parquet as pq

        with replacing(Path(folder), force=force) as new:
            for name in self:
                with (new / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
                    # Row group by row group: a table can be larger than memory.
                    parquet = pq.ParquetFile(self.folder / f"{name}.parquet")
                    parquet.schema_arrow.empty_table().to_pandas().to_csv(file, index=False)
                    for batch in parquet.iter_batches():
                        batch.to_pandas().to_csv(file, index=False, header=False)
            for name, table in more.items():
                table.to_csv(new / f"{name}.csv", index=False)
            _write_json(new / "run.json", self.provenance | {"csv": [*self, *more]})

    def __repr__(self) -> str:
        rows = ", ".join(f"{name} ({n:,})" for name, n in self.provenance["tables"].items())
        return f"<Run {self.instrument}: {rows}>"

    def _repr_html_(self) -> str:
        cells = []
        for name, n in self.provenance["tables"].items():
            doc = (schema(self.instrument, name).__doc__ or "").strip().splitlines()[0]
            note = self.provenance.get("empty", {}).get(name, "") if not n else ""
            cells.append(
                f"<tr><th style='text-align:left'>{html.escape(name)}</th><td>{n:,}</td>"
                f"<td style='text-align:left'>{html.escape(note or doc)}</td></tr>"
            )
        about = f"{self.instrument}, gpubloat {self.provenance.get('gpubloat', '')}"
        head = "<tr><th>table</th><th>rows</th><th></th></tr>"
        return f"<b>Run</b> ({html.escape(about)})<table>{head}{''.join(cells)}</table>"


class RunWriter:
    """Write a run table by table, piece by piece, so that no table has to fit into memory.

    Use as a context manager: `append` frames, then `finish` for the Run. Without `out` the run lives in a temporary
    folder that goes with the Run object. Nothing is left behind if the block raises.
    """

    def __init__(self, instrument: str, names: list[str], out: str | os.PathLike[str] | None, force: bool) -> None:
        self.instrument = instrument
        self.names = names
        self.out = None if out is None else Path(out)
        self.force = force
        if self.out is not None:
            refuse_overwrite(self.out, force)
        self.folder = Path(tempfile.mkdtemp(prefix="gpubloat-"))
        self._waiting: dict[str, list[pd.DataFrame]] = {n: [] for n in names}
        self._rows = dict.fromkeys(names, 0)
        self._files: dict[str, pq.ParquetWriter] = {}

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        if kind is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def append(self, name: str, frame: pd.DataFrame) -> None:
        """Add rows; they are checked against the schema when enough have come together."""
        if len(frame):
            self._waiting[name].append(frame)
            if sum(map(len, self._waiting[name])) >= FLUSH_ROWS:
                self._flush(name)

    def _flush(self, name: str) -> None:
        import pandas as pd

        waiting, self._waiting[name] = self._waiting[name], []
        declared = schema(self.instrument, name)
        if not waiting:
            self._write(name, declared.none())
        while waiting:
            frame = waiting.pop(0)
            # Small frames go together, a large one in pieces: checking and converting copies what it works on.
            while waiting and len(frame) + len(waiting[0]) <= FLUSH_ROWS:
                frame = pd.concat([frame, *waiting[:64]], ignore_index=True)
                del waiting[:64]
            for start in range(0, len(frame), FLUSH_ROWS):
                self._write(name, declared.check(frame.iloc[start : start + FLUSH_ROWS], name))

    def _write(self, name: str, frame: pd.DataFrame) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_pandas(frame, preserve_index=False)
        if name not in self._files:
            path = self.folder / f"{name}.parquet"
            # Offsets and sizes as differences take half of what they take in a dictionary.
            numbers = {f.name for f in table.schema if pa.types.is_integer(f.type)}
            self._files[name] = pq.ParquetWriter(
                path, table.schema, compression="zstd", compression_level=3,
                use_dictionary=[column for column in table.column_names if column not in numbers],
                column_encoding=dict.fromkeys(numbers, "DELTA_BINARY_PACKED"),
            )  # fmt: skip
        self._files[name].write_table(table.cast(self._files[name].schema))
        self._rows[name] += len(frame)

    def finish(self, provenance: dict[str, Any]) -> Run:
        """Write what is left and run.json; return the Run."""
        for name in self.names:
            if self._waiting[name] or name not in self._files:
                self._flush(name)
        for file in self._files.values():
            file.close()
        self._files = {}
        provenance = {"instrument": self.instrument, "tables": self._rows, **provenance}
        _write_json(self.folder / "run.json", provenance)
        run = Run(self.folder, provenance)
        if self.out is None:
            weakref.finalize(run, shutil.rmtree, self.folder, ignore_errors=True)
            return run
        saved = run.save(self.out, force=self.force)
        shutil.rmtree(self.folder, ignore_errors=True)
        return saved


def provenance(command: str, method: dict[str, str], inputs: list[dict[str, Any]]) -> dict[str, Any]:
    """What every run.json says. No user, host or path of a machine; `inputs` has name, bytes, sha256."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "gpubloat": __version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
        "packages": versions,
        "gpus": [],
        "method": method,
        "inputs": inputs,
    }


def refuse_overwrite(folder: Path, force: bool) -> None:
    """GpubloatError if `folder` holds something and `force` is not set, or if it is a file."""
    try:
        exists = folder.exists()
    except OSError as error:  # a name too long, or below a folder that may not be looked into
        raise GpubloatError(f"{folder} cannot be written: {error.strerror}") from None
    if folder.is_symlink() and not exists:
        raise GpubloatError(f"{folder} is a link to nothing", "name a folder")
    if exists and not folder.is_dir():
        raise GpubloatError(f"{folder} is a file", "name a folder")
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise GpubloatError(f"{folder} is not empty", "name another folder, or add --force (in Python, force=True)")


def refuse_to_replace(file: Path, force: bool) -> None:
    """GpubloatError if `file` exists and `force` is not set, or if it is no ordinary file (a folder, a device)."""
    if file.exists() and not file.is_file():
        what = "a folder" if file.is_dir() else "no ordinary file"
        raise GpubloatError(f"{file} is {what}", "name a file")
    if file.exists() and not force:
        raise GpubloatError(f"{file} exists", "name another file, or add --force (in Python, force=True)")


@contextmanager
def replacing_file(file: Path, force: bool) -> Iterator[BinaryIO]:
    """A new file beside `file`, which takes its name only if the block succeeds; raises as `refuse_to_replace`."""
    refuse_to_replace(file, force)
    new = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
    try:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with new.open("xb") as opened:
                yield opened
            os.replace(new, file)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise GpubloatError(f"{file} cannot be written: {error.strerror}") from None


class replacing:
    """Context manager: a new folder to write into, whose files move to `folder` only if the block succeeds.

    With `force`, files of the same names are replaced and the tables of an older run, which its run.json lists, are
    removed; other files stay.
    """

    def __init__(self, folder: Path, *, force: bool) -> None:
        refuse_overwrite(folder, force)
        self.folder = folder

    def __enter__(self) -> Path:
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.new = Path(tempfile.mkdtemp(prefix=f".{self.folder.name}-", dir=self.folder.parent))
        except OSError as error:
            raise GpubloatError(f"{self.folder} cannot be written: {error.strerror}") from None
        return self.new

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.folder.mkdir(exist_ok=True)
                for old in _tables_in(self.folder):
                    old.unlink()
                for path in sorted(self.new.iterdir()):
                    os.replace(path, self.folder / path.name)
        finally:
            shutil.rmtree(self.new, ignore_errors=True)
        if isinstance(error, OSError):
            raise GpubloatError(f"{self.folder} cannot be written: {error.strerror}") from None


def _tables_in(folder: Path) -> list[Path]:
    """The tables that run.json lists, parquet of a run or CSV of an export: all else in the folder is the user's."""
    try:
        record = json.loads((folder / "run.json").read_text("utf-8"))
        names, suffix = (record["csv"], "csv") if "csv" in record else (record["tables"], "parquet")
        paths = [folder / f"{name}.{suffix}" for name in names]
    except (OSError, ValueError, KeyError, TypeError):  # no run.json, or none of ours
        return []
    return [path for path in paths if path.parent == folder and path.is_file()]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8", errors="backslashreplace")  # of words that are no UTF-8: JSON's own escapes
