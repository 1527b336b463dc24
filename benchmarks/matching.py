"""How long it takes to match GPT-2 with the same model written another way: random weights, on the CPU.

    python benchmarks/matching.py [--tokens 64,256,1024]

A: eager attention, GELU spelled out, one projection for queries, keys and values, weights (in, out). B: fused
attention, GELU of one operator, three projections, weights (out, in). Both are captured on two inputs; the matching
alone is timed.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch.nn import functional

from gpubloat.energy.capture import capture
from gpubloat.energy.match.regions import match

LAYERS, WIDTH, HEADS, WORDS = 12, 768, 12, 5000


def weights() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    shapes = {"qkv": 3 * WIDTH, "out": WIDTH, "up": 4 * WIDTH}
    layers = []
    for _ in range(LAYERS):
        layer = {name: torch.randn(WIDTH, n) / WIDTH**0.5 for name, n in shapes.items()}
        layer["down"] = torch.randn(4 * WIDTH, WIDTH) / (4 * WIDTH) ** 0.5
        layers.append(layer | {f"{name}_bias": torch.randn(w.shape[1]) * 0.1 for name, w in layer.items()})
    return layers


def heads(x: Any) -> Any:
    return x.view(x.shape[0], x.shape[1], HEADS, WIDTH // HEADS).transpose(1, 2)


def model_a(layers: list[dict[str, Any]], table: Any, tokens: Any) -> Any:
    x = functional.embedding(tokens, table)
    n = x.shape[1]
    mask = torch.full((n, n), float("-inf")).triu(1)
    for layer in layers:
        y = functional.layer_norm(x, (WIDTH,))
        flat = torch.addmm(layer["qkv_bias"], y.view(-1, WIDTH), layer["qkv"]).view(*x.shape[:2], 3 * WIDTH)
        q, k, v = (heads(part) for part in flat.split(WIDTH, dim=2))
        scores = torch.softmax(q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5 + mask, -1)
        merged = (scores @ v).transpose(1, 2).reshape(-1, WIDTH)
        x = x + torch.addmm(layer["out_bias"], merged, layer["out"]).view(x.shape)
        y = functional.layer_norm(x, (WIDTH,)).view(-1, WIDTH)
        y = torch.addmm(layer["up_bias"], y, layer["up"])
        y = 0.5 * y * (1.0 + torch.tanh(0.7978845608028654 * (y + 0.044715 * torch.pow(y, 3.0))))
        x = x + torch.addmm(layer["down_bias"], y, layer["down"]).view(x.shape)
    return functional.layer_norm(x, (WIDTH,)) @ table.t()


def model_b(layers: list[dict[str, Any]], table: Any, tokens: Any) -> Any:
    x = functional.embedding(tokens, table)
    for layer in layers:
        y = functional.layer_norm(x, (WIDTH,))
        parts = zip(layer["qkv"].t().split(WIDTH), layer["qkv_bias"].split(WIDTH))
        q, k, v = (heads(functional.linear(y, w, b)) for w, b in parts)
        merged = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + functional.linear(merged, layer["out"].t(), layer["out_bias"])
        y = functional.linear(functional.layer_norm(x, (WIDTH,)), layer["up"].t(), layer["up_bias"])
        x = x + functional.linear(functional.gelu(y, approximate="tanh"), layer["down"].t(), layer["down_bias"])
    return functional.linear(functional.layer_norm(x, (WIDTH,)), table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", default="64,256,1024")
    layers, table = weights(), torch.randn(WORDS, WIDTH) * 0.02
    for n in map(int, parser.parse_args().tokens.split(",")):
        inputs = [torch.randint(0, WORDS, (1, n), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
        begun = time.perf_counter()
        with torch.no_grad():
            a, b, *again = (capture(fn, layers, table, x) for x in inputs for fn in (model_a, model_b))
        captured = time.perf_counter()
        found = match(a, b, (again[0], again[1]))
        seconds = time.perf_counter() - captured
        differ = sum(not region.is_same for region in found.regions)
        largest = max(len(region.a_ops) + len(region.b_ops) for region in found.regions)
        print(
            f"{n:5} tokens: {len(a.ops)} x {len(b.ops)} operators, captured four times in {captured - begun:.1f} s, "
            f"matched in {seconds:.2f} s: {len(found.regions)} regions, {differ} differ, "
            f"the largest of {largest} operators of both sides, "
            f"{len(found.a_rest)} + {len(found.b_rest)} operators left over, outputs equal: {found.outputs_equal}",
            flush=True,
        )
        for one in (a, b, *again):
            one.close()


if __name__ == "__main__":
    main()
