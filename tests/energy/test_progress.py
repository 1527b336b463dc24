"""What is being done is said, on stderr, to those who ask."""

from __future__ import annotations

import io
import sys

import pytest

from gpubloat.energy.compare import compare
from gpubloat.energy.progress import shown
from tests.energy.rigs import Costs, Rig


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_shows_the_words_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with shown(True) as told:
        told("the whole step")
    assert "the whole step" in terminal.getvalue()
    assert not terminal.getvalue().endswith("\n")


def test_a_pipe_gets_each_stage_once(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(True) as told:  # stderr is no terminal here
        for words in ("the whole step", "operators: aten::mm, group 1 of 2", "operators: aten::add, group 2 of 2"):
            told(words)
    found = capsys.readouterr()
    assert (found.out, found.err) == ("", "gpubloat: the whole step\ngpubloat: operators\n")


def test_nothing_is_written_to_those_who_do_not_ask(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(False) as told:
        told("the whole step")
    found = capsys.readouterr()
    assert (found.out, found.err) == ("", "")


def test_each_block_of_a_comparison_is_told() -> None:
    rig, heard = Rig(), list[str]()
    compare(Costs(0.001, 400.0), Costs(0.001, 300.0), rig.meter, rig, subject="whole", told=heard.append)
    assert heard == [f"measuring the whole functions: {side}, block {n} of 12" for n, side in enumerate("ABBA" * 3, 1)]
