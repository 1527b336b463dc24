"""GPU memory that is reserved and unusable: what a trace shows, and what another allocator would have done."""

from __future__ import annotations

from gpubloat.memory.bounds import bounds
from gpubloat.memory.collect import load
from gpubloat.memory.recorder import record
from gpubloat.memory.replay import replay
from gpubloat.memory.verify import verify

__all__ = ["bounds", "load", "record", "replay", "verify"]
