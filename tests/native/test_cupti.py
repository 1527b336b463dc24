"""The injection library against a libcupti and a libcuda of our own: what it enables, writes and survives."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpubloat.errors import MissingToolError
from gpubloat.libraries import cuptilog
from gpubloat.libraries.cuptilog import Log, Lookup
from gpubloat.libraries.elf import Elf
from gpubloat.libraries.reader import Reader
from gpubloat.native import build, headers
from tests.build import elf, fatbin

CUBIN = elf.cubin([("used", 64), ("unused", 64)])
REGION = fatbin.region([fatbin.element(CUBIN)])
HERE = Path(__file__).parent

# A library with a fatbin and its wrapper, as nvcc makes them.
LIBRARY = """
__attribute__((section(".nv_fatbin"), aligned(8))) const unsigned char region[] = {%s};
struct wrapper { int magic, version; const void *data, *list; };
__attribute__((section(".nvFatBinSegment"))) struct wrapper wrapper = {0x466243b1, 1, region, 0};
const unsigned char raw[] __attribute__((aligned(8))) = {%s};
"""
DRIVER = """
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *device, int n) { *device = n; return 0; }
int cuDeviceGetName(char *name, int size, int device) { (void)size, (void)device; __builtin_strcpy(name, "Fake\\tGPU");
    return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : device; return 0; }
"""
PROGRAM = """
import ctypes, os, sys
from ctypes import c_char_p, c_int, c_size_t, c_void_p
folder = sys.argv[1]
cuda = ctypes.CDLL(folder + "/libcuda.so.1")
library = ctypes.CDLL(folder + "/libgpu.so")
cupti = ctypes.CDLL(folder + "/libcupti.so.13") if os.path.exists(folder + "/libcupti.so.13") else None
injection = ctypes.CDLL(sys.argv[2])
assert injection.InitializeInjection() == 1
assert injection.InitializeInjection() == 1
wrapper, region = (ctypes.addressof(c_int.in_dll(library, name)) for name in ("wrapper", "region"))
def call(name, *arguments):
    # A type for each: ctypes would pass a Python int as a C int.
    kinds = {int: c_void_p, bytes: c_char_p, type(None): c_void_p}
    return getattr(cupti, name)(*(kinds[type(a)](a) for a in arguments))
def kernel(handle, name, result=0):
    cupti.fake_kernel(c_void_p(handle), c_char_p(name), c_int(result))
"""
Program = Callable[..., Log]


def shared(folder: Path, name: str, source: str | Path, *flags: str) -> Path:
    """Compile a shared library that other libraries know as `name`."""
    path = folder / name
    code = source if isinstance(source, Path) else folder / f"{name}.c"
    if isinstance(source, str):
        code.write_text(source)
    command = [build.compiler(), "-g", "-shared", "-fPIC", "-fno-builtin", f"-Wl,-soname,{name}", "-o", str(path)]
    subprocess.run([*command, str(code), *flags], check=True)
    return path


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with the fakes, and the injection library."""
    folder = tmp_path_factory.mktemp("cuda")
    try:
        injection, flags = headers.injection(), headers.flags()
    except MissingToolError as error:
        pytest.skip(str(error))
    shared(folder, "libcupti.so.13", HERE / "fake_cupti.c", *flags)
    shared(folder, "libcuda.so.1", DRIVER)
    shared(folder, "libgpu.so", LIBRARY % tuple(", ".join(map(str, data)) for data in (REGION, CUBIN)))
    return folder, injection


