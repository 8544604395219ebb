"""The lines of a batch: JSON objects with an id, read strictly; all that is wrong in the file is one error."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from converters.errors import ConfigError, DataError, TitanError, in_words, list_offenders
from converters.json_file import load_with_repeated_keys
from titan_tools.console import count
from titan_tools.infer.task import Work
from titan_tools.infer.tasks.results_file import check_place

_ESCAPES = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a batch, counted from 1. `values` are its keys beside the id, known ones but of any type."""

    number: int
    id: str | int
    values: dict[str, Any]

    def text(self, key: str) -> str:
        """The string under a key. Raises ConfigError where there is none."""
        if key not in self.values:
            raise ConfigError(f"has no {key!r}")
        if not isinstance(self.values[key], str):
            raise ConfigError(f"{key!r} must be a string, not {shown(self.values[key])}")
        return self.values[key]


def read_lines(work: Work, take: Callable[[Line], T], *, keys: tuple[str, ...]) -> list[T]:
    """What `take` makes of each line of the batch that was asked for, once its results have a place; see `read_batch`.

    Raises ConfigError also where they have none, and where not every rank can read it.
    """
    request = work.request
    if work.tp > 1 and is_read_once(request.batch):
        raise ConfigError(
            f"{request.batch} is not a regular file, and each of {work.tp} ranks reads it by itself",
            tries=["without --tp", "a file on disk"],
        )
    if request.out is not None:
        check_place(request.out, batch=request.batch)

    def taken(line: Line) -> T:
        work.batch_digest.update(repr((line.id, line.values)).encode())  # for ranks to compare
        return take(line)

    return read_batch(request.batch, taken, keys=keys)


def is_read_once(batch: Path) -> bool:
    """Whether what a batch holds is gone once it was read, as that of a pipe."""
    return batch.exists() and not (batch.is_file() or batch.is_dir())


def read_batch(path: Path, take: Callable[[Line], T], *, keys: tuple[str, ...]) -> list[T]:
    """What `take` makes of each line of a file, which may have an id and `keys`; blank lines are passed over.

    A line without an id gets its place among the lines as one, from 0. Raises DataError with every line that is wrong,
    those for which `take` raises included, and ConfigError where the file cannot be read.
    """
    problems, taken, first_with, tries = [], [], {}, []
    for number, offset, raw in _raw_lines(path):
        try:
            line = _read_line(raw, number=number, offset=offset, place=len(first_with), keys=keys)
            before = first_with.setdefault(line.id, number)
            if before != number:
                raise ConfigError(f"the id {line.id!r} stands in line {before} already")
        except TitanError as error:
            first_with[number, offset] = number  # a place is taken all the same
            problems.append(f"line {number}: {error.message}")
            continue
        try:
            taken.append(take(line))
        except TitanError as error:
            problems.append(f"line {number} (id {line.id!r:.60}): {error.message}")
            tries.append(error.tries)
    if problems:
        # What would help all of them; a number that fits one line does not fit the next
        shared = [one for one in tries[0] if all(one in others for others in tries)] if tries else []
        raise DataError(
            f"{path}: {count(len(problems), 'line')} cannot be used:" + list_offenders(problems), tries=shared
        )
    if not taken:
        raise DataError(f"{path} holds no line", tries=['{"id": 0, "prompt": "Once upon a time"}'])
    return taken


def _raw_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number from 1, byte offset and content of the lines that are not blank."""
    offset = 0
    with _open(path) as file:
        for number, raw in enumerate(file, start=1):
            start, offset = offset, offset + len(raw)
            if number == 1 and raw.startswith(_BYTE_ORDER_MARK):  # editors on Windows leave one
                start, raw = start + len(_BYTE_ORDER_MARK), raw.removeprefix(_BYTE_ORDER_MARK)
            if raw.strip():
                yield number, start, raw


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        tries = ["--batch /dev/stdin"] if path.name == "-" else []
        raise ConfigError(f"cannot read the batch {path}: {error.strerror}", tries=tries) from None


def _read_line(raw: bytes, *, number: int, offset: int, place: int, keys: tuple[str, ...]) -> Line:
    """Raises ConfigError; offsets in it are bytes from the file's beginning."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        raise ConfigError(f"not UTF-8: byte 0x{byte:02x} at offset {offset + error.start} of the file") from None
    try:
        values, twice = load_with_repeated_keys(text)
    except json.JSONDecodeError as error:
        at = offset + len(text[: error.pos].encode())
        raise ConfigError(f"not JSON: {error.msg} at offset {at} of the file") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets in brackets
        raise ConfigError(f"not JSON: {in_words(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"must be a JSON object, not {shown(values)}")
    if twice:
        raise ConfigError(f"the key {twice[0]!r} stands twice in it")
    if b"\\u" in raw:
        _refuse_escapes(raw, offset)
    for key in values:
        if key not in ("id", *keys):
            near = get_close_matches(key, ("id", *keys), 1)
            known = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(map(repr, ('id', *keys)))}"
            raise ConfigError(f"no such key: {key!r:.60}; {known}")
    id = values.pop("id", place)
    if not isinstance(id, str | int) or isinstance(id, bool):
        raise ConfigError(f"'id' must be a string or an integer, not {shown(id)}")
    return Line(number, id, values)


def _refuse_escapes(raw: bytes, offset: int) -> None:
    """JSON can spell what no text holds: half of a surrogate pair, and NUL. Raises ConfigError with where."""
    high_at = None  # where a first half stands that still waits for its second
    for escape in _ESCAPES.finditer(raw):
        code = int(escape[1], 16) if escape[1] else -1
        completes = 0xDC00 <= code < 0xE000 and high_at is not None and escape.start() == high_at + 6
        if (high_at is not None or 0xDC00 <= code < 0xE000) and not completes:
            at = escape.start() if high_at is None else high_at
            raise ConfigError(f"a lone surrogate, {raw[at : at + 6].decode()}, at offset {offset + at} of the file")
        if code == 0:
            raise ConfigError(f"a NUL character at offset {offset + escape.start()} of the file")
        high_at = escape.start() if 0xD800 <= code < 0xDC00 else None
    if high_at is not None:
        at = raw[high_at : high_at + 6].decode()
        raise ConfigError(f"a lone surrogate, {at}, at offset {offset + high_at} of the file")


def shown(value: Any) -> str:
    """A JSON value for a message, shortened."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"
