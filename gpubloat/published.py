"""The papers' printed numbers, each with its source and its gaps. Never mixed with measured ones."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pandas as pd

from gpubloat.errors import GpubloatError
from gpubloat.tables.published import Published

NUMBERS = ["value", "lower", "upper"]


def papers() -> list[str]:
    """Names of the papers there are numbers of.

    Examples
    --------
    >>> papers()
    ['gmlake', 'ibp', 'magneton', 'negativa_ml']
    """
    return sorted(path.parent.name for path in _folder().glob("*/source.toml"))


def load(paper: str | None = None, item: str | None = None) -> pd.DataFrame:
    """One row per published number of one paper, or of all.

    Parameters
    ----------
    paper : one of `papers()`; all of them if None.
    item : a table, figure or text of the paper, such as ``"Table 2"``; all of them if None.

    Returns
    -------
    DataFrame in the schema of `gpubloat.tables.published.Published`; a number that could not be had is a row with
    status ``missing``.

    Examples
    --------
    >>> table = load("gmlake", "abstract")
    >>> float(table.loc[table["quantity"] == "reserved_saved_mean", "value"].iloc[0])
    9.2
    """
    names = papers() if paper is None else [_known(paper)]
    frames = [_read(path, name) for name in names for path in sorted((_folder() / name).glob("*.csv"))]
    table = pd.concat(frames, ignore_index=True)
    if item is not None:
        items = sorted(table["item"].unique())
        table = table[table["item"] == item].reset_index(drop=True)
        if table.empty:
            raise GpubloatError(f"no published item {item!r} of {paper or 'any paper'}", f"known: {'; '.join(items)}")
    return Published.check(table, "published")


def source(paper: str) -> dict[str, Any]:
    """What is known of the paper: citation, how the numbers were had, and what is missing per item."""
    return tomllib.loads((_folder() / _known(paper) / "source.toml").read_text(encoding="utf-8"))


def _known(paper: str) -> str:
    if paper not in papers():
        raise GpubloatError(f"no published numbers of {paper!r}", f"known papers: {', '.join(papers())}")
    return paper


def _read(path: Path, paper: str) -> pd.DataFrame:
    # All columns as text first: pandas would turn a printed "1.00" or "n/a" into a number or a gap.
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    for name in NUMBERS:
        frame[name] = pd.to_numeric(frame[name])
    frame.insert(0, "paper", paper)
    return frame


def _folder() -> Path:
    # First the copy inside an installed wheel, then the one of a checkout.
    here = Path(__file__).resolve().parent
    for folder in (here / "_data" / "published", here.parent / "data" / "published"):
        if folder.is_dir():
            return folder
    raise GpubloatError("the published numbers are not installed", "install gpubloat from its wheel or a full checkout")
