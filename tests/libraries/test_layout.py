"""Every byte gets one label: the parts of a file add up to it and do not overlap, whatever the file."""

from __future__ import annotations

import struct
from pathlib import Path

import lief
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubloat.errors import FormatError
from gpubloat.libraries import layout, regions
from gpubloat.libraries.elf import Elf
from gpubloat.libraries.layout import Span
from gpubloat.tables.libraries import LABELS
from tests.build import elf, fatbin
from tests.build.elf import ALLOC, EXEC, NOBITS, NOTE, PROGBITS, RELA, STRTAB, WRITE
from tests.libraries.common import library, reader, tables

REGION = fatbin.region([fatbin.element(elf.cubin())])


def spans(data: bytes, *, is_elf: bool = True) -> list[Span]:
    """The spans of a file, after the law is checked: they cover it once."""
    bound = reader(data)
    view = Elf(bound) if is_elf else None
    found = layout.spans(bound, view, regions.find(bound, view))
    at = 0
    for span in found:
        assert span.start == at < span.stop
        assert span.label in LABELS
        at = span.stop
    assert at == len(data)
    return found


def label_bytes(found: list[Span]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for span in found:
        sizes[span.label] = sizes.get(span.label, 0) + span.stop - span.start
    return sizes


@pytest.mark.parametrize("name", ["libstdc++", "numpy._core._multiarray_umath", "lz4.block._block"])
def test_code_and_sections_are_those_of_lief(name: str, real_libraries: dict[str, Path]) -> None:
    path = real_libraries[name]
    found = tables(path, functions=False, digests=False)
    theirs = lief.ELF.parse(str(path))
    assert theirs is not None
    stored = [s for s in theirs.sections if s.type != lief.ELF.Section.TYPE.NOBITS and s.size]
    code = sum(s.size for s in stored if s.has(lief.ELF.Section.FLAGS.EXECINSTR))
    assert found["libraries"]["cpu_code_bytes"].tolist() == [code]
    sizes = found["sections"].set_index("section")["size_bytes"]
    for section in stored:
        if section.name != ".shstrtab" and section.size > 64:
            assert sizes.loc[[section.name]].sum() == section.size


def test_a_library_by_hand() -> None:
    file = elf.Elf()
    text = file.text(".text", b"\x90" * 100)
    held = file.rodata(".nv_fatbin", REGION)
    tail = file.rodata(".rodata", b"constants")
    file.bss(1 << 20)
    found = spans(file.bytes())
    by_name = {(s.section, s.label): (s.start, s.stop - s.start) for s in found if s.section != "(no section)"}
    assert by_name[".text", "cpu_code"] == (text.sh_offset, 100)
    assert by_name[".nv_fatbin", "gpu_code"] == (held.sh_offset, len(REGION))
    assert by_name[".rodata", "read_only_data"] == (tail.sh_offset, 9)
    assert by_name["(ELF header)", "headers"] == (0, 64)
    assert by_name["(program headers)", "headers"] == (64, 56 * len(file.segments))
    assert by_name["(section headers)", "headers"][1] == 64 * 6
    assert not any(section == ".bss" for section, _ in by_name)


@pytest.mark.parametrize(
    ("name", "sh_type", "flags", "label"),
    [
        (".text", PROGBITS, ALLOC | EXEC, "cpu_code"),
        (".init", PROGBITS, ALLOC | EXEC, "cpu_code"),
        (".rodata", PROGBITS, ALLOC, "read_only_data"),
        (".data.rel.ro", PROGBITS, ALLOC | WRITE, "data"),
        (".dynamic", 6, ALLOC | WRITE, "data"),
        (".eh_frame", PROGBITS, ALLOC, "unwind"),
        (".gcc_except_table", PROGBITS, ALLOC, "unwind"),
        (".symtab", 2, 0, "symbols"),
        (".strtab", STRTAB, 0, "symbols"),
        (".gnu.hash", 0x6FFFFFF6, ALLOC, "symbols"),
        (".gnu.version_r", 0x6FFFFFFE, ALLOC, "symbols"),
        (".rela.dyn", RELA, ALLOC, "relocations"),
        (".relr.dyn", 19, ALLOC, "relocations"),
        (".debug_info", PROGBITS, 0, "debug"),
        (".note.gnu.build-id", NOTE, ALLOC, "notes"),
        (".comment", PROGBITS, 0, "notes"),
        ("", PROGBITS, ALLOC, "read_only_data"),
    ],
)
def test_labels(name: str, sh_type: int, flags: int, label: str) -> None:
    file = elf.Elf()
    made = file.add(name, b"\xff" * 40, sh_type=sh_type, flags=flags)
    found = [s for s in spans(file.bytes()) if s.start <= made.sh_offset < s.stop]
    assert [(s.section, s.label) for s in found] == [(name, label)]


def test_bytes_of_nobody_are_padding_if_zero_and_unattributed_if_not() -> None:
    file = elf.Elf()
    first = file.rodata(".a", b"a")
    second = file.add(".b", b"b", flags=ALLOC, offset=first.sh_offset + 4096)
    image = file.image()
    assert label_bytes(spans(image.bytes())).get("unattributed", 0) == 0
    image.pieces.append((first.sh_offset + 100, b"hidden"))
    found = spans(image.bytes())
    gap = [s for s in found if s.start == first.sh_offset + 1]
    assert [(s.stop, s.section, s.label) for s in gap] == [(second.sh_offset, "(no section)", "unattributed")]
    tail = [s for s in spans(image.bytes() + b"appended") if s.label == "unattributed"][-1]
    assert tail.stop - tail.start == 8


def test_segments_take_the_place_of_sections() -> None:
    file = elf.Elf()
    file.text(".text", b"\x90" * 100)
    file.rodata(".nv_fatbin", REGION)
    file.data(".data", b"d" * 50)
    found = spans(file.image(table=False).bytes())
    assert {(s.section, s.label) for s in found} >= {
        ("(segment)", "cpu_code"),
        ("(no section)", "gpu_code"),
        ("(segment)", "data"),
    }
    assert label_bytes(found)["cpu_code"] == 100
    assert label_bytes(found)["gpu_code"] == len(REGION)


def test_overlapping_sections_count_once_for_the_first() -> None:
    file = elf.Elf()
    first = file.rodata(".first", b"1" * 100)
    file.add(".second", flags=ALLOC, offset=first.sh_offset + 50, size=54)
    file.rodata(".third", b"3" * 100)
    sizes = {s.section: s.stop - s.start for s in spans(file.bytes())}
    assert (sizes[".first"], sizes[".third"]) == (100, 100)
    assert sizes[".second"] == 4


def test_a_region_across_two_sections_is_cut_where_they_meet() -> None:
    file = elf.Elf()
    file.rodata(".one", REGION[:104])
    file.rodata(".two", REGION[104:])
    gpu = [s for s in spans(file.bytes()) if s.label == "gpu_code"]
    assert [(s.section, s.stop - s.start) for s in gpu] == [(".one", 104), (".two", len(REGION) - 104)]


def test_headers_inside_a_region_count_as_gpu_code() -> None:
    """A crafted file: the elements must still add up to the GPU code."""
    file = elf.Elf()
    table = fatbin.region([fatbin.element(bytes(64 * 5))])
    held = file.rodata(".nv_fatbin", table)
    data = bytearray(file.bytes())
    struct.pack_into("<Q", data, 0x28, held.sh_offset + 80)  # e_shoff: null sections
    assert label_bytes(spans(bytes(data)))["gpu_code"] == len(table)


def test_other_bytes() -> None:
    found = spans(bytes(8) + REGION + b"tail", is_elf=False)
    assert [(s.label, s.stop - s.start) for s in found] == [
        ("padding", 8),
        ("gpu_code", len(REGION)),
        ("unattributed", 4),
    ]
    assert spans(b"", is_elf=False) == []


SECTIONS = st.lists(
    st.tuples(
        st.sampled_from([".text", ".rodata", ".nv_fatbin", ".symtab", ".bss", ".strtab", ""]),
        st.sampled_from([PROGBITS, STRTAB, NOBITS, NOTE, RELA, 2, 0]),
        st.sampled_from([0, ALLOC, ALLOC | EXEC, ALLOC | WRITE]),
        st.one_of(st.none(), st.integers(0, 3000)),  # offset; None: behind the last
        st.one_of(st.none(), st.integers(0, 2000)),  # a size that may be another than that of the bytes
        st.sampled_from([b"", b"x" * 33, bytes(40), REGION, REGION[:-8], elf.cubin(), REGION + b"?" * 9 + REGION]),
    ),
    max_size=8,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SECTIONS, st.booleans(), st.booleans(), st.binary(max_size=40))
def test_the_law_holds_for_any_sections(
    sections: list[tuple[str, int, int, int | None, int | None, bytes]], table: bool, load: bool, tail: bytes
) -> None:
    file = elf.Elf()
    for name, sh_type, flags, offset, size, content in sections:
        if offset is not None and offset < file.at:  # bytes are never overwritten, but headers can point anywhere
            content, size = b"", len(content) if size is None else size
        file.add(name, content, sh_type=sh_type, flags=flags, offset=offset, size=size)
    data = file.image(table=table, load=load).bytes() + tail
    if table and any(s.sh_type not in (NOBITS, 0) and s.sh_offset + s.sh_size > len(data) for s in file.sections):
        with pytest.raises(FormatError, match="behind the end"):
            spans(data)
        return
    found = spans(data)
    bound = reader(data)
    gpu = regions.find(bound, Elf(bound))
    stored = sum(r.size for r in gpu.regions) + sum(c.size for c in gpu.cubins)
    assert label_bytes(found).get("gpu_code", 0) == stored


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(max_size=300), st.binary(max_size=64))
def test_the_law_holds_for_any_bytes(head: bytes, tail: bytes) -> None:
    spans(head + REGION + tail, is_elf=False)


def test_the_pieces_of_a_whole_library(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(REGION))
    found = tables(path, kernels=True)
    assert found["sections"]["label"].isin(LABELS).all()
    assert found["elements"]["offset_bytes"].tolist() == [found["regions"]["offset_bytes"][0] + 16]
