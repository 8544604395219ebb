"""Signals and process lifetime: stop requests (SIGTERM, SIGUSR1), and ending with the parent process."""

import ctypes
import os
import signal
import sys
from typing import Any


class StopRequest:
    """A flag that the first SIGTERM (preemption) or SIGUSR1 (Slurm's early warning) sets; a second signal of the same
    kind ends the process.
    """

    def __init__(self) -> None:
        self.requested = False

    def listen(self) -> None:
        """Install the signal handlers. Only the main thread may call this."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        self.requested = True
        signal.signal(number, signal.SIG_DFL)


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the thread of `parent` that started this process ends (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        # The parent died before the call. Compare with its id, not with 1: the agent may be a container's first
        # process, and a service's orphans go to a subreaper.
        if os.getppid() != parent:
            os._exit(3)
