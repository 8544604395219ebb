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

    def __init__(self, *, tell_launcher: Callable[[str], None] | None = None):
        """`tell_launcher` tells the process that has started the ranks, and answers Ctrl-C, what ending now loses."""
        self.requested = False
        self.by_user = False  # by Ctrl-C
        self.takes_interrupts = False
        self._tell_launcher = tell_launcher
        self._is_listening = False
        self._answer = ""
        self._lost = ""
        self._secs = 0.0  # when Ctrl-C came

    def listen(self) -> None:
        """Install the signal handlers. Only the main thread may call this."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)
        self._is_listening = True

    def take_interrupts(self, *, saves: bool) -> None:
        """Take Ctrl-C as a request from now on. `saves`: whether the run saves its state when it stops."""
        self.takes_interrupts = True
        self._answer = interrupt_answer(saves=saves)
        if self._is_listening:
            signal.signal(signal.SIGINT, self._on_interrupt)

    def report_step(self, lost: str) -> None:
        """Keep, on rank 0, what ending at once would lose; the first time when all ranks take interrupts."""
        self._lost = lost
        if self._tell_launcher:
            self._tell_launcher(lost)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.by_user and number == signal.SIGTERM:  # torchrun's answer to a second Ctrl-C
            self._end_at_once()
        self.requested = True
        signal.signal(number, signal.SIG_DFL)

    def _on_interrupt(self, number: int, frame: Any) -> None:
        if not self.by_user:
            self.requested = self.by_user = True
            self._secs = time.monotonic()
            if not self._tell_launcher and os.environ.get("RANK", "0") == "0":
                write_at_once(self._answer)
        elif time.monotonic() - self._secs > _SAME_KEY_SECS:
            self._end_at_once()

    def _end_at_once(self) -> None:
        if self._lost and not self._tell_launcher:
            write_at_once(f"ended at once: {self._lost}")
        os._exit(130)


def interrupt_answer(*, saves: bool) -> str:
    """The answer to the first Ctrl-C in training."""
    then = "saves and ends after this step" if saves else "ends after this step and saves nothing"
    return f"interrupted: training {then}; a second Ctrl-C ends it at once"


def lost_steps(step: int, *, kept: int) -> str:
    """A text on the steps that ending after `step` loses. `kept`: the last that is saved, or the run began with."""
    if step <= kept:
        return f"step {step} is saved"
    return f"steps {kept + 1} to {step} are lost" if step > kept + 1 else f"step {step} is lost"


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
