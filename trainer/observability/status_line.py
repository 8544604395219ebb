"""A line on the terminal that is replaced: the progress of training between two logged steps."""

import os
import sys
import time
from collections.abc import Callable

_ERASE = "\r\033[2K"
_REDRAW_SECS = 0.1
_BAR_WIDTH = 30
_shown = False


def is_possible() -> bool:
    """Whether standard error is a terminal that can replace a line."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "")


def erase() -> None:
    """Remove the line, if there is one, before something else is printed."""
    global _shown
    if _shown:
        print(_ERASE, end="", file=sys.stderr, flush=True)
        _shown = False


def show(text: str) -> None:
    """Show the line, in place of the last one."""
    global _shown
    _shown = True
    # The cursor returns to the beginning, so that what another process prints replaces the line
    columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80  # 0 if it is not known
    print(f"{_ERASE}{text[: columns - 1]}\r", end="", file=sys.stderr, flush=True)


class StepProgress:
    """Shows the steps that are done, and how long the rest takes at the pace since the first one."""

    def __init__(self, num_steps: int, *, clock: Callable[[], float] = time.monotonic):
        self._num_steps, self._clock = num_steps, clock
        self._first: tuple[int, float] | None = None  # the first step of this process compiles
        self._drawn_at = 0.0

    def update(self, step: int) -> None:
        now = self._clock()
        if self._first is None:
            self._first = step, now
        if now - self._drawn_at < _REDRAW_SECS:
            return
        self._drawn_at = now
        first, since = self._first
        left = f"  ETA {clock_text((now - since) / (step - first) * (self._num_steps - step))}" if step > first else ""
        filled = _BAR_WIDTH * step // self._num_steps
        bar = "=" * filled + " " * (_BAR_WIDTH - filled)
        show(f"step {step:>6}  [{bar}] {step / self._num_steps:.0%} of {self._num_steps:,} steps{left}")


def clock_text(secs: float) -> str:
    """`1:02:03` of seconds."""
    minutes, seconds = divmod(round(secs), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
