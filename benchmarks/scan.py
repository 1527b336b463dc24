"""How fast the static scan is, side by side with cuobjdump and with bare decompression, in one run.

python benchmarks/scan.py FOLDER --out scan.csv

FOLDER holds the unpacked CUDA libraries of PyTorch, libtorch_cuda.so and libcublasLt.so.* among them: `pip install
torch` and give site-packages, or unpack the wheels of data/measured/census-torch-2.14.1-cu13. Takes 10 minutes on two
cores, and 6 GB of memory, which is cuobjdump's. Every file is read once before, contenders take turns in alternating
order, and the median counts. Exit 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# Bars: how many times faster than cuobjdump, and how much memory.
LIST_RATIO = 60
KERNELS_RATIO = 6
LIST_MEMORY = 200 << 20
FAST = {"functions": False, "digests": False}


class Measured(NamedTuple):
    """One contender in one case."""

    case: str
    contender: str
    seconds: list[float]
    peak_bytes: int
    note: str = ""


# What a child process does: imports nothing that its task does not need, and times the task itself.


def find(path: str) -> dict[str, Any]:
    """List the elements of one library: the search alone."""
    from gpubloat.libraries import regions
    from gpubloat.libraries.elf import Elf
    from gpubloat.libraries.reader import Reader

    started = time.perf_counter()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        reader = Reader(path, data)
        found = regions.find(reader, Elf(reader))
        elements = [element for region in found.regions for element in region.elements]
        taken = time.perf_counter() - started
        count = len(elements)
        del reader, found, elements
        gc.collect()  # views of the map
    return {"seconds": taken, "n_elements": count}


def scan(path: str) -> dict[str, Any]:
    """The tables of the elements of one library or folder."""
    from gpubloat import libraries

    started = time.perf_counter()
    run = libraries.scan(path, **FAST)
    taken = time.perf_counter() - started
    return {"seconds": taken, "n_elements": run.provenance["tables"]["elements"]}


def kernels(path: str) -> dict[str, Any]:
    """The tables with all kernels of all elements."""
    from gpubloat import libraries

    started = time.perf_counter()
    run = libraries.scan(path, kernels=True, **FAST)
    taken = time.perf_counter() - started
    return {
        "seconds": taken,
        "n_kernels": run.provenance["tables"]["kernels"],
        "file_bytes": int(run["libraries"]["file_bytes"].sum()),
    }


def decompress(path: str) -> dict[str, Any]:
    """All compressed payloads of a file or folder, decompressed and dropped: what reading them whole costs at least."""
    import lz4.block
    import zstandard

    from gpubloat.libraries import inputs, regions
    from gpubloat.libraries.elf import MAGIC, Elf

    local: dict[int, Any] = {}
    total = taken = 0.0
    threads = os.cpu_count() or 1

    def one(payloads: list[tuple[memoryview, str, int]]) -> int:
        import threading

        unzstd = local.setdefault(threading.get_ident(), zstandard.ZstdDecompressor())
        return sum(
            len(
                unzstd.decompress(data, max_output_size=size)
                if form == "zstd"
                else lz4.block.decompress(data, uncompressed_size=size)
            )
            for data, form, size in payloads
        )

    with ThreadPoolExecutor(threads) as pool:
        for entry in inputs.discover([path]).files:
            with inputs.opened(entry) as reader:
                if bytes(reader.view(0, 4)) != MAGIC:
                    continue
                found = regions.find(reader, Elf(reader))
                payloads = [
                    (reader.view(e.offset + e.header_size, e.compressed_size), e.compression, e.uncompressed_size)
                    for region in found.regions
                    for e in region.elements
                    if e.kind in ("cubin", "ptx") and e.compression in ("zstd", "lz4")
                ]
                payloads += [
                    (reader.view(c.offset, c.size), "zstd", c.uncompressed_size)
                    for c in found.cubins
                    if c.compression == "zstd"
                ]
                batches = [payloads[i : i + 32] for i in range(0, len(payloads), 32)]
                started = time.perf_counter()
                total += sum(pool.map(one, batches))
                taken += time.perf_counter() - started
                del found, payloads, batches
                reader.release()
    return {"seconds": taken, "decompressed_bytes": int(total)}


TASKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "find": find,
    "scan": scan,
    "kernels": kernels,
    "decompress": decompress,
}


def command(arguments: list[str]) -> tuple[float, int, str]:
    """Run a program: wall time, peak resident bytes, and what it printed (of our own only)."""
    is_ours = arguments[0] == sys.executable
    started = time.perf_counter()
    output = subprocess.PIPE if is_ours else subprocess.DEVNULL
    child = subprocess.Popen(arguments, stdout=output, stderr=subprocess.DEVNULL, text=True)
    text = child.stdout.read() if child.stdout else ""
    _, status, usage = os.wait4(child.pid, 0)
    taken = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)  # it is reaped: nothing is left to wait for
    if child.returncode:
        sys.exit(f"{Path(arguments[0]).name} ends with {child.returncode}")
    return taken, usage.ru_maxrss * 1024, text


def ours(task: str, path: Path) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), "--task", task, str(path)]


def compete(
    case: str, contenders: dict[str, list[str]], rounds: int
) -> tuple[list[Measured], dict[str, dict[str, Any]]]:
    """Each contender `rounds` times, in alternating order, whole processes; also the last answers of ours."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    inner: dict[str, list[float]] = {}
    peak = dict.fromkeys(contenders, 0)
    answers: dict[str, dict[str, Any]] = {}
    for number in range(rounds):
        for name in list(contenders)[:: 1 if number % 2 == 0 else -1]:
            taken, memory, text = command(contenders[name])
            times[name].append(taken)
            peak[name] = max(peak[name], memory)
            if text:
                answers[name] = json.loads(text)
                inner.setdefault(name, []).append(answers[name]["seconds"])
    rows = []
    for name in contenders:
        rows.append(Measured(case, name, times[name], peak[name], "whole process"))
        if name in inner:
            rows.append(Measured(case, f"{name} (without start and import)", inner[name], peak[name]))
    return rows, answers


