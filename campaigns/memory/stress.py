"""The installed stitching allocator under random work on a real GPU: every block carries a pattern until it is freed.

python stress.py [--operations 1000000] [--threads 3] [--share 0.5] [--seed 0] [--no-check]

Each thread has two streams of its own and a third that reads some blocks after they were given back, told to the
allocator by record_stream. A block is filled with its own number on its stream, and compared with it before it goes:
memory that two blocks share shows. Prints one JSON object; the exit status is 0 if nothing was found.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from typing import Any

MIB = 1 << 20


def size(chance: random.Random) -> int:
    """Bytes: mostly small, some of a few MiB, a few large; a multiple of 4."""
    kind = chance.random()
    if kind < 0.6:
        return 4 * chance.randrange(1, 16_000)
    if kind < 0.85:
        return 4 * chance.randrange(1, MIB)
    return 4 * chance.randrange(MIB // 2, MIB << chance.randrange(5))


def n_operations(stats: dict[str, int]) -> int:
    """Allocations and frees of all threads so far, temporaries too."""
    return stats["n_alloc"] + stats["n_free"]


def work(torch: Any, stitching: Any, n: int, most_bytes: int, seed: int, out: dict[str, Any]) -> None:
    """One thread: until all threads together have made n allocations and frees."""
    chance = random.Random(seed)
    own, reader = [torch.cuda.Stream() for _ in range(2)], torch.cuda.Stream()
    live: list[tuple[Any, int, Any]] = []  # tensor, its number, its stream
    held, number, n_none, n_read = 0, seed, 0, 0
    with torch.cuda.stream(reader):
        late = torch.zeros((), dtype=torch.int64, device="cuda")
    wrong = []
    for stream in own:
        with torch.cuda.stream(stream):
            wrong.append(torch.zeros((), dtype=torch.int64, device="cuda"))

    def hand_back(at: int) -> None:
        nonlocal held, n_read
        live[at], live[-1] = live[-1], live[at]
        tensor, mark, stream = live.pop()
        held -= 4 * tensor.numel()
        if chance.random() < 0.125:
            n_read += 1
            reader.wait_stream(stream)
            with torch.cuda.stream(reader):
                if chance.random() < 0.25:
                    torch.cuda._sleep(200_000)  # cycles: the block is given back long before it is read
                late.add_((tensor != mark).sum())
            tensor.record_stream(reader)
        else:
            with torch.cuda.stream(stream):
                wrong[own.index(stream)].add_((tensor != mark).sum())

    i = 0
    while i % 256 or n_operations(stitching.stats()) < n:
        i += 1
        if live and (held > most_bytes or chance.random() < 0.48):
            hand_back(chance.randrange(len(live)))
            continue
        stream, number = chance.choice(own), (number + 1009) % (1 << 31)
        try:
            with torch.cuda.stream(stream):
                tensor = torch.empty(size(chance) // 4, dtype=torch.int32, device="cuda").fill_(number)
        except torch.OutOfMemoryError:
            n_none += 1
            while len(live) > 4:
                hand_back(0)
            continue
        live.append((tensor, number, stream))
        held += 4 * tensor.numel()
        del tensor
    while live:
        hand_back(len(live) - 1)
    torch.cuda.synchronize()
    out[f"thread {seed}"] = {
        "n_steps": i, "n_none": n_none, "n_read_late": n_read, "n_wrong": int(sum(int(w) for w in wrong)),
        "n_wrong_late": int(late),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1_000_000, help="allocations and frees, temporaries too")
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.5, help="of the GPU's memory that is in use at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-check", action="store_true", help="without the allocator's own check")
    given = parser.parse_args(arguments)
    from gpubloat.memory import stitching as gpubloat_stitching

    stitching = gpubloat_stitching.install(check=not given.no_check)
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    most = int(total * given.share / given.threads)
    out: dict[str, Any] = {}
    begun = time.perf_counter()
    threads = [
        threading.Thread(target=work, args=(torch, stitching, given.operations, most, given.seed + i, out))
        for i in range(given.threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begun
    peak = stitching.stats()
    stitching.empty_cache()
    end = stitching.stats()
    found = {
        "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "seconds": round(seconds, 2),
        "n_operations": n_operations(end), "arguments": vars(given), "threads": out,
        "left_bytes": {name: end[name] for name in ("active_bytes", "reserved_bytes", "stitched_bytes")},
        "stats": peak,
    }  # fmt: skip
    clean = len(out) == given.threads and not any(t["n_wrong"] + t["n_wrong_late"] for t in out.values())
    clean &= not any(found["left_bytes"].values()) and not end["n_check_failures"] and not end["n_leaks"]
    print(json.dumps(found | {"clean": clean}))
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
