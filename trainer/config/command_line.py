"""Read overrides as typed: `--section.key value`, `--section.key=value`, `--section.key`, `--section.no_key`."""

import tomllib
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, get_args, get_origin

from trainer.config.toml_file import Setting
from trainer.config.types import plain_type

ORIGIN = "command line"
_BOOLS = {"true": True, "false": False}


def read_overrides(
    words: Sequence[str], *, kind_of: Callable[[str], Any | None], unknown: Callable[[str], str]
) -> tuple[dict[str, Setting], list[tuple[str, str]]]:
    """The settings in the words, and the problems by key; a key given twice takes its last value.

    `kind_of` returns a key's type (None: no such key), `unknown` the message for an unknown key.
    """
    settings: dict[str, Setting] = {}
    problems: list[tuple[str, str]] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if not word.startswith("--"):
            problems.append(("", f"{ORIGIN}: {word!r} is not an option; an override is `--section.key value`"))
            continue
        name, equals, text = word[2:].partition("=")
        key = name.replace("-", "_")
        kind = kind_of(key)
        negated = _without_no(key) if kind is None and not equals else None
        if negated and kind_of(negated) is bool:
            settings[negated] = Setting(False, ORIGIN)
            continue
        if kind is None:
            problems.append((key, f"{ORIGIN}: --{name}: {unknown(key)}"))
            if not equals and queue and not queue[0].startswith("--"):
                queue.pop(0)  # its value
            continue
        if not equals:
            takes_next = bool(queue) and (queue[0] in _BOOLS if kind is bool else not queue[0].startswith("--"))
            if not takes_next and kind is not bool:
                problems.append((key, f"{ORIGIN}: --{name} needs a value"))
                continue
            text = queue.pop(0) if takes_next else "true"
        settings[key] = Setting(_parse(text, kind), ORIGIN)
    return settings, problems


def _without_no(key: str) -> str | None:
    section, dot, name = key.rpartition(".")
    return f"{section}.{name[3:]}" if dot and name.startswith("no_") else None


def _parse(text: str, kind: Any) -> Any:
    """Text as a value of the type; invalid text is returned unchanged, and the type check reports it."""
    if NoneType in get_args(kind) and text.lower() == "none":
        return None
    plain = plain_type(kind)
    if get_origin(plain) is tuple:
        return _parse_list(text)
    if plain is bool:
        return _BOOLS.get(text.lower(), text)
    try:
        return plain(text)
    except ValueError:
        return text


def _parse_list(text: str) -> Any:
    if text.startswith("["):  # lists of lists in TOML syntax
        try:
            return tomllib.loads(f"list = {text}")["list"]
        except tomllib.TOMLDecodeError:
            return text
    return [item.strip() for item in text.split(",")] if text else []
