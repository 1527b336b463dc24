"""The property that every input must satisfy: a FormatError, or tables that obey the laws. Never anything else."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

from gpubloat.errors import FormatError
from gpubloat.libraries import archive, contents, cubin, functions, layout, regions
from gpubloat.libraries.contents import Code
from gpubloat.libraries.elf import Elf
from gpubloat.libraries.reader import Reader
from tests.build import containers, elf, fatbin
from tests.build.fatbin import ARCH, CONCAT, CUBIN, PTX, element, packed

PTX_TEXT = b".version 9.0\n.target sm_80\n.visible .entry from_ptx(\n)\n{\nret;\n}\n"


def gauntlet(data: bytes) -> bool:
    """Run every reader over `data`; True if it was read, False if a FormatError refused it."""
    try:
        if data[:8] == b"!<arch>\n":
            whole = Reader("file", data)
            for name, at, size in archive.members(whole):
                _object(whole.window(at, size, name))
        else:
            _object(Reader("file", data))
    except FormatError as error:
        refused = error
    else:
        return True
    assert 0 <= refused.offset <= len(data)
    assert str(refused).isprintable()
    return False


def _object(bound: Reader) -> None:
    view = Elf(bound) if bytes(bound.view(0, min(4, bound.size))) == b"\x7fELF" else None
    if view is not None and view.header.e_machine == elf.EM_CUDA:
        cubin.target(bound)
        inside = cubin.read(bound)
        assert len(inside.kernels) == len(inside.code_bytes or [])
        return
    found = regions.find(bound, view)
    _lawful(bound, view, found)
    if view is not None:
        frame, counts = functions.read(view, "file")
        assert len(frame) == counts.n_functions
        assert counts.function_bytes <= bound.size
        assert ((frame["offset_bytes"] >= 0) & (frame["offset_bytes"] <= bound.size)).all()
        view.build_id()
        view.misaligned_segments()
    pieces = [Code(n, i, e) for n, region in enumerate(found.regions) for i, e in enumerate(region.elements)]
    pieces += [Code(n, 0, raw) for n, raw in enumerate(found.cubins)]
    for read in contents.read_all(bound, pieces, threads=1):
        assert read.error is None or read.contents == contents.NOTHING


def _lawful(bound: Reader, view: Elf | None, found: regions.Found) -> None:
    at = 0
    for span in layout.spans(bound, view, found):
        assert span.start == at < span.stop
        at = span.stop
    assert at == bound.size
    places = [(r.offset, r.size) for r in found.regions] + [(c.offset, c.size) for c in found.cubins]
    stop = 0
    for start, size in sorted(places):
        assert start >= stop
        stop = start + size
    assert stop <= bound.size
    for region in found.regions:
        assert region.size == 16 + sum(e.header_size + e.payload_size for e in region.elements)


def subjects() -> dict[str, bytes]:
    """Sound files that use every feature, to be damaged."""
    code = elf.cubin([("k", 128), ("second", 256)], variables=[("g", 4)])
    region = fatbin.region(
        [
            element(code),
            element(code, how="zstd", identifier=b"unit", number=80),
            element(PTX_TEXT, kind=PTX, how="lz4", options=struct.pack("<II", 72, 8) + b"-O3 -arch"),
            fatbin.concat([(CUBIN, 80, 0x11, code), (PTX, 90, 0x11, PTX_TEXT), (CUBIN, 90, 0x11 | ARCH, code)],
                          identifiers=[b"a", b"", b"12345678"]),
            element(b"opaque", kind=0x333),
        ]
    )  # fmt: skip
    library = elf.Elf()
    text = library.text(data=b"\x90" * 256)
    held = library.rodata(".nv_fatbin", region + fatbin.region([element(PTX_TEXT, kind=PTX)]))
    before = library.rodata("__nv_relfatbin", fatbin.region([element(code, kind=CONCAT), element(code)]))
    listed = library.data(".data", struct.pack("<QQ", before.sh_addr, 0))
    library.rodata(".rodata", b"abc" + code + fatbin.compress(code, "zstd") + fatbin.compress(b"text" * 99, "zstd"))
    library.wrappers([held.sh_addr, held.sh_addr + len(region)], version=2, lists=[listed.sh_addr], filled=False)
    library.add(".note.gnu.build-id", struct.pack("<III4s", 4, 8, 3, b"GNU\0") + b"buildid!", sh_type=7, flags=2)
    names = [elf.Symbol(f"f{i}", text, 16 * i, 16, bind=i % 3) for i in range(12)]
    library.symbols([*names, elf.Symbol("f0.cold", text, 200, 8), elf.Symbol("missing", None)])
    library.symbols(names[:4], dynamic=True)
    library.eh_frame([(text.sh_addr + 16 * i, 16) for i in range(8)], cies=2)
    library.bss(4096)
    unit = elf.Elf(elf.ET_REL)
    unit.symbols([elf.Symbol("unit", unit.text(), 0, 8)])
    unit.rodata(".nv_fatbin", fatbin.region([element(code)]))
    plain = elf.Elf()
    text = plain.text(data=b"\x90" * 256)
    plain.eh_frame([(text.sh_addr + 16 * i, 16) for i in range(8)], header=False, letters=b"zPLR")
    made = fatbin.Code("cubin", "sm_80", elf.cubin(number=80))
    real = (fatbin.code("sm_90a", "real"), fatbin.code("compute_80", "real"), made)
    return {
        "library": library.bytes(),
        "no sections": library.image(table=False).bytes(),
        "no unwind table": plain.bytes(),
        "object": unit.bytes(),
        "fatbin": region * 2,
        "packed fatbin": packed(real, ("-compress-mode=size",)),
        "concatenated fatbin": packed(real, ("-concat",)),
        "cubin": fatbin.compiled("sm_90a"),
        "small cubin": code,
        "archive": containers.archive([("unit.o", unit.bytes()), ("a_long_name_of_an_object.o", plain.bytes())]),
    }


Damage = Callable[[bytes, random.Random], bytes]


def bit_flips(data: bytes, make: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(make.choice((1, 1, 2, 8))):
        made[make.randrange(len(made))] ^= 1 << make.randrange(8)
    return bytes(made)


def fields(data: bytes, make: random.Random) -> bytes:
    """Put a dangerous number at an aligned place, more often near the start and the end, where the headers are."""
    made = bytearray(data)
    for _ in range(make.choice((1, 2, 4))):
        size = make.choice((2, 4, 8))
        top = 1 << 8 * size
        near = make.choice((128, 1024, len(made)))
        at = make.randrange(min(near, len(made)))
        at = at if make.random() < 0.6 else len(made) - 1 - at
        at = min(max(at - at % size, 0), len(made) - size)
        old = int.from_bytes(made[at : at + size], "little")
        half = top >> 1
        pool = (0, 1, top - 1, half, half - 1, old + 1, old - 1, old * 2, top - old, len(made), len(made) - at)
        made[at : at + size] = (make.choice(pool) % top).to_bytes(size, "little")
    return bytes(made)


def splices(data: bytes, make: random.Random) -> bytes:
    """Copy, drop or repeat a piece of the file."""
    start, other = make.randrange(len(data)), make.randrange(len(data))
    size = make.choice((1, 8, 16, 64, 200))
    piece = data[start : start + size]
    kind = make.randrange(3)
    if kind == 0:
        return data[:other] + piece + data[other + size :]
    if kind == 1:
        return data[:start] + data[start + size :]
    return data[:other] + piece + data[other:]


def cuts(data: bytes, make: random.Random) -> list[int]:
    """Places to truncate: around each header inside, at both ends, and anywhere."""
    places = {*range(0, 136, 8), *range(max(len(data) - 80, 0), len(data), 8), len(data) - 1}
    places |= {make.randrange(len(data)) for _ in range(60)}
    for magic in (b"\x7fELF", fatbin.MAGIC.to_bytes(4, "little"), b"`\n", b"\x28\xb5\x2f\xfd", b"zR\0"):
        at = data.find(magic)
        while at >= 0:
            places |= {at + shift for shift in (0, 1, 4, 15, 16, 17, 64, 79, 80)}
            at = data.find(magic, at + 1)
    return sorted(p for p in places if p < len(data))
