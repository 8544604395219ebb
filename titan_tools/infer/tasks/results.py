"""The results of a batch: a JSON-lines file that an interrupted run resumes, or standard output.

Each line of the file is written with one call as soon as it is finished, so that it survives a kill of the process.
Only the complete file is synced to the disk: after a power failure the last seconds' lines may be missing, and a rerun
makes them again. To sync every line would take a batch of short answers more time than generating them.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Generic, TypeVar

from converters.common.errors import ConfigError, list_offenders
from converters.store.file_lock import is_open_file, lock_file
from converters.store.replace_file import fsync, replacing
from titan_tools.infer.ranks import TPRanks
from titan_tools.infer.request import Request
from titan_tools.infer.tasks.results_settings import (
    OTHER_OUT,
    ResultsSettings,
    read_results_settings,
    require_same_settings,
    write_results_settings,
)
from titan_tools.terminal.console import count, json_text, note, print_json, stream

ResultKey = tuple[str | int, int]  # a prompt's id, and the number of the sample
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ExpectedResults:
    """The results of a run, in the batch's order: `samples` of each of `ids`.

    `inputs` returns the fields that a result has from its line of the batch, by the line's position.
    """

    ids: Sequence[str | int]
    inputs: Callable[[int], Mapping[str, Any]]
    samples: int = 1
    settings: ResultsSettings | None = None  # None: results go to standard output

    def keys(self) -> list[ResultKey]:
        """The keys of all results."""
        return [(id, sample) for id in self.ids for sample in range(self.samples)]


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


class PrintedResults:
    """Prints results in the batch's order: as lines, each as soon as possible, or at the end as one JSON object."""

    stored: Collection[ResultKey] = ()

    def __init__(self, keys: Sequence[ResultKey], *, as_json: bool):
        self._ordered: InOrder[Mapping[str, Any]] = InOrder(keys)
        self._as_json, self._results = as_json, list[Mapping[str, Any]]()

    def stored_results(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def append(self, key: ResultKey, result: Mapping[str, Any]) -> None:
        for ready in self._ordered.put(key, result):
            if self._as_json:
                self._results.append(ready)
            else:
                stream(json_text(ready) + "\n")

    def finish(self, stats: Mapping[str, Any]) -> None:
        if self._as_json:
            print_json({"results": self._results, "stats": stats})


class ResultsFile:
    """An open and locked results file, which takes results in any order; made by `open_results`."""

    def __init__(self, path: Path, descriptor: int, expected: ExpectedResults, *, as_json: bool):
        self.path, self._descriptor, self._as_json = path, descriptor, as_json
        self._keys, self._is_numbered = expected.keys(), expected.samples > 1
        self._lines = _read_results(descriptor, path, expected)  # offset and length of each result's line
        self.end = sum(length for _, length in self._lines.values())

    @property
    def stored(self) -> Collection[ResultKey]:
        """The results that the file holds."""
        return self._lines.keys()

    def stored_results(self) -> Iterator[dict[str, Any]]:
        """The results that the file holds, in the file's order."""
        return (json.loads(self._read(key)) for key in self._lines)

    def append(self, key: ResultKey, result: Mapping[str, Any]) -> None:
        """Write a line, unless the file holds this result. Raises ConfigError if the disk is full."""
        if key in self._lines:
            return
        line, written = _as_line(result), 0
        try:
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            os.ftruncate(self._descriptor, self.end)
            raise ConfigError(f"cannot write {self.path}: {error.strerror}", hint=self.resume_hint()) from None
        self._lines[key] = (self.end, len(line))
        self.end += len(line)

    def finish(self, stats: Mapping[str, Any]) -> None:
        """All results are there: restore the batch's order and sync the file to the disk; print them for --json."""
        try:
            if list(self._lines) == self._keys and not self._is_numbered:
                fsync(self.path)
                fsync(self.path.parent)
            else:
                with replacing(self.path) as temporary, temporary.open("wb") as file:
                    file.writelines(self._ordered())
        except OSError as error:
            raise ConfigError(
                f"cannot put {self.path} into the batch's order: {error.strerror}",
                hint="all results are in it, in the order in which they finished; the same command tries again",
            ) from None
        if self._as_json:
            print_json({"results": [*map(json.loads, self._ordered())], "stats": stats})

    def resume_hint(self) -> str:
        """How to get the missing results."""
        return f"{len(self._lines):,} of {len(self._keys):,} results are in {self.path}; the same command resumes there"

    def _ordered(self) -> Iterator[bytes]:
        for key in self._keys:
            line = self._read(key)
            if self._is_numbered and "sample" not in (result := json.loads(line)):  # from a run with one sample
                line = _as_line({"id": result.pop("id"), "sample": 0, **result})
            yield line

    def _read(self, key: ResultKey) -> bytes:
        offset, length = self._lines[key]
        return os.pread(self._descriptor, length, offset)


ResultSink = ResultsFile | PrintedResults


@contextmanager
def open_sink(
    request: Request, expected: ExpectedResults, ranks: TPRanks
) -> Iterator[tuple[ResultSink | None, list[int]]]:
    """The first rank's sink (None on the others), and on all ranks the positions of the lines that lack a result.

    Only the first rank reads the file of --out, since it changes during the run and all ranks must do the same work.
    Where it cannot open the file, all ranks raise its error.
    """
    sink: ResultSink | None = None
    with ExitStack() as stack:

        def missing_lines() -> list[int]:
            nonlocal sink
            keys = expected.keys()
            if request.out is None:
                sink = PrintedResults(keys, as_json=request.as_json)
            else:
                sink = stack.enter_context(open_results(request.out, expected, as_json=request.as_json))
            missing = {id for id, sample in keys if (id, sample) not in sink.stored}
            return [position for position, id in enumerate(expected.ids) if id in missing]

        missing = ranks.done_by_first(missing_lines)
        yield sink, missing


def note_on_stored(out: Path | None, *, num_missing: int, num: int, what: str) -> None:
    """Print how many of the batch's lines have their results already."""
    if num_missing == 0:
        note(f"all results are in {out} already: nothing to do")
    elif num_missing < num:
        note(f"{num - num_missing:,} of {count(num, what)} are in {out} already: skipped")


def check_results_path(path: Path, *, batch: Path) -> None:
    """Raise ConfigError if results, or their settings file, cannot be written to `path`; nothing is changed."""
    name, folder = f"--out {path}", Path(os.path.realpath(path)).parent
    if path.exists() and batch.exists() and path.samefile(batch):
        raise ConfigError(f"{name} is the batch itself", hint="give the results a file of their own")
    if path.is_dir():
        raise ConfigError(f"{name} is a folder", tries=[f"--out {path / 'results.jsonl'}"])
    if path.exists() and not path.is_file():
        raise ConfigError(f"{name} is not a regular file", hint="without --out results go to standard output")
    if not folder.is_dir():
        raise ConfigError(f"{name}: there is no folder {folder}", tries=[f"mkdir -p {folder}"])
    try:
        with suppress(FileNotFoundError):
            path.open("r+b").close()
        with TemporaryFile(dir=folder):  # for the file that replaces it at the end
            pass
        read_results_settings(path)  # any other file in its place would be overwritten
    except OSError as error:
        raise ConfigError(f"{name} cannot be written: {error.strerror}") from None


def is_complete(path: Path | None, expected: ExpectedResults) -> bool:
    """Whether the results file holds all results, so that no weights are needed.

    Raises ConfigError if the file cannot be continued; see `open_results`. Only rank 0 of a launch reads it; on other
    ranks the answer is False.
    """
    if path is None or not path.exists() or os.environ.get("RANK", "0") != "0":
        return False
    with open_results(path, expected) as results:
        return len(results.stored) == len(expected.keys())


@contextmanager
def open_results(path: Path, expected: ExpectedResults, *, as_json: bool = False) -> Iterator[ResultsFile]:
    """Open or create the results file of a run, keep the results that it holds, and write its settings file.

    A last line that was cut off is removed. Raises ConfigError if another process writes the file, or if it
    holds anything but results of this run.
    """
    path = path.resolve()  # a symbolic link stays one
    with path.open("a+b", buffering=0) as file:  # closing it releases the lock
        _lock(file.fileno(), path)
        results = ResultsFile(path, file.fileno(), expected, as_json=as_json)
        if not results.stored and expected.settings is not None:
            write_results_settings(path, expected.settings)
        file.truncate(results.end)
        try:
            yield results
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C, SIGTERM
                error.add_note(results.resume_hint())
            raise


def _lock(descriptor: int, path: Path) -> None:
    """Lock the file at `path` without waiting. Raises ConfigError if another process holds or has replaced it."""
    try:
        lock_file(descriptor)
        is_free = is_open_file(descriptor, path)
    except BlockingIOError:
        is_free = False
    if not is_free:
        raise ConfigError(f"another titan infer is writing {path} now", hint="wait for it, or give another --out")


def _read_results(descriptor: int, path: Path, expected: ExpectedResults) -> dict[ResultKey, tuple[int, int]]:
    """Offset and length of each result's line. Raises ConfigError for a file with anything but results of this run."""
    lines: dict[ResultKey, tuple[int, int]] = {}
    problems: list[str] = []
    end, positions = 0, {id: position for position, id in enumerate(expected.ids)}
    settings = read_results_settings(path)
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        for number, raw in enumerate(file, start=1):
            if settings is not None and not raw.endswith(b"\n"):  # cut off by a kill, or by a power failure, with NULs
                break
            if number == 1 and expected.settings is not None:
                require_same_settings(settings, expected.settings, out=path)
            try:
                result = json.loads(raw)
                key = result["id"], result.get("sample", 0)
                problem = _difference(key, result, expected, positions) or ("it is there twice" if key in lines else "")
                problem = problem and f" (id {key[0]!r:.60}): {problem}"
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                problem = " is not a result"
            if problem:
                problems.append(f"line {number}{problem}")
            else:
                lines[key] = (end, len(raw))
            end += len(raw)
    if problems:
        raise ConfigError(
            f"{path} holds something else than results of this batch:" + list_offenders(problems),
            hint="a rerun needs the same prompts and options, and at least as many --samples; nothing was written",
            tries=[OTHER_OUT],
        )
    return lines


def _difference(
    key: ResultKey, result: Mapping[str, Any], expected: ExpectedResults, positions: Mapping[str | int, int]
) -> str:
    """Why this run would not make a stored result; "" if it would."""
    id, sample = key
    if id not in positions:
        return "no such id in the batch"
    if sample >= expected.samples or ("sample" in result and expected.samples == 1):
        return "from a run with more --samples"
    others = [name for name, value in expected.inputs(positions[id]).items() if result.get(name) != value]
    return f"another {others[0]}" if others else ""


def _as_line(result: Mapping[str, Any]) -> bytes:
    return json.dumps(result, ensure_ascii=False).encode() + b"\n"
