"""Where fatbins and cubins are found: sections, wrappers, anywhere else; and what is no fatbin."""

from __future__ import annotations

import gzip
import lzma
import random
import struct
import zlib
from pathlib import Path

import lz4.frame
import pytest
import zstandard

from gpubloat.errors import FormatError
from gpubloat.libraries import regions as ours
from gpubloat.libraries.hostdata import FORMATS
from gpubloat.libraries.regions import Found
from tests.build import elf, fatbin
from tests.build.elf import ALLOC
from tests.build.fatbin import element, region
from tests.libraries.common import find, library, reader, scanned

CUBIN = elf.cubin()
ONE = region([element(CUBIN), element(CUBIN, number=80, how="zstd")])
TWO = region([element(b".visible .entry p(", kind=fatbin.PTX)])
BIG = random.Random(7).randbytes(3000)


def offsets(found: Found) -> list[int]:
    return [r.offset for r in found.regions]


def problems(found: Found) -> list[str]:
    return [p.problem for p in found.problems]


@pytest.mark.parametrize("section", [".nv_fatbin", "__nv_relfatbin", ".ldata", ".lrodata", ".cask_resource", ".rodata"])
def test_a_fatbin_in_any_section(section: str, tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(ONE + TWO, section=section, wrapped=False))
    run = scanned(path)
    assert run["regions"]["section"].tolist() == [section] * 2
    assert run["elements"]["section"].tolist() == [section] * 3
    assert not run["regions"]["is_wrapped"].any()
    assert run["libraries"]["gpu_code_bytes"].tolist() == [len(ONE) + len(TWO)]
    assert len(run["problems"]) == 0


@pytest.mark.parametrize("filled", [True, False], ids=["pointers in the file", "pointers in relocations"])
@pytest.mark.parametrize("version", [1, 2])
def test_wrappers_match_regions(version: int, filled: bool) -> None:
    file = elf.Elf()
    file.text()
    held = file.rodata(".nv_fatbin", ONE + TWO)
    file.wrappers([held.sh_addr, held.sh_addr + len(ONE)], version=version, filled=filled)
    found = find(file.bytes())
    assert found.wrapped == {held.sh_offset, held.sh_offset + len(ONE)}
    assert problems(found) == []


def test_a_region_without_a_wrapper_and_a_wrapper_without_a_region() -> None:
    file = elf.Elf()
    held = file.rodata(".nv_fatbin", ONE + TWO)
    segment = file.wrappers([held.sh_addr + len(ONE), held.sh_addr + 8, 1 << 40, 0])
    found = find(file.bytes())
    assert len(found.regions) == 2
    assert found.wrapped == {held.sh_offset + len(ONE)}
    assert problems(found) == ["wrapper_without_region"] * 3
    assert [p.offset for p in found.problems] == [segment.sh_offset + 24 * i for i in (1, 2, 3)]