@pytest.fixture
def run(tools: tuple[Path, Path], tmp_path: Path) -> Program:
    """Run statements in a process that has loaded the fakes and the injection library; give back its log."""

    def program(
        code: str, *, folder: Path | None = None, injection: Path | None = None, signalled: int = 0, **env: str
    ) -> Log:
        argv = [sys.executable, "-c", PROGRAM + code, str(folder or tools[0]), str(injection or tools[1])]
        kept = {k: v for k, v in os.environ.items() if not k.startswith("GPUBLOAT_")}
        done = subprocess.run(
            argv, env=kept | {"GPUBLOAT_DIR": str(tmp_path)} | env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == -signalled, done.stderr
        logs = cuptilog.read_all(tmp_path)
        return logs[0] if logs else Log(0)

    return program


def test_only_what_is_needed_is_enabled(run: Program) -> None:
    log = run(
        "assert cupti.fake_n_enabled() == 17\n"
        "assert not any(cupti.fake_is_domain_enabled(n) for n in range(6))\n"
        "assert cupti.fake_is_enabled(1, 681) and cupti.fake_is_enabled(3, 6)\n"
        "cupti.fake_launch()"
    )
    assert (log.state, log.problem, log.n_callbacks) == ("recorded", "", 0)


def test_whole_domains_are_enabled_only_to_measure_their_cost(run: Program) -> None:
    log = run(
        "assert cupti.fake_is_domain_enabled(1) and cupti.fake_is_domain_enabled(2)\n"
        "cupti.fake_launch(); kernel(16, b'k')",
        GPUBLOAT_CUPTI_MODE="domains",
    )
    assert log.n_callbacks == 102
    assert log.lookups == [Lookup("kernel", "k", None)]


def test_loads_and_lookups(run: Program, tools: tuple[Path, Path]) -> None:
    log = run(
        "call('fake_library', 0x7f0000001000, wrapper, None, 0)\n"
        "call('fake_alias', 0x2000, 0x7f0000001000)\n"
        "kernel(0x7f0000001000, b'used'); kernel(0x7f0000001000, b'absent', 500)\n"
        "call('fake_function', 0x2000, b'unused')\n"
        "call('fake_global', 0x2000, b'table')\n"
        "call('fake_all', 0x7f0000001000)\n"
        "call('fake_function', 0x99, b'lost')\n"
        "call('fake_file', 0x3000, b'/dev/null')"
    )
    assert log.problem == ""
    assert [(i.api, i.kind) for i in log.loads] == [("cuLibraryLoadData", "fatbin"), ("cuModuleLoad", "file")]
    image = log.loads[0]
    assert Path(image.path) == (tools[0] / "libgpu.so").resolve()
    data = Path(image.path).read_bytes()
    offset = int(Elf(Reader("library", data)).file_offsets(np.array([image.vaddr]))[0])
    assert data[offset : offset + len(REGION)] == REGION
    assert log.lookups == [
        Lookup("kernel", "used", 0),
        Lookup("kernel", "unused", 0),
        Lookup("variable", "table", 0),
        Lookup("all", "", 0),
        Lookup("kernel", "lost", None),
    ]
    assert log.gpus == [("sm_90", "Fake\tGPU"), ("sm_91", "Fake\tGPU")]


def test_images_of_every_kind(run: Program, tmp_path: Path) -> None:
    (tmp_path / "cubin").write_bytes(CUBIN)
    log = run(
        f"cubin = open({str(tmp_path / 'cubin')!r}, 'rb').read()\n"
        f"fatbin = ctypes.create_string_buffer({REGION[:16]!r})\n"
        "ptx = ctypes.create_string_buffer(b'//\\n.version 8.0')\n"
        "odd = ctypes.create_string_buffer(b'\\x01\\x02\\x03\\x04')\n"
        "call('fake_image', 1, cubin, cubin, len(cubin))\n"
        "call('fake_image', 2, ctypes.addressof(fatbin), None, 0)\n"
        "call('fake_image', 3, ctypes.addressof(ptx), None, 0)\n"
        "call('fake_image', 4, ctypes.addressof(odd), None, 0)\n"
        "call('fake_image', 5, region, None, 0)\n"
        "call('fake_image', 6, ctypes.addressof(c_int.in_dll(library, 'raw')), None, 0)\n"
    )
    assert [i.kind for i in log.loads] == ["cubin", "fatbin", "ptx", "unknown", "mapped", "mapped"]
    assert [bool(i.path) for i in log.loads] == [False] * 4 + [True] * 2
    content = zlib.crc32(CUBIN), len(CUBIN)
    assert (log.loads[0].crc32, log.loads[0].size) == content
    assert dict(log.modules) == {content: 1}
    assert log.made == [(0, *content)]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 15, 16, 4097])
def test_the_checksum_is_zlibs(run: Program, size: int) -> None:
    data = bytes(range(256)) * 17
    log = run(f"data = bytes(range(256)) * 17\ncall('fake_module', data, {size})")
    assert dict(log.modules) == {(zlib.crc32(data[:size]), size): 1}


