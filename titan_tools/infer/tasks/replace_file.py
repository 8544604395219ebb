"""Other content for a file, whole or not at all."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from converters.commit import fsync
from converters.names import TEMPORARY_PREFIX


def replace_file(path: Path, lines: Iterable[bytes]) -> None:
    """Let `lines` be what is in `path`, on the disk too, by one rename. The mode of one that is there stays."""
    replacing = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
    try:
        with replacing.open("wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, replacing)
        os.replace(replacing, path)
    finally:
        replacing.unlink(missing_ok=True)
    fsync(path.parent)
