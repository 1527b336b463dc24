"""The table of published numbers: facts with their source and their gaps, always apart from measured ones."""

from __future__ import annotations

from pandera.typing import Series

from gpubloat.tables.base import Table, column

STATUSES = (
    "stated",  # printed, or said in words that leave no room
    "bound",  # only a limit or a range is known: see `lower` and `upper`
    "approximate",  # printed with "about", or read off a plot without a stated uncertainty
    "digitised",  # read off a plot by pixel; `lower` and `upper` are the stated uncertainty
    "computed",  # worked out from printed numbers, not printed itself
    "missing",  # known to be printed (or asked for and not printed: see `note`), and not to be had
)


class Published(Table):
    """One row = one number that a paper prints, or one that it is known to print and could not be had."""

    paper: Series[str] = column("folder name of the paper: negativa_ml, ibp, gmlake or magneton")
    item: Series[str] = column("where the number stands: Table 2, Figure 5a, abstract, text 4.6, artifact")
    subject: Series[str] = column("what the number is about; several parts as name=value, joined by ' | '")
    quantity: Series[str] = column("what was measured, without the unit", str_matches=r"^[a-z][a-z0-9_]*$")
    unit: Series[str] = column("unit as printed: percent, MB, s, GB, mJ, count, ratio...; empty for text")
    printed: Series[str] = column("text as printed or known; empty when missing, digitised or computed")
    value: Series[float] = column("the point value, in `unit`; empty if there is none", nullable=True)
    lower: Series[float] = column("lower end of a bound or of the uncertainty, in `unit`", nullable=True)
    upper: Series[float] = column("upper end of a bound or of the uncertainty, in `unit`", nullable=True)
    status: Series[str] = column("how the number is known", isin=list(STATUSES))
    source: Series[str] = column("where it was read", str_length={"min_value": 1})
    note: Series[str] = column("what to know before citing it; may be empty")


TABLES: dict[str, type[Table]] = {"published": Published}
