"""A bounded set of open files, shared by threads: 10,000 files must not need 10,000 descriptors."""

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from converters.common.errors import CheckpointError


class OpenFiles:
    """Descriptors by file name; of too many, the least recently used one that is not in use is closed."""

    def __init__(self, root: Path, *, flags: int = os.O_RDONLY, most: int = 64):
        self._root = root
        self._flags = flags
        self._most = most
        self._lock = Lock()
        self._open: OrderedDict[str, list[int]] = OrderedDict()  # name → [descriptor, users]
        self._states: dict[str, tuple[int, int]] = {}  # name → (size, mtime) when it was first opened or watched

    @contextmanager
    def use(self, name: str) -> Iterator[int]:
        """The descriptor of a file, which stays open inside the block."""
        with self._lock:
            slot = self._open.get(name) or self._add(name)
            self._open.move_to_end(name)
            slot[1] += 1
        try:
            yield slot[0]
        finally:
            with self._lock:
                slot[1] -= 1

    def watch(self, names: Iterable[str]) -> None:
        """Remember size and time of files, so that a change before their first use is noticed, too."""
        for name in names:
            with suppress(OSError):
                self._states[name] = _state(os.stat(self._root / name))

    def _add(self, name: str) -> list[int]:
        too_many = max(0, len(self._open) + 1 - self._most)
        for other in [n for n, (_, users) in self._open.items() if not users][:too_many]:
            os.close(self._open.pop(other)[0])
        path = self._root / name
        try:
            descriptor = os.open(path, self._flags, 0o644)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened ({error.strerror})") from error
        slot = self._open[name] = [descriptor, 0]
        if self._flags == os.O_RDONLY:
            state = _state(os.fstat(descriptor))
            if self._states.setdefault(name, state) != state:
                raise self._changed(name)
        return slot

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file has another size or time than when it was first opened or watched."""
        for name, state in self._states.items():
            try:
                found = _state(os.stat(self._root / name))
            except OSError:
                found = None
            if found != state:
                raise self._changed(name)

    def _changed(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self._root / name}: changed while it was being read", hint="is another process writing it?"
        )

    def close(self) -> None:
        """Close all of them."""
        with self._lock:
            for descriptor, _ in self._open.values():
                os.close(descriptor)
            self._open.clear()


def _state(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns
