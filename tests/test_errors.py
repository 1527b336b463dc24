"""Errors carry what the user needs, also through a process pool."""

from __future__ import annotations

import pickle

import pytest

from gpubloat import errors


@pytest.mark.parametrize(
    "error",
    [
        errors.GpubloatError("a", "b"),
        errors.FormatError("lib.so", 64, "no magic", "hint"),
        errors.SchemaError("elements", "kind", "bad"),
        errors.DeviceError("absent", "no GPU"),
        errors.MissingToolError("gcc", "apt install gcc"),
    ],
)
def test_errors_survive_pickling(error: errors.GpubloatError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__


def test_a_format_error_names_path_and_offset() -> None:
    error = errors.FormatError("lib.so", 64, "no magic")
    assert str(error) == "lib.so: at byte 64 (0x40): no magic"
