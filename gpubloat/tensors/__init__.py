"""Bits of tensors that never change: measured, bounded, packed without loss, and decoded while fetching.

Names are looked up when they are used: what compiles loops, and what needs PyTorch or a GPU, is not loaded before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpubloat.tensors.codebook import Codebook, fit
    from gpubloat.tensors.gpu.offload import offload
    from gpubloat.tensors.gpu.rowcache import RowCache
    from gpubloat.tensors.gpu.torchuse import PackedEmbedding, PackedTensor
    from gpubloat.tensors.ibpfile import load, save
    from gpubloat.tensors.invariance import stats
    from gpubloat.tensors.packing import Packed, pack, unpack, unpack_rows
    from gpubloat.tensors.saving import savings
    from gpubloat.tensors.sources import Tensor, as_tensor, tensors_in

_FROM = {
    "codebook": ("Codebook", "fit"),
    "gpu.offload": ("offload",),
    "gpu.rowcache": ("RowCache",),
    "gpu.torchuse": ("PackedEmbedding", "PackedTensor"),
    "ibpfile": ("load", "save"),
    "invariance": ("stats",),
    "packing": ("Packed", "pack", "unpack", "unpack_rows"),
    "saving": ("savings",),
    "sources": ("Tensor", "as_tensor", "tensors_in"),
}
_MODULES = {name: module for module, names in _FROM.items() for name in names}

__all__ = [
    "Codebook",
    "Packed",
    "PackedEmbedding",
    "PackedTensor",
    "RowCache",
    "Tensor",
    "as_tensor",
    "fit",
    "load",
    "offload",
    "pack",
    "save",
    "savings",
    "stats",
    "tensors_in",
    "unpack",
    "unpack_rows",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"gpubloat.tensors.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'gpubloat.tensors' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
