"""Work done in a second process meanwhile: a copy of this one, so that what is imported is there already."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TypeVar

from torch import cuda

T = TypeVar("T")
_SIGNAL_OF_PARENTS_END = 1  # PR_SET_PDEATHSIG of linux/prctl.h


@contextmanager
def run_in_child(work: Callable[[], Iterator[T]]) -> Iterator[Iterator[T]]:
    """What `work` yields, made in another process: each when the one before was taken, the first one at once.

    Where no process can be copied, and where the other one fails for whatever reason, `work` is done here instead, once
    its results are asked for: errors are as they would be without it. Leaving ends the other process.
    """
    if not _can_fork():
        yield work()
        return
    context = get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(work, here, there, os.getpid()), daemon=True)
    try:
        process.start()
    except OSError:  # no process or no memory for one is left
        yield work()
        return
    there.close()
    try:
        yield _results(work, here)
    finally:
        here.close()
        process.kill()
        process.join()


def _can_fork() -> bool:
    """Locks that threads hold stay locked in a copy, and a driver that was started does not work there."""
    return sys.platform == "linux" and threading.active_count() == 1 and not cuda.is_initialized()


def _results(work: Callable[[], Iterator[T]], there: Connection) -> Iterator[T]:
    received = 0
    try:
        while True:
            there.send(received)
            if (found := there.recv()) is None:
                return
            yield found[0]
            received += 1
    except (EOFError, OSError):
        yield from islice(work(), received, None)


def _serve(work: Callable[[], Iterator[T]], theirs: Connection, there: Connection, parent: int) -> None:
    """The other process, which says nothing of how it ends. Ctrl-C reaches it too, and is the first one's to answer."""
    ctypes.CDLL(None).prctl(_SIGNAL_OF_PARENTS_END, signal.SIGKILL)  # also where that one is killed, amid a capture
    if os.getppid() != parent:  # it was before that
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    theirs.close()  # so that the first one's end is noticed
    try:
        for found in work():
            there.recv()
            there.send((found,))
        there.recv()
        there.send(None)
    except BaseException:
        os._exit(1)
    os._exit(0)
