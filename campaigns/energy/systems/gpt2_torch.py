"""GPT-2 in PyTorch, its logits; bf16, one attention kernel a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from weights import GPT2, HEAD, SMALL, drawn, n_layers


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    tokens, weights = drawn(seed, SMALL if small else GPT2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_device = {name: torch.tensor(w, device=device, dtype=torch.bfloat16) for name, w in weights.items()}
    return torch.tensor(tokens, device=device), on_device


@torch.no_grad()
def step(tokens: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    x = weights["words"][tokens] + weights["places"]
    for layer in range(n_layers(weights)):
        x = x + attention(norm(x, weights, f"{layer}.before"), weights, layer)
        h = functional.gelu(linear(norm(x, weights, f"{layer}.between"), weights, f"{layer}.up"), approximate="tanh")
        x = x + linear(h, weights, f"{layer}.down")
    return norm(x, weights, "last") @ weights["words"].t()


def attention(x: torch.Tensor, weights: dict[str, torch.Tensor], layer: int) -> torch.Tensor:
    q, k, v = (
        part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in linear(x, weights, f"{layer}.qkv").chunk(3, dim=-1)
    )
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return linear(mixed.transpose(1, 2).flatten(2), weights, f"{layer}.out")


def linear(x: torch.Tensor, weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return functional.linear(x, weights[name].t(), weights[f"{name}.bias"])


def norm(x: torch.Tensor, weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], weights[name], weights[f"{name}.bias"])
