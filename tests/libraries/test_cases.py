"""Public bug reports against other readers and rewriters of GPU libraries, each as one file that we must get right.

Every test names the repository and the number of the report in its first line. Reports about running or rewriting
libraries are tested where that is done.
"""

from __future__ import annotations

import gzip
import hashlib
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import zstandard

from gpubloat.errors import FormatError
from gpubloat.libraries import scan
from gpubloat.tables import targets
from tests import oracles
from tests.build import containers, elf, fatbin
from tests.build.fatbin import CUBIN, PTX, Code, code, element, packed, region
from tests.libraries.common import Tables, library, scanned, tables

ROOT = Path(__file__).parents[2]
ONE_CUBIN = region([element(elf.cubin())])


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.fixture(scope="module")
def huge(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, elf.Section], Tables, int]:
    """A library of 4.3 GB (sparse): fatbins behind .bss beyond 2^31, and beyond 2^32."""
    file = elf.Elf(base=1 << 40)
    text = file.text()
    file.bss(1 << 30)
    low = file.rodata(".nv_fatbin", ONE_CUBIN * 3, offset=(1 << 31) + 64)
    high = file.rodata(".ldata", ONE_CUBIN, offset=(1 << 32) + (1 << 20))
    file.wrappers([low.sh_addr + i * len(ONE_CUBIN) for i in range(3)] + [high.sh_addr])
    file.symbols([elf.Symbol("main", text, 0, 8)])
    path = file.image().write(tmp_path_factory.mktemp("huge") / "libtorch_cuda.so")
    assert path.stat().st_blocks < 1000
    return {"low": low, "high": high}, tables(path, digests=False), path.stat().st_size


def test_fatbin_behind_bss_and_beyond_two_gigabytes(huge: tuple[dict[str, elf.Section], Tables, int]) -> None:
    """pytorch/pytorch 39968, comment in 48588 (B01): .nv_fatbin moved behind .bss, offsets beyond 2^31."""
    built, found, _ = huge
    inside = found["regions"][found["regions"]["section"] == ".nv_fatbin"]
    assert inside["offset_bytes"].tolist() == [built["low"].sh_offset + i * len(ONE_CUBIN) for i in range(3)]
    assert inside["is_wrapped"].all()
    assert found["sections"].loc[found["sections"]["section"] == ".nv_fatbin", "label"].tolist() == ["gpu_code"]
    assert len(found["problems"]) == 0


def test_files_beyond_four_gigabytes(huge: tuple[dict[str, elf.Section], Tables, int]) -> None:
    """google/bloaty 24, NixOS/patchelf 571 (B03, B04): sizes and offsets do not fit into 32 bits."""
    built, found, size = huge
    assert found["libraries"]["file_bytes"].tolist() == [size]
    assert size > 1 << 32
    last = found["regions"].iloc[-1]
    assert (last["section"], last["offset_bytes"], last["is_wrapped"]) == (".ldata", built["high"].sh_offset, True)
    assert found["functions"]["function"].tolist() == ["main"]


def test_a_library_split_into_several_with_the_same_kernels(tmp_path: Path) -> None:
    """icl-utk-edu/magma 39 (B02): one library over 2 GB, split in several; the same code shows by its digest."""
    shared, own = element(elf.cubin([("shared", 128)])), element(elf.cubin([("own", 128)]))
    write(tmp_path / "libone.so", library(region([shared])))
    write(tmp_path / "libtwo.so", library(region([own]) + region([shared])))
    run = scan(tmp_path, kernels=True)
    digests = run["elements"].groupby("digest")["library"].agg(list)
    assert sorted(digests.map(len)) == [1, 2]
    assert run["kernels"][["library", "kernel"]].values.tolist() == [
        ["libone.so", "shared"],
        ["libtwo.so", "own"],
        ["libtwo.so", "shared"],
    ]


def test_segments_whose_address_and_offset_differ_within_a_page(tmp_path: Path) -> None:
    """NixOS/patchelf 528 (B05): a rewritten libcudart that the loader refuses: said of the input, and read anyway."""
    file = elf.Elf()
    text = file.text()
    held = file.rodata(".nv_fatbin", ONE_CUBIN)
    file.segment(elf.PT_LOAD, 5, text.sh_offset, text.sh_addr, 64, 64)
    file.segment(elf.PT_LOAD, 4, held.sh_offset, held.sh_addr + 0x1000 - 8, len(ONE_CUBIN), len(ONE_CUBIN))
    found = tables(write(tmp_path / "libcudart.so", file.bytes()))
    assert found["problems"][["problem", "offset_bytes"]].values.tolist() == [["misaligned_segment", 64 + 56]]
    assert len(found["regions"]) == 1


