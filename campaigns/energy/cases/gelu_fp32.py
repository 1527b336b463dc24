"""GELU as in gelu.py, in fp32.

Sources: transformers issues 39073 and 21344, pull request 40048.
"""

from __future__ import annotations

from typing import Any

import common
import torch
from gelu import fast, slow  # noqa: F401

ID = "D1-fp32"
EXPECTED = "unfused chain"  # class of the cause, or what a trap must be called


def inputs(seed: int, small: bool = False) -> tuple[Any, ...]:
    return (common.normal(seed, (2, 16, 48) if small else (16, 512, 3072), torch.float32),)
