"""Check what a user's module registers, and say where in it an error is: its file and line, never "a bug in titan"."""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

from converters.common.errors import TitanError


class ExtensionError(TitanError):
    """A module that registers extensions has an error."""

    kind = "extension"


def where_defined(thing: Any) -> str:
    """`file:line` of the definition of a function, a class, or an object's class; its name if there is no source."""
    while isinstance(thing, partial):
        thing = thing.func
    if not (inspect.isroutine(thing) or inspect.isclass(thing)):
        thing = type(thing)
    try:
        lines, line = inspect.findsource(thing)
        return f"{inspect.getsourcefile(thing)}:{line + 1}"
    except (OSError, TypeError):
        return f"{thing.__module__}.{thing.__qualname__}"


def check_call(function: Any, arguments: Sequence[str], what: str, *, named: Sequence[str] = ()) -> None:
    """Raise ExtensionError unless a function can be called with these arguments. `what`: its name in errors."""
    if not callable(function):
        raise ExtensionError(f"{what} is {function!r:.80}, which cannot be called")
    try:
        inspect.signature(function).bind(*arguments, **dict.fromkeys(named))
    except (TypeError, ValueError) as error:
        if "no signature found" in str(error):  # of some that are not written in Python
            return
        called = ", ".join([*arguments, *(f"{name}=…" for name in named)])
        raise ExtensionError(f"{where_defined(function)}: {what} is called with ({called}): {error}") from None


def check_attributes(thing: Any, names: Sequence[str], what: str, *, made_by: Any = None) -> None:
    """Raise ExtensionError unless an object has all of these attributes. `made_by`: the function that returned it."""
    if thing is None:
        raise ExtensionError(f"{where_defined(made_by)}: {what} is None: the function returns nothing")
    if missing := [name for name in names if not hasattr(thing, name)]:
        raise ExtensionError(
            f"{where_defined(thing)}: {what} has no {' and no '.join(missing)}", hint=f"it needs {', '.join(names)}"
        )
