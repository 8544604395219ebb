"""Turn errors of the machine (full disk, closed pipe, out of memory) into TitanErrors."""

import errno
import re
import select

from converters.common.errors import TitanError
from converters.common.sizes import GIB

PIPE_CLOSED = 141  # what a shell reports for a program that SIGPIPE ended; 1 would mean a failed check
_ABOUT_THE_MACHINE = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENAMETOOLONG,
    errno.ELOOP, errno.EMFILE, errno.ENFILE, errno.ESTALE,
}  # fmt: skip
# Messages of torch, CUDA, cuBLAS and NCCL for out of memory that come as a plain RuntimeError
_ABOUT_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def as_machine_error(error: OSError) -> TitanError | None:
    """The error to show for a path that cannot be read or written; None for a bug of titan."""
    if known := as_memory_error(error):
        return known
    if error.errno not in _ABOUT_THE_MACHINE:
        return None
    return TitanError(f"{error.filename or 'standard output'}: {error.strerror}")


def as_memory_error(error: BaseException) -> TitanError | None:
    """The error to show when Python, torch, CUDA or the system is out of memory; None for other errors."""
    if not _is_about_memory(error):
        return None
    hint = "a limit of this machine, container or shell"
    if requested := re.search(r"tried to allocate (\d+) bytes", str(error)):  # torch on a CPU
        hint = f"an allocation of {int(requested[1]) / GIB:.2f} GiB was refused: {hint}"
    elif isinstance(error, RuntimeError) and str(error):  # CUDA's message names the GPU and its memory
        hint = f"{str(error).splitlines()[0]:.250}"
    return TitanError("out of memory", hint=hint)


def _is_about_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM  # from mmap, which has no class of its own
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _ABOUT_MEMORY)


def reader_is_gone() -> bool:
    """Whether standard output is a pipe whose reader has closed it: `titan … | head`."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
