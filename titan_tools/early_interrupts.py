"""Ctrl-C while modules are imported: parts of torch abort on it with a core dump, or swallow it."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any


@contextmanager
def interrupts_end_it() -> Iterator[None]:
    """Around imports, with nothing to tidy up yet: Ctrl-C is told as ever, and ends the process where it stands."""
    from titan_tools.launch import started_by_titan  # here: it imports `trainer`, which the cli checks first to be ours

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, partial(_end, started_by_titan()))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(has_parent: bool, number: int, frame: Any) -> None:
    if not has_parent:  # which tells it
        with suppress(OSError):  # closed
            os.write(2, b"error: interrupted\n")
    os._exit(130)
