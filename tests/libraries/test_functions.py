"""CPU functions: starts, names, sizes and counts, against LIEF and pyelftools and by hand."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from gpubloat.libraries import functions
from gpubloat.libraries.functions import Counts
from tests.build import elf
from tests.build.elf import GLOBAL, LOCAL, WEAK, Symbol
from tests.libraries.common import view

IFUNC = 10


def read(file: elf.Elf) -> tuple[list[tuple[object, ...]], Counts]:
    columns = ["function", "section", "size_bytes", "boundary", "n_names", "is_cold"]
    frame, counts = functions.read(view(file.bytes()), "lib.so")
    rows = frame[columns].astype(object).where(frame[columns].notna(), None)
    return [tuple(r) for r in rows.itertuples(index=False, name=None)], counts


@pytest.mark.parametrize("name", ["libstdc++", "numpy._core._multiarray_umath", "lz4.block._block"])
def test_starts_and_names_are_those_of_pyelftools(name: str, real_libraries: dict[str, Path]) -> None:
    path = real_libraries[name]
    frame, counts = functions.read(view(path.read_bytes()), "lib")
    with path.open("rb") as file:
        theirs = ELFFile(file)
        code = {
            s.header.sh_addr: s.header.sh_addr + s.header.sh_size
            for s in theirs.iter_sections()
            if s.header.sh_flags & 4 and not s.name.startswith(".plt")
        }
        inside = list(code.items())
        table = theirs.get_section_by_name(".symtab") or theirs.get_section_by_name(".dynsym")
        symbols = [
            (s["st_value"], s.name)
            for s in table.iter_symbols()
            if s["st_info"]["type"] in ("STT_FUNC", "STT_LOOS")
            and s["st_shndx"] != "SHN_UNDEF"
            and any(a <= s["st_value"] < b for a, b in inside)
        ]
    mine = dict(zip(frame["address"].astype(int), frame["function"], strict=True))
    assert {a for a, _ in symbols} <= set(mine)
    names: dict[int, set[str]] = {}
    for address, symbol in symbols:
        names.setdefault(address, set()).add(symbol)
    assert all(mine[a] in found for a, found in names.items())
    assert set(frame.loc[frame["function"] != "", "address"].astype(int)) == set(names)
    assert frame["n_names"].sum() == counts.n_names >= len(symbols)
    assert frame["address"].is_monotonic_increasing
    assert frame["address"].is_unique
    assert counts.n_functions == len(frame)
    assert (counts.n_cold is not None) == (table.name == ".symtab")


def test_unwind_entries_give_the_size_and_symbols_the_name() -> None:
    file = elf.Elf()
    text = file.text(data=b"\x90" * 256)
    file.symbols([Symbol("named", text, 0, 8), Symbol("leaf", text, 64, 20)])
    file.eh_frame([(text.sh_addr, 16), (text.sh_addr + 32, 30)])
    rows, counts = read(file)
    assert rows == [
        ("named", ".text", 16, "fde", 1, False),
        ("", ".text", 30, "fde", 0, None),
        ("leaf", ".text", 20, "symtab", 1, False),
    ]
    assert counts == Counts(3, 0, 2, 66)


def test_aliases_are_names_of_one_function() -> None:
    file = elf.Elf()
    text = file.text()
    file.symbols(
        [
            Symbol("local_name", text, 0, 10, bind=LOCAL),
            Symbol("weak_name", text, 0, 12, bind=WEAK),
            Symbol("global_name", text, 0, 11, bind=GLOBAL),
        ]
    )
    file.symbols([Symbol("weak_name", text, 0, 12, bind=WEAK), Symbol("global_name", text, 0, 11)], dynamic=True)
    rows, counts = read(file)
    assert rows == [("global_name", ".text", 12, "symtab", 3, False)]
    assert counts == Counts(1, 0, 3, 12)


def test_exported_names_alone() -> None:
    file = elf.Elf()
    text = file.text()
    file.symbols([Symbol("exported", text, 16, 8)], dynamic=True)
    rows, counts = read(file)
    assert rows == [("exported", ".text", 8, "dynsym", 1, False)]
    assert counts.n_cold is None


def test_what_is_no_function() -> None:
    file = elf.Elf()
    text, data, plt = file.text(), file.data(data=bytes(64)), file.text(".plt", bytes(32))
    sec = file.text(".plt.sec", bytes(32))
    file.symbols(
        [
            Symbol("object", text, 0, 8, kind=elf.OBJECT),
            Symbol("imported", None),
            Symbol("in_data", data, 0, 8),
            Symbol("stub", plt, 0, 16),
            Symbol("stub2", sec, 0, 16),
            Symbol("behind_the_end", text, 64, 8),
            Symbol("resolver", text, 8, 8, kind=IFUNC),
        ]
    )
    file.eh_frame([(plt.sh_addr, 32), (0x10, 4)])
    rows, _ = read(file)
    assert [r[0] for r in rows] == ["resolver"]


def test_sizes_end_with_the_section() -> None:
    file = elf.Elf()
    text = file.text()
    file.symbols([Symbol("long", text, 60, 1 << 40), Symbol("unknown", text, 8, 0)])
    rows, counts = read(file)
    assert [(r[0], r[2]) for r in rows] == [("unknown", 0), ("long", 4)]
    assert counts.function_bytes == 4


def test_nested_ranges_count_once() -> None:
    file = elf.Elf()
    text = file.text()
    file.symbols([Symbol("outer", text, 0, 40), Symbol("inner", text, 8, 8), Symbol("beside", text, 36, 8)])
    assert read(file)[1].function_bytes == 44


@pytest.mark.parametrize(
    ("name", "is_cold"),
    [
        ("f.cold", True),
        ("f.cold.12", True),
        ("_ZN1fEv.__part.3", True),
        ("f.part.0", False),
        ("f.isra.0", False),
        ("cold", False),
        ("f_cold", False),
        ("f.coldest", False),
        ("f.cold.x", False),
        (".cold", False),
        ("", False),
    ],
)
def test_cold_parts_are_told_by_their_name(name: str, is_cold: bool) -> None:
    assert functions.is_cold(name) is is_cold


def test_cold_parts_are_counted() -> None:
    file = elf.Elf()
    text, cold = file.text(), file.text(".text.unlikely")
    file.symbols([Symbol("f", text, 0, 8), Symbol("f.cold", cold, 0, 8, bind=LOCAL)])
    assert read(file)[1].n_cold == 1


@pytest.mark.parametrize("above", [0, 66_000], ids=["few sections", "more than 16 bits count"])
def test_objects_have_section_offsets_for_addresses(above: int) -> None:
    file = elf.Elf(elf.ET_REL)
    for _ in range(above):
        file.add(".x", sh_type=elf.NOBITS)
    one, two = file.text(".text.a"), file.text(".text.b")
    file.symbols([Symbol("a", one, 0, 8), Symbol("a2", one, 16, 8), Symbol("b", two, 0, 24)])
    frame, counts = functions.read(view(file.bytes()), "lib", prefix="unit.o:", base=1000)
    assert frame["function"].tolist() == ["a", "a2", "b"]
    assert frame["section"].tolist() == ["unit.o:.text.a"] * 2 + ["unit.o:.text.b"]
    assert frame["address"].astype(int).tolist() == [0, 16, 0]
    assert frame["offset_bytes"].tolist() == [1000 + one.sh_offset, 1016 + one.sh_offset, 1000 + two.sh_offset]
    assert counts.function_bytes == 40


def test_a_value_beyond_its_section_is_of_no_other_section() -> None:
    file = elf.Elf(elf.ET_REL)
    one, two = file.text(".text.a"), file.text(".text.b")
    file.symbols([Symbol("far", one, 1 << 40, 8), Symbol("near", two, 0, 8)])
    assert [r[0] for r in read(file)[0]] == ["near"]


def test_absolute_symbols_of_objects_are_no_functions() -> None:
    file = elf.Elf(elf.ET_REL)
    text = file.text()
    table = file.symbols([Symbol("absolute", text, 0, 8), Symbol("real", text, 8, 8)])
    data = bytearray(table.data)
    struct.pack_into("<H", data, 24 + 6, 0xFFF1)
    table.data = bytes(data)
    assert [r[0] for r in read(file)[0]] == ["real"]


def test_code_at_overlapping_addresses_keeps_the_first() -> None:
    file = elf.Elf()
    text = file.text(data=b"\x90" * 64)
    twin = file.add(".text.twin", b"\xcc" * 64, flags=elf.ALLOC | elf.EXEC, addr=text.sh_addr + 32)
    file.symbols([Symbol("f", text, 0, 64)])
    file.symbols([Symbol("g", twin, 40, 8)], dynamic=True)
    rows, _ = read(file)
    assert [r[:3] for r in rows] == [("f", ".text", 64)]


@pytest.mark.parametrize("kind", ["no code", "no sections", "no symbols"])
def test_files_without_functions(kind: str) -> None:
    file = elf.Elf()
    if kind == "no code":
        data = file.data(data=bytes(64))
        file.symbols([Symbol("f", data)])
        made = file.bytes()
    else:
        text = file.text()
        if kind == "no sections":
            file.symbols([Symbol("f", text, 0, 8)])
        made = file.image(table=kind != "no sections").bytes()
    frame, counts = functions.read(view(made), "lib")
    assert len(frame) == 0
    assert counts == Counts(0, None, 0, 0)


def test_names_that_are_no_text() -> None:
    file = elf.Elf()
    text = file.text()
    file.symbols([Symbol(b"\xff\n\x1b[31m", text, 0, 8)])
    assert [r[0] for r in read(file)[0]] == ["\\xff\n\x1b[31m"]
