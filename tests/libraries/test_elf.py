"""Headers, sections and symbols, against pyelftools and LIEF on real libraries, and by hand on built ones."""

from __future__ import annotations

import struct
from pathlib import Path

import lief
import numpy as np
import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from gpubloat.errors import FormatError
from gpubloat.libraries import elf as ours
from gpubloat.libraries.elf import SHT_DYNSYM, SHT_SYMTAB, Elf
from gpubloat.libraries.reader import Reader
from tests.build import elf
from tests.build.elf import ALLOC, EXEC, LOCAL, WEAK, Symbol
from tests.libraries.common import reader, view


def small() -> elf.Elf:
    file = elf.Elf()
    text = file.text(".text", bytes(range(64)))
    file.rodata(".rodata", b"constant")
    file.data(".data", b"variable")
    file.bss(4096)
    file.symbols([Symbol("entry", text, 0, 32), Symbol("helper", text, 32, 8, bind=LOCAL), Symbol("missing", None)])
    file.symbols([Symbol("entry", text, 0, 32, bind=WEAK)], dynamic=True)
    return file


@pytest.mark.parametrize("name", ["libstdc++", "numpy._core._multiarray_umath", "lz4.block._block"])
def test_sections_symbols_and_segments_are_those_of_pyelftools(name: str, real_libraries: dict[str, Path]) -> None:
    data = real_libraries[name].read_bytes()
    mine = view(data)
    with real_libraries[name].open("rb") as file:
        theirs = ELFFile(file)
        rows = [s.header for s in theirs.iter_sections() if s.header.sh_type != "SHT_NULL"]
        names = [s.name for s in theirs.iter_sections() if s.header.sh_type != "SHT_NULL"]
        assert [s.name for s in mine.sections] == names
        for section, row in zip(mine.sections, rows, strict=True):
            fields = (section.sh_flags, section.sh_addr, section.sh_offset, section.sh_size, section.sh_link)
            assert fields == (row.sh_flags, row.sh_addr, row.sh_offset, row.sh_size, row.sh_link)
        assert mine.segments["p_vaddr"].tolist() == [s.header.p_vaddr for s in theirs.iter_segments()]
        assert mine.segments["p_filesz"].tolist() == [s.header.p_filesz for s in theirs.iter_segments()]
        for sh_type in (SHT_SYMTAB, SHT_DYNSYM):
            table, strings = mine.symbols(sh_type)
            kind = "SHT_SYMTAB" if sh_type == SHT_SYMTAB else "SHT_DYNSYM"
            found = [s for s in theirs.iter_sections() if isinstance(s, SymbolTableSection) and s["sh_type"] == kind]
            symbols = [s for section in found for s in section.iter_symbols()]
            assert len(table) == len(symbols)
            assert strings.names(table["st_name"]) == [s.name for s in symbols]
            assert table["st_value"].tolist() == [s["st_value"] for s in symbols]
            assert table["st_size"].tolist() == [s["st_size"] for s in symbols]


def test_build_id_and_addresses_are_those_of_lief(libstdcpp: Path) -> None:
    mine, theirs = view(libstdcpp.read_bytes()), lief.ELF.parse(str(libstdcpp))
    assert theirs is not None
    note = theirs.get(lief.ELF.Note.TYPE.GNU_BUILD_ID)
    assert mine.build_id() == bytes(note.description).hex() != ""
    addresses = [f.value for f in theirs.exported_functions[:500]] if hasattr(theirs, "exported_functions") else []
    addresses = addresses or [s.value for s in theirs.dynamic_symbols if s.value][:500]
    offsets = mine.file_offsets(np.array(addresses, np.uint64))
    expected = [theirs.virtual_address_to_offset(a) for a in addresses]
    stored = [i for i, e in enumerate(expected) if isinstance(e, int)]
    assert len(stored) > 400
    assert [offsets[i] for i in stored] == [expected[i] for i in stored]


def test_addresses_without_a_byte_in_the_file_give_minus_one() -> None:
    file = small()
    text, bss = file.sections[0], file.sections[3]
    mine = view(file.bytes())
    wanted = np.array([text.sh_addr, text.sh_addr + 63, bss.sh_addr + 8, 0, 1 << 63, (1 << 64) - 1], np.uint64)
    assert mine.file_offsets(wanted).tolist() == [text.sh_offset, text.sh_offset + 63, -1, -1, -1, -1]


