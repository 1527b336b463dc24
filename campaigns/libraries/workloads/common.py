"""What the workload scripts share: their arguments, and a loop that prints the last number and the time of a step.

Standard library only: the scripts are run as files, and each imports one framework at most.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

WARM = 11  # steps that do not count: first uses of kernels, allocations, compilation


def arguments(steps: int, batch: int) -> argparse.ArgumentParser:
    """Mode, steps and batch; a script adds what only it has."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["train", "infer"])
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch", type=int, default=batch)
    return parser


def run(step: Callable[[int], Any], steps: int, number: Callable[[Any], float]) -> None:
    """Print the number of the last step; on stderr, the mean time of the steps after the first 11.

    `number` waits for the device: it is called where the time starts and where it ends.
    """
    value, started = None, 0.0
    for at in range(steps):
        value = step(at)
        if at == WARM - 1:
            number(value)
            started = time.perf_counter()
    print(repr(number(value)))
    if steps > WARM:
        print(f"steady {(time.perf_counter() - started) / (steps - WARM):.6f} s a step", file=sys.stderr)
