"""Work in threads: results in order, few at a time, and safe from Ctrl-C and SIGTERM."""

import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_parallel(run: Callable[[T], R], items: Iterable[T], workers: int) -> Generator[R, None, None]:
    """The results of `run` for all items, in order. At most 2 × workers + 1 exist at a time, which bounds memory.

    Close it if it may not be exhausted: that waits for the threads. Use it within `deferred_signals`.
    """
    if workers <= 1:
        yield from map(run, items)
        return
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(run, item))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


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