def test_events_are_written_once_and_loads_counted(run: Program, tmp_path: Path) -> None:
    log = run(
        "for n in range(300):\n"
        "    call('fake_library', 16, wrapper, None, 0)\n"
        "    kernel(16, b'used')\n"
        "    call('fake_module', b'12345678', 8)\n"
    )
    assert len(log.loads) == len(log.lookups) == 1
    assert log.modules[zlib.crc32(b"12345678"), 8] == 256  # exact up to 64, then at powers of two
    (text,) = (path.read_text() for path in tmp_path.glob("*.cupti"))
    assert text.count("\n") < 80


def test_memory_is_bounded(run: Program) -> None:
    small = build.library("cupti", ["cupti.c"], [*headers.flags(), "-DMAX_EVENTS=1024"])
    log = run("for n in range(3000): kernel(16, b'k%d' % n)", injection=small)
    assert 900 < len(log.lookups) <= 1024
    assert log.problem == "more distinct events than are recorded"


def test_a_handle_that_comes_again_is_another(run: Program) -> None:
    log = run(
        "call('fake_library', 16, wrapper, None, 0); kernel(16, b'used')\n"
        "ptx = ctypes.create_string_buffer(b'.version')\n"
        "call('fake_library', 16, ctypes.addressof(ptx), None, 0); kernel(16, b'used')\n"
    )
    assert [i.kind for i in log.loads] == ["fatbin", "ptx"]
    assert [lookup.load for lookup in log.lookups] == [0, 1]


def test_names_cannot_break_the_log(run: Program) -> None:
    log = run("kernel(16, b'a\\tb\\nc\\\\d\\x7f\\xc3\\xa9\\xff'); kernel(16, b'x' * 70000)")
    assert [lookup.name for lookup in log.lookups] == ["a\tb\nc\\d\x7fé\\xff", "x" * 65536]
    assert log.n_skipped == 0


def test_a_forked_process_has_a_log_of_its_own(run: Program, tmp_path: Path) -> None:
    run(
        "kernel(16, b'parent')\n"
        "if not os.fork():\n"
        "    kernel(16, b'parent'); kernel(16, b'child'); os._exit(0)\n"
        "os.wait(); kernel(16, b'later')"
    )
    logs = cuptilog.read_all(tmp_path)
    names = sorted([lookup.name for lookup in log.lookups] for log in logs)
    assert names == [["parent", "child"], ["parent", "later"]]
    assert {log.state for log in logs} == {"recorded"}


def test_another_program_of_the_same_process_starts_anew(run: Program) -> None:
    log = run(
        "call('fake_library', 16, wrapper, None, 0); kernel(16, b'first'); call('fake_module', b'x', 1)\n"
        "if 'AGAIN' in os.environ: sys.exit()\n"
        "os.environ['AGAIN'] = '1'\n"
        "code = open('/proc/self/cmdline').read().split('\\0')[2]\n"
        "os.execv(sys.executable, [sys.executable, '-c', code, *sys.argv[1:]])"
    )
    assert [lookup.load for lookup in log.lookups] == [0, 1]
    assert list(log.modules.values()) == [2]


def test_a_killed_process_loses_nothing(run: Program) -> None:
    log = run("kernel(16, b'k'); os.kill(os.getpid(), 9)", signalled=signal.SIGKILL)
    assert [lookup.name for lookup in log.lookups] == ["k"]


def test_a_program_that_closes_all_files(run: Program, tmp_path: Path) -> None:
    other = tmp_path / "other"
    log = run(
        "kernel(16, b'before'); os.closerange(3, 64)\n"
        f"files = [open({str(other)!r}, 'w') for _ in range(8)]\n"
        "kernel(16, b'after')"
    )
    assert [lookup.name for lookup in log.lookups] == ["before", "after"]
    assert other.read_bytes() == b""


def test_threads_at_once(run: Program) -> None:
    log = run(
        "import threading\n"
        "def work(n):\n"
        "    for k in range(200): kernel(n % 4 * 16 + 16, b'k%d' % (k % 50))\n"
        "threads = [threading.Thread(target=work, args=(n,)) for n in range(32)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]"
    )
    assert len(log.lookups) == 4 * 50
    assert log.n_skipped == 0


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the hook is for x86-64")
@pytest.mark.parametrize(
    "call", ["cuptiSubscribe(handle, other, None)", "cuptiSubscribe_v2(handle, other, None, None)"]
)
def test_a_second_subscriber_gets_the_place(run: Program, call: str) -> None:
    log = run(
        "kernel(16, b'before')\n"
        "seen = []\n"
        "other = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_int, c_void_p)(lambda *a: seen.append(a))\n"
        "handle = ctypes.byref(c_void_p())\n"
        f"assert cupti.{call} == 0\n"
        f"assert cupti.{call} == 39\n"
        "cupti.cuptiEnableDomain(1, None, 1)\n"
        "kernel(16, b'after'); assert len(seen) == 2\n"
        "cupti.cuptiUnsubscribe(None)\n"
        f"assert cupti.{call} == 0\n"
    )
    assert log.state == "yielded"
    assert [lookup.name for lookup in log.lookups] == ["before"]


