"""Where the results of a batch go: OUT, lines on standard output, or one JSON object."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from titan_tools.console import json_text, print_json, stream, tally
from titan_tools.infer.ranks import Ranks
from titan_tools.infer.request import Request
from titan_tools.infer.tasks.results_file import Key, ResultsFile, open_results


class Sink(Protocol):
    """Takes results in any order and gives them out in that of the batch."""

    def __contains__(self, key: Key) -> bool:
        """Whether an earlier run has left this result."""

    def append(self, key: Key, result: Mapping[str, Any]) -> None:
        """Take a result; results that shall survive an interruption are safe after it."""

    def finish(self, stats: Mapping[str, Any]) -> None:
        """All results were taken."""


@contextmanager
def open_sink(
    out: Path | None,
    keys: Sequence[Key],
    differs: Callable[[Key, dict[str, Any]], str],
    *,
    as_json: bool,
) -> Iterator[Sink]:
    """The place for results of `keys`: `out`, which may hold some of them already (see results_file.py), or stdout."""
    if out is None:
        yield _Object(keys) if as_json else _Lines(keys)
        return
    with open_results(out, keys, differs) as file:
        yield _File(file, as_json=as_json)


def bar(request: Request, ranks: Ranks, total: int, what: str) -> AbstractContextManager[Callable[..., None]]:
    """A bar of `total` things (see `tally`) on the first rank's terminal, unless results pass there as lines."""
    lines_pass = request.batch and not request.out and not request.as_json and sys.stdout.isatty()
    if not ranks.is_first or lines_pass:
        return nullcontext(lambda num=1: None)
    return tally(total, what)


class InOrder:
    """Values that come in any order and leave in that of `keys`, each as soon as those before it are there."""

    def __init__(self, keys: Sequence[Key]):
        self._keys, self._held, self._next = keys, {}, 0

    def put(self, key: Key, value: Any) -> Iterator[Any]:
        """Take a value; all that may leave now."""
        self._held[key] = value
        while self._next < len(self._keys) and self._keys[self._next] in self._held:
            yield self._held.pop(self._keys[self._next])
            self._next += 1


class _Lines:
    def __init__(self, keys: Sequence[Key]):
        self._ordered = InOrder(keys)

    def __contains__(self, key: Key) -> bool:
        return False

    def append(self, key: Key, result: Mapping[str, Any]) -> None:
        for due in self._ordered.put(key, result):
            stream(json_text(due) + "\n")

    def finish(self, stats: Mapping[str, Any]) -> None:
        pass  # every line has left


class _Object:
    def __init__(self, keys: Sequence[Key]):
        self._keys, self._results = keys, {}

    def __contains__(self, key: Key) -> bool:
        return False

    def append(self, key: Key, result: Mapping[str, Any]) -> None:
        self._results[key] = result

    def finish(self, stats: Mapping[str, Any]) -> None:
        print_json({"results": [self._results[key] for key in self._keys], "stats": stats})


class _File:
    def __init__(self, file: ResultsFile, *, as_json: bool):
        self._file, self._as_json = file, as_json

    def __contains__(self, key: Key) -> bool:
        return key in self._file

    def append(self, key: Key, result: Mapping[str, Any]) -> None:
        self._file.append(key, result)

    def finish(self, stats: Mapping[str, Any]) -> None:
        self._file.put_in_order()
        if self._as_json:
            print_json({"results": [*self._file.results()], "stats": stats})
