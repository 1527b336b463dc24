"""What packed rows are worth on one GPU: link, codec, other codecs, workloads; one CSV file for each step.

python campaigns/tensors/codec.py FOLDER --out OUT [--steps link,codec,peers,workloads,gnn] [--deadline SECONDS]
                                  [--dry]

FOLDER holds matrices as .npy, floating point. Rows are written as they are measured; what fails is a row, too. `gnn`
(see gnn.py) needs torch-geometric. With --dry everything is tiny and runs on the CPU, by the reference: the figures
mean nothing, the script is gone through.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gnn import gnn
from timing import FEATURES, MIB, REPEAT, Campaign, HostRows, features, nothing_removed, same

from gpubloat.run import provenance
from gpubloat.tensors import codebook, packing
from gpubloat.tensors.gpu import device
from gpubloat.tensors.gpu.offload import offload
from gpubloat.tensors.gpu.rowcache import RowCache
from gpubloat.tensors.gpu.torchuse import PackedTensor, as_bytes

STEPS = ("link", "codec", "peers", "workloads", "gnn")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PEERS = ("LZ4", "Snappy", "GDeflate", "Deflate", "Zstd", "Cascaded", "Bitcomp", "ANS")
# Codecs that code elements better than bytes, and how they call the elements of 4 and 2 bytes.
TYPED = {"Cascaded": {4: "<u4", 2: "<u2"}, "Bitcomp": {4: "<f4", 2: "<f2"}, "ANS": {4: "<f4", 2: "<f2"}}
PEER_BYTES, PEER_ROWS = 128 * MIB, 20_000
NO_CACHE = dict.fromkeys(("hits", "misses", "held", "capacity_bytes"), 0)
METHOD = {
    "time": "median of 7 after one that is not counted, variants in turn; CUDA events around what is called",
    "moved_bytes": "packed or plain bytes that are read from the source; raw_bytes is what arrives",
    "gather_raw": "the decoder on rows that are all stored raw: its own reads, nothing saved",
    "gather_plain": "a kernel that copies plain rows",
    "gnn": "medians of ten batches after two that are not counted, ways in turn; see campaigns/tensors/gnn.py",
    "repeated": "rows are repeated until the matrix does not fit into the caches of the GPU",
}


def link(campaign: Campaign, _: Path) -> None:
    """Copy engine and reads by the SMs, by size of the memory read from, order and length of rows."""
    sizes = [64 << 10, 1 * MIB] if campaign.dry else [64 * MIB, 1024 * MIB, 8192 * MIB]
    host = HostRows(campaign, np.broadcast_to(np.uint8(7), (sizes[-1] // 1024, 1024)))
    try:
        for size in sizes:
            out_bytes = min(size, 1024 * MIB)
            out = torch.empty(out_bytes, dtype=torch.uint8, device=campaign.where)
            variants: dict[str, tuple[int, Callable[[], Any]]] = {"copy": (out_bytes, lambda out=out: host.copy(out))}
            for row_bytes in (256, 512, 1024, 2048, 4096, 8192):
                n = out_bytes // row_bytes
                for order in ("sorted", "random"):
                    seed = torch.Generator().manual_seed(row_bytes)
                    # No row twice: the second time, it would come out of a cache.
                    chosen = torch.randperm(size // row_bytes, generator=seed)[:n].to(campaign.where)
                    chosen = chosen.sort().values if order == "sorted" else chosen
                    target = out[: n * row_bytes].view(n, row_bytes)
                    variants[f"read_{row_bytes}_{order}"] = (
                        n * row_bytes,
                        lambda chosen=chosen, target=target, row_bytes=row_bytes: host.read(chosen, target, row_bytes),
                    )
            campaign.compare("link", {"memory_bytes": size, "raw_bytes": out_bytes}, variants)
            if campaign.late:
                return
    finally:
        host.close()


def matrices(campaign: Campaign, folder: Path) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(name, dtype, matrix) of all files and features; files are cast, features only where that loses nothing."""
    for path in sorted(folder.glob("*.npy")):
        x = torch.from_numpy(np.load(path).astype(np.float32))
        x = x.reshape(len(x), -1)[: 200 if campaign.dry else None]
        yield from ((path.stem, name, x.to(dtype)) for name, dtype in DTYPES.items())
    for name in FEATURES:
        x = torch.from_numpy(features(name))[: 100 if campaign.dry else None]
        yield from ((name, kind, x.to(dtype)) for kind, dtype in DTYPES.items())


