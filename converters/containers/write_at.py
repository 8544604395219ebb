"""Write bytes at given places of a file, all of them, or say what went wrong."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

from converters.errors import CheckpointError
from converters.manifest import FileSum


def write_all(descriptor: int, data: bytes | memoryview, offset: int, *, what: object) -> None:
    """pwrite until nothing is left. Raises CheckpointError where the disk is full or refuses."""
    view = memoryview(data)
    try:
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written
    except OSError as error:
        if error.errno == errno.EFBIG:
            hint = "a limit of the disk or `ulimit -f`; --shard-size makes smaller ones; nothing half-written is kept"
            raise CheckpointError(f"{what}: no file may be that long ({error.strerror})", hint=hint) from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space, or write to another disk; nothing half-written is kept"
            raise CheckpointError(f"{what}: no space left ({error.strerror})", hint=hint) from error
        raise CheckpointError(f"{what}: cannot be written ({error.strerror})") from error


def write_at(path: Path, pieces: Iterable[tuple[int, bytes]]) -> None:
    """Write (offset, bytes) pieces into a file, which is created if it is not there."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        for offset, data in pieces:
            write_all(descriptor, data, offset, what=path)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> FileSum:
    """Write a small file whole and return its sum for the manifest."""
    write_at(path, [(0, data)])
    return FileSum(len(data), crc32(data))
