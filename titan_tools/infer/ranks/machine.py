"""Whether ranks are on one machine, where they see the same files, and when a process there ends."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path


def own_machine() -> tuple[str, str, str]:
    """What identifies this machine: not its name alone; a container, with its own files and process ids, is one too."""
    started, processes = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    is_linux = started.is_file() and processes.is_symlink()
    return socket.gethostname(), *((started.read_text(), os.readlink(processes)) if is_linux else ("", ""))


def watch_ends(processes: Mapping[int, int]) -> dict[int, int] | None:
    """Of process id → rank: a descriptor → rank for each, which can be read from once the process has ended.

    None where the kernel has none for one of them.
    """
    watched: dict[int, int] = {}
    try:
        for pid, rank in processes.items():
            watched[os.pidfd_open(pid)] = rank
    except (AttributeError, OSError):
        for descriptor in watched:
            os.close(descriptor)
        return None
    return watched