def codec(campaign: Campaign, folder: Path) -> None:
    """Each matrix and dtype: savings, and the ways to decode beside the ways to move plain rows."""
    for name, dtype, x in matrices(campaign, folder):
        if campaign.late:
            return
        try:
            one_codec(campaign, {"tensor": name, "dtype": dtype}, x)
        except Exception:
            campaign.fail("codec", f"{name} {dtype}")


def one_codec(campaign: Campaign, about: dict[str, Any], x: torch.Tensor) -> None:
    least = 0 if campaign.dry else 512 * MIB
    repeated = max(1, -(-least // (x.numel() * x.element_size())))
    begun = time.perf_counter()
    book = codebook.fit(x)
    fit_s = time.perf_counter() - begun
    x = x.repeat(repeated, 1)
    begun = time.perf_counter()
    packed = packing.pack(x, book)
    pack_s = time.perf_counter() - begun
    about |= {"n_rows": len(x), "row_bytes": packed.row_bytes, "raw_bytes": packed.raw_bytes, "repeated": repeated}
    held, raw_rows = PackedTensor(packed), PackedTensor(packing.pack(x, nothing_removed(book), "slots"))
    plain = HostRows(campaign, x.view(torch.uint8).numpy())
    if not campaign.dry:
        held.pin()
        raw_rows.pin()
    try:
        chosen = torch.randint(0, len(x), (len(x),), generator=torch.Generator().manual_seed(1))
        row_words = packed.row_words.astype(np.int64)
        in_order = 4 * int(row_words[chosen.numpy()].sum())
        chosen = chosen.to(campaign.where)
        out = torch.empty(x.shape, dtype=x.dtype, device=campaign.where)
        by_bytes = out.view(torch.uint8)
        whole = held.to(campaign.where)
        rows_equal = same(held.gather(chosen, out=out), x[chosen.cpu()])
        estimate = book.estimate
        assert estimate is not None
        campaign.write("savings", {
            **about, "chunk_bits": book.chunk_bits, "packed_bytes": packed.packed_bytes,
            "saving_frac": packed.saving_frac, "effective_32_frac": estimate.effective_32_frac,
            "effective_128_frac": estimate.effective_128_frac, "n_raw_rows": packed.n_raw_rows, "fit_s": fit_s,
            "pack_s": pack_s, "whole_equal": same(whole, x), "rows_equal": rows_equal,
        })  # fmt: skip
        del whole
        variants: dict[str, tuple[int, Callable[[], Any]]] = {
            "gather_packed": (in_order, lambda: held.gather(chosen, out=out, presorted=True)),
            "gather_packed_sorted": (in_order, lambda: held.gather(chosen, out=out)),
            "gather_raw": (packed.raw_bytes, lambda: raw_rows.gather(chosen, out=out, presorted=True)),
            "gather_plain": (packed.raw_bytes, lambda: plain.read(chosen, by_bytes)),
            "bulk_packed": (4 * len(packed.words), lambda: held.to(campaign.where)),
            "bulk_plain": (packed.raw_bytes, lambda: plain.copy(out)),
        }
        if not campaign.dry:
            on_gpu = x.cuda()
            rows = device.pack(on_gpu, book)
            held_rows = held.rows(campaign.where)
            variants |= {
                "bulk_zero_copy": (4 * len(packed.words), lambda: held_rows.decode(out)),
                "device_copy": (packed.raw_bytes, lambda: out.copy_(on_gpu)),
                "device_pack": (packed.raw_bytes, lambda: device.pack(on_gpu, book)),
                "device_count": (packed.raw_bytes, lambda: device.count(on_gpu)),
                "device_decode_rows": (in_order, lambda: rows.decode(out, chosen)),
            }
            for lane in (1, 2, 4):
                if book.chunk_bits < 64 or lane > 1:
                    variants[f"device_decode_{lane}"] = (
                        4 * rows.n_words, lambda lane=lane: rows.decode(out, words_per_lane=lane)
                    )  # fmt: skip
        campaign.compare("codec", about, variants)
        held.check()
    finally:
        for part in (held, raw_rows):
            part.unpin()
        plain.close()


def peers(campaign: Campaign, folder: Path) -> None:
    """nvCOMP's codecs: one item per row, and the whole matrix in chunks of 64 KiB; from and to memory of the GPU."""
    try:
        nvcomp: Any = importlib.import_module("nvidia.nvcomp")
    except ImportError as error:
        campaign.write("peers", {"tensor": "", "failed": str(error)})
        return
    failed = dict.fromkeys(("packed_bytes", "encode_s", "decode_s", "equal"), "")
    for name, dtype, x in matrices(campaign, folder):
        if dtype == "fp16":
            continue
        raw = x.contiguous().view(torch.uint8).to(campaign.where)
        raw = raw.repeat(max(1, PEER_BYTES // raw.numel()), 1)
        peers = [(algorithm, {}) for algorithm in PEERS]
        peers += [(algorithm, {"data_type": kinds[x.element_size()]}) for algorithm, kinds in TYPED.items()]
        for algorithm, options in peers:
            for items, given in (("whole", raw.view(1, -1)), ("rows", raw[:PEER_ROWS])):
                if campaign.late:
                    return
                about = {"tensor": name, "dtype": dtype, "algorithm": " ".join([algorithm, *options.values()])}
                about |= {"items": items, "n_rows": len(given) if items == "rows" else "", "row_bytes": raw.shape[1]}
                try:
                    found = one_peer(campaign, nvcomp, algorithm, options, given)
                except Exception as error:
                    found = {**failed, "failed": str(error)[:300]}
                campaign.write("peers", about | {"raw_bytes": given.numel()} | found)


def one_peer(
    campaign: Campaign, nvcomp: Any, algorithm: str, options: dict[str, str], given: torch.Tensor
) -> dict[str, Any]:
    """Size and median times of one codec of nvCOMP, one item per row of `given`, and whether its result is equal.

    All runs on one stream, as the events do. What decoding has to know of the packed items is read before it is timed.
    """
    n, size = given.shape
    stride = -(-size // 16) * 16  # items have to be aligned
    held = torch.zeros(n, stride, dtype=torch.uint8, device=given.device)
    held[:, :size] = given
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        about = {"uncomp_chunk_size": 65536, "cuda_stream": stream.cuda_stream}
        used = nvcomp.Codec(algorithm=algorithm, **about, **options)
        offsets = list(range(0, n * stride, stride))
        arrays = nvcomp.as_arrays(held.view(-1), offsets, [size] * n, stream.cuda_stream)
        encoded = used.encode(arrays)
        packed_bytes = sum(encoded.buffer_sizes)
        encode_s = statistics.median(campaign.seconds(lambda: used.encode(arrays)) for _ in range(2))
        config, decoded = used.decompression_config(encoded), used.decode(encoded)

        def decode() -> None:
            used.decode(encoded, out=decoded, decompression_config=config)

        decode()
        decode_s = statistics.median(campaign.seconds(decode) for _ in range(REPEAT))
        checked = range(0, n, max(1, n // 200))
        # As bytes: what some codecs give has another type.
        results = ((torch.as_tensor(decoded[i], device=given.device).view(torch.uint8), given[i]) for i in checked)
        equal = all(torch.equal(found, wanted) for found, wanted in results)
    return {"packed_bytes": packed_bytes, "encode_s": encode_s, "decode_s": decode_s, "equal": equal, "failed": ""}


def workloads(campaign: Campaign, _: Path) -> None:
    """An embedding table with popular rows, with and without a cache; a stack of linear layers out of host memory."""
    n, d, batch, caches = (
        (500, 64, 200, (20_000,)) if campaign.dry else (8_000_000, 128, 262_144, (16 * MIB, 128 * MIB))
    )
    table = (torch.randn(min(n, 1 << 20), d, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    table = table.repeat(-(-n // len(table)), 1)[:n]
    rng = np.random.default_rng(0)
    popular = rng.permutation(n)
    n_batches = 2 if campaign.dry else 24
    batches = [torch.from_numpy(popular[np.minimum(rng.zipf(1.2, batch), n) - 1]) for _ in range(n_batches)]
    book = codebook.fit(table[: 1 << 17])
    on_device = [b.to(campaign.where) for b in batches]
    staging = torch.empty(batch, d, dtype=table.dtype, pin_memory=not campaign.dry)

    def looked_up(
        kind: str, source: str, gather: Callable[[Any], Any], row_words: Any, stats: Callable[[], Any]
    ) -> None:
        rows = []
        for number, (indices, on_cpu) in enumerate(zip(on_device, batches)):
            took = campaign.seconds(lambda indices=indices: gather(indices))
            moved = "" if row_words is None else 4 * int(row_words[on_cpu.numpy()].sum(dtype=np.int64))
            rows.append({"batch": number, "batch_s": took, "moved_bytes": moved, **stats()})
        equal = same(gather(on_device[-1]), table[batches[-1]])
        about = {"workload": "embedding", "kind": kind, "source": source, "raw_bytes": as_bytes(staging).numel()}
        for row in rows:
            campaign.write("embedding", {**about, "equal": equal, **row})

    def cpu_gather_copy(indices: Any) -> Any:
        torch.index_select(table, 0, indices.cpu(), out=staging)
        return staging.to(campaign.where, non_blocking=True)

    for kind, chosen in (("packed", book), ("raw", nothing_removed(book))):
        held = PackedTensor(packing.pack(table, chosen))
        if not campaign.dry:
            held.pin()
        looked_up(kind, "no cache", held.gather, held.packed.row_words, lambda: NO_CACHE)
        for cache_bytes in caches:
            cache = RowCache(held, cache_bytes, device=campaign.where)
            looked_up(kind, f"cache of {cache_bytes / MIB:.0f} MiB", cache.gather, None, cache.stats)
        held.unpin()
        if campaign.late:
            return
    looked_up("cpu_gather_copy", "no cache", cpu_gather_copy, None, lambda: NO_CACHE)
    width, depth = (32, 3) if campaign.dry else (8192, 16)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(depth)])
    model = model if campaign.dry else model.bfloat16()
    plain = [HostRows(campaign, layer.weight.detach().view(torch.uint8).numpy()) for layer in model]
    x = {rows: torch.randn(rows, width).to(campaign.where, model[0].weight.dtype) for rows in (1, 256, 4096)}
    moved = sum(p.n * p.row_bytes for p in plain)
    by_copies = copied_layers(campaign, plain, torch.empty(2, width, width, dtype=model[0].weight.dtype))
    with torch.no_grad():
        offload(model, campaign.where)
        packed = sum(4 * len(layer.weight.packed.words) for layer in model)
        for rows, y in x.items():
            about = {"workload": "linear", "rows": rows, "raw_bytes": moved, "equal": same(by_copies(y), model(y))}
            campaign.compare("linear", about, {
                "packed": (packed, lambda y=y: model(y)), "copied": (moved, lambda y=y: by_copies(y)),
            })  # fmt: skip


def copied_layers(campaign: Campaign, plain: list[HostRows], buffers: Any) -> Callable[[Any], Any]:
    """What offloaded layers do, with plain weights: the next one is copied while one computes."""
    buffers = buffers.to(campaign.where)

    def on_cpu(y: Any) -> Any:
        for host in plain:
            host.copy(buffers[0])
            y = torch.nn.functional.linear(y, buffers[0])
        return y

    if campaign.dry:
        return on_cpu
    side = torch.cuda.Stream()
    ready, free = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))

    def start(number: int) -> None:
        with torch.cuda.stream(side):
            side.wait_event(free[number % 2])
            plain[number].copy(buffers[number % 2])
            ready[number % 2].record(side)

    def forward(y: Any) -> Any:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        start(0)
        for number in range(len(plain)):
            if number + 1 < len(plain):
                start(number + 1)
            main.wait_event(ready[number % 2])
            y = torch.nn.functional.linear(y, buffers[number % 2])
            free[number % 2].record(main)
        return y

    return forward


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--deadline", type=float, default=1e9)
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    steps = given.steps.split(",")
    if not set(steps) <= set(STEPS):
        parser.error(f"steps are {', '.join(STEPS)}")
    given.out.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(given.out, given.deadline, given.dry)
    about = provenance("campaigns/tensors/codec.py", METHOD, [])
    if not given.dry:
        found = torch.cuda.get_device_properties(0)
        about["gpus"] = [{"name": found.name, "memory_bytes": found.total_memory, "sms": found.multi_processor_count}]
    (given.out / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    acts = dict(zip(STEPS, (link, codec, peers, workloads, gnn)))
    for step in steps:
        begun = time.monotonic()
        try:
            acts[step](campaign, given.folder)
        except Exception:
            campaign.fail(step, "")
        print(f"{step}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
