"""The results file of a batch: append each result, resume after an interruption, restore the batch's order at the end.

Each line is written with one call as soon as it is finished, so that it survives a kill of the process. Only the
complete file is synced to the disk: after a power failure the last seconds' lines may be missing, and a rerun makes
them again. To sync every line would take a batch of short answers more time than generating them.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from converters.errors import ConfigError, list_offenders
from converters.file_lock import is_open_file, lock_file
from converters.replace_file import fsync, replacing
from titan_tools.console import print_json
from titan_tools.infer.tasks.results_settings import (
    OTHER_OUT,
    ResultsSettings,
    missing_settings,
    read_results_settings,
    require_same_settings,
    write_results_settings,
)

ResultKey = tuple[str | int, int]  # a prompt's id, and the number of the sample
_LINE_START = b'{"id"'  # of every line written here
MORE_SAMPLES = "from a run with more --samples"


@dataclass(frozen=True, slots=True)
class ExpectedResults:
    """The results of a run: their keys in the batch's order, and how to tell results of another run.

    `difference` says why this run would not give a stored result, "" where it would.
    """

    keys: Sequence[ResultKey]
    difference: Callable[[ResultKey, dict[str, Any]], str]
    settings: ResultsSettings | None  # None: results go to standard output


class ResultsFile:
    """An open and locked results file, which takes results in any order; made by `open_results`."""

    def __init__(self, path: Path, descriptor: int, keys: Sequence[ResultKey], stored: "_Stored", *, as_json: bool):
        self.path, self._descriptor, self._keys, self._as_json = path, descriptor, keys, as_json
        self._lines, self._end, self._has_unnumbered = stored.lines, stored.end, stored.has_unnumbered

    def __contains__(self, key: ResultKey) -> bool:
        return key in self._lines

    def __len__(self) -> int:
        return len(self._lines)

    def __enter__(self) -> "ResultsFile":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        os.close(self._descriptor)  # releases the lock
        if error is not None and not isinstance(error, Exception):  # Ctrl-C, SIGTERM
            error.add_note(self._resume_hint())

    def append(self, key: ResultKey, result: Mapping[str, Any]) -> None:
        """Write a line. Raises ConfigError where the disk is full; the lines before stay."""
        line, written = _as_line(result), 0
        try:
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            os.ftruncate(self._descriptor, self._end)
            raise ConfigError(f"cannot write {self.path}: {error.strerror}", hint=self._resume_hint()) from None
        self._lines[key] = (self._end, len(line))
        self._end += len(line)

    def finish(self, stats: Mapping[str, Any]) -> None:
        """All results are there: restore the batch's order and sync the file to the disk; print them for --json."""
        offsets = [self._lines[key][0] for key in self._keys]
        try:
            if offsets == sorted(offsets) and not self._has_unnumbered:
                os.fsync(self._descriptor)
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

    def _ordered(self) -> Iterator[bytes]:
        for key in self._keys:
            yield _numbered(self._read(key)) if self._has_unnumbered else self._read(key)

    def _read(self, key: ResultKey) -> bytes:
        offset, length = self._lines[key]
        return os.pread(self._descriptor, length, offset)

    def _resume_hint(self) -> str:
        return f"{len(self):,} of {len(self._keys):,} results are in {self.path}; the same command resumes there"


def check_results_path(path: Path, *, batch: Path) -> None:
    """Raise ConfigError where results, or their settings file, cannot be written to `path`; nothing is changed."""
    name = f"--out {path}"
    try:
        folder = path.resolve().parent
    except (OSError, RuntimeError):  # depending on Python's version
        raise ConfigError(f"{name} is a symbolic link to itself") from None
    if path.exists() and batch.exists() and path.samefile(batch):
        raise ConfigError(f"{name} is the batch itself", hint="give the results a file of their own")
    if path.is_dir():
        raise ConfigError(f"{name} is a folder", tries=[f"--out {path / 'results.jsonl'}"])
    if path.exists() and not path.is_file():
        raise ConfigError(f"{name} is not a regular file", hint="without --out results go to standard output")
    if not folder.is_dir():
        raise ConfigError(f"{name}: there is no folder {folder}", tries=[f"mkdir -p {folder}"])
    try:
        if path.exists():
            path.open("r+b").close()
        with TemporaryFile(dir=folder):  # for the file that replaces it at the end
            pass
        read_results_settings(path)  # any other file in its place would be overwritten
    except OSError as error:
        raise ConfigError(f"{name} cannot be written: {error.strerror}") from None


def is_complete(path: Path | None, expected: ExpectedResults) -> bool:
    """Whether the results file holds all results, so that no weights are needed.

    Raises ConfigError where the file cannot be continued; see `open_results`. Only rank 0 of a launch reads it; on
    other ranks the answer is False.
    """
    if path is None or not path.exists() or os.environ.get("RANK", "0") != "0":
        return False
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock(descriptor, path, shared=True)
        return len(_read_results(descriptor, path, expected).lines) == len(expected.keys)
    finally:
        os.close(descriptor)


