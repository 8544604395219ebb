"""Check what a user's module registers, and say where in it an error is: its file and line, never "a bug in titan"."""

import ast
import inspect
import re
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import fields
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


def check_call(
    function: Any, arguments: Sequence[str], what: str, *, named: Sequence[str] = (), hint: str = ""
) -> None:
    """Raise ExtensionError unless a function can be called with these arguments. `what`: its name in errors."""
    if not callable(function):
        raise ExtensionError(f"{what} is {function!r:.80}, which cannot be called")
    try:
        inspect.signature(function).bind(*arguments, **dict.fromkeys(named))
    except (TypeError, ValueError) as error:
        if "no signature found" in str(error):  # of some that are not written in Python
            return
        called = ", ".join([*arguments, *(f"{name}=…" for name in named)])
        raise ExtensionError(
            f"{where_defined(function)}: {what} is called with ({called}): {error}", hint=hint
        ) from None


_OWNERS: dict[tuple[str, str], str] = {}  # (kind, name) → the package that registered it


def check_name(kind: str, name: Any, known: Container[str], *, pattern: str = r"[A-Za-z][\w.-]*") -> None:
    """Raise ExtensionError if a name is built in, or another package has registered it, or it is no name.

    `known`: the names that are registered. A package may register its own again, as when a module is reloaded.
    """
    if not (isinstance(name, str) and re.fullmatch(pattern, name)):
        raise ExtensionError(f"{name!r:.80} cannot be the name of a {kind}", hint=f"it must match {pattern}")
    package = _calling_package()
    if name in known and (owner := _OWNERS.get((kind, name))) != package:
        taken = f"registered by {owner}" if owner else "built in"
        raise ExtensionError(f"{kind} {name!r} is {taken}; choose another name")
    _OWNERS[kind, name] = package


def _calling_package() -> str:
    """The package, outside of titan, whose code is running."""
    frame = sys._getframe(1)
    while frame.f_back and _package_of(frame.f_globals) in ("converters", "trainer"):
        frame = frame.f_back
    return _package_of(frame.f_globals)


def _package_of(names: Mapping[str, Any]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]


def check_record(record: Any, kind: type, what: str) -> None:
    """Raise ExtensionError unless `record` is a `kind`, a dataclass with its annotations as text, whose fields fit.

    A function fits if it can be called as its field says; `Any` and what is no class are not checked.
    """
    if not isinstance(record, kind):
        raise ExtensionError(f"{what} is {record!r:.80}, which is not a {kind.__name__}")
    for field in fields(kind):
        value, name = getattr(record, field.name), f"`{field.name}` of {what}"
        if not _fits(value, ast.parse(str(field.type), mode="eval").body, name):
            raise ExtensionError(f"{name} is {value!r:.80}, which is not {field.type}")


def _fits(value: Any, annotation: ast.expr, what: str) -> bool:
    """Whether a value has the type of an annotation. Raises ExtensionError for a function with other arguments."""
    match annotation:
        case ast.BinOp(left, _, right):  # a | b
            return (value is None and isinstance(right, ast.Constant)) or _fits(value, left, what)
        case ast.Subscript(ast.Name("Callable"), ast.Tuple([ast.List(arguments), _])):
            expected = f"it is a {ast.unparse(annotation)}"
            check_call(value, [ast.unparse(argument) for argument in arguments], what, hint=expected)
            return True
        case ast.Subscript(ast.Name("tuple"), ast.Tuple([item, _])):
            return isinstance(value, tuple) and all(_fits(each, item, what) for each in value)
        case ast.Subscript(ast.Name("Mapping"), ast.Tuple([key, item])):
            return isinstance(value, Mapping) and all(
                _fits(k, key, what) and _fits(v, item, what) for k, v in value.items()
            )
        case ast.Name(name) if name != "Any":
            return any(base.__name__ == name for base in type(value).__mro__)
    return True


def check_protocol(thing: Any, protocol: type, what: str, *, made_by: Any = None) -> None:
    """Raise ExtensionError unless an object has all members of a protocol, and its methods take their arguments."""
    members = {name: member for name, member in vars(protocol).items() if not name.startswith("_")}
    methods = {
        name: [*inspect.signature(member).parameters.values()][1:]
        for name, member in members.items()
        if inspect.isfunction(member)
    }
    needed = [f"{n}({', '.join(p.name for p in methods[n])})" if n in methods else n for n in members]
    check_attributes(thing, [*members], what, made_by=made_by, hint=f"it needs {', '.join(needed)}")
    for name, parameters in methods.items():
        for some in (parameters, [p for p in parameters if p.default is p.empty]):  # with and without the optional ones
            named = [p.name for p in some if p.kind is p.KEYWORD_ONLY]
            arguments = [p.name for p in some if p.kind is not p.KEYWORD_ONLY]
            check_call(getattr(thing, name), arguments, f"`{name}` of {what}", named=named)


def check_attributes(thing: Any, names: Sequence[str], what: str, *, made_by: Any = None, hint: str = "") -> None:
    """Raise ExtensionError unless an object has all of these attributes. `made_by`: the function that returned it."""
    if thing is None:
        raise ExtensionError(f"{where_defined(made_by)}: {what} is None: the function returns nothing")
    if missing := [name for name in names if not hasattr(thing, name)]:
        raise ExtensionError(
            f"{where_defined(thing)}: {what} has no {' and no '.join(missing)}",
            hint=hint or f"it needs {', '.join(names)}",
        )
