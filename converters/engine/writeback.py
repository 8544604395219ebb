"""Tell the kernel to begin writing a range to the disk now, so that the fsync at the end has less to wait for."""

import ctypes
from functools import cache

_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin, and do not wait


def begin_writeback(descriptor: int, offset: int, length: int) -> None:
    """A hint: where the system or the file system has no such call, the fsync does all the work, as it always would."""
    if call := _sync_file_range():
        call(descriptor, offset, length, _WRITE)


@cache
def _sync_file_range():
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):  # not Linux
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call
