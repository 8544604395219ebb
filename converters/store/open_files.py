"""A bounded set of open files, shared by threads: 10,000 files must not need 10,000 descriptors."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from converters.common.errors import CheckpointError


class OpenFile:
    """A descriptor, open as long as something refers to this object: no count of users is kept for each read."""

    __slots__ = ("descriptor",)

    def __init__(self, path: Path, flags: int):
        self.descriptor = os.open(path, flags, 0o644)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):  # not if opening failed
            os.close(self.descriptor)


class OpenFiles:
    """Open files by name; of too many, the one that was opened first is closed, once nobody uses it."""

    def __init__(self, root: Path, *, flags: int = os.O_RDONLY, most: int = 64):
        self._root = root
        self._flags = flags
        self._most = most
        self._lock = Lock()
        self._open: dict[str, OpenFile] = {}

    def get(self, name: str) -> OpenFile:
        """The open file. Keep the object while its descriptor is used."""
        return self._open.get(name) or self._add(name)

    @contextmanager
    def use(self, name: str) -> Iterator[int]:
        """The descriptor of a file, which stays open inside the block."""
        file = self.get(name)
        yield file.descriptor

    def _add(self, name: str) -> OpenFile:
        with self._lock:
            if name in self._open:  # by another thread
                return self._open[name]
            if len(self._open) >= self._most:
                del self._open[next(iter(self._open))]
            path = self._root / name
            try:
                file = self._open[name] = OpenFile(path, self._flags)
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be opened ({error.strerror})") from error
            return file

    def close(self) -> None:
        """Close all that are not in use."""
        with self._lock:
            self._open.clear()
