"""Kernels and variables of a packed cubin from its first bytes, without decompressing the code behind them.

NVIDIA's tools write a cubin's names and symbols first (`.shstrtab`, `.strtab`, `.symtab`, directly behind the ELF
header) and the section headers that locate them last. Reading the symbols at the place where they always are costs a
tenth of decompressing everything. It is not taken on trust: the defined functions of the symbol table must be exactly
the functions that have a `.text.` section by the section names, and every symbol must be sound. Where anything is
different, the answer is None and the cubin is read whole, by its section headers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import zstandard

from gpubloat.errors import FormatError
from gpubloat.libraries import cubin, elf, fatbin
from gpubloat.libraries.cubin import Contents
from gpubloat.libraries.elf import Array
from gpubloat.libraries.reader import Reader

FIRST = 128 << 10  # one zstd block
MOST = 0.75
_NAMES_START = b"\0.shstrtab\0.strtab\0"
_CODE_SECTION = re.compile(rb"\0\.text\.([^\0]+)")
_AT = elf.EHDR.size
# STT_NOTYPE, OBJECT, FUNC, SECTION, FILE, COMMON, TLS, and NVIDIA's own (13: a variable; 10: a texture or surface).
_KNOWN_TYPES = np.isin(np.arange(16), [0, 1, 2, 3, 4, 5, 6, 10, 11, 12, 13])


def read(reader: Reader, packed: memoryview, size: int) -> Contents | None:
    """What `cubin.read` would find in the `size` bytes of the zstd frame `packed`, or None: read it whole."""
    if size < 2 * FIRST or size > fatbin.MAX_UNCOMPRESSED:
        return None
    try:
        for head in _prefixes(packed, size):
            found = _symbols(head)
            if isinstance(found, tuple):
                symbols, names = found
                if len(symbols) > cubin.MAX_SYMBOLS:
                    return None
                strings = elf.Strings(Reader(f"{reader.path}(element)", names), 0, len(names))
                contents = cubin.of_symbols(symbols, strings)
                return contents if _is_complete(head, symbols, strings, contents.kernels) else None
            if not found:
                return None
    except (zstandard.ZstdError, FormatError):
        pass  # reading it whole will say what is wrong, and where
    return None


def _prefixes(packed: memoryview, size: int) -> Iterator[bytes]:
    """Longer and longer first parts of the content, up to `MOST` of it: beyond that, reading it whole is as good."""
    head = b""
    limit = int(size * MOST)
    with fatbin.decompressor().stream_reader(packed) as stream:
        while len(head) < limit:
            piece = stream.read(min(max(FIRST, len(head)), limit - len(head)))
            if not piece:
                return  # the frame holds less than was declared
            head += piece
            yield head


def _symbols(head: bytes) -> tuple[Array, bytes] | bool:
    """The symbol table and its string table; True if they may lie behind the end of `head`, False if not in place."""
    header = elf.header(Reader("", head))
    if header.e_machine != elf.EM_CUDA or header.e_shstrndx != 1 or not head.startswith(_NAMES_START, _AT):
        return False
    # `.strtab` starts with the same names as `.shstrtab`. Behind it lie zeros: padding, and the first symbol.
    strings = head.find(_NAMES_START, _AT + 1)
    zeros = head.find(bytes(elf.SYM.itemsize), max(strings, 0))
    if strings < 0 or zeros < 0:
        return True
    names = head[strings : zeros + 1]
    second = zeros
    while second < len(head) and not head[second]:
        second += 1
    start = second // 8 * 8 - elf.SYM.itemsize
    begins = np.zeros(len(names), bool)  # where a name begins
    begins[1:] = np.frombuffer(names, np.uint8)[:-1] == 0
    begins[0] = True
    count, available = 256, (len(head) - start) // elf.SYM.itemsize
    while True:  # the table ends where its rules do; look at few at a time, since what follows is long
        symbols = np.frombuffer(head, elf.SYM, min(count, available), start)
        sound = (
            (symbols["st_name"] < len(names))
            & begins[np.minimum(symbols["st_name"], len(names) - 1)]
            & _KNOWN_TYPES[symbols["st_info"] & 0xF]
            & (symbols["st_info"] >> 4 <= elf.STB_WEAK)
            & ((symbols["st_shndx"] < header.e_shnum) | (symbols["st_shndx"] >= elf.SHN_LORESERVE))
        )
        if not sound.all():
            return symbols[: int(np.argmin(sound))], names
        if count >= available:
            return True
        count *= 8


def _is_complete(head: bytes, symbols: Array, strings: elf.Strings, kernels: list[str]) -> bool:
    """Every function with a section is among the symbols, and every kernel among the symbols has a section."""
    found = _CODE_SECTION.findall(head, _AT, head.find(_NAMES_START, _AT + 1))
    with_code = {name.decode("utf-8", "backslashreplace") for name in found}
    missing = with_code.difference(kernels)
    if missing:
        is_other = (symbols["st_info"] & 0xF == elf.STT_FUNC) & (symbols["st_other"] & cubin.STO_CUDA_ENTRY == 0)
        missing.difference_update(strings.names(symbols["st_name"][is_other & (symbols["st_shndx"] != 0)]))
    return not missing and len(set(kernels)) == len(kernels) and with_code.issuperset(kernels)
