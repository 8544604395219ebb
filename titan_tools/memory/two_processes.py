"""Run work in a second process: a fork of this one, so that torch need not be imported again.

A pipeline's ranks are estimated in both: docs/benchmarks.md's limit for 405B on 512 ranks needs it.
"""

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

from trainer.ranks.signals import die_with_parent

T = TypeVar("T")


@contextmanager
def run_in_child(work: Callable[[], Iterator[T]]) -> Iterator[Iterator[T]]:
    """What `work` yields, computed in a child process: the first result at once, each other when the last was taken.

    If no process can be forked, or the child fails for any reason, `work` runs here instead when its results are
    needed, so errors are as without a child. Leaving the context ends the child.
    """
    if not _can_fork():
        yield work()
        return
    context = get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(work, here, there, os.getpid()), daemon=True)
    try:
        process.start()
    except OSError:  # too many processes, or too little memory
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
    """Locks held by other threads stay locked in a fork, and an initialized CUDA driver does not work there."""
    return sys.platform == "linux" and threading.active_count() == 1 and not cuda.is_initialized()  # type: ignore[no-untyped-call]


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
    """The child process, which fails silently. Ctrl-C reaches it too; the parent handles it."""
    die_with_parent(parent)  # also if the parent is killed during a capture
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    theirs.close()  # so that the parent's end closes the pipe
    try:
        for found in work():
            there.recv()
            there.send((found,))
        there.recv()
        there.send(None)
    except BaseException:
        os._exit(1)
    os._exit(0)
