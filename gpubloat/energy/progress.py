"""What is being done, as one line on stderr: measurements take minutes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Told = Callable[[str], None]


def silent(_: str) -> None:
    """For those who do not ask."""


@contextlib.contextmanager
def shown(wanted: bool) -> Iterator[Told]:
    """Give what to call with a few words on each step; the line, with the time since the last words, ends with the
    block. Nothing is written where stderr is no terminal.
    """
    if not wanted:
        yield silent
        return
    from tqdm.auto import tqdm

    with tqdm(bar_format="{desc} [{elapsed}]", disable=None, leave=False) as line:

        def told(what: str) -> None:
            line.reset()
            line.set_description_str(what)

        yield told
