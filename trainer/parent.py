"""A process that must not outlive the one that started it."""

import ctypes
import os
import signal
import sys


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when `parent`, the process that started this one, dies: no orphan writes on (Linux).

    More exactly when the thread dies that started it.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        # It died before we asked. Compared with its own id: 1 is the agent itself where it is a container's first
        # process, and a subreaper, not 1, takes the orphans of a service.
        if os.getppid() != parent:
            os._exit(3)
