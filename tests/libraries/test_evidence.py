"""From the logs of processes to the elements that a run used: each kind of evidence, and logs that lie."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpubloat.errors import FormatError
from gpubloat.libraries import cuptilog, evidence, loadable
from gpubloat.libraries.cuptilog import Log, Lookup
from gpubloat.libraries.elf import Elf
from gpubloat.libraries.reader import Reader
from gpubloat.run import Run
from tests.build import elf, fatbin
from tests.build.fatbin import element, region
from tests.libraries.common import library, tables

DATA = Path(__file__).parents[2] / "data" / "measured"
START = ["start\t1", "cupti\trecorded\t", "gpu\t0\tsm_90\tA GPU"]
OLD = elf.cubin([("alpha", 64)], number=80)
ALPHA = elf.cubin([("alpha", 64), ("beta", 128)], variables=[("table", 64)])
ALPHA_A = elf.cubin([("alpha", 96), ("beta", 128)], arch=True)
GAMMA = elf.cubin([("gamma", 64)])
TEXT = b".version 8.0\n.target sm_80\n.visible .entry delta()\n{ ret; }\n"
# Regions: 0 for two majors, 1 with an "a" beside it, 2 PTX alone, 3 with no code for sm_90.
REGIONS = (
    region([element(OLD, number=80, how="zstd"), element(ALPHA, how="zstd")]),
    region([element(GAMMA), element(ALPHA_A, flags=fatbin.LINUX64 | fatbin.ARCH, how="lz4")]),
    region([element(TEXT, kind=fatbin.PTX, number=80)]),
    region([element(OLD, number=80)]),
)


@dataclass
class Scanned:
    """Libraries on disk, their scan tables, and the address of each region."""

    folder: Path
    paths: dict[str, str] = field(default_factory=dict)
    regions: pd.DataFrame = field(default_factory=pd.DataFrame)
    elements: pd.DataFrame = field(default_factory=pd.DataFrame)
    addresses: dict[str, list[int]] = field(default_factory=dict)

    def add(self, name: str, data: bytes) -> None:
        path = self.folder / name
        path.write_bytes(data)
        found = tables(path)
        self.paths[name] = str(path)
        self.regions = pd.concat([self.regions, found["regions"]], ignore_index=True)
        self.elements = pd.concat([self.elements, found["elements"]], ignore_index=True)
        sections = Elf(Reader(name, data)).sections
        self.addresses[name] = [
            next(s.sh_addr + at - s.sh_offset for s in sections if s.sh_offset <= at < s.sh_offset + s.sh_size)
            for at in found["regions"]["offset_bytes"].tolist()
        ]

    def load(
        self, handle: int, number: int, *, name: str = "lib.so", api: str = "cuLibraryLoadData", at: int = 0
    ) -> str:
        address = self.addresses[name][number] + at
        return f"load\t{handle:x}\t{api}\t{self.paths[name]}\t{address:x}\tfatbin\t00000000\t0"

    def tables(self, *logs: Sequence[str]) -> dict[str, pd.DataFrame]:
        found, problems = self.tables_and_problems(*logs)
        assert problems == []
        return found

    def tables_and_problems(self, *logs: Sequence[str]) -> tuple[dict[str, pd.DataFrame], list[tuple[str, str]]]:
        return evidence.tables([log(self.folder, *lines) for lines in logs], self.paths, self.regions, self.elements)


@pytest.fixture
def scan(tmp_path: Path) -> Scanned:
    scanned = Scanned(tmp_path)
    scanned.add("lib.so", library(b"".join(REGIONS)))
    return scanned


def log(folder: Path, *lines: str, tail: bytes = b"") -> Log:
    path = folder / "7.cupti"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode() + tail)
    return cuptilog.read(path, 7)


def module(data: bytes, n: int = 1) -> str:
    return f"module\t{zlib.crc32(data):08x}\t{len(data)}\t{n}"


def rows(frame: pd.DataFrame) -> list[tuple[object, ...]]:
    """As tuples, with None for what is empty."""
    return [tuple(None if v is pd.NA else v for v in row) for row in frame.itertuples(index=False, name=None)]


def sources(found: dict[str, pd.DataFrame]) -> list[tuple[object, ...]]:
    return [row[1:] for row in rows(found["evidence"])]


# ---- logs ----


def test_a_log_is_read_event_by_event(tmp_path: Path) -> None:
    found = log(
        tmp_path,
        *START,
        "load\t10\tcuLibraryLoadData\t/a\\x09b.so\tff\tfatbin\t00000000\t0",
        "alias\t20\t10",
        "kernel\t20\ta\\\\b",
        "variable\t10\tv",
        "all\t10",
        "module\t0000000a\t100\t2",
        "made\t10\t0000000a\t100",
        "callbacks\t12",
    )
    assert [(i.path, i.vaddr, i.kind) for i in found.loads] == [("/a\tb.so", 255, "fatbin")]
    assert found.lookups == [Lookup("kernel", "a\\b", 0), Lookup("variable", "v", 0), Lookup("all", "", 0)]
    assert dict(found.modules) == {(10, 100): 2}
    assert found.made == [(0, 10, 100)]
    assert (found.gpus, found.n_callbacks, found.problem) == ([("sm_90", "A GPU")], 12, "")


def test_a_killed_process_leaves_half_a_line(tmp_path: Path) -> None:
    found = log(tmp_path, *START, "kernel\t10\twhole", tail=b"kernel\t10\tha")
    assert [lookup.name for lookup in found.lookups] == ["whole"]
    assert found.problem == "1 lines of the log are no events"


@pytest.mark.parametrize(
    "line",
    [
        "", "kernel", "kernel\t10", "kernel\t0x10\tk", "kernel\t10\t", "kernel\t-1\tk", "kernel\t10\tk\tmore",
        "load\t10\tapi\tpath\t0\tother\t00000000\t0", "load\t10\tapi\tpath\t0\tfatbin\t0\t0",
        "module\t0000000g\t1\t1", "module\t00000000\t1\t0", "module\t00000000\t1\t99999999999999", "cupti\tfine\t",
        "gpu\t0\tsm_9\tx", "gpu\t0\tcompute_90\tx", "unheard of", "made\t10\t00000000\t-1", "callbacks\t\u0663",
    ],
)  # fmt: skip
def test_a_line_that_is_no_event_is_counted(line: str, tmp_path: Path) -> None:
    found = log(tmp_path, *START, line, "kernel\t10\tlater")
    assert found.n_skipped == 1
    assert [lookup.name for lookup in found.lookups] == ["later"]


def test_a_line_without_end_is_one_problem(tmp_path: Path) -> None:
    found = log(tmp_path, *START, "x" * (3 * cuptilog.MAX_LINE), "kernel\t10\tlater", tail=b"y" * 3 * cuptilog.MAX_LINE)
    assert found.n_skipped == 2
    assert [lookup.name for lookup in found.lookups] == ["later"]


@pytest.mark.parametrize(
    ("lines", "state", "problem"),
    [
        (["cupti\trecorded\t", "cupti\tyielded\tlib"], "yielded", "lib"),
        (["cupti\trefused\twhy", "cupti\trecorded\t"], "refused", "why"),
        (["kernel\t1\tk"], "recorded", "the log does not say how the recording went"),
        ([], "missing", "the log does not say how the recording went"),
        (["cupti\trecorded\t", "full"], "recorded", "more distinct events than are recorded"),
    ],
)
def test_the_state_of_a_process(lines: list[str], state: str, problem: str, tmp_path: Path) -> None:
    assert evidence.states([log(tmp_path, *lines)]) == {7: (state, problem)}


def test_all_logs_of_a_folder(tmp_path: Path) -> None:
    for name in ("10.cupti", "9.cupti", "x.cupti", "9.use", "9.cupti.bak"):
        (tmp_path / name).write_text("\n".join(START) + "\n")
    logs = cuptilog.read_all(tmp_path)
    assert [found.pid for found in logs] == [9, 10]
    assert evidence.gpus(logs) == ["sm_90"]
    with pytest.raises(FormatError, match="cannot be read"):
        cuptilog.read_all(tmp_path / "absent")
    (tmp_path / "11.cupti").mkdir()
    with pytest.raises(FormatError, match="cannot be read"):
        cuptilog.read_all(tmp_path)


WORDS = st.sampled_from(
    ["start", "cupti", "recorded", "gpu", "sm_90", "load", "alias", "kernel", "variable", "all", "module", "made",
     "callbacks", "full", "10", "20", "0", "ffffffffffffffff", "00000000", "-", "/lib.so", "fatbin", "cubin", "ptx",
     "mapped", "alpha", "cuModuleLoadData", "1", "999999999999999999", "\\x00", "\\x0", "\\"]
)  # fmt: skip
LINES = st.lists(st.lists(WORDS, min_size=1, max_size=9).map("\t".join), max_size=30).map("\n".join)
QUIET = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)


@QUIET
@given(data=st.one_of(st.binary(max_size=2000), LINES.map(str.encode)))
def test_no_log_raises(data: bytes, scan: Scanned) -> None:
    (scan.folder / "1.cupti").write_bytes(data)
    found, _ = evidence.tables(
        [cuptilog.read(scan.folder / "1.cupti", 1)], scan.paths | {"gone.so": "/lib.so"}, scan.regions, scan.elements
    )
    assert set(found) == {"evidence", "used_kernels", "modules"}


# ---- content ----


@pytest.mark.parametrize("how", ["", "zstd", "lz4"])
@pytest.mark.parametrize("padding", [0, 3])
def test_the_content_of_a_module_names_its_element(how: str, padding: int, tmp_path: Path) -> None:
    scan = Scanned(tmp_path)
    data = ALPHA + b"\1" * (8 - padding)  # not a multiple of 8: stored raw, it is padded
    scan.add("lib.so", library(region([element(OLD, number=80), element(data, how=how)])))
    found = scan.tables([*START, module(data, 3)], [*START, module(data)])
    assert sources(found) == [(0, 1, "content", 4)]
    assert rows(found["modules"]) == [(zlib.crc32(data), len(data), 4, "element", "lib.so", 0, 1)]


def test_content_of_a_size_that_was_rounded_up(tmp_path: Path) -> None:
    scan = Scanned(tmp_path)
    scan.add("lib.so", library(region([element(ALPHA + b"\1\1\1", how="zstd")])))
    assert sources(scan.tables([*START, module(ALPHA + b"\1\1\1" + bytes(5))])) == [(0, 0, "content", 1)]


def test_the_content_of_a_member_of_a_concatenated_element(tmp_path: Path) -> None:
    scan = Scanned(tmp_path)
    members = [(fatbin.CUBIN, 80, fatbin.LINUX64, OLD), (fatbin.CUBIN, 90, fatbin.LINUX64, ALPHA)]
    scan.add("lib.so", library(region([fatbin.concat(members)])))
    lines = [*START, module(ALPHA), scan.load(16, 0), "kernel\t10\tbeta"]
    found = scan.tables(lines)
    assert sources(found) == [(0, 0, "content", 1), (0, 0, "pointer", 1), (0, 0, "kernel", 1)]


def test_a_bare_cubin_that_the_library_unpacks_itself(tmp_path: Path) -> None:
    scan = Scanned(tmp_path)
    packed = fatbin.compress(GAMMA * 1, "zstd")
    scan.add("lib.so", library(packed, section=".ldata", wrapped=False))
    assert scan.regions["is_raw_cubin"].tolist() == [True]
    crc = f"{zlib.crc32(GAMMA):08x}\t{len(GAMMA)}"
    found = scan.tables([*START, f"load\t10\tcuModuleLoadData\t-\t0\tcubin\t{crc}", "kernel\t10\tgamma", module(GAMMA)])
    assert sources(found) == [(0, 0, "content", 2), (0, 0, "kernel", 1)]
    assert rows(found["used_kernels"]) == [("lib.so", 0, 0, "gamma", "handle", 1)]


def equal(folder: Path) -> Scanned:
    """Three regions with the same code in each."""
    scan = Scanned(folder)
    scan.add("lib.so", library(b"".join(region([element(GAMMA, how=how)]) for how in ("", "zstd", "lz4"))))
    return scan


def test_of_equal_elements_those_that_were_used(tmp_path: Path) -> None:
    scan = equal(tmp_path)
    found = scan.tables([*START, module(GAMMA), scan.load(16, 1), "kernel\t10\tgamma"])
    assert sources(found) == [(1, 0, "content", 1), (1, 0, "pointer", 1), (1, 0, "kernel", 1)]
    assert found["modules"]["region"].tolist() == [1]


@pytest.mark.parametrize("n", [1, 2])
def test_equal_elements_all_count_where_loads_are_not_accounted_for(n: int, tmp_path: Path) -> None:
    scan = equal(tmp_path)
    used = [scan.load(16, 1), "kernel\t10\tgamma"] if n == 2 else []
    found = scan.tables([*START, module(GAMMA, n), *used])["evidence"]
    assert found.loc[found["source"] == "content", "region"].tolist() == [0, 1, 2]
    # On two GPUs the same code is loaded twice.
    found = scan.tables([*START, "gpu\t1\tsm_90\tA GPU", module(GAMMA, n), *used])["evidence"]
    assert found.loc[found["source"] == "content", "region"].tolist() == ([1] if used else [0, 1, 2])


def test_a_name_alone_and_the_content_that_has_it(tmp_path: Path) -> None:
    scan = equal(tmp_path)
    scan.add("other.so", library(region([element(GAMMA + bytes(8))])))
    found = scan.tables([*START, module(GAMMA + bytes(8)), "kernel\t99\tgamma"])
    assert rows(found["used_kernels"]) == [("other.so", 0, 0, "gamma", "name", 1)]


def test_a_module_that_is_no_element(scan: Scanned) -> None:
    found = scan.tables([*START, module(b"what is this")])
    assert found["modules"]["attribution"].tolist() == ["unknown"]
    assert len(found["evidence"]) == 0


# ---- pointers and names ----


def test_registered_is_not_used(scan: Scanned) -> None:
    found = scan.tables([*START, *(scan.load(16 + n, n) for n in range(4))])
    assert all(len(frame) == 0 for frame in found.values())


def test_a_lookup_uses_what_the_driver_takes(scan: Scanned) -> None:
    found = scan.tables(
        [*START, scan.load(16, 0), scan.load(32, 1), "kernel\t10\tbeta", "kernel\t20\talpha", "variable\t10\ttable"]
    )
    assert sources(found) == [
        (0, 1, "pointer", 1), (0, 1, "kernel", 1), (0, 1, "variable", 1), (1, 1, "pointer", 1), (1, 1, "kernel", 1),
    ]  # fmt: skip
    assert rows(found["used_kernels"]) == [
        ("lib.so", 0, 1, "beta", "handle", 1),
        ("lib.so", 1, 1, "alpha", "handle", 1),
    ]


def test_a_name_that_only_another_loadable_element_has(scan: Scanned) -> None:
    found = scan.tables([*START, scan.load(16, 1), "kernel\t10\tgamma"])
    assert sources(found) == [(1, 0, "kernel", 1), (1, 1, "pointer", 1)]


def test_a_name_that_no_element_has(scan: Scanned) -> None:
    found = scan.tables([*START, scan.load(16, 0), "kernel\t10\tmissing"])
    assert sources(found) == [(0, 1, "pointer", 1)]
    assert rows(found["used_kernels"]) == [("lib.so", 0, None, "missing", "handle", 0)]


def test_a_module_load_reads_its_image(scan: Scanned) -> None:
    assert sources(scan.tables([*START, scan.load(16, 0, api="cuModuleLoadData")])) == [(0, 1, "pointer", 1)]


def test_loads_and_processes_are_counted(scan: Scanned) -> None:
    lines = [*START, scan.load(16, 0), "kernel\t10\talpha", scan.load(32, 0), "all\t20"]
    assert sources(scan.tables(lines, lines)) == [(0, 1, "pointer", 4), (0, 1, "kernel", 1)]


def test_a_module_of_a_library_is_the_same_image(scan: Scanned) -> None:
    assert sources(scan.tables([*START, scan.load(16, 0), "alias\t20\t10", "kernel\t20\talpha"])) == [
        (0, 1, "pointer", 1),
        (0, 1, "kernel", 1),
    ]


def test_an_element_given_without_its_region(scan: Scanned) -> None:
    row = scan.elements[(scan.elements["region"] == 1) & (scan.elements["element"] == 0)].iloc[0]
    at = int(row["offset_bytes"] + row["header_bytes"] - scan.regions["offset_bytes"][1])
    found = scan.tables([*START, scan.load(16, 1, at=at), "kernel\t10\tgamma"])
    assert sources(found) == [(1, 0, "pointer", 1), (1, 0, "kernel", 1)]


def test_code_compiled_by_the_driver(scan: Scanned) -> None:
    made = f"{zlib.crc32(b'made'):08x}\t4"
    found = scan.tables([*START, scan.load(16, 2), f"module\t{made}\t1", "kernel\t10\tdelta", f"made\t10\t{made}"])
    assert sources(found) == [(2, 0, "pointer", 1), (2, 0, "kernel", 1)]
    assert found["modules"]["attribution"].tolist() == ["jit"]


def test_code_made_at_run_time(scan: Scanned) -> None:
    crc = f"{zlib.crc32(b'triton'):08x}\t6"
    found = scan.tables(
        [
            *START,
            f"load\t10\tcuModuleLoadData\t-\t0\tcubin\t{crc}",
            f"module\t{crc}\t1",
            "kernel\t10\talpha",
            "load\t20\tcuModuleLoadDataEx\t-\t0\tptx\t00000000\t0",
            "kernel\t20\tfused",
            module(b"what the driver made of the text"),
        ]
    )
    assert rows(found["used_kernels"]) == [("", None, None, "alpha", "jit", 0), ("", None, None, "fused", "jit", 0)]
    assert found["modules"]["attribution"].tolist() == ["jit", "jit"]
    assert len(found["evidence"]) == 0


def test_names_alone_are_looked_for_in_libraries_with_a_load(scan: Scanned) -> None:
    scan.add("other.so", library(region([element(ALPHA)])))
    lines = [*START, "kernel\t99\talpha", "kernel\t99\tnowhere"]
    everywhere = scan.tables(lines)
    assert rows(everywhere["used_kernels"]) == [
        ("", None, None, "nowhere", "unknown", 0),
        ("lib.so", None, None, "alpha", "name", 3),
        ("other.so", 0, 0, "alpha", "name", 3),
    ]
    found = scan.tables([*lines, scan.load(16, 0, name="other.so")])
    assert rows(found["evidence"]) == [("other.so", 0, 0, "kernel", 1)]


def test_images_of_files_and_of_unknown_libraries(scan: Scanned) -> None:
    found = scan.tables(
        [
            *START,
            "load\t10\tcuModuleLoad\t/some/kernels.cubin\t0\tfile\t00000000\t0",
            "load\t20\tcuLibraryLoadData\t/not/traced.so\t0\tfatbin\t00000000\t0",
            f"load\t30\tcuModuleLoadData\t{scan.paths['lib.so']}\t10\tptx\t00000000\t0",
            f"load\t40\tcuModuleLoadData\t{scan.paths['lib.so']}\tffffffffffffffff\tptx\t00000000\t0",
            *(f"kernel\t{handle}\tk{handle}" for handle in (10, 20, 30, 40)),
        ]
    )
    assert [row[0::4][:2] + row[3:4] for row in rows(found["used_kernels"])] == [
        ("", "unknown", "k10"), ("", "unknown", "k20"), ("lib.so", "handle", "k30"), ("lib.so", "handle", "k40"),
    ]  # fmt: skip


def test_a_path_through_a_link(scan: Scanned) -> None:
    (scan.folder / "link.so").symlink_to(scan.folder / "lib.so")
    line = scan.load(16, 0)
    scan.paths["lib.so"] = str(scan.folder / "link.so")
    assert len(sources(scan.tables([*START, line, "kernel\t10\talpha"]))) == 2


def test_gpus_of_two_kinds(scan: Scanned) -> None:
    found = scan.tables([*START, "gpu\t1\tsm_80\tAnother", scan.load(16, 0), "kernel\t10\talpha"])
    assert [row[:3] for row in sources(found)] == [
        (0, 0, "pointer"),
        (0, 0, "kernel"),
        (0, 1, "pointer"),
        (0, 1, "kernel"),
    ]


def test_a_library_that_has_changed(scan: Scanned) -> None:
    Path(scan.paths["lib.so"]).write_bytes(b"something else")
    found, problems = scan.tables_and_problems(
        [*START, scan.load(16, 0), "kernel\t10\talpha", "kernel\t99\tx", module(ALPHA)]
    )
    assert len(found["evidence"]) == 0
    assert problems == [("lib.so", "ELF header of 64 bytes does not fit into the file of 14 bytes")]


def test_a_target_that_was_said(scan: Scanned) -> None:
    lines = ["cupti\trecorded\t", scan.load(16, 0), "kernel\t10\talpha"]
    found, _ = evidence.tables([log(scan.folder, *lines)], scan.paths, scan.regions, scan.elements, ["sm_80"])
    assert [row[:2] for row in sources(found)] == [(0, 0), (0, 0)]


def test_a_run_without_cuda(scan: Scanned) -> None:
    assert all(len(frame) == 0 for frame in scan.tables().values())
    empty = evidence.tables([log(scan.folder, *START)], {}, scan.regions[:0], scan.elements[:0])
    assert all(len(frame) == 0 for frame in empty[0].values())


def test_the_choice_is_the_drivers() -> None:
    """On the regions that a real driver was asked about, exactly its choice."""
    choices = Run.load(DATA / "driver-rule-h200")["choices"]
    choices = choices[~choices["is_jit_forced"]].reset_index(drop=True)
    elements = choices[["region", "element", "kind", "target"]].assign(
        library="l", member=pd.array([pd.NA] * len(choices), "Int64"), fit=None, is_loadable=pd.NA
    )
    found = loadable.loadable({"l": "/l"}, pd.DataFrame(), elements, ["sm_90"])
    chosen = {key[1:] for keys in found.chosen.values() for key in keys}
    taken = choices.loc[choices["is_chosen"].astype(bool), ["region", "element"]]
    assert chosen == set(taken.itertuples(index=False, name=None))


# ---- pages ----


def layout(*places: tuple[int, int]) -> pd.DataFrame:
    """Elements with headers of 64 bytes and payloads at [start, stop)."""
    return pd.DataFrame(
        {
            "library": "l",
            "region": 0,
            "element": range(len(places)),
            "member": pd.array([pd.NA] * len(places), "Int64"),
            "offset_bytes": [start - 64 for start, _ in places],
            "header_bytes": 64,
            "payload_bytes": [stop - start for start, stop in places],
            "is_loadable": pd.array([True] * len(places), "boolean"),
        }
    )


# A: pages 0 to 3, of its own 1 and 2. B: inside page 3. C: pages 3 and 4, none of its own. D: pages 4 to 6, 5 its own.
PLACES = layout((100, 13000), (13100, 14000), (14100, 18000), (18100, 26000))


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ([], []),
        ([0], []),  # the header of A
        ([1], [(0, "page", 1)]),
        ([2, 1, 1], [(0, "page", 2)]),
        ([0, 3], [(1, "page_shared", 1)]),  # the headers of A, B and C; B cannot be told from its header
        ([0, 3, 4], [(1, "page_shared", 1), (2, "page_shared", 2)]),  # no page of D's own
        ([3, 4, 5, 6], [(1, "page_shared", 1), (2, "page_shared", 2), (3, "page", 1)]),
        ([100], []),
    ],
)
def test_touched_pages(pages: list[int], expected: list[tuple[object, ...]]) -> None:
    found = evidence.from_pages({"l": np.array(pages, np.int64) * 4096}, PLACES)
    assert [row[2:] for row in rows(found)] == expected


def test_pages_that_nobody_watched() -> None:
    watched = {"l": np.arange(4, 7) * 4096}
    found = evidence.from_pages({"l": [4 * 4096]}, PLACES, watched)
    assert [row[2:] for row in rows(found)] == [(2, "page_shared", 1)]


def test_a_shared_page_says_nothing_of_other_architectures() -> None:
    elements = PLACES.assign(is_loadable=pd.array([False, False, pd.NA, False], "boolean"))
    found = evidence.from_pages({"l": np.arange(7) * 4096}, elements)
    assert [row[2:4] for row in rows(found)] == [(0, "page"), (2, "page_shared"), (3, "page")]
