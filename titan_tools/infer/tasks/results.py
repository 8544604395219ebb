"""Where the results of a batch go: a file, lines on standard output, or one JSON object."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Generic, Protocol, TypeVar

from titan_tools.console import json_text, print_json, stream
from titan_tools.infer.ranks import TPRanks
from titan_tools.infer.request import Request
from titan_tools.infer.tasks.results_file import ExpectedResults, ResultKey, open_results

T = TypeVar("T")


class InOrder(Generic[T]):
    """Takes values in any order and returns them in the order of `keys`, each as soon as those before it are there."""

    def __init__(self, keys: Sequence[ResultKey]):
        self._keys, self._next = keys, 0
        self._held: dict[ResultKey, T] = {}

    def put(self, key: ResultKey, value: T) -> Iterator[T]:
        """Add a value; yield all values whose turn has come."""
        self._held[key] = value
        while self._next < len(self._keys) and self._keys[self._next] in self._held:
            yield self._held.pop(self._keys[self._next])
            self._next += 1


class ResultSink(Protocol):
    """Takes results in any order and writes them in the order of the batch."""

    def __contains__(self, key: ResultKey) -> bool:
        """Whether an earlier run has written this result."""

    def append(self, key: ResultKey, result: Mapping[str, Any]) -> None:
        """Take one result."""

    def finish(self, stats: Mapping[str, Any]) -> None:
        """Called after the last result."""


@contextmanager
def open_sink(request: Request, expected: ExpectedResults) -> Iterator[ResultSink]:
    """The results file of --out, which may hold results already, or standard output."""
    if request.out is None:
        yield _Object(expected.keys) if request.as_json else _Lines(expected.keys)
    else:
        with open_results(request.out, expected, as_json=request.as_json) as file:
            yield file


@contextmanager
def opened_by_first(
    ranks: TPRanks, sink: AbstractContextManager[ResultSink | None], look: Callable[[ResultSink | None], T]
) -> Iterator[tuple[ResultSink | None, T]]:
    """The first rank's sink (None on the others), and on all ranks what `look` returns for it.

    Only the first rank looks, since the file changes during the run and all ranks must do the same work. Where it
    cannot open the file, all ranks raise its error.
    """
    with ExitStack() as stack:
        opened: list[ResultSink | None] = []

        def open_and_look() -> T:
            opened.append(stack.enter_context(sink))
            return look(opened[0])

        seen = ranks.done_by_first(open_and_look)
        yield (opened[0] if opened else None), seen


class _Lines:
    def __init__(self, keys: Sequence[ResultKey]):
        self._ordered: InOrder[Mapping[str, Any]] = InOrder(keys)

    def __contains__(self, key: ResultKey) -> bool:
        return False

    def append(self, key: ResultKey, result: Mapping[str, Any]) -> None:
        for ready in self._ordered.put(key, result):
            stream(json_text(ready) + "\n")

    def finish(self, stats: Mapping[str, Any]) -> None:
        pass  # every line is printed


class _Object:
    def __init__(self, keys: Sequence[ResultKey]):
        self._keys = keys
        self._results: dict[ResultKey, Mapping[str, Any]] = {}

    def __contains__(self, key: ResultKey) -> bool:
        return False

    def append(self, key: ResultKey, result: Mapping[str, Any]) -> None:
        self._results[key] = result

    def finish(self, stats: Mapping[str, Any]) -> None:
        print_json({"results": [self._results[key] for key in self._keys], "stats": stats})
