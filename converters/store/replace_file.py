"""Replace a file atomically: readers see the old content or the new one, also after a kill."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from converters.common.names import TEMPORARY_PREFIX


@contextmanager
def replacing(path: Path, *, temporary: Path | None = None) -> Iterator[Path]:
    """A temporary file's path: when the block ends well, what was written there becomes `path`, synced to the disk.

    When it does not, `path` stays as it was and the temporary file is removed. An existing file keeps its mode.
    """
    temporary = temporary or path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
    try:
        yield temporary
        fsync(temporary)
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync(path.parent)


def fsync(path: Path) -> None:
    """fsync a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
