"""Damaged and malicious input: a FormatError or a right answer, in bounded time and memory. Never anything else."""

from __future__ import annotations

import contextlib
import gzip
import lzma
import random
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubloat.errors import FormatError, GpubloatError
from gpubloat.libraries import contents, inputs, regions, scan
from gpubloat.libraries.inputs import Input
from gpubloat.libraries.onefile import Options, scan_file
from gpubloat.libraries.reader import Reader
from gpubloat.tables.libraries import TABLES
from tests.build import containers, elf, fatbin
from tests.build.containers import DEFLATED, STORED
from tests.build.elf import ALLOC, Symbol
from tests.build.fatbin import CUBIN, PTX, element, region
from tests.libraries import hostile
from tests.libraries.common import conserved, library
from tests.libraries.hostile import Damage, bit_flips, cuts, fields, gauntlet, splices

SUBJECTS = hostile.subjects()
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Stop an endless loop. A quadratic reader of these inputs would take minutes to hours."""

    def late(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_subjects_are_sound(name: str) -> None:
    assert gauntlet(SUBJECTS[name])


@pytest.mark.parametrize("name", SUBJECTS)
def test_truncation(name: str) -> None:
    data = SUBJECTS[name]
    with within(60):
        read = [gauntlet(data[:cut]) for cut in cuts(data, random.Random(name))]
    assert not all(read) or name == "no sections" or "fatbin" in name  # nothing says where those end


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("damage", [bit_flips, fields, splices])
def test_damage(name: str, damage: Damage) -> None:
    with within(60):
        for seed in range(120):
            gauntlet(damage(SUBJECTS[name], random.Random(f"{name} {damage.__name__} {seed}")))


@pytest.mark.parametrize("name", ["library", "object", "fatbin", "concatenated fatbin", "archive"])
def test_tables_of_damaged_files_pass_their_schemas(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    read = 0
    for seed in range(12):
        damage = (bit_flips, fields, splices)[seed % 3]
        path.write_bytes(damage(SUBJECTS[name], random.Random(f"{name} schemas {seed}")))
        try:
            found = scan_file(Input("f", "f", str(path), is_named=True), Options("sm_90", kernels=True, threads=1))
        except FormatError:
            continue
        read += 1
        conserved({table: found.get(table, TABLES[table].none()) for table in TABLES}, path.stat().st_size)
        for table in ("elements", "sections", "problems") if seed else TABLES:
            TABLES[table].check(found[table], table)
    assert read > 0


def test_a_damaged_file_of_the_real_world(real_libraries: dict[str, Path]) -> None:
    data = real_libraries["lz4.block._block"].read_bytes()
    with within(60):
        for seed in range(60):
            gauntlet((fields, bit_flips)[seed % 2](data, random.Random(f"real {seed}")))
        for cut in cuts(data, random.Random(1))[::4]:
            gauntlet(data[:cut])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_any_element_headers(data: st.DataObject) -> None:
    u16, u32, u64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
    near = st.integers(0, 200)
    made = b""
    for _ in range(data.draw(st.integers(0, 3))):
        kind = data.draw(st.sampled_from([1, 2, 8, 0x40, 0x80, 0x100]) | u16)
        sizes = [data.draw(near.map(lambda n: n * 8) | wide) for wide in (u32, u64, u32, u32)]
        name = [data.draw(near | u32) for _ in range(2)]
        rest = (data.draw(u16), data.draw(u16), data.draw(near | u32), *name, data.draw(u64), 0, data.draw(near | u64))
        made += struct.pack("<HHIQIIHHIIIQQQ", kind, 0x101, *sizes, *rest) + data.draw(st.binary(max_size=64))
    size = data.draw(st.sampled_from([len(made), len(made) - 8, len(made) + 8]) | u64)
    gauntlet(struct.pack("<IHHQ", fatbin.MAGIC, 1, 16, max(size, 0)) + made + data.draw(st.binary(max_size=32)))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_any_elf_header(data: st.DataObject) -> None:
    u16, u32, u64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
    near = st.integers(0, 1500)
    body = SUBJECTS["library"][64:1600]
    machine = data.draw(st.sampled_from([62, 190]) | u16)
    offsets = [data.draw(near | u64) for _ in range(3)]
    counts = [data.draw(st.sampled_from([0, 1, 3, 56, 64, 0xFF00, 0xFFFF]) | u16) for _ in range(6)]
    fixed = (data.draw(st.sampled_from([1, 2, 3]) | u16), machine, 1)
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", *fixed, *offsets, data.draw(u32), *counts)
    gauntlet(head + body)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_any_section_headers(data: st.DataObject) -> None:
    read = [".text", ".eh_frame", ".eh_frame_hdr", ".nv_fatbin", ".nvFatBinSegment", ".note.gnu.build-id"]
    size = st.integers(0, 2000) | st.integers(0, (1 << 64) - 1)
    file = elf.Elf(data.draw(st.sampled_from([1, 2, 3])))
    file.text(data=data.draw(st.binary(max_size=200)))
    for _ in range(data.draw(st.integers(1, 6))):
        file.add(
            data.draw(st.sampled_from(read)),
            data.draw(st.binary(max_size=100) | st.sampled_from([SUBJECTS["fatbin"], elf.cubin()])),
            sh_type=data.draw(st.sampled_from([1, 2, 3, 4, 8, 11, 18])),
            flags=data.draw(st.integers(0, 7)),
            addr=data.draw(st.none() | size),
            size=data.draw(st.none() | size),
            link=data.draw(st.integers(0, 8)),
        )
    gauntlet(file.image(load=False).bytes())


# Time -----------------------------------------------------------------------------------------------------------------


def nested_chains(count: int = 30_000) -> bytes:
    """Region headers in the payloads of each other's elements; every chain fails at the end of the file."""
    made = bytearray()
    for index in range(count):
        made += struct.pack("<IHHQ", fatbin.MAGIC, 1, 16, (count - index) * 80 - 16) + element(bytes(16))[:64]
    made[-64:] = b"\xff" * 64
    return bytes(made)


