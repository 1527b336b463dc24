"""What this machine can measure, and the remedy for what it cannot."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from gpubloat import __version__
from gpubloat.errors import MissingToolError, extra
from gpubloat.native import build, headers


class Check(NamedTuple):
    """One finding: state is ``yes``, ``no`` or ``limited``; the remedy is empty where nothing is wrong."""

    what: str
    state: str
    found: str
    remedy: str = ""


def examine() -> list[Check]:
    """All checks. Looks only; loads the driver library, sets nothing, needs no GPU."""
    return [_system(), _observation(), _memory(), _disk(), driver(), _nvml(), *_compilers(), _cupti(), *_packages()]


def _system() -> Check:
    found = f"gpubloat {__version__}, Python {platform.python_version()}, {sys.platform} {platform.machine()}"
    if sys.platform != "linux":
        return Check("system", "limited", found, "reading works everywhere; tracing and GPU work need Linux")
    return Check("system", "yes", found)


def _observation() -> Check:
    if (sys.platform, platform.machine(), platform.libc_ver()[0]) != ("linux", "x86_64", "glibc"):
        return Check("trace, exec, verify", "no", "not here", "they need Linux on x86-64 with glibc")
    if _compilers()[0].state != "yes":
        return Check("trace, exec, verify", "no", "no C compiler", "install gcc")
    return Check("trace, exec, verify", "yes", f"glibc {platform.libc_ver()[1]} on x86-64, and a C compiler")


def _memory() -> Check:
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    found = f"{size / 2**30:.0f} GiB, {os.cpu_count()} CPUs"
    if 0 < size < 2 << 30:
        return Check("memory", "limited", found, "scan --kernels wants 1 GB free; leave --kernels out")
    return Check("memory", "yes", found)


def _disk() -> Check:
    free = shutil.disk_usage(tempfile.gettempdir()).free
    found = f"{free / 2**30:.0f} GiB free for temporary files"
    if free < 4 << 30:
        return Check("disk", "limited", found, "set TMPDIR to a folder with more room: large wheel members go there")
    return Check("disk", "yes", found)


def driver() -> Check:
    """Whether CUDA starts here, and on how many GPUs."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        remedy = "scan, analysis, plots and notebooks work without; measuring a GPU needs the NVIDIA driver"
        return Check("CUDA driver", "no", "libcuda.so.1 not found", remedy)
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    code = cuda.cuInit(0)
    if code == 0:
        cuda.cuDeviceGetCount(ctypes.byref(count))
    found = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}, {count.value} GPUs"
    if not count.value:
        remedy = "the driver is there and no GPU is visible: look at CUDA_VISIBLE_DEVICES and nvidia-smi"
        return Check("CUDA driver", "limited", f"{found} (cuInit returned {code})", remedy)
    return Check("CUDA driver", "yes", found)


def _nvml() -> Check:
    names = {d.metadata["Name"].lower() for d in importlib.metadata.distributions() if d.metadata["Name"]}
    if "pynvml" in names:
        remedy = "pip uninstall pynvml; pip install nvidia-ml-py (same import, maintained)"
        return Check("NVML", "limited", "the inactive package pynvml is installed", remedy)
    if "nvidia-ml-py" not in names:
        return Check("NVML", "no", "nvidia-ml-py is not installed", "pip install nvidia-ml-py")
    found = f"nvidia-ml-py {importlib.metadata.version('nvidia-ml-py')}"
    import pynvml

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        remedy = "energies of a GPU need the NVIDIA driver, which brings NVML's library: look at nvidia-smi"
        return Check("NVML", "no", f"{found}, but NVML does not start: {error}", remedy)
    return Check("NVML", "yes", f"{found}, {count} GPUs")


def _compilers() -> list[Check]:
    checks = []
    for name, is_cpp, use in (("C", False, "tracing compiles its collector"), ("C++", True, "stitching is compiled")):
        try:
            checks.append(Check(f"{name} compiler", "yes", os.path.basename(build.compiler(is_cpp))))
        except MissingToolError:
            remedy = f"{use} on first use: install {'g++' if is_cpp else 'gcc'}"
            checks.append(Check(f"{name} compiler", "no", "none found", remedy))
    return checks


def _cupti() -> Check:
    try:
        headers.folders()
    except MissingToolError as error:
        remedy = f"tracing falls back to first touches of GPU code without: {error.hint}"
        return Check("CUPTI headers", "no", "not found", remedy)
    return Check("CUPTI headers", "yes", "found")


def _packages() -> list[Check]:
    wanted = {
        "jupyterlab": f"only for notebooks: {extra('notebooks')}",
        "distributed": "only for scans on a Dask cluster: pip install distributed",
    }
    checks = []
    for name, remedy in wanted.items():
        try:
            checks.append(Check(name, "yes", importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            checks.append(Check(name, "no", "not installed", remedy))
    return [*checks, _torch()]


def _torch() -> Check:
    """Read, not imported: that takes seconds."""
    use = "only for `energy` (or JAX), for `memory record` and stitching, and for `tensors` on a GPU"
    try:
        installed = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return Check("torch", "no", "not installed", f"{use}: pip install torch")
    try:
        about = Path(str(installed.locate_file("torch/version.py"))).read_text("utf-8")
    except OSError:  # built in place
        return Check("torch", "yes", installed.version)
    platforms = re.findall(r"^(cuda|hip)\b[^=\n]*= *['\"]([^'\"\n]+)", about, re.MULTILINE)
    if not platforms:
        remedy = "enough for `energy diff --times-only`; work on a GPU needs another: pytorch.org/get-started/locally"
        return Check("torch", "limited", f"{installed.version}, a build for CPUs alone", remedy)
    return Check("torch", "yes", f"{installed.version}, built for {' '.join(platforms[0])}")
