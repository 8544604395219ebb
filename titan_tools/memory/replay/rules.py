"""Sizes and calls of torch's CUDA allocator that its two kinds share.

Names in parentheses are those of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h, torch 2.11 to 2.13
with default settings.
"""

from typing import NamedTuple

MIN_BLOCK = 512  # kMinBlockSize: sizes are rounded up to it
SMALL = 1 << 20  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT = 2 << 20  # kSmallBuffer
LARGE_SEGMENT = 20 << 20  # large_segment_size, as it is by default
MIN_LARGE = 10 << 20  # kMinLargeAlloc: requests below it share a large segment
ROUND_LARGE = 2 << 20  # kRoundLarge

# No outcome depends on where segments lie, but on their order: the driver's is taken to be that of the requests.
FIRST_ADDRESS = LARGE_SEGMENT << 16
GAP = LARGE_SEGMENT


class OutOfMemory(Exception):
    """A request that does not fit into the capacity, not even after all that is cached has been given back."""


TAKING = ("segment_alloc", "segment_map")  # actions of driver calls; the others give back


class DriverCall(NamedTuple):
    """Memory taken from the driver, or given back to it."""

    action: str  # as torch's snapshots name it: segment_alloc, segment_free, segment_map, segment_unmap
    address: int
    num_bytes: int
    stream: str
    is_small: bool  # which pool of the stream


def granule(is_small: bool) -> int:
    """What an expandable segment is mapped in multiples of."""
    return SMALL_SEGMENT if is_small else LARGE_SEGMENT


def segment_size(size: int) -> int:
    """What is asked of cudaMalloc for a request of that rounded size (get_allocation_size)."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < MIN_LARGE:
        return LARGE_SEGMENT
    return (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE
