"""A lock per checkpoint folder: two runs would delete each other's unfinished saves. For one process; torch-free."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from converters.common.errors import CheckpointError
from converters.common.names import RUN_LOCK
from converters.store.base import is_present
from converters.store.location import Place, locate
from converters.store.output import Locked
from converters.store.outputs import run_outputs_at
from trainer.checkpoints.step_folders import refuse_foreign


@contextmanager
def only_run(folder: Place, *, patience_secs: float = 3) -> Iterator[None]:
    """Hold the folder's lock. Raises CheckpointError, naming the holder, if another process has it.

    The lock is released when its holder ends. `patience_secs` is how long to wait for a run that was just killed.
    """
    refuse_foreign(folder)
    location, owner = locate(folder), f"process {os.getpid()} on {socket.gethostname()}"
    lock = run_outputs_at(location).lock(location, RUN_LOCK, owner=owner, patience_secs=patience_secs)
    with ExitStack() as stack:
        try:
            stack.enter_context(lock)
        except Locked as error:
            raise CheckpointError(
                f"another run saves to {folder}: {error}",
                hint="wait for it, stop it, or save to another folder; nothing was changed",
                tries=["--job.dump_folder OTHER_FOLDER"],
            ) from None
        yield


def refuse_other_run(folder: Place) -> None:
    """Raise CheckpointError, as `only_run` does, while another run holds the lock of a folder. Creates nothing."""
    if is_present(locate(folder) / RUN_LOCK):
        with only_run(folder):
            pass
