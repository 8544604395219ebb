"""The lines of a batch: JSON objects with an id, read strictly; all problems of the file are one error."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from converters.common.errors import ConfigError, DataError, TitanError, in_words, list_offenders
from converters.store.json_file import load_with_repeated_keys
from titan_tools.infer.task import Work
from titan_tools.infer.tasks.results import check_results_path
from titan_tools.terminal.console import count

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # as an escape; JSON allows no other

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line of a batch; `values` are its keys without the id, of any type."""

    id: str | int
    values: dict[str, Any]

    def text(self, key: str) -> str:
        """The string under a key. Raises ConfigError if there is none."""
        if key not in self.values:
            raise ConfigError(f"has no {key!r}")
        value = self.values[key]
        if not isinstance(value, str):
            raise ConfigError(f"{key!r} must be a string, not {shown(value)}")
        return value


def read_lines(work: Work, parse: Callable[[BatchLine], T], *, keys: tuple[str, ...]) -> list[T]:
    """The parsed lines of the requested batch; see `read_batch`.

    Raises ConfigError also if the results cannot be written, or if not every rank can read the batch.
    """
    batch, out = work.request.batch, work.request.out
    assert batch is not None
    if work.tp > 1 and is_read_once(batch):
        raise ConfigError(
            f"{batch} is not a regular file, and each of {work.tp} ranks must read it",
            tries=["without --tp", "a file on disk"],
        )
    if out is not None:
        check_results_path(out, batch=batch)
    return read_batch(batch, parse, keys=keys)


def is_read_once(batch: Path) -> bool:
    """Whether the batch can be read only once, like a pipe."""
    return batch.exists() and not (batch.is_file() or batch.is_dir())


def read_batch(path: Path, parse: Callable[[BatchLine], T], *, keys: tuple[str, ...]) -> list[T]:
    """The lines of a file, parsed. A line may have an id and `keys`; blank lines are skipped.

    A line without an id gets its position among the lines, from 0. Raises DataError with every line that is invalid or
    for which `parse` raises, and ConfigError if the file cannot be read.
    """
    problems: list[str] = []
    parsed: list[T] = []
    tries: list[tuple[str, ...]] = []
    first_line: dict[str | int, int] = {}  # number of the first line with an id
    for position, (number, raw) in enumerate(_raw_lines(path)):
        try:
            line = _read_line(raw, position=position, keys=keys)
            before = first_line.setdefault(line.id, number)
            if before != number:
                raise ConfigError(f"the id {line.id!r} is used in line {before} already")
        except TitanError as error:
            problems.append(f"line {number}: {error.message}")
            continue
        try:
            parsed.append(parse(line))
        except TitanError as error:
            problems.append(f"line {number} (id {line.id!r:.60}): {error.message}")
            tries.append(tuple(error.tries))
    if problems:
        # Only what would fix all of them: a number that fits one line does not fit the next
        shared = [command for command in tries[0] if all(command in commands for commands in tries)] if tries else []
        raise DataError(f"{path}: {count(len(problems), 'invalid line')}:" + list_offenders(problems), tries=shared)
    if not parsed:
        raise DataError(f"{path} holds no line", tries=['{"id": 0, "prompt": "Once upon a time"}'])
    return parsed


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number from 1 and content of the lines that are not blank."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if number == 1:
                    raw = raw.removeprefix(_BYTE_ORDER_MARK)  # from editors on Windows
                if raw.strip():
                    yield number, raw
    except OSError as error:
        tries = ["--batch /dev/stdin"] if path.name == "-" else []
        raise ConfigError(f"cannot read the batch {path}: {error.strerror}", tries=tries) from None


def _read_line(raw: bytes, *, position: int, keys: tuple[str, ...]) -> BatchLine:
    """Raises ConfigError; offsets in it count from the beginning of the line."""
    try:
        text = raw.decode("utf-8")
        values, repeated = load_with_repeated_keys(text)
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}") from None
    except UnicodeEncodeError as error:  # JSON can spell characters that no text can hold
        raise ConfigError(f"a lone surrogate, \\u{ord(error.object[error.start]):04x}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; deeply nested brackets
        raise ConfigError(f"not JSON: {in_words(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"must be a JSON object, not {shown(values)}")
    if repeated:
        raise ConfigError(f"the key {repeated[0]!r} is repeated")
    if _NUL.search(text):
        raise ConfigError("a NUL character, \\u0000")
    for key in values:
        if key not in ("id", *keys):
            near = get_close_matches(key, ("id", *keys), 1)
            known = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(map(repr, ('id', *keys)))}"
            raise ConfigError(f"unknown key {key!r:.60}; {known}")
    id = values.pop("id", position)
    if not isinstance(id, str | int) or isinstance(id, bool):
        raise ConfigError(f"'id' must be a string or an integer, not {shown(id)}")
    return BatchLine(id, values)


def shown(value: Any) -> str:
    """A JSON value for a message, shortened."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"
