"""Record folders that no audit library wrote: nothing in them may stop the reader, or cost it memory."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpubloat.libraries import record
from gpubloat.libraries.record import PAGE, Record

TAG = "123-0a1b2c3d"
LIB = "1-2-3-4.lib"
PATH = "/usr/lib/libé\u2028 \x0b.so"  # a name with characters that end lines elsewhere
SITES = (0x1000, 0x1010, 0x2000)
RUNS = ((0x10000, 3, 0), (0x20000, 2, 3))
MB = 1 << 20


def lib(
    *,
    magic: bytes = b"GBLLIB1\0",
    size: int = 64 * PAGE,
    sites: Sequence[int] = SITES,
    runs: Sequence[tuple[int, int, int]] = RUNS,
    path: str = PATH,
    problem: bytes = b"",
    **counts: int,
) -> bytes:
    """A .lib file; `counts` (n_sites, n_runs, n_pages, path_size) put what is not true into its head."""
    name = path.encode() + b"\0"
    name += bytes(-len(name) % 8)
    true = {"n_sites": len(sites), "n_runs": len(runs), "n_pages": sum(r[1] for r in runs), "path_size": len(name)}
    head = struct.pack("<8s5Q64s", magic, size, *(true | counts).values(), problem)
    body = b"".join(struct.pack("<3Q", *run) for run in runs)
    return head + name + struct.pack(f"<{len(sites)}Q", *sites) + body


def use(
    hits: Sequence[int] = (1, 0, 1),
    touched: Sequence[int] = (0, 1, 0, 0, 255),
    *,
    magic: bytes = b"GBLUSE1\0",
    key: str = LIB,
    **counts: int,
) -> bytes:
    """A .use file; `counts` (n_sites, n_pages) put what is not true into its head."""
    true = {"n_sites": len(hits), "n_pages": len(touched)}
    return struct.pack("<8s2Q72s", magic, *(true | counts).values(), key.encode()) + bytes(hits) + bytes(touched)


def folder(path: Path, **more: bytes) -> Path:
    """A record of one process that is in order; `more` replaces files by the end of their names."""
    files = {"lib": lib(), "use": use(), "proc": f"/usr/bin/python3\nswapped\t{PATH}\n".encode()}
    files |= {"miss": f"function\trestored\t4096\t-\t{PATH}\n".encode()} | more
    path.mkdir(exist_ok=True)
    names = {"lib": LIB, "use": f"{TAG}-0.use", "proc": f"{TAG}.proc", "miss": f"{TAG}.miss"}
    for kind, data in files.items():
        (path / names[kind]).write_bytes(data)
    return path


def intact(found: Record) -> None:
    (library,), (process,), (miss,) = found.libraries, found.processes, found.misses
    assert (library.path, library.file_bytes, library.processes) == (PATH, 64 * PAGE, {TAG})
    assert (process.program, process.swapped, process.pid) == ("python3", [PATH], "123")
    assert (miss.offset, miss.path, miss.tag, miss.is_whole) == (4096, PATH, TAG, False)


def test_what_is_in_order(tmp_path: Path) -> None:
    found = record.read(folder(tmp_path / "r"))
    intact(found)
    assert found.problems == []
    (library,) = found.libraries
    assert library.sites.tolist() == list(SITES)
    assert library.n_hits.tolist() == [1, 0, 1]
    assert library.n_touches.tolist() == [0, 1, 0, 0, 1]
    assert library.touched_addresses().tolist() == [0x11000, 0x21000]


def test_processes_add_up(tmp_path: Path) -> None:
    path = folder(tmp_path / "r")
    (path / "124-0a1b2c3d-0.use").write_bytes(use((1, 1, 0), (0, 1, 0, 0, 0)))  # a forked child: no .proc
    found = record.read(path)
    assert found.problems == []
    assert found.libraries[0].n_hits.tolist() == [2, 1, 1]
    assert found.libraries[0].n_touches.tolist() == [0, 2, 0, 0, 1]
    assert [(p.pid, p.program) for p in found.processes] == [("123", "python3"), ("124", "(forked)")]


def test_an_empty_and_an_absent_folder(tmp_path: Path) -> None:
    assert record.read(tmp_path) == record.read(tmp_path / "none") == Record([], [], [], [])


@pytest.mark.parametrize("kind", ["lib", "use"])
def test_cut_at_every_length(tmp_path: Path, kind: str) -> None:
    whole = {"lib": lib, "use": use}[kind]()
    for size in range(len(whole)):
        found = record.read(folder(tmp_path / "r", **{kind: whole[:size]}))
        assert found.libraries == []
        assert len(found.problems) == (2 if kind == "lib" else 1)  # without its .lib, a .use means nothing
        assert found.processes[0].program == "python3"
        assert len(found.misses) == 1
    for tail in (b"\0", b"x" * PAGE):
        assert record.read(folder(tmp_path / "r", **{kind: whole + tail})).libraries == []


def test_lines_cut_at_every_length(tmp_path: Path) -> None:
    first, last = f"function\trestored\t64\t-\t{PATH}\n".encode(), f"page\treported\t8192\twhole\t{PATH}\n".encode()
    for size in range(len(last)):
        found = record.read(folder(tmp_path / "r", miss=first + last[:size]))
        assert [m.offset for m in found.misses] == [64]
        assert len(found.problems) == (size > 0)
    proc = f"/bin/sh\nproblem\tcode of {PATH}\n".encode()
    for size in range(len(proc)):
        (process,) = record.read(folder(tmp_path / "r", proc=proc[:size])).processes
        assert process.program in ("", "sh")
        assert process.problems == []


@pytest.mark.parametrize(
    "line",
    [
        "",
        "\t\t\t\t",
        "function",
        "function\trestored\t1\t-",
        "function\trestored\t1\t-\t",
        "kernel\trestored\t1\t-\t/a.so",
        "function\texploded\t1\t-\t/a.so",
        "function\trestored\t-1\t-\t/a.so",
        "function\trestored\t٣\t-\t/a.so",
        "function\trestored\t1e3\t-\t/a.so",
        f"function\trestored\t{'9' * 5000}\t-\t/a.so",
        f"function\trestored\t{1 << 63}\t-\t/a.so",
    ],
)
def test_lines_of_misses_that_are_none(tmp_path: Path, line: str) -> None:
    good = f"function\trestored\t4096\t-\t{PATH}"
    found = record.read(folder(tmp_path / "r", miss="\n".join([line, good, line, ""]).encode()))
    intact(found)
    assert found.problems == [f"{TAG}.miss has 2 lines that cannot be read"]


HUGE = (1 << 64) - 1
BAD_LIBS = [
    {"magic": b"GBLLIB2\0"},
    {"n_sites": 4},
    {"n_sites": 2},
    {"n_sites": HUGE},
    {"n_sites": 1 << 61},  # in bytes, 2 ** 64
    {"n_runs": HUGE},
    {"n_runs": 0},
    {"n_pages": HUGE},
    {"n_pages": 4},
    {"path_size": HUGE},
    {"path_size": 0},
    {"size": 4 * PAGE},  # smaller than its pages
    {"size": 1 << 63, "runs": ((0, 1 << 39, 0),)},
    {"size": HUGE, "runs": ((0, 1 << 51, 0),)},
    {"size": HUGE, "runs": ((0, 1 << 63, 0), (0, 1 << 63, 1 << 63)), "n_pages": 0},  # the sum is 2 ** 64
    {"runs": ((0x10000, 3, 1), (0x20000, 2, 3))},
    {"runs": ((0x10000, 3, 0), (0x20000, 2, 0))},  # two runs of the same bytes
    {"runs": ((0x10000, 3, 0), (0x20000, 2, 5))},
    {"runs": tuple((0x1000 * n, 0, 0) for n in range(65))},
    {"path": "/" + "a" * 5000},
]


@pytest.mark.parametrize("bad", BAD_LIBS, ids=str)
def test_libraries_whose_counts_are_wrong(tmp_path: Path, bad: dict[str, object]) -> None:
    found = record.read(folder(tmp_path / "r", lib=lib(**bad)))  # type: ignore[arg-type]
    assert found.libraries == []
    assert len(found.problems) == 2
    assert found.problems[0].startswith(f"{LIB} cannot be read")


@pytest.mark.parametrize(
    "bad",
    [
        {"magic": b"GBLUSE2\0"},
        {"n_sites": HUGE},
        {"n_sites": 1, "n_pages": 7},  # the same size, another library
        {"n_sites": HUGE, "n_pages": 9},  # the sum is 8, modulo 2 ** 64
        {"hits": (1,) * 4},
        {"touched": (1,) * 4},
        {"hits": (), "touched": ()},
        {"key": "5-6-7-8.lib"},
        {"key": "../../etc/passwd"},
        {"key": ""},
        {"key": "é" * 36},
    ],
    ids=str,
)
def test_uses_that_do_not_fit_their_library(tmp_path: Path, bad: dict[str, object]) -> None:
    found = record.read(folder(tmp_path / "r", use=use(**bad)))  # type: ignore[arg-type]
    assert found.libraries == []
    assert len(found.problems) == 1
    assert len(found.misses) == len(found.processes) == 1


def test_odd_values_are_kept_as_they_are(tmp_path: Path) -> None:
    data = lib(sites=(HUGE, 0, 0), runs=((HUGE - PAGE + 1, 5, 0),), problem=b"\xff" * 64)
    (library,) = record.read(folder(tmp_path / "r", lib=data)).libraries
    assert library.sites.tolist() == [HUGE, 0, 0]
    assert library.problem == "\ufffd" * 64
    assert len(library.touched_addresses()) == 2


def test_names_and_kinds_of_files(tmp_path: Path) -> None:
    path = folder(tmp_path / "r")
    for name in ("x.proc", "-.use", "1.use", "12-0A1B2C3D.miss", f"{'9' * 200}-00000000.proc", "1-2-3.use"):
        (path / name).write_bytes(use())
    for kind in ("lib", "use", "proc", "miss"):
        (path / f"9-00000000{'-1' if kind == 'use' else ''}.{kind}").mkdir()
        os.mkfifo(path / f"8-00000000{'-1' if kind == 'use' else ''}.{kind}")
        os.symlink("/etc/passwd", path / f"7-00000000{'-1' if kind == 'use' else ''}.{kind}")
    found = record.read(path)
    intact(found)
    assert len(found.problems) == 6 + 3 * 4


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holes cost nothing on disk: files of any size, and heads that promise any size."""
    monkeypatch.setattr(record, "_MAX_TEXT", 4 * MB)
    monkeypatch.setattr(record, "_MAX_LINES", 50_000)
    path = folder(tmp_path / "r")
    for n, data in enumerate(
        [
            lib(n_sites=1 << 37),
            lib(n_sites=1 << 25),
            lib(size=1 << 63, runs=((0, 1 << 39, 0),)),
            use(n_sites=1 << 40),
            b"",
        ]
    ):
        file = path / (f"5-5-5-{n}.lib" if data[:6] == b"GBLLIB" else f"5-00000000-{n}.use")
        file.write_bytes(data)
        os.truncate(file, len(data) + (8 << 25 if n == 1 else 1 << 40))
    for n, content in enumerate((b"\0", b"\n")):
        (path / f"6-0000000{n}.miss").write_bytes(content * (5 * MB // len(content)))
    tracemalloc.start()
    found = record.read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * MB
    assert [m.offset for m in found.misses] == [4096]
    assert len(found.problems) >= 8


files = st.dictionaries(st.sampled_from(["lib", "use", "proc", "miss"]), st.binary(max_size=400), min_size=1)


@given(files)
@settings(max_examples=300, deadline=None)
@example({"proc": b"\xff\n\x85\nproblem\t\x80"})
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, given: dict[str, bytes]) -> None:
    found = record.read(folder(tmp_path_factory.getbasetemp() / "any", **given))
    assert isinstance(found, Record)
    if "lib" in given or "use" in given:
        assert found.problems


def test_thousands_of_changed_bytes(tmp_path: Path) -> None:
    chance = random.Random(5)
    for _ in range(1000):
        kind = chance.choice(["lib", "use"])
        data = bytearray({"lib": lib, "use": use}[kind]())
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.choice([0, 1, 2, 127, 128, 255, chance.randrange(256)])
        found = record.read(folder(tmp_path / "r", **{kind: bytes(data)}))
        for library in found.libraries:
            assert len(library.n_hits) == len(library.sites)
            assert len(library.touched_addresses()) == np.count_nonzero(library.n_touches)
