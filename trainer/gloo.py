"""Gloo groups with one worker thread each, on one device: torch gives them two threads, which corrupt the heap.

Both write the name of the collective that they completed last into one std::string of their group, without a lock
(torch 2.13, `ProcessGroupGloo::runLoop`). "ALLGATHER_COALESCED", as DTensor's all-gathers are called, is kept on the
heap, shorter names inside of the string: one thread frees what the other is writing "ALLREDUCE" into. Under tensor or
context parallelism ranks died of it, rarely, in whatever allocated next.
"""

import functools
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def use_one_worker() -> None:
    """From here on, in this process. What ranks collect in a group is in the same order on all: no thread is missed."""
    if not dist.is_gloo_available() or hasattr(dist.ProcessGroupGloo.__init__, "__wrapped__"):
        return
    # torch takes no options for a gloo group, and there is no setting: only the constructor knows of threads
    dist.ProcessGroupGloo.__init__ = _with_one_worker(dist.ProcessGroupGloo.__init__)


def _with_one_worker(construct: Any) -> Any:
    @functools.wraps(construct)
    def __init__(self, store, rank, size, options=None, *, timeout: timedelta | None = None):
        if not isinstance(options, dist.ProcessGroupGloo._Options):
            timeout = options or timeout
            options = dist.ProcessGroupGloo._Options()
            options._devices = list(_devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME", "")))
            if timeout is not None:
                options._timeout = timeout
        options._threads = 1
        construct(self, store, rank, size, options)

    return __init__


@functools.cache
def _devices(pid: int, interfaces: str) -> tuple[Any, ...]:
    """What torch takes where no options are given, but once for a process instead of once for a group.

    Each has a thread that wakes up a hundred times a second, and that outlives its group. `pid`: a fork has none of it.
    """
    gloo = dist.ProcessGroupGloo
    if len(interfaces) > 1:  # as torch asks
        return tuple(gloo.create_device(interface=name) for name in interfaces.split(","))
    return (gloo.create_default_device(),)
