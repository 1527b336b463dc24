"""Where code of an x86-64 library can be entered other than by a call of a function's start.

A trace records function starts. What is entered in another way looks unused although it runs: constructors and
resolvers of IFUNCs, which run before or outside of what a trace sees, and the `.cold` parts that GCC and LLVM split off
functions. In libtorch_cpu (torch 2.13) 54,000 of 75,540 cold parts are jumped into behind their start. Landing pads of
exceptions are no such way: all 107,563 of them lie in the function whose table names them.
"""

from __future__ import annotations

from struct import Struct

import numpy as np

from gpubloat.libraries import elf
from gpubloat.libraries.elf import Array, Elf
from gpubloat.libraries.reader import Reader

EM_X86_64 = 62
R_X86_64_64, R_X86_64_IRELATIVE = 1, 37
DT_INIT, DT_FINI = 12, 13
_SHT_DYNAMIC = 6
_ARRAYS = {14: ".init_array", 15: ".fini_array", 16: ".preinit_array"}  # by sh_type
_ENTRY = Struct("<24xQ")  # e_entry
_MERGE = 64  # pieces of code closer than this are scanned as one
_CHUNK = 16 << 20
# Bytes that look like a jump stand also inside of other instructions, and then point anywhere: mostly into large
# functions. Cold parts are small (three of four of libtorch_cpu's have less than 112 bytes, the largest 11,611), so
# what is larger than this and not known to be cold is not taken for one.
SMALL = 4096


def fixed(file: Elf) -> Array:
    """Addresses (uint64) of code that the loader itself calls: constructors, destructors, IFUNC resolvers, entry."""
    found = [np.array(_ENTRY.unpack_from(file.reader.view(0, 32)), np.uint64), _resolvers(file), _dynamic(file)]
    places, relocations = _relocations(file)
    for section in file.sections:
        if section.sh_type in _ARRAYS or section.name in _ARRAYS.values():
            held = file.reader.array("<u8", section.sh_offset, section.file_size // 8, section.name)
            begin, end = (np.searchsorted(places, section.sh_addr + n) for n in (0, section.file_size))
            # Symbolic relocations hold an offset from a symbol, which `_resolvers` and the file bytes do not tell.
            found += [held, relocations["r_addend"][begin:end].astype(np.uint64)]
            found.append(_symbolic(file, relocations[begin:end]))
    kind = relocations["r_info"] & np.uint64(0xFFFFFFFF)
    found.append(relocations["r_addend"][kind == R_X86_64_IRELATIVE].astype(np.uint64))
    return np.unique(np.concatenate(found))


def _relocations(file: Elf) -> tuple[Array, Array]:
    """Places, and the RELA records themselves, sorted by place."""
    tables = [
        file.reader.array(elf.RELA, s.sh_offset, s.sh_size // elf.RELA.itemsize, s.name)
        for s in file.sections
        if s.sh_type == elf.SHT_RELA and s.sh_flags & elf.SHF_ALLOC
    ]
    table = np.concatenate(tables) if tables else np.zeros(0, elf.RELA)
    table = table[np.argsort(table["r_offset"], kind="stable")]
    return table["r_offset"], table


def _symbolic(file: Elf, relocations: Array) -> Array:
    """Symbol value + addend of the relocations of type R_X86_64_64."""
    rows = relocations[(relocations["r_info"] & np.uint64(0xFFFFFFFF)) == R_X86_64_64]
    symbols, _ = file.symbols(elf.SHT_DYNSYM)
    index = (rows["r_info"] >> np.uint64(32)).astype(np.int64)
    inside = index < len(symbols)
    found: Array = symbols["st_value"][index[inside]] + rows["r_addend"][inside].astype(np.uint64)
    return found


def _resolvers(file: Elf) -> Array:
    found = [np.zeros(0, np.uint64)]
    for sh_type in (elf.SHT_SYMTAB, elf.SHT_DYNSYM):
        table, _ = file.symbols(sh_type)
        found.append(table["st_value"][(table["st_info"] & 0xF) == elf.STT_GNU_IFUNC])
    return np.concatenate(found)


def _dynamic(file: Elf) -> Array:
    """DT_INIT and DT_FINI, which need not be in sections of their own."""
    found = [np.zeros(0, np.uint64)]
    for section in file.sections:
        if section.sh_type == _SHT_DYNAMIC:
            tags = file.reader.array("<u8", section.sh_offset, section.file_size // 16 * 2, section.name).reshape(-1, 2)
            found.append(tags[np.isin(tags[:, 0], (DT_INIT, DT_FINI)), 1])
    result: Array = np.concatenate(found)
    return result


def jumped_into(reader: Reader, address: Array, offset: Array, size: Array, is_source: Array, is_cold: Array) -> Array:
    """Which functions the code of others jumps into behind their start.

    Parameters
    ----------
    address, offset, size : of the functions, sorted by address (int64), shape (n,).
    is_source : functions whose code is looked at (bool).
    is_cold : functions that are a cold part: True, False, or 2 where nobody knows (int8).

    Returns a mask of shape (n,): targets of a conditional jump (``0F 8x``), unless they are large and not known to be
    cold; of an unconditional one if they are cold, or small and perhaps cold; of a ``lea`` of an address of code.
    Jumps with an 8-bit distance do not leave a function.
    """
    hit = np.zeros(len(address), bool)
    is_small = size <= SMALL
    allowed = ((is_cold == 1) | is_small, (is_cold == 1) | (is_cold == 2) & is_small, np.ones(len(address), bool))
    picked = np.flatnonzero(is_source & (size > 0))
    for begin, end, shift in _pieces(offset[picked], size[picked], address[picked]):
        code = np.frombuffer(reader.view(begin, end - begin), np.uint8)
        if len(code) < 8:
            continue
        a, b, c = code[:-7], code[1:-6], code[2:-5]
        is_jump = ((a == 0x0F) & ((b & 0xF0) == 0x80), a == 0xE9, ((a & 0xFB) == 0x48) & (b == 0x8D) & (c & 0xC7 == 5))
        for mask, width, may in zip(is_jump, (2, 1, 3), allowed):
            at = np.flatnonzero(mask) + width
            distance = np.zeros(len(at), np.uint32)
            for byte in range(4):
                distance |= code[np.minimum(at + byte, len(code) - 1)].astype(np.uint32) << np.uint32(8 * byte)
            source = at + (begin + shift)
            target = source + 4 + distance.view(np.int32).astype(np.int64)
            row = np.searchsorted(address, target, "right") - 1
            inside = (row >= 0) & (target > address[row]) & (target < address[row] + size[row])
            away = (source < address[row]) | (source >= address[row] + size[row])
            hit[row[inside & away & may[row]]] = True
    return hit


def _pieces(offset: Array, size: Array, address: Array) -> list[tuple[int, int, int]]:
    """Functions as (begin, end, address minus offset) of file ranges, near ones joined, none larger than a chunk."""
    pieces: list[tuple[int, int, int]] = []
    for begin, length, place in zip(offset.tolist(), size.tolist(), address.tolist()):
        end, shift = begin + length, place - begin
        last = pieces[-1] if pieces else None
        if last and last[2] == shift and begin <= last[1] + _MERGE and end - last[0] <= _CHUNK:
            pieces[-1] = (last[0], max(last[1], end), shift)
        else:
            pieces.append((begin, end, shift))
    return pieces
