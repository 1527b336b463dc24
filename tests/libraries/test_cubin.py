"""Kernels, variables and targets of cubins and PTX, against the compiler that made them and cuobjdump."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

import pytest

from gpubloat.errors import FormatError
from gpubloat.libraries import cubin
from tests import oracles
from tests.build import elf, fatbin
from tests.build.fatbin import compiled
from tests.libraries.common import reader, scanned

TARGETS = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f", "sm_103a", "sm_120", "sm_121f"]


def shown(data: bytes, tmp_path: Path, option: str) -> str:
    path = tmp_path / "one.cubin"
    path.write_bytes(data)
    return subprocess.run([oracles.cuobjdump(), option, path], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", TARGETS)
def test_targets_are_those_of_cuobjdump(target: str, tmp_path: Path) -> None:
    data = compiled(target)
    (theirs,) = re.findall(r"sm=(\w+),", shown(data, tmp_path, "-elf"))
    assert cubin.target(reader(data)) == f"sm_{theirs}"
    assert f"sm_{theirs}" == target.removesuffix("f")  # no mark of families


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("options", [(), ("-rdc=true",)], ids=["whole program", "relocatable"])
def test_kernels_and_variables_are_those_of_cuobjdump(target: str, options: tuple[str, ...], tmp_path: Path) -> None:
    data = compiled(target, options=options)
    found = cubin.read(reader(data))
    lines = [line.split() for line in shown(data, tmp_path, "-symbols").splitlines()]
    symbols = [line for line in lines if line and line[0] in ("FUNC", "OBJECT", "CUDA_OBJECT") and "U" not in line]
    symbols = [line for line in symbols if line[2] != "INTERNAL"]  # where the parameters of a kernel are
    assert found.kernels == [line[-1] for line in symbols if line[0] == "FUNC" and "ENTRY" in line]
    assert found.variables == [line[-1] for line in symbols if line[0] != "FUNC"]
    assert sorted(found.kernels) == fatbin.KERNELS
    assert dict(zip(found.variables, found.variable_bytes, strict=True)) == {"counter": 4, "table": 64}
    assert found.code_bytes is not None
    assert min(found.code_bytes) >= 128


def test_code_bytes_are_the_sizes_of_the_text_sections() -> None:
    data = compiled("sm_90")
    found = cubin.read(reader(data))
    sizes = {s.name: s.sh_size for s in cubin.elf.Elf(reader(data)).sections}
    assert found.code_bytes == [sizes[f".text.{k}"] for k in found.kernels]


@pytest.mark.parametrize("target", ["compute_75", "compute_80", "compute_90a", "compute_120f"])
@pytest.mark.parametrize("options", [(), ("-rdc=true",)], ids=["whole program", "relocatable"])
def test_entries_of_ptx_are_the_kernels_of_the_cubin(target: str, options: tuple[str, ...]) -> None:
    text = compiled(target, "ptx", options=options)
    found = cubin.read_ptx(reader(text))
    assert sorted(found.kernels) == fatbin.KERNELS
    assert found.code_bytes is None
    assert text.count(b".entry") == len(fatbin.KERNELS)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (b".visible .entry one(\n.param .u64 p\n)\n{\nret;\n}", ["one"]),
        (b".entry one\n(\n)", ["one"]),
        (b".weak .entry _Z3addIfEvPT_PKS0_i(", ["_Z3addIfEvPT_PKS0_i"]),
        (b"} .visible\t.entry $a%b_c (", ["$a%b_c"[:2]]),
        (b"// .visible .entry commented(\n.visible .entry real(", ["real"]),
        (b'.file 1 "dir.entry name"\n', []),
        (b".visible .func .entry_helper(\n", []),
        (b".visible .entryway foo(", []),
        (b".entry", []),
        (b".entry 9lives(", []),
        (b"x" * 200 + b".entry late(", []),
        (b"", []),
    ],
)
def test_entries_of_ptx_by_hand(text: bytes, names: list[str]) -> None:
    assert cubin.read_ptx(reader(text)).kernels == names


def test_a_cubin_by_hand() -> None:
    made = elf.cubin([("k1", 128), ("k2", 384)], number=120, variables=[("g", 16)], arch=True)
    assert cubin.target(reader(made)) == "sm_120a"
    assert cubin.read(reader(made)) == cubin.Contents(["k1", "k2"], [128, 384], ["g"], [16])


@pytest.mark.parametrize(
    ("abi", "flags", "target"),
    [
        (7, 0x005A055A, "sm_90"),
        (7, 0x005A0D5A, "sm_90a"),
        (7, 80, "sm_80"),
        (8, 90 << 8, "sm_90"),
        (8, 90 << 8 | 8, "sm_90a"),
    ],
)
def test_the_target_moved_inside_e_flags_with_abi_version_8(abi: int, flags: int, target: str) -> None:
    made = bytearray(elf.cubin())
    made[8] = abi
    struct.pack_into("<I", made, 0x30, flags)
    assert cubin.target(reader(bytes(made))) == target


def test_device_functions_and_undefined_symbols_are_no_kernels() -> None:
    file = elf.Elf(elf.ET_EXEC, elf.EM_CUDA)
    code = file.text(".text.k", bytes(256))
    file.symbols(
        [
            elf.Symbol("k", code, 0, 128, other=0x10),
            elf.Symbol("helper", code, 128, 128),
            elf.Symbol("elsewhere", None, other=0x10),
            elf.Symbol("outside", None, kind=elf.OBJECT),
        ]
    )
    found = cubin.read(reader(file.image(load=False).bytes()))
    assert (found.kernels, found.variables) == (["k"], [])


def test_a_cubin_without_symbols_is_empty() -> None:
    file = elf.Elf(elf.ET_EXEC, elf.EM_CUDA)
    file.text(".text.k", bytes(128))
    assert cubin.read(reader(file.image(load=False).bytes())) == cubin.Contents([], [], [], [])


def test_a_host_library_is_no_cubin(libstdcpp: Path) -> None:
    with pytest.raises(FormatError, match="machine 62") as caught:
        cubin.read(reader(libstdcpp.read_bytes()))
    assert caught.value.offset == 18


@pytest.mark.parametrize("target", ["sm_80", "sm_100f"])
@pytest.mark.parametrize("before", [0, 1, 3, 64])
@pytest.mark.parametrize("behind", [0, 100])
def test_extent_is_the_length_of_the_cubin(target: str, before: int, behind: int) -> None:
    data = compiled(target)
    made = b"x" * before + data + b"y" * behind
    assert cubin.extent(reader(made), before, len(made)) == len(data)
    assert cubin.extent(reader(made), before, before + len(data)) == len(data)
    assert cubin.extent(reader(made), before, before + len(data) - 1) is None


def test_extent_of_other_bytes_is_none(libstdcpp: Path) -> None:
    host = libstdcpp.read_bytes()
    assert cubin.extent(reader(host), 0, len(host)) is None
    assert cubin.extent(reader(b"\x7fELF\x02\x01\x01" + bytes(100)), 0, 107) is None


def test_a_cubin_file_is_one_region(tmp_path: Path) -> None:
    path = tmp_path / "kernels.cubin"
    path.write_bytes(compiled("sm_90a"))
    run = scanned(path, kernels=True, target="sm_90")
    assert run["libraries"]["format"].tolist() == ["cubin"]
    assert run["elements"][["target", "fit"]].values.tolist() == [["sm_90a", "architecture"]]
    assert sorted(run["kernels"]["kernel"]) == fatbin.KERNELS
    assert run["variables"]["variable"].tolist() == ["counter", "table"]
