"""One run per checkpoint folder: two would sweep away each other's unfinished saves. For one process; torch-free."""

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from converters.errors import CheckpointError
from converters.file_lock import lock_file
from converters.names import RUN_LOCK
from trainer.checkpoints.step_folders import refuse_foreign

_RETRY_SECS = 0.1


@contextmanager
def only_run(folder: Path, *, patience_secs: float = 3) -> Iterator[None]:
    """Hold the folder's lock. Raises CheckpointError, naming the holder, where another process has it.

    The kernel lets go of the lock when its holder dies, however that happens, so the file may stay for ever: deleting
    it would let in two at once, one that had opened it before and one that makes it anew. `patience_secs`: a run that
    was killed a moment ago may not be quite dead.
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
                    hint="let it end, or stop it, or save elsewhere; nothing was touched",
                    tries=["--job.dump_folder OTHER_FOLDER"],
                )
            time.sleep(_RETRY_SECS)
        file.truncate(0)
        print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
        yield


def _is_taken(descriptor: int) -> bool:
    """Try to take the lock; True, and said, on file systems that know none, as some Lustre mounts."""
    try:
        if not lock_file(descriptor):
            print("WARNING: a second run in this folder would go unnoticed: no file locks here", file=sys.stderr)
    except BlockingIOError:
        return False
    return True