def test_patchelf_moves_the_fatbin_section(tmp_path: Path) -> None:
    """NixOS/nixpkgs 434101 (B06): .nv_fatbin moved to the end into a segment of its own; its wrapper finds it."""
    file = elf.Elf()
    file.text()
    file.data(".nvFatBinSegment", bytes(24))
    file.add(".old_place", bytes(len(ONE_CUBIN)), flags=elf.ALLOC)
    moved = file.rodata(".nv_fatbin", b"odd" + ONE_CUBIN, offset=0x3000, addr=0x7000_0000)  # no longer aligned to 8
    wrapper = file.sections[1]
    wrapper.data = struct.pack("<IIQQ", 0x466243B1, 1, moved.sh_addr + 3, 0)
    found = tables(write(tmp_path / "libkernels.so", file.bytes()))
    assert found["regions"][["section", "offset_bytes", "is_wrapped"]].values.tolist() == [
        [".nv_fatbin", moved.sh_offset + 3, True]
    ]
    assert len(found["problems"]) == 0


def test_odd_but_loadable_vendor_files(tmp_path: Path) -> None:
    """NixOS/patchelf 313 (B07): libcudart 10.2 has sections out of order and empty ones at strange places."""
    file = elf.Elf()
    file.add(".late", b"late", flags=elf.ALLOC, offset=0x2000)
    text = file.text(offset=0x1000, addr=0x201000)
    file.add(".empty", flags=elf.ALLOC, offset=0x1010)
    file.add("", b"without a name", flags=elf.ALLOC, offset=0x1800)
    file.rodata(".nv_fatbin", ONE_CUBIN)
    file.symbols([elf.Symbol("cudaMalloc", text, 0, 16)], dynamic=True)
    found = tables(write(tmp_path / "libcudart.so.10.2", file.bytes()))
    assert found["functions"]["function"].tolist() == ["cudaMalloc"]
    assert len(found["regions"]) == 1


@pytest.mark.parametrize("form", ["elf", "archive", "wheel", "fatbin", "cubin"])
def test_scanning_changes_no_byte_and_no_date(form: str, tmp_path: Path) -> None:
    """pypa/auditwheel 716, lief-project/LIEF 322 and 820 (B08, B10, B11): the input is never written."""
    data = {"elf": library(ONE_CUBIN), "fatbin": ONE_CUBIN, "cubin": elf.cubin()}
    path = tmp_path / {"elf": "lib.so", "archive": "lib.a", "wheel": "x.whl"}.get(form, "file")
    if form == "wheel":
        containers.wheel(path, {"lib.so": (data["elf"], containers.STORED)})
    else:
        path.write_bytes(data.get(form) or containers.archive([("unit.o", data["elf"])]))
    path.chmod(0o444)
    before = path.read_bytes(), path.stat().st_mtime_ns
    scan(path, kernels=True, target="sm_90")
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_no_section_table(tmp_path: Path) -> None:
    """lief-project/LIEF 121 and 595, eliben/pyelftools 195 (B12): what the loader maps is all there is to go by."""
    file = elf.Elf()
    file.text(data=b"\x90" * 100)
    held = file.rodata(".nv_fatbin", ONE_CUBIN + packed((code("sm_90"), code("compute_80"))))
    file.data(".data", b"d" * 80)
    found = tables(write(tmp_path / "stripped.so", file.image(table=False).bytes()), kernels=True)
    assert found["regions"]["offset_bytes"].tolist() == [held.sh_offset, held.sh_offset + len(ONE_CUBIN)]
    assert set(found["regions"]["section"]) == {"(no section)"}
    assert found["libraries"]["cpu_code_bytes"].tolist() == [100]
    assert found["elements"]["kind"].tolist() == ["cubin", "cubin", "ptx"]
    assert len(found["kernels"]) == 1 + 2 * len(fatbin.KERNELS)


