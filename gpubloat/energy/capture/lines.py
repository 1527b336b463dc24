"""Which line of the user's code runs: frames that are neither the framework's, nor the standard library's, nor ours."""

from __future__ import annotations

import functools
import linecache
import os
import site
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

from gpubloat.energy.capture.records import Line

OURS = str(Path(os.path.abspath(__file__)).parents[2]) + os.sep
FRAMEWORKS = ("torch", "functorch", "jax", "jaxlib")
_ENGINE = "_engine_run_backward"  # of torch/autograd/graph.py: what it calls is a backward pass
_COMPILED = "compile_wrapper", os.path.join("torch", "_dynamo", "eval_frame.py")  # calls what torch.compile made


@dataclass(frozen=True)
class Stack:
    """Frames of a thread.

    lines : the user's, innermost first. is_backward : PyTorch's backward engine was entered further in than the
    innermost of them, so they say where ``backward`` was called. is_compiled : torch.compile's wrapper is among them.
    """

    lines: tuple[Line, ...]
    is_backward: bool
    is_compiled: bool


def here(outermost: CodeType | None = None) -> Stack:
    """Frames of this thread, up to the frame that runs `outermost`."""
    found = []
    is_backward = is_compiled = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        code = frame.f_code
        if shown(code.co_filename) is not None:
            found.append(_line(code, frame.f_lineno))
        elif not found and code.co_name == _ENGINE:
            is_backward = True
        elif code.co_name == _COMPILED[0] and code.co_filename.endswith(_COMPILED[1]):
            is_compiled = True
        frame = frame.f_back
    return Stack(tuple(found), is_backward, is_compiled)


def raised(error: BaseException) -> Line | None:
    """The line of the user's own code that an exception passed last; of installed packages if it passed none."""
    passed = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if shown(code.co_filename) is not None:
            passed.append((code, trace.tb_lineno))
        trace = trace.tb_next
    own = [(code, number) for code, number in passed if not os.path.abspath(code.co_filename).startswith(_packages())]
    return _line(*(own or passed)[-1]) if passed else None


def raised_at(error: BaseException) -> str:
    """`raised` as it is told behind other words; "" if it is not known."""
    line = raised(error)
    return "" if line is None else f" at {line.file}:{line.line}"


@functools.lru_cache(maxsize=1 << 16)
def _line(code: CodeType, number: int) -> Line:
    return at(code.co_filename, number, code.co_name)


def at(path: str, number: int, function: str) -> Line:
    """The line `number` of a file, with its text where the file can be read (also that of a notebook's cell)."""
    return Line(shown(path) or Path(path).name, number, function, linecache.getline(path, number).strip())


@functools.lru_cache(maxsize=1 << 14)
def shown(path: str) -> str | None:
    """How a file is named: below the working folder or a folder that modules are imported from; None: not the user's.

    A file that lies nowhere of these goes by its name alone: a machine's folders are nobody's business.
    """
    if path.startswith(("<frozen", "<eval_with_key", "<__array_function__", OURS)):
        return None
    if path.startswith("<"):
        return path
    full = os.path.abspath(path)
    for folder in _packages():
        if full.startswith(folder):
            inner = full[len(folder) :]
            return None if inner.split(os.sep)[0] in FRAMEWORKS else inner
    if full.startswith(_standard()):
        return None
    for folder in (os.getcwd(), *sys.path):
        start = os.path.join(os.path.abspath(folder), "")
        if start != os.sep and full.startswith(start):
            return full[len(start) :]
    return os.path.basename(full)


@functools.cache
def _packages() -> tuple[str, ...]:
    """Folders of installed packages; those of frameworks that were imported from elsewhere too."""
    known = {*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("purelib", "platlib"))}
    for name in FRAMEWORKS:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file:
            known.add(str(Path(file).parents[1]))
    return tuple(os.path.join(folder, "") for folder in sorted(known, key=len, reverse=True))


@functools.cache
def _standard() -> tuple[str, ...]:
    return tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})
