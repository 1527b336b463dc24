"""Measured beside published: five-row tables worked by hand."""

from __future__ import annotations

import pandas as pd
import pytest

from gpubloat import published
from gpubloat.analysis.compare import beside, known
from gpubloat.errors import GpubloatError

ON = ["subject", "quantity"]
NAN = float("nan")


def theirs(*rows: tuple[str, str, str, float, float, float, str]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["subject", "quantity", "unit", "value", "lower", "upper", "status"])


def ours(*rows: tuple[str, str, float, str]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["subject", "quantity", "value", "unit"])


PRINTED = theirs(
    ("a", "file_reduction", "percent", 50.0, NAN, NAN, "stated"),
    ("a", "file", "MB", 4000.0, 3900.0, 4100.0, "digitised"),
    ("b", "file_reduction", "percent", NAN, 46.0, 72.0, "bound"),
    ("b", "n_libraries", "count", 100.0, NAN, NAN, "stated"),
    ("c", "file", "MB", NAN, NAN, NAN, "missing"),
)


def test_five_rows_by_hand() -> None:
    measured = ours(
        ("a", "file_reduction", 0.6, "frac"),  # 60 percent against 50: 1.2, and no bound to be inside of
        ("a", "file", 3_000_000_000.0, "bytes"),  # 3000 MB, below 3900: outside, 0.75
        ("b", "file_reduction", 0.72, "frac"),  # exactly the upper end: inside, no value to divide by
        ("c", "file", 2_500_000.0, "bytes"),  # 2.5 MB beside a gap
        ("d", "file", 1.0, "bytes"),  # nobody published it
    )
    table = beside(measured, PRINTED, on=ON, conditions="H200, not T4")
    assert table["subject"].tolist() == ["a", "a", "b", "b", "c"]
    assert table["measured"].tolist() == pytest.approx([60.0, 3000.0, 72.0, NAN, 2.5], nan_ok=True)
    assert table["published"].tolist() == pytest.approx([50.0, 4000.0, NAN, 100.0, NAN], nan_ok=True)
    assert table["within"].isna().tolist() == [True, False, False, True, True]
    assert table["within"].dropna().tolist() == [False, True]
    assert table["ratio"].tolist() == pytest.approx([1.2, 0.75, NAN, NAN, NAN], nan_ok=True)
    assert table["status"].tolist() == PRINTED["status"].tolist()
    assert table["conditions"].unique().tolist() == ["H200, not T4"]
    assert str(table["within"].dtype) == "boolean"


@pytest.mark.parametrize(
    ("value", "unit", "printed_unit", "expected"),
    [
        (0.55, "frac", "percent", 55.0),
        (55.0, "percent", "frac", 0.55),
        (0.9, "frac", "ratio", 0.9),
        (3_762_000_000.0, "bytes", "MB", 3762.0),
        (3762.0, "MB", "bytes", 3_762_000_000.0),
        (2**30, "bytes", "MiB", 1024.0),
        (0.25, "s", "ms", 250.0),
        (0.0005, "j", "mJ", 0.5),
        (7.0, "bytes", "bytes", 7.0),
        (7.0, "Hz", "Hz", 7.0),
        (7.0, "Hz", "percent", NAN),  # different things never meet
        (7.0, "bytes", "percent", NAN),
    ],
)
def test_units(value: float, unit: str, printed_unit: str, expected: float) -> None:
    table = beside(
        ours(("a", "q", value, unit)), theirs(("a", "q", printed_unit, 1.0, NAN, NAN, "stated")), on=ON, conditions="x"
    )
    assert table["measured"].tolist() == pytest.approx([expected], nan_ok=True)
    assert table["unit"].tolist() == [printed_unit]


def test_a_reduction_in_percent_does_not_meet_one_in_megabytes() -> None:
    printed = theirs(("a", "q", "MB", 3.0, NAN, NAN, "stated"), ("a", "q", "percent", 20.0, NAN, NAN, "stated"))
    table = beside(ours(("a", "q", 0.1, "frac"), ("a", "q", 6e6, "bytes")), printed, on=ON, conditions="x")
    assert table["ratio"].tolist() == pytest.approx([2.0, 0.5])


