"""Pickles from strangers: numbers, strings, lists, tuples and dicts, and nothing else.

A snapshot of PyTorch's allocator needs no class and no function, so an opcode that could name, make or call one is
refused before anything is unpickled, at its byte. The walk also bounds what the unpickler can be made to take: no
string longer than the file, no memo slot beyond the file's size (the C unpickler makes room for all slots below).
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections.abc import Callable
from typing import Any, NoReturn

from gpubloat.errors import FormatError

HINT = "a memory snapshot is made by torch.cuda.memory._dump_snapshot(file)"
_UNSAFE = {"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "REDUCE", "BUILD", "EXT1", "EXT2", "EXT4"}
_UNSAFE |= {"PERSID", "BINPERSID", "NEXT_BUFFER", "READONLY_BUFFER"}
_NAMES = {opcode.code.encode("latin-1")[0]: opcode.name for opcode in pickletools.opcodes}
_INT = rb"(?:K.|M..|J.{4}|\x8a\x00|" + rb"|".join(rb"\x8a\x%02x.{%d}" % (n, n) for n in range(1, 10)) + rb")"
# Opcodes of a fixed length that make, keep or combine plain values. LONG_BINPUT is added with a bound for its index.
# Tuples hold integers only: a tuple of tuples as the key of a dict is hashed without end, or until the stack ends.
_FIXED = (
    rb"h.|j.{4}|q.|\x94|s|u|e|a|\]|\}|N|\x88|\x89|G.{8}|\)|0|1|\x95.{6}\x00\x00"
    rb"|INT\x85|INT{2}\x86|INT{3}\x87|\((?>INT*)t|\(|INT"
).replace(b"INT", _INT)
# Opcodes whose argument is counted: bytes of the count.
_COUNTED = {0x8C: 1, 0x58: 4, 0x8D: 8, 0x55: 1, 0x54: 4, 0x43: 1, 0x42: 4, 0x8E: 8, 0x8A: 1, 0x8B: 4}
_LONGEST_INT = 16  # bytes; no number of a snapshot needs more than 9


def loads(data: bytes, path: str) -> Any:
    """Unpickle plain data.

    Parameters
    ----------
    data : the whole pickle, protocol 2 to 5. `path` is only named in messages.

    Raises
    ------
    FormatError : another protocol, an opcode that could run code, a damaged or truncated pickle; with its offset.
    """
    walk(data, path)
    try:
        return _Plain(io.BytesIO(data), path).load()
    except FormatError:
        raise
    except RecursionError:
        raise FormatError(path, 0, "is nested too deeply", HINT) from None
    except MemoryError:
        raise FormatError(path, 0, "needs more memory than there is", HINT) from None
    # The unpickler meets whatever a damaged file holds, with any of these and some more.
    except Exception as error:
        what = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise FormatError(path, 0, f"is no pickle of plain data: {what}", HINT) from None


def walk(data: bytes, path: str) -> None:
    """FormatError at the first opcode that is not one of plain data, or whose argument does not fit."""
    size = len(data)
    if size < 3 or data[0] != 0x80:
        raise FormatError(path, 0, "is no pickle of protocol 2 to 5", HINT)
    if not 2 <= data[1] <= 5:
        raise FormatError(path, 1, f"is a pickle of protocol {data[1]}; 2 to 5 are known", HINT)
    run = _ordinary(size)
    at = 2
    while at < size:
        found = run(data, at)
        at = found.end() if found else at
        if at >= size:
            break
        code = data[at]
        if code == 0x2E:  # STOP: what follows is not read
            return
        if code not in _COUNTED:
            _refuse(path, at, code)
        width = _COUNTED[code]
        count = int.from_bytes(data[at + 1 : at + 1 + width], "little")
        end = at + 1 + width + count
        if at + 1 + width > size or end > size:
            raise FormatError(path, at, f"{_NAMES[code]} of {count} bytes does not fit into {size} bytes", HINT)
        if code in (0x8A, 0x8B) and count > _LONGEST_INT:
            raise FormatError(path, at, f"an integer of {count} bytes", HINT)
        at = end
    raise FormatError(path, size, "ends before its STOP: it is truncated", HINT)


def _ordinary(size: int) -> Callable[[bytes, int], re.Match[bytes] | None]:
    """Matches a run of opcodes of fixed length, whose memo slots are below `size` (or little above)."""
    top, bits = size, 0
    while top > 255:
        top, bits = top >> 8, bits + 8
    low = bits // 8
    if low > 3:
        slot = rb"r.{4}"
    else:
        slot = rb"r" + b"." * low + b"[\\x00-" + f"\\x{top:02x}".encode() + b"]" + b"\\x00" * (3 - low)
    # Possessive: what has matched is never tried again, so time and memory are linear.
    return re.compile(rb"(?:" + _FIXED + b"|" + slot + rb")*+", re.DOTALL).match


def _refuse(path: str, at: int, code: int) -> NoReturn:
    name = _NAMES.get(code)
    if name in _UNSAFE:
        hint = "do not open it with pickle: loading it would run code; memory snapshots hold plain data only"
        raise FormatError(path, at, f"{name} could run code; refused", hint)
    if name == "LONG_BINPUT":
        raise FormatError(path, at, "a memo slot far beyond the size of the file, or a truncated one", HINT)
    raise FormatError(path, at, f"{name or f'byte 0x{code:02x}'} has no place in a snapshot, or is cut off", HINT)


class _Plain(pickle.Unpickler):
    """The second line of defence: whatever `walk` may have let through finds no class here."""

    def __init__(self, file: io.BytesIO, path: str) -> None:
        super().__init__(file)
        self.path = path

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise FormatError(self.path, 0, f"names {module_name}.{global_name}; refused", HINT)

    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise FormatError(self.path, 0, f"refers to an object outside of itself, {str(pid)[:40]!r}; refused", HINT)
