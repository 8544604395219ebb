"""A TOML file as its statements, each with its own bytes: what is not changed stays as it was written, comments too.

Python's parser is the judge of where a statement ends: a valid file is cut where the lines so far parse by themselves.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]")
_NAME = re.compile(r"(\s*)([^=]*?)(\s*=\s*)")


@dataclass(frozen=True, slots=True)
class Line:
    """One statement, header, comment or empty line. `values`: what it sets, by full key; `text` ends with its newline.

    `name` is the key as a rename has to write it: without the section where a header says that, with it elsewhere.
    """

    text: str
    section: str
    number: int
    values: Mapping[str, Any]
    is_header: bool = False

    @property
    def key(self) -> str:
        """The one key that it sets; empty if that is none or several."""
        return next(iter(self.values)) if len(self.values) == 1 else ""


def read_lines(text: str) -> list[Line]:
    """Cut a valid TOML text up; the texts of all lines together are that text."""
    lines, section, remaining = [], "", text.splitlines(keepends=True)
    number = 1
    while remaining:
        statement = remaining.pop(0)
        header = _HEADER.match(statement)
        if header:
            section = ".".join(part.strip(" \"'") for part in header[1].split("."))
        values: dict[str, Any] | None = {} if header else _parse(statement)
        while values is None:
            statement += remaining.pop(0)
            values = _parse(statement)
        prefix = f"{section}." if section else ""
        flat = {prefix + key: value for key, value in flatten(values).items()}
        lines.append(Line(statement, section, number, flat, is_header=bool(header)))
        number += statement.count("\n")
    return lines


def _parse(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def renamed(line: Line, key: str) -> Line:
    """The statement under another key of its section, or, if no header says a section, under any."""
    name = key.removeprefix(f"{line.section}.") if line.section else key
    text = _NAME.sub(lambda found: found[1] + name + found[3], line.text, count=1)
    return replace(line, text=text, values={key: line.values[line.key]})


def revalued(line: Line, value: Any, value_text: str) -> Line:
    """The statement with another value, what follows it on its line kept."""
    found = _NAME.match(line.text)
    assert found, line.text
    head = found[0]
    return replace(line, text=head + value_text + _after_value(line.text), values={line.key: value})


def _after_value(text: str) -> str:
    """Comment and newline behind a value: it ends where what stands before the `#` parses."""
    for place in (found.start() for found in re.finditer("#", text)):
        before = text[:place]
        if _parse(before):
            return text[len(before.rstrip(" \t")) :]
    return text[len(text.rstrip()) :]


def moved(lines: list[Line], line: Line, key: str) -> list[Line]:
    """The statement at the end of another section, which is added after this one if the file does not have it."""
    section, _, name = key.rpartition(".")
    index = next(i for i, each in enumerate(lines) if each is line)
    text = _NAME.sub(lambda found: name + found[3], line.text, count=1)
    new = Line(text if text.endswith("\n") else text + "\n", section, line.number, {key: line.values[line.key]})
    others = lines[:index] + lines[index + 1 :]
    if any(each.section == section and each.is_header for each in others):
        position = 1 + max(i for i, each in enumerate(others) if each.section == section and _is_content(each))
        return _joined(others, position, [new])
    position = index
    while position < len(others) and others[position].section == line.section and not others[position].is_header:
        position += 1
    while position and not others[position - 1].text.strip():
        position -= 1
    header = Line(f"[{section}]\n", section, line.number, {}, is_header=True)
    return _joined(others, position, [Line("\n", line.section, line.number, {}), header, new])


def _is_content(line: Line) -> bool:
    return line.is_header or bool(line.values)


def _joined(lines: list[Line], place: int, new: list[Line]) -> list[Line]:
    before = lines[:place]
    if before and not before[-1].text.endswith("\n"):
        before[-1] = replace(before[-1], text=before[-1].text + "\n")
    return before + new + lines[place:]


def without_empty_sections(lines: list[Line], emptied: set[str]) -> list[Line]:
    """Leave out the headers of sections that lost their last key, with the empty lines before them."""
    kept: list[Line] = []
    for index, line in enumerate(lines):
        if line.is_header and line.section in emptied:
            rest = lines[index + 1 :]
            end = next((i for i, other in enumerate(rest) if other.is_header), len(rest))
            if not any(other.text.strip() for other in rest[:end]):
                while kept and not kept[-1].text.strip():
                    kept.pop()
                continue
        kept.append(line)
    return kept
