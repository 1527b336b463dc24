"""Errors carry what the user needs, also through a process pool."""

from __future__ import annotations

import copy
import pickle
import traceback

import pytest

from gpubloat import errors


@pytest.mark.parametrize(
    "error",
    [
        errors.GpubloatError("a", "b"),
        errors.FormatError("lib.so", 64, "no magic", "hint"),
        errors.SchemaError("elements", "kind", "is bad"),
        errors.DeviceError("absent", "no GPU"),
        errors.MissingToolError("gcc", "apt install gcc"),
    ],
)
def test_errors_survive_pickling(error: errors.GpubloatError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.__dict__ == error.__dict__


def test_a_traceback_shows_the_hint_once_also_of_copies() -> None:
    error = errors.SchemaError("elements", "kind", "is bad", "look at\nit")
    for shown in (error, pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(error)))), copy.copy(error)):
        lines = "".join(traceback.format_exception(shown)).splitlines()
        assert lines == ["gpubloat.errors.SchemaError: table elements, column kind is bad", "hint: look at\\nit"]
    plain = traceback.format_exception(errors.GpubloatError("bad"))
    assert plain == ["gpubloat.errors.GpubloatError: bad\n"]


def test_a_format_error_names_path_and_offset() -> None:
    error = errors.FormatError("lib.so", 64, "no magic")
    assert str(error) == "lib.so: at byte 64 (0x40): no magic"


def test_an_extra_is_installed_from_a_clone_or_beside_gpubloat() -> None:
    told = errors.MissingToolError("nbformat", errors.extra("notebooks")).hint
    assert told is not None
    assert "pip install -e '.[notebooks]' in a clone" in told
    assert "pip install 'gpubloat[notebooks]' where it is installed (it is not on PyPI)" in told
