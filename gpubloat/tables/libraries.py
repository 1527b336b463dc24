"""Tables of the `libraries` instrument. `library` joins them all: the path of the file below the scanned root."""

from __future__ import annotations

import pandas as pd
from pandera.typing import Series

from gpubloat.tables import removal, usage
from gpubloat.tables.base import Table, column

LABELS = (
    "cpu_code",  # sections with SHF_EXECINSTR
    "gpu_code",  # fatbin regions and raw cubins, headers and padding inside them included
    "read_only_data",
    "data",
    "unwind",  # .eh_frame, .eh_frame_hdr, .gcc_except_table
    "symbols",  # symbol tables, their strings, hashes and versions
    "relocations",
    "debug",
    "notes",
    "headers",  # ELF header, program headers, section headers; archive headers
    "padding",  # zero bytes that belong to nothing
    "unattributed",  # other bytes that belong to nothing
)
KINDS = ("ptx", "cubin", "lto_ir", "relocatable_ptx", "tile_ir", "concat", "unknown")
COMPRESSIONS = ("none", "lz4", "zstd", "unknown")
PROBLEMS = (
    "unreadable",  # the file (or a part of it) breaks its format
    "unknown_kind",
    "unknown_version",
    "old_magic",
    "wrapper_without_region",
    "undecodable_payload",
    "compressed_data",  # host data in a general compression format: its content was not analysed
    "packed",  # by an executable packer such as UPX: its content was not analysed
    "other_vendor",  # GPU code that is not NVIDIA's: not analysed
    "misaligned_segment",  # PT_LOAD that no loader can map, as left behind by some rewriters
)


class Libraries(Table):
    """One row = one file: a shared library, an object, an archive, a fatbin or a cubin."""

    library: Series[str] = column("path below the scanned root, or the member's path in a wheel", unique=True)
    root: Series[str] = column("name of the scanned folder, file, wheel or package")
    format: Series[str] = column(
        "elf, archive, fatbin, cubin, raw (other bytes with fatbins inside) or unreadable",
        isin=["elf", "archive", "fatbin", "cubin", "raw", "unreadable"],
    )
    file_bytes: Series[int] = column("size of the file; equals the sum of its rows in `sections`", ge=0)
    cpu_code_bytes: Series[int] = column("bytes of executable sections", ge=0)
    gpu_code_bytes: Series[int] = column("bytes of fatbin regions and raw cubins, wherever they are", ge=0)
    function_bytes: Series[int] = column("executable bytes inside a known function; the rest is unknown code", ge=0)
    n_functions: Series[int] = column("distinct function start addresses, PLT stubs excluded", ge=0)
    n_cold: Series[pd.Int64Dtype] = column(
        "of those, `.cold` parts of other functions; empty without a symbol table", nullable=True, ge=0
    )
    n_function_names: Series[int] = column("function symbol names, aliases counted", ge=0)
    n_regions: Series[int] = column("fatbin regions, raw cubins counted as one each", ge=0)
    n_elements: Series[int] = column("fatbin elements; a concatenated element counts once", ge=0)
    n_kernels: Series[pd.Int64Dtype] = column(
        "entry symbols over all elements; empty if kernels were not read", nullable=True, ge=0
    )
    build_id: Series[str] = column("GNU build id in hex, or empty")
    sha256: Series[str] = column("of the whole file, or empty if digests were not asked for")


class Sections(Table):
    """One row = one contiguous range of a file; the ranges of a file do not overlap and cover it whole."""

    library: Series[str] = column("see libraries")
    section: Series[str] = column("ELF section name, or a name in parentheses for bytes outside all sections")
    label: Series[str] = column("what the bytes are for", isin=list(LABELS))
    offset_bytes: Series[int] = column("file offset of the range", ge=0)
    size_bytes: Series[int] = column("length of the range", ge=0)


class Functions(Table):
    """One row = one distinct function start address in an executable section."""

    library: Series[str] = column("see libraries")
    function: Series[str] = column("symbol name, mangled; empty where no symbol names the address")
    section: Series[str] = column("executable section that holds it")
    address: Series[pd.UInt64Dtype] = column("virtual address (section offset in an object file)")
    offset_bytes: Series[int] = column("file offset", ge=0)
    size_bytes: Series[int] = column("from the unwind table, else the symbol; 0 = unknown", ge=0)
    boundary: Series[str] = column("where the start came from", isin=["fde", "symtab", "dynsym"])
    n_names: Series[int] = column("symbol names of this address (aliases)", ge=0)
    is_cold: Series[pd.BooleanDtype] = column(
        "split-off cold part of another function; empty where no name tells", nullable=True
    )