@pytest.mark.parametrize("filled", [True, False])
def test_version_two_names_regions_that_were_linked_before(filled: bool) -> None:
    file = elf.Elf()
    linked = file.rodata(".nv_fatbin", ONE)
    before = file.rodata("__nv_relfatbin", TWO + ONE)
    pointers = [before.sh_addr, before.sh_addr + len(TWO)]
    listed = file.data(".data", struct.pack("<3Q", *(pointers if filled else (0, 0)), 0))
    place = file.base + -(-file.at // 8) * 8
    segment = file.data(".nvFatBinSegment", struct.pack("<IIQQ", 0x466243B1, 2, linked.sh_addr, listed.sh_addr))
    assert segment.sh_addr == place
    if not filled:
        file.relocations([(listed.sh_addr, pointers[0]), (listed.sh_addr + 8, pointers[1])])
    found = find(file.bytes())
    assert len(found.regions) == 3
    assert found.wrapped == set(offsets(found))


def test_wrappers_of_an_unknown_version() -> None:
    file = elf.Elf()
    held = file.rodata(".nv_fatbin", ONE)
    file.wrappers([held.sh_addr], version=3)
    found = find(file.bytes())
    assert problems(found) == ["unknown_version"]
    assert found.wrapped == set()
    assert len(found.regions) == 1


def test_wrappers_of_objects_are_not_filled_in_yet() -> None:
    file = elf.Elf(elf.ET_REL)
    file.rodata(".nv_fatbin", ONE)
    file.wrappers([0])
    assert problems(find(file.bytes())) == []


def test_a_region_that_only_its_wrapper_finds() -> None:
    file = elf.Elf()
    held = file.rodata(".nv_fatbin", b"odd" + ONE)
    file.wrappers([held.sh_addr + 3])
    found = find(file.bytes())
    assert offsets(found) == [held.sh_offset + 3]
    assert found.wrapped == {held.sh_offset + 3}


def test_wrappers_cannot_add_a_region_inside_another() -> None:
    inner = region([element(b"inner")])
    outer = region([element(b"\0" * 3 + inner)])
    file = elf.Elf()
    held = file.rodata(".nv_fatbin", outer)
    file.wrappers([held.sh_addr, held.sh_addr + 16 + 64 + 3])
    found = find(file.bytes())
    assert offsets(found) == [held.sh_offset]
    assert problems(found) == ["wrapper_without_region"]


def test_no_section_table_is_needed() -> None:
    file = elf.Elf()
    file.text()
    held = file.rodata(".nv_fatbin", ONE + TWO)
    found = find(file.image(table=False).bytes())
    assert offsets(found) == [held.sh_offset, held.sh_offset + len(ONE)]


def test_fatbins_in_other_bytes() -> None:
    found = find(b"head" * 6 + ONE + bytes(8) + TWO, is_elf=False)
    assert offsets(found) == [24, 24 + len(ONE) + 8]


@pytest.mark.parametrize("count", [1, 2, 40])
def test_regions_follow_each_other_across_the_search_window(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for chunk in (256, 1024, 1 << 20):
        monkeypatch.setattr(ours, "CHUNK", chunk)
        made = b"".join(ONE + bytes(8 * (i % 5)) for i in range(count))
        assert len(find(made + BIG[:2048], is_elf=False).regions) == count


def test_a_signature_in_code_is_no_fatbin() -> None:
    file = elf.Elf()
    signature = ONE[:8]
    file.text(".text", b"\x48\xb8" + bytes(6) + signature + b"\x90" * 48 + signature + b"\xff" * 64)
    file.rodata(".nv_fatbin", ONE)
    found = find(file.bytes())
    assert len(found.regions) == 1
    assert problems(found) == []


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (region([], magic=fatbin.OLD_MAGIC), "old_magic"),
        (region([], version=3), "unknown_version"),
        (region([element(b"x", payload_size=1 << 40)]), "unreadable"),
        (b"no fatbin at all, just text that fills some bytes", "unreadable"),
    ],
)
def test_the_rest_of_a_fatbin_section_is_explained(damage: bytes, problem: str) -> None:
    damage += bytes(-len(damage) % 8)
    file = elf.Elf()
    held = file.rodata(".nv_fatbin", ONE + damage + ONE)
    found = find(file.bytes())
    assert offsets(found) == [held.sh_offset, held.sh_offset + len(ONE + damage)]
    assert problems(found) == [problem]
    (only,) = found.problems
    assert held.sh_offset + len(ONE) <= only.offset < held.sh_offset + len(ONE + damage)


def test_zeros_between_regions_need_no_explanation() -> None:
    file = elf.Elf()
    file.rodata(".nv_fatbin", ONE + bytes(4096) + TWO + bytes(64))
    assert problems(find(file.bytes())) == []


def test_a_truncated_last_region() -> None:
    file = elf.Elf()
    file.rodata(".nv_fatbin", TWO)
    data = file.image(table=False).bytes()
    cut = data[: data.index(TWO) + len(TWO) - 4]
    assert offsets(find(cut)) == []


@pytest.mark.parametrize("shift", range(0, 16, 3))
@pytest.mark.parametrize("section", [".rodata", ".data", ".nv_fatbin"])
def test_a_bare_cubin_in_host_data(section: str, shift: int) -> None:
    file = elf.Elf()
    file.text()
    held = file.rodata(section, b"s" * shift + CUBIN + b"text" + CUBIN)
    found = find(file.bytes())
    assert [(c.offset, c.size, c.target) for c in found.cubins] == [
        (held.sh_offset + shift, len(CUBIN), "sm_90"),
        (held.sh_offset + shift + len(CUBIN) + 4, len(CUBIN), "sm_90"),
    ]


def test_a_bare_cubin_in_code_or_debug_data_is_left_alone() -> None:
    file = elf.Elf()
    file.text(".text", CUBIN)
    file.add(".debug_info", CUBIN)
    assert find(file.bytes()).cubins == []


def test_cubins_inside_a_fatbin_are_no_bare_cubins() -> None:
    assert find(library(ONE)).cubins == []


def test_a_bare_cubin_that_does_not_fit_into_its_section() -> None:
    file = elf.Elf()
    file.rodata(".rodata", CUBIN[:-8])
    file.text(".text", CUBIN[-8:])
    assert find(file.bytes()).cubins == []


