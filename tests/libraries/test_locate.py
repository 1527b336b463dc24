"""Which ranges go, and for which reason: every rule of `locate`, on libraries made for it."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubloat.errors import GpubloatError
from gpubloat.libraries import entries, locate, union
from gpubloat.libraries.elf import PAGE
from gpubloat.libraries.inputs import Input, opened
from gpubloat.libraries.union import Usage
from gpubloat.run import Run
from tests.build import elf, fatbin
from tests.libraries import traced
from tests.libraries.common import library, view

CUBIN, PTX, LTO, TILE, CONCAT = fatbin.CUBIN, fatbin.PTX, fatbin.LTO_IR, fatbin.TILE_IR, fatbin.CONCAT
RELOCATABLE, RELOCATABLE_SECTION = fatbin.RELOCATABLE_PTX, "__nv_relfatbin"


def planned(tmp_path: Path, data: bytes, usage: Usage | None = None, wanted: list[str] | None = None) -> locate.Plan:
    path = tmp_path / "lib.so"
    path.write_bytes(data)
    tables = traced.scan(path, "lib.so")
    with opened(Input("lib.so", "lib.so", str(path))) as reader:
        plan = locate.plan(reader, tables, usage, wanted)
    assert (plan.ranges["offset"][1:] >= (plan.ranges["offset"] + plan.ranges["size"])[:-1]).all()
    assert plan.ranges.tolist() == traced.expected_ranges(plan.removed, tables["elements"])
    return plan


def reasons(plan: locate.Plan) -> dict[tuple[int, int], str]:
    rows = plan.removed[plan.removed["what"] == "element"]
    return {(r, e): why for r, e, why in zip(rows["region"], rows["element"], rows["reason"])}


def one(kind: int = CUBIN, number: int = 90, **more: object) -> bytes:
    return fatbin.element(b"\x07" * 64, kind=kind, number=number, **more)  # type: ignore[arg-type]


def used(*elements: tuple[int, int], targets: tuple[str, ...] = ("sm_90",), **more: object) -> Usage:
    return Usage(set(targets), "not watched", elements=set(elements), **more)  # type: ignore[arg-type]


REGION = [one(number=80), one(number=90), one(number=100), one(PTX, 90), one(PTX, 120), one(LTO, 80), one(LTO, 120)]


def test_by_target_alone_only_what_the_gpu_cannot_be_given_goes(tmp_path: Path) -> None:
    plan = planned(tmp_path, library(fatbin.region(REGION)), None, ["sm_90"])
    assert reasons(plan) == dict.fromkeys([(0, 0), (0, 2), (0, 3), (0, 4), (0, 6)], "other_architecture")


def test_several_gpus_keep_what_one_of_them_could_be_given(tmp_path: Path) -> None:
    plan = planned(tmp_path, library(fatbin.region(REGION)), None, ["sm_80", "sm_100"])
    assert set(reasons(plan)) == {(0, 1), (0, 3), (0, 4), (0, 6)}


def test_ptx_stays_where_no_machine_code_fits(tmp_path: Path) -> None:
    plan = planned(tmp_path, library(fatbin.region([one(number=80), one(PTX, 80)])), None, ["sm_90"])
    assert set(reasons(plan)) == {(0, 0)}


def test_runs_remove_unused_code_of_their_own_gpu(tmp_path: Path) -> None:
    data = library(fatbin.region(REGION) + fatbin.region([one(), one(number=80)]))
    plan = planned(tmp_path, data, used((0, 1)))
    assert reasons(plan)[1, 0] == "unused_element"
    assert reasons(plan)[1, 1] == "other_architecture"
    assert (0, 1) not in reasons(plan)
    assert (0, 5) not in reasons(plan), "LTO-IR on no whole page of its own"


def test_used_code_of_another_architecture_stays(tmp_path: Path) -> None:
    plan = planned(tmp_path, library(fatbin.region(REGION)), used((0, 0), (0, 4)))
    assert not {(0, 0), (0, 4)} & set(reasons(plan))


def test_a_gpu_that_no_run_saw_keeps_its_code(tmp_path: Path) -> None:
    plan = planned(tmp_path, library(fatbin.region(REGION)), used((0, 1)), ["sm_80", "sm_90"])
    assert (0, 0) not in reasons(plan)
    assert (0, 2) in reasons(plan)


def test_without_cuda_all_machine_code_is_unused(tmp_path: Path) -> None:
    plan = planned(tmp_path, library(fatbin.region(REGION)), used(targets=()))
    assert reasons(plan) == dict.fromkeys([(0, n) for n in range(5)], "unused_element")


def test_a_run_that_recorded_no_gpu_code_removes_nothing_unused(tmp_path: Path) -> None:
    data = library(fatbin.region(REGION))
    assert set(reasons(planned(tmp_path, data, used(is_gpu_known=False))).values()) == {"other_architecture"}
    assert not reasons(planned(tmp_path, data, used(targets=(), is_gpu_known=False)))
    unnamed = used(targets=("sm_90",), is_gpu_known=False, is_target_known=False)
    assert not reasons(planned(tmp_path, data, unnamed))
    assert set(reasons(planned(tmp_path, data, unnamed, ["sm_90"])).values()) == {"other_architecture"}


def test_concatenated_elements_go_whole_or_not_at_all(tmp_path: Path) -> None:
    some = fatbin.concat([(CUBIN, 80, fatbin.LINUX64, b"a" * 64), (CUBIN, 90, fatbin.LINUX64, b"b" * 64)])
    none = fatbin.concat([(CUBIN, 80, fatbin.LINUX64, b"a" * 64), (CUBIN, 100, fatbin.LINUX64, b"b" * 64)])
    data = library(fatbin.region([some, none]))
    assert reasons(planned(tmp_path, data, None, ["sm_90"])) == {(0, 1): "other_architecture"}
    assert reasons(planned(tmp_path, data, used()))[0, 0] == "unused_element"
    assert (0, 0) not in reasons(planned(tmp_path, data, used((0, 0))))


def test_unknown_kinds_and_empty_payloads_stay(tmp_path: Path) -> None:
    data = library(fatbin.region([one(0x4444, 80), fatbin.element(b"", number=80), one(number=80)]))
    assert set(reasons(planned(tmp_path, data, used()))) == {(0, 2)}


def test_ranges_are_payloads_and_the_kinds_in_front_of_them(tmp_path: Path) -> None:
    named = fatbin.element(b"\x07" * 64, number=80, identifier=b"a name", options=b"-O3")
    data = library(fatbin.region([one(), named, one(), one(number=100)]))
    plan = planned(tmp_path, data, None, ["sm_90"])
    start = data.index(fatbin.region([one(), named])[16:])
    second, fourth = start + 128, start + 256 + len(named)
    assert plan.ranges.tolist() == [
        (second, 2, locate.GPU, 0), (second + 64 + 8 + 8, 64, locate.GPU, 0),
        (fourth, 2, locate.GPU, 1), (fourth + 64, 64, locate.GPU, 1),
    ]  # fmt: skip
    assert all(data[place : place + 4] == struct.pack("<HH", CUBIN, 0x0101) for place in (second, fourth))
    assert len(plan.removed) == 2


def test_elements_that_overlap_go_once(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(fatbin.region([one(number=80), one(number=80), one(number=80)])))
    tables = traced.scan(path, "lib.so")
    # The header of the second would lie in the payload of the first: no scan says so, a damaged table can.
    tables["elements"].loc[1, ["offset_bytes", "header_bytes"]] += [-32, 32]
    with opened(Input("lib.so", "lib.so", str(path))) as reader:
        plan = locate.plan(reader, tables, None, ["sm_90"])
    assert reasons(plan) == dict.fromkeys([(0, 0), (0, 2)], "other_architecture")
    assert (plan.ranges["offset"][1:] >= (plan.ranges["offset"] + plan.ranges["size"])[:-1]).all()


BIG = 20000  # bytes of a payload that has whole pages, wherever it lies
LINKED = [fatbin.element(bytes(BIG), kind=kind, number=90) for kind in (LTO, RELOCATABLE, TILE)]


def test_input_of_linkers_goes_if_nothing_touched_it(tmp_path: Path) -> None:
    data = library(fatbin.region([one(LTO), *LINKED]))  # the first one has no whole page
    every = dict.fromkeys([(0, 1), (0, 2), (0, 3)], "unused_element")
    for is_complete in (False, True):  # look-ups in the driver tell nothing of them
        assert reasons(planned(tmp_path, data, used(is_gpu_complete=is_complete))) == every
        assert not reasons(planned(tmp_path, data, used(is_gpu_complete=is_complete, is_watched=False)))
    assert not reasons(planned(tmp_path, data, used(is_gpu_known=False)))
    assert set(reasons(planned(tmp_path, data, used((0, 1))))) == set(every) - {(0, 1)}
    assert not reasons(planned(tmp_path, data, None, ["sm_90"]))
    other = fatbin.element(bytes(BIG), kind=LTO, number=120)
    plan = planned(tmp_path, library(fatbin.region([other])), used(is_watched=False))
    assert reasons(plan) == {(0, 0): "other_architecture"}


def test_input_of_linkers_stays_where_nothing_is_watched(tmp_path: Path) -> None:
    data = library(fatbin.region(LINKED), section=".rodata", wrapped=False)
    assert not reasons(planned(tmp_path, data, used()))


def test_relocatable_code_goes_for_its_architecture_or_if_nothing_touched_it(tmp_path: Path) -> None:
    def held(*elements: bytes) -> bytes:
        return library(fatbin.region(elements), section=RELOCATABLE_SECTION, wrapped=False)

    assert reasons(planned(tmp_path, held(one(number=80), one()), used())) == {(0, 0): "other_architecture"}
    big = [fatbin.element(bytes(BIG), number=number) for number in (80, 90, 90)]
    old = {(0, 0): "other_architecture"}
    assert reasons(planned(tmp_path, held(*big), used(is_watched=False))) == old
    assert reasons(planned(tmp_path, held(*big), used((0, 1)))) == old | {(0, 2): "unused_element"}
    assert not reasons(planned(tmp_path, held(*big), used((0, 0), (0, 1), (0, 2))))


def cubins(packed: bool, section: str) -> bytes:
    """Cubins for an sm_80 in host data, with no fatbin around them: one, or six packed. They begin with a page."""
    cubin = fatbin.compiled("sm_80")
    data = fatbin.compress(cubin, "zstd") if packed else cubin
    file = elf.Elf()
    file.rodata(section, (data + bytes(-len(data) % 16)) * (6 if packed else 1), align=PAGE)
    return file.bytes()


@pytest.mark.parametrize("packed", [False, True])
def test_raw_cubins_go_only_if_nothing_touched_their_pages(tmp_path: Path, packed: bool) -> None:
    data = cubins(packed, ".lrodata")
    plan = planned(tmp_path, data, used())
    assert set(reasons(plan).values()) == {"unused_element"}, "never for reason I, whatever its target"
    assert len(plan.removed) == (5 if packed else 1), "the last of six has no whole page"
    assert len(plan.ranges) == len(plan.removed), "no header, no kind"
    touched = next(iter(reasons(plan)))
    assert set(reasons(planned(tmp_path, data, used(touched)))) == set(reasons(plan)) - {touched}
    assert not reasons(planned(tmp_path, data, used(is_watched=False)))
    assert not reasons(planned(tmp_path, data, used(is_gpu_known=False)))
    assert not reasons(planned(tmp_path, data, used(), ["sm_80", "sm_90"])), "no run saw an sm_80"
    assert not reasons(planned(tmp_path, data, None, ["sm_90"]))


@pytest.mark.parametrize("packed", [False, True])
def test_raw_cubins_stay_where_nothing_is_watched(tmp_path: Path, packed: bool) -> None:
    assert not len(planned(tmp_path, cubins(packed, ".rodata"), used()).removed)


def test_pages_alone_know_only_elements_with_a_whole_page(tmp_path: Path) -> None:
    big = fatbin.element(bytes(20000), number=90)
    data = library(fatbin.region([one(), big, one()]))
    assert set(reasons(planned(tmp_path, data, used(is_gpu_complete=False)))) == {(0, 1)}
    hidden = library(fatbin.region([one(), big, one()]), section=".rodata", wrapped=False)
    assert not reasons(planned(tmp_path, hidden, used(is_gpu_complete=False)))
    assert len(reasons(planned(tmp_path, hidden, used()))) == 3


def test_misses_name_elements_by_their_header_too(tmp_path: Path) -> None:
    data = library(fatbin.region([one(), one()]))
    first = traced.scan(tmp_path / "lib.so", "lib.so") if (tmp_path / "lib.so").write_bytes(data) else {}
    place = int(first["elements"]["offset_bytes"].iloc[0])
    assert set(reasons(planned(tmp_path, data, used(headers={place})))) == {(0, 1)}


# --- functions ------------------------------------------------------------------------------------------------------


def code(
    functions: list[tuple[int, int]], *, size: int = 4096, body: bytes | None = None, **more: bytes
) -> tuple[elf.Elf, elf.Section]:
    file = elf.Elf()
    text = file.text(data=body or b"\x90" * size)
    for name, data in more.items():
        file.text(name, data)
    file.eh_frame([(text.sh_addr + start, length) for start, length in functions])
    return file, text


def cut(plan: locate.Plan, base: int) -> list[tuple[int, int]]:
    rows = plan.removed[plan.removed["what"] == "function"]
    return [(int(o) - base, int(s)) for o, s in zip(rows["offset_bytes"], rows["size_bytes"])]


def entered(*offsets: int, base: int = 0) -> Usage:
    return Usage(functions=np.array([base + o for o in offsets], np.int64))


def test_functions_that_no_run_entered_go(tmp_path: Path) -> None:
    file, text = code([(0, 64), (64, 64), (128, 32)])
    plan = planned(tmp_path, file.bytes(), entered(64, base=text.sh_offset))
    assert cut(plan, text.sh_offset) == [(0, 64), (128, 32)]
    assert set(plan.removed["reason"]) == {"unused_function"}


def test_functions_that_were_not_watched_stay(tmp_path: Path) -> None:
    file, _ = code([(0, 64)])
    plan = planned(tmp_path, file.bytes(), Usage(cpu_problem="part of the C library"))
    assert not len(plan.removed)
    assert plan.n_unknown == 1


def test_bytes_shared_with_a_function_in_use_stay(tmp_path: Path) -> None:
    file, text = code([(0, 128), (128, 64)])
    file.symbols([elf.Symbol("inner", text, 64, 96)])  # starts in the first, reaches into the second
    plan = planned(tmp_path, file.bytes(), entered(64, base=text.sh_offset))
    assert cut(plan, text.sh_offset) == []


@pytest.mark.parametrize("dynamic", [False, True])
def test_functions_bounded_by_a_sized_symbol_go(tmp_path: Path, dynamic: bool) -> None:
    file, text = code([(0, 64)])
    names = [elf.Symbol("bare", text, 128, 64), elf.Symbol("other", text, 192, 48), elf.Symbol("empty", text, 512, 0)]
    file.symbols(names, dynamic=dynamic)
    plan = planned(tmp_path, file.bytes(), entered())
    assert cut(plan, text.sh_offset) == [(0, 64), (128, 64), (192, 48)]
    assert plan.n_unknown == 1, "nobody knows where a symbol without size ends"
    plan = planned(tmp_path, file.bytes(), entered(128, base=text.sh_offset))
    assert cut(plan, text.sh_offset) == [(0, 64), (192, 48)]


def test_a_symbol_that_reaches_over_another_start_is_no_bound(tmp_path: Path) -> None:
    file, text = code([(0, 64)])
    file.symbols([elf.Symbol("bare", text, 128, 64), elf.Symbol("inner", text, 160, 32)])
    plan = planned(tmp_path, file.bytes(), entered())
    assert cut(plan, text.sh_offset) == [(0, 64)], "the inner one shares its bytes with one that stays"
    assert plan.n_unknown == 1


@pytest.mark.parametrize("opcode", [b"\x0f\x84", b"\xe9"])
def test_large_assembly_that_is_jumped_into_stays(tmp_path: Path, opcode: bytes) -> None:
    body = bytearray(b"\x90" * 16384)
    body[16 : 16 + len(opcode) + 4] = jump(opcode, 16, 6000)
    large = entries.SMALL + 1000
    for has_entry in (False, True):
        file, text = code([(0, 64), *([(4096, large)] if has_entry else [])], body=bytes(body))
        file.symbols([elf.Symbol("work", text, 0, 64), elf.Symbol("assembly", text, 4096, large)])
        plan = planned(tmp_path, file.bytes(), entered(0, base=text.sh_offset))
        assert cut(plan, text.sh_offset) == ([(4096, large)] if has_entry else [])


def test_a_symbol_in_front_of_the_mark_names_the_same_function(tmp_path: Path) -> None:
    file, text = code([(4, 60)], body=locate.ENDBR64 + b"\x90" * 252)
    file.symbols([elf.Symbol("kernel", text, 0, 64)])
    assert cut(planned(tmp_path, file.bytes(), entered()), text.sh_offset) == [(0, 4), (4, 60)]
    part = planned(tmp_path, file.bytes(), entered(4, base=text.sh_offset))
    assert cut(part, text.sh_offset) == [(0, 4)], "what is entered behind the mark stays whole"
    assert cut(planned(tmp_path, file.bytes(), entered(0, 4, base=text.sh_offset)), text.sh_offset) == []
    file, text = code([(4, 60)])
    file.symbols([elf.Symbol("kernel", text, 0, 64)])
    assert cut(planned(tmp_path, file.bytes(), entered()), text.sh_offset) == []


def test_code_that_the_loader_calls_stays(tmp_path: Path) -> None:
    file, text = code([(64 * n, 64) for n in range(6)])
    init = file.data(".init_array", struct.pack("<Q", text.sh_addr))  # the linker filled it in
    fini = file.data(".fini_array", bytes(16))
    file.relocations([(fini.sh_addr, text.sh_addr + 64)])
    file.symbols([elf.Symbol("choose", text, 128, 64, kind=10)])
    dynamic = struct.pack("<QQQQ", entries.DT_INIT, text.sh_addr + 192, 0, 0)
    file.add(".dynamic", dynamic, sh_type=6, flags=elf.ALLOC)
    assert init.sh_size == 8
    plan = planned(tmp_path, file.bytes(), entered())
    assert cut(plan, text.sh_offset) == [(256, 64), (320, 64)]
    assert set(entries.fixed(view(file.bytes())).tolist()) >= {text.sh_addr + n for n in (0, 64, 128, 192)}


def test_resolvers_named_by_relocations_stay(tmp_path: Path) -> None:
    file, text = code([(0, 64), (64, 64)])
    row = struct.pack("<QQq", text.sh_addr + 2048, entries.R_X86_64_IRELATIVE, text.sh_addr)
    file.add(".rela.iplt", row, sh_type=elf.RELA, flags=elf.ALLOC, entsize=24)
    assert cut(planned(tmp_path, file.bytes(), entered()), text.sh_offset) == [(64, 64)]


@pytest.mark.parametrize("section", [".init", ".fini", ".plt", ".plt.sec", ".plt.got"])
def test_stubs_and_their_like_stay(tmp_path: Path, section: str) -> None:
    file = elf.Elf()
    text = file.text(section)
    file.eh_frame([(text.sh_addr, 32)])
    assert not len(planned(tmp_path, file.bytes(), entered()).removed)


def test_cold_parts_of_used_functions_stay(tmp_path: Path) -> None:
    file, text = code([(64 * n, 64) for n in range(4)])
    names = ["work", "work.cold", "other.cold.1", "other"]
    file.symbols([elf.Symbol(name, text, 64 * n, 64) for n, name in enumerate(names)])
    plan = planned(tmp_path, file.bytes(), entered(0, base=text.sh_offset))
    assert cut(plan, text.sh_offset) == [(128, 64), (192, 64)]


def jump(opcode: bytes, source: int, target: int) -> bytes:
    return opcode + struct.pack("<i", target - source - len(opcode) - 4)


@pytest.mark.parametrize("opcode", [b"\x0f\x84", b"\xe9", b"\x48\x8d\x05"])
def test_code_that_is_jumped_into_behind_its_start_stays(tmp_path: Path, opcode: bytes) -> None:
    body = bytearray(b"\x90" * 512)
    body[16 : 16 + len(opcode) + 4] = jump(opcode, 16, 80)  # from the first into the second function
    body[96 : 96 + len(opcode) + 4] = jump(opcode, 96, 144)  # and from there into the third
    body[200 : 200 + len(opcode) + 4] = jump(opcode, 200, 300)  # an unused one into another
    file, text = code([(0, 64), (64, 64), (128, 64), (192, 64), (256, 64)], body=bytes(body))
    plan = planned(tmp_path, file.bytes(), entered(0, base=text.sh_offset))
    assert cut(plan, text.sh_offset) == [(192, 64), (256, 64)]


def test_a_jump_to_a_start_keeps_nothing(tmp_path: Path) -> None:
    body = bytearray(b"\x90" * 512)
    body[16:21] = jump(b"\xe9", 16, 64)
    file, text = code([(0, 64), (64, 64)], body=bytes(body))
    assert cut(planned(tmp_path, file.bytes(), entered(0, base=text.sh_offset)), text.sh_offset) == [(64, 64)]


def test_other_machines_keep_their_functions(tmp_path: Path) -> None:
    file = elf.Elf(e_machine=183)
    text = file.text()
    file.eh_frame([(text.sh_addr, 32)])
    assert not len(planned(tmp_path, file.bytes(), entered()).removed)


def test_fatbins_in_code_are_no_function(tmp_path: Path) -> None:
    body = bytearray(b"\x90" * 1024)
    region = fatbin.region([one(number=80)])
    body[256 : 256 + len(region)] = region
    file, text = code([(0, 64), (128, 512)], body=bytes(body))
    plan = planned(tmp_path, file.bytes(), Usage({"sm_90"}))
    assert cut(plan, text.sh_offset) == [(0, 64)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60), st.booleans()), max_size=20, unique_by=lambda r: r[0])
)
def test_nothing_of_a_function_in_use_goes(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, bool]]
) -> None:
    file, text = code([(16 * start, length * 4) for start, length, _ in rows if length])
    path = tmp_path_factory.mktemp("lib")
    hit = [16 * start for start, length, is_used in rows if is_used and length]
    plan = planned(path, file.bytes(), entered(*hit, base=text.sh_offset))
    gone = np.zeros(8192, bool)
    for start, size in cut(plan, text.sh_offset):
        gone[start : start + size] = True
        assert start not in hit
    for start, length, is_used in rows:
        if is_used and length:
            assert not gone[16 * start : 16 * start + 4 * length].any()


def test_real_libraries_keep_constructors_and_resolvers(real_libraries: dict[str, Path]) -> None:
    for name, path in real_libraries.items():
        name = name.removeprefix("lib")
        tables = traced.scan(path, name)
        with opened(Input(name, name, str(path))) as reader:
            plan = locate.plan(reader, tables, Usage())
            kept = set(entries.fixed(view(path.read_bytes())).tolist())
        gone = tables["functions"].set_index("offset_bytes").loc[plan.removed["offset_bytes"], "address"]
        assert not kept & set(gone.astype("int64"))
        bounded = tables["functions"]["boundary"].isin(locate.BOUNDED_BY)
        assert len(plan.removed) > 0.9 * bounded.sum(), name


def test_the_run_time_support_of_compilers_stays(libstdcpp: Path) -> None:
    name = f"package.libs/{libstdcpp.name}"
    tables = traced.scan(libstdcpp, name)
    with opened(Input(name, name, str(libstdcpp))) as reader:
        plan = locate.plan(reader, tables, Usage())
    assert not len(plan.removed)
    assert plan.n_unknown == len(tables["functions"])


# --- runs -----------------------------------------------------------------------------------------------------------


def test_the_union_of_runs_is_used(tmp_path: Path) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(library(fatbin.region([one(), one(), one()])))
    first = traced.run(None, {"a.so": path}, functions={"a.so": ["main"]}, elements={"a.so": [(0, 0)]})
    second = traced.run(None, {"a.so": path}, elements={"a.so": [(0, 2)]}, targets=["sm_80"])
    (found,) = union.libraries(union.load([first, second]))
    assert found.usage.elements == {(0, 0), (0, 2)}
    assert found.usage.targets == {"sm_80", "sm_90"}
    assert len(found.usage.functions) == 1


def test_a_library_is_decided_by_the_runs_that_loaded_it(tmp_path: Path) -> None:
    a, b = tmp_path / "a.so", tmp_path / "b.so"
    a.write_bytes(library(fatbin.region([one()])))
    b.write_bytes(library(fatbin.region([one(), one()])))
    runs = [traced.run(None, {"a.so": a}), traced.run(None, {"b.so": b}, gpu=False, problem="not asked for")]
    found = {entry.library: entry.usage for entry in union.libraries(union.load(runs))}
    assert found["a.so"].is_gpu_known
    assert not found["a.so"].cpu_problem
    assert not found["b.so"].is_gpu_known
    assert found["b.so"].cpu_problem == "not asked for"


def test_a_gpu_that_nobody_can_name(tmp_path: Path) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(library(fatbin.region([one()])))
    runs = [traced.run(None, {"a.so": path}), traced.run(None, {"a.so": path}, targets=[], gpu=False, cupti="missing")]
    (found,) = union.libraries(union.load(runs))
    assert not found.usage.is_target_known
    (found,) = union.libraries(union.load([runs[0], traced.run(None, {"a.so": path}, targets=[], cupti="no_cuda")]))
    assert found.usage.is_target_known


def test_first_touches_count_only_if_every_run_watched_for_them(tmp_path: Path) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(library(fatbin.region([one()])))
    for pages in ((1, 1), (1, 0), (0, 1), (0, 0)):
        runs = [traced.run(None, {"a.so": path}, pages=n) for n in pages]
        (found,) = union.libraries(union.load(runs))
        assert found.usage.is_watched == all(pages)


def seen(path: Path, element: int, **about: object) -> Run:
    return traced.run(None, {"a.so": path}, elements={"a.so": [(0, element)]}, **about)  # type: ignore[arg-type]


def elements_in_use(*runs: Run) -> set[int]:
    return {e for entry in union.libraries(union.load(runs)) for _, e in entry.usage.elements}


def test_an_eager_run_says_nothing_beside_a_lazy_one(tmp_path: Path) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(library(fatbin.region([one() for _ in range(4)])))
    eager = seen(path, 0, loading="eager", workload="train")
    assert elements_in_use(eager) == {0}
    assert elements_in_use(eager, seen(path, 1, loading="lazy", workload="train")) == {1}
    assert elements_in_use(seen(path, 1, loading="lazy", workload="train"), eager) == {1}
    assert elements_in_use(eager, seen(path, 1, loading="lazy", workload="serve")) == {0, 1}
    assert elements_in_use(eager, seen(path, 1, loading="eager", workload="train")) == {0, 1}
    assert elements_in_use(eager, seen(path, 1, workload="train")) == {0, 1}, "how it loaded is not known"
    runs = [seen(path, n, loading=how, workload=None) for n, how in enumerate(("eager", "lazy"))]
    assert elements_in_use(*runs) == {0, 1}, "whether they are of one workload is not known"


def test_an_eager_run_keeps_its_word_on_all_but_elements(tmp_path: Path) -> None:
    a, b = tmp_path / "a.so", tmp_path / "b.so"
    for path in (a, b):
        path.write_bytes(library(fatbin.region([one(), one()])))
    both = {"a.so": a, "b.so": b}
    elements = {name: [(0, 0)] for name in both}
    eager = traced.run(None, both, functions={"a.so": ["main"]}, elements=elements, gpu=False, loading="eager")
    lazy = traced.run(None, {"a.so": a}, elements={"a.so": [(0, 1)]}, loading="lazy")
    found = {entry.library: entry.usage for entry in union.libraries(union.load([eager, lazy]))}
    assert found["a.so"].elements == {(0, 1)}
    assert len(found["a.so"].functions) == 1
    assert not found["a.so"].is_gpu_known
    assert found["b.so"].elements == {(0, 0)}, "no lazy run loaded it"


def test_misses_count_as_use(tmp_path: Path) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(library(fatbin.region([one(), one()])))
    run = traced.run(None, {"a.so": path})
    miss = {"library": "a.so", "what": "element", "offset_bytes": 0, "region": 0, "element": 1}
    called = {"library": "a.so", "what": "function", "offset_bytes": 960}
    other = {"library": "gone.so", "what": "function", "offset_bytes": 1}
    (found,) = union.libraries(union.load([run, traced.guard(None, [miss, called, other])]))
    assert found.usage.elements == {(0, 1)}
    assert found.usage.functions.tolist() == [960]


def test_states_of_the_record(tmp_path: Path) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(library(fatbin.region([one()])))
    for state, is_complete in (("recorded", True), ("no_cuda", True), ("yielded", False), ("missing", False)):
        (found,) = union.libraries(union.load([traced.run(None, {"a.so": path}, cupti=state)]))
        assert found.usage.is_gpu_complete == is_complete


def test_what_is_no_traced_run_is_refused(tmp_path: Path, sample_wheel: Path) -> None:
    from gpubloat.libraries import scan

    with pytest.raises(GpubloatError, match="no traced run"):
        union.load([scan(sample_wheel)])
    with pytest.raises(GpubloatError, match="only misses"):
        union.load([traced.guard(None, [{"library": "a", "what": "function", "offset_bytes": 1}])])
    with pytest.raises(GpubloatError, match="no traced run was given"):
        union.load([])
    path = tmp_path / "a.so"
    path.write_bytes(library(b""))
    with pytest.raises(GpubloatError, match="no compute capability"):
        union.load([traced.run(None, {"a.so": path}, targets=["sm_90a"])])
    with pytest.raises(GpubloatError, match="targets"):
        union.load([traced.run(None, {"a.so": path}, targets=[90])])  # type: ignore[list-item]


def test_runs_of_two_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(library(fatbin.region([one()])))
    first = traced.run(None, {"a.so": path})
    path.write_bytes(library(fatbin.region([one(number=80)])))
    with pytest.raises(GpubloatError, match="not the same file in all runs"):
        union.libraries(union.load([first, traced.run(None, {"a.so": path})]))


def test_empty_tables(tmp_path: Path) -> None:
    plan = planned(tmp_path, elf.Elf().bytes(), Usage({"sm_90"}))
    assert isinstance(plan.removed, pd.DataFrame)
    assert len(plan.ranges) == 0
