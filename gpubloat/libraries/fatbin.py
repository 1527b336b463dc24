"""The fatbin container: regions, elements, payloads. NVIDIA documents only the wrapper (fatbinary_section.h).

Everything else is agreed by independent public readers (RWTH-ACS/cricket, vosen/ZLUDA, jiegec/fatbinary,
n-eiling/cuda-fatbin-decompression, flashinfer-ai/cubloaty) and checked here against cuobjdump. Fields whose meaning is
not known are called `unknown_<offset>`. All integers are little endian.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from struct import Struct

import lz4.block
import zstandard

from gpubloat.libraries.reader import Reader

MAGIC = 0xBA55ED50
OLD_MAGIC = 0x1EE55A01
VERSION = 1
# The first 8 bytes of every region: magic u32, version u16, header size u16.
SIGNATURE = MAGIC | VERSION << 32 | 16 << 48

REGION = Struct("<IHHQ")
ELEMENT = Struct("<HHIQIIHHIIIQQQ")
CONCAT = Struct("<II")
RECORD_MARK = 0x0101  # `unknown_2` of every element header
_RECORD = Struct("<HHI")

PTX, CUBIN, LTO_IR, RELOCATABLE_PTX, TILE_IR, CONCATENATED = 0x1, 0x2, 0x8, 0x40, 0x80, 0x100
KINDS = {
    PTX: "ptx",
    CUBIN: "cubin",
    LTO_IR: "lto_ir",
    RELOCATABLE_PTX: "relocatable_ptx",
    TILE_IR: "tile_ir",
    CONCATENATED: "concat",
}
PREFIXES = {"cubin": "sm", "tile_ir": "sm", "lto_ir": "lto"}

FLAG_LZ4, FLAG_ZSTD = 0x2000, 0x8000
FLAG_ARCH, FLAG_FAMILY = 0x100000, 0x200000
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

# The largest cubin of the CUDA 11 to 13 wheels is under 50 MB; a larger claim is refused before memory is taken.
MAX_UNCOMPRESSED = 256 << 20


@dataclass(frozen=True, slots=True)
class Element:
    """One element header. `offset` is where it starts in the file; the payload follows `header_size` bytes later."""

    offset: int
    kind_code: int
    unknown_2: int
    header_size: int
    payload_size: int
    compressed_size: int
    options_offset: int
    minor: int
    major: int
    target_number: int
    flags: int
    unknown_48: int
    uncompressed_size: int
    identifier: str

    @property
    def kind(self) -> str:
        return KINDS.get(self.kind_code, "unknown")

    @property
    def target(self) -> str | None:
        return target_name(self.kind, self.target_number, self.flags)

    @property
    def is_compressed(self) -> bool:
        return self.compressed_size != 0

    @property
    def compression(self) -> str:
        """By flag; LTO-IR sets the zstd flag over a payload of its own, which stays opaque."""
        if not self.is_compressed:
            return "none"
        if self.kind == "lto_ir":
            return "unknown"
        return "zstd" if self.flags & FLAG_ZSTD else "lz4" if self.flags & FLAG_LZ4 else "unknown"

    @property
    def stored_size(self) -> int:
        """Length of the payload without the padding behind it (known for compressed payloads only)."""
        return self.compressed_size or self.payload_size


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a concatenated element; `offset` counts inside the decompressed stream."""

    kind_code: int
    offset: int
    size: int
    target_number: int
    flags: int
    identifier: str

    @property
    def kind(self) -> str:
        return KINDS.get(self.kind_code, "unknown")

    @property
    def target(self) -> str | None:
        return target_name(self.kind, self.target_number, self.flags)


@dataclass(frozen=True, slots=True)
class Region:
    """A 16-byte header and the elements behind it."""

    offset: int
    size: int
    elements: tuple[Element, ...]


