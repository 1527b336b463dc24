"""Reading the first bytes of a packed cubin finds what reading it whole finds, or says that it cannot tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import zstandard

from gpubloat.errors import FormatError
from gpubloat.libraries import cubin, cubinhead, elf, fatbin, inputs, regions
from gpubloat.libraries.cubin import Contents
from gpubloat.libraries.reader import Reader


@pytest.fixture(scope="module")
def cubins(sample_wheel: Path) -> list[bytes]:
    """The packed cubins of a real library that are large enough to be worth it, decompressed."""
    found = []
    for entry in inputs.discover([sample_wheel]).files:
        with inputs.opened(entry) as reader:
            for region in regions.find(reader, elf.Elf(reader)).regions:
                for element in region.elements:
                    if element.kind == "cubin" and element.uncompressed_size >= 2 * cubinhead.BLOCK:
                        found.append(bytes(fatbin.payload(reader, element)))
    assert len(found) >= 5
    return found


def by_head(data: bytes, frame: bytes | None = None) -> Contents | None:
    packed = zstandard.compress(data, 3) if frame is None else frame
    return cubinhead.read(Reader("x", packed), memoryview(packed), len(data))


def test_real_cubins_read_the_same(cubins: list[bytes]) -> None:
    for data in cubins:
        assert by_head(data) == cubin.read(Reader("x", data))


def test_the_code_is_not_decompressed(cubins: list[bytes]) -> None:
    data = max(cubins, key=len)
    packed = zstandard.compress(data, 3)
    damaged = packed[:-1000] + bytes(1000)
    with pytest.raises(FormatError):
        fatbin.unzstd(Reader("x", damaged), 0, memoryview(damaged), len(data))
    assert by_head(data, damaged) == cubin.read(Reader("x", data))


def section(data: bytes, number: int) -> tuple[int, int]:
    reader = Reader("x", data)
    row = elf.section_table(reader, elf.header(reader))[number]
    return int(row["sh_offset"]), int(row["sh_size"])


def test_a_kernel_that_is_missing_among_the_symbols_is_noticed(cubins: list[bytes]) -> None:
    for data in cubins:
        start, size = section(data, 3)
        changed = bytearray(data)
        for at in range(start, start + size, elf.SYM.itemsize):
            if changed[at + 4] & 0xF == elf.STT_FUNC and changed[at + 5] & cubin.STO_CUDA_ENTRY:
                changed[at + 4] = 0  # no function any more
                break
        assert by_head(bytes(changed)) is None


def test_a_kernel_without_a_section_is_noticed(cubins: list[bytes]) -> None:
    for data in cubins:
        assert by_head(data.replace(b"\0.text.", b"\0.tekst.", 1)) is None


def test_a_symbol_table_that_ends_early_is_noticed(cubins: list[bytes]) -> None:
    for data in cubins:
        start, size = section(data, 3)
        changed = bytearray(data)
        changed[start + 48 : start + 52] = b"\xff\xff\xff\xff"  # the third symbol has no name in the table
        assert by_head(bytes(changed)) is None
        assert size > 72


def test_another_order_of_sections_is_read_whole(cubins: list[bytes]) -> None:
    data = bytearray(cubins[0])
    data[62:64] = b"\x02\x00"  # e_shstrndx
    assert by_head(bytes(data)) is None


@pytest.mark.parametrize("size", [0, 100, 300_000])
def test_other_bytes_are_read_whole(size: int) -> None:
    assert by_head(bytes(size)) is None
    assert by_head(bytes(size), b"no zstd frame") is None


def test_every_flip_in_the_head_is_noticed_or_harmless(cubins: list[bytes]) -> None:
    data = min(cubins, key=len)
    truth = cubin.read(Reader("x", data))
    start, size = section(data, 3)
    for place in range(64, start + size, max((start + size) // 300, 1)):
        changed = bytearray(data)
        changed[place] ^= 0x10
        try:
            whole = cubin.read(Reader("x", bytes(changed)))
        except FormatError:
            whole = None
        head = by_head(bytes(changed))
        assert head is None or head in (whole, truth)


def test_a_frame_that_holds_less_than_declared_ends(cubins: list[bytes]) -> None:
    data = cubins[0]
    packed = zstandard.compress(data[:1000], 3)
    assert cubinhead.read(Reader("x", packed), memoryview(packed), len(data)) is None
