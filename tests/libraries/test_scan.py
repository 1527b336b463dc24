"""Files to tables: the whole collector, its options, its executors, and what run.json says."""

from __future__ import annotations

import hashlib
import json
import pickle
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest

from gpubloat import Run
from gpubloat.errors import FormatError, GpubloatError
from gpubloat.libraries import scan
from gpubloat.libraries.inputs import discover
from gpubloat.libraries.onefile import Options, scan_file
from gpubloat.tables.libraries import KINDS, TABLES
from tests import oracles
from tests.build import containers, elf
from tests.build.fatbin import Code, code, element, packed, region
from tests.libraries.common import library, scanned, tables


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, targets: tuple[Code, ...]) -> Path:
    """Eight files of every format, one of them damaged."""
    root = tmp_path_factory.mktemp("env")
    unit = elf.Elf(elf.ET_REL)
    unit.symbols([elf.Symbol("unit", unit.text(), 0, 8)])
    unit.rodata(".nv_fatbin", packed(targets[:2], ("-compress-mode=size",)))
    whole = library(packed(targets, ("-compress-mode=size",)) + packed(targets[-2:], ("-compress-mode=speed",)))
    (root / "lib").mkdir()
    (root / "lib" / "libkernels.so").write_bytes(whole)
    (root / "lib" / "libconcat.so").write_bytes(library(packed(targets, ("-concat",))))
    (root / "lib" / "libunits.a").write_bytes(containers.archive([("unit.o", unit.bytes())]))
    (root / "plain.so").write_bytes(elf.Elf().bytes())
    (root / "broken.so").write_bytes(whole[:-100])
    (root / "kernels.fatbin").write_bytes(packed(targets))
    (root / "one.cubin").write_bytes(targets[0].data)
    (root / "readme.txt").write_text("no code")
    containers.wheel(root / "pkg.whl", {"pkg/libw.so": (whole, containers.DEFLATED)})
    return root


def equal(one: Run, two: Run) -> None:
    assert set(one) == set(two) == set(TABLES)
    for name in one:
        pd.testing.assert_frame_equal(one[name], two[name])


def test_a_folder(folder: Path) -> None:
    run = scan(folder, kernels=True, target="sm_90")
    files = run["libraries"].set_index("library")["format"].to_dict()
    assert files == {
        "broken.so": "unreadable",
        "kernels.fatbin": "fatbin",
        "lib/libconcat.so": "elf",
        "lib/libkernels.so": "elf",
        "lib/libunits.a": "archive",
        "one.cubin": "cubin",
        "pkg.whl/pkg/libw.so": "elf",
        "plain.so": "elf",
    }
    assert run.provenance["n_files_without_code"] == 1
    sizes = run["sections"].groupby("library")["size_bytes"].sum()
    pd.testing.assert_series_equal(
        sizes, run["libraries"].set_index("library").sort_index()["file_bytes"], check_names=False
    )
    assert run["problems"][["library", "problem"]].values.tolist() == [["broken.so", "unreadable"]]
    broken = run["sections"][run["sections"]["library"] == "broken.so"]
    assert broken[["section", "label"]].values.tolist() == [["(unreadable)", "unattributed"]]
    for name in ("functions", "regions", "elements", "kernels", "sections", "problems"):
        assert set(run[name]["library"]) <= set(files)
    same = run["elements"].set_index("library")["digest"]
    assert same["lib/libkernels.so"].tolist() == same["pkg.whl/pkg/libw.so"].tolist()


@pytest.mark.parametrize("kind", ["processes", "threads", "dask"])
def test_an_executor_gives_the_same_tables(kind: str, folder: Path) -> None:
    serial = scan(folder, kernels=True, target="sm_90")
    if kind == "dask":
        distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed")
        with (
            distributed.LocalCluster(
                n_workers=1, threads_per_worker=2, dashboard_address=None, host="127.0.0.1"
            ) as cluster,
            distributed.Client(cluster) as client,
        ):
            equal(serial, scan(folder, kernels=True, target="sm_90", executor=client.get_executor()))
        return
    executor: Executor = ProcessPoolExecutor(2) if kind == "processes" else ThreadPoolExecutor(2)
    with executor:
        equal(serial, scan(folder, kernels=True, target="sm_90", executor=executor))


