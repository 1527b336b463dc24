"""Axes to draw on: figures are tested by their artists, and drawn once to see that they can be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

mpl.use("Agg")


@pytest.fixture
def ax() -> Iterator[Any]:
    figure, axes = plt.subplots()
    yield axes
    figure.canvas.draw()
    plt.close(figure)
