"""Tables of the `tensors` instrument. `file` and `tensor` join them.

A tensor is a matrix: rows are dimension 0, and the elements of all other dimensions are the columns. Bits are those of
an element as it is stored, as an unsigned integer; bit 0 is the least significant. A *chunk* is the unit of packing.
"""

from __future__ import annotations

import pandas as pd
from pandera.typing import Series

from gpubloat.tables.base import Table, column

FIELDS = ("sign", "exponent", "mantissa", "integer")
METHODS = (
    "paper",  # one mask per column: all its bits agree and are left out, or none of them
    "always",  # beside it, bits that are the same in all rows are left out without being asked for
)


class Tensors(Table):
    """One row = one tensor."""

    file: Series[str] = column("file that holds it, without its folder; empty for an array in memory")
    tensor: Series[str] = column("name in the file")
    dtype: Series[str] = column("type of its elements: bf16, fp32, int64...")
    shape: Series[str] = column("its dimensions, joined by x; empty for a single number")
    element_bits: Series[int] = column("width of an element", isin=[8, 16, 32, 64])
    n_rows: Series[int] = column("rows: dimension 0", ge=0)
    n_columns: Series[int] = column("elements of a row", ge=0)
    row_bytes: Series[int] = column("size of a row", ge=0)
    raw_bytes: Series[int] = column("size of the tensor", ge=0)
    n_rows_read: Series[int] = column("rows that the figures are of; fewer than n_rows where it was sampled", ge=0)
    marginal_bound_frac: Series[float] = column(
        "saved at most by a code for each bit of each column on its own", nullable=True, ge=0, le=1
    )
    marginal_global_bound_frac: Series[float] = column(
        "the same, with one code for all columns", nullable=True, ge=0, le=1
    )
    joint_bound_frac: Series[float] = column(
        "saved at most by a code for each 16-bit piece of an element", nullable=True, ge=0, le=1
    )
    is_biased: Series[bool] = column("fewer than 10 elements per pattern of a piece: the joint bound is too great")
    exponent_bound_frac: Series[float] = column(
        "saved at most by a code for exponents alone; empty for integers", nullable=True, ge=0, le=1
    )
    joint_entropy_bits: Series[float] = column("of an element, summed over its 16-bit pieces", nullable=True, ge=0)
    sign_entropy_bits: Series[float] = column("of the sign; empty for integers", nullable=True, ge=0)
    exponent_entropy_bits: Series[float] = column("of the exponent; empty for integers", nullable=True, ge=0)
    mantissa_entropy_bits: Series[float] = column(
        "of the mantissa, summed over 16-bit pieces; empty for integers", nullable=True, ge=0
    )
    invariant_bits_frac: Series[float] = column(
        "bits of a row that are the same in all rows read", nullable=True, ge=0, le=1
    )
    hidden_zero_bits: Series[int] = column("least significant bits that are zero in all elements read", ge=0)
    high_zero_bits: Series[int] = column("most significant bits that are zero in all elements read", ge=0)


class Bits(Table):
    """One row = one bit position of the elements of one tensor. Its ones and zeros sum to the bits that were read."""

    file: Series[str] = column("see tensors")
    tensor: Series[str] = column("see tensors")
    bit: Series[int] = column("position, 0 is the least significant", ge=0, le=63)
    field: Series[str] = column("what the bit is part of", isin=list(FIELDS))
    ones: Series[int] = column("elements read in which it is set", ge=0)
    zeros: Series[int] = column("elements read in which it is not", ge=0)
    ones_frac: Series[float] = column("share in which it is set", nullable=True, ge=0, le=1)
    entropy_bits: Series[float] = column("of the bit over the whole tensor", nullable=True, ge=0, le=1)
    column_entropy_bits: Series[float] = column(
        "of the bit within a column, mean of columns", nullable=True, ge=0, le=1
    )
    invariant_frac: Series[float] = column(
        "share of columns in which it is the same in all rows read", nullable=True, ge=0, le=1
    )
    agreement_mean_frac: Series[float] = column(
        "share of a column's rows with its more frequent value: mean of columns", nullable=True, ge=0.5, le=1
    )
    agreement_05_frac: Series[float] = column("5 % of columns agree no more", nullable=True, ge=0.5, le=1)
    agreement_25_frac: Series[float] = column("25 % of columns agree no more", nullable=True, ge=0.5, le=1)
    agreement_50_frac: Series[float] = column("median of columns", nullable=True, ge=0.5, le=1)
    agreement_75_frac: Series[float] = column("75 % of columns agree no more", nullable=True, ge=0.5, le=1)
    agreement_95_frac: Series[float] = column("95 % of columns agree no more", nullable=True, ge=0.5, le=1)


