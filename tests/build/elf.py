"""Write ELF64 files byte by byte, sound or damaged, without a compiler. Field names are those of elf.h.

Sections are placed in the order in which they are added, so a later one can hold the address of an earlier one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ET_REL, ET_EXEC, ET_DYN = 1, 2, 3
EM_X86_64, EM_CUDA = 62, 190
PT_LOAD, PT_NOTE, PT_GNU_STACK = 1, 4, 0x6474E551
PF_X, PF_W, PF_R = 1, 2, 4
PROGBITS, SYMTAB, STRTAB, RELA, NOTE, NOBITS, DYNSYM, SYMTAB_SHNDX = 1, 2, 3, 4, 7, 8, 11, 18
WRITE, ALLOC, EXEC = 1, 2, 4
LOCAL, GLOBAL, WEAK = 0, 1, 2
OBJECT, FUNC = 1, 2
R_X86_64_RELATIVE = 8
SHN_XINDEX, LORESERVE = 0xFFFF, 0xFF00

EHDR_SIZE, PHDR_SIZE, SHDR_SIZE, SYM_SIZE = 64, 56, 64, 24
RESERVED_PHDRS = 16


@dataclass
class Image:
    """A file as pieces at offsets; what lies between them is zero (and a hole, when written)."""

    pieces: list[tuple[int, bytes]]
    size: int

    def bytes(self) -> bytes:
        data = bytearray(self.size)
        for offset, piece in self.pieces:
            data[offset : offset + len(piece)] = piece
        return bytes(data)

    def write(self, path: Path) -> Path:
        with path.open("wb") as file:
            for offset, piece in self.pieces:
                file.seek(offset)
                file.write(piece)
            file.truncate(self.size)
        return path


@dataclass
class Section:
    """One section header and the bytes behind it."""

    index: int
    name: bytes
    data: bytes
    sh_type: int
    sh_flags: int
    sh_addr: int
    sh_offset: int
    sh_size: int
    sh_link: int
    sh_info: int
    sh_addralign: int
    sh_entsize: int


@dataclass
class Symbol:
    """A symbol; `section` None is an undefined one."""

    name: str | bytes
    section: Section | None
    value: int = 0
    size: int = 0
    kind: int = FUNC
    bind: int = GLOBAL
    other: int = 0


@dataclass
class Elf:
    """An ELF file under construction: `add` sections, then `image`."""

    e_type: int = ET_DYN
    e_machine: int = EM_X86_64
    base: int = 0x200000
    sections: list[Section] = field(default_factory=list)
    segments: list[bytes] = field(default_factory=list)
    at: int = EHDR_SIZE + RESERVED_PHDRS * PHDR_SIZE
    e_flags: int = 0
    ident: bytes = b"\x7fELF\x02\x01\x01"

    def add(
        self,
        name: str | bytes,
        data: bytes = b"",
        *,
        sh_type: int = PROGBITS,
        flags: int = 0,
        offset: int | None = None,
        addr: int | None = None,
        size: int | None = None,
        align: int = 8,
        link: int = 0,
        info: int = 0,
        entsize: int = 0,
    ) -> Section:
        """Place a section behind the last one, or at `offset`; `size` may differ from the bytes that are there."""
        if offset is None:
            offset = -(-self.at // align) * align
        length = len(data) if size is None else size
        if addr is None:
            addr = self.base + offset if flags & ALLOC and self.e_type != ET_REL else 0
        raw = name.encode() if isinstance(name, str) else name
        index = len(self.sections) + 1
        section = Section(index, raw, data, sh_type, flags, addr, offset, length, link, info, align, entsize)
        self.sections.append(section)
        if sh_type != NOBITS:
            self.at = max(self.at, offset + len(data))
        return section

    def text(self, name: str = ".text", data: bytes = b"\x90" * 64, **more: int) -> Section:
        return self.add(name, data, flags=ALLOC | EXEC, align=16, **more)

    def rodata(self, name: str = ".rodata", data: bytes = b"", **more: int) -> Section:
        return self.add(name, data, flags=ALLOC, **more)

    def data(self, name: str = ".data", data: bytes = b"", **more: int) -> Section:
        return self.add(name, data, flags=ALLOC | WRITE, **more)

    def bss(self, size: int, name: str = ".bss") -> Section:
        return self.add(name, sh_type=NOBITS, flags=ALLOC | WRITE, size=size)

    def symbols(self, symbols: Sequence[Symbol], *, dynamic: bool = False) -> Section:
        """Add .symtab or .dynsym, its strings, and .symtab_shndx where an index needs it."""
        strings = bytearray(b"\0")
        rows, extended = [bytes(SYM_SIZE)], [0]
        for s in sorted(symbols, key=lambda s: s.bind != LOCAL):
            raw = s.name.encode() if isinstance(s.name, str) else s.name
            index = s.section.index if s.section else 0
            short = index if index < LORESERVE else SHN_XINDEX
            value = s.value + (s.section.sh_addr if s.section else 0)
            rows.append(
                struct.pack("<IBBHQQ", len(strings) if raw else 0, s.bind << 4 | s.kind, s.other, short, value, s.size)
            )
            extended.append(index if short == SHN_XINDEX else 0)
            strings += raw + b"\0" if raw else b""
        flags = ALLOC if dynamic else 0
        names = self.add(".dynstr" if dynamic else ".strtab", bytes(strings), sh_type=STRTAB, flags=flags)
        table = self.add(
            ".dynsym" if dynamic else ".symtab", b"".join(rows), sh_type=DYNSYM if dynamic else SYMTAB, flags=flags,
            link=names.index, info=1 + sum(s.bind == LOCAL for s in symbols), entsize=SYM_SIZE,
        )  # fmt: skip
        if any(extended):
            data = struct.pack(f"<{len(extended)}I", *extended)
            self.add(".symtab_shndx", data, sh_type=SYMTAB_SHNDX, link=table.index, entsize=4)
        return table

    def eh_frame(self, functions: Iterable[tuple[int, int]], *, header: bool = True, **encoding: int) -> Section:
        """Add .eh_frame for (address, length) pairs, and its search table .eh_frame_hdr."""
        address = self.base + -(-self.at // 8) * 8 if self.e_type != ET_REL else 0
        functions = list(functions)
        data, entries = eh_frame(functions, address, **encoding)
        frame = self.add(".eh_frame", data, flags=ALLOC)
        if header:
            place = self.base + -(-self.at // 4) * 4
            pairs = zip(functions, entries, strict=True)
            rows = sorted((begin - place, frame.sh_addr + entry - place) for (begin, _), entry in pairs)
            table = struct.pack("<BBBBiI", 1, 0x1B, 0x03, 0x3B, frame.sh_addr - place - 4, len(rows))
            table += b"".join(struct.pack("<ii", *row) for row in rows)
            self.add(".eh_frame_hdr", table, flags=ALLOC, align=4)
        return frame

    def relocations(self, entries: Iterable[tuple[int, int]], name: str = ".rela.dyn") -> Section:
        """Add R_X86_64_RELATIVE relocations, (place, addend) each."""
        data = b"".join(struct.pack("<QQq", place, R_X86_64_RELATIVE, addend) for place, addend in entries)
        return self.add(name, data, sh_type=RELA, flags=ALLOC, entsize=24)

    def wrappers(
        self, regions: Sequence[int], *, version: int = 1, lists: Sequence[int] = (), filled: bool = True
    ) -> Section:
        """Add .nvFatBinSegment: one wrapper for each region address; `lists` are the second pointers of version 2.

        With `filled` False the pointers are left 0 and .rela.dyn holds them as addends, as some linkers do.
        """
        place = self.base + -(-self.at // 8) * 8
        rows, relocations = [], []
        for number, region in enumerate(regions):
            second = lists[number] if number < len(lists) else 0
            rows.append(struct.pack("<IIQQ", 0x466243B1, version, *((region, second) if filled else (0, 0))))
            relocations.append((place + 24 * number + 8, region))
            if second:
                relocations.append((place + 24 * number + 16, second))
        section = self.data(".nvFatBinSegment", b"".join(rows))
        if not filled:
            self.relocations(relocations)
        return section

    def segment(
        self, p_type: int, flags: int, offset: int, vaddr: int, filesz: int, memsz: int, align: int = 0x1000
    ) -> None:
        self.segments.append(struct.pack("<IIQQQQQQ", p_type, flags, offset, vaddr, vaddr, filesz, memsz, align))

    def load(self) -> None:
        """One PT_LOAD for each run of allocated sections with the same rights."""
        runs: list[list[Section]] = []
        for s in self.sections:
            if not s.sh_flags & ALLOC:
                continue
            same = runs and runs[-1][-1].sh_flags == s.sh_flags and runs[-1][-1].sh_type != NOBITS
            if same and s.sh_addr - s.sh_offset == runs[-1][-1].sh_addr - runs[-1][-1].sh_offset:
                runs[-1].append(s)
            else:
                runs.append([s])
        for run in runs:
            first, last = run[0], run[-1]
            rights = PF_R | (PF_W if first.sh_flags & WRITE else 0) | (PF_X if first.sh_flags & EXEC else 0)
            memory = last.sh_addr + last.sh_size - first.sh_addr
            stored = 0 if first.sh_type == NOBITS else last.sh_offset + last.sh_size - first.sh_offset
            if last.sh_type == NOBITS and first is not last:
                stored = last.sh_offset - first.sh_offset
            self.segment(PT_LOAD, rights, first.sh_offset, first.sh_addr, max(stored, 0), max(memory, 0))

    def image(
        self, *, table: bool = True, load: bool = True, shentsize: int = SHDR_SIZE, e_shoff: int | None = None
    ) -> Image:
        """The file. Without `table` there is no section table, as after sstrip; without `load` no segments."""
        if load and not self.segments and self.e_type != ET_REL:
            self.load()
        pieces = [(s.sh_offset, s.data) for s in self.sections if s.sh_type != NOBITS and s.data]
        size = self.at
        shoff = shnum = shstrndx = 0
        if table:
            strings = bytearray(b"\0")
            known: dict[bytes, int] = {b"": 0}
            for name in [*(s.name for s in self.sections), b".shstrtab"]:
                if name not in known:
                    known[name] = len(strings)
                    strings += name + b"\0"
            pieces.append((size, bytes(strings)))
            shoff = -(-(size + len(strings)) // 8) * 8
            shnum, shstrndx = len(self.sections) + 2, len(self.sections) + 1
            # gABI: counts that do not fit into 16 bits are kept in section header 0.
            many = shnum >= LORESERVE
            rows = [struct.pack("<IIQQQQIIQQ", *[0] * 5, shnum if many else 0, shstrndx if many else 0, 0, 0, 0)]
            for s in self.sections:
                where = (s.sh_flags, s.sh_addr, s.sh_offset, s.sh_size)
                rest = (s.sh_link, s.sh_info, s.sh_addralign, s.sh_entsize)
                rows.append(struct.pack("<IIQQQQIIQQ", known[s.name], s.sh_type, *where, *rest))
            rows.append(struct.pack("<IIQQQQIIQQ", known[b".shstrtab"], STRTAB, 0, 0, size, len(strings), 0, 0, 1, 0))
            pieces.append((shoff, b"".join(rows)))
            size = shoff + len(rows) * SHDR_SIZE
            if many:
                shnum, shstrndx = 0, SHN_XINDEX
        header = struct.pack(
            "<16sHHIQQQIHHHHHH", self.ident, self.e_type, self.e_machine, 1, 0, EHDR_SIZE if self.segments else 0,
            shoff if e_shoff is None else e_shoff, self.e_flags, EHDR_SIZE, PHDR_SIZE, len(self.segments), shentsize,
            shnum, shstrndx,
        )  # fmt: skip
        assert len(self.segments) <= RESERVED_PHDRS
        return Image([(0, header + b"".join(self.segments)), *pieces], size)

    def bytes(self) -> bytes:
        return self.image().bytes()


def eh_frame(
    functions: Iterable[tuple[int, int]],
    address: int,
    *,
    encoding: int = 0x1B,
    version: int = 1,
    letters: bytes = b"zR",
    cies: int = 1,
) -> tuple[bytes, list[int]]:
    """.eh_frame at `address` with one entry per (start, length); `cies` spreads them over several CIEs.

    Returns the bytes and the offset of each entry.
    """
    width = {0x00: "Q", 0x03: "I", 0x04: "Q", 0x0B: "i", 0x0C: "q"}[encoding & 0x0F]
    data, entries, heads = bytearray(), [], []
    for _ in range(cies):
        heads.append(len(data))
        extra = {ord("R"): bytes([encoding]), ord("L"): b"\x1b", ord("P"): b"\x9b" + bytes(4)}
        fields = b"".join(extra.get(letter, b"") for letter in letters[1:])
        body = struct.pack("<IB", 0, version) + letters + b"\0" + (b"\x08\x00" if version == 4 else b"")
        body += b"\x01\x78\x10"  # code and data alignment, return address register
        body += bytes([len(fields)]) + fields if letters[:1] == b"z" else b""
        data += _padded(body)
    for number, (start, length) in enumerate(functions):
        entries.append(len(data))
        place = address + len(data) + 8
        begin = start - place if encoding & 0x10 else start
        pointers = struct.pack(f"<{width}", begin) + struct.pack(f"<{width.upper()}", length)
        owner = len(data) + 4 - heads[number % len(heads)]
        data += _padded(struct.pack("<I", owner) + pointers + (b"\0" if letters[:1] == b"z" else b""))
    return bytes(data) + bytes(4), entries


def _padded(body: bytes) -> bytes:
    body += bytes(-(len(body) + 4) % 8)
    return struct.pack("<I", len(body)) + body


def cubin(
    kernels: Sequence[tuple[str, int]] = (("kernel", 128),),
    *,
    number: int = 90,
    variables: Sequence[tuple[str, int]] = (),
    arch: bool = False,
) -> bytes:
    """A minimal cubin (ABI version 8 of the CUDA 13 compiler): entry symbols with sizes, global variables."""
    file = Elf(ET_EXEC, EM_CUDA, at=EHDR_SIZE, e_flags=number << 8 | (0x8 if arch else 0) | 0x2)
    file.ident = b"\x7fELF\x02\x01\x01\x41\x08"
    symbols = []
    for name, size in kernels:
        code = file.add(f".text.{name}", bytes(size), flags=ALLOC | EXEC, addr=0)
        symbols.append(Symbol(name, code, 0, size, other=0x10))
    for name, size in variables:
        held = file.add(".nv.global", sh_type=NOBITS, flags=ALLOC | WRITE, size=size, addr=0)
        symbols.append(Symbol(name, held, 0, size, kind=OBJECT))
    file.symbols(symbols)
    return file.image(load=False).bytes()
