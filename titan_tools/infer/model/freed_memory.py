"""Memory that a process frees stays its own, on a CPU: the next pass finds it there in place of fresh pages.

glibc gives blocks of more than 32 MiB back to the system at once. A pass over a prompt takes a gigabyte in such blocks
for its activations, and every page of them is made and zeroed anew: of a 1.2B model's 1,019 tokens that was a quarter
of the time to the first token (4.5 s; 3.3 s without, in bfloat16 on two cores).
"""

import ctypes

_M_MXFAST, _M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = 1, -1, -2, -4  # of mallopt(3), the same since glibc 2.0
_KEPT_BYTES = (1 << 31) - 1  # the most that mallopt takes
_GROWTH_BYTES = 64 << 20
_REST_SIZES, _KEPT_OF_A_SIZE = range(8, 128, 16), 7  # bytes; glibc's for each thread


def keep_freed_memory() -> bool:
    """From here on freed blocks wait for their next use, whatever their size. False where malloc is not glibc's.

    Not before weights are read: what only loading needs is to go back.
    """
    try:
        libc = ctypes.CDLL(None)
        mallopt, malloc, free = libc.mallopt, libc.malloc, libc.free
    except (AttributeError, OSError, TypeError):  # musl and macOS have none; Windows has no CDLL(None)
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _KEPT_BYTES), (_M_TOP_PAD, _GROWTH_BYTES), (_M_MXFAST, 0))
    is_kept = all(mallopt(name, value) for name, value in settings)
    # Aligning a block leaves a rest of some bytes behind it, which glibc would keep apart as long as it keeps fewer
    # than 7 of its size. The block, once freed, would then join nothing and be too small for its like: 7 more come
    malloc.restype, free.argtypes, free.restype = ctypes.c_void_p, [ctypes.c_void_p], None
    for rest in [malloc(ctypes.c_size_t(size)) for size in _REST_SIZES for _ in range(_KEPT_OF_A_SIZE)]:
        free(rest)
    return is_kept
