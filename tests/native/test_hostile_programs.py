"""Programs that do to signals, limits, files and memory what few do: under observation they must end as without it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from gpubloat.libraries import attach, record
from gpubloat.libraries.elf import Elf
from gpubloat.libraries.functions import read as functions_of
from gpubloat.libraries.reader import Reader
from gpubloat.libraries.record import Record
from tests.native.programs import SAMPLE, needs_compiler, shared
from tests.native.test_guard import Copy

pytestmark = needs_compiler
HEAD = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/wait.h>
#include <unistd.h>
#define CHECK(x) do { if (!(x)) { fprintf(stderr, "line %d: %s\n", __LINE__, #x); _exit(9); } } while (0)
static void *handle;
static int call(const char *name, int x) { return ((int (*)(int))dlsym(handle, name))(x); }
static int run(int count, char **words);
int main(int count, char **words) {
    CHECK(handle = dlopen(words[1], RTLD_NOW));
    int status = run(count, words);
    puts("done");
    return status;
}
"""


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared(tmp_path_factory.mktemp("sample"), SAMPLE)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return Copy(tmp_path_factory.mktemp("copy"))


def program(folder: Path, source: str) -> Path:
    path = folder / "program"
    path.with_suffix(".c").write_text(HEAD + source)
    subprocess.run(["cc", "-O1", "-o", str(path), f"{path}.c", "-ldl", "-lpthread"], check=True)
    return path


