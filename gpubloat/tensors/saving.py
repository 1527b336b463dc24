"""What packing would save, by chunk width and method: a table to choose from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from gpubloat.errors import GpubloatError
from gpubloat.tensors.account import Account, account
from gpubloat.tensors.codebook import WIDTHS, Codebook, fit
from gpubloat.tensors.sources import Tensor, as_tensor

_COLUMNS = {
    "chunk_bits": "int64",
    "method": "str",
    "threshold": "Float64",
    **dict.fromkeys(("raw_bytes", "packed_bytes", "metadata_bytes"), "int64"),
    **dict.fromkeys(("saving_frac", "effective_32_frac", "effective_128_frac"), "float64"),
    **dict.fromkeys(("n_rows", "n_raw_rows", "removed_bits", "flag_bits", "kept_bits", "padding_bits"), "int64"),
}


def savings(
    x: Any,
    chunk_bits: int | Sequence[int] | None = None,
    thresholds: Sequence[float | None] | None = None,
    always: bool | Sequence[bool] = (True, False),
    max_rows: int = 100_000,
    seed: int = 0,
) -> pd.DataFrame:
    """Count what packing gives, one row per width, method and threshold. Masks may be chosen on a sample (`fit`); all
    rows are counted.

    Parameters
    ----------
    x : NumPy array, torch tensor or Tensor.
    chunk_bits : widths; default, those of 8, 16, 32 and 64 that divide the row.
    thresholds : one row each, None being the best prefix per column; default, that alone.
    always : whether bits that all rows share go without a flag (method "always") or not ("paper").
    max_rows, seed : of `fit`.

    Returns
    -------
    chunk_bits, method, threshold (empty: per column), raw_bytes, packed_bytes (metadata counted), metadata_bytes,
    saving_frac, effective_32_frac, effective_128_frac (a row read alone from an aligned address in units of 32 or 128
    bytes, without metadata), n_rows, n_raw_rows, and bits: 8 * raw_bytes = removed_bits + kept_bits, and
    8 * (packed_bytes - metadata_bytes) = flag_bits + kept_bits + padding_bits. Rows stored raw keep all their bits.

    Raises
    ------
    GpubloatError : as `fit`.
    """
    tensor = as_tensor(x)
    if chunk_bits is None:
        widths: Sequence[int] = [width for width in WIDTHS if tensor.row_bytes % (width // 8) == 0]
    else:
        widths = [chunk_bits] if isinstance(chunk_bits, int) else chunk_bits
    methods = [always] if isinstance(always, bool) else always
    rows = [
        _row(codebook, account(tensor.rows(codebook.chunk_bits), codebook.plan()), method)
        for width in widths
        for method in methods
        for codebook in _codebooks(tensor, width, method, thresholds, max_rows, seed)
    ]
    return pd.DataFrame(rows, columns=list(_COLUMNS)).astype(_COLUMNS)


def _codebooks(
    tensor: Tensor,
    width: int,
    method: bool,
    thresholds: Sequence[float | None] | None,
    max_rows: int,
    seed: int,
) -> Iterator[Codebook]:
    if thresholds is not None and not len(thresholds):
        raise GpubloatError("there is no threshold", "leave thresholds out for the best prefix per column")
    for t in [None] if thresholds is None else thresholds:
        yield fit(tensor, width, None if t is None else [t], method, max_rows, seed)


def _row(codebook: Codebook, counted: Account, always: bool) -> dict[str, Any]:
    method = "always" if always else "paper"
    own = {"chunk_bits": codebook.chunk_bits, "method": method, "threshold": codebook.threshold}
    return own | {name: getattr(counted, name) for name in _COLUMNS if name not in own}
