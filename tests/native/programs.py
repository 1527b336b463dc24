"""Small libraries and programs for tests of the native code, built by the C compiler."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HAS_COMPILER = bool(shutil.which("cc") or shutil.which("gcc"))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER or sys.platform != "linux", reason="needs Linux and a C compiler")

# Three functions, a constructor, an indirect function, and GPU code of 16 pages (content: the number of the page).
SAMPLE = r"""
#include <stddef.h>
int used(int x) { return x + 1; }
int unused(int x) { return x * 3 + 1; }
int also_used(int x) { return used(x) * 2; }
int constructed;
static int helper(void) { return 5; }
__attribute__((constructor)) void start(void) { constructed = helper(); }
static int chosen(int x) { return x + 100; }
static int (*resolve(void))(int) { return chosen; }
int indirect(int) __attribute__((ifunc("resolve")));
int call_indirect(int x) { return indirect(x); }
__attribute__((section(".nv_fatbin,\"a\",@progbits#"), aligned(4096)))
const unsigned char gpu_code[16 * 4096] = {
#define P(n) [n * 4096 + 7] = n
P(0), P(1), P(2), P(3), P(4), P(5), P(6), P(7), P(8), P(9), P(10), P(11), P(12), P(13), P(14), P(15)};
__attribute__((section(".ldata,\"aw\",@progbits#"), aligned(4096)))
const unsigned char late_code[4 * 4096] = {P(0), P(1), P(2), P(3)};
int read_late(int n) { return ((volatile const unsigned char *)late_code)[n * 4096 + 7]; }
int read_page(int n) { return ((volatile const unsigned char *)gpu_code)[n * 4096 + 7]; }
"""


def shared(folder: Path, source: str, name: str = "libsample.so", *flags: str) -> Path:
    """Compile `source` into a shared library."""
    folder.mkdir(parents=True, exist_ok=True)
    code, library = folder / f"{name}.c", folder / name
    code.write_text(source)
    command = ["cc", "-O1", "-fno-inline", "-fno-ipa-icf", "-shared", "-fPIC", *flags, "-o", str(library), str(code)]
    subprocess.run(command, check=True)
    return library