def test_an_error_comes_back_from_a_worker(folder: Path) -> None:
    with ProcessPoolExecutor(1) as executor, pytest.raises(FormatError, match="section header table") as caught:
        scan([folder / "plain.so", folder / "broken.so"], executor=executor)
    assert caught.value.path == "broken.so"
    assert pickle.loads(pickle.dumps(caught.value)).offset == caught.value.offset


def test_tables_pass_their_schemas(folder: Path) -> None:
    for entry in discover([folder]).files:
        for options in (Options("sm_86", kernels=True), Options(functions=False, digests=False)):
            for name, frame in scan_file(entry, options).items():
                TABLES[name].check(frame, name)


def test_every_element_agrees_with_cuobjdump(folder: Path) -> None:
    for name in ("lib/libkernels.so", "kernels.fatbin", "lib/libunits.a"):
        run = scanned(folder / name, kernels=True)
        seen = oracles.visible(run["elements"], run["regions"])
        assert oracles.our_elements(seen) == oracles.listed_elements(folder / name)
        assert oracles.our_cubins(seen, run["kernels"]) == oracles.cubins(folder / name)
        assert run["libraries"]["n_kernels"].tolist() == [len(run["kernels"])]


def test_without_kernels_functions_or_digests(folder: Path) -> None:
    path = folder / "lib" / "libkernels.so"
    run = scan(path, functions=False, digests=False)
    assert len(run["functions"]) == len(run["kernels"]) == len(run["variables"]) == 0
    assert run["libraries"][["n_functions", "function_bytes"]].values.tolist() == [[0, 0]]
    assert run["libraries"]["n_kernels"].isna().all()
    assert run["elements"]["n_kernels"].isna().all()
    assert set(run["elements"]["digest"]) | set(run["libraries"]["sha256"]) == {""}
    assert run["elements"]["is_loadable"].isna().all()
    assert set(run.provenance["empty"]) == {"kernels", "variables", "functions"}


def test_digests_are_those_of_hashlib(folder: Path) -> None:
    path = folder / "lib" / "libkernels.so"
    data = path.read_bytes()
    run = scan(path)
    assert run["libraries"]["sha256"].tolist() == [hashlib.sha256(data).hexdigest()]
    for row in run["elements"].itertuples():
        stored = data[row.offset_bytes + row.header_bytes :][: row.payload_bytes]
        digests = {hashlib.sha256(stored[: len(stored) - cut]).hexdigest()[:16] for cut in range(8)}  # without padding
        assert row.digest in digests


def test_provenance_names_no_machine(folder: Path) -> None:
    run = scan(folder)
    text = json.dumps(run.provenance)
    assert str(folder.parent) not in text
    assert str(Path.home()) not in text
    wheel = next(i for i in run.provenance["inputs"] if i["name"] == "pkg.whl")
    assert wheel["sha256"] == hashlib.sha256((folder / "pkg.whl").read_bytes()).hexdigest()
    assert {"gpubloat", "created", "command", "method", "target", "packages"} <= set(run.provenance)


def test_a_run_is_kept_and_read_again(folder: Path, tmp_path: Path) -> None:
    run = scan(folder / "lib", out=tmp_path / "run")
    equal(run, Run.load(tmp_path / "run"))
    with pytest.raises(GpubloatError, match="is not empty"):
        scan(folder / "lib", out=tmp_path / "run")
    scan(folder / "plain.so", out=tmp_path / "run", force=True)
    assert len(Run.load(tmp_path / "run")["regions"]) == 0


def test_a_folder_without_code_gives_empty_tables_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    run = scan(tmp_path)
    assert all(len(run[name]) == 0 for name in run)
    assert "none of the 1 files" in run.provenance["empty"]["libraries"]


@pytest.mark.parametrize("target", ["sm_90a", "H900", "", "sm_", "9.0.0", "compute_90"])
def test_a_target_that_is_no_gpu(target: str, folder: Path) -> None:
    with pytest.raises(GpubloatError, match="is no compute capability"):
        scan(folder / "plain.so", target=target)