def observed(folder: Path, words: list[str | Path], **variables: str) -> tuple[int, str, str, Record]:
    logs = folder / "record"
    logs.mkdir(exist_ok=True)
    variables = variables or {"GPUBLOAT_FUNCTIONS": "1", "GPUBLOAT_PAGES": "1"}
    env = attach.audited(os.environ, GPUBLOAT_DIR=str(logs), **variables)
    done = subprocess.run(list(map(str, words)), env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr, record.read(logs)


def entered(found: Record, library: Path) -> set[str]:
    names: set[str] = set()
    for watched in found.libraries:
        if watched.path == str(library):
            table, _ = functions_of(Elf(Reader(str(library), library.read_bytes())), "x")
            known = dict(zip(table["address"].astype(int), table["function"], strict=True))
            names |= {known.get(int(site), "") for site in watched.sites[np.flatnonzero(watched.n_hits)]}
    return names


WAITS = {
    "sigsuspend": "sigsuspend(&all)",
    "ppoll": "ppoll(NULL, 0, &limit, &all)",
    "pselect": "pselect(0, NULL, NULL, NULL, &limit, &all)",
    "epoll_pwait": "epoll_pwait(epoll_create1(0), &event, 1, 2000, &all)",
}


@pytest.mark.parametrize("name", WAITS)
def test_a_handler_that_runs_while_all_other_signals_are_blocked(sample: Path, tmp_path: Path, name: str) -> None:
    path = program(
        tmp_path,
        """
        static volatile int got;
        static void handler(int n) { got = call("used", n) + call("read_page", 3); }
        static int run(int count, char **words) {
            sigset_t all, one;
            struct timespec limit = {2, 0};
            struct epoll_event event;
            sigfillset(&all); sigemptyset(&one);
            sigdelset(&all, SIGUSR1); sigaddset(&one, SIGUSR1);
            signal(SIGUSR1, handler);
            sigprocmask(SIG_BLOCK, &one, NULL);
            raise(SIGUSR1);
            CHECK(WAIT == -1);
            CHECK(limit.tv_sec == 2 && event.events == event.events);
            return !(got == SIGUSR1 + 4);
        }
        """.replace("WAIT", WAITS[name]),
    )
    status, text, error, found = observed(tmp_path, [path, sample])
    assert (status, text, error) == (0, "done\n", "")
    assert {"used", "read_page"} <= entered(found, sample)


def test_waiting_threads_can_be_cancelled(sample: Path, tmp_path: Path) -> None:
    path = program(
        tmp_path,
        """
        static int n_cleaned;
        static void clean(void *p) { n_cleaned++; }
        static void *wait_for_ever(void *which) {
            struct epoll_event event;
            sigset_t all;
            sigfillset(&all);
            pthread_cleanup_push(clean, NULL);
            switch (*(int *)which) {
            case 0: sigsuspend(&all); break;
            case 1: ppoll(NULL, 0, NULL, &all); break;
            case 2: pselect(0, NULL, NULL, NULL, NULL, &all); break;
            case 3: epoll_pwait(epoll_create1(0), &event, 1, -1, &all); break;
            }
            pthread_cleanup_pop(0);
            return NULL;
        }
        static int run(int count, char **words) {
            for (int which = 0; which < 4; which++) {
                pthread_t thread;
                void *result;
                CHECK(!pthread_create(&thread, NULL, wait_for_ever, &which));
                usleep(20000);
                pthread_cancel(thread);
                pthread_join(thread, &result);
                CHECK(result == PTHREAD_CANCELED);
            }
            return n_cleaned != 4;
        }
        """,
    )
    assert observed(tmp_path, [path, sample])[:3] == (0, "done\n", "")


def test_more_children_than_a_byte_counts_touch_one_page(sample: Path, tmp_path: Path) -> None:
    path = program(
        tmp_path,
        """
        static int run(int count, char **words) {
            int n_bad = 0, status;
            for (int i = 0; i < 300; i++) {
                if (!fork())
                    _exit(call("read_page", 5) != 5);
                wait(&status);
                n_bad += status != 0;
            }
            return n_bad > 0;
        }
        """,
    )
    assert observed(tmp_path, [path, sample])[:3] == (0, "done\n", "")


def test_a_page_that_is_shut_gives_no_more_rights_than_the_library_has(sample: Path, tmp_path: Path) -> None:
    path = program(
        tmp_path,
        """
        static sigjmp_buf back;
        static void handler(int n) { siglongjmp(back, n); }
        static int run(int count, char **words) {
            char *code = dlsym(handle, "gpu_code");
            signal(SIGSEGV, handler);
            if (!sigsetjmp(back, 1)) { code[3 * 4096] = 1; return 1; }
            if (!sigsetjmp(back, 1)) { ((void (*)(void))(code + 5 * 4096))(); return 2; }
            return call("read_page", 3) != 3;
        }
        """,
    )
    assert observed(tmp_path, [path, sample])[:3] == (0, "done\n", "")


def test_a_program_that_may_not_write_files(sample: Path, tmp_path: Path) -> None:
    other = shared(tmp_path / "other", SAMPLE, "libother.so")
    path = program(
        tmp_path,
        """
        static int run(int count, char **words) {
            struct rlimit none = {0, 0};
            setrlimit(RLIMIT_FSIZE, &none);
            CHECK(handle = dlopen(words[2], RTLD_NOW));
            int got = call("used", 1) + call("read_page", 3);
            if (count > 3)
                execl(words[0], words[0], words[1], words[2], NULL);
            return got != 5;
        }
        """,
    )
    for more in ([], ["again"]):
        assert observed(tmp_path, [path, sample, other, *more])[:3] == (0, "done\n", "")


def test_a_program_that_takes_away_the_right_to_write_code(sample: Path, tmp_path: Path) -> None:
    path = program(
        tmp_path,
        """
        static int run(int count, char **words) {
            char *page = (char *)((long)dlsym(handle, "used") & -4096);
            CHECK(!mprotect(page, 4096, PROT_READ | PROT_WRITE | PROT_EXEC));
            CHECK(!mprotect(page, 4096, PROT_READ | PROT_EXEC));
            return call("also_used", 1) != 4;
        }
        """,
    )
    for variables in ({}, {"GPUBLOAT_FUNCTIONS": "1"}):
        folder = tmp_path / f"{len(variables)}"
        folder.mkdir()
        status, text, error, found = observed(folder, [path, sample], **variables)
        assert (status, text, error) == (0, "done\n", "")
        assert {"used", "also_used"} <= entered(found, sample)


def test_writing_to_code_stays_an_error_of_the_program(sample: Path, tmp_path: Path) -> None:
    path = program(
        tmp_path,
        """
        static int run(int count, char **words) {
            char *page = (char *)((long)dlsym(handle, "used") & -4096);
            CHECK(!mprotect(page, 4096, PROT_READ | PROT_EXEC));
            *(volatile char *)dlsym(handle, "used") = 1;
            return 0;
        }
        """,
    )
    assert observed(tmp_path, [path, sample])[0] == -11


def test_relocations_of_code(tmp_path: Path) -> None:
    """The loader makes such code writable itself, and not so again: nothing is planted in it."""
    body = "".join(
        f".globl {name}\n.type {name},@function\n{name}: .cfi_startproc\nmovabs $value,%rax\nmov (%rax),%eax\nret\n"
        f".cfi_endproc\n.size {name},.-{name}\n"
        for name in ("used", "unused")
    )
    assembly = f"{body}.data\n.globl value\nvalue: .long 5\n.text\n"
    source = "__asm__(" + "".join(f'"{line}\\n"\n' for line in assembly.splitlines()) + ");"
    library = shared(tmp_path, source, "libmoved.so", "-Wl,-z,notext")
    path = program(tmp_path, 'static int run(int count, char **words) { return call("used", 0) != 5; }')
    status, text, error, found = observed(tmp_path, [path, library])
    assert (status, text, error) == (0, "done\n", "")
    (watched,) = [w for w in found.libraries if w.path == str(library)]
    assert (watched.problem, len(watched.sites)) == ("relocations of code", 0)


def test_symbols_of_functions_that_are_data(tmp_path: Path) -> None:
    """Without separate segments constants lie in an executable one; a breakpoint there would change them."""
    source = """
    int used(int x) { return x + 1; }
    __asm__(".section .rodata\\n.globl table\\n.type table,@function\\ntable: .long 7\\n.size table,4\\n.text");
    extern int table __attribute__((visibility("hidden")));
    int value(int x) { return table + x; }
    """
    library = shared(tmp_path, source, "libdata.so", "-Wl,-z,noseparate-code")
    path = program(tmp_path, 'static int run(int count, char **words) { return call("value", 1) != 8; }')
    status, text, error, found = observed(tmp_path, [path, library])
    assert (status, text, error) == (0, "done\n", "")
    assert "value" in entered(found, library)


def test_a_closed_library_whose_path_has_another_file_when_it_is_opened_again(tmp_path: Path) -> None:
    many = "".join(f"int other_{n}(int x) {{ return x * {n} + 3; }}\n" for n in range(20))
    first = shared(tmp_path / "first", "int value(int x) { return x + 1; }\n" + many)
    long = "int value(int x) { int s = x; " + "s = s * 3 + (s >> 2) - x; " * 40 + "return (s & 0) + x + 2; }"
    second = shared(tmp_path / "second", long)
    place = tmp_path / "libplace.so"
    place.write_bytes(first.read_bytes())
    (tmp_path / "new.so").write_bytes(second.read_bytes())
    path = program(
        tmp_path,
        """
        static int run(int count, char **words) {
            CHECK(call("value", 1) == 2);
            dlclose(handle);
            CHECK(!rename(words[2], words[1]));
            CHECK(handle = dlopen(words[1], RTLD_NOW));
            return call("value", 1) != 3;
        }
        """,
    )
    status, text, error, found = observed(tmp_path, [path, place, tmp_path / "new.so"])
    assert (status, text, error) == (0, "done\n", "")
    both = [w for w in found.libraries if w.path == str(place)]
    assert sorted(w.is_there() for w in both) == [False, True]


def test_a_handler_that_returns_does_not_lead_through_removed_code(copy: Copy, tmp_path: Path) -> None:
    path = program(
        tmp_path,
        """
        static void handler(int n) { }
        static int run(int count, char **words) { signal(SIGTRAP, handler); call("unused", 1); return 0; }
        """,
    )
    variables = {"GPUBLOAT_PLAN": str(copy.plan), "GPUBLOAT_GUARD": "report"}
    status, text, error, _ = observed(tmp_path, [path, copy.original], **variables)
    assert (status, text) == (-5, "")
    assert "function unused at offset" in error


def test_removed_code_comes_back_on_a_small_alternate_stack(copy: Copy, tmp_path: Path) -> None:
    path = program(
        tmp_path,
        """
        static int run(int count, char **words) {
            char *memory = mmap(NULL, 16 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            CHECK(!mprotect(memory, 8 * 4096, PROT_NONE));
            stack_t stack = {.ss_sp = memory + 8 * 4096, .ss_size = 8192};
            CHECK(!sigaltstack(&stack, NULL));
            return call("unused", 1) != 4 || call("read_page", 3) != 3;
        }
        """,
    )
    variables = {"GPUBLOAT_PLAN": str(copy.plan), "GPUBLOAT_GUARD": "restore"}
    status, text, error, found = observed(tmp_path, [path, copy.original], **variables)
    assert (status, text, error) == (0, "done\n", "")
    assert sorted(m.what for m in found.misses) == ["function", "page"]


@pytest.mark.parametrize("how", ["rename(words[2], words[1])", "setrlimit(RLIMIT_NOFILE, &none)", "unlink(words[1])"])
def test_gpu_code_comes_back_although_the_original_cannot_be_opened(tmp_path: Path, how: str) -> None:
    own = Copy(tmp_path / "copy")
    other = tmp_path / "other.so"
    other.write_bytes(b"\0" * own.original.stat().st_size)
    source = """
    static int run(int count, char **words) {
        struct rlimit none = {0, 0};
        CHECK(!HOW && !none.rlim_cur);
        for (int n = 0; n < 16; n++)
            CHECK(call("read_page", n) == n);
        return call("unused", 1) != 4;
    }
    """
    path = program(tmp_path, source.replace("HOW", how))
    variables = {"GPUBLOAT_PLAN": str(own.plan), "GPUBLOAT_GUARD": "restore"}
    assert observed(tmp_path, [path, own.original, other], **variables)[:3] == (0, "done\n", "")