def test_another_subscriber_was_there_before(run: Program) -> None:
    log = run("kernel(16, b'k')", FAKE_CUPTI_ERROR="39")
    assert (log.state, log.reason, log.lookups) == ("refused", "cuptiSubscribe: one is enough", [])


def test_cupti_that_does_not_work(run: Program) -> None:
    log = run("kernel(16, b'k')", FAKE_CUPTI_ERROR="999")
    assert (log.state, log.reason) == ("missing", "cuptiSubscribe: something else")


def test_a_cupti_that_lacks_what_is_needed(run: Program, without_cupti: Path) -> None:
    shared(without_cupti, "libcupti.so.13", "int nothing;")
    log = run("", folder=without_cupti)
    assert (log.state, log.reason) == ("missing", "libcupti lacks the callback interface")


@pytest.fixture
def without_cupti(tools: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("without")
    for name in ("libcuda.so.1", "libgpu.so"):
        shutil.copy(tools[0] / name, folder)
    return folder


def test_cupti_that_only_the_environment_names(
    run: Program, without_cupti: Path, tools: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    copy = tmp_path_factory.mktemp("elsewhere") / "libcupti.so.2099"
    shutil.copy(tools[0] / "libcupti.so.13", copy)
    log = run(f"cupti = ctypes.CDLL({str(copy)!r})\nkernel(16, b'k')", folder=without_cupti, GPUBLOAT_CUPTI=str(copy))
    assert log.state == "recorded"
    assert [lookup.name for lookup in log.lookups] == ["k"]


def test_no_cupti_at_all(run: Program, without_cupti: Path, tmp_path: Path) -> None:
    (tmp_path / "no").write_text("not a library")
    code = "print('goes on')"
    log = run(code, folder=without_cupti, GPUBLOAT_CUPTI=str(tmp_path / "no"), LD_LIBRARY_PATH="")
    if log.state == "recorded" or "cuptiSubscribe" in log.reason:
        pytest.skip("the loader finds a libcupti on this machine")
    assert log.state == "missing"
    assert str(tmp_path / "no") in log.reason


def test_without_a_folder_nothing_happens(run: Program, tmp_path: Path) -> None:
    run("assert cupti.fake_n_enabled() == 0", GPUBLOAT_DIR="")
    assert not list(tmp_path.glob("*.cupti"))


def test_a_folder_that_cannot_be_written(run: Program, tmp_path: Path) -> None:
    log = run("kernel(16, b'k'); print('goes on')", GPUBLOAT_DIR=str(tmp_path / "absent"))
    assert log.pid == 0


def test_headers_that_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(headers, "TOOLKIT", tmp_path / "cuda")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    with pytest.raises(MissingToolError, match="the CUPTI headers is not installed") as caught:
        headers.folders()
    assert caught.value.hint == "install it with: pip install nvidia-cuda-cupti nvidia-cuda-runtime"
    assert headers.libcupti() is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["nvidia/cu13/include/cuda.h", "nvidia/cu13/include/cupti_callbacks.h"], ["nvidia/cu13/include"]),
        (
            ["nvidia/cuda_runtime/include/cuda.h", "nvidia/cuda_cupti/include/cupti_callbacks.h"],
            ["nvidia/cuda_runtime/include", "nvidia/cuda_cupti/include"],
        ),
        (
            ["cuda/include/cuda.h", "cuda/extras/CUPTI/include/cupti_callbacks.h"],
            ["cuda/include", "cuda/extras/CUPTI/include"],
        ),
        (
            ["nvidia/cuda_cupti/include/cupti_callbacks.h", "cuda/include/cuda.h"],
            ["cuda/include", "nvidia/cuda_cupti/include"],
        ),
    ],
)
def test_where_headers_are_found(
    files: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(headers, "TOOLKIT", tmp_path / "absent")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert headers.folders() == [tmp_path / name for name in expected]
