"""Fatbins: real ones from NVIDIA's compiler and packer (no GPU needed), and any shape at all from a plain writer.

`compiled` and `packed` call NVRTC and nvFatbin. `region`, `element` and `concat` write the container byte by byte, for
what the packer refuses to make.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import lz4.block
import zstandard

MAGIC, OLD_MAGIC = 0xBA55ED50, 0x1EE55A01
PTX, CUBIN, LTO_IR, RELOCATABLE_PTX, TILE_IR, CONCAT = 1, 2, 8, 0x40, 0x80, 0x100
LZ4, ZSTD, ARCH, FAMILY = 0x2000, 0x8000, 0x100000, 0x200000
LINUX64 = 0x11

SOURCE = """
__device__ int counter = 3;
__constant__ float table[16];
extern "C" __global__ void scale(float* x, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = a * x[i] + table[i & 15];
}
template <class T> __global__ void add(T* x, const T* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { x[i] += y[i]; atomicAdd(&counter, 1); }
}
template __global__ void add<float>(float*, const float*, int);
template __global__ void add<double>(double*, const double*, int);
extern "C" __device__ __noinline__ int helper(int n) { return n * counter; }
extern "C" __global__ void outer(int* p) { *p = helper(*p); }
"""
KERNELS = ["_Z3addIdEvPT_PKS0_i", "_Z3addIfEvPT_PKS0_i", "outer", "scale"]  # sorted


@functools.cache
def compiled(target: str, kind: str = "cubin", *, source: str = SOURCE, options: tuple[str, ...] = ()) -> bytes:
    """Compile for ``sm_90a`` (`kind` cubin) or ``compute_90`` (ptx, lto_ir)."""
    from cuda.bindings import nvrtc

    made = {"cubin": "CUBIN", "ptx": "PTX", "lto_ir": "LTOIR"}[kind]
    error, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], [])
    flags = [f"--gpu-architecture={target}", *(["-dlto"] if kind == "lto_ir" else []), *options]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])
    if error.value:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * (size + 1)  # never the object that Python shares for one space
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.decode())
    _, size = getattr(nvrtc, f"nvrtcGet{made}Size")(program)
    code = b"\0" * size
    getattr(nvrtc, f"nvrtcGet{made}")(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return code


@dataclass(frozen=True)
class Code:
    """What `packed` puts into one element. `target` is ``sm_90a`` or ``compute_90``."""

    kind: str
    target: str
    data: bytes
    identifier: str = ""
    options: str = ""


def code(target: str, identifier: str = "", kind: str = "", options: str = "") -> Code:
    """The compiled kernels for a target: a cubin for ``sm_``, PTX for ``compute_`` unless `kind` says lto_ir."""
    kind = kind or ("cubin" if target.startswith("sm_") else "ptx")
    return Code(kind, target, compiled(target, kind), identifier, options)


@functools.cache
def packed(codes: tuple[Code, ...], options: tuple[str, ...] = ()) -> bytes:
    """One region made by nvFatbin, such as options ``("-compress-mode=size",)`` or ``("-concat",)``."""
    from cuda.bindings import nvfatbin

    handle = nvfatbin.create(list(options), len(options))
    for c in codes:
        size, number = len(c.data), c.target.partition("_")[2]
        if c.kind == "cubin":
            nvfatbin.add_cubin(handle, c.data, size, number, c.identifier)
        elif c.kind == "ptx":
            nvfatbin.add_ptx(handle, c.data, size, number, c.identifier, c.options)
        elif c.kind == "lto_ir":
            nvfatbin.add_ltoir(handle, c.data, size, number, c.identifier, c.options)
        elif c.kind == "tile_ir":
            nvfatbin.add_tile_ir(handle, c.data, size, c.identifier, c.options)
        else:
            nvfatbin.add_reloc(handle, c.data, size)
    made = bytearray(nvfatbin.size(handle))
    nvfatbin.get(handle, made)
    nvfatbin.destroy(handle)
    return bytes(made)


def compress(data: bytes, how: str) -> bytes:
    """``zstd``: one frame; ``lz4``: one block without a length in front."""
    if how == "zstd":
        return zstandard.ZstdCompressor(level=3).compress(data)
    return lz4.block.compress(data, store_size=False)


def element(
    payload: bytes = b"",
    *,
    kind: int = CUBIN,
    number: int = 90,
    flags: int = LINUX64,
    how: str = "",
    identifier: bytes = b"",
    options: bytes | None = None,
    version: tuple[int, int] = (8, 1),
    **damage: int,
) -> bytes:
    """One element: header, identifier, options, payload padded to 8. `how` compresses it.

    `damage` overwrites header fields: header_size, payload_size, compressed_size, uncompressed_size, options_offset,
    identifier_offset, identifier_size.
    """
    unpacked = 0
    stored = payload
    if how:
        flags |= LZ4 if how == "lz4" else ZSTD
        stored, unpacked = compress(payload, how), len(payload)
    compressed = len(stored) if how else 0
    tail = identifier + bytes(-len(identifier) % 8)
    at = {"identifier_offset": 64 if identifier else 0, "identifier_size": len(identifier)}
    at["options_offset"] = 0 if options is None else 64 + len(tail)
    tail += options or b""
    tail += bytes(-len(tail) % 8)
    stored += bytes(-len(stored) % 8)
    fields = {
        **at, "header_size": 64 + len(tail), "payload_size": len(stored), "compressed_size": compressed,
        "uncompressed_size": unpacked, **damage,
    }  # fmt: skip
    header = struct.pack(
        "<HHIQIIHHIIIQQQ", kind, 0x0101, fields["header_size"], fields["payload_size"], fields["compressed_size"],
        fields["options_offset"], version[0], version[1], number, fields["identifier_offset"],
        fields["identifier_size"], flags, 0, fields["uncompressed_size"],
    )  # fmt: skip
    return header + tail + stored


def region(
    elements: Sequence[bytes] = (),
    *,
    magic: int = MAGIC,
    version: int = 1,
    header_size: int = 16,
    size: int | None = None,
) -> bytes:
    """A region header and its elements; `size` may lie."""
    body = b"".join(elements)
    return struct.pack("<IHHQ", magic, version, header_size, len(body) if size is None else size) + body


def concat(
    members: Sequence[tuple[int, int, int, bytes]],
    *,
    how: str = "zstd",
    identifiers: Sequence[bytes] = (),
    count: int | None = None,
    **damage: int,
) -> bytes:
    """A concatenated element of (kind, target number, flags, code) members, each padded to 8 in the stream."""
    rows, stream = bytearray(), bytearray()
    for index, (kind, number, flags, data) in enumerate(members):
        name = identifiers[index] if index < len(identifiers) else b""
        size = len(data) + -len(data) % 8
        named = (64, len(name)) if name else (0, 0)
        rows += struct.pack("<HHIQIIHHIIIQQQ", kind, 0x0101, len(stream), size, 0, 0, 8, 1, number, *named, flags, 0, 0)
        rows += name + bytes(8 - len(name) % 8) if name else b""
        stream += data + bytes(size - len(data))
    table = struct.pack("<II", len(members) if count is None else count, 8 + len(rows)) + bytes(rows)
    return element(bytes(stream), kind=CONCAT, number=0, how=how, options=table, version=(1, 0), **damage)