def test_a_real_cubin_as_a_c_array(tmp_path: Path) -> None:
    code = fatbin.compiled("sm_90a")
    file = elf.Elf()
    file.text()
    file.rodata(".rodata", b"int" + code)
    path = tmp_path / "lib.so"
    path.write_bytes(file.bytes())
    run = scanned(path, kernels=True)
    row = run["elements"].iloc[0]
    assert (row["section"], row["target"], row["payload_bytes"]) == (".rodata", "sm_90a", len(code))
    assert run["regions"]["is_raw_cubin"].tolist() == [True]
    assert sorted(run["kernels"]["kernel"]) == fatbin.KERNELS


@pytest.mark.parametrize("how", ["zstd", "zstd without its size"])
def test_a_cubin_as_a_bare_zstd_frame(how: str) -> None:
    frame = zstandard.ZstdCompressor(write_content_size=how == "zstd").compress(CUBIN)
    file = elf.Elf()
    held = file.rodata(".ldata", b"x" * 5 + frame + b"y" * 5)
    found = find(file.bytes())
    if how == "zstd":
        (raw,) = found.cubins
        assert (raw.offset, raw.size, raw.uncompressed_size) == (held.sh_offset + 5, len(frame), len(CUBIN))
        assert (raw.compression, raw.target) == ("zstd", "sm_90")
        assert problems(found) == []
    else:
        assert found.cubins == []
        assert problems(found) == ["compressed_data"]
        assert "it starts as an ELF file" in found.problems[0].detail


def seven_zip(data: bytes) -> bytes:
    start = struct.pack("<QQI", len(data), 32, zlib.crc32(data))
    return b"7z\xbc\xaf\x27\x1c\0\4" + struct.pack("<I", zlib.crc32(start)) + start + data


COMPRESSED = {
    "zstd": zstandard.ZstdCompressor().compress,
    "lz4": lz4.frame.compress,
    "gzip": lambda data: gzip.compress(data, mtime=0),
    "xz": lzma.compress,
    "7z": seven_zip,
}


@pytest.mark.parametrize("form", COMPRESSED)
@pytest.mark.parametrize("content", ["host library", "fatbin", "other"])
def test_compressed_data_is_reported_and_not_analysed(form: str, content: str) -> None:
    inside = {"host library": library(ONE), "fatbin": ONE, "other": BIG}[content]
    file = elf.Elf()
    held = file.rodata(".rodata", b"pad" + COMPRESSED[form](inside) + b"pad")
    found = find(file.bytes())
    (problem,) = [p for p in found.problems if p.problem == "compressed_data"]
    assert problem.offset == held.sh_offset + 3
    assert problem.detail.startswith(f"{form} data")
    said = {"host library": "it starts as an ELF file", "fatbin": "it starts as a fatbin", "other": "not analysed"}
    assert said[content] in problem.detail or form == "7z"  # a 7z file is not opened
    assert found.regions == []


@pytest.mark.parametrize("magic", FORMATS)
def test_the_first_bytes_alone_are_no_compressed_data(magic: bytes) -> None:
    made = random.Random(5)
    file = elf.Elf()
    file.rodata(".rodata", b"".join(magic + made.randbytes(made.randrange(0, 5000)) for _ in range(300)))
    assert problems(find(file.bytes())) == []


def test_compressed_debug_data_and_code_are_not_reported() -> None:
    file = elf.Elf()
    file.text(".text", gzip.compress(BIG))
    file.add(".gnu_debugdata", lzma.compress(BIG))
    file.add(".debug_str", zstandard.ZstdCompressor().compress(BIG))
    assert problems(find(file.bytes())) == []


def test_many_compressed_blobs_give_a_bounded_number_of_rows() -> None:
    file = elf.Elf()
    file.rodata(".rodata", gzip.compress(b"small", mtime=0) * 500)
    found = find(file.bytes())
    assert len(found.problems) == 100
    assert found.problems[-1].detail.endswith("further ones are not listed")


def test_overlapping_sections_do_not_repeat_a_find() -> None:
    file = elf.Elf()
    held = file.rodata(".nv_fatbin", ONE + b"rest of the section" + CUBIN)
    file.add(".nv_fatbin", flags=ALLOC, offset=held.sh_offset, size=held.sh_size)
    file.add(".again", flags=ALLOC, offset=held.sh_offset + 8, size=held.sh_size - 8)
    found = find(file.bytes())
    assert len(found.regions) == len(found.cubins) == 1
    assert problems(found) == ["unreadable"]


def test_too_many_regions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "MAX_REGIONS", 10)
    with pytest.raises(FormatError, match="more than 10 fatbin regions"):
        find(region() * 11, is_elf=False)
    assert len(find(region() * 10, is_elf=False).regions) == 10


def test_empty_files() -> None:
    assert ours.find(reader(b""), None) == Found()
    assert ours.find(reader(b"1234567"), None) == Found()
