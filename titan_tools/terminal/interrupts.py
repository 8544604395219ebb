"""Ctrl-C and SIGTERM if Python or torch would swallow them: during imports, and in `__del__` and callbacks."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, ClassVar

from converters.common.errors import TitanError
from titan_tools.launch.launched import started_by_titan
from titan_tools.terminal.console import prints_json

_RETRY_DELAY_SECS = 0.01  # long enough for most `__del__` methods and callbacks; if it is not, the signal is sent again


class Terminated(BaseException):
    """SIGTERM as an exception, so that unfinished output is removed. Typer has its own use of SystemExit."""

    error: ClassVar[TitanError | None] = None  # what it means to the command that runs


def terminate(number: int, frame: FrameType | None) -> None:
    """The handler that raises Terminated."""
    signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    raise Terminated


Handler = Callable[[int, FrameType | None], Any]


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """While modules are imported, make Ctrl-C end the process at once: there is nothing to clean up yet.

    Parts of torch abort with a core dump on a KeyboardInterrupt during their import, or swallow it.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, partial(_exit, started_by_titan()))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _exit(has_parent: bool, number: int, frame: FrameType | None) -> None:
    if not has_parent:  # else the parent prints the message
        with suppress(OSError):  # stderr or stdout is closed; `print` may be what was interrupted
            os.write(2, b"error: interrupted\n")
            if prints_json():
                error = {"kind": "interrupted", "message": "interrupted", "hint": "", "exit_code": 130}
                os.write(1, json.dumps({"error": error}).encode() + b"\n")
    os._exit(130)


def resend_swallowed_signals(raised_by: Mapping[type[BaseException], tuple[int, Handler | None]]) -> None:
    """Send a signal again when Python ignored the exception that its handler raised.

    Python runs signal handlers between any two steps of the main thread: also in `__del__`, in weak reference callbacks
    and in garbage collection callbacks, where it prints an exception and continues.

    `raised_by`: exception type → (signal number, handler to install again before the signal is sent, or None).
    """
    print_ignored, pending = sys.unraisablehook, set[int]()

    def send(thread: int, number: int) -> None:
        pending.discard(number)
        signal.pthread_kill(thread, number)

    def on_ignored(ignored: Any) -> None:
        if ignored.exc_type not in raised_by or threading.current_thread() is not threading.main_thread():
            print_ignored(ignored)
            return
        number, handler = raised_by[ignored.exc_type]
        if handler is not None:
            signal.signal(number, handler)
        if number not in pending:  # a second signal right after the first could interrupt the cleanup
            pending.add(number)
            timer = threading.Timer(_RETRY_DELAY_SECS, send, [threading.get_ident(), number])
            timer.daemon = True
            timer.start()

    sys.unraisablehook = on_ignored