def target_name(kind: str, number: int, flags: int) -> str | None:
    """``sm_90a``, ``compute_120``, ``lto_90``; None for a concatenated element, whose members have targets."""
    if kind == "concat":
        return None
    suffix = "a" if flags & FLAG_ARCH else "f" if flags & FLAG_FAMILY else ""
    return f"{PREFIXES.get(kind, 'compute')}_{number}{suffix}"


def region(reader: Reader, offset: int) -> Region:
    """Read the region at `offset`; FormatError unless the header and the whole chain of elements are consistent."""
    magic, version, header_size, size = reader.unpack(REGION, offset, "fatbin header")
    if magic == OLD_MAGIC:
        raise reader.error(
            offset, "fatbin of the format before CUDA 4", "not supported; rebuild with a current toolkit"
        )
    if magic != MAGIC:
        raise reader.error(offset, f"no fatbin magic (0x{magic:08x})")
    if version != VERSION or header_size != REGION.size:
        raise reader.error(offset, f"fatbin version {version} with a header of {header_size} bytes is not known")
    at = offset + header_size
    end = at + size
    if end > reader.size:
        raise reader.error(offset, f"fatbin of {size} bytes runs out of the file", "the file may be truncated")
    elements = []
    while at < end:
        found = element(reader, at, end)
        elements.append(found)
        at += found.header_size + found.payload_size
    return Region(offset, header_size + size, tuple(elements))


def element(reader: Reader, offset: int, end: int) -> Element:
    """Read the element header at `offset` of a region that ends at `end`."""
    if offset + ELEMENT.size > end:
        raise reader.error(offset, "fatbin element header runs out of its region")
    kind, two, header_size, payload, packed, options, minor, major, number, name, length, flags, eight, unpacked = (
        reader.unpack(ELEMENT, offset, "fatbin element header")
    )
    if header_size < ELEMENT.size or header_size % 8 or offset + header_size > end:
        raise reader.error(offset, f"fatbin element header of {header_size} bytes")
    if payload > end - offset - header_size:
        raise reader.error(offset, f"fatbin element of {payload} bytes runs out of its region")
    if packed > payload:
        raise reader.error(offset, f"fatbin element with {packed} compressed bytes in a payload of {payload}")
    if unpacked >= 1 << 63:
        raise reader.error(offset, f"fatbin element of {unpacked} uncompressed bytes")
    identifier = _identifier(reader, offset, name, length, header_size)
    return Element(
        offset,
        kind,
        two,
        header_size,
        payload,
        packed,
        options,
        minor,
        major,
        number,
        flags,
        eight,
        unpacked,
        identifier,
    )


_local = threading.local()


def payload(reader: Reader, element: Element) -> bytes | memoryview:
    """The code of an element, decompressed. FormatError if it does not decompress to exactly the declared size.

    The declared size is checked before memory is taken for it: against `MAX_UNCOMPRESSED`, against what the frame
    itself declares (zstd), and against the largest ratio of the format (LZ4: 255).
    """
    at = element.offset + element.header_size
    if not element.is_compressed or element.compression == "unknown":
        return reader.view(at, element.stored_size, "fatbin payload")
    packed = reader.view(at, element.compressed_size, "fatbin payload")
    if element.compression == "zstd":
        return unzstd(reader, at, packed, element.uncompressed_size)
    return unlz4(reader, at, packed, element.uncompressed_size)


def decompressor() -> zstandard.ZstdDecompressor:
    """This thread's: making one costs as much as decompressing a small cubin."""
    if not hasattr(_local, "zstd"):
        _local.zstd = zstandard.ZstdDecompressor(max_window_size=MAX_UNCOMPRESSED)
    found: zstandard.ZstdDecompressor = _local.zstd
    return found


def unzstd(reader: Reader, at: int, packed: memoryview, size: int) -> bytes:
    """`size` bytes from the zstd frame `packed`, which lies at byte `at` of the file."""
    _check_size(reader, at, size)
    try:
        declared = zstandard.get_frame_parameters(packed).content_size
        if declared not in (size, zstandard.CONTENTSIZE_UNKNOWN):
            raise ValueError(f"the zstd frame holds {declared} bytes, the header says {size}")
        data: bytes = decompressor().decompress(packed, max_output_size=size)
    except (zstandard.ZstdError, ValueError, MemoryError) as error:
        raise reader.error(at, f"payload does not decompress: {error}") from None
    return _complete(reader, at, data, size)


