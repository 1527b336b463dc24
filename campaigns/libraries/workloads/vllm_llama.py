"""Llama 2 in vLLM, random weights in bf16: greedy generation from a fixed prompt of token numbers.

python vllm_llama.py [--layers N] [--tokens N] [--prompt N] [--batch N]

Prints two lines: a digest of the tokens, and the sum of the log-probabilities of the tokens taken. Written for vLLM
0.25.1: the model is a config.json alone (load_format dummy), there is no tokenizer and no network. Where vLLM cannot be
imported, one sentence says so and the exit status is 1. Triton's kernels are compiled on the first run of a machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import struct
import sys
import tempfile
import time
from pathlib import Path

VOCABULARY = 32000
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CACHES = Path(tempfile.gettempdir()) / "gpubloat-vllm"  # kept from run to run
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_CACHE_ROOT": str(CACHES), "TRITON_CACHE_DIR": str(CACHES / "triton"),
    "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    given = parser.parse_args()
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        sys.exit(f"vLLM cannot be imported: {error}")
    draw = random.Random(1)
    drawn = [[draw.randrange(VOCABULARY) for _ in range(given.prompt)] for _ in range(given.batch)]
    prompts = [{"prompt_token_ids": tokens} for tokens in drawn]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": given.layers}), "utf-8")
        # A cache of fixed size: by default it fills the GPU, and no saving of its memory could be seen.
        model = LLM(
            model=folder, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", enforce_eager=True,
            max_model_len=1024, kv_cache_memory_bytes=1 << 30, seed=0, max_num_seqs=16,
        )  # fmt: skip
        wanted = SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True, detokenize=False, logprobs=1)
        for _ in range(2):  # the first meets kernels and allocations for the first time
            started = time.perf_counter()
            found = [request.outputs[0] for request in model.generate(prompts, wanted, use_tqdm=False)]
    print(f"steady {(time.perf_counter() - started) / given.tokens:.6f} s a token", file=sys.stderr)
    tokens = [token for output in found for token in output.token_ids]
    print("tokens", len(tokens), hashlib.sha256(struct.pack(f"<{len(tokens)}i", *tokens)).hexdigest())
    print(repr(float(sum(output.cumulative_logprob for output in found))))


if __name__ == "__main__":
    main()
