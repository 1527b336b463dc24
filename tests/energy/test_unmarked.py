"""What PyTorch's profiler says each time it starts and ends is kept away; everything else on stderr is not."""

from __future__ import annotations

import os
from typing import Any

import pytest

from gpubloat.energy.timing import time
from gpubloat.energy.unmarked import unmarked

MARK = b"USDT:2026-12-01 05:56:37 1:1 SyncActivityProfilerHandler.cpp:52] profiler_start\n"


class Talking:
    """Writes as the profiler does, past Python."""

    def __init__(self, *said: bytes, fails: bool = False) -> None:
        self.said, self.fails = said, fails
        self.left_with: Any = None

    def __enter__(self) -> Talking:
        os.write(2, b"".join(self.said))
        if self.fails:
            raise RuntimeError("another profiler is active")
        return self

    def __exit__(self, *how: object) -> None:
        self.left_with = how[0]
        os.write(2, b"".join(self.said))


def test_marks_are_kept_away_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    with unmarked(Talking(MARK, b"WARNING: no permission\n")) as made:
        assert isinstance(made, Talking)
        os.write(2, b"USDT: is what the function says\n")
    warning = "WARNING: no permission\n"
    assert capfd.readouterr().err == f"{warning}USDT: is what the function says\n{warning}"


def test_stderr_is_back_after_an_exception(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="another profiler"), unmarked(Talking(MARK, fails=True)):
        pass
    profiler = Talking(MARK)
    with pytest.raises(ValueError, match="of the function"), unmarked(profiler):
        raise ValueError("of the function")
    assert profiler.left_with is ValueError
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


def test_a_timing_pass_lets_through_what_the_function_says_alone(torch: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def speaking() -> Any:
        os.write(2, b"step\n")
        return torch.ones(3) * 2

    time(speaking, repeats=2)
    assert capfd.readouterr().err == "step\n" * (2 + 2 + 2)
