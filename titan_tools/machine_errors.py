"""What the machine refuses where nobody expected it, a full disk, a closed pipe: told by one process as by many."""

import errno
import select

from converters.errors import TitanError

PIPE_CLOSED = 141  # what a shell reports for a program that SIGPIPE ended; 1 would read as a failed check
_ABOUT_THE_MACHINE = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENAMETOOLONG, errno.ELOOP,
    errno.EMFILE, errno.ENFILE, errno.ESTALE,
}  # fmt: skip


def as_machine_error(error: OSError) -> TitanError | None:
    """What to tell of a place that cannot be read or written; None where the error is a fault of ours."""
    if error.errno not in _ABOUT_THE_MACHINE:
        return None
    return TitanError(f"{error.filename or 'standard output'}: {error.strerror}")


def reader_is_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more: `titan … | head`."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