def test_no_section_table() -> None:
    mine = view(small().image(table=False).bytes())
    assert mine.sections == []
    assert len(mine.symbols(SHT_SYMTAB)[0]) == 0
    assert mine.build_id() == ""
    assert len(mine.segments) == 4


def test_neither_sections_nor_segments() -> None:
    mine = view(small().image(table=False, load=False).bytes())
    assert mine.sections == []
    assert len(mine.segments) == 0
    assert mine.file_offsets(np.array([0x200000], np.uint64)).tolist() == [-1]


def test_section_headers_of_size_zero_without_sections() -> None:
    assert view(small().image(table=False, shentsize=0).bytes()).sections == []
    data = bytearray(small().image(table=False, shentsize=0).bytes())
    struct.pack_into("<Q", data, 0x28, 64)  # a place for a table that has no rows
    assert view(bytes(data)).sections == []


def test_section_headers_of_a_wrong_size_are_refused() -> None:
    with pytest.raises(FormatError, match="section headers of 40 bytes") as caught:
        view(small().image(shentsize=40).bytes())
    assert caught.value.offset == 0x3A


@pytest.mark.parametrize("count", [65_279, 65_280, 70_000])
def test_more_sections_than_sixteen_bits_count(count: int) -> None:
    file = elf.Elf()
    text = file.text()
    for number in range(count - 5):  # the null section, .text and three tables make up the rest
        file.add(f".s{number}", sh_type=elf.NOBITS)
    file.symbols([Symbol("entry", text, 0, 16)])
    data = file.bytes()
    mine = view(data)
    assert mine.header.e_shnum == count
    assert struct.unpack_from("<H", data, 0x3C)[0] == (0 if count >= 0xFF00 else count)
    assert len(mine.sections) == count - 1
    assert mine.sections[0].name == ".text"
    assert mine.sections[-1].name == ".shstrtab"
    assert mine.sections[1000].name == ".s999"
    assert len(mine.symbols(SHT_SYMTAB)[0]) == 2


def test_section_index_of_symbols_beyond_sixteen_bits() -> None:
    file = elf.Elf(elf.ET_REL)
    for number in range(65_600):
        file.add(f".s{number}", sh_type=elf.NOBITS)
    text = file.text()
    file.symbols([Symbol("far", text, 0, 16), Symbol("near", file.sections[9], 0, 0)])
    mine = view(file.bytes())
    assert mine.section_indices(SHT_SYMTAB).tolist() == [0, text.index, 10]


def test_absolute_symbols_are_of_no_section() -> None:
    file = elf.Elf(elf.ET_REL)
    text = file.text()
    table = file.symbols([Symbol("a", text), Symbol("b", text)])
    data = bytearray(table.data)
    struct.pack_into("<H", data, 24 + 6, 0xFFF1)  # SHN_ABS
    table.data = bytes(data)
    assert view(file.bytes()).section_indices(SHT_SYMTAB).tolist() == [0, 0, 1]


def test_sections_beyond_two_and_four_gigabytes(tmp_path: Path) -> None:
    file = elf.Elf(base=1 << 40)
    file.text()
    low = file.rodata(".low", b"behind 2^31", offset=(1 << 31) + 4096)
    high = file.rodata(".high", b"behind 2^32", offset=(1 << 32) + 8192)
    path = file.image().write(tmp_path / "big.so")
    assert path.stat().st_size > 1 << 32
    assert path.stat().st_blocks * 512 < 1 << 20
    import mmap

    with path.open("rb") as opened:
        mine = Elf(Reader("big.so", mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)))
        for built in (low, high):
            section = next(s for s in mine.sections if s.name.encode() == built.name)
            assert section.sh_offset == built.sh_offset
            assert bytes(mine.reader.view(section.sh_offset, section.sh_size)) == built.data
            assert mine.file_offsets(np.array([built.sh_addr], np.uint64)).tolist() == [built.sh_offset]


def test_names_that_share_their_ends() -> None:
    strings = ours.Strings(reader(b"\0.rela.text\0"), 0, 12)
    assert strings.names(np.array([1, 6, 0, 11, 12, 4000])) == [".rela.text", ".text", "", "", "", ""]


