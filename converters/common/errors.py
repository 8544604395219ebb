"""The errors that a user can cause.

Every message states what is wrong and where; `hint` says why or what to check, `tries` are commands or values that
would work. The command line prints them as `error:` / `hint:` / `try:` lines and exits with `exit_code`.
"""

from collections.abc import Sequence
from pickle import PickleError

from converters.common.fold import fold_texts


class TitanError(Exception):
    """Base of every error that a user can cause."""

    exit_code = 2
    kind = "machine"  # of the object that `--json` prints; here: a disk, a permission, memory

    def __init__(self, message: str, *, hint: str = "", tries: Sequence[str] = ()):
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.tries = tuple(tries)


class ConfigError(TitanError):
    """A config file, an override or an option has an invalid value."""

    kind = "config"


class CheckpointError(TitanError):
    """A checkpoint is missing, damaged, incomplete, or not what was asked for."""

    kind = "checkpoint"


class Missing(CheckpointError):
    """There is nothing at a place. Nothing is concluded from another error of a store, which cannot be asked then."""


class Damaged(CheckpointError):
    """A checkpoint's files are not those that its manifest lists."""


class DataError(TitanError):
    """Text, a tokenizer or a token index is missing, damaged, or not what was asked for."""

    kind = "data"


class UnsupportedError(TitanError):
    """The request is understood but not supported; nothing was done."""

    kind = "unsupported"


class NumericalFault(TitanError):
    """Training met a NaN or an infinity and stopped before the update."""

    kind = "numerical"
    exit_code = 4


class Preempted(TitanError):
    """The job was asked to stop, saved its state and left."""

    kind = "preempted"
    exit_code = 75


class Interrupted(Preempted):
    """The user asked the job to stop by Ctrl-C."""

    exit_code = 130


def list_offenders(names: Sequence[str], *, most: int = 20) -> str:
    """Names on indented lines, folded over layers if there are more than `most`, and how many more lines there are."""
    names = names if len(names) <= most else fold_texts(names)
    shown = "".join(f"\n  {name}" for name in names[:most])
    return shown + (f"\n  … and {len(names) - most} more" if len(names) > most else "")


def printable(name: str) -> str:
    """A name from a file, with control characters escaped."""
    return name if name.isprintable() else ascii(name)


def in_words(error: Exception) -> str:
    """A parser's error in plain words, without Python's names for it."""
    match error:
        case KeyError():
            return f"{error.args[0]!r:.80} is missing"
        case RecursionError():
            return "it is nested too deeply"
        case UnicodeDecodeError():
            return f"it is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}"
        case ValueError() | PickleError():  # json's is a ValueError; both say what, and json where
            return str(error)
        case EOFError() | IndexError():
            return "it ends too early, or a part is missing"
    return "a part has the wrong type"
