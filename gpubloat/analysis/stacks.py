"""Call stacks as people read them: the innermost frame of the user's own code, and bytes by stack or by line."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

UNKNOWN = "(no stack recorded)"
_PYTHON = re.compile(r"\.(?:py|ipynb)$|^<ipython", re.IGNORECASE)
# Frames of PyTorch, of other packages and of Python itself are not what a user would change.
_LIBRARY = re.compile(r"(?:^|[/\\])(?:site-packages|dist-packages|torch|lib[/\\]python\d[^/\\]*)[/\\]|^<frozen")
# Of C++ frames (a backward pass has no others) the operator tells most; how the stack was taken tells nothing.
_GRADIENT = re.compile(r"Backward\w*::apply|AccumulateGrad::apply")
_OPERATOR = re.compile(r"^at::_ops::")
_TAKING = re.compile(r"unwind|CapturedTraceback|gather_with_cpp|CUDACachingAllocator|^c10::|^at::detail|_PyEval|^clone")


def places(stacks: pd.DataFrame, frames: pd.DataFrame) -> pd.DataFrame:
    """One row per stack: stack, function, file, line of its innermost user frame, and `place` as text.

    The innermost Python frame that is neither PyTorch's nor of an installed package; where there is none, the
    innermost Python frame; else the innermost operator of PyTorch's C++ code; else the innermost frame.
    """
    table = stacks.merge(frames, on="frame").sort_values(["stack", "depth"])
    python = table["file"].str.contains(_PYTHON)
    library = python & table["file"].str.contains(_LIBRARY)
    gradient, operator, taking = (table["function"].str.contains(p) for p in (_GRADIENT, _OPERATOR, _TAKING))
    rank = np.select([python & ~library, library, gradient, operator, ~taking], [0, 1, 2, 3, 4], 5)
    best = table.assign(rank=rank).sort_values(["stack", "rank", "depth"]).drop_duplicates("stack")
    best = best[["stack", "function", "file", "line"]].reset_index(drop=True)
    return best.assign(place=[_place(*row) for row in best[["function", "file", "line"]].itertuples(index=False)])


def _place(function: str, file: str, line: int) -> str:
    if file in ("", "??"):  # of C++: a demangled name with all its arguments
        return function.split("(")[0] or "??"
    short = "/".join(re.split(r"[/\\]", file)[-2:])
    return f"{function} ({short}:{line})" if line else f"{function} ({short})"


def of_blocks(events: pd.DataFrame, blocks: pd.DataFrame) -> pd.DataFrame:
    """`blocks` with the stack of their allocation in the trace, where the snapshot has none with the block."""
    born = events.loc[events["action"] == "alloc", ["device", "address", "stack"]]
    stack = born.drop_duplicates(["device", "address"], keep="last").set_index(["device", "address"])["stack"]
    found = stack.reindex(pd.MultiIndex.from_frame(blocks[["device", "address"]])).to_numpy()
    is_held = blocks["state"] != "inactive"
    return blocks.assign(stack=blocks["stack"].fillna(pd.Series(found, blocks.index).where(is_held)).astype("Int64"))


def by_stack(live: pd.DataFrame, stacks: pd.DataFrame, frames: pd.DataFrame, *, by: str = "stack") -> pd.DataFrame:
    """Bytes of blocks (`analysis.memory.live`) by who allocated them, the largest first.

    Parameters
    ----------
    by : ``"stack"``, the whole call stack, or ``"place"``, its innermost user frame.

    Returns
    -------
    device, stack (only by stack; empty for blocks without one), place, n_blocks, size_bytes, share_frac of the bytes
    of the device. The sum of size_bytes is that of `live`.
    """
    table = with_places(live, stacks, frames)
    keys = ["device", "stack", "place"] if by == "stack" else ["device", "place"]
    groups = table.groupby(keys, dropna=False, as_index=False)
    found = groups.agg(n_blocks=("address", "size"), size_bytes=("size_bytes", "sum"))
    total = found.groupby("device")["size_bytes"].transform("sum").astype(float)
    found["share_frac"] = found["size_bytes"].astype(float) / total.where(total > 0)
    order = found.sort_values(["device", "size_bytes"], ascending=[True, False], kind="stable")
    return order.reset_index(drop=True)


def with_places(table: pd.DataFrame, stacks: pd.DataFrame, frames: pd.DataFrame) -> pd.DataFrame:
    """`table`, which has a column stack, with a column `place`."""
    names = places(stacks, frames).set_index("stack")["place"]
    place = table["stack"].map(names).astype(object)
    return table.assign(place=place.where(place.notna(), UNKNOWN))