@pytest.mark.parametrize(
    ("quantity", "printed_quantity", "printed_unit", "expected"),
    [
        ("file_reduction_frac", "file_reduction", "percent", 200.0),
        ("file_bytes", "file", "MB", 2e-6),
        ("execution_time_s", "execution_time", "s", 2.0),
        ("n_functions", "n_functions", "count", 2.0),
        ("n_bytes", "n_bytes", "count", 2.0),  # a count of bytes stays a count
    ],
)
def test_a_unit_suffix_stands_for_the_unit(
    quantity: str, printed_quantity: str, printed_unit: str, expected: float
) -> None:
    printed = theirs(("a", printed_quantity, printed_unit, 1.0, NAN, NAN, "stated"))
    table = beside(ours(("a", quantity, 2.0, "")), printed, on=ON, conditions="x")
    assert table["measured"].tolist() == pytest.approx([expected])


@pytest.mark.parametrize(
    ("value", "lower", "upper", "within"),
    [(0.55, NAN, 55.0, True), (0.56, NAN, 55.0, False), (0.99, 99.0, NAN, True), (0.98, 99.0, NAN, False)],
)
def test_open_bounds_include_their_end(value: float, lower: float, upper: float, within: bool) -> None:
    printed = theirs(("a", "q", "percent", NAN, lower, upper, "bound"))
    assert beside(ours(("a", "q", value, "frac")), printed, on=ON, conditions="x")["within"].tolist() == [within]


def test_joining_on_the_quantity_alone_keeps_the_published_subject() -> None:
    table = beside(ours(("mine", "file_reduction", 0.5, "frac")), PRINTED, on=["quantity"], conditions="x")
    assert table["subject"].tolist() == PRINTED["subject"].tolist()
    assert table["measured"].tolist() == pytest.approx([50.0, NAN, 50.0, NAN, NAN], nan_ok=True)


def test_the_inputs_are_left_alone() -> None:
    measured, printed = ours(("a", "file_bytes", 1.0, "")), PRINTED.copy()
    beside(measured, printed, on=ON, conditions="x")
    assert measured["quantity"].tolist() == ["file_bytes"]
    pd.testing.assert_frame_equal(printed, PRINTED)


def test_nothing_measured_and_nothing_published() -> None:
    table = beside(ours(), PRINTED, on=ON, conditions="x")
    assert len(table) == 5
    assert table["measured"].isna().all()
    assert table["within"].isna().all()
    assert beside(ours(("a", "q", 1.0, "s")), PRINTED[:0], on=ON, conditions="x").empty


def test_two_measurements_of_one_thing_are_refused() -> None:
    with pytest.raises(GpubloatError, match="measured twice"):
        beside(ours(("a", "file", 1.0, "MB"), ("a", "file", 1.0, "bytes")), PRINTED, on=ON, conditions="x")


def test_a_comparison_must_name_its_conditions() -> None:
    with pytest.raises(GpubloatError, match="conditions"):
        beside(ours(), PRINTED, on=ON, conditions=" ")


def test_the_real_numbers_go_in() -> None:
    printed = published.load("negativa_ml", "Table 2")
    measured = ours(("PyTorch/Train/MobileNetV2", "file_reduction_frac", 0.44, ""))
    table = beside(measured, printed, on=ON, conditions="H200, torch 2.14")
    assert len(table) == len(printed)
    assert table["ratio"].dropna().tolist() == pytest.approx([0.8])


def test_known_leaves_out_what_is_empty_on_both_sides() -> None:
    table = known(beside(ours(("b", "file_reduction", 0.5, "frac")), PRINTED, on=ON, conditions="other GPU"))
    assert not {"status", "conditions"} & set(table.columns)
    # Printed with a number, or measured beside a bound; the gap of c is in neither.
    assert list(zip(table["subject"], table["quantity"])) == [
        ("a", "file_reduction"), ("a", "file"), ("b", "file_reduction"), ("b", "n_libraries"),
    ]  # fmt: skip
