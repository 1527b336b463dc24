"""A function of a file to measure: ``FILE.py:function``, with arguments from ``inputs(seed)`` of the same file."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gpubloat.errors import GpubloatError, sentence

INPUTS = "inputs"
_FRAMEWORKS = ("torch", "jax", "numpy", "transformers")
_numbers = itertools.count()
_folders: list[Path] = []  # of the workloads that are loaded now


@dataclass(frozen=True)
class Workload:
    """name : "file.py:function". Call ``fn(*args)``. make : arguments by seed; has_inputs : whether it matters."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    make: Callable[[int], tuple[Any, ...]]
    has_inputs: bool


@contextlib.contextmanager
def workload(spec: str, seed: int = 0, given: tuple[Any, ...] | None = None) -> Iterator[Workload]:
    """Load a file and find the function. Measure it inside the block.

    Until the block ends, the folder of the file is first on `sys.path`, as with ``python FILE.py``; then the path, and
    the modules that came from that folder, are as before. The file is not run as a program: its ``__name__`` is not
    "__main__". What it prints, many times, goes to stderr; it finds nothing to read.

    Parameters
    ----------
    spec : FILE.py:function; FILE.py alone if it defines one function, beside `inputs`.
    seed : of ``inputs(seed)``, which gives the tuple of arguments. A function without parameters needs none.
    given : arguments for a file that has no ``inputs(seed)``.

    Raises
    ------
    GpubloatError : no such file or function, the file raised, arguments that do not fit, a generator or coroutine.
    """
    file, name = split(spec)
    with _apart(), _loaded(file) as module:
        fn = _function(module, file, name)
        called = f"{file.name}:{name or getattr(fn, '__name__', '')}"
        if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
            raise GpubloatError(
                f"{called} is a generator or coroutine, which runs only when asked", "measure a function that runs it"
            )

        def make(seed: int) -> tuple[Any, ...]:
            return _arguments(module, file, fn, called, seed, given)

        yield Workload(called, fn, make(seed), make, hasattr(module, INPUTS))


def kinds(args: tuple[Any, ...]) -> set[str]:
    """Packages whose tensors are among arguments: torch, jaxlib, numpy..."""
    found = set()
    for one in args:
        parts = list(one.values()) if isinstance(one, dict) else one
        if isinstance(parts, (list, tuple)):
            found |= kinds(tuple(parts))
        elif hasattr(one, "shape"):
            found.add(type(one).__module__.partition(".")[0])
    return found


def split(spec: str) -> tuple[Path, str]:
    """The file and the function that "FILE.py:function" names; GpubloatError if there is no such file."""
    head, colon, name = spec.rpartition(":")
    # No function was named: C:\file.py, or a file whose name has a colon.
    if not colon or not name.isidentifier() or Path(spec).is_file():
        head, name = spec, ""
    file = Path(head)
    if file.is_dir():
        raise GpubloatError(f"{file} is a folder", "give FILE.py:function")
    if not file.is_file():
        raise GpubloatError(f"{file} does not exist", "give FILE.py:function")
    if file.suffix != ".py":
        raise GpubloatError(f"{file} is no Python file", "give FILE.py:function")
    return file, name


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Standard input and output are the command's own."""
    before = sys.stdin
    with open(os.devnull, encoding="utf-8") as nothing, contextlib.redirect_stdout(sys.stderr):
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = before


@contextlib.contextmanager
def _loaded(file: Path) -> Iterator[ModuleType]:
    folder = file.resolve().parent
    name = f"workload_{next(_numbers)}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise GpubloatError(f"{file} is no Python file", "give FILE.py:function")
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    # Two files may each have a neighbour of the same name, such as common.py.
    hidden = {key: one for key, one in sys.modules.items() if any(_is_in(one, f) for f in _folders if f != folder)}
    before = set(sys.modules) - set(hidden)
    for key in hidden:
        del sys.modules[key]
    sys.modules[name] = module  # dataclasses and pickle look there
    sys.path.insert(0, str(folder))
    _folders.append(folder)
    try:
        _execute(spec.loader, module, file)
        yield module
    finally:
        sys.path[:] = path
        _folders.remove(folder)
        if folder not in _folders:
            for key in [k for k, one in sys.modules.items() if k not in before and _is_in(one, folder)]:
                del sys.modules[key]
        sys.modules.pop(name, None)
        sys.modules.update(hidden)


