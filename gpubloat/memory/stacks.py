"""Call stacks of a snapshot, each distinct stack and each distinct frame once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from gpubloat.memory.snapshot import Snapshot

_MAX_DEPTH = 10_000
_TEXT_FACTOR = 64  # names in the table over bytes of the file, before one name on many frames is refused


class Stacks:
    """Numbers for stacks: lists of dicts with filename, name and line become rows of `stacks` and `frames`."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._stacks: dict[tuple[int, ...], int] = {}
        self._frames: dict[tuple[str, str, int], int] = {}
        self._by_id: dict[int, tuple[Any, int]] = {}  # with the frame itself: its id is not given to another object
        self._new_stacks: list[tuple[int, int, int]] = []
        self._new_frames: list[tuple[int, str, str, int]] = []
        self._text = 0

    def numbers(self, lists: list[Any]) -> Any:
        """The number of each stack, as Int64; empty where there are no frames."""
        near: dict[int, int | None] = {}  # by id: valid as long as `lists` keeps them
        return pd.array([self._number(frames, near) if frames else None for frames in lists], dtype="Int64")

    def _number(self, frames: Any, near: dict[int, int | None]) -> int | None:
        if id(frames) in near:
            return near[id(frames)]
        if not isinstance(frames, list) or len(frames) > _MAX_DEPTH:
            raise self.snapshot.error("frames is no list of calls")
        key = tuple([self._by_id[id(f)][1] if id(f) in self._by_id else self._frame(f) for f in frames])
        number = self._stacks.get(key)
        if number is None:
            number = self._stacks[key] = len(self._stacks)
            self._new_stacks += [(number, depth, frame) for depth, frame in enumerate(key)]
        near[id(frames)] = number
        return number

    def _frame(self, frame: Any) -> int:
        if not isinstance(frame, dict):
            raise self.snapshot.error("a frame is no dict")
        function, file, line = frame.get("name", ""), frame.get("filename", ""), frame.get("line", 0)
        if not isinstance(function, str) or not isinstance(file, str) or type(line) is not int:
            raise self.snapshot.error("a frame lacks its name, file or line")
        line = line if 0 <= line < 1 << 63 else 0
        key = (function, file, line)
        number = self._frames.get(key)
        if number is None:
            self._text += len(function) + len(file)
            if self._text > _TEXT_FACTOR * self.snapshot.file_bytes + 65536:
                raise self.snapshot.error("names of frames would fill far more than the file")
            number = self._frames[key] = len(self._frames)
            self._new_frames.append((number, _utf8(function), _utf8(file), line))
        self._by_id[id(frame)] = (frame, number)
        return number

    def new(self) -> dict[str, pd.DataFrame]:
        """Rows of `stacks` and `frames` that came since the last call."""
        stacks = pd.DataFrame(self._new_stacks, columns=["stack", "depth", "frame"])
        frames = pd.DataFrame(self._new_frames, columns=["frame", "function", "file", "line"])
        self._new_stacks, self._new_frames = [], []
        return {"stacks": stacks, "frames": frames}


def _utf8(text: str) -> str:
    """Lone surrogates, which no table can hold, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
