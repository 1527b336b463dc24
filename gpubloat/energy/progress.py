"""What is being done, on stderr, as measurements take minutes: a line that changes in a terminal, else one a stage."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Told = Callable[[str], None]


def silent(_: str) -> None:
    """For those who do not ask."""


@contextlib.contextmanager
def shown(wanted: bool) -> Iterator[Told]:
    """Give what to call with a few words on each step: the stage, and after a colon what changes often.

    In a terminal, the line goes with the block. A pipe or a file gets each stage once, when it begins.
    """
    if not wanted:
        yield silent
        return
    from tqdm.auto import tqdm

    with tqdm(bar_format="{desc}", disable=None, leave=False) as line:
        yield _stages() if line.disable else line.set_description_str


def _stages() -> Told:
    last = ""

    def told(words: str) -> None:
        nonlocal last
        stage = words.partition(": ")[0]
        if stage != last:
            print(f"gpubloat: {stage}", file=sys.stderr, flush=True)
            last = stage

    return told
