"""Where the results of a batch go: a file, lines on standard output, or one JSON object."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

from titan_tools.console import json_text, print_json, stream
from titan_tools.infer.ranks.group import Ranks
from titan_tools.infer.request import Request
from titan_tools.infer.tasks.in_order import InOrder
from titan_tools.infer.tasks.results_file import ResultsFile, open_results
from titan_tools.infer.tasks.results_lines import Expected, Key

T = TypeVar("T")


class Sink(Protocol):
    """Takes results in any order and gives them out in that of the batch."""

    def __contains__(self, key: Key) -> bool:
        """Whether an earlier run has left this result."""

    def append(self, key: Key, result: Mapping[str, Any]) -> None:
        """Take a result; results that shall survive an interruption are safe after it."""

    def finish(self, stats: Mapping[str, Any]) -> None:
        """All results were taken."""


@contextmanager
def open_sink(request: Request, expected: Expected) -> Iterator[Sink]:
    """The place for results: the file of --out, which may hold some already (see results_file.py), or stdout."""
    if request.out is None:
        yield _Object(expected.keys) if request.as_json else _Lines(expected.keys)
        return
    with open_results(request.out, expected) as file:
        yield _File(file, as_json=request.as_json)


@contextmanager
def opened_by_first(
    ranks: Ranks, sink: AbstractContextManager[Sink | None], look: Callable[[Sink | None], T]
) -> Iterator[tuple[Sink | None, T]]:
    """The first rank's sink, None on the others, and on all of them what `look` sees in it.

    Told by one to all: a file changes while they run, and each must make the same calls. Where the first cannot open
    it, all raise its error.
    """
    with ExitStack() as stack:
        opened: list[Sink | None] = []

        def open_and_look() -> T:
            opened.append(stack.enter_context(sink))
            return look(opened[0])

        seen = ranks.done_by_first(open_and_look)
        yield (opened[0] if opened else None), seen


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
