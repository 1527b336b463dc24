"""Code in shared libraries: what is there, what a run uses, what can go."""

from __future__ import annotations

from gpubloat.libraries.debloat import debloat
from gpubloat.libraries.execute import execute
from gpubloat.libraries.inplace import apply, restore
from gpubloat.libraries.prune import prune
from gpubloat.libraries.scan import scan
from gpubloat.libraries.trace import trace
from gpubloat.libraries.verify import verify

__all__ = ["apply", "debloat", "execute", "prune", "restore", "scan", "trace", "verify"]
