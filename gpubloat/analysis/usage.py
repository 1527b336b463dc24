"""What runs used, and how far one run speaks for another: Tables 4 and 9 of Negativa-ML, and what follows from them.

Everything starts from `presence`: which function, kernel or element (rows) was used by which workload (columns).
"Unused" always means unused in these runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gpubloat.analysis.libraries import folded, stored
from gpubloat.errors import GpubloatError

Tables = Mapping[str, pd.DataFrame]  # by workload

# What makes two uses the same. Kernels go by name, as in the paper: the element of a name differs from GPU to GPU.
FUNCTIONS = ("library", "offset_bytes")
KERNELS = ("library", "kernel")
ELEMENTS = ("library", "region", "element")
DRIVER = ("content", "pointer", "kernel", "variable")  # sources of evidence that the driver's calls give
PAGES = ("page",)  # and the one that first touches of pages give
PAGES_SHARED = ("page", "page_shared")  # small elements have no page of their own: finds more, claims more
EXACT_WORKLOADS = 12  # all orders by way of 4096 subsets; with more workloads, orders are sampled


def overview(run: Mapping[str, pd.DataFrame], top: int = 20) -> pd.DataFrame:
    """What one run used of each library, the largest first, then the others, then the total, if several.

    `run` has the tables loaded, libraries, used_functions, elements, evidence. Columns: library, file_bytes,
    cpu_code_bytes and its cpu_used_frac (bytes of functions that were entered; empty where none was watched), n_watched
    (functions whose entry could be recorded) and n_used, gpu_code_bytes and its gpu_used_frac (stored bytes of elements
    with any evidence), n_elements and n_elements_used.
    """
    columns = ["library", "cpu_code_bytes", "gpu_code_bytes", "n_elements"]
    names = {"n_functions_watched": "n_watched", "n_functions_used": "n_used"}
    table = run["loaded"][["library", "file_bytes", *names]].rename(columns=names)
    table = table.merge(run["libraries"][columns], on="library", how="left")
    used = run["evidence"][["library", "region", "element"]].drop_duplicates()
    elements = run["elements"][run["elements"]["member"].isna()].merge(used, on=["library", "region", "element"])
    entered = run["used_functions"].groupby("library")["size_bytes"].sum()
    by_library = stored(elements).groupby(elements["library"]).agg(["sum", "size"])
    table["cpu_used_bytes"] = table["library"].map(entered)
    table["gpu_used_bytes"] = table["library"].map(by_library["sum"])
    table["n_elements_used"] = table["library"].map(by_library["size"])
    numbers = [c for c in table.columns if c != "library"]
    table[numbers] = table[numbers].fillna(0).astype("int64")
    table = folded(table.sort_values(["file_bytes", "library"], ascending=[False, True]), top)
    for part in ("cpu", "gpu"):
        table[f"{part}_used_frac"] = table[f"{part}_used_bytes"] / table[f"{part}_code_bytes"].replace(0, np.nan)
    table["cpu_used_frac"] = table["cpu_used_frac"].where(table["n_watched"] > 0)
    order = ["cpu_code_bytes", "cpu_used_frac", "n_watched", "n_used", "gpu_code_bytes", "gpu_used_frac"]
    return table[["library", "file_bytes", *order, "n_elements", "n_elements_used"]]


def files(loaded: Tables) -> pd.DataFrame:
    """Which workloads loaded the same file: uses can be compared only within a row.

    `loaded` are tables `loaded`. Columns: library, sha256, file_bytes, n_workloads, workloads; the most shared first.
    """
    columns = ["library", "sha256", "file_bytes"]
    tables = [table[columns].assign(workload=workload) for workload, table in loaded.items()]
    rows = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=[*columns, "workload"])
    result = rows.groupby(columns, as_index=False).agg(
        n_workloads=("workload", "nunique"), workloads=("workload", ", ".join)
    )
    order = ["n_workloads", "file_bytes", "library"]
    return result.sort_values(order, ascending=[False, False, True], ignore_index=True)


def presence(uses: Tables, keys: Sequence[str], library: str | None = None) -> pd.DataFrame:
    """Which of all used things each workload used.

    Parameters
    ----------
    uses : tables `used_functions`, `used_kernels` or `evidence`, by workload.
    keys : columns that say what is the same thing: `FUNCTIONS`, `KERNELS` or `ELEMENTS`.
    library : only this one.

    Returns
    -------
    Boolean DataFrame: one row per thing that any of them used, in order of `keys` (its index), one column per workload.
    """
    tables = [
        (table if library is None else table[table["library"] == library])[list(keys)].assign(_column=i)
        for i, table in enumerate(uses.values())
    ]
    rows = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=[*keys, "_column"])
    things = rows[list(keys)].drop_duplicates().sort_values(list(keys), ignore_index=True)
    # The number of each row's thing; a join, since the keys can be texts and numbers mixed.
    number = rows.merge(things.assign(_row=range(len(things))), on=list(keys), how="left")
    matrix = np.zeros((len(things), len(uses)), dtype=bool)
    matrix[number["_row"].to_numpy(int), number["_column"].to_numpy(int)] = True
    return pd.DataFrame(matrix, index=pd.MultiIndex.from_frame(things), columns=list(uses))


def weigh(used: pd.DataFrame, tables: Iterable[pd.DataFrame], column: str = "size_bytes") -> pd.Series:
    """Bytes of each row of `used`, from tables with its keys and `column`; the same thing in two tables counts once.

    Examples of tables: `used_functions` of every run; `elements` of every run with `size_bytes` assigned.
    """
    keys = list(used.index.names)
    found = [table.groupby(keys, as_index=False)[column].sum() for table in tables]
    every = pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=[*keys, column])
    size = every.groupby(keys)[column].max()
    known = used.index.to_frame(index=False).merge(size.reset_index(), on=keys, how="left")[column]
    if known.isna().any():
        first = used.index[int(known.isna().to_numpy().argmax())]
        raise GpubloatError(f"no size of {first}", "give the tables of every run that used it")
    return pd.Series(known.to_numpy(np.int64), index=used.index, name=column)


def jaccard(used: pd.DataFrame) -> pd.DataFrame:
    """Common share of what two workloads used together, 0..1: one row and one column per workload.

    Empty where neither of the two used anything, on the diagonal, too.
    """
    both, either = _both_either(used)
    index = np.divide(both, either, out=np.full(both.shape, np.nan), where=either > 0)
    return pd.DataFrame(index, index=used.columns, columns=used.columns)


def triangles(below: pd.DataFrame, above: pd.DataFrame) -> pd.DataFrame:
    """Tables 4 and 9: one square with `below` (functions) under the diagonal and `above` (kernels) over it.

    Both are squares of `jaccard` over the same workloads in the same order; the diagonal is left empty.
    """
    if not below.columns.equals(above.columns):
        raise GpubloatError("the two squares have different workloads", "make both of the same runs, in the same order")
    values = np.tril(below.to_numpy(float), -1) + np.triu(above.to_numpy(float), 1)
    np.fill_diagonal(values, np.nan)
    return pd.DataFrame(values, index=below.index, columns=below.columns)


def pairs(square: pd.DataFrame) -> pd.DataFrame:
    """Tables 4 and 9, long: one row per pair of workloads. Columns: a, b (a stands first), jaccard_frac."""
    first, second = np.triu_indices(len(square), 1)
    names = square.index.to_numpy()
    return pd.DataFrame({"a": names[first], "b": names[second], "jaccard_frac": square.to_numpy(float)[first, second]})


def unmet(used: pd.DataFrame) -> pd.DataFrame:
    """How many things a workload (column) used that copies made from another one's run (row) lack; not measured."""
    both, _ = _both_either(used)
    return pd.DataFrame((np.diag(both)[None, :] - both).astype(int), index=used.columns, columns=used.columns)


