"""What a PyTorch pickle says, without unpickling it: nothing is imported, no class is made, nothing is called.

Source: pickletools of the standard library (opcodes); torch/_utils.py and torch/serialization.py (what they stand for).

The machine's stack holds numbers, texts, lists, tuples, `Pairs` for dictionaries, and inert records for the rest. A
pickle may name only what stands in `KNOWN` here: a file that names anything else, such as os.system, is refused.
"""

from __future__ import annotations

import pickletools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpubloat.tensors.files.mapped import Bytes

_MAX_SIZE = 16 << 20  # of the pickle; those of large models have less than 1 MiB
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "UntypedStorage": "", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip
_DTYPES = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "bool", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "complex32",
    "complex64", "complex128",
]  # fmt: skip
_CALLED = {
    "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3", "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state", "torch._tensor._rebuild_from_type_v2", "collections.OrderedDict",
    "torch.Size", "torch.device", "_codecs.encode", "builtins.set", "__builtin__.set",
}  # fmt: skip
_STORAGE_NAMES = {f"{module}.{name}" for module in ("torch", "torch.storage") for name in _STORAGES}
KNOWN = {
    *_CALLED, *_STORAGE_NAMES, *(f"torch.{name}" for name in _DTYPES), "torch.Tensor", "torch.nn.parameter.Parameter",
}  # fmt: skip


class Pairs(list[tuple[Any, Any]]):
    """A dictionary as pairs: keys from a file are not hashed."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name that the pickle would import."""

    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes that tensors are views of. `dtype` is PyTorch's name, empty where the tensors say theirs."""

    key: str
    dtype: str
    n_elements: int


@dataclass(frozen=True, slots=True)
class View:
    """A tensor: elements of a storage from `offset` on, `stride` elements apart in each dimension; not yet checked."""

    storage: Storage
    dtype: str
    offset: Any
    shape: Any
    stride: Any
    is_pending: bool  # conjugate or negative, to be worked out when it is read


class _Opaque:
    """Something that holds no tensor: a device, encoded bytes."""


class _Mark:
    """Where a list of operands begins on the stack."""


class _Bad(Exception):
    """Operands that do not fit their opcode."""


class _Unknown(Exception):
    """A name that is not in `KNOWN`."""


_MARK = _Mark()


def walk(file: Bytes) -> Any:
    """The object that `file` describes, of the kinds above. FormatError: damaged, or it names what is not known."""
    if file.size > _MAX_SIZE:
        raise file.error(0, f"a pickle of {file.size} bytes; at most {_MAX_SIZE} are read")
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    at = 0
    try:
        with warnings.catch_warnings(action="ignore"):  # pickletools warns of backslashes in texts of old pickles
            for opcode, argument, position in pickletools.genops(file.read(0, file.size, "pickle")):
                at = position or 0
                if opcode.name == "STOP":
                    return _popped(stack)
                elif opcode.name in _MEMO:
                    _MEMO[opcode.name](stack, memo, argument)
                elif opcode.name in _STEPS:
                    _STEPS[opcode.name](stack, argument)
                else:
                    raise _Bad(f"opcode {opcode.name} is not one that PyTorch writes")
    except _Unknown as error:
        raise file.error(
            at,
            f"the pickle would call {error}, which is not what files of tensors need; nothing of it was run",
            "if you trust the file, load it with PyTorch and save its state_dict as .safetensors",
        ) from None
    except (_Bad, ValueError, OverflowError, LookupError, TypeError, AttributeError) as error:
        raise file.error(at, f"the pickle is damaged: {error}") from None
    raise file.error(at, "the pickle has no end")


def _popped(stack: list[Any]) -> Any:
    if not stack or stack[-1] is _MARK:
        raise _Bad("an operand is missing")
    return stack.pop()


def _since_mark(stack: list[Any]) -> list[Any]:
    at = len(stack) - 1
    while at >= 0 and stack[at] is not _MARK:
        at -= 1
    if at < 0:
        raise _Bad("the start of a list of operands is missing")
    found = stack[at + 1 :]
    del stack[at:]
    return found


def _top(stack: list[Any], kind: type[Any]) -> Any:
    if not stack or type(stack[-1]) is not kind:
        raise _Bad(f"no {kind.__name__.lower()} to add to")
    return stack[-1]


def _global(stack: list[Any], name: Any) -> None:
    if name not in KNOWN:
        raise _Unknown(name[:200])
    stack.append(Global(name))


def _stack_global(stack: list[Any]) -> None:
    name, module = _popped(stack), _popped(stack)
    if not isinstance(name, str) or not isinstance(module, str):
        raise _Bad("a name to import is no text")
    _global(stack, f"{module}.{name}")


def _tuple(stack: list[Any], n: int) -> None:
    items = [_popped(stack) for _ in range(n)]
    stack.append(tuple(reversed(items)))


def _append(stack: list[Any]) -> None:
    item = _popped(stack)
    _top(stack, list).append(item)


def _appends(stack: list[Any]) -> None:
    items = _since_mark(stack)
    _top(stack, list).extend(items)


def _set_item(stack: list[Any]) -> None:
    value, key = _popped(stack), _popped(stack)
    _top(stack, Pairs).append((key, value))