def test_a_string_table_without_its_last_nul() -> None:
    assert ours.Strings(reader(b"\0abc"), 0, 4).names(np.array([1, 3])) == ["abc", "c"]


def test_names_that_are_no_text() -> None:
    assert ours.Strings(reader(b"\xff\xfe\0"), 0, 3).names(np.array([0])) == [r"\xff\xfe"]


def test_names_that_overlap_beyond_reason_are_refused() -> None:
    long = reader(b"x" * 4096)
    with pytest.raises(FormatError, match="overlap beyond reason"):
        ours.Strings(long, 0, 4096).names(np.zeros(100_000, int))
    short = ours.Strings(reader(b".text\0"), 0, 6).names(np.zeros(100_000, int))  # clang -fno-unique-section-names
    assert short == [".text"] * 100_000


def test_sections_that_overlap_are_read() -> None:
    file = small()
    text = file.sections[0]
    file.add(".again", flags=ALLOC, offset=text.sh_offset + 8, size=200)
    assert [s.name for s in view(file.bytes()).named(".again")] == [".again"]


def test_sections_that_overlap_beyond_reason_are_refused() -> None:
    file = small()
    for _ in range(3000):
        file.add(".again", offset=0, size=1024)
    data = file.bytes()
    assert len(data) < 3000 * 1024 / 10
    with pytest.raises(FormatError, match="overlap beyond reason"):
        _ = view(data).sections


def test_a_section_behind_the_end_is_refused_with_its_header() -> None:
    file = small()
    file.add(".far", offset=64, size=1 << 40)
    data = file.bytes()
    with pytest.raises(FormatError, match="behind the end of the file") as caught:
        _ = view(data).sections
    shoff = struct.unpack_from("<Q", data, 0x28)[0]
    assert caught.value.offset == shoff + 64 * len(file.sections)
    assert caught.value.hint == "the file may be truncated"


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [(0, b"\x7fELG", "no ELF magic"), (4, b"\x01", "not a 64-bit"), (5, b"\x02", "not a little-endian")],
)
def test_other_files_are_refused(offset: int, value: bytes, message: str) -> None:
    data = bytearray(small().bytes())
    data[offset : offset + len(value)] = value
    with pytest.raises(FormatError, match=message) as caught:
        view(bytes(data))
    assert caught.value.offset == offset


def test_errors_name_a_place_inside_the_file() -> None:
    data = bytearray(small().bytes())
    struct.pack_into("<Q", data, 0x28, (1 << 64) - 64)  # e_shoff
    with pytest.raises(FormatError) as caught:
        _ = view(bytes(data)).sections
    assert caught.value.offset == len(data)


def test_relocations_are_sorted_by_place() -> None:
    file = small()
    file.relocations([(0x300, 7), (0x100, 5), (0x200, 6)])
    places, addends = view(file.bytes()).relative_addends
    assert places.tolist() == [0x100, 0x200, 0x300]
    assert addends.tolist() == [5, 6, 7]


def test_segments_that_no_loader_maps() -> None:
    sound = small()
    assert view(sound.bytes()).misaligned_segments() == []
    broken = small()
    text = broken.sections[0]
    broken.segment(elf.PT_LOAD, 5, text.sh_offset, text.sh_addr, 64, 64)
    broken.segment(elf.PT_LOAD, 5, text.sh_offset + 8, text.sh_addr, 64, 64)  # 8 off within the page
    broken.segment(elf.PT_LOAD, 5, text.sh_offset, text.sh_addr + 0x1000, 64, 64, align=0x200000)  # off by one page
    broken.segment(elf.PT_LOAD, 5, text.sh_offset, text.sh_addr + 0x1000, 64, 64, align=0x1000)
    broken.segment(elf.PT_NOTE, 4, text.sh_offset + 8, text.sh_addr, 64, 64, align=4)  # not loaded by itself
    assert view(broken.bytes()).misaligned_segments() == [64 + 56, 64 + 2 * 56]


def test_code_is_told_by_its_flag() -> None:
    file = small()
    file.add(".init", b"\xc3", flags=ALLOC | EXEC)
    assert [s.name for s in view(file.bytes()).sections if s.is_code] == [".text", ".init"]
