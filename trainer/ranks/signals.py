"""Signals and process lifetime: stop requests (SIGTERM, SIGUSR1, Ctrl-C), and ending with the parent process."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_SAME_KEY_SECS = 1.0  # torchrun sends its ranks what the terminal may have sent them, too


class StopRequest:
    """A flag that the first SIGTERM (preemption), SIGUSR1 (Slurm's early warning) or Ctrl-C sets.

    A second signal of the same kind ends the process. So does the first Ctrl-C before a step is done: nothing is lost.
    """

    def __init__(self, *, tell_launcher: Callable[[], None] | None = None):
        """`tell_launcher` tells the process that has started the ranks, and answers Ctrl-C, that a step is done."""
        self.requested = False
        self.by_user = False  # by Ctrl-C
        self._tell_launcher = tell_launcher
        self._is_listening = False
        self._answer = ""
        self._secs = 0.0  # when Ctrl-C came

    def listen(self) -> None:
        """Install the signal handlers. Only the main thread may call this."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)
        self._is_listening = True

    def take_interrupts(self, *, saves: bool) -> None:
        """Take Ctrl-C as a request from now on. `saves`: whether the run saves its state when it stops."""
        self._answer = interrupt_answer(saves=saves)
        if self._is_listening:
            signal.signal(signal.SIGINT, self._on_interrupt)

    def report_step(self) -> None:
        """Tell the launcher that a step is done; once all ranks take interrupts."""
        if self._tell_launcher:
            self._tell_launcher()

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.by_user and number == signal.SIGTERM:  # torchrun's answer to a second Ctrl-C
            os._exit(130)
        self.requested = True
        signal.signal(number, signal.SIG_DFL)

    def _on_interrupt(self, number: int, frame: Any) -> None:
        if not self.by_user:
            self.requested = self.by_user = True
            self._secs = time.monotonic()
            if not self._tell_launcher and os.environ.get("RANK", "0") == "0":
                write_at_once(self._answer)
        elif time.monotonic() - self._secs > _SAME_KEY_SECS:
            os._exit(130)


def interrupt_answer(*, saves: bool) -> str:
    """The answer to the first Ctrl-C in training."""
    then = "saves and ends after this step" if saves else "ends after this step and saves nothing"
    return f"interrupted: training {then}; a second Ctrl-C ends it at once"


def write_at_once(text: str, end: str = "\n") -> None:
    """Write a line to standard error; a signal handler may do it, whatever it has interrupted."""
    with suppress(OSError):  # closed
        os.write(2, f"{text}{end}".encode())


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the thread of `parent` that started this process ends (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        # The parent died before the call. Compare with its id, not with 1: the agent may be a container's first
        # process, and a service's orphans go to a subreaper.
        if os.getppid() != parent:
            os._exit(3)
