"""Analyses of tensors: the choice of the best packing, bounds beside it, hidden precision, and reads in pieces."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from gpubloat.analysis import tensors as analysis
from gpubloat.errors import GpubloatError
from gpubloat.tables.tensors import Bits, Savings, Tensors

# name -> width, and the first bit of each field, from the least significant
TYPES = {"fp32": (32, 23, 31), "bf16": (16, 7, 15), "fp64": (64, 52, 63), "int64": (64,), "uint8": (8,), "bool": (8,)}


def tensors(*rows: dict[str, Any]) -> pd.DataFrame:
    """The table of tensors of 100 rows of 64 elements, each row with its own differences."""
    table = []
    for number, given in enumerate(rows):
        width = TYPES[given.get("dtype", "fp32")][0]
        row = dict.fromkeys(Tensors.to_schema().columns)
        row |= {
            "file": "", "tensor": f"t{number}", "dtype": "fp32", "shape": "100x64", "element_bits": width,
            "n_rows": 100, "n_columns": 64, "row_bytes": width * 8, "raw_bytes": width * 800, "n_rows_read": 100,
            "is_biased": False, "hidden_zero_bits": 0, "high_zero_bits": 0, "marginal_bound_frac": 0.2,
            "joint_bound_frac": 0.4, "exponent_bound_frac": 0.3,
        }  # fmt: skip
        table.append(row | given)
    return Tensors.check(pd.DataFrame(table), "tensors")


def bits(table: pd.DataFrame) -> pd.DataFrame:
    """A table of bits for these tensors: the sign never changes, and bit b is set in b percent."""
    rows = []
    for tensor in table.to_dict("records"):
        width, *edges = TYPES[tensor["dtype"]]
        for bit in range(width):
            field = "integer"
            if edges:
                field = ("mantissa", "exponent", "sign")[(bit >= edges[0]) + (bit >= edges[1])]
            row = dict.fromkeys(Bits.to_schema().columns, bit / 100)
            row |= {name: max(bit / 100, 0.5) for name in row if name.startswith("agreement")}
            row |= {"file": tensor["file"], "tensor": tensor["tensor"], "bit": bit, "field": field}
            row |= {"ones": bit * 64, "zeros": (100 - bit) * 64, "invariant_frac": float(field == "sign")}
            rows.append(row)
    return Bits.check(pd.DataFrame(rows), "bits")


def savings(*rows: tuple[str, str, int, float | None, float]) -> pd.DataFrame:
    """A table of savings from tensor, method, chunk width, threshold and saving, all of 20,000 bytes in 100 rows."""
    table = []
    for tensor, method, chunk, threshold, saving in rows:
        row = dict.fromkeys(Savings.to_schema().columns, 0)
        row |= {"file": "", "tensor": tensor, "method": method, "chunk_bits": chunk, "threshold": threshold}
        row |= {"n_rows": 100, "raw_bytes": 20_000, "packed_bytes": round(20_000 * (1 - saving)), "saving_frac": saving}
        row |= {"effective_32_frac": saving - 0.01, "effective_128_frac": saving - 0.05}
        table.append(row)
    return Savings.check(pd.DataFrame(table), "savings")


SWEPT = (
    ("t0", "paper", 16, 0.7, 0.25), ("t0", "paper", 16, 0.9, 0.20), ("t0", "paper", 16, None, 0.26),
    ("t0", "paper", 32, 0.7, 0.22), ("t0", "always", 16, None, 0.3), ("t1", "paper", 32, 0.7, -0.01),
    ("t1", "paper", 32, None, 0.02), ("t1", "always", 32, None, 0.02),
)  # fmt: skip


def test_the_best_packing_is_the_smallest() -> None:
    table = savings(*SWEPT)
    found = analysis.best(table).set_index("tensor")
    assert found.loc["t0", ["method", "chunk_bits", "saving_frac"]].tolist() == ["always", 16, 0.3]
    assert found.loc["t1", "method"] == "paper"  # nothing is gained by more
    found = analysis.best(table, method="paper").set_index("tensor")
    assert found["saving_frac"].tolist() == [0.26, 0.02]
    assert found["threshold"].isna().all()
    assert analysis.best(savings(("a", "paper", 16, 0.7, 0.1), ("a", "paper", 64, 0.7, 0.1)))["chunk_bits"][0] == 64


def test_savings_stand_beside_bounds() -> None:
    table = analysis.against_bounds(
        tensors({}, {"joint_bound_frac": 0.0, "is_biased": True}, {"tensor": "none.weight"}), savings(*SWEPT)
    )
    assert table["label"].tolist() == ["none", "t0", "t1"]
    first = table.set_index("tensor").loc["t0"]
    assert (first["paper_frac"], first["always_frac"], first["best_frac"]) == (0.26, 0.3, 0.3)
    assert first["reached_frac"] == pytest.approx(0.75)
    assert first["exponent_bound_frac"] == 0.3
    assert table.set_index("tensor")["reached_frac"].isna().tolist() == [True, False, True]
    assert table.loc[0, ["paper_frac", "best_frac", "chunk_bits"]].isna().all()


def test_names_are_told_apart_by_their_files() -> None:
    table = pd.DataFrame({"file": ["a", "b", "b"], "tensor": ["x.weight", "x.weight", "y.weight"]})
    assert analysis.labels(table).tolist() == ["a: x", "b: x", "y"]
    assert analysis.labels(table[1:]).tolist() == ["x", "y"]


def test_the_bit_map_begins_with_the_sign() -> None:
    table = analysis.bit_map(bits(tensors({"dtype": "bf16"}, {})), "ones_frac")
    first = table[table["tensor"] == "t0"]
    assert first["position"].tolist() == list(range(16))
    assert first["bit"].tolist() == list(range(15, -1, -1))
    assert first["field"].tolist() == ["sign"] + ["exponent"] * 8 + ["mantissa"] * 7
    assert first["value"].tolist() == pytest.approx([b / 100 for b in range(15, -1, -1)])
    assert first["is_invariant"].tolist() == [True] + [False] * 15
    assert table["tensor"].tolist() == ["t0"] * 16 + ["t1"] * 32
    with pytest.raises(GpubloatError, match="'tensor' is no figure of a bit"):
        analysis.bit_map(bits(tensors({})), "tensor")


@pytest.mark.parametrize(
    ("given", "unused", "used", "narrower", "finding"),
    [
        ({"hidden_zero_bits": 7}, 7, 16, "", "16 of 23 mantissa bits are used"),
        ({"hidden_zero_bits": 16}, 16, 7, "bf16", "7 of 23 mantissa bits are used: as bf16"),
        ({"hidden_zero_bits": 13}, 13, 10, "fp16", "10 of 23 mantissa bits are used: as fp16 if in its range"),
        ({"hidden_zero_bits": 25}, 23, 0, "bf16", "0 of 23 mantissa bits are used: as bf16"),
        ({"hidden_zero_bits": 32, "high_zero_bits": 32}, 32, 0, "", "all elements are zero"),
        ({"dtype": "fp64", "hidden_zero_bits": 29}, 29, 23, "fp32", "23 of 52 mantissa bits are used: as fp32 if in"),
        ({"dtype": "bf16", "hidden_zero_bits": 1}, 1, 6, "", "6 of 7 mantissa bits are used"),
        ({"dtype": "int64", "high_zero_bits": 44}, 44, 20, "uint32", "20 of 64 bits are used: as uint32"),
        ({"dtype": "int64", "high_zero_bits": 60, "hidden_zero_bits": 1}, 61, 3, "uint8", "3 of 64 bits are used: as"),
        ({"dtype": "uint8", "high_zero_bits": 4}, 4, 4, "", "4 of 8 bits are used"),
    ],
)
def test_hidden_precision(given: dict[str, Any], unused: int, used: int, narrower: str, finding: str) -> None:
    table = tensors(given)
    row = analysis.hidden_precision(table, bits(table)).iloc[0]
    assert (row["unused_bits"], row["used_bits"], row["narrower"]) == (unused, used, narrower)
    assert row["finding"].startswith(finding)
    assert row["unused_bytes"] * 8 == unused * 6400


def test_what_is_no_finding() -> None:
    table = tensors(
        {"high_zero_bits": 2}, {"dtype": "int64", "high_zero_bits": 1}, {"dtype": "bool", "high_zero_bits": 7},
        {"raw_bytes": 0, "n_rows": 0},
    )  # fmt: skip
    assert analysis.hidden_precision(table, bits(table)).empty
    assert analysis.hidden_precision(Tensors.none(), Bits.none()).empty


def test_curves_have_the_width_that_saves_most() -> None:
    table = savings(*SWEPT)
    found = analysis.by_threshold(table)
    assert found[["tensor", "chunk_bits", "threshold"]].to_numpy().tolist() == [
        ["t0", 16, 0.7], ["t0", 16, 0.9], ["t1", 32, 0.7]
    ]  # fmt: skip
    assert found["by_column_frac"].tolist() == [0.26, 0.26, 0.02]
    wide = analysis.by_threshold(table, chunk_bits=32)
    assert wide["saving_frac"].tolist() == [0.22, -0.01]
    assert wide["by_column_frac"].isna().tolist() == [True, False]
    assert analysis.by_threshold(table, method="always").empty


def test_effective_savings_by_row() -> None:
    found = analysis.effective(savings(*SWEPT))
    assert found["row_bytes"].tolist() == [200, 200]
    assert found["effective_128_frac"].tolist() == pytest.approx([0.25, -0.03])


def test_reads_in_pieces_lose_small_savings() -> None:
    found = analysis.granularity([0.08], [512, 1024, 2048]).set_index(["row_bytes", "piece_bytes"])["effective_frac"]
    assert (found * 100).round(1).to_dict() == {
        (512, 32): 6.2, (512, 128): 0, (1024, 32): 6.2, (1024, 128): 0, (2048, 32): 7.8, (2048, 128): 6.2
    }  # fmt: skip
    odd = analysis.granularity([0.11], [400])["effective_frac"]
    assert (odd * 100).round(1).tolist() == [7.7, 25]  # 356 of 400 bytes are 3 of 4 pieces
    assert analysis.granularity([0.25], [512])["effective_frac"].tolist() == [0.25, 0.25]


def test_nothing_gives_nothing() -> None:
    assert analysis.best(Savings.none()).empty
    assert analysis.against_bounds(Tensors.none(), Savings.none()).empty
    assert analysis.bit_map(Bits.none()).empty
    assert analysis.by_threshold(Savings.none()).empty
    assert analysis.effective(Savings.none()).empty
