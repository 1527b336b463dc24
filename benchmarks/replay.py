"""How fast traces are replayed through each model, and how much memory loading them takes, beside the size of the file.

python benchmarks/replay.py SNAPSHOT... --out replay.csv

SNAPSHOT are memory snapshots of PyTorch with a history (or folders of them, every *.pickle inside). Events are those of
the trace; the start state is allocated first and not timed. Models take turns, and the best of `--rounds` counts, in
processor time: what else runs on the machine only makes it slower. Loading is a process of its own; its memory is what
the peak is above that of a process that loads a snapshot of one event. Exit 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# Bars: events a second on one core, and peak memory of loading over the size of the file.
CACHING = 500_000
STITCHING = 300_000
MEMORY_RATIO = 10
SMALL_FILE = 2 << 20  # below, the 10 MiB that writing any table takes outweigh the file
FEW_EVENTS = 2000  # below, there is too little to time


def memory_of(path: Path) -> int:
    """Bytes that loading a file takes at its peak, above those of loading hardly anything."""
    event = {"action": "alloc", "addr": 1 << 40, "size": 512, "stream": 0}
    with tempfile.TemporaryDirectory() as folder:
        tiny = Path(folder) / "tiny.pickle"
        tiny.write_bytes(pickle.dumps({"segments": [], "device_traces": [[event]]}))
        peaks = []
        for each in (tiny, path):
            child = subprocess.run(
                [sys.executable, __file__, "--load", str(each)], check=True, capture_output=True, text=True
            )
            peaks.append(int(child.stdout))
    return peaks[1] - peaks[0]


def speeds(path: Path, rounds: int) -> tuple[int, dict[str, float]]:
    """Number of events of the largest GPU's trace, and events a second by model."""
    from gpubloat import memory
    from gpubloat.memory.allocators import NAMES, Driver, choose, make
    from gpubloat.memory.replay import begin, pack, play
    from gpubloat.memory.trace import traces

    one = max(traces(memory.load(path)), key=lambda t: len(t.actions))
    if len(one.actions) < FEW_EVENTS:
        return len(one.actions), {}
    before = begin(one)
    best = dict.fromkeys(NAMES, float("inf"))
    for _ in range(rounds):
        for name in NAMES:
            model = make(name, Driver(), choose(name, {})[1])
            held = pack(model, before)
            started = time.process_time()
            play(one, model, held)
            best[name] = min(best[name], time.process_time() - started)
    return len(one.actions), {name: len(one.actions) / taken for name, taken in best.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("snapshot", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="CSV to write")
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        from gpubloat import memory

        memory.load(given.snapshot[0])
        status = Path("/proc/self/status").read_text("utf-8")  # not getrusage, which counts the parent's memory, too
        print(int(status.split("VmHWM:")[1].split()[0]) * 1024)
        return
    measure(given.snapshot, given.rounds, given.out)


def measure(given: list[Path], rounds: int, out: Path | None) -> None:
    import pandas as pd

    from gpubloat.errors import GpubloatError

    paths = [p for path in given for p in (sorted(path.rglob("*.pickle")) if path.is_dir() else [path])]
    rows = []
    for path in paths:
        try:
            n_events, found = speeds(path, rounds)
        except GpubloatError as error:
            print(f"{path.name}: left out: {error}")
            continue
        if n_events < FEW_EVENTS:
            print(f"{path.name}: left out: {n_events} events")
            continue
        size, peak = path.stat().st_size, memory_of(path)
        for name, speed in found.items():
            rows.append((path.name, size, n_events, name, speed, peak, peak / size))
    names = ["file", "file_bytes", "n_events", "model", "events_per_s", "load_peak_bytes", "load_ratio"]
    table = pd.DataFrame(rows, columns=names)
    if not len(table):
        sys.exit("no snapshot with a history")
    if out:
        table.to_csv(out, index=False, float_format="%.6g")
    print(f"\n{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f} after, best of {rounds}\n")
    shown = table.pivot(index="file", columns="model", values="events_per_s") / 1e6
    print("million events a second\n" + shown.to_string(float_format=lambda v: f"{v:.2f}"))
    bars = []
    for name, bar in (("caching", CACHING), ("stitching", STITCHING)):
        worst = table[table["model"] == name]["events_per_s"].min()
        bars.append((worst >= bar, f"{name}: {worst / 1e6:.2f} million events a second at least (bar {bar / 1e6:.1f})"))
    for row in table.drop_duplicates("file").itertuples():
        text = f"loading {row.file}: {row.load_peak_bytes >> 20} MiB, {row.load_ratio:.1f} x file (bar {MEMORY_RATIO})"
        if row.file_bytes >= SMALL_FILE:
            bars.append((row.load_ratio <= MEMORY_RATIO, text))
        else:
            print(f"      {text}; too small a file to judge")
    for is_met, text in bars:
        print(f"{'PASS' if is_met else 'FAIL'}  {text}")
    sys.exit(0 if all(is_met for is_met, _ in bars) else 1)


if __name__ == "__main__":
    main()