def wrappers_into_a_chain() -> bytes:
    file = elf.Elf()
    held = file.rodata(".nv_fatbin", b"12345678" + nested_chains(20_000))
    file.wrappers([held.sh_addr + 8 + 80 * (i % 20_000) + i // 20_000 for i in range(60_000)])
    return file.bytes()


def lists_of_pointers() -> bytes:
    file = elf.Elf()
    listed = file.data(".data", b"".join(struct.pack("<Q", 0x200000 + i) for i in range(1, 100_000)))
    file.wrappers([listed.sh_addr] * 20_000, version=2, lists=[listed.sh_addr + 8 * i for i in range(20_000)])
    return file.bytes()


def false_cubins() -> bytes:
    """Many cubin headers that share one long section table, which only its last row makes impossible."""
    count, sections = 12_000, 65_000
    head = (b"\x7fELF\x02\x01\x01\x41\x08", 2, 190, 1, 0, 0)
    made = b"".join(
        struct.pack("<16sHHIQQQIHHHHHH", *head, 64 * (count - i), 90 << 8, 64, 56, 0, 64, sections, 0)
        for i in range(count)
    )
    table = struct.pack("<IIQQQQIIQQ", 0, 1, 0, 0, 0, 8, 0, 0, 0, 0) * (sections - 1)
    return bytes(8) + made + table + struct.pack("<IIQQQQIIQQ", 0, 1, 0, 0, 1 << 60, 8, 0, 0, 0, 0)


def zstd_chains() -> bytes:
    """Frames whose blocks hold the headers of the next frames, so that each goes on to the end."""
    block = struct.pack("<I", 9 << 3)[:3]  # raw, 9 bytes
    return bytes(8) + (b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", 1 << 20) + block) * 40_000


def overlapping_sections() -> bytes:
    file = elf.Elf()
    file.rodata(".rodata", bytes(1 << 20))
    for index in range(60_000):
        file.add(".nv_fatbin", offset=64 + index, size=100_000)
    return file.bytes()


def many_named_sections() -> bytes:
    file = elf.Elf()
    file.rodata(".rodata", region()[:8] * 4 + bytes(1 << 16))
    for index in range(30_000):
        file.add(".nv_fatbin", offset=1024 + 2 * index, size=1)
    return file.bytes()


def one_long_section_name() -> bytes:
    file = elf.Elf()
    text = file.text("." + "n" * 100_000, data=b"\x90" * 4096)
    file.symbols([Symbol("f", text, i % 4096, 1) for i in range(60_000)])
    return file.bytes()


def one_long_symbol_name() -> bytes:
    file = elf.Elf()
    text = file.text(data=b"\x90" * 4096)
    table = file.symbols([Symbol("f" * 200_000, text, 0, 1), *(Symbol("", text, i, 1) for i in range(4000))])
    rows = bytearray(table.data)
    for row in range(1, 4002):
        struct.pack_into("<I", rows, 24 * row, 1)
    table.data = bytes(rows)
    return file.bytes()


def many_unwind_headers() -> bytes:
    file = elf.Elf()
    text = file.text()
    file.eh_frame([(text.sh_addr + i % 64, 1) for i in range(30_000)], cies=30_000)
    return file.bytes()


def many_segments() -> bytes:
    file = elf.Elf()
    file.text()
    data = bytearray(file.image(table=False).bytes())
    struct.pack_into("<Q", data, 0x20, len(data))
    struct.pack_into("<H", data, 0x38, 65_000)
    return bytes(data) + struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, 1 << 20, 1 << 20, 4096) * 65_000


def names_without_an_end() -> bytes:
    members = b"".join(containers.header(b"/%d" % i, b"") for i in range(20_000))
    return b"!<arch>\n" + containers.header(b"//", b"n" * (1 << 20)) + members


def relocations_over_and_over() -> bytes:
    file = elf.Elf()
    file.wrappers([0] * 100)
    held = file.relocations([(i, i) for i in range(20_000)])
    for _ in range(2000):
        file.add(".rela", sh_type=elf.RELA, flags=ALLOC, offset=held.sh_offset, size=held.sh_size)
    return file.bytes()


TRAPS: dict[str, Callable[[], bytes]] = {
    "signatures everywhere": lambda: region()[:8] * (1 << 18),
    "nested chains": nested_chains,
    "empty regions": lambda: region() * 60_000,
    "too many regions": lambda: region() * 300_000,
    "empty elements": lambda: region([element()] * 20_000),
    "wrappers into a chain": wrappers_into_a_chain,
    "lists of pointers": lists_of_pointers,
    "false cubins": false_cubins,
    "cubin magics": lambda: bytes(8) + b"\x7fELF\x02\x01\x01" * 300_000,
    "zstd chains": zstd_chains,
    "zstd frames": lambda: bytes(8) + zstandard.ZstdCompressor().compress(b"a") * 60_000,
    "gzip magics": lambda: bytes(8) + b"\x1f\x8b\x08\0" * 500_000,
    "gzip bombs": lambda: bytes(8) + gzip.compress(bytes(1 << 20), mtime=0) * 3000,
    "xz magics": lambda: bytes(8) + lzma.compress(b"")[:12] * 200_000,
    "overlapping sections": overlapping_sections,
    "many named sections": many_named_sections,
    "one long section name": one_long_section_name,
    "one long symbol name": one_long_symbol_name,
    "many unwind headers": many_unwind_headers,
    "many segments": many_segments,
    "relocations over and over": relocations_over_and_over,
    "small archive members": lambda: b"!<arch>\n" + containers.header(b"a/", b"x" * 64) * 8000,
    "names without an end": names_without_an_end,
    "entries in PTX": lambda: region([element(b".entry " * (1 << 19), kind=PTX, how="zstd")] * 20),
    "PTX without line ends": lambda: region([element(b".entry a " + b"x" * 20_000_000, kind=PTX, how="zstd")] * 3),
    "many members": lambda: region([fatbin.concat([(CUBIN, 90, 0x11, b"")] * 20_000)]),
}


@pytest.mark.parametrize("name", TRAPS)
def test_time_is_linear(name: str) -> None:
    data = TRAPS[name]()
    with within(30):
        gauntlet(data)


# Memory ---------------------------------------------------------------------------------------------------------------

MEASURE = """
import pathlib, sys
from tests.libraries.hostile import gauntlet
def peak():  # ru_maxrss would start with what the parent had
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])
warm, *files = [pathlib.Path(name).read_bytes() for name in sys.argv[1:]]
gauntlet(warm)
before = peak()
for data in files:
    gauntlet(data)
print(peak() - before)
"""


def symbols_of_zeros() -> bytes:
    """A cubin that packs 10,000 to 1 and has eight million symbols of one name."""
    file = elf.Elf(elf.ET_EXEC, elf.EM_CUDA)
    code = file.text(".text.k", bytes(128))
    table = file.symbols([Symbol("k", code, 0, 128, other=0x10)])
    table.data = table.data[:24] + table.data[24:48] * 2_000_000
    table.sh_size, table.sh_offset = len(table.data), file.at
    file.at += len(table.data)
    return region([element(file.image(load=False).bytes(), how="zstd")] * 4)


def symbols_in_front() -> bytes:
    """The same in the order that NVIDIA's tools write: names, symbols, code, so that the symbols are read first."""
    file = elf.Elf(elf.ET_EXEC, elf.EM_CUDA, at=64)
    names = b"\0.shstrtab\0.strtab\0.symtab\0.text.k\0"
    file.add(".shstrtab", names, sh_type=elf.STRTAB, align=1)
    file.add(".strtab", names + b"k\0", sh_type=elf.STRTAB, align=1)
    symbol = struct.pack("<IBBHQQ", len(names), 0x12, 0x10, 5, 0, 128)
    file.add(".symtab", bytes(24) + symbol * 2_000_000, sh_type=elf.SYMTAB, link=2)
    file.add(".text.k", b"\xff" * (60 << 20), flags=elf.ALLOC | elf.EXEC)
    data = bytearray(file.image(load=False).bytes())
    struct.pack_into("<H", data, 0x3E, 1)  # e_shstrndx, where they have it
    return region([element(bytes(data), how="zstd")])


def lie(how: str, size: int) -> bytes:
    return region([element(elf.cubin(), how=how, uncompressed_size=size)] * 50)


LIES = [
    lambda: lie("zstd", (256 << 20) - 8),
    lambda: lie("lz4", (256 << 20) - 8),
    lambda: lie("zstd", 1 << 62),
    lambda: lie("lz4", 1 << 40),
    lambda: bytes(8) + gzip.compress(bytes(300 << 20), mtime=0),
    one_long_section_name,
    one_long_symbol_name,
    relocations_over_and_over,
]
BOMBS = [
    lambda: region([element(bytes(256 << 20), kind=PTX, how="zstd")] * 64),
    symbols_of_zeros,
    symbols_in_front,
    lambda: region([element(b"".join(b".entry a%d(\n" % i for i in range(60_000)), kind=PTX, how="zstd")] * 50),
]


@pytest.mark.parametrize(("bombs", "limit"), [(LIES, 64 << 20), (BOMBS, 900 << 20)], ids=["lies", "bombs"])
def test_memory_is_bounded(bombs: list[Callable[[], bytes]], limit: int, tmp_path: Path) -> None:
    """A claim costs nothing; a bomb costs its content (256 MB at most) and as much again for what is made of it."""
    files = [tmp_path / str(number) for number in range(len(bombs) + 1)]
    for path, make in zip(files, [lambda: SUBJECTS["library"], *bombs], strict=True):
        path.write_bytes(make())
    command = [sys.executable, "-c", MEASURE, *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) * 1024 < limit


def test_more_than_a_file_can_hold_is_not_decompressed() -> None:
    """64 elements of 256 MB in half a megabyte: what is beyond the budget is a problem, not a wait."""
    data = region([element(bytes(256 << 20), kind=PTX, how="zstd")] * 64)
    bound = Reader("bomb", data)
    (found,) = regions.find(bound, None).regions
    pieces = [contents.Code(0, i, e) for i, e in enumerate(found.elements)]
    reads = list(contents.read_all(bound, pieces, threads=1))
    refused = [r for r in reads if r.error is not None and "not decompressed" in str(r.error)]
    assert len(reads) == 64
    assert 55 <= len(refused) <= 61


# Containers -----------------------------------------------------------------------------------------------------------


def unpack(path: Path) -> None:
    for entry in inputs.discover([path]).files:
        with inputs.opened(entry) as reader:
            bytes(reader.view(0, reader.size))


@pytest.mark.parametrize("method", [STORED, DEFLATED])
def test_damaged_wheels(method: int, tmp_path: Path) -> None:
    code = library(region([element(elf.cubin())]))
    sound = containers.wheel(tmp_path / "sound.whl", {"a/lib.so": (code, method), "b.so": (code, STORED)}).read_bytes()
    path = tmp_path / "damaged.whl"
    directory = sound.index(b"PK\x01\x02")
    refused = 0
    with within(60):
        for seed in range(400):
            make = random.Random(f"wheel {seed}")
            if seed % 2:
                made = sound[:directory] + fields(sound[directory:], make)
            else:
                made = (bit_flips, fields, splices)[seed % 3](sound, make)
            path.write_bytes(made)
            try:
                unpack(path)
            except GpubloatError:
                refused += 1
        for cut in cuts(sound, random.Random(2)):
            path.write_bytes(sound[:cut])
            with contextlib.suppress(GpubloatError):
                unpack(path)
    assert refused > 50


def test_a_wheel_whose_member_has_a_very_long_name(tmp_path: Path) -> None:
    path = containers.wheel(tmp_path / "x.whl", {"n" * 60_000 + ".so": (library(region()), STORED)})
    with pytest.raises(FormatError, match="60003 characters"):
        inputs.discover([path])


def test_a_folder_of_everything_bad(tmp_path: Path) -> None:
    """One scan over all of it: every file is a row, none stops the others."""
    for number, (name, data) in enumerate(SUBJECTS.items()):
        (tmp_path / f"{number} {name}.so").write_bytes(fields(data, random.Random(number)))
        (tmp_path / f"{number} cut.so").write_bytes(data[: len(data) // 2])
    (tmp_path / "magic only.so").write_bytes(b"\x7fELF")
    (tmp_path / "empty.so").write_bytes(b"")
    (tmp_path / "old.fatbin").write_bytes(fatbin.OLD_MAGIC.to_bytes(4, "little") + bytes(100))
    (tmp_path / "new\nline \x1b[31m.so").write_bytes(SUBJECTS["library"])
    (tmp_path / "bad.whl").write_bytes(b"PK\3\4" + bytes(100))
    (tmp_path / "thin.a").write_bytes(b"!<thin>\n")
    run = scan(tmp_path, kernels=True, target="sm_90")
    files = [p for p in tmp_path.iterdir() if p.name != "empty.so"]
    assert len(run["libraries"]) == len(files)
    assert run["libraries"]["file_bytes"].sum() == sum(p.stat().st_size for p in files)
    bad = run["libraries"].query("format == 'unreadable'")["library"]
    assert {"bad.whl", "thin.a", "old.fatbin", "magic only.so"} <= set(bad) <= set(run["problems"]["library"])
    run.to_csv(tmp_path / "csv")
    text = (tmp_path / "csv" / "libraries.csv").read_text("utf-8")
    assert '"new\nline \x1b[31m.so"' in text


@pytest.mark.parametrize("name", ["new\nline.so", "\x1b[31mred\x1b[0m.so", "tab\t.so", "rtl\u202e.so"])
def test_messages_are_one_printable_line(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x7fELF")
    with pytest.raises(FormatError) as caught:
        scan(tmp_path / name)
    assert str(caught.value).isprintable()
    assert ".so" in str(caught.value)
