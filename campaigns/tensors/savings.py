"""Savings of real tensors: bits counted, packed by width, method and threshold, and general codecs on the same tensors.

Runs on a CPU in about five minutes: ``python campaigns/tensors/savings.py TENSORS OUT``, where TENSORS is what
``campaigns/tensors/fetch.py`` left. Needs ``pip install pcodec ml_dtypes``. The fp32 files are also cast to bf16 and
fp16 (to the nearest, ties to even): no public package with 16-bit weights of this kind was found. Sparse features are
made from a seed, with the shapes and densities of Cora, Citeseer and Pubmed (Yang et al., 2016, arXiv 1603.08861):
they stand for bags of words, whose words are not as frequent as each other.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pandas as pd
import zstandard
from pcodec import ChunkConfig, standalone

from gpubloat import tensors
from gpubloat.run import RunWriter

THRESHOLDS = [None, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99, 1.0]
DTYPES: dict[str, Any] = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}
SPARSE = {"cora-like": (2708, 1433, 0.0127), "citeseer-like": (3327, 3703, 0.0085), "pubmed-like": (19717, 500, 0.100)}


def inputs(folder: Path) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """Arrays by name, and the files they are from."""
    arrays, files = {}, []
    for path in sorted(folder.glob("*.npy")):
        values = np.load(path)
        arrays |= {f"{path.stem} {name}": values.astype(dtype) for name, dtype in DTYPES.items()}
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        files.append({"name": path.name, "bytes": path.stat().st_size, "sha256": digest})
    rng = np.random.default_rng(0)
    for name, (n, m, density) in SPARSE.items():
        shares = rng.zipf(1.6, m).astype(float) ** -1  # of documents that have a word
        shares = np.minimum(shares * density / shares.mean(), 0.5)
        there = rng.random((n, m)) < shares
        if name.startswith("pubmed"):  # TF-IDF weights, not 0 and 1
            counts = rng.geometric(0.5, (n, m)) / 64
            arrays[f"{name} fp32"] = (there * counts * -np.log(shares)).astype(np.float32)
        else:
            arrays[f"{name} fp32"] = there.astype(np.float32)
    return arrays, files


def _planes(array: np.ndarray) -> bytes:
    """All first bytes, then all second bytes..."""
    return np.ascontiguousarray(array.reshape(-1, 1).view(np.uint8).T).tobytes()


def _pcodec(array: np.ndarray) -> bytes:
    if array.dtype == ml_dtypes.bfloat16:  # which it does not know
        array = array.view(np.uint16)
    return bytes(standalone.simple_compress(array.reshape(-1), ChunkConfig()))


CODECS: dict[str, Callable[[np.ndarray], bytes]] = {
    "zstd 3": lambda array: zstandard.compress(array.tobytes(), 3),
    "zstd 3, byte planes": lambda array: zstandard.compress(_planes(array), 3),
    "pcodec 8": _pcodec,
}


def codecs(arrays: dict[str, np.ndarray]) -> pd.DataFrame:
    rows = []
    for name, array in arrays.items():
        for codec, compress in CODECS.items():
            n = len(compress(array))
            rows.append(("", name, codec, array.nbytes, n, 1 - n / array.nbytes))
    return pd.DataFrame(rows, columns=["file", "tensor", "codec", "raw_bytes", "packed_bytes", "saving_frac"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tensors", type=Path)
    parser.add_argument("out", type=Path)
    words = parser.parse_args()
    begin = time.perf_counter()
    arrays, files = inputs(words.tensors)
    counted = tensors.stats(arrays, thresholds=THRESHOLDS, digests=False)
    print(f"counted and packed: {time.perf_counter() - begin:.0f} s", flush=True)
    compressed = codecs(arrays)
    print(f"codecs: {time.perf_counter() - begin:.0f} s", flush=True)
    names = ["tensors", "bits", "savings"]
    with RunWriter("tensors", [*names, "codecs"], words.out, True) as writer:
        for name in names:
            writer.append(name, counted[name])
        writer.append("codecs", compressed)
        record = {key: value for key, value in counted.provenance.items() if key not in ("tables", "empty")}
        record |= {"command": "python campaigns/tensors/savings.py TENSORS OUT", "inputs": files, "workload": "savings"}
        writer.finish(record | {"seed": 0})


if __name__ == "__main__":
    main()
