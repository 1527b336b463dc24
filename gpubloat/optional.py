"""Packages that are loaded only where they are needed, and missed in one sentence."""

from __future__ import annotations

import importlib
from typing import Any

from gpubloat.errors import MissingToolError


def torch_module() -> Any:
    """PyTorch; MissingToolError without it."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise MissingToolError("PyTorch", "pip install torch") from None
