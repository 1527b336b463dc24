"""Function ranges from .eh_frame, against pyelftools on real libraries, and for every pointer encoding in use."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from elftools.dwarf.callframe import FDE
from elftools.elf.elffile import ELFFile

from gpubloat.errors import FormatError
from gpubloat.libraries import unwind
from tests.build import elf
from tests.libraries.common import view

FUNCTIONS = [(0x200400, 16), (0x200410, 32), (0x200440, 5), (0x201000, 4096)]


def ranges(file: elf.Elf) -> list[tuple[int, int]]:
    start, length = unwind.ranges(view(file.bytes()))
    return list(zip(start.tolist(), length.tolist(), strict=True))


@pytest.mark.parametrize("name", ["libstdc++", "numpy.linalg._umath_linalg", "lz4.block._block"])
@pytest.mark.parametrize("table", [True, False], ids=["search table", "walk"])
def test_ranges_are_those_of_pyelftools(name: str, table: bool, real_libraries: dict[str, Path]) -> None:
    mine = view(real_libraries[name].read_bytes())
    if not table:
        mine.sections[:] = [s for s in mine.sections if s.name != ".eh_frame_hdr"]
    start, length = unwind.ranges(mine)
    with real_libraries[name].open("rb") as file:
        entries = ELFFile(file).get_dwarf_info().EH_CFI_entries()
        theirs = {
            (e.header["initial_location"], e.header["address_range"])
            for e in entries
            if isinstance(e, FDE) and e.header["address_range"]
        }
    assert set(zip(start.tolist(), length.tolist(), strict=True)) == theirs
    assert len(start) > 20
    assert np.all(np.diff(start.astype(np.int64)) > 0)


@pytest.mark.parametrize("encoding", [0x1B, 0x1C, 0x10, 0x03, 0x00, 0x04, 0x0B])
@pytest.mark.parametrize("version", [1, 3, 4])
@pytest.mark.parametrize("letters", [b"zR", b"zPLR", b"zRS"])
def test_pointer_encodings(encoding: int, version: int, letters: bytes) -> None:
    file = elf.Elf()
    file.eh_frame(FUNCTIONS, encoding=encoding, version=version, letters=letters, header=False)
    assert ranges(file) == FUNCTIONS


def test_no_augmentation_means_absolute_pointers() -> None:
    file = elf.Elf()
    file.eh_frame(FUNCTIONS, encoding=0x00, letters=b"", header=False)
    assert ranges(file) == FUNCTIONS


@pytest.mark.parametrize("header", [True, False])
def test_several_cies(header: bool) -> None:
    file = elf.Elf()
    many = [(0x300000 + 64 * i, 64) for i in range(100)]
    file.eh_frame(many, cies=7, header=header)
    assert ranges(file) == many


def test_order_and_repetition_do_not_matter() -> None:
    file = elf.Elf()
    file.eh_frame([*reversed(FUNCTIONS), FUNCTIONS[0]], header=False)
    assert ranges(file) == FUNCTIONS


def test_two_tables_with_a_terminator_between_them() -> None:
    file = elf.Elf()
    first, _ = elf.eh_frame(FUNCTIONS[:2], 0x200000 + file.at)
    second, _ = elf.eh_frame(FUNCTIONS[2:], 0x200000 + file.at + len(first))
    file.add(".eh_frame", first + second, flags=elf.ALLOC)
    assert ranges(file) == FUNCTIONS


def test_entries_of_length_zero_are_no_functions() -> None:
    file = elf.Elf()
    file.eh_frame([*FUNCTIONS, (0x400000, 0)])
    assert ranges(file) == FUNCTIONS


@pytest.mark.parametrize("build", ["none", "empty", "object", "terminator"])
def test_files_without_entries(build: str) -> None:
    file = elf.Elf(elf.ET_REL if build == "object" else elf.ET_DYN)
    if build == "empty":
        file.add(".eh_frame", b"", flags=elf.ALLOC)
    elif build == "object":
        file.eh_frame(FUNCTIONS, header=False)
    elif build == "terminator":
        file.add(".eh_frame", bytes(4), flags=elf.ALLOC)
    assert ranges(file) == []


def test_a_search_table_that_lies_is_not_trusted() -> None:
    file = elf.Elf()
    file.eh_frame(FUNCTIONS)
    table = file.sections[-1]
    assert table.name == b".eh_frame_hdr"
    far = bytearray(table.data)
    struct.pack_into("<i", far, 16, 1 << 30)  # the first entry is said to be elsewhere
    table.data = bytes(far)
    assert ranges(file) == FUNCTIONS


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("damage", ["owner", "version", "encoding", "cut"])
def test_damage_is_a_format_error_inside_the_section(damage: str, header: bool) -> None:
    file = elf.Elf()
    frame = file.eh_frame(FUNCTIONS, header=header)
    data = bytearray(frame.data)
    entry = 4 + struct.unpack_from("<I", data)[0]
    if damage == "owner":
        struct.pack_into("<I", data, entry + 4, 0x7FFFFFFF)
    elif damage == "version":
        data[8] = 99
    elif damage == "encoding":
        data[data.index(b"\x01\x1b") + 1] = 0x1B ^ 0x60
    else:
        frame.sh_size = len(data) - 4 - 9  # the last entry ends inside its second pointer
    frame.data = bytes(data)
    with pytest.raises(FormatError) as caught:
        ranges(file)
    assert frame.sh_offset <= caught.value.offset <= frame.sh_offset + len(frame.data)


@pytest.mark.parametrize("length", [1, 3, 0x7FFFFFFF, 0xFFFFFFFE])
def test_lengths_that_leave_the_section_are_refused(length: int) -> None:
    file = elf.Elf()
    frame = file.eh_frame(FUNCTIONS, header=False)
    frame.data = struct.pack("<I", length) + frame.data[4:]
    with pytest.raises(FormatError, match="runs out of"):
        ranges(file)


def test_sixty_four_bit_lengths_are_passed_over() -> None:
    file = elf.Elf()
    made, _ = elf.eh_frame(FUNCTIONS, 0x200000 + file.at)
    body = struct.pack("<I", 1) + bytes(28)
    file.add(".eh_frame", made[:-4] + struct.pack("<IQ", 0xFFFFFFFF, len(body)) + body + bytes(4), flags=elf.ALLOC)
    assert ranges(file) == FUNCTIONS
