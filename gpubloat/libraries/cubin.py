"""What is inside one element: the kernels and variables of a cubin (an ELF file of machine 190), the entries of PTX.

The symbol flag of an entry point (STO_CUDA_ENTRY in st_other) and the layout of e_flags are those of LLVM's
BinaryFormat/ELF.h and of cuobjdump's listings, against which they are tested.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from struct import Struct

import numpy as np

from gpubloat.errors import FormatError
from gpubloat.libraries import elf
from gpubloat.libraries.elf import Array, Header, Strings
from gpubloat.libraries.reader import Reader

STO_CUDA_ENTRY = 0x10
# e_flags: ABI version 8 (CUDA 13) moved the target from the low byte to the second one.
ABI_V2 = 8
FLAG_ARCH_V1, FLAG_ARCH_V2 = 0x800, 0x8
MAX_SYMBOLS = 1 << 19  # of one cubin; the largest real ones have some ten thousand
STV_INTERNAL = 1
STT_CUDA_OBJECT = 13  # a variable in relocatable code
# Section of type CUDA_COMPAT_INFO; its attribute CUDA_ACCELERATOR_TARGET (a byte) marks suffix a since CUDA 13.
SHT_CUDA_COMPAT_INFO = 0x70000086
ACCELERATOR_TARGET = b"\x02\x09\x01"

_SHNUM = Struct("<60xH")
_ENTRY_NAME = re.compile(rb"\.entry\s+([A-Za-z_$%][A-Za-z0-9_$]*)")


@dataclass(frozen=True, slots=True)
class Contents:
    """Names and sizes in symbol order. `code_bytes` is None where the code has no machine form yet (PTX)."""

    kernels: list[str]
    code_bytes: list[int] | None
    variables: list[str]
    variable_bytes: list[int]


def read(reader: Reader) -> Contents:
    """Entry symbols and global variables of the cubin that `reader` holds. FormatError if it is not one."""
    head = _header(reader)
    sections = elf.section_table(reader, head)
    tables = np.flatnonzero(sections["sh_type"] == elf.SHT_SYMTAB)
    if not len(tables):
        return Contents([], [], [], [])
    table = sections[tables[0]]
    count = int(table["sh_size"]) // elf.SYM.itemsize
    if count > MAX_SYMBOLS:
        raise reader.error(int(table["sh_offset"]), f"cubin with {count} symbols")
    symbols = reader.array(elf.SYM, int(table["sh_offset"]), count, "symbols")
    if table["sh_link"] >= len(sections):
        raise reader.error(int(table["sh_offset"]), "symbol table without a string table")
    strings = sections[table["sh_link"]]
    names = Strings(reader, int(strings["sh_offset"]), int(strings["sh_size"]))
    return of_symbols(symbols, names)


def of_symbols(symbols: Array, names: Strings) -> Contents:
    """Kernels and variables among the symbols (dtype elf.SYM) of a cubin."""
    symbols = symbols[symbols["st_shndx"] != 0]
    kind = symbols["st_info"] & 0xF
    entries = symbols[(kind == elf.STT_FUNC) & (symbols["st_other"] & STO_CUDA_ENTRY != 0)]
    # Also the local ones: in whole-program code all are, and the host copies to and from them nevertheless. Not the
    # internal ones: parameters of kernels.
    is_variable = (kind == elf.STT_OBJECT) | (kind == STT_CUDA_OBJECT)
    variables = symbols[is_variable & (symbols["st_other"] & 3 != STV_INTERNAL)]
    kernels, sizes = _named(names, entries)
    return Contents(kernels, sizes, *_named(names, variables))


def _named(names: Strings, symbols: Array) -> tuple[list[str], list[int]]:
    if not len(symbols):
        return [], []
    return names.names(symbols["st_name"]), np.minimum(symbols["st_size"], 1 << 62).tolist()


def read_ptx(reader: Reader) -> Contents:
    """Entry names of the PTX text that `reader` holds, each once: a prototype can precede the definition.

    Source: PTX ISA, "Kernel and Function Directives: .entry".
    """
    data = bytes(reader.view(0, reader.size))
    names: dict[str, None] = {}
    left = min(4096 + len(data) // 64, MAX_SYMBOLS)  # the shortest real entry is longer than 64 bytes
    at = data.find(b".entry")
    while at >= 0:
        left -= 1
        if left < 0:
            raise reader.error(at, "more entries in PTX than a real text can have")
        before = data[max(at - 64, 0) : at]  # no further: a text without line ends would be read once for each hit
        line = before[max(before.rfind(b"\n"), before.rfind(b"}")) + 1 :]
        match = _ENTRY_NAME.match(data, at)
        if match and all(word in (b".visible", b".weak") for word in line.split()):
            names[match[1].decode("ascii")] = None
        at = data.find(b".entry", at + 6)
    return Contents(list(names), None, [], [])


def _header(reader: Reader) -> Header:
    head = elf.header(reader)
    if head.e_machine != elf.EM_CUDA:
        raise reader.error(18, f"ELF for machine {head.e_machine}, not a cubin")
    return head


def target(reader: Reader) -> str:
    """The target that a cubin itself names: ``sm_90a``. Family-specific cubins carry no mark of it.

    Of a cubin whose head alone is at hand, the suffix is known only before CUDA 13.
    """
    head = _header(reader)
    if head.abi_version >= ABI_V2:
        number, arch = head.e_flags >> 8 & 0xFF, head.e_flags & FLAG_ARCH_V2 or _is_architecture_specific(reader, head)
    else:
        number, arch = head.e_flags & 0xFF, head.e_flags & FLAG_ARCH_V1
    # Of the GPUs before sm_90 none has an "a" target; some of their cubins have the bit, with another meaning.
    return f"sm_{number}{'a' if arch and number >= 90 else ''}"


def _is_architecture_specific(reader: Reader, head: Header) -> bool:
    try:
        sections = elf.section_table(reader, head)
        for row in sections[sections["sh_type"] == SHT_CUDA_COMPAT_INFO][:1]:
            data = bytes(reader.view(int(row["sh_offset"]), int(row["sh_size"])))
            at = 0
            while at + 4 <= len(data):  # format, attribute, and 2 bytes: the value, or (format 4) the length of it
                if data[at : at + 3] == ACCELERATOR_TARGET:
                    return True
                at += 4 + (int.from_bytes(data[at + 2 : at + 4], "little") if data[at] == 4 else 0)
    except FormatError:
        pass
    return False


def n_sections(reader: Reader, offset: int, limit: int) -> int:
    """What the header at `offset` says; 0 if it does not fit."""
    return int(reader.unpack(_SHNUM, offset, "e_shnum")[0]) if offset + elf.EHDR.size <= limit else 0


def extent(reader: Reader, offset: int, limit: int) -> int | None:
    """Length of the cubin in [offset, limit), or None if the bytes there are not a consistent cubin.

    One with as many sections as only the gABI's extension can count is refused: many false headers that share a long
    section table would take very long.
    """
    part = reader.window(offset, limit - offset, "cubin")
    try:
        head = _header(part)
        if head.e_shnum >= elf.SHN_LORESERVE:
            return None
        sections = elf.section_table(part, head)
        ends = [head.e_phoff + head.e_phnum * elf.PHDR.itemsize, head.e_shoff + head.e_shnum * elf.SHDR.itemsize]
        stored = sections[(sections["sh_type"] != elf.SHT_NOBITS) & (sections["sh_type"] != 0)]
        if not len(stored):
            return None
        if max(int(stored["sh_offset"].max()), int(stored["sh_size"].max()), *ends) > part.size:
            return None
        end = max(int((stored["sh_offset"] + stored["sh_size"]).max()), *ends)
        return end if end <= part.size else None
    except FormatError:
        return None
