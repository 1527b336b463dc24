"""Where the bytes of GPU libraries are, and which of them a given GPU can use. Tables in, tables out."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from gpubloat.errors import GpubloatError
from gpubloat.tables import targets
from gpubloat.tables.libraries import LABELS


def overview(libraries: pd.DataFrame, elements: pd.DataFrame, top: int = 20) -> pd.DataFrame:
    """One row per library, the largest first, then one for all others, then the total, if there are several.

    Columns: library, file_bytes, gpu_code_bytes, cpu_code_bytes, other_bytes, n_functions, n_elements, n_kernels, and
    loadable_bytes (stored bytes of elements that the target could be given) if the scan had a target.
    """
    table = libraries[["library", "file_bytes", "gpu_code_bytes", "cpu_code_bytes"]].copy()
    table["other_bytes"] = table["file_bytes"] - table["gpu_code_bytes"] - table["cpu_code_bytes"]
    table = table.join(libraries[["n_functions", "n_elements", "n_kernels"]])
    if elements["is_loadable"].notna().any():
        usable = elements[elements["is_loadable"].fillna(False)]
        loadable = stored(usable).groupby(usable["library"]).sum()
        table.insert(3, "loadable_bytes", table["library"].map(loadable).fillna(0).astype("int64"))
    return folded(table.sort_values(["file_bytes", "library"], ascending=[False, True]), top)


def folded(table: pd.DataFrame, top: int) -> pd.DataFrame:
    """The first `top` rows of a table by library, then one row for all others, then the total of all.

    Of a table of one row that is shown there is no total: it would say the same again.
    """
    table = table.reset_index(drop=True)
    numbers = [c for c in table.columns if c != "library"]

    def summed(rows: pd.DataFrame, name: str) -> pd.DataFrame:
        # Kernels that were not read stay unknown in the sum; everything else is a plain sum.
        total = {c: rows[c].sum(min_count=1 if c == "n_kernels" else 0) for c in numbers}
        return pd.DataFrame([total]).astype(dict(table.dtypes[numbers])).assign(library=name)

    rest = table.iloc[top:]
    parts = [table.iloc[:top]]
    if len(rest):
        parts.append(summed(rest, f"({len(rest)} smaller file{'' if len(rest) == 1 else 's'})"))
    if len(table) != 1 or len(rest):
        parts.append(summed(table, f"total of {len(table)} file{'' if len(table) == 1 else 's'}"))
    return pd.concat(parts, ignore_index=True)[list(table.columns)]


def stored(elements: pd.DataFrame) -> pd.Series:
    """Bytes of each element in the file: header and payload."""
    return elements["header_bytes"] + elements["payload_bytes"]


def bytes_by_label(sections: pd.DataFrame) -> pd.DataFrame:
    """One row per library and label; the rows of a library sum to its file size.

    Columns: library, label, size_bytes, share_frac (of the file). Labels in the order of `tables.libraries.LABELS`.
    """
    table = sections.groupby(["library", "label"], as_index=False).agg(size_bytes=("size_bytes", "sum"))
    table["share_frac"] = table["size_bytes"] / table.groupby("library")["size_bytes"].transform("sum").clip(lower=1)
    table["order"] = table["label"].map({label: i for i, label in enumerate(LABELS)})
    table = table.sort_values(["library", "order"], ignore_index=True)
    return table.drop(columns="order")


def code_shares(libraries: pd.DataFrame) -> pd.DataFrame:
    """One row per library, the largest first: its bytes as GPU code, CPU code and the rest (the paper's Figure 1).

    Columns: library, file_bytes, gpu_code_bytes, cpu_code_bytes, other_bytes, gpu_code_frac, cpu_code_frac.
    """
    table = libraries[["library", "file_bytes", "gpu_code_bytes", "cpu_code_bytes"]].copy()
    table["other_bytes"] = table["file_bytes"] - table["gpu_code_bytes"] - table["cpu_code_bytes"]
    size = table["file_bytes"].clip(lower=1)
    table["gpu_code_frac"] = table["gpu_code_bytes"] / size
    table["cpu_code_frac"] = table["cpu_code_bytes"] / size
    return table.sort_values(["file_bytes", "library"], ascending=[False, True], ignore_index=True)


def bytes_by_target(elements: pd.DataFrame) -> pd.DataFrame:
    """One row per library, kind and target, in the order of the targets' numbers.

    Columns: library, kind, target, n_elements, stored_bytes, uncompressed_bytes. A concatenated element's stored bytes
    are in a row with an empty target; its members' uncompressed bytes are in the rows of their targets.
    """
    table = elements.assign(stored_bytes=stored(elements), target=elements["target"].fillna(""))
    table = table.groupby(["library", "kind", "target"], as_index=False).agg(
        n_elements=("element", "size"),
        stored_bytes=("stored_bytes", "sum"),
        uncompressed_bytes=("uncompressed_bytes", "sum"),
    )
    table["order"] = table["target"].map(_target_order)
    return table.sort_values(["library", "order", "kind"], ignore_index=True).drop(columns="order")


def _target_order(text: str) -> tuple[int, str, str]:
    if not text:
        return (0, "", "")
    target = targets.parse(text)
    return (target.number, target.prefix, target.suffix)


def fits(elements: pd.DataFrame) -> pd.DataFrame:
    """One row per reason why elements could or could not be given to the scan's target.

    Columns: is_loadable, fit, n_elements, stored_bytes, share_frac, meaning (of `fit`).
    """
    known = elements[elements["fit"].notna()]
    known = known.assign(stored_bytes=stored(known))
    table = known.groupby(["is_loadable", "fit"], as_index=False).agg(
        n_elements=("element", "size"), stored_bytes=("stored_bytes", "sum")
    )
    table["share_frac"] = table["stored_bytes"] / max(int(table["stored_bytes"].sum()), 1)
    table["meaning"] = table["fit"].map(targets.FITS)
    return table.sort_values(["is_loadable", "stored_bytes"], ascending=False, ignore_index=True)


def loadable(elements: pd.DataFrame, gpus: str | Sequence[str]) -> pd.DataFrame:
    """How much of each library each GPU could ever be given. One row per library and GPU; `gpus` may be a single one.

    Columns: library, gpu, n_elements, n_loadable, stored_bytes, loadable_bytes, unloadable_bytes (reason I of the
    paper: no GPU of that kind can use it), unloadable_frac. Stored bytes; a concatenated element counts as loadable if
    one of its members is.
    """
    tables = []
    slim = elements[["library", "region", "element", "member", "kind", "target"]].assign(stored_bytes=stored(elements))
    for gpu in [gpus] if isinstance(gpus, str) else gpus:
        fitted = targets.fit(slim, gpu)
        fitted = fitted[fitted["member"].isna()]
        fitted["loadable_bytes"] = fitted["stored_bytes"].where(fitted["is_loadable"], 0)
        table = fitted.groupby("library", as_index=False).agg(
            n_elements=("element", "size"),
            n_loadable=("is_loadable", "sum"),
            stored_bytes=("stored_bytes", "sum"),
            loadable_bytes=("loadable_bytes", "sum"),
        )
        table.insert(1, "gpu", f"sm_{targets.gpu(gpu)}")
        tables.append(table)
    result = pd.concat(tables, ignore_index=True)
    result["unloadable_bytes"] = result["stored_bytes"] - result["loadable_bytes"]
    result["unloadable_frac"] = result["unloadable_bytes"] / result["stored_bytes"].clip(lower=1)
    return result


def by_root(table: pd.DataFrame, libraries: pd.DataFrame, keys: Sequence[str] = ()) -> pd.DataFrame:
    """Sum a table by wheel, package or folder instead of by library; fractions are left out.

    Columns: root, `keys`, the summed columns. `keys` are columns of `table` that stay apart, such as ``["gpu"]``.
    """
    root = table["library"].map(libraries.set_index("library")["root"])
    numbers = [c for c in table.columns if c.endswith("_bytes") or c.startswith("n_")]
    return table.assign(root=root).groupby(["root", *keys], as_index=False, sort=False)[numbers].sum()


def duplicates(elements: pd.DataFrame) -> pd.DataFrame:
    """The same stored code more than once. One row per code; needs a scan with digests.

    Columns: digest, kind, target, code_bytes, n_copies, n_libraries, libraries, extra_bytes (all copies but one), the
    largest first. Stored bytes are compared: the same cubin raw in one place and compressed in another counts as two.
    """
    known = elements[(elements["digest"] != "") & (elements["payload_bytes"] > 0)]
    table = known.groupby(["digest", "kind", "target", "payload_bytes"], as_index=False, dropna=False).agg(
        n_copies=("element", "size"),
        n_libraries=("library", "nunique"),
        libraries=("library", lambda names: ", ".join(sorted(set(names)))),
    )
    table = table[table["n_copies"] > 1].rename(columns={"payload_bytes": "code_bytes"})
    table["extra_bytes"] = table["code_bytes"] * (table["n_copies"] - 1)
    table["target"] = table["target"].fillna("")
    return table.sort_values(["extra_bytes", "digest"], ascending=[False, True], ignore_index=True)


def pareto(table: pd.DataFrame, value: str, name: str = "library") -> pd.DataFrame:
    """Sorted by `value`, the largest first, with running shares (the paper's Figure 6).

    Columns: `name`, `value`, rank, rank_frac, cumulative_frac.
    """
    for wanted in (value, name):
        if wanted not in table.columns:
            raise GpubloatError(f"the table has no column {wanted!r}", f"columns: {', '.join(map(str, table.columns))}")
    result = table[[name, value]].sort_values([value, name], ascending=[False, True], ignore_index=True)
    result["rank"] = range(1, len(result) + 1)
    result["rank_frac"] = result["rank"] / max(len(result), 1)
    result["cumulative_frac"] = result[value].cumsum() / max(float(result[value].sum()), 1.0)
    return result
