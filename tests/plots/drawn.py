"""What a figure says in words: read back from its artists."""

from __future__ import annotations

from typing import Any


def texts(ax: Any) -> list[str]:
    return [t.get_text() for t in ax.texts]


def ticks(ax: Any, axis: str = "y") -> list[str]:
    return [t.get_text() for t in getattr(ax, f"get_{axis}ticklabels")()]


def legend(ax: Any) -> list[str]:
    return [t.get_text() for t in ax.get_legend().get_texts()]
