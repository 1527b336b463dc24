"""What a command costs: known amounts of memory, every way to end, what it prints, and a GPU that is made up."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from gpubloat.errors import GpubloatError
from gpubloat.libraries import cost, sampling

MB = 1_000_000
ALLOCATE = "x = b'1' * {n}"


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def test_memory_and_time_of_one_process() -> None:
    found = cost.run(python(f"import time; {ALLOCATE.format(n=200 * MB)}; time.sleep(0.3)"))
    assert found.exit_status == 0
    assert 200 * MB < found.peak_rss_bytes < 230 * MB
    assert 0.3 < found.wall_s < 3
    assert not found.is_ended


def test_the_measuring_process_adds_nothing() -> None:
    ballast = b"1" * (300 * MB)
    assert cost.run(["true"]).peak_rss_bytes < 20 * MB
    del ballast


def test_a_child_that_takes_more_counts() -> None:
    child = f"import os; {ALLOCATE.format(n=150 * MB)}"
    code = f"import os, sys; os.spawnv(os.P_WAIT, sys.executable, [sys.executable, '-I', '-S', '-c', {child!r}])"
    assert 150 * MB < cost.run(python(code)).peak_rss_bytes < 180 * MB


def test_children_at_the_same_time_add_up_only_in_the_sum() -> None:
    child = f"import time; {ALLOCATE.format(n=80 * MB)}; time.sleep(0.8)"
    code = (
        f"import os, sys\nargv = [sys.executable, '-I', '-S', '-c', {child!r}]\n"
        "for pid in [os.spawnv(os.P_NOWAIT, argv[0], argv) for _ in '12']: os.waitpid(pid, 0)"
    )
    found = cost.run(python(code))
    assert 80 * MB < found.peak_rss_bytes < 110 * MB
    assert found.peak_tree_bytes is not None
    assert 160 * MB < found.peak_tree_bytes < 240 * MB


def test_a_child_that_nobody_waits_for_counts() -> None:
    child = ALLOCATE.format(n=100 * MB)
    code = f"import os\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0: {child}\n os._exit(0)"
    assert 100 * MB < cost.run(python(code)).peak_rss_bytes < 140 * MB


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTRAP, signal.SIGTERM])
def test_killed_with_the_right_peak(number: signal.Signals) -> None:
    code = f"import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); {ALLOCATE.format(n=100 * MB)}"
    found = cost.run(python(f"{code}; os.kill(os.getpid(), {int(number)})"))
    assert found.exit_status == -number
    assert 100 * MB < found.peak_rss_bytes < 130 * MB


@pytest.mark.parametrize("status", [0, 1, 127, 255])
def test_exit_status(status: int) -> None:
    assert cost.run(["sh", "-c", f"exit {status}"]).exit_status == status


def test_a_command_that_kills_its_group_kills_itself_only() -> None:
    assert cost.run(["sh", "-c", "kill -9 0"]).exit_status == -signal.SIGKILL


def test_what_is_left_running_is_ended_and_not_timed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    found = cost.run(["sh", "-c", f"setsid sh -c 'echo $$ >{pid}; exec sleep 60' & while ! test -s {pid}; do :; done"])
    assert found.exit_status == 0
    assert found.wall_s < 1.5
    assert is_gone(int(pid.read_text()))


def test_a_limit_ends_the_whole_tree(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"trap '' TERM; setsid sh -c 'echo $$ >{pid}; exec sleep 60' & while :; do sleep 0.1; done"
    found = cost.run(["sh", "-c", code], limit_s=0.5)
    assert found.is_ended
    assert found.exit_status == -signal.SIGKILL
    assert is_gone(int(pid.read_text()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_measuring_process(tmp_path: Path, number: signal.Signals) -> None:
    pid = tmp_path / "pid"
    command = ["sh", "-c", f"sh -c 'echo $$ >{pid}; exec sleep 60'; :"]
    code = f"from gpubloat.libraries import cost; cost.run({command!r})"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    assert wait_for(lambda: pid.exists() and pid.read_text().endswith("\n"), 30)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert wait_for(lambda: is_gone(int(pid.read_text())))


def test_no_descriptor_and_no_process_is_left_here() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    cost.run(["true"])
    with pytest.raises(GpubloatError):
        cost.run(["/nonesuch"])
    assert sorted(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_commands_that_cannot_run(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no program")
    for command, message in [
        (["nonesuch-program"], "nonesuch-program cannot be run: No such file or directory"),
        ([str(plain)], "Permission denied"),
        ([], "no command"),
        (["true", "a\0b"], "NUL"),
    ]:
        with pytest.raises(GpubloatError, match=message):
            cost.run(command)
    with pytest.raises(GpubloatError, match="cannot be run"):
        cost.run(["true"], cwd=tmp_path / "absent")


def test_environment_folder_and_stdin_are_as_given(tmp_path: Path) -> None:
    code = (
        "import os, sys; print(sorted(k for k in os.environb if k != b'LC_CTYPE'), os.environb[b'A'], os.getcwd(),"
        " repr(sys.stdin.read()), sys.argv[1:], sorted(os.listdir('/proc/self/fd')))"
    )
    odd = os.fsdecode(b"\xff = \n\xc3\xa9")
    found = cost.run([*python(code), "", odd], env={"A": odd, "EMPTY": ""}, cwd=tmp_path)
    expected = subprocess.run([*python(code), "", odd], env={"A": odd, "EMPTY": ""}, cwd=tmp_path, capture_output=True,
                              stdin=subprocess.DEVNULL)  # fmt: skip
    assert found.stdout_tail == expected.stdout
    assert found.exit_status == expected.returncode == 0


def test_what_is_preloaded_is_so_only_into_the_command() -> None:
    found = cost.run(["true"], env={**os.environ, "LD_PRELOAD": "/nonesuch.so"})
    assert found.stderr_tail.count(b"cannot be preloaded") == 1


def test_signals_are_as_in_a_shell() -> None:
    code = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    assert cost.run(python(code)).stdout_tail == b"set()\n"
    # A program whose reader is gone ends by SIGPIPE, unless it inherited that it is ignored.
    assert cost.run(["sh", "-c", "{ sleep 0.1; cat /dev/zero; echo $? >&2; } | true"]).exit_status == 0
    ignored = cost.run(["sh", "-c", "grep SigIgn /proc/self/status"]).stdout_tail.split()[1]
    assert not int(ignored, 16) & (1 << signal.SIGPIPE - 1)


def test_what_it_prints() -> None:
    found = cost.run(["sh", "-c", "echo out; echo err >&2"])
    assert found.stdout_sha256 == hashlib.sha256(b"out\n").hexdigest()
    assert (found.stdout_tail, found.stderr_tail) == (b"out\n", b"err\n")


def test_only_the_end_of_stderr_is_kept() -> None:
    tail = cost.run(python("import sys; sys.stderr.write('x' * 1_000_000 + 'end')")).stderr_tail
    assert len(tail) == cost.TAIL_BYTES
    assert tail.endswith(b"xend")


def test_stderr_can_be_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert cost.run(["sh", "-c", "echo err >&2"], is_stderr_shown=True).stderr_tail == b""
    assert capfd.readouterr().err == "err\n"


def test_lines_can_be_ignored() -> None:
    one = cost.run(["printf", "took 1 s\nloss 4\n\\377\ntook 2 s"], ignore=[r"took \d", "nothing"])
    assert one.stdout_tail == b"loss 4\n\xff\n"
    assert one.stdout_sha256 == hashlib.sha256(one.stdout_tail).hexdigest()
    with pytest.raises(GpubloatError, match="no regular expression"):
        cost.run(["true"], ignore=["("])


@pytest.mark.parametrize("ignore", [(), ("never",)])
def test_a_large_output_takes_no_memory(ignore: tuple[str, ...]) -> None:
    """The measuring process is itself measured; 100 MB without a newline is the worst case for reading by lines."""
    peaks = {}
    for n in (1, 100 * MB):
        inner = ["sh", "-c", f"head -c {n} /dev/zero"]
        code = f"from gpubloat.libraries import cost; print(cost.run({inner!r}, ignore={ignore!r}).stdout_sha256)"
        found = cost.run([sys.executable, "-c", code])
        assert found.stdout_tail.decode().strip() == hashlib.sha256(bytes(n)).hexdigest()
        peaks[n] = found.peak_rss_bytes
    assert peaks[100 * MB] - peaks[1] < 20 * MB


def test_files(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "same").write_text("same")
    found = cost.run(
        ["sh", "-c", "printf new >new; printf same >same"], cwd=tmp_path, files=["new", "same", "old", "absent"]
    )
    new, same = (hashlib.sha256(text).hexdigest() for text in (b"new", b"same"))
    assert found.files_sha256 == (new, same, cost.MISSING, cost.MISSING)
    assert (tmp_path / "old").read_text() == "old"


def test_variants_are_interleaved() -> None:
    code = "import os, sys; sys.exit(int(os.environ['STATUS']))"
    found = cost.measure(python(code), {"a": {"STATUS": "0"}, "b": {"STATUS": "3"}}, repeat=3)
    assert list(found) == ["variant", "repeat", "wall_s", "peak_rss_bytes", "peak_gpu_bytes", "exit_status"]
    assert list(found["variant"]) == list("abbaab")
    assert list(found["repeat"]) == [0, 0, 1, 1, 2, 2]
    assert list(found["exit_status"]) == [0, 3, 3, 0, 0, 3]
    assert found["peak_gpu_bytes"].dtype == pd.Int64Dtype()


class Nvml(types.ModuleType):
    """Two GPUs; the memory in use on each is a number in a file that the command writes."""

    class NVMLError(Exception):
        pass

    def __init__(self, folder: Path) -> None:
        super().__init__("pynvml")
        self.folder = folder
        self.depth = 0
        self.is_broken = False
        for number in (0, 1):
            (folder / f"gpu{number}").write_text("1000")

    def nvmlInit(self) -> None:
        if self.is_broken:
            raise self.NVMLError
        self.depth += 1

    def nvmlShutdown(self) -> None:
        self.depth -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid != "MIG-1":
            raise self.NVMLError
        return 1

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}0-abc"

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"GPU %d" % handle

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> types.SimpleNamespace:
        try:
            return types.SimpleNamespace(used=int((self.folder / f"gpu{handle}").read_text()))
        except ValueError:
            raise self.NVMLError from None

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[types.SimpleNamespace]:
        """Lines of a file: process, bytes (or - where NVML does not tell)."""
        path = self.folder / f"held{handle}"
        words = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [
            types.SimpleNamespace(pid=int(pid), usedGpuMemory=None if held == "-" else int(held)) for pid, held in words
        ]


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nvml:
    module = Nvml(tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return module


def gpu_program(*levels: str) -> list[str]:
    """Writes levels ("GPU=BYTES,..."), each for a tenth of a second, by renaming: no half-written number is seen."""
    steps = []
    for level in levels:
        for pair in level.split(","):
            number, _, size = pair.partition("=")
            steps.append(f"printf {size or 'lost'} >new; mv new gpu{number}")
        steps.append("sleep 0.1")
    return ["sh", "-c", "; ".join(steps)]


def test_gpu_memory_is_the_highest_sum_above_the_level_before(nvml: Nvml) -> None:
    ramp = gpu_program("0=1500,1=1100", "0=2000", "0=1200,1=1900", "0=1000,1=1000")
    found = cost.run(ramp, cwd=nvml.folder)
    assert found.peak_gpu_bytes == 1100  # not 1000 + 900, which were not at the same time; not 2900
    assert nvml.depth == 0


@pytest.mark.parametrize(
    ("listed", "peak"),
    [
        ("0", 500),
        ("1,0", 800),
        ("GPU-1", 300),
        ("MIG-1", 300),
        ("0,7,1", 500),
        ("0,MIG-9,1", 500),
        ("GPU-", None),
        ("", None),
        ("-1", None),
    ],
)
def test_only_visible_gpus_count(nvml: Nvml, listed: str, peak: int | None) -> None:
    found = cost.run(gpu_program("0=1500,1=1300"), cwd=nvml.folder, env={**os.environ, "CUDA_VISIBLE_DEVICES": listed})
    assert found.peak_gpu_bytes == peak


def test_memory_that_others_free_is_not_negative(nvml: Nvml) -> None:
    assert cost.run(gpu_program("0=10"), cwd=nvml.folder).peak_gpu_bytes == 0


def test_a_gpu_that_stops_telling_keeps_what_was_seen(nvml: Nvml) -> None:
    assert cost.run(gpu_program("0=1600", "0="), cwd=nvml.folder).peak_gpu_bytes == 600
    assert cost.run(gpu_program("1=1600"), cwd=nvml.folder).peak_gpu_bytes is None


@pytest.mark.parametrize(
    ("lines", "peak", "of"),
    [
        pytest.param('"$$ 300\n1 7000\n"', 300, "processes", id="own"),
        pytest.param('"1 7000\n"', 900, "gpus", id="only-others-are-listed"),
        pytest.param('"$$ -\n"', 900, "gpus", id="it-does-not-tell"),
        pytest.param('"$$ 300\n" >>held1; printf "$$ 40\n"', 340, "processes", id="two-gpus"),
    ],
)
def test_what_the_command_holds_itself_counts_where_it_is_listed(nvml: Nvml, lines: str, peak: int, of: str) -> None:
    """Another process takes 600 of the 900 meanwhile."""
    command = ["sh", "-c", f"printf {lines} >>held0; printf 1900 >new; mv new gpu0; sleep 0.3"]
    found = cost.run(command, cwd=nvml.folder)
    assert (found.peak_gpu_bytes, found.peak_gpu_of) == (peak, of)


def test_nvml_that_does_not_start(nvml: Nvml) -> None:
    nvml.is_broken = True
    found = cost.run(["true"])
    assert (found.peak_gpu_bytes, found.peak_gpu_of) == (None, None)
    assert sampling.gpus() == []


def test_no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert cost.run(["true"]).peak_gpu_bytes is None
    assert sampling.gpus() == []


def test_names_of_gpus(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampling.gpus() == ["GPU 0", "GPU 1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert sampling.gpus() == ["GPU 1"]
    assert nvml.depth == 0


def test_the_level_before_is_waited_for() -> None:
    levels = iter([9, 7, 5, 5, 5, 1])
    assert sampling._settled(lambda: next(levels)) == 5
    assert sampling._settled(lambda: None) is None
