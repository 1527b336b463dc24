"""The container against NVIDIA's packer (what goes in comes out) and cuobjdump, and by hand for what nobody packs."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from gpubloat.errors import FormatError
from gpubloat.libraries import fatbin as ours
from gpubloat.libraries.fatbin import Element, Region
from tests import oracles
from tests.build import elf, fatbin
from tests.build.fatbin import ARCH, CUBIN, FAMILY, PTX, Code, code, element, packed, region
from tests.libraries.common import reader, scanned

MODES = {
    "default": (),
    "none": ("-compress-mode=none",),
    "speed": ("-compress-mode=speed",),
    "balance": ("-compress-mode=balance",),
    "size": ("-compress-mode=size",),
    "all": ("-compress-all",),
    "off": ("-compress=false",),
}
CUBIN_BYTES = elf.cubin()


def read(data: bytes, offset: int = 0) -> Region:
    return ours.region(reader(data), offset)


def only(data: bytes) -> Element:
    (found,) = read(region([data])).elements
    return found


def payload(data: bytes) -> bytes:
    """The code in the only element of a region."""
    made = reader(region([data]))
    return bytes(ours.payload(made, ours.region(made, 0).elements[0]))


@pytest.mark.parametrize("mode", MODES)
def test_what_goes_into_the_packer_comes_out(mode: str, targets: tuple[Code, ...]) -> None:
    data = packed(targets, MODES[mode])
    found = read(data)
    assert found.size == len(data)
    assert [e.target for e in found.elements] == [c.target for c in targets]
    assert [e.kind for e in found.elements] == [c.kind for c in targets]
    assert [e.identifier for e in found.elements] == [c.identifier for c in targets]
    for header, put in zip(found.elements, targets, strict=True):
        got = bytes(ours.payload(reader(data), header))
        if header.is_compressed:
            assert header.uncompressed_size == len(got)
        if put.kind == "cubin":
            assert got == put.data + bytes(len(got) - len(put.data))  # stored raw, it is padded to 8
            assert len(got) - len(put.data) < 8
        else:  # comments and empty lines are stripped from PTX
            assert b".visible .entry scale" in got
            assert len(got) <= len(put.data)
    packings = {e.compression for e in found.elements}
    assert packings == {
        "default": {"none", "zstd"}, "none": {"none"}, "off": {"none"}, "speed": {"none", "lz4"},
        "balance": {"none", "zstd"}, "size": {"zstd"}, "all": {"zstd"},
    }[mode]  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_elements_and_kernels_are_those_of_cuobjdump(mode: str, targets: tuple[Code, ...], tmp_path: Path) -> None:
    path = tmp_path / "unit.fatbin"
    path.write_bytes(packed(targets, MODES[mode]) * 2)
    run = scanned(path, kernels=True)
    seen = oracles.visible(run["elements"], run["regions"])
    assert oracles.our_elements(seen) == oracles.listed_elements(path)
    assert sum(oracles.listed_elements(path).values()) == 2 * len(targets)
    assert oracles.our_cubins(seen, run["kernels"]) == oracles.cubins(path)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 15, 16, 17, 200])
def test_identifiers_and_options_of_every_length(length: int) -> None:
    name, options = "n" * length, "-O3 " * (length // 4)
    codes = (code("sm_80", name), code("compute_90", name, options=options), code("sm_100f", name))
    data = packed(codes, ())
    found = read(data)
    assert [e.identifier for e in found.elements] == [name] * 3
    assert sum(e.header_size + e.payload_size for e in found.elements) == len(data) - 16
    joined = packed(codes, ("-concat",))
    members = [m for e in read(joined).elements for m in ours.members(reader(joined), e)]
    assert sorted(m.target or "" for m in members) == ["compute_90", "sm_100f", "sm_80"]
    assert [m.identifier for m in members] == [name] * 3


def test_concatenated_elements_hold_the_same_code(targets: tuple[Code, ...]) -> None:
    data = packed(targets, ("-concat",))
    found = read(data)
    assert {e.kind for e in found.elements} == {"concat"}
    assert len(found.elements) < len(targets)
    assert all(e.target is None for e in found.elements)
    code_of = {}
    for outer in found.elements:
        stream = bytes(ours.payload(reader(data), outer))
        members = ours.members(reader(data), outer)
        assert sum(m.size for m in members) == len(stream)
        code_of |= {m.identifier: (m.target, m.kind, stream[m.offset : m.offset + m.size]) for m in members}
    for put in targets:
        target, kind, got = code_of[put.identifier]
        assert (target, kind) == (put.target, put.kind)
        if kind == "cubin":
            assert got.rstrip(b"\0") == put.data.rstrip(b"\0")


def test_concatenated_elements_are_those_of_cuobjdump(targets: tuple[Code, ...], tmp_path: Path) -> None:
    path = tmp_path / "concat.fatbin"
    path.write_bytes(packed(targets, ("-concat",)))
    run = scanned(path, kernels=True)
    members = run["elements"][run["elements"]["member"].notna()]
    assert oracles.our_elements(members) == oracles.listed_elements(path)
    assert sorted(run["kernels"]["kernel"]) == sorted(fatbin.KERNELS * len(targets))
    assert (members["n_kernels"] == len(fatbin.KERNELS)).all()


def test_lto_ir_is_opaque() -> None:
    data = packed((code("compute_90", "lto", kind="lto_ir"),))
    (found,) = read(data).elements
    assert (found.kind, found.target, found.compression) == ("lto_ir", "lto_90", "unknown")
    stored = bytes(ours.payload(reader(data), found))
    assert stored == data[found.offset + found.header_size :][: found.compressed_size]


def test_tile_ir() -> None:
    put = b"\x7fTileIR\0" + bytes(range(200))
    data = packed((Code("tile_ir", "", put, "tiles"),))
    (found,) = read(data).elements
    assert (found.kind, found.kind_code, found.identifier) == ("tile_ir", 0x80, "tiles")
    assert bytes(ours.payload(reader(data), found)).rstrip(b"\0") == put.rstrip(b"\0")


def test_relocatable_ptx_comes_from_host_objects() -> None:
    inner = packed((code("compute_80", "unit"),), MODES["none"])
    host = elf.Elf(elf.ET_REL)
    held = host.rodata("__nv_relfatbin", inner)
    host.rodata("__nv_module_id", b"unit\0")
    host.wrappers([held.sh_addr])
    data = packed((Code("reloc", "", host.bytes()),), MODES["none"])
    (found,) = read(data).elements
    assert (found.kind, found.kind_code, found.target) == ("relocatable_ptx", 0x40, "compute_80")
    assert b".entry scale" in bytes(ours.payload(reader(data), found))


def test_a_region_of_size_zero() -> None:
    found = read(packed((Code("reloc", "", CUBIN_BYTES),)))  # nothing to take from a cubin
    assert (found.size, found.elements) == (16, ())


@pytest.mark.parametrize(
    ("kind", "flags", "target"),
    [
        (CUBIN, 0x11, "sm_90"),
        (CUBIN, 0x11 | ARCH, "sm_90a"),
        (CUBIN, 0x11 | FAMILY, "sm_90f"),
        (PTX, 0x11 | ARCH, "compute_90a"),
        (fatbin.LTO_IR, 0x11, "lto_90"),
        (fatbin.TILE_IR, 0x11, "sm_90"),
        (fatbin.RELOCATABLE_PTX, 0x11, "compute_90"),
        (0x10, 0x11, "compute_90"),
        (fatbin.CONCAT, 0x11, None),
    ],
)
def test_targets(kind: int, flags: int, target: str | None) -> None:
    assert only(element(CUBIN_BYTES, kind=kind, flags=flags)).target == target


@pytest.mark.parametrize("kind", [0, 3, 4, 0x10, 0x200, 0xFFFF])
def test_unknown_kinds_are_kept_whole(kind: int) -> None:
    found = only(element(b"something", kind=kind))
    assert (found.kind, found.kind_code, found.payload_size) == ("unknown", kind, 16)


@pytest.mark.parametrize("stored", [b"name", b"name\0", b"name    ", b"name\0\0\0\0", b"exactly8"])
def test_identifiers_count_the_nul_or_spaces_or_neither(stored: bytes) -> None:
    assert only(element(b"", identifier=stored)).identifier == stored.rstrip(b"\0 ").decode()


def test_an_identifier_that_is_no_text() -> None:
    assert only(element(b"", identifier=b"\xff\x1b[2J")).identifier == "\\xff\x1b[2J"


@pytest.mark.parametrize(("field", "value"), [("offset", 4000), ("size", 1 << 31), ("offset", 0), ("size", 0)])
def test_an_identifier_outside_the_header_is_none(field: str, value: int) -> None:
    assert only(element(b"", identifier=b"name", **{f"identifier_{field}": value})).identifier == ""


@pytest.mark.parametrize("how", ["zstd", "lz4"])
@pytest.mark.parametrize("data", [b"", b"x", bytes(100_000), CUBIN_BYTES], ids=["empty", "one", "zeros", "cubin"])
def test_both_compressions(how: str, data: bytes) -> None:
    assert payload(element(data, how=how)) == data


def test_the_header_with_the_old_plain_size_of_72() -> None:
    made = bytearray(element(CUBIN_BYTES))
    struct.pack_into("<I", made, 4, 72)
    made[64:64] = bytes(8)
    assert payload(bytes(made)) == CUBIN_BYTES


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (region([], magic=fatbin.OLD_MAGIC), "before CUDA 4"),
        (region([], magic=0x12345678), "no fatbin magic"),
        (region([], version=2), "version 2"),
        (region([], header_size=24), "header of 24 bytes"),
        (region([], size=8), "runs out of the file"),
        (region([], size=(1 << 64) - 16), "runs out of the file"),
        (region([element()[:40]]), "header runs out"),
        (region([element(header_size=0)]), "header of 0 bytes"),
        (region([element(header_size=65)]), "header of 65 bytes"),
        (region([element(header_size=1 << 31)]), "header of 2147483648 bytes"),
        (region([element(b"x", payload_size=16)]), "element of 16 bytes runs out"),
        (region([element(b"x", payload_size=(1 << 64) - 80)]), "runs out of its region"),
        (region([element(b"x", compressed_size=9)]), "9 compressed bytes"),
        (region([element(b"x", compressed_size=1, uncompressed_size=1 << 63)]), "uncompressed bytes"),
        (region([element(b"x")], size=71), "runs out of its region"),
        (region([element(b"x")], size=73), "runs out of the file"),
        (region([element(b"x"), bytes(63)]), "header runs out"),
        (region([element(b"x"), bytes(64)]), "header of 0 bytes"),
        (b"", "does not fit"),
        (region()[:12], "does not fit"),
    ],
)
def test_headers_that_contradict_themselves(made: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        read(made)
    assert 0 <= caught.value.offset <= len(made)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (element(b"x" * 99, how="zstd", uncompressed_size=98), "the header says 98"),
        (element(b"x" * 99, how="zstd", uncompressed_size=1 << 20), "the header says"),
        (element(b"x" * 99, how="lz4", uncompressed_size=98), "does not decompress"),
        (element(b"x" * 99, how="lz4", uncompressed_size=100), "decompresses to 99 bytes"),
        (element(b"x" * 99, how="lz4", uncompressed_size=1 << 27), "beyond what LZ4 can hold"),
        (element(b"x" * 99, how="zstd", uncompressed_size=1 << 40), "more than the limit"),
        (element(b"no frame", flags=fatbin.ZSTD, compressed_size=8, uncompressed_size=99), "does not decompress"),
        (element(b"no block", flags=fatbin.LZ4, compressed_size=8, uncompressed_size=99), "does not decompress"),
    ],
)
def test_payloads_that_do_not_hold_what_they_declare(made: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        payload(made)


def test_concatenated_elements_by_hand() -> None:
    members = [(CUBIN, 80, 0x11, b"eighty"), (CUBIN, 90, 0x11 | ARCH, b"ninety a"), (PTX, 75, 0x11, b"p" * 17)]
    made = reader(region([fatbin.concat(members, identifiers=[b"one", b"", b"sixteen letters!"])]))
    (outer,) = ours.region(made, 0).elements
    stream = bytes(ours.payload(made, outer))
    found = [(m.target, m.identifier, stream[m.offset : m.offset + m.size]) for m in ours.members(made, outer)]
    assert found == [
        ("sm_80", "one", b"eighty\0\0"),
        ("sm_90a", "", b"ninety a"),
        ("compute_75", "sixteen letters!", b"p" * 17 + bytes(7)),
    ]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"count": 3}, "bytes for 3 members"),
        ({"count": 0xFFFFFFFF}, "for 4294967295 members"),
        ({"options_offset": 0}, "without a table"),
        ({"options_offset": 4000}, "without a table"),
        ({"uncompressed_size": 8}, "not the next one in the stream of 8 bytes"),
    ],
)
def test_tables_of_concatenated_elements_that_lie(damage: dict[str, int], message: str) -> None:
    made = reader(region([fatbin.concat([(CUBIN, 80, 0x11, b"a" * 8), (CUBIN, 90, 0x11, b"b" * 8)], **damage)]))
    with pytest.raises(FormatError, match=message):
        ours.members(made, ours.region(made, 0).elements[0])


@pytest.mark.parametrize("size", [16, 1 << 30])
def test_members_of_a_stream_that_is_not_compressed_end_with_it(size: int) -> None:
    made = bytearray(fatbin.concat([(CUBIN, 80, 0x11, b"a" * 8)], how="", uncompressed_size=1 << 40))
    struct.pack_into("<Q", made, 64 + 8 + 8, size)  # length of the member
    bound = reader(region([bytes(made)]))
    with pytest.raises(FormatError, match="in the stream of 8 bytes"):
        ours.members(bound, ours.region(bound, 0).elements[0])


def test_members_that_do_not_follow_each_other() -> None:
    made = bytearray(fatbin.concat([(CUBIN, 80, 0x11, b"a" * 8), (CUBIN, 90, 0x11, b"b" * 8)]))
    struct.pack_into("<I", made, 64 + 8 + 64 + 4, 0)  # both at the start of the stream
    bound = reader(region([bytes(made)]))
    with pytest.raises(FormatError, match="member 1"):
        ours.members(bound, ours.region(bound, 0).elements[0])
