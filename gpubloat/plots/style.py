"""How figures look and how they are kept: widths of papers, one palette, one function that writes a figure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpubloat import __version__

# Text widths in inches: one column of ACM/USENIX, MLSys/NeurIPS text, two columns.
WIDTHS = {"column": 3.33, "text": 5.5, "page": 7.0}
# Okabe and Ito, "Color Universal Design" (2008): told apart with all common kinds of colour blindness.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
GREY = "#BBBBBB"
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo", "")
MAGNITUDE = "cividis"
_PARAMETERS: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": False,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.4,
    "pdf.fonttype": 42,
    "savefig.dpi": 200,
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
    "axes.prop_cycle": cycler(color=PALETTE),
}


@contextmanager
def paper(width: str = "text", height: float | None = None) -> Iterator[dict[str, Any]]:
    """Style for figures made inside the block; nothing global changes.

    Parameters
    ----------
    width : a key of `WIDTHS`. height : in inches; default, 0.6 of the width.

    Yields
    ------
    Keywords for ``plt.subplots``: figsize.

    Examples
    --------
    >>> with paper("column") as size:
    ...     size["figsize"]
    (3.33, 1.998)
    """
    inches = WIDTHS[width]
    with _parameters():
        yield {"figsize": (inches, inches * 0.6 if height is None else height)}


@contextmanager
def _parameters() -> Iterator[None]:
    """Our parameters, and then what they were; no others: a notebook's backend sets `interactive` on first use."""
    before = {name: mpl.rcParams[name] for name in _PARAMETERS}
    mpl.rcParams.update(_PARAMETERS)
    try:
        yield
    finally:
        mpl.rcParams.update(before)


def listed(ax: Axes, n: float, label: str) -> None:
    """Axes of a list: `n` items from the top down, their values to the right along an axis with `label`."""
    ax.set_ylim(max(n, 1) - 0.4, -0.6)
    ax.set_xlabel(label)
    ax.grid(axis="x")
    ax.tick_params(axis="y", length=0)


def save(
    fig: Figure, figure_id: str, table: pd.DataFrame, *, folder: str | Path, source: str, note: str = ""
) -> Figure:
    """Write `<id>.pdf`, `.png`, `.csv` (the plotted numbers) and `.json` (where they come from).

    Parameters
    ----------
    figure_id : instrument and subject, for example ``libraries-bytes-by-label``.
    table : exactly what is drawn.
    source : run ids or published items, separated by commas.
    note : what a reader must know to compare it.

    The bytes of the files do not depend on the day they are written.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    with _parameters():
        fig.savefig(place / f"{figure_id}.pdf", metadata={"CreationDate": None})
        fig.savefig(place / f"{figure_id}.png", metadata={"Software": None})
    table.to_csv(place / f"{figure_id}.csv", index=False, float_format="%.6g", lineterminator="\n")
    about = {"id": figure_id, "source": source, "note": note, "rows": len(table), "gpubloat": __version__}
    (place / f"{figure_id}.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return fig
