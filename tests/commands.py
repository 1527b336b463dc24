"""`gpubloat <instrument>` run in the process of the test: its exit status and what it printed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from gpubloat.cli import main


class Done(NamedTuple):
    status: int
    out: str
    error: str

    def refused(self) -> tuple[str, str]:
        """Sentence and hint of an error; nothing else may have been said."""
        assert (self.status, self.out) == (1, "")
        sentence, hint = self.error.splitlines()
        assert sentence.startswith("gpubloat: ")
        assert hint.startswith("  hint: ")
        return sentence, hint


Command = Callable[..., Done]


def command(instrument: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """What runs `gpubloat <instrument>` with the words that it is given."""

    def run(*words: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["gpubloat", instrument, *map(str, words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(int(ended.value.code or 0), *capfd.readouterr())

    return run