def warm(path: Path) -> None:
    """Read a file so that it is in the page cache."""
    with path.open("rb") as file:
        while file.read(16 << 20):
            pass


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="CSV to write")
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.task:
        print(json.dumps(TASKS[given.task](str(given.folder))))
        return
    measure(given.folder, given.rounds, given.out)


def measure(folder: Path, rounds: int, out: Path | None) -> None:
    import pandas as pd

    from tests import oracles

    tool = oracles.cuobjdump()
    libraries = {}
    for name in ("libtorch_cuda.so", "libcublasLt.so.*"):
        found = sorted(p for p in folder.rglob(name) if not p.is_symlink())
        if not found:
            sys.exit(f"{folder} has no {name}")
        libraries[name] = found[0]
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            warm(path)
    load = os.getloadavg()[0]
    torch, cublas = libraries.values()

    rows, _ = compete(
        f"elements of {torch.name}",
        {
            "cuobjdump -lelf": [tool, "-lelf", str(torch)],
            "regions.find": ours("find", torch),
            "scan": ours("scan", torch),
        },
        rounds,
    )
    here = [find(str(torch))["seconds"] for _ in range(max(rounds, 5))]
    rows.append(Measured(f"elements of {torch.name}", "regions.find, in this process", here, 0))
    for path in (torch, cublas):
        rows += compete(
            f"kernels of {path.name}",
            {
                "cuobjdump -symbols": [tool, "-symbols", str(path)],
                "scan --kernels": ours("kernels", path),
                "decompression alone": ours("decompress", path),
            },
            rounds,
        )[0]
    stack, answers = compete(
        "kernels of the whole folder",
        {"decompression alone": ours("decompress", folder), "scan --kernels": ours("kernels", folder)},
        max(rounds - 2, 1),
    )
    rows += stack
    table = pd.DataFrame(
        [
            {
                "case": row.case,
                "contender": row.contender,
                "median_s": statistics.median(row.seconds),
                "best_s": min(row.seconds),
                "worst_s": max(row.seconds),
                "n_rounds": len(row.seconds),
                "peak_rss_bytes": row.peak_bytes or None,
                "note": row.note,
            }
            for row in rows
        ]
    )
    table["peak_rss_bytes"] = table["peak_rss_bytes"].astype("Int64")
    first = table.groupby("case")["median_s"].transform("first")
    table["ratio"] = first / table["median_s"]
    inner = table["contender"].str.contains("without start")
    is_stack = table["case"] == "kernels of the whole folder"
    files = answers["scan --kernels"]["file_bytes"]
    unpacked = answers["decompression alone"]["decompressed_bytes"]
    for what, size in (("file", files), ("decompressed", unpacked)):
        table.loc[is_stack & inner, f"{what}_bytes_per_s"] = size / table["median_s"]
    if out:
        table.to_csv(out, index=False, float_format="%.6g")
    version = oracles.cuobjdump_version(tool)
    print(f"\n{os.cpu_count()} cores, load {load:.2f} before, cuobjdump {version}, warm page cache")
    shown = table.drop(columns="note").rename(columns={"peak_rss_bytes": "peak_MiB"})
    shown["peak_MiB"] = (table["peak_rss_bytes"] // 2**20).astype(object)
    print(shown.to_string(index=False, float_format=lambda value: f"{value:.3g}", na_rep=""))
    print(f"\n{files / 1e9:.2f} GB of files, {unpacked / 1e9:.2f} GB of decompressed code")
    sys.exit(0 if judge(table) else 1)


def judge(table: Any) -> bool:
    """Print the bars and whether they are met."""
    ratios = table.set_index(["case", "contender"])["ratio"]
    memory = table.set_index(["case", "contender"])["peak_rss_bytes"]
    elements = next(case for case in table["case"] if case.startswith("elements"))
    bars = [("list of elements", ratios[elements, "regions.find, in this process"], LIST_RATIO, "x cuobjdump -lelf")]
    for case in dict.fromkeys(c for c in table["case"] if c.startswith("kernels of lib")):
        ratio = ratios[case, "scan --kernels (without start and import)"]
        bars.append((case, ratio, KERNELS_RATIO, "x cuobjdump -symbols"))
    is_met = True
    for what, value, bar, unit in bars:
        is_met &= value >= bar
        print(f"{'PASS' if value >= bar else 'FAIL'}  {what}: {value:.1f} {unit} (bar {bar})")
    for contender in ("regions.find", "scan"):
        peak = int(memory[elements, contender])
        if contender == "regions.find":
            is_met &= peak < LIST_MEMORY
        verdict = "PASS" if peak < LIST_MEMORY else "FAIL"
        print(f"{verdict}  memory of {contender}: {peak >> 20} MiB (bar {LIST_MEMORY >> 20})")
    return bool(is_met)


if __name__ == "__main__":
    main()
