"""Folders that cannot be written are refused before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpubloat.cli.energy import measure
from gpubloat.errors import GpubloatError
from gpubloat.run import refuse_overwrite


def test_a_link_to_nothing_and_a_name_too_long(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(GpubloatError, match="is a link to nothing"):
        refuse_overwrite(tmp_path / "link", False)
    with pytest.raises(GpubloatError, match="cannot be written: File name too long"):
        refuse_overwrite(tmp_path / ("x" * 300), True)


def test_one_folder_by_two_names(tmp_path: Path) -> None:
    with pytest.raises(GpubloatError, match="are both"):
        measure("nothing.py", csv=tmp_path / "run", out=tmp_path / "other" / ".." / "run")