@pytest.mark.parametrize("data", [b"", b"text", b"\x7fELF", b"MZ" + bytes(100), bytes(4096)])
def test_a_named_file_without_code_is_an_error(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(FormatError) as caught:
        scan(tmp_path / "file")
    assert 0 <= caught.value.offset <= len(data)


def test_fatbins_in_other_files_count_as_raw(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"HEADER  " * 4 + region([element(elf.cubin())]) + b"tail")
    found = tables(path)
    assert found["libraries"]["format"].tolist() == ["raw"]
    assert found["elements"]["section"].tolist() == ["(no section)"]


def test_kinds_that_nobody_knows_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(region([element(elf.cubin()), element(b"new", kind=0x400), element(b"old", kind=4)])))
    found = tables(path, kernels=True, target="sm_90")
    assert found["elements"]["kind"].tolist() == ["cubin", "unknown", "unknown"]
    assert found["elements"]["kind_code"].tolist() == [2, 0x400, 4]
    assert found["elements"]["is_loadable"].tolist() == [True, True, True]
    assert found["problems"]["problem"].tolist() == ["unknown_kind"] * 2
    assert "0x400" in found["problems"]["detail"][0]


def test_a_damaged_payload_does_not_hide_the_others(tmp_path: Path) -> None:
    good, bad = element(elf.cubin(), how="zstd"), bytearray(element(elf.cubin(), how="zstd"))
    bad[70:100] = b"?" * 30
    path = tmp_path / "lib.so"
    path.write_bytes(library(region([good, bytes(bad), good])))
    found = tables(path, kernels=True)
    assert found["elements"]["n_kernels"].tolist() == [1, 0, 1]
    (problem,) = found["problems"].to_dict("records")
    assert problem["problem"] == "undecodable_payload"
    assert problem["offset_bytes"] == found["elements"]["offset_bytes"][1]


def test_concatenated_elements_count_once(tmp_path: Path, targets: tuple[Code, ...]) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(packed(targets, ("-concat",))))
    found = tables(path, kernels=True, target="sm_90")
    elements = found["elements"]
    outer, inner = elements[elements["member"].isna()], elements[elements["member"].notna()]
    assert set(outer["kind"]) == {"concat"}
    assert len(inner) == len(targets)
    assert found["libraries"]["n_elements"].tolist() == [len(outer)]
    assert outer["uncompressed_bytes"].sum() == 0
    assert set(inner.loc[inner["is_loadable"].astype(bool), "target"]) == {"sm_90", "sm_90a"}
    assert found["kernels"]["member"].notna().all()


def test_flags_and_numbers_of_full_width(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(region([element(elf.cubin(), flags=(1 << 64) - 1, number=(1 << 32) - 1)])))
    run = scanned(path, target="sm_90")
    assert run["elements"]["flags"].tolist() == [(1 << 64) - 1]
    assert run["elements"]["target"].tolist() == ["sm_4294967295a"]
    assert run["elements"]["fit"].tolist() == ["other_architecture"]


def test_every_kind_in_one_region(tmp_path: Path) -> None:
    host = elf.Elf(elf.ET_REL)
    held = host.rodata("__nv_relfatbin", packed((code("compute_80", "unit"),)))
    host.rodata("__nv_module_id", b"unit\0")
    host.wrappers([held.sh_addr])
    codes = (
        code("sm_90", "a"), code("compute_90", "b"), code("compute_90", "c", kind="lto_ir"),
        Code("tile_ir", "", b"\x7fTileIR\0" + bytes(64), "d"), Code("reloc", "", host.bytes()),
    )  # fmt: skip
    data = packed(codes) + packed(codes[:2], ("-concat",)) + region([element(b"?", kind=0x800)])
    path = tmp_path / "all.fatbin"
    path.write_bytes(data)
    run = scanned(path, kernels=True, target="sm_90")
    assert set(run["elements"]["kind"]) == set(KINDS)
    outer = run["elements"][run["elements"]["kind"] == "concat"]
    assert outer["fit"].tolist() == ["ptx_not_needed", "member"]
    fits = run["elements"].drop_duplicates("kind").set_index("kind")["fit"].to_dict()
    assert fits["lto_ir"] == fits["relocatable_ptx"] == fits["tile_ir"] == "linked"
    assert fits["unknown"] == "unknown"
    assert (fits["cubin"], fits["ptx"]) == ("same_target", "ptx_not_needed")
