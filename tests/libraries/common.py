"""What the tests of this folder share: bytes as a file, a file as tables, and the laws that hold for every input."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from gpubloat.libraries import regions, scan
from gpubloat.libraries.elf import Elf
from gpubloat.libraries.inputs import Input
from gpubloat.libraries.onefile import Options, scan_file
from gpubloat.libraries.reader import Reader
from gpubloat.run import Run
from gpubloat.tables.libraries import TABLES
from tests.build import elf

Tables = dict[str, pd.DataFrame]


def reader(data: bytes) -> Reader:
    return Reader("file", data)


def view(data: bytes) -> Elf:
    return Elf(reader(data))


def find(data: bytes, *, is_elf: bool = True) -> regions.Found:
    bound = reader(data)
    return regions.find(bound, Elf(bound) if is_elf else None)


def tables(path: Path, *, is_named: bool = True, **options: object) -> Tables:
    """The tables of one file, straight from the collector, and checked against the laws."""
    found = scan_file(Input(path.name, path.name, str(path), is_named=is_named), Options(**options))  # type: ignore[arg-type]
    found = {name: found.get(name, TABLES[name].none()) for name in TABLES}
    conserved(found, path.stat().st_size)
    return found


def scanned(path: Path, **options: object) -> Run:
    """The run of one file, checked against the laws and the schemas."""
    run = scan(path, **options)  # type: ignore[arg-type]
    conserved({name: run[name] for name in run}, path.stat().st_size)
    return run


def library(fatbin: bytes, *, section: str = ".nv_fatbin", wrapped: bool = True) -> bytes:
    """A shared library that carries `fatbin`, with a function, its names and its unwind entry."""
    file = elf.Elf()
    text = file.text()
    held = file.rodata(section, fatbin)
    if wrapped:
        file.wrappers([held.sh_addr])
    file.symbols([elf.Symbol("main", text, 0, 16), elf.Symbol("static_one", text, 16, 16, bind=elf.LOCAL)])
    file.eh_frame([(text.sh_addr, 16), (text.sh_addr + 16, 16)])
    return file.bytes()


def conserved(found: Tables, size: int) -> None:
    """Every byte once; regions, elements and `gpu_code` are the same bytes."""
    sections, region, elements = found["sections"], found["regions"], found["elements"]
    row = found["libraries"].iloc[0]
    starts, sizes = sections["offset_bytes"].tolist(), sections["size_bytes"].tolist()
    at = 0
    for start, length in zip(starts, sizes, strict=True):
        assert start == at
        assert length > 0 or size == 0
        at += length
    assert at == size == row["file_bytes"]
    gpu = sections.loc[sections["label"] == "gpu_code", "size_bytes"].sum()
    headers = 16 * int((~region["is_raw_cubin"].astype(bool)).sum())
    outer = elements[elements["member"].isna()]
    assert gpu == row["gpu_code_bytes"] == region["size_bytes"].sum()
    assert gpu == headers + outer["header_bytes"].sum() + outer["payload_bytes"].sum()
    assert (elements.loc[elements["member"].notna(), ["header_bytes", "payload_bytes"]] == 0).all(axis=None)
    assert row["n_elements"] == len(outer) == region["n_elements"].sum()
    assert (elements["uncompressed_bytes"] >= 0).all()
    assert row["cpu_code_bytes"] == sections.loc[sections["label"] == "cpu_code", "size_bytes"].sum()
    assert row["n_functions"] == len(found["functions"])
    assert row["function_bytes"] <= row["cpu_code_bytes"]
