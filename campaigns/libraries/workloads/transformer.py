"""A 65 M-parameter encoder-decoder Transformer (the shapes of "Attention Is All You Need", base), random tokens.

Prints one number: the last loss, or the sum of the last logits.

python transformer.py train|infer [--steps N] [--batch N] [--device cuda]
"""

from __future__ import annotations

import torch
from common import arguments, run
from torch import nn

parser = arguments(steps=10, batch=16)
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
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98))


def train(_: int) -> torch.Tensor:
    optimizer.zero_grad()
    value = nn.functional.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())
    value.backward()
    optimizer.step()
    return value


@torch.inference_mode()
def infer(_: int) -> torch.Tensor:
    return model(source, target).double().sum()


model.train(given.mode == "train")
run(train if given.mode == "train" else infer, given.steps, torch.Tensor.item)
