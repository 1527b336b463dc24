"""What the steps of codec.py share: where results go, how things are timed, and plain rows to compare with."""

from __future__ import annotations

import csv
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpubloat.tensors.codebook import Codebook
from gpubloat.tensors.gpu import device, hostmemory
from gpubloat.tensors.gpu.torchuse import as_bytes

MIB = 1 << 20
REPEAT = 7
# Rows, columns, share of values that are not zero, of the public sets whose features these stand for.
FEATURES = {"cora": (2708, 1433, 0.0127), "citeseer": (3327, 3703, 0.0086), "pubmed": (19717, 500, 0.1)}


class Campaign:
    """Where results go, what time is left, and how long things take."""

    def __init__(self, out: Path, deadline_s: float, dry: bool) -> None:
        self.out, self.dry = out, dry
        self.until = time.monotonic() + deadline_s
        self.where = torch.device("cpu" if dry else "cuda:0")
        self.files: dict[str, tuple[Any, csv.DictWriter[str]]] = {}

    @property
    def late(self) -> bool:
        return time.monotonic() > self.until

    def write(self, name: str, row: dict[str, Any]) -> None:
        """Append to NAME.csv, whose columns are those of the first row and `failed`."""
        if name not in self.files:
            file = (self.out / f"{name}.csv").open("w", newline="", encoding="utf-8")
            writer = csv.DictWriter(file, [*row, *(["failed"] if "failed" not in row else [])], restval="")
            writer.writeheader()
            self.files[name] = file, writer
        file, writer = self.files[name]
        writer.writerow(row)
        file.flush()

    def fail(self, step: str, what: str) -> None:
        """Note the exception that is being handled, and go on."""
        self.write("failures", {"step": step, "what": what, "trace": traceback.format_exc()})

    def seconds(self, act: Callable[[], Any]) -> float:
        if self.dry:
            begun = time.perf_counter()
            act()
            return time.perf_counter() - begun
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        act()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1000

    def compare(self, name: str, about: dict[str, Any], variants: dict[str, tuple[int, Callable[[], Any]]]) -> None:
        """Time variants in turn. Each is (bytes that move, what to call); one that fails is written as such."""
        times: dict[str, list[float]] = {variant: [] for variant in variants}
        failed: dict[str, str] = {}
        for turn in range(1 + (2 if self.dry else REPEAT)):
            for variant, (_, act) in variants.items():
                if variant not in failed:
                    try:
                        took = self.seconds(act)
                    except Exception as error:
                        failed[variant] = f"{type(error).__name__}: {error}"[:300]
                        continue
                    if turn:
                        times[variant].append(took)
        for variant, (moved, _) in variants.items():
            found = times[variant] or [float("nan")]
            self.write(name, {
                **about, "variant": variant, "moved_bytes": moved, "median_s": statistics.median(found),
                "least_s": min(found), "most_s": max(found), "failed": failed.get(variant, ""),
            })  # fmt: skip


class HostRows:
    """Plain rows (n, row_bytes) in host memory that the GPU reads; on the CPU, just rows."""

    def __init__(self, campaign: Campaign, data: np.ndarray) -> None:
        self.n, self.row_bytes = data.shape
        self.pinned = None if campaign.dry else hostmemory.Pinned(data)
        self.tensor = torch.from_numpy(data.copy() if self.pinned is None else self.pinned.array)
        self.error = torch.zeros(1, dtype=torch.int32, device=campaign.where)

    def read(self, indices: Any, out: Any, row_bytes: int = 0) -> None:
        """Rows of `row_bytes`, counted from the begin of the memory."""
        size = row_bytes or self.row_bytes
        if self.pinned is None:
            out.copy_(self.tensor.reshape(-1)[: self.tensor.numel() // size * size].view(-1, size)[indices])
        else:
            device.read_rows(self.pinned.address, self.n * self.row_bytes // size, size, indices, out, self.error)

    def copy(self, out: Any) -> None:
        """The copy engine's way, from the begin."""
        if self.pinned is None:
            as_bytes(out).copy_(self.tensor.reshape(-1)[: out.numel() * out.element_size()])
        else:
            self.pinned.copy_to(out, 0, out.numel() * out.element_size())

    def close(self) -> None:
        if self.pinned is not None:
            self.pinned.close()


def features(name: str, seed: int = 0) -> np.ndarray:
    """A bag of words at the density of a public set, as 0 and 1; of Pubmed, as there, TF-IDF in rows of norm 1."""
    n, m, density = FEATURES[name]
    rng = np.random.default_rng(seed)
    share = 1 / (np.arange(m) + 20.0)
    share = np.minimum(share * density * m / share.sum(), 0.9)
    words = (rng.random((n, m)) < share).astype(np.float32)
    if name == "pubmed":
        words *= rng.integers(1, 9, (n, m)) * np.log(1 / share)
        words /= np.maximum(np.linalg.norm(words, axis=1, keepdims=True), 1e-9)
    return words.astype(np.float32)


def nothing_removed(book: Codebook) -> Codebook:
    """For the same rows, which it leaves all raw."""
    none = np.zeros_like(book.mask)
    return Codebook(book.chunk_bits, book.dtype, book.row_shape, none, none, none)


def same(a: Any, b: Any) -> bool:
    """Equal bits."""
    return torch.equal(as_bytes(a.contiguous()).cpu(), as_bytes(b.contiguous()).cpu())