def unlz4(reader: Reader, at: int, packed: memoryview, size: int) -> bytes:
    """`size` bytes from the LZ4 block `packed`, which lies at byte `at` of the file."""
    _check_size(reader, at, size)
    try:
        if size > 255 * len(packed) + 64:
            raise ValueError("declared size is beyond what LZ4 can hold")
        data: bytes = lz4.block.decompress(packed, uncompressed_size=size)
    except (lz4.block.LZ4BlockError, ValueError, MemoryError) as error:
        raise reader.error(at, f"payload does not decompress: {error}") from None
    return _complete(reader, at, data, size)


def _check_size(reader: Reader, at: int, size: int) -> None:
    if size > MAX_UNCOMPRESSED:
        raise reader.error(at, f"payload declares {size} bytes, more than the limit of {MAX_UNCOMPRESSED}")


def _complete(reader: Reader, at: int, data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise reader.error(at, f"payload decompresses to {len(data)} bytes, the header says {size}")
    return data


def members(reader: Reader, element: Element) -> list[Member]:
    """The table of a concatenated element (kind 0x100), from its options block: a count, a length, and for each member
    a complete element header (identifier and options included) whose header size is replaced by the stream offset.
    """
    at = element.offset + element.options_offset
    limit = element.offset + element.header_size
    if not element.options_offset or at + CONCAT.size > limit:
        raise reader.error(element.offset, "concatenated element without a table")
    count, table_size = reader.unpack(CONCAT, at, "concatenation table")
    end = at + table_size
    if table_size < CONCAT.size + count * ELEMENT.size or end > limit:
        raise reader.error(at, f"concatenation table of {table_size} bytes for {count} members")
    total = element.uncompressed_size if element.is_compressed else element.payload_size
    found, stop = [], 0
    place = at + CONCAT.size
    for index in range(count):
        if place + ELEMENT.size > end:
            raise reader.error(place, f"concatenation table ends before member {index} of {count}")
        kind, two, offset, size, _, options, _, _, number, name, length, flags, _, _ = reader.unpack(
            ELEMENT, place, "concatenation member"
        )
        if (two, offset) != (RECORD_MARK, stop) or offset + size > total:
            raise reader.error(place, f"member {index} is not the next one in the stream of {total} bytes")
        stop = offset + size
        found.append(Member(kind, offset, size, number, flags, _identifier(reader, place, name, length, end - place)))
        place = _next_record(reader, place, name + length, options, end, stop)
    return found


def _next_record(reader: Reader, place: int, behind_name: int, options: int, end: int, stop: int) -> int:
    """Where the record behind the one at `place` starts. No field says it: it follows the identifier and the options,
    which are padded to 8 behind an ending NUL, and the options of cubins are 4 bytes longer than they say."""
    behind = max(ELEMENT.size, behind_name)
    if options:
        if place + options + CONCAT.size > end:
            raise reader.error(place, "options of a concatenation member run out of their table")
        behind = max(behind, options + CONCAT.size, sum(reader.unpack(CONCAT, place + options, "options")))
    place += (behind + 7) // 8 * 8
    for _ in range(2):
        if place + ELEMENT.size <= end and reader.unpack(_RECORD, place, "record")[1:] != (RECORD_MARK, stop):
            place += 8
    return place


def _identifier(reader: Reader, start: int, offset: int, length: int, limit: int) -> str:
    """The name stored `offset` bytes behind `start`; its length counts the NUL, or spaces, or neither."""
    if not offset or not length or offset + length > limit:
        return ""
    return bytes(reader.view(start + offset, length)).rstrip(b"\0 ").decode("utf-8", "backslashreplace")