def test_zero_section_headers(tmp_path: Path) -> None:
    """eliben/pyelftools 195 and 29 (B13): e_shnum 0, with and without a place for the table."""
    file = elf.Elf()
    file.text()
    file.rodata(".nv_fatbin", ONE_CUBIN)
    plain = bytearray(file.image(table=False).bytes())
    placed = bytearray(plain)
    struct.pack_into("<Q", placed, 0x28, len(placed))
    placed += bytes(64)  # the null section, which says again that there are none
    for name, data in (("plain.so", plain), ("placed.so", placed)):
        assert len(tables(write(tmp_path / name, bytes(data)))["regions"]) == 1


def test_seventy_thousand_sections(tmp_path: Path) -> None:
    """eliben/pyelftools 330 (B14): from 0xff00 sections on, the count is kept in section 0."""
    file = elf.Elf(elf.ET_REL)
    for number in range(70_000):
        file.add(f".text.f{number}", sh_type=elf.NOBITS)
    text = file.text(".text.last")
    file.rodata(".nv_fatbin", ONE_CUBIN)
    file.symbols([elf.Symbol("last", text, 0, 8)])
    found = tables(write(tmp_path / "unit.o", file.bytes()))
    assert found["functions"][["function", "section"]].values.tolist() == [["last", ".text.last"]]
    assert found["regions"]["section"].tolist() == [".nv_fatbin"]


def test_section_headers_of_size_zero(tmp_path: Path) -> None:
    """eliben/pyelftools 370 (B15): e_shentsize 0 is legal where there are no sections."""
    file = elf.Elf()
    file.rodata(".nv_fatbin", ONE_CUBIN)
    found = tables(write(tmp_path / "lib.so", file.image(table=False, shentsize=0).bytes()))
    assert len(found["regions"]) == 1


def test_relocatable_fatbins_are_listed_apart(tmp_path: Path) -> None:
    """gpgpu-sim/gpgpu-sim_distribution 240 (B16): the PTX of -rdc code is in __nv_relfatbin, which cuobjdump hides."""
    file = elf.Elf()
    linked = file.rodata(".nv_fatbin", packed((code("sm_90", "linked"),)))
    before = file.rodata("__nv_relfatbin", packed((code("sm_90", "unit"), code("compute_90", "unit"))))
    listed = file.data(".data", struct.pack("<QQ", before.sh_addr, 0))
    file.wrappers([linked.sh_addr], version=2, lists=[listed.sh_addr])
    path = write(tmp_path / "lib.so", file.bytes())
    run = scanned(path)
    assert run["elements"][["section", "kind"]].values.tolist() == [
        [".nv_fatbin", "cubin"],
        ["__nv_relfatbin", "cubin"],
        ["__nv_relfatbin", "ptx"],
    ]
    assert run["regions"]["is_wrapped"].all()
    for show_all in (False, True):
        seen = oracles.visible(run["elements"], run["regions"], all=show_all)
        assert oracles.our_elements(seen) == oracles.listed_elements(path, all=show_all)
    assert ("ptx", "sm_90") not in oracles.listed_elements(path)


@pytest.mark.parametrize(
    ("device", "expected"),
    [("sm_75", ["compute_75"]), ("sm_86", ["compute_75", "compute_80"]), ("sm_60", []), ("sm_90", ["sm_90"])],
)
def test_many_ptx_versions_in_one_region(device: str, expected: list[str], tmp_path: Path) -> None:
    """gpgpu-sim/gpgpu-sim_distribution 111 and 93 (B17): hundreds of PTX of several targets, chosen per region."""
    text = b".visible .entry k(\n)"
    ptx = [element(text, kind=PTX, number=n) for n in (75, 80, 90, 100)]
    path = write(tmp_path / "libcudnn.so", library(region([*ptx, element(elf.cubin(), number=90)]) * 100))
    found = tables(path, target=device)["elements"]
    chosen = found[found["is_loadable"].astype(bool)]
    assert chosen.groupby("region")["target"].agg(list).tolist() == [expected] * (100 if expected else 0)


MAJORS = ("sm_60", "sm_70", "sm_80", "sm_90", "compute_90")


