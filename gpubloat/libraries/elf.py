"""ELF64 little-endian: segments, sections and symbols, read in bulk. Field names are those of the gABI (elf.h).

Source: System V gABI, chapters 4 and 5; the extension for 0xff00 sections and more is in its "ELF Header" part.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt

from gpubloat.libraries.reader import Reader

Array = npt.NDArray[Any]

MAGIC = b"\x7fELF"
ET_REL = 1
EM_CUDA = 190
PT_LOAD = 1
PF_X, PF_W = 1, 2
PAGE = 4096  # the smallest page of x86-64 and AArch64
SHT_PROGBITS, SHT_SYMTAB, SHT_RELA, SHT_NOBITS, SHT_DYNSYM = 1, 2, 4, 8, 11
SHT_SYMTAB_SHNDX = 18
SHF_WRITE, SHF_ALLOC, SHF_EXECINSTR = 1, 2, 4
SHN_LORESERVE, SHN_XINDEX = 0xFF00, 0xFFFF
STT_OBJECT, STT_FUNC, STT_GNU_IFUNC = 1, 2, 10
STB_GLOBAL, STB_WEAK = 1, 2

EHDR = Struct("<16sHHIQQQIHHHHHH")
SHDR = np.dtype(
    [
        ("sh_name", "<u4"),
        ("sh_type", "<u4"),
        ("sh_flags", "<u8"),
        ("sh_addr", "<u8"),
        ("sh_offset", "<u8"),
        ("sh_size", "<u8"),
        ("sh_link", "<u4"),
        ("sh_info", "<u4"),
        ("sh_addralign", "<u8"),
        ("sh_entsize", "<u8"),
    ]
)
PHDR = np.dtype(
    [
        ("p_type", "<u4"),
        ("p_flags", "<u4"),
        ("p_offset", "<u8"),
        ("p_vaddr", "<u8"),
        ("p_paddr", "<u8"),
        ("p_filesz", "<u8"),
        ("p_memsz", "<u8"),
        ("p_align", "<u8"),
    ]
)
SYM = np.dtype(
    [
        ("st_name", "<u4"),
        ("st_info", "u1"),
        ("st_other", "u1"),
        ("st_shndx", "<u2"),
        ("st_value", "<u8"),
        ("st_size", "<u8"),
    ]
)
RELA = np.dtype([("r_offset", "<u8"), ("r_info", "<u8"), ("r_addend", "<i8")])


@dataclass(frozen=True, slots=True)
class Header:
    """The ELF header, with the section counts after the extension for large tables."""

    e_type: int
    e_machine: int
    e_phoff: int
    e_shoff: int
    e_flags: int
    e_phnum: int
    e_shnum: int
    e_shstrndx: int
    abi_version: int


def header(reader: Reader) -> Header:
    """Read and check the ELF header."""
    ident, e_type, machine, _, _, phoff, shoff, flags, _, phentsize, phnum, shentsize, shnum, shstrndx = reader.unpack(
        EHDR, 0, "ELF header"
    )
    if ident[:4] != MAGIC:
        raise reader.error(0, "no ELF magic")
    if ident[4] != 2:
        raise reader.error(4, "not a 64-bit ELF", "only 64-bit little-endian ELF files are read")
    if ident[5] != 1:
        raise reader.error(5, "not a little-endian ELF", "only 64-bit little-endian ELF files are read")
    if phnum and phoff and phentsize != PHDR.itemsize:
        raise reader.error(0x36, f"program headers of {phentsize} bytes instead of {PHDR.itemsize}")
    if not shoff:
        shnum = shstrndx = 0
    else:
        # e_shentsize 0 with no sections is legal; e_shnum 0 with a table means: the count is in section 0.
        if shentsize != SHDR.itemsize and (shnum or shentsize):
            raise reader.error(0x3A, f"section headers of {shentsize} bytes instead of {SHDR.itemsize}")
        if shentsize == 0:
            shnum = shstrndx = 0
        elif shnum == 0 or shstrndx == SHN_XINDEX or phnum == 0xFFFF:
            first = reader.array(SHDR, shoff, 1, "section header 0")[0]
            shnum = shnum or int(first["sh_size"])
            shstrndx = int(first["sh_link"]) if shstrndx == SHN_XINDEX else shstrndx
            phnum = int(first["sh_info"]) if phnum == 0xFFFF else phnum
    return Header(e_type, machine, phoff, shoff, flags, phnum if phoff else 0, shnum, shstrndx, ident[8])


def section_table(reader: Reader, head: Header) -> Array:
    """The section headers, shape (e_shnum,), dtype SHDR."""
    return reader.array(SHDR, head.e_shoff if head.e_shnum else 0, head.e_shnum, "section header table")


class Strings:
    """A string table: NUL-ended names by offset."""

    def __init__(self, reader: Reader, offset: int = 0, size: int = 0, what: str = "string table") -> None:
        self.reader, self.offset = reader, offset
        self.data = bytes(reader.view(offset, size, what))
        if size > 1 << 20:
            reader.release()  # it is in memory now; once is enough

    def names(self, offsets: Array) -> list[str]:
        """The names at `offsets`, in order.

        A crafted table can make a small file name gigabytes (many names that all run to the end of the table). Real
        tables share tails a little, and compilers can give many sections one short name; more than that is refused.
        """
        data, size = self.data, len(self.data)
        left = size + min(15 * size, 16 << 20) + 256 * len(offsets)
        found = []
        for start in offsets.tolist():
            end = data.find(b"\0", start)
            if end < 0:
                end = max(size, start)
            left -= end - start
            if left < 0:
                raise self.reader.error(self.offset, "string table whose names overlap beyond reason")
            found.append(data[start:end].decode("utf-8", "backslashreplace"))
        return found


@dataclass(frozen=True, slots=True)
class Section:
    """One section header with its name."""

    index: int
    name: str
    sh_type: int
    sh_flags: int
    sh_addr: int
    sh_offset: int
    sh_size: int
    sh_link: int
    sh_entsize: int

    @property
    def file_size(self) -> int:
        return 0 if self.sh_type == SHT_NOBITS else self.sh_size

    @property
    def is_code(self) -> bool:
        return bool(self.sh_flags & SHF_EXECINSTR) and bool(self.file_size)


class Elf:
    """One ELF file: header at once, everything else when asked for.

    Raises FormatError where a header or a table points outside the file.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.header = header(reader)

    @cached_property
    def segments(self) -> Array:
        """Program headers, shape (e_phnum,), dtype PHDR."""
        head = self.header
        return self.reader.array(PHDR, head.e_phoff if head.e_phnum else 0, head.e_phnum, "program header table")

    @cached_property
    def sections(self) -> list[Section]:
        """All sections but the null section; empty for files without a section table."""
        table = section_table(self.reader, self.header)
        if not len(table):
            return []
        names = Strings(self.reader)
        if 0 < self.header.e_shstrndx < len(table) and table["sh_type"][self.header.e_shstrndx] != SHT_NOBITS:
            row = table[self.header.e_shstrndx]
            names = Strings(self.reader, int(row["sh_offset"]), int(row["sh_size"]), "section names")
        named = names.names(table["sh_name"])
        found = []
        left = 8 * self.reader.size + 65536  # what follows is linear in the sum of the sizes
        for index, row in enumerate(table.tolist()):
            _, sh_type, flags, addr, offset, size, link, _, _, entsize = row
            if index == 0 or sh_type == 0:
                continue
            if sh_type != SHT_NOBITS and offset + size > self.reader.size:
                raise self.reader.error(
                    self.header.e_shoff + index * SHDR.itemsize,
                    f"section {index} ends at byte {offset + size}, behind the end of the file",
                    "the file may be truncated",
                )
            left -= 0 if sh_type == SHT_NOBITS else size
            if left < 0:
                raise self.reader.error(self.header.e_shoff, "section table whose sections overlap beyond reason")
            found.append(Section(index, named[index], sh_type, flags, addr, offset, size, link, entsize))
        return found

    def named(self, name: str) -> list[Section]:
        return [s for s in self.sections if s.name == name and s.file_size]

    def misaligned_segments(self) -> list[int]:
        """File offsets of the PT_LOAD headers that no loader can map: address and offset differ within a page."""
        load = self.segments["p_type"] == PT_LOAD if len(self.segments) else np.zeros(0, bool)
        shift = self.segments["p_vaddr"] - self.segments["p_offset"]
        align = self.segments["p_align"]
        power = (align & (align - np.uint64(1))) == 0
        page = np.where(power & (align > PAGE), align, np.uint64(PAGE))
        bad = load & (self.segments["p_memsz"] > 0) & (shift & (page - np.uint64(1)) != 0)
        return [self.header.e_phoff + row * PHDR.itemsize for row in np.flatnonzero(bad).tolist()]

    @cached_property
    def _loads(self) -> Array:
        """Address to file: (address, length in the file, offset), sorted by address."""
        if self.header.e_type == ET_REL or not len(self.segments):
            rows = [(s.sh_addr, s.file_size, s.sh_offset) for s in self.sections if s.sh_addr and s.file_size]
        else:
            load = self.segments[self.segments["p_type"] == PT_LOAD]
            rows = [(int(p["p_vaddr"]), int(p["p_filesz"]), int(p["p_offset"])) for p in load]
        rows = [r for r in rows if r[0] + r[1] < 1 << 63 and r[2] + r[1] <= self.reader.size]
        return np.array(sorted(rows), dtype=np.int64).reshape(-1, 3)

    def file_offsets(self, addresses: Array) -> Array:
        """File offsets of virtual addresses, -1 where an address has no byte in the file. Same shape."""
        loads = self._loads
        addresses = np.asarray(addresses).astype(np.int64)
        if not len(loads):
            return np.full(addresses.shape, -1, np.int64)
        row = loads[np.maximum(np.searchsorted(loads[:, 0], addresses, "right") - 1, 0)]
        inside = addresses - row[..., 0]
        return np.where((inside >= 0) & (inside < row[..., 1]), row[..., 2] + inside, -1)

    def symbols(self, sh_type: int) -> tuple[Array, Strings]:
        """Symbols of the first section of `sh_type` (SHT_SYMTAB or SHT_DYNSYM), dtype SYM, and their names."""
        for section in self.sections:
            if section.sh_type == sh_type:
                count = section.sh_size // SYM.itemsize
                strings = next((s for s in self.sections if s.index == section.sh_link), None)
                if strings is None or strings.sh_type == SHT_NOBITS:
                    raise self.reader.error(section.sh_offset, f"{section.name} has no string table")
                names = Strings(self.reader, strings.sh_offset, strings.sh_size)
                return self.reader.array(SYM, section.sh_offset, count, section.name), names
        return np.zeros(0, SYM), Strings(self.reader)

    def section_indices(self, sh_type: int) -> Array:
        """The section index of each of `symbols(sh_type)`, uint32; 0 for the reserved ones (absolute, common...).

        An index that does not fit into st_shndx is in the section of type SHT_SYMTAB_SHNDX that names the table.
        """
        indices = self.symbols(sh_type)[0]["st_shndx"].astype(np.uint32)
        large = indices == SHN_XINDEX
        indices[(indices >= SHN_LORESERVE) & ~large] = 0
        if large.any():
            table = next(s.index for s in self.sections if s.sh_type == sh_type)
            for section in self.sections:
                if section.sh_type == SHT_SYMTAB_SHNDX and section.sh_link == table:
                    full = self.reader.array("<u4", section.sh_offset, len(indices), section.name)
                    indices[large] = full[large]
                    return indices
            raise self.reader.error(0, "symbols with large section indices, and no table of them")
        return indices

    @cached_property
    def relative_addends(self) -> tuple[Array, Array]:
        """Places and addends of all RELA relocations, sorted by place: what the loader will write there."""
        tables = [
            self.reader.array(RELA, s.sh_offset, s.sh_size // RELA.itemsize, s.name)
            for s in self.sections
            if s.sh_type == SHT_RELA and s.sh_flags & SHF_ALLOC
        ]
        table = np.concatenate(tables) if tables else np.zeros(0, RELA)
        table = table[np.argsort(table["r_offset"], kind="stable")]
        return table["r_offset"], table["r_addend"]

    def build_id(self) -> str:
        """The GNU build id in hex, or the empty string."""
        for section in self.named(".note.gnu.build-id"):
            if 16 < section.sh_size <= 80:
                return bytes(self.reader.view(section.sh_offset + 16, section.sh_size - 16)).hex()
        return ""
