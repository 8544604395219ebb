"""Read one TOML file into flat `section.key` settings, each with the line it came from."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.common.errors import ConfigError
from trainer.config.not_a_config import not_a_config

_MOST_BYTES = 1 << 20  # a config is a page of text; more is some other file
_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]")
_KEY = re.compile(r"""\s*([A-Za-z0-9_."'\- ]+?)\s*=""")
_POSITION = re.compile(r"\(at line (\d+), column (\d+)\)")


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it was written: `debug.toml:12`, `command line` or `default`."""

    value: Any
    origin: str


def read_toml(path: Path, *, shown_as: str | None = None) -> dict[str, Setting]:
    """Every setting of the file by its dotted name. Raises ConfigError, with line and column for a syntax error."""
    text = read_text(path)
    shown = shown_as or str(path)
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_told_with_position(shown, str(error), text)) from None
    except RecursionError:
        raise ConfigError(f"{shown}: nested too deeply to be a config") from None
    lines = _lines_of_keys(text)
    return {key: Setting(value, f"{shown}:{_line_of(key, lines)}") for key, value in _flatten(tables).items()}


def read_text(path: Path) -> str:
    """The file as text with plain newlines. Raises ConfigError if it is none, or something else than a config."""
    if (problem := not_a_config(str(path))) is not None:
        raise problem
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{path} is larger than {_MOST_BYTES} bytes, so it is not a config file")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        hint = "it looks like UTF-16; save it as UTF-8" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise ConfigError(f"{path}:{line}: byte {error.start} is not UTF-8, so this is not TOML", hint=hint) from None


def _told_with_position(shown: str, message: str, text: str) -> str:
    found = _POSITION.search(message)
    if found:
        line, column = found.groups()
        return f"{shown}:{line}:{column}: {message[: found.start()].strip()}"
    return f"{shown}:{text.count(chr(10)) + 1}: {message}"  # tomllib says `(at end of document)`


def _flatten(tables: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _lines_of_keys(text: str) -> dict[str, int]:
    """Line of each table header and key, for messages only: tomllib keeps no positions, so the lines are read again."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.split("\n"), start=1):
        if header := _HEADER.match(line):
            table = _dotted(header[1]) + "."
            lines.setdefault(table[:-1], number)
        elif key := _KEY.match(line):
            lines.setdefault(table + _dotted(key[1]), number)
    return lines


def _dotted(written: str) -> str:
    return ".".join(part.strip(" \"'") for part in written.split("."))


def _line_of(key: str, lines: dict[str, int]) -> int:
    """The key's line, else that of the innermost table around it (`training = { steps = 5 }`)."""
    while key and key not in lines:
        key = key.rpartition(".")[0]
    return lines.get(key, 1)
