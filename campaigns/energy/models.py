"""Models with random weights that the campaign measures: systems that compute the same in two ways.

Each pair is a function of a seed that returns two callables without arguments. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Pair = tuple[Callable[[], Any], Callable[[], Any]]


def gpt2(attention: str, batch: int = 8, tokens: int = 512) -> Callable[[], Any]:
    """GPT-2 small of transformers, its logits; bf16. attention : eager or sdpa."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(attn_implementation=attention)
    model = GPT2LMHeadModel(config).to("cuda", torch.bfloat16).eval()
    prompt = torch.randint(0, config.vocab_size, (batch, tokens), device="cuda", generator=_generator())

    def step() -> Any:
        with torch.no_grad():
            return model(input_ids=prompt, use_cache=False).logits

    return step


def llama_block(attention: str, batch: int = 4, tokens: int = 2048) -> Callable[[], Any]:
    """One layer of Llama-3-8B's shapes, its output; bf16."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=1000, attn_implementation=attention,
    )  # fmt: skip
    model = LlamaModel(config).to("cuda", torch.bfloat16).eval()
    inputs = torch.randn(batch, tokens, 4096, device="cuda", dtype=torch.bfloat16, generator=_generator())

    def step() -> Any:
        with torch.no_grad():
            return model(inputs_embeds=inputs, use_cache=False).last_hidden_state

    return step


def compiled(step: Callable[[], Any]) -> Callable[[], Any]:
    """The same under torch.compile, compiled already."""
    fast: Callable[[], Any] = torch.compile(step)
    fast()
    return fast


def _generator() -> Any:
    return torch.Generator("cuda").manual_seed(1)


PAIRS: dict[str, Callable[[], Pair]] = {
    "gpt2 eager and sdpa attention": lambda: (gpt2("eager"), gpt2("sdpa")),
    "llama block eager and sdpa attention": lambda: (llama_block("eager"), llama_block("sdpa")),
    "gpt2 and torch.compile": lambda: (gpt2("sdpa"), compiled(gpt2("sdpa"))),
}
