"""Locks on open files, kept by the kernel until the file is closed or its process ends."""

import errno
import fcntl
import os
from pathlib import Path

_BUSY = (errno.EWOULDBLOCK, errno.EACCES)


def lock_file(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file. False if the file system has no locks (some Lustre mounts).

    Raises BlockingIOError if another process holds the lock, unless `wait` is set.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in _BUSY:
            raise BlockingIOError(error.errno, error.strerror) from error
        return False
    return True


def is_open_file(descriptor: int, path: Path) -> bool:
    """Whether `path` still names the open file: it may have been removed or replaced before it was locked."""
    opened = os.fstat(descriptor)
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino)