@pytest.mark.parametrize(
    ("device", "kept"), [("sm_61", "sm_60"), ("sm_86", "sm_80"), ("sm_89", "sm_80"), ("sm_75", "sm_70")]
)
def test_one_cubin_for_each_major(device: str, kept: str, tmp_path: Path) -> None:
    """cupy/cupy 5508, ggml-org/llama-install.sh 125, huggingface/text-embeddings-inference 610 (B18, B19, B20).

    Libraries pruned to the exact target of the GPU fail: cuBLAS has one cubin per major.
    """
    numbers = [targets.parse(target).number for target in MAJORS]
    elements = [element(elf.cubin(number=n), number=n) for n in numbers[:-1]]
    elements.append(element(b".visible .entry k(", kind=PTX, number=numbers[-1]))
    exact = region([element(elf.cubin(number=targets.gpu(device)), number=targets.gpu(device)), elements[2]])
    found = tables(write(tmp_path / "libcublas.so", library(region(elements) + exact)), target=device)["elements"]
    loadable = found[found["is_loadable"].astype(bool)].groupby("region")["target"].agg(list).to_dict()
    assert loadable[0] == [kept]
    assert device in loadable[1]
    if targets.gpu(device) // 10 == 8:
        assert loadable[1] == [device, "sm_80"]


@pytest.mark.parametrize("mode", ["none", "speed", "balance", "size"])
def test_every_compression_mode(mode: str, targets: tuple[Code, ...], tmp_path: Path) -> None:
    """pytorch/pytorch 157791 (B21): zstd elements, unreadable to older tools, in every mode of the packer."""
    path = write(tmp_path / "lib.so", library(packed(targets, (f"-compress-mode={mode}",))))
    run = scanned(path, kernels=True)
    assert len(run["problems"]) == 0
    assert set(run["elements"]["n_kernels"]) == {len(fatbin.KERNELS)}
    seen = oracles.visible(run["elements"], run["regions"])
    assert oracles.our_cubins(seen, run["kernels"]) == oracles.cubins(path)
    sizes = run["elements"]["uncompressed_bytes"].tolist()
    for row, put, size in zip(run["elements"].itertuples(), targets, sizes, strict=True):
        assert len(put.data) <= size < len(put.data) + 8 or row.kind == "ptx"


