"""A lock per checkpoint folder: two runs would delete each other's unfinished saves. For one process; torch-free."""

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from converters.common.errors import CheckpointError
from converters.common.names import RUN_LOCK
from converters.store.file_lock import lock_file
from trainer.checkpoints.step_folders import refuse_foreign

_RETRY_SECS = 0.1


@contextmanager
def only_run(folder: Path, *, patience_secs: float = 3) -> Iterator[None]:
    """Hold the folder's lock. Raises CheckpointError, naming the holder, if another process has it.

    The kernel releases the lock when its holder ends, so the file stays: deleting it would allow two holders, one that
    opened the old file and one that creates a new file. `patience_secs` is how long to wait for a run that was just
    killed.
    """
    refuse_foreign(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / RUN_LOCK).open("a+") as file:
        deadline = time.monotonic() + patience_secs
        while not _is_taken(file.fileno()):
            if time.monotonic() > deadline:
                file.seek(0)
                raise CheckpointError(
                    f"another run saves to {folder}: {file.read().strip()}",
                    hint="wait for it, stop it, or save to another folder; nothing was changed",
                    tries=["--job.dump_folder OTHER_FOLDER"],
                )
            time.sleep(_RETRY_SECS)
        file.truncate(0)
        print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
        yield


def refuse_other_run(folder: Path) -> None:
    """Raise CheckpointError, as `only_run` does, while another run holds the lock of a folder. Creates nothing."""
    if (folder / RUN_LOCK).is_file():
        with only_run(folder):
            pass


def _is_taken(descriptor: int) -> bool:
    """Try to take the lock; True, with a warning, on file systems without locks, as some Lustre mounts."""
    try:
        if not lock_file(descriptor):
            print("WARNING: a second run in this folder cannot be detected: no file locks here", file=sys.stderr)
    except BlockingIOError:
        return False
    return True
