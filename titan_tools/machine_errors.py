"""What the machine refuses: a full disk, a closed pipe, memory. Told by one process as by many."""

import errno
import re
import select

from converters.errors import TitanError
from converters.sizes import GIB

PIPE_CLOSED = 141  # what a shell reports for a program that SIGPIPE ended; 1 would read as a failed check
_ABOUT_THE_MACHINE = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENAMETOOLONG,
    errno.ELOOP, errno.EMFILE, errno.ENFILE, errno.ESTALE,
}  # fmt: skip
# What torch, CUDA, cuBLAS and NCCL say when memory runs out, where they have no class of error for it
_ABOUT_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def as_machine_error(error: OSError) -> TitanError | None:
    """What to tell of a place that cannot be read or written; None where the error is a fault of ours."""
    if told := as_memory_error(error):
        return told
    if error.errno not in _ABOUT_THE_MACHINE:
        return None
    return TitanError(f"{error.filename or 'standard output'}: {error.strerror}")


def as_memory_error(error: BaseException) -> TitanError | None:
    """What to tell where Python, torch, CUDA or the system had no more memory; None for any other error."""
    if not _is_about_memory(error):
        return None
    hint = "a limit of this machine, container or shell"
    if asked := re.search(r"tried to allocate (\d+) bytes", str(error)):  # torch's, on a CPU
        hint = f"{int(asked[1]) / GIB:.2f} GiB more were refused: {hint}"
    elif isinstance(error, RuntimeError) and str(error):  # CUDA's says which GPU, and what it has
        hint = f"{str(error).splitlines()[0]:.250}"
    return TitanError("out of memory", hint=hint)


def _is_about_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM  # of a mapping, which has no name
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, without importing it
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _ABOUT_MEMORY)


def reader_is_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more: `titan … | head`."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