@pytest.fixture(scope="module")
def torch_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape of libtorch_cuda at a twelfth of its size: 475 regions of six targets, and its code and names."""
    numbers = (75, 80, 86, 90, 100, 120)
    unit = [element(elf.cubin([(f"kernel_{n}", 2048)], number=n) + bytes(8192), number=n) for n in numbers]
    file = elf.Elf()
    text = file.text(data=bytes(range(256)) * 32_000)
    held = file.rodata(".nv_fatbin", region(unit) * 475)
    file.wrappers([held.sh_addr + i * len(region(unit)) for i in range(475)])
    file.symbols([elf.Symbol(f"_ZN2at6native{i}kernelEv", text, 64 * i, 64) for i in range(20_000)])
    file.eh_frame([(text.sh_addr + 64 * i, 64) for i in range(20_000)])
    return write(tmp_path_factory.mktemp("torch") / "libtorch_cuda.so", file.bytes())


def test_headers_are_read_in_time(torch_like: Path) -> None:
    """DataDog/datadog-agent 35223 (B22): parsing fatbins was turned off by default, being too expensive.

    Against a yardstick of the same machine: the sha256 of the file, which reads every byte once.
    """

    def least(action: object) -> float:
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            action()  # type: ignore[operator]
            times.append(time.perf_counter() - begin)
        return min(times)

    data = torch_like.read_bytes()
    size = len(data) / 1e6
    assert 30 < size < 60
    yardstick = least(lambda: hashlib.sha256(data).digest())
    mine = least(lambda: tables(torch_like, functions=False, digests=False))
    assert mine < 12 * yardstick + 0.5


def test_memory_does_not_grow_with_the_file(torch_like: Path) -> None:
    """DataDog/datadog-agent 33676 (B23): out of memory by keeping attributes of every PyTorch kernel."""
    script = (
        "import pathlib, sys\n"
        "from gpubloat.libraries.onefile import Options, scan_file\n"
        "from gpubloat.libraries.inputs import Input\n"
        "def peak(): return int(pathlib.Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])\n"
        "options = Options('sm_90', kernels=True, threads=2)\n"
        "def one(path): return scan_file(Input('x', 'x', path, is_named=True), options)\n"
        "one(sys.argv[2]); before = peak(); rows = one(sys.argv[1]); print(peak() - before, len(rows['kernels']))\n"
    )
    small = write(torch_like.with_name("small.so"), library(ONE_CUBIN))
    command = [sys.executable, "-c", script, str(torch_like), str(small)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    grown, kernels = map(int, done.stdout.split())
    assert kernels == 475 * 6
    assert grown * 1024 < 120 << 20  # the mapped file, rows and names; not the contents of all elements


@pytest.mark.parametrize("shift", [0, 1, 5])
def test_a_cubin_as_a_c_array(shift: int, tmp_path: Path) -> None:
    """NVIDIA/TensorRT 3198 (B28): a cubin as a C array of a .cpp file, so in host data and not in .nv_fatbin."""
    cubin = fatbin.compiled("sm_80")
    file = elf.Elf()
    file.text()
    held = file.rodata(".rodata", b"a" * shift + cubin + b"b" * 100)
    run = scanned(write(tmp_path / "libplugin.so", file.bytes()), kernels=True, target="sm_86")
    assert run["regions"][["section", "offset_bytes", "size_bytes", "is_raw_cubin"]].values.tolist() == [
        [".rodata", held.sh_offset + shift, len(cubin), True]
    ]
    assert run["elements"][["target", "fit"]].values.tolist() == [["sm_80", "older_minor"]]
    assert sorted(run["kernels"]["kernel"]) == fatbin.KERNELS


@pytest.mark.parametrize("form", ["zstd", "gzip"])
def test_compressed_archives_of_cubins_are_reported(form: str, tmp_path: Path) -> None:
    """NVIDIA/TensorRT-LLM 13542 (B29): cubins moved to compressed blobs behind incbin symbols: said, not guessed."""
    archive = containers.archive([(f"{n}.cubin", elf.cubin(number=n)) for n in (80, 90, 100)])
    blob = zstandard.ZstdCompressor().compress(archive) if form == "zstd" else gzip.compress(archive)
    file = elf.Elf()
    file.text()
    held = file.rodata(".rodata", b"incbin" + blob)
    found = tables(write(tmp_path / "libkernels.so", file.bytes()))
    assert found["problems"][["problem", "offset_bytes"]].values.tolist() == [["compressed_data", held.sh_offset + 6]]
    assert found["problems"]["detail"][0].endswith("its content was not analysed; it starts as an archive")
    assert found["libraries"]["gpu_code_bytes"].tolist() == [0]


def test_an_element_without_the_flag_of_64_bits(tmp_path: Path) -> None:
    """ai-dynamo/dynamo 4700 (B35): a fatbin built without 64-bit mode (flag bit 0 clear) is read like any other."""
    found = tables(write(tmp_path / "lib.so", library(region([element(elf.cubin(), flags=0x10)]))), kernels=True)
    assert found["elements"][["target", "flags", "n_kernels"]].values.tolist() == [["sm_90", 0x10, 1]]


def test_fatbins_of_the_format_before_cuda_4(tmp_path: Path) -> None:
    """redplait's post of August 2025 on a fatbin tool (B37): magic 0x1EE55A01, said to be not supported."""
    old = struct.pack("<IIQ", fatbin.OLD_MAGIC, 4, 200) + b"\x01" * 200
    with pytest.raises(FormatError, match="before CUDA 4") as caught:
        scan(write(tmp_path / "old.fatbin", old))
    assert caught.value.hint is not None
    found = tables(write(tmp_path / "libcublas.so.7", library(old, wrapped=False)))
    assert found["problems"]["problem"].tolist() == ["old_magic"]
    assert len(found["regions"]) == 0


# Cases that no report names yet ---------------------------------------------------------------------------------------


def test_the_concatenated_element_of_the_13_5_tools(targets: tuple[Code, ...], tmp_path: Path) -> None:
    """One zstd stream for all targets (kind 0x100): an element is not one cubin any more."""
    path = write(tmp_path / "lib.so", library(packed(targets, ("-concat",))))
    found = tables(path, kernels=True, target="sm_86")
    inner = found["elements"][found["elements"]["member"].notna()]
    assert sorted(inner["target"]) == sorted(c.target for c in targets)
    assert inner.loc[inner["is_loadable"].astype(bool), "target"].tolist() == ["sm_80", "sm_86"]


def test_twins_of_one_number_in_one_region(tmp_path: Path) -> None:
    """sm_90 beside sm_90a, sm_100 beside sm_100a and sm_100f: one number, told apart by flag bits."""
    codes = tuple(code(t) for t in ("sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f"))
    found = tables(write(tmp_path / "lib.so", library(packed(codes))), target="sm_103")["elements"]
    assert found["target"].tolist() == [c.target for c in codes]
    assert found["fit"].tolist() == ["other_major", "other_architecture", "older_minor", "other_architecture", "family"]


