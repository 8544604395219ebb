"""The journal of an unfinished output: one line per finished unit of work, and the lock of its writer.

A line has JSON and its CRC32; reading ends at the first line that does not match, so that a line cut short by a kill
loses only its unit. A record is not a proof: `engine/copy.py` reads each region back before it skips it.
"""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converters.common.crc import crc32
from converters.common.errors import CheckpointError
from converters.store.file_lock import is_open_file, lock_file

VERSION = 3


class Journal:
    """The journal of one output, locked as long as it is open. Records are JSON objects by number of their unit."""

    def __init__(self, path: Path):
        """Open or create it. Raises CheckpointError if another process has locked it."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._places: dict[int, tuple[int, int]] = {}  # unit → (offset, length) of its line
        try:
            self._lock()
        except BaseException:
            os.close(self._descriptor)
            raise

    def _lock(self) -> None:
        try:
            lock_file(self._descriptor)  # where there are no locks, the user must avoid two conversions to one place
        except BlockingIOError as error:
            raise CheckpointError(f"{self.path.parent}: another conversion is writing here") from error
        if not is_open_file(self._descriptor, self.path):  # removed by the process that held it
            raise CheckpointError(f"{self.path.parent}: another conversion has just ended here")

    def start(self, header: Mapping[str, Any]) -> None:
        """Start with `header` and no records."""
        os.ftruncate(self._descriptor, 0)
        self._places = {}
        os.write(self._descriptor, _line({"journal": VERSION, **header}))

    def load(self, header: Mapping[str, Any]) -> bool:
        """Read the records; False if the journal is empty or has another header.

        What follows the last valid line is removed, so that the next record begins a line.
        """
        self._places = {}
        end = 0
        with self.path.open("rb") as file:
            for line in file:
                record = _parsed(line)
                if record is None:
                    break
                if not end and record != {"journal": VERSION, **header}:
                    return False
                if end:
                    self._places[record["unit"]] = (end, len(line))
                end += len(line)
        if not end:
            return False
        os.ftruncate(self._descriptor, end)
        return True

    def append(self, unit: int, record: Mapping[str, Any]) -> None:
        """Record that a unit is written, by one write at the end."""
        line = _line({"unit": unit, **record})
        if os.write(self._descriptor, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def recorded(self, unit: int) -> dict[str, Any] | None:
        """The last record of a unit that `load` has read. Thread-safe."""
        place = self._places.get(unit)
        return None if place is None else _parsed(os.pread(self._descriptor, place[1], place[0]))

    def close(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)


def _line(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (crc32(text), text)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if it is incomplete."""
    text = line[9:-1]
    if not line.endswith(b"\n") or line[:9] != b"%08x " % crc32(text):
        return None
    record: dict[str, Any] = json.loads(text)
    return record
