"""Decoder-only language models with random weights, and what fine-tuning does to save memory: L, R and O.

L: low-rank adapters (LoRA) on the projections of attention; everything else is frozen. R: each layer is computed again
in the backward pass. O: parameters live in pinned memory of the host and are copied for each use of a layer; the
optimizer runs on the CPU. Shapes are those of the papers of GPT-2, OPT and GPT-NeoX; positions are learned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

RANK = 16


@dataclass(frozen=True)
class Shape:
    n_layers: int
    width: int
    n_heads: int
    vocabulary: int
    length: int


SHAPES = {
    "GPT-2": Shape(12, 768, 12, 50257, 1024),
    "OPT-1.3B": Shape(24, 2048, 32, 50272, 2048),
    "OPT-13B": Shape(40, 5120, 40, 50272, 2048),
    "GPT-NeoX-20B": Shape(44, 6144, 64, 50432, 2048),
    "tiny": Shape(2, 64, 4, 500, 64),
}


class Projection(nn.Linear):
    """A linear layer, with a low-rank adapter where `rank` is not 0."""

    def __init__(self, inside: int, outside: int, rank: int) -> None:
        super().__init__(inside, outside)
        self.down = nn.Parameter(torch.randn(rank, inside) * 0.02) if rank else None
        self.up = nn.Parameter(torch.zeros(outside, rank)) if rank else None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self.down is None or self.up is None else out + F.linear(F.linear(x, self.down), self.up)


class Layer(nn.Module):
    def __init__(self, shape: Shape, rank: int) -> None:
        super().__init__()
        self.n_heads = shape.n_heads
        self.before, self.between = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = Projection(shape.width, 3 * shape.width, rank)
        self.out = Projection(shape.width, shape.width, rank)
        self.wide, self.narrow = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.attention(self.before(x)).view(batch, length, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class Decoder(nn.Module):
    """`strategy` is N, or letters of L, R, O. Parameters are of `dtype`, on `device`, or pinned on the host with O."""

    def __init__(self, shape: Shape, strategy: str, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.device, self.is_recomputed, self.is_offloaded = device, "R" in strategy, "O" in strategy
        rank = RANK if "L" in strategy else 0
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                self.tokens = nn.Embedding(shape.vocabulary, shape.width)
                self.places = nn.Embedding(shape.length, shape.width)
                self.last = nn.LayerNorm(shape.width)
            self.layers = nn.ModuleList()
            for _ in range(shape.n_layers):
                with torch.device(device):
                    layer = Layer(shape, rank)
                self.layers.append(to_host(layer) if self.is_offloaded else layer)
        finally:
            torch.set_default_dtype(default)
        nn.init.normal_(self.tokens.weight, std=0.02)
        if rank:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(name.endswith(("down", "up")))

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy of the next token; `tokens` is (batch, length)."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        if not x.requires_grad:
            x.requires_grad_()  # else layers that are computed again have no gradient
        for layer in self.layers:
            x = (
                checkpoint(self.apply_layer, layer, x, use_reentrant=False)
                if self.is_recomputed
                else self.apply_layer(layer, x)
            )
        logits = self.last(x)[:, :-1] @ self.tokens.weight.T
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def apply_layer(self, layer: nn.Module, x: Tensor) -> Tensor:
        if not self.is_offloaded:
            return layer(x)
        here = {name: p.to(self.device, non_blocking=True) for name, p in layer.named_parameters()}
        return torch.func.functional_call(layer, here, (x,))


def to_host(layer: nn.Module) -> nn.Module:
    is_pinned = torch.cuda.is_available()
    for name, parameter in list(layer.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        host = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=is_pinned).copy_(parameter.data)
        setattr(layer.get_submodule(owner), leaf, nn.Parameter(host))
    return layer