def shares(used: pd.DataFrame, sizes: pd.Series | None = None) -> pd.DataFrame:
    """One row per workload, in the order of `used`.

    Columns: workload, n_used, n_only (that no other one used), n_new (that no earlier one used; their sum is the
    union); with `sizes` (bytes by row of `used`) also used_bytes, only_bytes, new_bytes.
    """
    matrix = used.to_numpy(bool)
    only = matrix & (matrix.sum(axis=1, keepdims=True) == 1)
    new = matrix & (matrix.cumsum(axis=1) == 1)
    result = pd.DataFrame({"workload": used.columns})
    for name, marks in (("used", matrix), ("only", only), ("new", new)):
        result[f"n_{name}"] = marks.sum(axis=0)
    for name, marks in (("used", matrix), ("only", only), ("new", new)):
        if sizes is not None:
            result[f"{name}_bytes"] = _weights(used, sizes) @ marks
    return result


def saturation(
    used: pd.DataFrame, sizes: pd.Series | None = None, *, orders: int = 2000, seed: int = 0
) -> pd.DataFrame:
    """How the union grows with each further workload, over the orders in which workloads can be traced.

    Exact over all orders up to 12 workloads; over `orders` orders drawn with `seed` beyond. One row per number of
    workloads. Columns: n_workloads; of the union: n_union_mean, n_union_min, n_union_max; of what the last workload
    added: n_added_mean, n_added_min, n_added_max; with `sizes` (bytes by row of `used`) also union_mean_bytes, ...
    """
    matrix = used.to_numpy(bool)
    result = pd.DataFrame({"n_workloads": np.arange(1, matrix.shape[1] + 1)})
    weighted = {"n_{}_{}": np.ones(len(matrix), np.int64)}
    if sizes is not None:
        weighted["{}_{}_bytes"] = _weights(used, sizes)
    for name, weights in weighted.items():
        unions, added = (
            _by_subsets(matrix, weights)
            if matrix.shape[1] <= EXACT_WORKLOADS
            else _by_orders(matrix, weights, orders, seed)
        )
        for what, samples in (("union", unions), ("added", added)):
            result[name.format(what, "mean")] = [float(np.mean(x)) for x in samples]
            result[name.format(what, "min")] = np.array([np.min(x) for x in samples], np.int64)
            result[name.format(what, "max")] = np.array([np.max(x) for x in samples], np.int64)
    return result