def _set_items(stack: list[Any]) -> None:
    items = _since_mark(stack)
    if len(items) % 2:
        raise _Bad("a key without its value")
    _top(stack, Pairs).extend(zip(items[::2], items[1::2]))


def _reduce(stack: list[Any]) -> None:
    arguments, function = _popped(stack), _popped(stack)
    if not isinstance(function, Global) or function.name not in _CALLED or not isinstance(arguments, tuple):
        raise _Bad("it calls something that is no function")
    stack.append(_called(function.name, arguments))


def _called(name: str, arguments: tuple[Any, ...]) -> Any:
    """What stands for the result of a call."""
    short = name.rpartition(".")[2]
    if short == "_rebuild_tensor_v2":
        storage, offset, shape, stride, _, _, *rest = arguments
        return _view(storage, storage.dtype, offset, shape, stride, rest)
    if short == "_rebuild_tensor_v3":
        storage, offset, shape, stride, _, _, dtype, *rest = arguments
        return _view(storage, dtype.name.removeprefix("torch."), offset, shape, stride, rest)
    if short in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
        return arguments[0]
    if short == "_rebuild_from_type_v2":
        function, _, inner, *_ = arguments
        if not isinstance(function, Global) or not isinstance(inner, tuple) or function.name not in _CALLED:
            raise _Bad("it rebuilds something that is no tensor")
        if function.name == name:
            raise _Bad("it rebuilds a tensor twice")
        return _called(function.name, inner)
    if short == "OrderedDict":
        if arguments:
            raise _Bad("a dictionary that is made of something else")
        return Pairs()
    if short == "Size":
        (size,) = arguments
        return size
    return _Opaque()


def _view(storage: Any, dtype: str, offset: Any, shape: Any, stride: Any, rest: list[Any]) -> View:
    if not isinstance(storage, Storage):
        raise _Bad("a tensor without a storage")
    return View(storage, dtype, offset, shape, stride, bool(rest and rest[0]))


def _build(stack: list[Any]) -> None:
    _popped(stack)  # attributes, such as the versions of modules that a state_dict has
    if not stack or not isinstance(stack[-1], (Pairs, View, _Opaque)):
        raise _Bad("attributes of something that has none")


def _persistent(stack: list[Any]) -> None:
    said = _popped(stack)
    if not isinstance(said, tuple) or len(said) != 5 or said[0] != "storage" or not isinstance(said[1], Global):
        raise _Bad("a reference to something else than a storage")
    _, kind, key, _, n_elements = said
    if kind.name not in _STORAGE_NAMES or not isinstance(key, str) or type(n_elements) is not int or n_elements < 0:
        raise _Bad("a reference to a storage that is none")
    stack.append(Storage(key, _STORAGES[kind.name.rpartition(".")[2]], n_elements))


def _put(stack: list[Any], memo: dict[int, Any], key: int) -> None:
    if not stack:
        raise _Bad("an operand is missing")
    memo[key] = stack[-1]


def _push(stack: list[Any], value: Any) -> None:
    stack.append(value)


_PUSHED = [
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
]  # fmt: skip
_STEPS: dict[str, Callable[[list[Any], Any], None]] = {
    **dict.fromkeys(_PUSHED, _push),
    **dict.fromkeys(("PROTO", "FRAME"), lambda stack, value: None),  # noqa: ARG005
    "NONE": lambda stack, _: stack.append(None),
    "NEWTRUE": lambda stack, _: stack.append(True),
    "NEWFALSE": lambda stack, _: stack.append(False),
    "MARK": lambda stack, _: stack.append(_MARK),
    "EMPTY_DICT": lambda stack, _: stack.append(Pairs()),
    "EMPTY_LIST": lambda stack, _: stack.append([]),
    "EMPTY_SET": lambda stack, _: stack.append([]),
    "EMPTY_TUPLE": lambda stack, _: stack.append(()),
    "TUPLE": lambda stack, _: stack.append(tuple(_since_mark(stack))),
    "TUPLE1": lambda stack, _: _tuple(stack, 1),
    "TUPLE2": lambda stack, _: _tuple(stack, 2),
    "TUPLE3": lambda stack, _: _tuple(stack, 3),
    "APPEND": lambda stack, _: _append(stack),
    "APPENDS": lambda stack, _: _appends(stack),
    "ADDITEMS": lambda stack, _: _appends(stack),
    "SETITEM": lambda stack, _: _set_item(stack),
    "SETITEMS": lambda stack, _: _set_items(stack),
    "GLOBAL": lambda stack, name: _global(stack, name.replace(" ", ".", 1)),
    "STACK_GLOBAL": lambda stack, _: _stack_global(stack),
    "REDUCE": lambda stack, _: _reduce(stack),
    "BUILD": lambda stack, _: _build(stack),
    "BINPERSID": lambda stack, _: _persistent(stack),
}
_MEMO: dict[str, Callable[[list[Any], dict[int, Any], Any], None]] = {
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda stack, memo, key: stack.append(memo[key])),
    "MEMOIZE": lambda stack, memo, _: _put(stack, memo, len(memo)),
}