class Regions(Table):
    """One row = one fatbin region (16-byte header and what follows), or one raw cubin."""

    library: Series[str] = column("see libraries")
    region: Series[int] = column("number in file order", ge=0)
    section: Series[str] = column("ELF section that holds it")
    offset_bytes: Series[int] = column("file offset of the region header", ge=0)
    size_bytes: Series[int] = column("with the header", ge=0)
    n_elements: Series[int] = column("elements in the region", ge=0)
    is_wrapped: Series[bool] = column("a .nvFatBinSegment wrapper points at it, so the CUDA runtime registers it")
    is_raw_cubin: Series[bool] = column("a bare cubin in host data, without a fatbin around it")


class Elements(Table):
    """One row = one fatbin element, or one member of a concatenated element.

    Stored bytes (`header_bytes + payload_bytes`) and `uncompressed_bytes` are each counted in one row only: the row
    of a concatenated element holds its stored bytes, the rows of its members hold the uncompressed ones.
    """

    library: Series[str] = column("see libraries")
    section: Series[str] = column("ELF section that holds it")
    region: Series[int] = column("see regions", ge=0)
    element: Series[int] = column("number inside the region", ge=0)
    member: Series[pd.Int64Dtype] = column(
        "number inside a concatenated element; empty for the element itself", nullable=True, ge=0
    )
    kind: Series[str] = column("kind of code", isin=list(KINDS))
    kind_code: Series[int] = column("the number in the element header", ge=0)
    target: Series[str] = column(
        "sm_90a, compute_120, lto_90; empty for a concatenated element (see its members)", nullable=True
    )
    identifier: Series[str] = column("name stored with the element, or empty")
    offset_bytes: Series[int] = column("file offset of the element header", ge=0)
    header_bytes: Series[int] = column("length of the element header", ge=0)
    payload_bytes: Series[int] = column("stored length behind the header, padding included", ge=0)
    uncompressed_bytes: Series[int] = column("length of the code after decompression", ge=0)
    compression: Series[str] = column("of the payload", isin=list(COMPRESSIONS))
    flags: Series[pd.UInt64Dtype] = column("the header's flag bits")
    n_kernels: Series[pd.Int64Dtype] = column("entry symbols inside; empty if not read", nullable=True, ge=0)
    digest: Series[str] = column("first 16 hex digits of the sha256 of the stored code, or empty")
    fit: Series[str] = column("why the scan's target GPU could choose it or not: targets.FITS", nullable=True)
    is_loadable: Series[pd.BooleanDtype] = column("the target GPU could choose it; empty without one", nullable=True)


class Kernels(Table):
    """One row = one kernel (entry symbol) of one element or member."""

    library: Series[str] = column("see libraries")
    region: Series[int] = column("see regions", ge=0)
    element: Series[int] = column("see elements", ge=0)
    member: Series[pd.Int64Dtype] = column("see elements", nullable=True, ge=0)
    target: Series[str] = column("target of the element")
    kernel: Series[str] = column("symbol name, mangled")
    code_bytes: Series[pd.Int64Dtype] = column("machine code of the kernel; empty for PTX", nullable=True, ge=0)


class Variables(Table):
    """One row = one global variable of one cubin: an element can be needed for its data alone."""

    library: Series[str] = column("see libraries")
    region: Series[int] = column("see regions", ge=0)
    element: Series[int] = column("see elements", ge=0)
    member: Series[pd.Int64Dtype] = column("see elements", nullable=True, ge=0)
    target: Series[str] = column("target of the element")
    variable: Series[str] = column("symbol name, mangled")
    size_bytes: Series[int] = column("size of the variable", ge=0)


class Problems(Table):
    """One row = one thing that was found and could not be read, or was read and not understood."""

    library: Series[str] = column("see libraries")
    offset_bytes: Series[int] = column("file offset", ge=0)
    problem: Series[str] = column("class of the finding", isin=list(PROBLEMS))
    detail: Series[str] = column("one sentence")


