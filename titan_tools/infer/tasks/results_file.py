"""OUT of a batch: results appended as they finish, taken up again by a rerun, put into the batch's order at the end.

A line is handed to the kernel whole and at once, so that it outlives a kill of this process; only at the end the file
is also synced to the disk. A machine that loses its power loses at most the last seconds' lines, which a rerun makes
again: syncing each of them would cost a batch of short answers more time than making them.
"""

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from converters.commit import fsync
from converters.errors import ConfigError, list_offenders
from converters.names import TEMPORARY_PREFIX
from titan_tools.launch import inside_launch

_LINE_START = b'{"id"'  # of every line that we write
Key = tuple[str | int, int]  # a prompt's id, and which of its samples


class ResultsFile:
    """An open OUT that no other process writes. Made by `open_results`, closed by leaving its `with` block."""

    def __init__(self, path: Path, descriptor: int, keys: Sequence[Key], places: dict[Key, tuple[int, int]], end: int):
        self.path, self._descriptor, self._keys, self._places, self._end = path, descriptor, keys, places, end

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
        line = json.dumps(result, ensure_ascii=False).encode() + b"\n"
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
            else:
                self._rewrite()
            fsync(self.path.parent)
        except OSError as error:
            raise ConfigError(
                f"cannot put {self.path} into the batch's order: {error.strerror}",
                hint="all results are in it, in the order in which they ended; the same command tries again",
            ) from None

    def _rewrite(self) -> None:
        ordered = self.path.with_name(f"{TEMPORARY_PREFIX}{self.path.name}")
        try:
            with ordered.open("wb") as file:
                file.writelines(self._lines())
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(self.path, ordered)
            os.replace(ordered, self.path)
        finally:
            ordered.unlink(missing_ok=True)

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
    """Raise ConfigError where results cannot go to `path`, of which nothing is changed."""
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


def is_complete(path: Path | None, keys: Sequence[Key], differs: Callable[[Key, dict[str, Any]], str]) -> bool:
    """Whether OUT, if there is one, holds the results of all `keys`, so that no weights are needed.

    Raises ConfigError where it cannot be gone on with; see `open_results`. In a launch only the first rank looks, since
    it will write; and it says no, since the others wait for it.
    """
    if path is None or not path.exists() or os.environ.get("RANK", "0") != "0":
        return False
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock(descriptor, path, fcntl.LOCK_SH)
        places, _ = _read(descriptor, path, keys, differs)
    finally:
        os.close(descriptor)
    return len(places) == len(keys) and not inside_launch()


def all_there(path: Path) -> str:
    """What is told where `is_complete`."""
    return f"all results are in {path} already: nothing to do"


def open_results(path: Path, keys: Sequence[Key], differs: Callable[[Key, dict[str, Any]], str]) -> ResultsFile:
    """Open or make the file for results of `keys`, in whose order they shall stand, and keep those that it holds.

    `differs` says what makes a result another than one that this run would make, or "". A last line that was cut off is
    dropped. Raises ConfigError where another process writes the file, or it holds something else.
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
                places, end = _read(descriptor, path, keys, differs)
                os.ftruncate(descriptor, end)
                return ResultsFile(path, descriptor, keys, places, end)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # who held it has replaced it


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


def _read(
    descriptor: int, path: Path, keys: Sequence[Key], differs: Callable[[Key, dict[str, Any]], str]
) -> tuple[dict[Key, tuple[int, int]], int]:
    """Where each result stands (offset, length), and where the last whole line ends. Raises ConfigError."""
    places: dict[Key, tuple[int, int]] = {}
    problems, wanted, end = [], set(keys), 0
    with open(os.dup(descriptor), "rb") as file:
        for number, raw in enumerate(file, start=1):
            if _is_torn(raw):
                break
            problem = _problem_of(raw, places, wanted, differs)
            if isinstance(problem, str):
                problems.append(f"line {number}{problem}")
            elif raw.endswith(b"\n"):
                places[problem] = (end, len(raw))
                end += len(raw)
    if problems:
        raise ConfigError(
            f"{path} holds something else than results of this batch:" + list_offenders(problems),
            hint="a rerun goes on in the file of the same prompts and options; nothing was written",
            tries=["--out ANOTHER_FILE"],
        )
    return places, end


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


def _problem_of(
    raw: bytes, places: Mapping[Key, Any], wanted: set[Key], differs: Callable[[Key, dict[str, Any]], str]
) -> Key | str:
    """The key of a line's result, or why it is none of this batch's."""
    try:
        result = json.loads(raw)
        key = (result["id"], result.get("sample", 0))
        hash(key)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return " is no result"
    named = f" (id {key[0]!r:.60})"
    if key not in wanted or isinstance(key[0], bool) or isinstance(key[1], bool):
        return f"{named}: " + ("another number of --samples" if (key[0], 0) in wanted else "no such id in the batch")
    if key in places:
        return f"{named} stands there twice"
    problem = differs(key, result)
    return f"{named}: {problem}" if problem else key