def transfer(misses: Mapping[tuple[str, str], pd.DataFrame]) -> pd.DataFrame:
    """Misses when a workload runs on copies made from the run of another, as measured under the guard.

    `misses`: (whose copies, which workload ran) -> table `misses`, empty if nothing was missed. Columns: copies,
    workload, n_misses, n_functions, function_bytes, n_elements, element_bytes, n_restored.
    """
    rows = []
    for (copies, workload), table in misses.items():
        row: dict[str, Any] = {"copies": copies, "workload": workload, "n_misses": len(table)}
        for what in ("function", "element"):
            size = table.loc[table["what"] == what, "size_bytes"]
            row |= {f"n_{what}s": len(size), f"{what}_bytes": int(size.sum())}
        rows.append(row | {"n_restored": int((table["action"] == "restored").sum())})
    columns = ["copies", "workload", "n_misses", "n_functions", "function_bytes", "n_elements", "element_bytes"]
    return pd.DataFrame(rows, columns=[*columns, "n_restored"])


def agreement(
    evidence: pd.DataFrame, first: Sequence[str] = DRIVER, second: Sequence[str] = PAGES, *, total: bool = False
) -> pd.DataFrame:
    """Do two independent sources name the same used elements? One row per library, the most elements first.

    `evidence` is a table `evidence` of one run whose both sources were on; sources in neither list do not count.
    Columns: library, n_both, n_only_first, n_only_second, recall_frac (of the elements of `first`, those that `second`
    found), precision_frac (of the elements of `second`, those that `first` found); empty where there are none to find.
    With `total`, a last row "total".
    """
    source = evidence["source"]
    marks = evidence.assign(first=source.isin(first), second=source.isin(second))
    marks = marks.groupby(list(ELEMENTS), as_index=False)[["first", "second"]].any()
    marks["n_both"] = marks["first"] & marks["second"]
    marks["n_only_first"] = marks["first"] & ~marks["second"]
    marks["n_only_second"] = ~marks["first"] & marks["second"]
    counts = ["n_both", "n_only_first", "n_only_second"]
    marks = marks[marks[counts].any(axis=1)]
    result = marks.groupby("library", as_index=False)[counts].sum()
    result["order"] = -result[counts].sum(axis=1)
    result = result.sort_values(["order", "library"], ignore_index=True).drop(columns="order")
    if total:
        result = pd.concat([result, result[counts].sum().to_frame().T.assign(library="total")], ignore_index=True)
    result = result.astype(dict.fromkeys(counts, "int64"))
    for name, other in (("recall_frac", "n_only_first"), ("precision_frac", "n_only_second")):
        whole = result["n_both"] + result[other]
        result[name] = result["n_both"] / whole.where(whole > 0)
    return result


def _both_either(used: pd.DataFrame) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    matrix = used.to_numpy(float)
    both = matrix.T @ matrix
    size = np.diag(both)
    return both, size[:, None] + size[None, :] - both


def _weights(used: pd.DataFrame, sizes: pd.Series) -> NDArray[np.int64]:
    if not sizes.index.equals(used.index):
        raise GpubloatError("the sizes are of other rows", "make them with weigh(used, ...)")
    return sizes.to_numpy(np.int64)


Samples = list[NDArray[np.int64]]  # per number of workloads, one value per way to get there


def _by_subsets(matrix: NDArray[np.bool_], weights: NDArray[np.int64]) -> tuple[Samples, Samples]:
    """Over all orders: every subset of j workloads is the first j of equally many orders, so subsets are enough."""
    k = matrix.shape[1]
    pattern = matrix @ (1 << np.arange(k, dtype=np.int64))
    inside = np.zeros(1 << k, np.int64)  # weight of the rows that only workloads of this subset used
    np.add.at(inside, pattern, weights)
    subsets = np.arange(1 << k)
    for bit in range(k):
        having = subsets[subsets >> bit & 1 == 1]
        inside[having] += inside[having ^ (1 << bit)]
    union = inside[-1] - inside[::-1]  # all but what only the others used
    size = sum((subsets >> bit & 1 for bit in range(k)), np.zeros(1 << k, np.int64))
    unions, added = [], []
    for j in range(1, k + 1):
        here = subsets[size == j]
        unions.append(union[here])
        last = [here[here >> bit & 1 == 1] for bit in range(k)]
        added.append(np.concatenate([union[s] - union[s ^ (1 << bit)] for bit, s in enumerate(last)]))
    return unions, added


def _by_orders(
    matrix: NDArray[np.bool_], weights: NDArray[np.int64], orders: int, seed: int
) -> tuple[Samples, Samples]:
    patterns, number = np.unique(matrix, axis=0, return_inverse=True)
    weight = np.zeros(len(patterns), np.int64)
    np.add.at(weight, number.ravel(), weights)
    draw = np.random.default_rng(seed)
    grown = np.array(
        [
            weight @ np.logical_or.accumulate(patterns[:, draw.permutation(matrix.shape[1])], axis=1)
            for _ in range(orders)
        ]
    )
    steps = np.diff(grown, axis=1, prepend=0)
    return list(grown.T), list(steps.T)
