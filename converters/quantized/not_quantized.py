"""The list of modules that a config.json names as not quantized."""

import re
from collections.abc import Sequence
from fnmatch import translate
from functools import cache
from typing import Any


def name_list_problem(key: str, names: Any) -> list[str]:
    """Problems of such a list; [] if there are none."""
    if isinstance(names, list) and all(isinstance(name, str) and name for name in names):
        return []
    return [f"{key} = {names!r:.60}, not a list of names"]


def is_listed(module: str, listed: Sequence[str]) -> bool:
    """Whether a module is named, one that it is a part of, or the end of its name: transformers' rules."""
    if not listed:
        return False
    plain, wild = _parsed(tuple(listed))
    parts = module.split(".")
    names = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    ends = (".".join(parts[start:]) for start in range(1, len(parts)))
    return any(name in plain for name in (*names, *ends)) or bool(wild and wild.match(module))


@cache
def _parsed(listed: tuple[str, ...]) -> tuple[frozenset[str], re.Pattern[str] | None]:
    """Plain names, and the pattern of those with wildcards."""
    wild = [text for text in listed if set(text) & set("*?[")]
    either = "|".join(translate(end) for text in wild for end in (text, f"{text}.*"))
    return frozenset(listed).difference(wild), re.compile(either) if wild else None
