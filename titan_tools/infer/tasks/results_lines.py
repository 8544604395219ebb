"""What a file of results holds: each line must be a result that this run would make; the last one may be cut off."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.errors import ConfigError, list_offenders
from titan_tools.infer.tasks.made_with import MadeWith, read_made_with, require_same, unknown_settings

Key = tuple[str | int, int]  # a prompt's id, and which of its samples
_LINE_START = b'{"id"'  # of every line that we write
OF_MORE_SAMPLES = "of more --samples than this run has"


@dataclass(frozen=True, slots=True)
class Expected:
    """The results of a run: their keys in order, the settings that make them, and what tells those of another run.

    `differs` gives the reason why this run would not make a result, "" where it would.
    """

    keys: Sequence[Key]
    differs: Callable[[Key, dict[str, Any]], str]
    made_with: MadeWith | None  # None: results go to standard output


@dataclass(frozen=True, slots=True)
class Found:
    """Where each result stands (offset, length), and where the last whole line ends.

    `num_unnumbered`: how many lack the number of their sample, which they need: they were made alone.
    """

    places: dict[Key, tuple[int, int]]
    end: int
    num_unnumbered: int
    made_with: MadeWith | None  # None: there is no file that says it


def read_results(descriptor: int, path: Path, expected: Expected) -> Found:
    """What an open and locked file holds. Raises ConfigError where that is not the beginning of `expected`."""
    made = read_made_with(path)
    with open(os.dup(descriptor), "rb") as file:
        first = file.readline()
        if not first or _is_torn(first):
            return Found({}, 0, 0, made)
        if made is not None:
            require_same(made, expected.made_with, out=path)
        file.seek(0)
        found = _read_lines(file, path, expected, made)
    if made is None:  # told last: a file of something else has none
        raise unknown_settings(path)
    return found


def _read_lines(file: Any, path: Path, expected: Expected, made: MadeWith | None) -> Found:
    places: dict[Key, tuple[int, int]] = {}
    problems, wanted, end, num_unnumbered = [], set(expected.keys), 0, 0
    are_numbered, num_samples = any(sample for _, sample in wanted), 0
    for number, raw in enumerate(file, start=1):
        if _is_torn(raw):
            break
        try:
            key, is_numbered = _take(raw, places, wanted, expected.differs)
        except ConfigError as problem:
            problems.append(f"line {number}{problem.message}")
            num_samples = max(num_samples, _sample_of(raw) + 1 if OF_MORE_SAMPLES in problem.message else 0)
            continue
        if raw.endswith(b"\n"):
            places[key] = (end, len(raw))
            end += len(raw)
            num_unnumbered += are_numbered and not is_numbered
    if problems:
        raise ConfigError(
            f"{path} holds something else than results of this batch:" + list_offenders(problems),
            hint="a rerun goes on in the file of the same prompts and options; nothing was written",
            tries=[*([f"--samples {num_samples}"] if num_samples > 1 else []), "--out ANOTHER_FILE"],
        )
    return Found(places, end, num_unnumbered, made)


def _is_torn(raw: bytes) -> bool:
    """Whether a line is the beginning of one of ours: cut off by a kill, or filled up with NULs by a crash."""
    begun = raw.rstrip(b"\0")
    if raw.endswith(b"\n") or not begun.startswith(_LINE_START[: len(begun)]):
        return False
    try:
        json.loads(begun)
    except (ValueError, RecursionError):
        return True
    return False


def _take(
    raw: bytes, places: Mapping[Key, Any], wanted: set[Key], differs: Callable[[Key, dict[str, Any]], str]
) -> tuple[Key, bool]:
    """The key of a line's result, and whether it has its sample's number. Raises ConfigError for another run's.

    The message continues "line 5".
    """
    try:
        result = json.loads(raw)
        key = (result["id"], result.get("sample", 0))
        hash(key)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ConfigError(" is no result") from None
    named = f" (id {key[0]!r:.60})"
    if key not in wanted or isinstance(key[0], bool) or isinstance(key[1], bool):
        other = OF_MORE_SAMPLES if (key[0], 0) in wanted else "no such id in the batch"
        raise ConfigError(f"{named}: {other}")
    if key in places:
        raise ConfigError(f"{named} stands there twice")
    if problem := differs(key, result):
        raise ConfigError(f"{named}: {problem}")
    return key, "sample" in result


def _sample_of(raw: bytes) -> int:
    sample = json.loads(raw).get("sample", 0)
    return sample if isinstance(sample, int) else 0


def numbered(raw: bytes) -> bytes:
    """A line whose result has its sample's number: 0 where it had none."""
    result = json.loads(raw)
    if "sample" in result:
        return raw
    return as_line({"id": result.pop("id"), "sample": 0, **result})


def as_line(result: Mapping[str, Any]) -> bytes:
    return json.dumps(result, ensure_ascii=False).encode() + b"\n"
