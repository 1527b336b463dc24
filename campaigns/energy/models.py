"""Models with random weights that the campaign measures: systems that compute the same in two ways.

Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Step = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Pair:
    """make : both systems. given : their input of a seed. tolerance : of `energy.diff`."""

    make: Callable[[], tuple[Step, Step]]
    given: Callable[[int], torch.Tensor]
    tolerance: float | None = None


def gpt2(attention: str) -> Step:
    """GPT-2 small of transformers, its logits; bf16. attention : eager or sdpa."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(attn_implementation=attention)
    model = GPT2LMHeadModel(config).to("cuda", torch.bfloat16).eval()

    def step(prompt: torch.Tensor) -> Any:
        with torch.no_grad():
            return model(input_ids=prompt, use_cache=False).logits

    return step


def prompts(seed: int, batch: int = 8, tokens: int = 512) -> torch.Tensor:
    """Token numbers of GPT-2."""
    return torch.randint(0, 50257, (batch, tokens), device="cuda", generator=_generator(seed))


def llama_block(attention: str) -> Step:
    """One layer of Llama-3-8B's shapes, its output; bf16."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=1000, attn_implementation=attention,
    )  # fmt: skip
    model = LlamaModel(config).to("cuda", torch.bfloat16).eval()

    def step(inputs: torch.Tensor) -> Any:
        with torch.no_grad():
            return model(inputs_embeds=inputs, use_cache=False).last_hidden_state

    return step


def hidden(seed: int) -> torch.Tensor:
    """What a layer of Llama-3-8B is given: 4 sequences of 2048."""
    return torch.randn(4, 2048, 4096, device="cuda", dtype=torch.bfloat16, generator=_generator(seed))


def compiled(step: Step, given: torch.Tensor) -> Step:
    """The same under torch.compile, compiled already."""
    fast: Step = torch.compile(step)
    fast(given)
    return fast


def _generator(seed: int) -> Any:
    return torch.Generator("cuda").manual_seed(1 + seed)


# Allowed of bf16 is 1 %. Twelve layers add up what it rounds in each: logits of two systems differed by 1.2 %.
OF_TWELVE_LAYERS = 0.02
PAIRS = {
    "gpt2 eager and sdpa attention": Pair(lambda: (gpt2("eager"), gpt2("sdpa")), prompts, OF_TWELVE_LAYERS),
    "llama block eager and sdpa attention": Pair(lambda: (llama_block("eager"), llama_block("sdpa")), hidden),
    "gpt2 and torch.compile": Pair(
        lambda: (gpt2("sdpa"), compiled(gpt2("sdpa"), prompts(0))), prompts, OF_TWELVE_LAYERS
    ),
}
FRAMEWORKS = {"gpt2 of torch and of jax": ("gpt2_torch.py", "gpt2_jax.py")}  # files of systems/
