"""What Ctrl-C and SIGTERM raise comes again where Python could only ignore it, as while it collected garbage."""

import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

_AGAIN_AFTER_SECS = 0.01  # when what ignores exceptions is most likely done; if it is not, it is said once more


def raise_lost_ones_again(raised_by: Mapping[type[BaseException], tuple[int, Callable[..., Any] | None]]) -> None:
    """From here on, in the main thread: of an exception to the signal that raises it, and its handler if that must be
    set anew.

    A signal's handler runs between any two steps of the main thread, also in a __del__, in what a weak reference calls
    and in what listens to the garbage collector. Whatever is raised there is printed, and the program goes on.
    """
    tell, waiting = sys.unraisablehook, set()

    def send(thread: int, number: int) -> None:
        waiting.discard(number)
        signal.pthread_kill(thread, number)

    def hear(lost: Any) -> None:
        if lost.exc_type not in raised_by or threading.current_thread() is not threading.main_thread():
            tell(lost)
            return
        number, handler = raised_by[lost.exc_type]
        if handler is not None:
            signal.signal(number, handler)
        if number not in waiting:  # two might come so close that the second cuts short what the first makes
            waiting.add(number)
            again = threading.Timer(_AGAIN_AFTER_SECS, send, [threading.get_ident(), number])
            again.daemon = True
            again.start()

    sys.unraisablehook = hear