class Columns(Table):
    """One row = one bit position of one column of one tensor. Only where it was asked for: there are many."""

    file: Series[str] = column("see tensors")
    tensor: Series[str] = column("see tensors")
    element: Series[int] = column("number of the column: of the element in its row", ge=0)
    bit: Series[int] = column("position, 0 is the least significant", ge=0, le=63)
    ones: Series[int] = column("rows read in which it is set", ge=0)
    zeros: Series[int] = column("rows read in which it is not", ge=0)


class Savings(Table):
    """One row = one tensor packed in one way.

    Its bits are removed_bits + kept_bits; packed without metadata, it is flag_bits + kept_bits + padding_bits.
    """

    file: Series[str] = column("see tensors")
    tensor: Series[str] = column("see tensors")
    method: Series[str] = column("which bits may be left out", isin=list(METHODS))
    chunk_bits: Series[int] = column("width of a chunk", isin=[8, 16, 32, 64])
    threshold: Series[float] = column(
        "agreement that a bit needs, the same for all columns; empty where each column has its own best set",
        nullable=True, gt=0.5, le=1,
    )  # fmt: skip
    n_rows: Series[int] = column("rows", ge=0)
    n_raw_rows: Series[int] = column("of those, stored as they were", ge=0)
    raw_bytes: Series[int] = column("size of the tensor as it was", ge=0)
    packed_bytes: Series[int] = column("size packed: rows and metadata", ge=0)
    metadata_bytes: Series[int] = column("of the packed size: masks and values, and the length of each row", ge=0)
    saving_frac: Series[float] = column(
        "share of the raw bytes that is saved; negative if it grows", nullable=True, le=1
    )
    effective_32_frac: Series[float] = column(
        "share of the bytes read that is saved if rows are read in pieces of 32 bytes, metadata not counted",
        nullable=True, le=1,
    )  # fmt: skip
    effective_128_frac: Series[float] = column("the same in pieces of 128 bytes", nullable=True, le=1)
    removed_bits: Series[int] = column("bits of elements that are not stored", ge=0)
    flag_bits: Series[int] = column("bits that say which columns of a row agree", ge=0)
    kept_bits: Series[int] = column("bits of elements that are stored", ge=0)
    padding_bits: Series[int] = column("zero bits up to the next 32-bit word", ge=0)


class Codecs(Table):
    """One row = one tensor compressed by a general codec, as one block: no row of it can be read alone."""

    file: Series[str] = column("see tensors")
    tensor: Series[str] = column("see tensors")
    codec: Series[str] = column("name, level, and what is done before")
    raw_bytes: Series[int] = column("size of the tensor as it was", ge=0)
    packed_bytes: Series[int] = column("size compressed", ge=0)
    saving_frac: Series[float] = column("share of the raw bytes that is saved", nullable=True, le=1)


PARTS = (
    "link",  # plain bytes out of host memory, by the copy engine and by reads of the GPU
    "codec",  # one matrix, packed and plain, from host memory and from that of the GPU
    "nvcomp",  # the same matrix by the codecs of nvCOMP, in memory of the GPU
    "embedding", "linear", "gnn", "kv cache",  # workloads
)  # fmt: skip


class Rates(Table):
    """One row = one way to move or decode data on a GPU, timed. Ways of one part and subject were timed in turn."""

    part: Series[str] = column("what was measured", isin=list(PARTS))
    subject: Series[str] = column("tensor or workload; empty for the link")
    dtype: Series[str] = column("type of its elements; empty for bytes")
    way: Series[str] = column("how")
    n_rows: Series[pd.Int64Dtype] = column("rows that arrive; empty where there are none", nullable=True, ge=0)
    row_bytes: Series[pd.Int64Dtype] = column("size of a row as it arrives", nullable=True, ge=0)
    memory_bytes: Series[pd.Int64Dtype] = column("size of what is read from, where it matters", nullable=True, ge=0)
    raw_bytes: Series[float] = column("what arrives", nullable=True, ge=0)
    moved_bytes: Series[float] = column("what is read for it: packed, or the same", nullable=True, ge=0)
    median_s: Series[float] = column("time; empty where it failed", nullable=True, ge=0)
    least_s: Series[float] = column("least of the times, if several are kept", nullable=True, ge=0)
    most_s: Series[float] = column("greatest of the times, if several are kept", nullable=True, ge=0)
    is_equal: Series[pd.BooleanDtype] = column("what arrives has the right bits; empty if not compared", nullable=True)
    notes: Series[str] = column("why it failed, or what else is known")


TABLES: dict[str, type[Table]] = {"tensors": Tensors, "bits": Bits, "columns": Columns, "savings": Savings}
EXTRA_TABLES: dict[str, type[Table]] = {"codecs": Codecs, "rates": Rates}  # of campaigns
