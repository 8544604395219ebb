"""A bounded set of open files, shared by threads: 10,000 files must not need 10,000 descriptors."""

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
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
        return slot

    def __del__(self) -> None:
        for descriptor, _ in self._open.values():
            os.close(descriptor)

    def close(self) -> None:
        """Close all that are not in use."""
        with self._lock:
            for name in [name for name, (_, users) in self._open.items() if not users]:
                os.close(self._open.pop(name)[0])