def nothing_to_do(path: Path | None) -> str:
    """The note of a run whose results are complete; see `is_complete`."""
    return f"all results are in {path} already: nothing to do"


def open_results(path: Path, expected: ExpectedResults, *, as_json: bool = False) -> ResultsFile:
    """Open or create the results file of a run, keep the results that it holds, and write its settings file.

    A last line that was cut off is removed. Raises ConfigError where another process writes the file, or where it
    holds anything but results of this run.
    """
    path = path.resolve()  # a symbolic link stays one
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    try:
        _lock(descriptor, path)
        stored = _read_results(descriptor, path, expected)
        if not stored.lines and expected.settings is not None:
            write_results_settings(path, expected.settings)
        os.ftruncate(descriptor, stored.end)
    except BaseException:
        os.close(descriptor)
        raise
    return ResultsFile(path, descriptor, expected.keys, stored, as_json=as_json)


def _lock(descriptor: int, path: Path, *, shared: bool = False) -> None:
    """Lock the file at `path` without waiting. Raises ConfigError where another process holds or has replaced it."""
    try:
        lock_file(descriptor, shared=shared)
        is_free = is_open_file(descriptor, path)
    except BlockingIOError:
        is_free = False
    if not is_free:
        raise ConfigError(f"another titan infer is writing {path} now", hint="wait for it, or give another --out")


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a results file holds: offset and length of each result's line, and the end of the last whole line.

    `has_unnumbered`: lines without a sample number, of a run with one sample, in a file for several samples.
    """

    lines: dict[ResultKey, tuple[int, int]]
    end: int
    has_unnumbered: bool = False


def _read_results(descriptor: int, path: Path, expected: ExpectedResults) -> _Stored:
    """Raises ConfigError where the file holds anything but results of this run."""
    settings = read_results_settings(path)
    lines: dict[ResultKey, tuple[int, int]] = {}
    problems: list[str] = []
    wanted, end, has_unnumbered, num_samples = set(expected.keys), 0, False, 1
    with open(os.dup(descriptor), "rb") as file:
        first = file.readline()
        if not first or _is_cut_off(first):
            return _Stored({}, 0)
        if settings is not None and expected.settings is not None:
            require_same_settings(settings, expected.settings, out=path)
        file.seek(0)
        for number, raw in enumerate(file, start=1):
            if _is_cut_off(raw):
                break
            try:
                key, is_numbered = _parse_result(raw, lines, wanted, expected.difference)
            except ConfigError as problem:
                problems.append(f"line {number}{problem.message}")
                if problem.message.endswith(MORE_SAMPLES):
                    num_samples = max(num_samples, json.loads(raw).get("sample", 0) + 1)
                continue
            if raw.endswith(b"\n"):
                lines[key] = (end, len(raw))
                end += len(raw)
                has_unnumbered |= not is_numbered
    if problems:
        raise ConfigError(
            f"{path} holds something else than results of this batch:" + list_offenders(problems),
            hint="a rerun needs the same prompts and options; nothing was written",
            tries=[*([f"--samples {num_samples}"] if num_samples > 1 else []), OTHER_OUT],
        )
    if settings is None:
        raise missing_settings(path)
    return _Stored(lines, end, has_unnumbered and any(sample for _, sample in wanted))


def _is_cut_off(raw: bytes) -> bool:
    """Whether the last line is the beginning of a result: cut off by a kill, or padded with NULs by a power failure."""
    content = raw.rstrip(b"\0")
    if raw.endswith(b"\n") or not content.startswith(_LINE_START[: len(content)]):
        return False
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return True
    return False


def _parse_result(
    raw: bytes,
    lines: Mapping[ResultKey, Any],
    wanted: set[ResultKey],
    difference: Callable[[ResultKey, dict[str, Any]], str],
) -> tuple[ResultKey, bool]:
    """The key of a line, and whether it has a sample number. Raises ConfigError, with a message that follows "line 5",
    for a result of another run."""
    try:
        result = json.loads(raw)
        key = (result["id"], result.get("sample", 0))
        hash(key)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ConfigError(" is not a result") from None
    name = f" (id {key[0]!r:.60})"
    if key not in wanted or isinstance(key[0], bool) or type(key[1]) is not int:
        is_sample = (key[0], 0) in wanted and type(key[1]) is int
        raise ConfigError(f"{name}: {MORE_SAMPLES if is_sample else 'no such id in the batch'}")
    if key in lines:
        raise ConfigError(f"{name} is there twice")
    if problem := difference(key, result):
        raise ConfigError(f"{name}: {problem}")
    return key, "sample" in result


def _numbered(raw: bytes) -> bytes:
    """The line with a sample number: 0 where it has none."""
    result = json.loads(raw)
    return raw if "sample" in result else _as_line({"id": result.pop("id"), "sample": 0, **result})


def _as_line(result: Mapping[str, Any]) -> bytes:
    return json.dumps(result, ensure_ascii=False).encode() + b"\n"
