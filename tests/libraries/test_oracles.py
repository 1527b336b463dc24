"""Small real wheels against other readers: cuobjdump, cubloaty and LIEF. Needs the network once."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import lief
import pandas as pd
import pytest

from campaigns.libraries import fetch
from gpubloat.libraries import scan
from gpubloat.libraries.elf import Elf
from gpubloat.libraries.inputs import Input, opened
from tests import oracles

# cuobjdump 13 calls the cubins that the device linker of CUDA 12.1 wrote invalid; cuobjdump 12.8 lists them as we do.
REFUSED = {"bitsandbytes/libbitsandbytes_cuda121.so"}


class Sample(NamedTuple):
    """A wheel, its files unpacked, and its tables by library."""

    libraries: pd.DataFrame
    files: dict[str, Path]
    tables: dict[str, dict[str, pd.DataFrame]]


@pytest.fixture(scope="module", params=sorted(fetch.PINNED))
def sample(
    request: pytest.FixtureRequest, wheel: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Sample:
    path = wheel(request.param)
    run = scan(path, kernels=True, functions=False, digests=False)
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(path) as archive:
        files = {name: Path(archive.extract(name, folder)) for name in run["libraries"]["library"]}
    groups = {name: dict(list(run[name].groupby("library"))) for name in ("elements", "regions", "kernels", "sections")}
    tables = {
        library: {name: group.get(library, run[name].iloc[:0]) for name, group in groups.items()} for library in files
    }
    return Sample(run["libraries"], files, tables)


@pytest.fixture(scope="module")
def cuobjdump() -> str:
    try:
        return oracles.cuobjdump()
    except oracles.OracleError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("is_all", [False, True], ids=["default", "all"])
def test_cuobjdump_lists_the_same_elements_and_kernels(sample: Sample, cuobjdump: str, is_all: bool) -> None:
    refused = set()
    for library, file in sample.files.items():
        tables = sample.tables[library]
        seen = oracles.visible(tables["elements"], tables["regions"], all=is_all)
        try:
            listed, cubins = oracles.listed_elements(file, is_all, cuobjdump), oracles.cubins(file, is_all, cuobjdump)
        except oracles.OracleError:
            refused.add(library)
            continue
        assert oracles.our_elements(seen) == listed, library
        assert sorted(oracles.our_cubins(seen, tables["kernels"])) == sorted(cubins), library
    assert refused <= REFUSED


def test_cubloaty_finds_the_same_code_everywhere(sample: Sample) -> None:
    pytest.importorskip("cubloaty", reason=oracles.NO_CUBLOATY)
    for library, file in sample.files.items():
        ours = oracles.our_images(sample.tables[library]["elements"], sample.tables[library]["regions"])
        theirs = oracles.cubloaty(file)
        assert ours.elements == theirs.elements, library
        # It ends bare cubins before a last section of a processor's own type.
        assert [raw[:2] for raw in ours.raw] == [raw[:2] for raw in theirs.raw], library
        assert all(mine[2] >= other[2] for mine, other in zip(ours.raw, theirs.raw)), library


@pytest.mark.filterwarnings("ignore:.*is not a valid TYPE")  # AMD's
def test_lief_reads_the_same_section_table(sample: Sample) -> None:
    for library, file in sample.files.items():
        binary = lief.ELF.parse(file)
        if binary is None:  # an archive
            continue
        theirs = [(s.name, s.file_offset, s.size) for s in binary.sections if s.size]
        with opened(Input(library, "", str(file))) as reader:
            assert [(s.name, s.sh_offset, s.sh_size) for s in Elf(reader).sections if s.sh_size] == theirs, library
        rows = sample.tables[library]["sections"]
        found = rows.groupby("section")["size_bytes"].sum()
        stored = [s for s in binary.sections if s.size and s.type != lief.ELF.Section.TYPE.NOBITS]
        for section in stored:
            assert found.get(section.name, 0) == section.size, f"{library} {section.name}"


def test_the_wheels_show_what_they_were_chosen_for(wheel: Callable[[str], Path]) -> None:
    shown = {}
    for name in fetch.PINNED:
        run = scan(wheel(name), functions=False, digests=False)
        elements = run["elements"].merge(run["regions"][["library", "region", "is_raw_cubin"]])
        section = elements["section"].str.rpartition(":")[2]
        shown[name] = set(zip(section, elements["compression"], elements["is_raw_cubin"]))
    assert (".nv_fatbin", "zstd", False) in shown["nvidia-nvjpeg"]
    assert {(".nv_fatbin", "none", False), (".nv_fatbin", "lz4", False)} <= shown["nvidia-cufile"]
    assert ("__nv_relfatbin", "zstd", False) in shown["nvidia-cuda-runtime"]
    assert (".rodata", "none", True) in shown["nvidia-cuda-cupti"]
    assert {("__nv_relfatbin", "lz4", False), (".nv_fatbin", "none", False)} <= shown["bitsandbytes"]


def test_a_wheel_with_another_digest_is_refused(tmp_path: Path, sample_wheel: Path) -> None:
    (tmp_path / sample_wheel.name).write_bytes(b"damaged")
    assert fetch.pinned(fetch.SAMPLE, sample_wheel.parent) == sample_wheel
    version, sha256 = fetch.PINNED[fetch.SAMPLE]
    try:
        found = fetch.fetch(fetch.SAMPLE, version, sha256, tmp_path)
    except fetch.FetchError as error:
        pytest.skip(str(error))
    assert fetch.digest(found) == sha256
