"""File names that come from inside a checkpoint: they may name a regular file of its folder, nothing else."""

import os
import stat
from pathlib import Path

from converters.errors import CheckpointError


def checked_file_name(name: object, *, what: str) -> str:
    """`name` if it is one plain file name. Separators, `..`, drive letters, `~` and control characters are refused."""
    plain = (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not name.startswith("~")
        and not any(c in name for c in "/\\:")
        and name.isprintable()
    )
    if not plain:
        raise CheckpointError(
            f"{what}: names the file {str(name)[:200]!r}, which may lie outside the checkpoint's folder",
            hint="files of a checkpoint lie beside each other, under plain names",
        )
    return name


def checked_file_size(folder: Path, name: str) -> int:
    """The size of a regular file of `folder`. A link is followed (HF caches are links), a device or pipe is refused."""
    path = folder / name
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing", hint="the checkpoint is incomplete") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: not a regular file")
    return status.st_size
