"""Llama 2 in Transformers, random bf16 weights; greedy generation from a fixed prompt with its cache.

python llama.py [--model 7b|13b] [--layers N] [--width N] [--tokens N] [--prompt N] [--batch N] [--gpus N]
                [--device cuda]

Prints two lines: a digest of the tokens, and the sum of the last logits. Weights are made on the GPU; nothing is read
from a disk or a network, and there is no tokenizer. With --gpus, that many processes share each layer (tensor parallel:
heads and inner columns are split, sums go over NCCL). Other ways were set aside: torch's `parallelize_module` takes the
host a millisecond an operator (13B on two H200s: 0.63 s a token), Transformers' tp_plan splits what it loads from a
checkpoint, and Accelerate's device_map puts whole layers on each GPU, where one waits for the other without NCCL.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import distributed, multiprocessing
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

SHAPES = {"7b": (32, 4096, 32, 11008), "13b": (40, 5120, 40, 13824)}  # layers, width, heads, inner width
VOCABULARY = 32000
COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def model_on(device: torch.device, given: argparse.Namespace) -> LlamaForCausalLM:
    """The same weights in every process."""
    layers, width, heads, inside = SHAPES[given.model]
    if given.width:
        width, heads, inside = given.width, max(given.width // 64, given.gpus), given.width * 2
    config = LlamaConfig(
        num_hidden_layers=given.layers or layers, hidden_size=width, num_attention_heads=heads,
        num_key_value_heads=heads, intermediate_size=inside, vocab_size=VOCABULARY, max_position_embeddings=4096,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        return LlamaForCausalLM(config).eval()


def split(model: LlamaForCausalLM, rank: int, gpus: int) -> None:
    """Keep this process's share of each layer. All processes have made all weights: nothing has to be sent."""

    def add(_module: torch.nn.Module, _given: object, part: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce(part)
        return part

    for name, module in model.model.layers.named_modules():
        own = name.rpartition(".")[2]
        if own in (*COLUMNS, *ROWS):
            share = module.weight.detach().chunk(gpus, dim=0 if own in COLUMNS else 1)[rank]
            module.weight = torch.nn.Parameter(share.clone(), requires_grad=False)
        if own in ROWS:
            module.register_forward_hook(add)


def generate(rank: int, given: argparse.Namespace, folder: str) -> None:
    device = torch.device(given.device, rank) if given.device == "cuda" else torch.device(given.device)
    if given.device == "cuda":
        torch.cuda.set_device(device)
    if given.gpus > 1:
        backend = "nccl" if given.device == "cuda" else "gloo"
        where = f"file://{folder}/meeting"
        distributed.init_process_group(backend, init_method=where, rank=rank, world_size=given.gpus)
    model = model_on(device, given)
    if given.gpus > 1:
        split(model, rank, given.gpus)
    prompt = torch.randint(0, VOCABULARY, (given.batch, given.prompt), generator=torch.Generator().manual_seed(1))
    wanted = GenerationConfig(
        max_new_tokens=given.tokens, do_sample=False, use_cache=True, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    prompt = prompt.to(device)
    with torch.inference_mode():
        for _ in range(2):  # the first meets kernels and allocations for the first time
            started = time.perf_counter()
            found = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=wanted)
            tokens = found.sequences[:, given.prompt :].cpu().numpy().astype("<i4")
    if rank == 0:
        print(f"steady {(time.perf_counter() - started) / given.tokens:.6f} s a token", file=sys.stderr)
        print("tokens", tokens.size, hashlib.sha256(tokens.tobytes()).hexdigest())
        print(repr(found.logits[-1].double().sum().item()))
    if given.gpus > 1:
        distributed.destroy_process_group()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=SHAPES, default="7b")
    parser.add_argument("--layers", type=int, help="fewer than the model has, for a small run")
    parser.add_argument("--width", type=int, help="a multiple of 64, for a small run")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    if given.device == "cuda" and torch.cuda.device_count() < given.gpus:
        sys.exit(f"{given.gpus} GPUs were asked for, {torch.cuda.device_count()} are visible")
    with tempfile.TemporaryDirectory() as folder:
        if given.gpus == 1:
            generate(0, given, folder)
            return
        # One host and no network: processes talk over the loopback device, data over NVLink without its multicast.
        for name, value in [("NCCL_SOCKET_IFNAME", "lo"), ("GLOO_SOCKET_IFNAME", "lo"), ("NCCL_NVLS_ENABLE", "0")]:
            os.environ.setdefault(name, value)
        multiprocessing.spawn(generate, (given, folder), nprocs=given.gpus)


if __name__ == "__main__":
    main()
