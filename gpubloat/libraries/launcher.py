"""Start one command, wait for it and for all that it started, and report what the kernel counted.

`cost` runs this file as a script in a bare interpreter. The kernel begins a process's peak of resident memory with what
its parent had at the fork, and exec does not reset it: forked from a Python that has pandas loaded, every command would
seem to take 200 MB. Here the floor is this small interpreter, about 10 MB.

    python -I -S launcher.py ORDERS REPORT

ORDERS and REPORT are inherited file descriptors. ORDERS gives, NUL between them, the number of words of the command,
the words, and NAME=value for each environment variable. REPORT gets ``exec ERRNO`` if the command cannot start, else
``STATUS SECONDS KIB``: exit status (negative: the signal), wall time, and the largest resident set of one process.
SIGTERM ends the command and all its descendants; the report is written all the same.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_S = 2.0  # for processes that the command left behind, then again between SIGTERM and SIGKILL
GIVE_UP_S = 30.0  # a process that hangs in a driver cannot be killed


def main(orders: int, report: int) -> None:
    with open(orders, "rb") as file:
        count, *words = file.read().split(b"\0")
    argv, variables = words[: int(count)], words[int(count) :]
    os.set_inheritable(report, False)
    prctl = ctypes.CDLL(None).prctl
    # Processes whose parent dies become children of this one: none is lost to the count, none survives the end.
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, the kernel would drop what it counted
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _become(argv, dict(v.split(b"=", 1) for v in variables), before, report)
    status, wall, peak = _wait(child, start)
    os.write(report, f"{status} {wall!r} {peak}\n".encode())


def _become(argv: list[bytes], env: dict[bytes, bytes], mask: set[int], report: int) -> None:
    try:
        os.setpgid(0, 0)  # its own group, so that a command that signals its group does not meet this process
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(report, f"exec {error.errno}\n".encode())
    finally:
        os._exit(127)


def _wait(child: int, start: float) -> tuple[int, float, int]:
    """Exit status of `child`, its wall time in seconds, and the peak in KiB over all processes that were waited for."""
    status, wall, peak = 0, 0.0, 0
    is_over = False
    deadline: float | None = None  # when to go on to the next of the signals
    signals = iter((signal.SIGTERM, signal.SIGKILL))
    number = signal.SIGTERM
    give_up = float("inf")
    while time.monotonic() < give_up:
        try:
            pid, raw, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid:
            peak = max(peak, usage.ru_maxrss)
            if pid == child:
                status, wall, is_over = os.waitstatus_to_exitcode(raw), time.monotonic() - start, True
                deadline = deadline or time.monotonic() + GRACE_S
        elif deadline is None:
            if signal.sigwait({signal.SIGCHLD, signal.SIGTERM}) == signal.SIGTERM:
                deadline = time.monotonic()
        elif time.monotonic() < deadline:
            signal.sigtimedwait({signal.SIGCHLD}, max(deadline - time.monotonic(), 0))
        else:
            number = next(signals, number)
            if number == signal.SIGKILL:
                give_up = min(give_up, time.monotonic() + GIVE_UP_S)
            _end(number, None if is_over else child)
            # Killed processes hand their own children over to this one: look again soon.
            deadline = time.monotonic() + (GRACE_S if number == signal.SIGTERM else 0.02)
    if not is_over:
        status, wall = -signal.SIGKILL, time.monotonic() - start
    return status, wall, peak


def _end(number: int, group: int | None) -> None:
    """Signal the children, and the command's process group while its leader is there (its number cannot be reused)."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            pids = [int(word) for word in file.read().split()]
    except OSError:
        pids = []
    for pid in [*pids, *([-group] if group is not None else [])]:
        try:
            os.kill(pid, number)
        except OSError:
            continue


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
