"""A 65 M-parameter encoder-decoder Transformer (the shapes of "Attention Is All You Need", base), random tokens.

python transformer.py train|infer [--steps N] [--batch N] [--device cuda]
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("mode", choices=["train", "infer"])
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--device", default="cuda")
given = parser.parse_args()

VOCABULARY, WIDTH, LENGTH = 37000, 512, 64
torch.manual_seed(0)


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.core = nn.Transformer(WIDTH, 8, 6, 6, 2048, dropout=0.1, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        inside = self.core(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True)
        return inside @ self.embed.weight.T  # weights shared with the embedding, as in the paper


model = Translator().to(given.device)
source = torch.randint(0, VOCABULARY, (given.batch, LENGTH), device=given.device)
target = torch.randint(0, VOCABULARY, (given.batch, LENGTH), device=given.device)
if given.mode == "train":
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98))
    for _ in range(given.steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    print(repr(loss.item()))
else:
    model.eval()
    with torch.inference_mode():
        for _ in range(given.steps):
            value = model(source, target).double().sum()
    print(repr(value.item()))
