"""Code in shared libraries: what is there, what a run uses, what can go."""

from __future__ import annotations

from gpubloat.libraries.scan import scan

__all__ = ["scan"]
