"""The exceptions gpubloat raises: one sentence that says what is wrong, and a hint that says what to do."""

from __future__ import annotations


class GpubloatError(Exception):
    """Base of everything gpubloat raises on purpose.

    Parameters
    ----------
    message : one sentence, without a trailing full stop.
    hint : what the user can do about it, or None.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        message = printable(message)
        super().__init__(message)
        self.message = message
        self.hint = hint if hint is None else printable(hint)
        if self.hint:  # what a traceback shows below the message
            self.add_note(f"hint: {self.hint}")

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions travel back from worker processes; the default would replay __init__ with `args` alone.
        return (_rebuild, (type(self), self.args, self.__dict__))


def printable(text: str) -> str:
    """Names come from files: one with a newline or a terminal's escape sequence in it is shown escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def extra(name: str) -> str:
    """How to install what an extra of gpubloat brings: by name alone, pip would look for gpubloat on PyPI in vain."""
    clone, installed = f"pip install -e '.[{name}]'", f"pip install 'gpubloat[{name}]'"
    return f"{clone} in a clone of gpubloat, or {installed} where it is installed (it is not on PyPI)"


def sentence(error: BaseException) -> str:
    """The first line of what an exception says, after its name; of ours, what it says."""
    if isinstance(error, GpubloatError):
        return error.message
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _rebuild(cls: type[GpubloatError], args: tuple[object, ...], state: dict[str, object]) -> GpubloatError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class FormatError(GpubloatError):
    """A file is not what its format promises. Carries the path and the byte offset of the first bad field."""

    def __init__(self, path: str, offset: int, message: str, hint: str | None = None) -> None:
        super().__init__(f"{path}: at byte {offset} (0x{offset:x}): {message}", hint)
        self.path = path
        self.offset = offset
        self.detail = message


class SchemaError(GpubloatError):
    """A table does not fit its declared schema. `message` says what the table, or its column, is or does."""

    def __init__(self, table: str, column: str | None, message: str, hint: str | None = None) -> None:
        where = f"table {table}, column {column}" if column else f"table {table}"
        super().__init__(f"{where} {message}", hint)
        self.table = table
        self.column = column


class DeviceError(GpubloatError):
    """A device cannot be used; `reason` is ``absent``, ``permission`` or ``unsupported``."""

    def __init__(self, reason: str, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.reason = reason


class MissingToolError(GpubloatError):
    """A program or an optional package is not installed; the hint says how to get it."""

    def __init__(self, name: str, install: str) -> None:
        super().__init__(f"{name} is not installed", f"install it with: {install}")
        self.name = name
