"""Kernels and variables of a packed cubin from its first bytes, without decompressing the code behind them.

NVIDIA's tools write a cubin's names and symbols first (`.shstrtab`, `.strtab`, `.symtab`, directly behind the ELF
header) and the section headers that locate them last. Reading the symbols at the place where they always are costs a
tenth of decompressing everything. It is not taken on trust: the defined functions of the symbol table must be exactly
the functions that have a `.text.` section by the section names, and every symbol must be sound. Where anything is
different, the answer is None and the cubin is read whole, by its section headers.
"""

from __future__ import annotations

import re

import numpy as np
import zstandard

from gpubloat.errors import FormatError
from gpubloat.libraries import cubin, elf, fatbin
from gpubloat.libraries.cubin import Contents
from gpubloat.libraries.elf import Array
from gpubloat.libraries.reader import Reader

BLOCK = 128 << 10  # of zstd
MOST = 0.75
_NAMES_START = b"\0.shstrtab\0.strtab\0"
_CODE_SECTION = re.compile(rb"\0\.text\.([^\0]+)")
_MOST_ZEROS = 4096  # between the last name and the second symbol; real cubins have up to some hundred
_AT = elf.EHDR.size
# STT_NOTYPE, OBJECT, FUNC, SECTION, FILE, COMMON, TLS, and NVIDIA's own (13: a variable; 10: a texture or surface).
_KNOWN_TYPES = np.isin(np.arange(16), [0, 1, 2, 3, 4, 5, 6, 10, 11, 12, 13])


def read(reader: Reader, packed: memoryview, size: int) -> Contents | None:
    """What `cubin.read` would find in the `size` bytes of the zstd frame `packed`, or None: read it whole."""
    if size < 2 * BLOCK or size > fatbin.MAX_UNCOMPRESSED:
        return None
    try:
        with fatbin.decompressor().stream_reader(packed) as stream:
            head = _Head(stream, int(size * MOST))
            found = _symbols(head)
        if found is None:
            return None
        symbols, names, sections = found
        if len(symbols) > cubin.MAX_SYMBOLS:
            return None
        strings = elf.Strings(Reader(f"{reader.path}(element)", names), 0, len(names))
        contents = cubin.of_symbols(symbols, strings)
        return contents if _is_complete(sections, symbols, strings, contents.kernels) else None
    except (zstandard.ZstdError, FormatError):
        return None  # reading it whole will say what is wrong, and where


class _Head:
    """The first part of a content, `data`: longer when asked for, up to `limit`, beyond which all is as good.

    What looks into `data` holds no view of it when it grows: it may move.
    """

    def __init__(self, stream: zstandard.ZstdDecompressionReader, limit: int) -> None:
        self.stream, self.limit = stream, limit
        self.data = bytearray()

    def grow(self) -> bool:
        """A block more, if there is more."""
        piece = self.stream.read(min(BLOCK, self.limit - len(self.data)))
        self.data += piece
        return bool(piece)

    def find(self, what: bytes, start: int) -> int:
        """Where `what` is, at `start` or behind; -1 if it is not in what may be read."""
        while (at := self.data.find(what, start)) < 0:
            start = max(start, len(self.data) - len(what) + 1)
            if not self.grow():
                break
        return at


def _symbols(head: _Head) -> tuple[Array, bytes, bytes] | None:
    """The symbol table, its string table and the section names; None if one of them is not in place."""
    head.grow()
    header = elf.header(Reader("", head.data))
    if header.e_machine != elf.EM_CUDA or header.e_shstrndx != 1 or not head.data.startswith(_NAMES_START, _AT):
        return None
    # `.strtab` starts with the same names as `.shstrtab`. Behind it lie zeros: padding, and the first symbol.
    strings = head.find(_NAMES_START, _AT + 1)
    zeros = head.find(bytes(elf.SYM.itemsize), strings) if strings >= 0 else -1
    if zeros < 0:
        return None
    names = bytes(head.data[strings : zeros + 1])
    begins = np.zeros(len(names), bool)  # where a name begins
    begins[1:] = np.frombuffer(names, np.uint8)[:-1] == 0
    begins[0] = True
    # The first symbol is all zeros, too; the second one starts with the number of its name.
    behind = head.data[zeros + elf.SYM.itemsize : zeros + _MOST_ZEROS]
    padding = len(behind) - len(behind.lstrip(b"\0"))
    if padding == len(behind):
        return None
    start = stop = (zeros + elf.SYM.itemsize + padding) // 8 * 8 - elf.SYM.itemsize
    count = 256
    while True:  # the table ends where its rules do; look at few at a time, since what follows is long
        available = (len(head.data) - stop) // elf.SYM.itemsize
        some = head.data[stop : stop + min(count, available) * elf.SYM.itemsize]
        symbols = np.frombuffer(some, elf.SYM)
        sound = (
            (symbols["st_name"] < len(names))
            & begins[np.minimum(symbols["st_name"], len(names) - 1)]
            & _KNOWN_TYPES[symbols["st_info"] & 0xF]
            & (symbols["st_info"] >> 4 <= elf.STB_WEAK)
            & ((symbols["st_shndx"] < header.e_shnum) | (symbols["st_shndx"] >= elf.SHN_LORESERVE))
        )
        n_sound = len(symbols) if sound.all() else int(np.argmin(sound))
        stop += n_sound * elf.SYM.itemsize
        if n_sound < len(symbols):
            break
        if count >= available and not head.grow():
            return None
        count *= 8
    return np.frombuffer(head.data[start:stop], elf.SYM), names, bytes(head.data[_AT:strings])


def _is_complete(sections: bytes, symbols: Array, strings: elf.Strings, kernels: list[str]) -> bool:
    """Every function with a section is among the symbols, and every kernel among the symbols has a section."""
    with_code = {name.decode("utf-8", "backslashreplace") for name in _CODE_SECTION.findall(sections)}
    entries = set(kernels)
    if len(entries) != len(kernels) or not entries <= with_code:
        return False
    missing = with_code - entries
    if missing:
        is_other = (symbols["st_info"] & 0xF == elf.STT_FUNC) & (symbols["st_other"] & cubin.STO_CUDA_ENTRY == 0)
        missing.difference_update(strings.names(symbols["st_name"][is_other & (symbols["st_shndx"] != 0)]))
    return not missing
