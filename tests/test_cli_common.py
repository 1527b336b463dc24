"""Tables in terminals: nothing is cut, however narrow they are."""

from __future__ import annotations

import re

import pandas as pd
import pytest

from gpubloat.cli.common import print_table

TABLE = pd.DataFrame(
    {
        "allocator": ["caching", "stitching"],
        "peak reserved MB": [13_656.6, 4_972.4],
        "fragmentation %": [63.9, 0.8],
        "n calls": [28, 31_485],
    }
)
NUMBERS = ("13,656.6", "4,972.4", "63.9", "0.8", "28", "31,485")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> object:
    """What a terminal of so many columns shows."""

    def show(columns: int) -> list[str]:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", str(columns))
        print_table(TABLE, "what each would have reserved")
        return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in capsys.readouterr().out.splitlines()]

    return show


@pytest.mark.parametrize("columns", [200, 70, 50, 24])
def test_every_number_and_head_is_whole(shown: object, columns: int) -> None:
    lines = shown(columns)  # type: ignore[operator]
    text = "\n".join(lines)
    for word in (*NUMBERS, "caching", "stitching", "allocator", "fragmentation", "reserved", "calls"):
        assert word in text
    assert max(map(len, lines)) <= columns


def test_heads_are_stacked_before_rows_become_blocks(shown: object) -> None:
    def of(columns: int) -> int:
        return len(shown(columns))  # type: ignore[operator]

    wide, stacked, blocks = of(200), of(60), of(40)
    assert wide < stacked < blocks
