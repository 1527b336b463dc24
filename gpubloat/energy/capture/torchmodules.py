"""Which module of PyTorch runs: global hooks that are removed again, whatever happens."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

_COMPILED = "_orig_mod"  # what torch.compile calls the module that it wraps


@contextmanager
def modules_watched(fn: Any) -> Iterator[Callable[[], str]]:
    """Gives a function that returns the path of the module that runs in this thread, such as "transformer.h.0.mlp".

    Paths are relative to `fn` if it is a module, else to the first module that it calls; these are "" themselves.
    Modules below neither are called by their class.
    """
    hooks = import_module("torch.nn.modules.module")
    names: dict[int, str] = {}
    held: list[Any] = []  # modules, so that their ids stay theirs
    running: dict[int, list[int]] = defaultdict(list)

    def name_all(root: Any) -> None:
        prefix = type(root).__name__ if held else ""
        held.append(root)
        for path, module in root.named_modules():
            parts = [part for part in (prefix, *path.split(".")) if part and part != _COMPILED]
            names.setdefault(id(module), ".".join(parts))
            held.append(module)

    def enter(module: Any, _: Any) -> None:
        if id(module) not in names:
            name_all(module)
        running[threading.get_ident()].append(id(module))

    def leave(module: Any, *_: Any) -> None:
        stack = running[threading.get_ident()]
        while stack and stack.pop() != id(module):
            pass  # modules whose own hooks were skipped by an exception

    def path() -> str:
        stack = running.get(threading.get_ident())
        return names[stack[-1]] if stack else ""

    if hasattr(fn, "named_modules"):
        name_all(fn)
    handles = []
    try:
        handles.append(hooks.register_module_forward_pre_hook(enter))
        handles.append(hooks.register_module_forward_hook(leave, always_call=True))
        yield path
    finally:
        for handle in handles:
            handle.remove()
