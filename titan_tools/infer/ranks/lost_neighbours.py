"""NCCL waits for a rank that has ended as for one that is slow. So a thread watches the processes of this machine."""

import os
import select
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from titan_tools.infer.ranks.machine import watch_ends
from titan_tools.launch import started_by_titan

_LOOK_EVERY_MS = 200
_GRACE_SECS = 1  # in which this rank may end by itself, of what ended the other: it has more to say of it


@contextmanager
def watching(others: Mapping[int, int], *, rank: int, exit_code: int) -> Iterator[None]:
    """Within the block, leave this process when one of `others` (process id → rank) has ended, within two seconds.

    Where processes cannot be watched, it does nothing.
    """
    watched, left = watch_ends(others), threading.Event()
    if watched:
        threading.Thread(target=_leave_with, args=(watched, left, rank, exit_code), daemon=True).start()
    try:
        yield
    finally:
        left.set()  # which the thread sees some time later; nobody waits for it


def _leave_with(watched: Mapping[int, int], left: threading.Event, rank: int, exit_code: int) -> None:
    poll = select.poll()
    for descriptor in watched:
        poll.register(descriptor, select.POLLIN)
    while not (ended := poll.poll(_LOOK_EVERY_MS)):
        if left.is_set():
            return
    if left.wait(_GRACE_SECS):
        return
    if not started_by_titan():  # whose parent tells why the first rank ended
        other = watched[ended[0][0]]
        print(f"error: rank {rank} has lost rank {other}, which ended\nhint: that one says why", file=sys.stderr)
        sys.stderr.flush()
    os._exit(exit_code)  # the main thread waits within NCCL, and would not hear of an exception
