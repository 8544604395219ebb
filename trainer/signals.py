"""Being asked to stop: SIGTERM (preemption) and SIGUSR1 (Slurm's early warning) become a flag that the loop reads."""

import signal
from typing import Any


class StopRequest:
    """`requested` turns true at the first signal; a second one of the same kind ends the process, as it always does."""

    def __init__(self) -> None:
        self.requested = False

    def listen(self) -> None:
        """Take over SIGTERM and SIGUSR1. Only the main thread may call this."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        self.requested = True
        signal.signal(number, signal.SIG_DFL)
