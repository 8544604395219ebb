"""The file of a batch's results: appended as they finish, kept by a rerun, put into the batch's order at the end.

A line is handed to the kernel whole and at once, so that it outlives a kill of this process; only at the end the file
is also synced to the disk. A machine that loses its power loses at most the last seconds' lines, which a rerun makes
again: syncing each of them would cost a batch of short answers more time than making them.
"""

import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from converters.commit import fsync
from converters.errors import ConfigError
from titan_tools.infer.tasks.made_with import read_made_with, write_made_with
from titan_tools.infer.tasks.replace_file import replace_file
from titan_tools.infer.tasks.results_lines import Expected, Found, Key, as_line, numbered, read_results


class ResultsFile:
    """An open file of results. No other process writes it until its `with` block is left; made by `open_results`."""

    def __init__(self, path: Path, descriptor: int, keys: Sequence[Key], found: Found):
        self.path, self._descriptor, self._keys = path, descriptor, keys
        self._places, self._end = found.places, found.end

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def __enter__(self) -> "ResultsFile":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        os.close(self._descriptor)  # lets go of the lock
        if error is not None and not isinstance(error, Exception):  # Ctrl-C, SIGTERM
            error.add_note(self._go_on())

    def append(self, key: Key, result: Mapping[str, Any]) -> None:
        """Write a line. Raises ConfigError where the disk takes no more; what was there stays."""
        line = as_line(result)
        written = 0
        try:
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            os.ftruncate(self._descriptor, self._end)
            raise ConfigError(f"cannot write {self.path}: {error.strerror}", hint=self._go_on()) from None
        self._places[key] = (self._end, len(line))
        self._end += len(line)

    def put_in_order(self) -> None:
        """Replace the file, once all results are there, by one with its lines in the order of the batch."""
        places = [self._places[key] for key in self._keys]
        try:
            if places == sorted(places):
                os.fsync(self._descriptor)
                fsync(self.path.parent)
            else:
                replace_file(self.path, self._lines())
        except OSError as error:
            raise ConfigError(
                f"cannot put {self.path} into the batch's order: {error.strerror}",
                hint="all results are in it, in the order in which they ended; the same command tries again",
            ) from None

    def results(self) -> Iterator[dict[str, Any]]:
        """All results, in the order of the batch."""
        return map(json.loads, self._lines())

    def _lines(self) -> Iterator[bytes]:
        for key in self._keys:
            offset, length = self._places[key]
            yield os.pread(self._descriptor, length, offset)

    def _go_on(self) -> str:
        return f"{len(self):,} of {len(self._keys):,} results are in {self.path}; the same command goes on from there"


def check_place(path: Path, *, batch: Path) -> None:
    """Raise ConfigError where results, or their settings beside them, cannot go to `path`; nothing is changed."""
    name = f"--out {path}"
    try:
        folder = path.resolve().parent
    except (OSError, RuntimeError):  # which of them depends on Python's version
        raise ConfigError(f"{name} is a link that leads back to itself") from None
    if path.exists() and batch.exists() and path.samefile(batch):
        raise ConfigError(f"{name} is the batch itself", hint="results go to a file of their own")
    if path.is_dir():
        raise ConfigError(f"{name} is a folder", tries=[f"--out {path / 'results.jsonl'}"])
    if path.exists() and not path.is_file():
        raise ConfigError(f"{name} is no regular file", hint="without --out the results go to standard output")
    if not folder.is_dir():
        raise ConfigError(f"{name}: there is no folder {folder}", tries=[f"mkdir -p {folder}"])
    try:
        if path.exists():
            path.open("r+b").close()
        with TemporaryFile(dir=folder):  # where the file that replaces it in the end will be made
            pass
    except OSError as error:
        raise ConfigError(f"{name} cannot be written: {error.strerror}") from None
    read_made_with(path)  # whatever else lies in its place would be lost


def is_complete(path: Path | None, expected: Expected) -> bool:
    """Whether the results file, if there is one, holds all results, so that no weights are needed.

    Raises ConfigError where it cannot be gone on with; see `open_results`. In a launch only the first rank looks, since
    it will write; the others say no.
    """
    if path is None or not path.exists() or os.environ.get("RANK", "0") != "0":
        return False
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock(descriptor, path, fcntl.LOCK_SH)
        found = read_results(descriptor, path, expected)
    finally:
        os.close(descriptor)
    return len(found.places) == len(expected.keys)


def all_there(path: Path) -> str:
    """The note of a run that has nothing to do; see `is_complete`."""
    return f"all results are in {path} already: nothing to do"


def open_results(path: Path, expected: Expected) -> ResultsFile:
    """Open or make the file for the results of a run, and keep those that it holds; what makes them is beside it then.

    A last line that was cut off is dropped. Raises ConfigError where another process writes the file, or it holds
    something else.
    """
    path = path.resolve()  # a link stays one
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        try:
            _lock(descriptor, path, fcntl.LOCK_EX)
            if _is_still(descriptor, path):
                found = read_results(descriptor, path, expected)
                if not found.num_unnumbered:
                    if not found.places and found.made_with != expected.made_with:
                        write_made_with(path, expected.made_with)
                    os.ftruncate(descriptor, found.end)
                    return ResultsFile(path, descriptor, expected.keys, found)
                _number(path, descriptor, found)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # who held it has replaced it, or it was replaced here


def _number(path: Path, descriptor: int, found: Found) -> None:
    """Replace a file of one sample for each prompt by one whose lines number it: there are to be more."""
    places = found.places.values()
    try:
        replace_file(path, (numbered(os.pread(descriptor, length, offset)) for offset, length in places))
    except OSError as error:
        raise ConfigError(f"cannot number the samples in {path}: {error.strerror}") from None


def _lock(descriptor: int, path: Path, how: int) -> None:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"another titan infer is writing {path} now", hint="let it end, or give this one another --out"
        ) from None
    except OSError:
        pass  # a file system without locks: two into one file are then the user's to avoid


def _is_still(descriptor: int, path: Path) -> bool:
    mine = os.fstat(descriptor)
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    return (mine.st_dev, mine.st_ino) == (found.st_dev, found.st_ino) and stat.S_ISREG(mine.st_mode)
