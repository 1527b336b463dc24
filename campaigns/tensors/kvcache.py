"""A KV cache whose older tokens stay packed in host memory, and what that costs beside the caches of transformers.

    python campaigns/tensors/kvcache.py --out FOLDER [--layers 24] [--hidden 2048] [--heads 16]
                                        [--prompt 4096] [--new 64]

About a minute on a GPU. Without one it runs on the CPU: give it small numbers. Random weights; FOLDER gets kvcache.csv:
time per token, peak memory of the GPU, bytes of the packed tokens, whether they come back bit by bit, and whether the
new tokens are those of the first run, which is plain, warms the GPU up and is left out: a second plain one shows
whether the model itself repeats them.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS repeats its bits on one stream alone
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, DynamicLayer

from gpubloat import tensors

BLOCK = 512


class PackedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer: older tokens are packed, as many at a time as there are whole blocks of."""

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        super().lazy_initialization(key_states, value_states)
        self.blocks: list[list[tensors.PackedTensor]] = []  # of [keys, values]
        self.codebooks: list[tensors.Codebook] = []  # fitted to the first block
        self.is_lossless = True

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        new = super().update(key_states, value_states, *args, **kwargs)
        old = [[self.unpacked(packed) for packed in block] for block in self.blocks]
        found = [torch.cat([*parts, now], dim=-2) for *parts, now in zip(*old, new, strict=True)]
        n_blocks = self.keys.shape[-2] // BLOCK - 1  # the newest block stays as it is
        if n_blocks > 0:
            self.pack_oldest(n_blocks * BLOCK)
        return found[0], found[1]

    def pack_oldest(self, n: int) -> None:
        rows = [x[..., :n, :].transpose(1, 2).flatten(0, 1).flatten(1).cpu() for x in (self.keys, self.values)]
        self.codebooks = self.codebooks or [tensors.fit(x) for x in rows]
        block = [tensors.PackedTensor(tensors.pack(x, book)) for x, book in zip(rows, self.codebooks, strict=True)]
        block = [held.pin() if self.keys.is_cuda else held for held in block]
        self.blocks.append(block)
        for packed, x in zip(block, (self.keys, self.values), strict=True):
            self.is_lossless &= torch.equal(self.unpacked(packed), x[..., :n, :])
        self.keys, self.values = (x[..., n:, :].clone() for x in (self.keys, self.values))

    def unpacked(self, packed: tensors.PackedTensor) -> Any:
        batch, heads, _, width = self.keys.shape
        return packed.to(self.device).view(batch, -1, heads, width).transpose(1, 2)

    def get_seq_length(self) -> int:
        older = (
            sum(len(keys.packed.row_words) // len(self.keys) for keys, _ in self.blocks) if self.is_initialized else 0
        )
        return super().get_seq_length() + older


def decoded(model: Any, prompt: Any, n_new: int, cache: Any) -> dict[str, Any]:
    """Greedy decoding with a cache: the tokens, and seconds per token after the first two."""
    on_gpu = prompt.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    token, tokens, started = prompt, [], 0.0
    for i in range(n_new):
        if i == 2:
            started = time.perf_counter()
        logits = model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(token.flatten().tolist())  # waits for the GPU
    seconds = (time.perf_counter() - started) / max(1, n_new - 2)
    return {"tokens": tokens, "token_s": seconds, "gpu_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--new", type=int, default=64)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=given.hidden, intermediate_size=3 * given.hidden, num_hidden_layers=given.layers,
        num_attention_heads=given.heads, num_key_value_heads=given.heads, vocab_size=32000,
        max_position_embeddings=given.prompt + given.new,
    )  # fmt: skip
    with torch.device(device):  # random weights are made where they are used
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    prompt = torch.randint(0, config.vocab_size, (1, given.prompt), device=device)
    caches = {"": DynamicCache(), "plain": DynamicCache(), "packed": Cache(layer_class_to_replicate=PackedLayer)}
    if device == "cuda":
        caches["offloaded"] = DynamicCache(offloading=True)
    rows, first = [], None
    with torch.inference_mode():
        for name, cache in caches.items():
            found = decoded(model, prompt, given.new, cache)
            tokens = found.pop("tokens")
            first = first or tokens
            if not name:
                continue
            packed = [p.packed for layer in cache.layers for block in getattr(layer, "blocks", []) for p in block]
            rows.append({"cache": name, **found, "is_equal": tokens == first,
                         "is_lossless": all(getattr(layer, "is_lossless", True) for layer in cache.layers),
                         "raw_bytes": sum(p.raw_bytes for p in packed),
                         "packed_bytes": sum(p.packed_bytes for p in packed)})  # fmt: skip
            print(rows[-1], flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    with (given.out / "kvcache.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
