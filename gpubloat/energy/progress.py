"""What is being done, as one line on stderr: measurements take minutes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Told = Callable[[str], None]


def silent(_: str) -> None:
    """For those who do not ask."""


@contextlib.contextmanager
def shown(wanted: bool) -> Iterator[Told]:
    """Give what to call with a few words on each step. The line goes with the block; a pipe gets none."""
    if not wanted:
        yield silent
        return
    from tqdm.auto import tqdm

    with tqdm(bar_format="{desc}", disable=None, leave=False) as line:
        yield line.set_description_str
