"""Delay Ctrl-C and SIGTERM while Python's own locks and threads are in use."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_signals() -> Iterator[Callable[[], None]]:
    """Within the block, SIGINT and SIGTERM are only noted; the handlers run at its end, or when the yielded function
    is called.

    The handlers raise, between any two steps of the main thread. Within `threading.Condition.__enter__` that leaves
    the lock held: a thread of a pool then waits for it forever, and the pool for the thread. Handlers that are not
    Python functions (SIG_DFL, SIG_IGN) stay. No effect outside of the main thread, where no handler runs.
    """
    noted: list[int] = []
    handlers: dict[int, Callable[[int, FrameType | None], object]] = {}

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)

    def deliver() -> None:
        while noted:
            number = noted.pop(0)
            handlers[number](number, None)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in (int(signal.SIGINT), int(signal.SIGTERM)):
                if callable(handler := signal.getsignal(number)):
                    handlers[number] = handler
                    signal.signal(number, note)
        yield deliver
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is note:  # a handler that has run may have replaced itself
                signal.signal(number, handler)
        deliver()