class Oracle(Table):
    """One row = one library of a census: what other readers of the same file find.

    cuobjdump sees `.nv_fatbin`, and `__nv_relfatbin` where asked for all or where there is nothing else; `visible`
    counts are ours of that part. cubloaty looks into all sections.
    """

    library: Series[str] = column("see libraries", unique=True)
    cuobjdump: Series[str] = column("its version: the newest that reads all cubins of the file")
    n_cubins_visible: Series[int] = column("our cubins in the sections that cuobjdump shows", ge=0)
    n_cubins_cuobjdump: Series[pd.Int64Dtype] = column("cuobjdump -lelf; empty if it refuses", nullable=True, ge=0)
    n_ptx_visible: Series[int] = column("our PTX in the sections that cuobjdump shows", ge=0)
    n_ptx_cuobjdump: Series[pd.Int64Dtype] = column("cuobjdump -lptx; empty if it refuses", nullable=True, ge=0)
    n_kernels_visible: Series[int] = column("our entry symbols of those cubins (not of PTX)", ge=0)
    n_kernels_cuobjdump: Series[pd.Int64Dtype] = column("cuobjdump -symbols; empty if it refuses", nullable=True, ge=0)
    n_cubins_visible_all: Series[int] = column("the same with relocatable code", ge=0)
    n_cubins_cuobjdump_all: Series[pd.Int64Dtype] = column("cuobjdump -lelf -all", nullable=True, ge=0)
    n_ptx_visible_all: Series[int] = column("the same with relocatable code", ge=0)
    n_ptx_cuobjdump_all: Series[pd.Int64Dtype] = column("cuobjdump -lptx -all", nullable=True, ge=0)
    n_kernels_visible_all: Series[int] = column("the same with relocatable code", ge=0)
    n_kernels_cuobjdump_all: Series[pd.Int64Dtype] = column("cuobjdump -symbols -all", nullable=True, ge=0)
    element_bytes: Series[int] = column("our element headers and payloads in all sections", ge=0)
    element_bytes_cubloaty: Series[pd.Int64Dtype] = column("cubloaty's; empty if it refuses", nullable=True, ge=0)
    raw_cubin_bytes: Series[int] = column("our cubins without a fatbin around them, packed ones left out", ge=0)
    raw_cubin_bytes_cubloaty: Series[pd.Int64Dtype] = column("cubloaty's; empty if it refuses", nullable=True, ge=0)
    n_kernels: Series[int] = column("our entry symbols in all of these, PTX included", ge=0)
    n_kernels_cubloaty: Series[pd.Int64Dtype] = column("cubloaty's; empty if it refuses", nullable=True, ge=0)
    is_elements_equal: Series[bool] = column("cuobjdump lists the same cubins and PTX of each target, both ways")
    is_kernels_equal: Series[bool] = column("cuobjdump shows the same names in each cubin of each target, both ways")
    is_cubloaty_equal: Series[bool] = column("same elements, bytes, kernels of each kind and target; same raw cubins")
    difference: Series[str] = column("what differs and why; empty where everything is equal")


TABLES: dict[str, type[Table]] = {
    "libraries": Libraries,
    "sections": Sections,
    "functions": Functions,
    "regions": Regions,
    "elements": Elements,
    "kernels": Kernels,
    "variables": Variables,
    "problems": Problems,
}


class Choices(Table):
    """One row = one element of a test region, held before a real driver: did it take the element?"""

    gpu: Series[str] = column("name of the GPU that was asked")
    region: Series[int] = column("number of the test region", ge=0)
    element: Series[int] = column("number inside the region", ge=0)
    kind: Series[str] = column("kind of code", isin=["ptx", "cubin"])
    target: Series[str] = column("target of the element")
    is_jit_forced: Series[bool] = column("asked with CUDA_FORCE_PTX_JIT=1, which forbids cubins")
    is_chosen: Series[bool] = column("the driver ran this element")
    error: Series[str] = column("the driver's error for the region, or empty")
    fit: Series[str] = column("what targets.fit says")
    is_loadable: Series[bool] = column("what targets.fit says")


# Tables that `scan` does not write: those of campaigns, of traced runs, of debloating.
EXTRA_TABLES: dict[str, type[Table]] = {
    "oracle": Oracle,
    "choices": Choices,
    **usage.TABLES,
    **usage.EXTRA_TABLES,
    **removal.TABLES,
}