def _is_in(module: ModuleType, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and os.path.abspath(file).startswith(os.path.join(folder, ""))


def _execute(loader: Any, module: ModuleType, file: Path) -> None:
    try:
        loader.exec_module(module)
    except SystemExit:
        raise GpubloatError(
            f"{file} ends the program when it is loaded", 'put what it does under `if __name__ == "__main__":`'
        ) from None
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        hint = f"install it in this environment: pip install {missing}" if missing in _FRAMEWORKS else None
        raise GpubloatError(f"{file} cannot be loaded{_place(error, file)}: {sentence(error)}", hint) from error


def _place(error: BaseException, file: Path) -> str:
    """The last line of the file itself that an exception passed."""
    if isinstance(error, SyntaxError):
        return f" (line {error.lineno})"
    numbers = []
    trace = error.__traceback__
    while trace is not None:
        if os.path.abspath(trace.tb_frame.f_code.co_filename) == os.path.abspath(file):
            numbers.append(trace.tb_lineno)
        trace = trace.tb_next
    return f" (line {numbers[-1]})" if numbers else ""


def _function(module: ModuleType, file: Path, name: str) -> Callable[..., Any]:
    own = {
        key: thing
        for key, thing in vars(module).items()
        if inspect.isfunction(thing) and thing.__module__ == module.__name__ and not key.startswith("_")
    }
    own.pop(INPUTS, None)
    listed = f"it has {', '.join(own)}" if own else "it defines no function"
    if not name:
        if len(own) != 1:
            raise GpubloatError(f"{file} defines {len(own)} functions", f"say which, FILE.py:function: {listed}")
        return next(iter(own.values()))
    if not hasattr(module, name):
        raise GpubloatError(f"{file} has no function {name}", listed)
    fn = getattr(module, name)
    if not callable(fn):
        raise GpubloatError(f"{file}:{name} is no function but a {type(fn).__name__}", listed)
    found: Callable[..., Any] = fn
    return found


def _arguments(
    module: ModuleType, file: Path, fn: Callable[..., Any], called: str, seed: int, given: tuple[Any, ...] | None
) -> tuple[Any, ...]:
    signature = _signature(fn)
    if signature is not None and not signature.parameters:
        return ()
    maker = getattr(module, INPUTS, None)
    if not callable(maker):
        if signature is None or _fits(signature, ()):
            return ()
        if given is not None and _fits(signature, given):
            return given
        wanted = ", ".join(signature.parameters)
        raise GpubloatError(
            f"{called} needs arguments ({wanted}), and {file.name} has no inputs(seed)",
            "define inputs(seed), which returns the tuple of arguments",
        )
    try:
        args = maker(seed)
    except Exception as error:
        raise GpubloatError(f"{file.name}:inputs({seed}) failed{_place(error, file)}: {sentence(error)}") from error
    if not isinstance(args, (tuple, list)):
        raise GpubloatError(
            f"{file.name}:inputs({seed}) returns a {type(args).__name__}", "return the tuple of arguments"
        )
    if signature is not None and not _fits(signature, args):
        raise GpubloatError(
            f"{called} cannot be called with the {len(args)} arguments of inputs({seed})",
            f"it takes ({', '.join(signature.parameters)})",
        )
    return tuple(args)


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    """None where Python does not know it. A module of PyTorch has that of its `forward`."""
    try:
        return inspect.signature(getattr(fn, "forward", fn))
    except (TypeError, ValueError):
        return None


def _fits(signature: inspect.Signature, args: Any) -> bool:
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True