def test_loader_code_that_holds_the_magic(tmp_path: Path) -> None:
    """cuDNN and cusparseLt compare with the magic in their code: five to six false hits a library."""
    magic = struct.pack("<I", fatbin.MAGIC)
    file = elf.Elf()
    file.text(data=(b"\x81\x38" + magic + b"\x75\x10" + region()[:8] + b"\x90" * 16) * 6)
    file.rodata(".nv_fatbin", ONE_CUBIN)
    found = tables(write(tmp_path / "libcudnn.so", file.bytes()))
    assert len(found["regions"]) == 1
    assert len(found["problems"]) == 0


def test_empty_regions(tmp_path: Path) -> None:
    """A region of size 0 is sound: debloating leaves some behind."""
    found = tables(write(tmp_path / "lib.so", library(region() + ONE_CUBIN + region(), wrapped=False)))
    assert found["regions"]["n_elements"].tolist() == [0, 1, 0]
    assert found["regions"]["size_bytes"].tolist() == [16, len(ONE_CUBIN), 16]
    assert len(found["problems"]) == 0


def test_a_payload_overwritten_with_ones(tmp_path: Path) -> None:
    """A library debloated in place keeps its headers: the element stays, its content is a problem."""
    good, bad = element(elf.cubin()), bytearray(element(elf.cubin()))
    bad[64:] = b"\x01" * (len(bad) - 64)
    found = tables(write(tmp_path / "lib.so", library(region([bytes(bad), good]))), kernels=True)
    assert found["elements"]["n_kernels"].tolist() == [0, 1]
    assert found["problems"]["problem"].tolist() == ["undecodable_payload"]


def test_link_stubs_that_no_code_uses(tmp_path: Path) -> None:
    """A stub library: symbols, hardly any code, no GPU code. Counted as what it is."""
    file = elf.Elf()
    text = file.text(data=b"\xc3" * 16)
    file.symbols([elf.Symbol(f"cuStub{i}", text, i, 1) for i in range(16)], dynamic=True)
    found = tables(write(tmp_path / "stubs.so", file.bytes()))
    assert found["libraries"][["n_functions", "cpu_code_bytes", "gpu_code_bytes"]].values.tolist() == [[16, 16, 0]]


def test_a_library_packed_with_upx(tmp_path: Path) -> None:
    """cuobjdump says that there is no device code; we say that we did not look."""
    file = elf.Elf()
    file.text(data=b"\x90" * 64 + b"UPX!" + bytes(12) + np.random.default_rng(1).bytes(5000))
    found = tables(write(tmp_path / "packed.so", file.image(table=False).bytes()))
    (problem,) = found["problems"].to_dict("records")
    assert problem["problem"] == "packed"
    assert "UPX" in problem["detail"]


def test_a_gzip_file(tmp_path: Path) -> None:
    """A library handed over as .gz: the message says what to do."""
    path = write(tmp_path / "libkernels.so.gz", gzip.compress(library(ONE_CUBIN)))
    with pytest.raises(FormatError, match=r"gzip data.*it starts as an ELF file") as caught:
        scan(path)
    assert caught.value.hint == "unpack it first, and scan what comes out"


def test_a_wheel_and_the_same_files_unpacked_give_the_same_elements(tmp_path: Path) -> None:
    """A wheel is scanned without being unpacked; stored and deflated members alike."""
    data = library(ONE_CUBIN + region([element(b"x", kind=CUBIN)]))
    methods = {"a.so": containers.STORED, "b.so": containers.DEFLATED}
    wheel = containers.wheel(tmp_path / "x.whl", {name: (data, method) for name, method in methods.items()})
    (tmp_path / "lib").mkdir()
    for name in methods:
        write(tmp_path / "lib" / name, data)
    packed_run, plain = scan(wheel), scan(tmp_path / "lib")
    for name in ("sections", "elements", "regions", "functions"):
        pd.testing.assert_frame_equal(packed_run[name], plain[name])


def test_identifiers_with_and_without_their_nul(tmp_path: Path) -> None:
    """The stored length counts the ending NUL, or spaces, or neither."""
    made = region([element(elf.cubin(), identifier=i) for i in (b"unit.cu", b"unit.cu\0", b"unit.cu  ")])
    found = tables(write(tmp_path / "lib.so", library(made)))
    assert found["elements"]["identifier"].tolist() == ["unit.cu"] * 3
