"""Check values against field types: exact types, choices, limits of numbers, patterns."""

import math
import re
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin


@dataclass(frozen=True, slots=True)
class Number:
    """Limits of a number: low ≤ x ≤ high, above < x < below; `also` adds values, `without` excludes some."""

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    also: tuple[float, ...] = ()
    without: tuple[float, ...] = ()

    def allows(self, value: float) -> bool:
        if value in self.also:
            return True
        return (
            math.isfinite(value)
            and value not in self.without
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        limits = (("≥", self.low), (">", self.above), ("≤", self.high), ("<", self.below))
        text = " and ".join(f"{sign} {_plain(limit)}" for sign, limit in limits if limit is not None)
        text += "".join(f", not {_plain(value)}" for value in self.without)
        return text + "".join(f", or {_plain(value)}" for value in self.also)


def _plain(number: float) -> str:
    """Integers in full: the printed limit is the exact limit."""
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


@dataclass(frozen=True, slots=True)
class Pattern:
    """A string that fully matches a regular expression; `meaning` describes it in messages."""

    regex: str
    meaning: str


def fit(kind: Any, value: Any) -> Any:
    """The value as the type wants it (a list becomes a tuple, an int a float). Raises ValueError saying what may be."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _fit_annotated(kind, value)
    if origin in (Union, UnionType):  # here always "something or None"
        if value is None:
            return None
        (some,) = (arg for arg in args if arg is not NoneType)
        return fit(some, value)
    if origin is Literal:
        if not isinstance(value, str) or value not in args:
            raise ValueError(describe(kind))
        return value
    if origin is tuple:
        try:
            items = _items(value)
            kinds = args[:1] * len(items) if args[-1] is Ellipsis else args
            return tuple(fit(item_kind, item) for item_kind, item in zip(kinds, items, strict=True))
        except ValueError:
            raise ValueError(describe(kind)) from None
    return _fit_plain(kind, value)


def _items(value: Any) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError
    return value


def _fit_annotated(kind: Any, value: Any) -> Any:
    inner, rule = get_args(kind)
    try:
        fitted = fit(inner, value)
    except ValueError:
        raise ValueError(describe(kind)) from None
    allowed = rule.allows(fitted) if isinstance(rule, Number) else re.fullmatch(rule.regex, fitted)
    if not allowed:
        raise ValueError(describe(kind))
    return fitted


def _fit_plain(kind: Any, value: Any) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):  # `type`, because True is an int
        raise ValueError(describe(kind))
    return value


def describe(kind: Any) -> str:
    """A type in words, as an error shows it."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        inner, rule = args
        return f"{describe(inner)} {rule}" if isinstance(rule, Number) else rule.meaning
    if origin in (Union, UnionType):
        return describe(next(arg for arg in args if arg is not NoneType))
    if origin is Literal:
        return args[0] if len(args) == 1 else f"one of {', '.join(args)}"
    if origin is tuple and args[-1] is not Ellipsis:
        return f"a list of {len(args)}: {', then '.join(map(describe, args))}"
    if origin is tuple:
        return f"a list, each item {describe(args[0])}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}[kind]


def choices(kind: Any) -> tuple[str, ...]:
    """The values of a type that has few, as they are typed on the command line."""
    args = get_args(kind)
    if get_origin(kind) is Literal:
        return args
    if kind is bool:
        return "true", "false"
    return tuple(value for arg in args for value in choices(arg))


def plain_type(kind: Any) -> Any:
    """bool, int, float, str, or the tuple type: what a value is read as, without limits and None."""
    if get_origin(kind) is Annotated:
        return plain_type(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return plain_type(next(arg for arg in get_args(kind) if arg is not NoneType))
    return str if get_origin(kind) is Literal else kind
