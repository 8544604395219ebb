"""The free blocks of one stream and size class, as CUDACachingAllocator's BlockPool keeps them: sorted and merged.

Names in parentheses are those of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h, torch 2.11 to 2.13
with default settings.
"""

from bisect import bisect_left, insort
from typing import NamedTuple

MIN_BLOCK = 512  # kMinBlockSize: sizes are rounded up to it
SMALL = 1 << 20  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT = 2 << 20  # kSmallBuffer
LARGE_SEGMENT = 20 << 20  # large_segment_size, as it is by default
MIN_LARGE = 10 << 20  # kMinLargeAlloc: requests below it share a large segment
ROUND_LARGE = 2 << 20  # kRoundLarge

# Results depend on the order of segments' addresses, not on their values: segments are placed in order of requests.
FIRST_ADDRESS = LARGE_SEGMENT << 16
GAP = LARGE_SEGMENT


class CapacityExceeded(Exception):
    """A request does not fit into the capacity, even after all cached memory was returned."""


TAKING = ("segment_alloc", "segment_map")  # driver calls that take memory; the others return it


class DriverCall(NamedTuple):
    """Memory taken from the driver, or returned to it."""

    action: str  # as torch's snapshots name it: segment_alloc, segment_free, segment_map, segment_unmap
    address: int
    num_bytes: int
    stream: str
    is_small: bool  # which pool of the stream


def granule(is_small: bool) -> int:
    """The unit in which an expandable segment is mapped."""
    return SMALL_SEGMENT if is_small else LARGE_SEGMENT


def segment_size(size: int) -> int:
    """What cudaMalloc is called with for a request of that rounded size (get_allocation_size)."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < MIN_LARGE:
        return LARGE_SEGMENT
    return (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


# The sort key of a free block, (size, address), is one integer: much faster to compare than a tuple.
_ADDRESS_BITS = 52
_ADDRESS = (1 << _ADDRESS_BITS) - 1


class Pool:
    """Free blocks by size, then address (BlockComparatorSize), and by both of their ends.

    Segments must not be adjacent: adjacent blocks are merged. A replay spends all of its time here.
    """

    __slots__ = ("stream", "is_small", "order", "size_at", "start_at")

    def __init__(self, stream: str, *, is_small: bool):
        self.stream, self.is_small = stream, is_small
        self.order: list[int] = []  # keys, sorted; a position is an index of it
        self.size_at: dict[int, int] = {}  # start → size
        self.start_at: dict[int, int] = {}  # end → start

    def find(self, size: int) -> int:
        """Position of the smallest block of at least `size`, the lowest of those; len(order) if there is none."""
        return bisect_left(self.order, size << _ADDRESS_BITS)

    def at(self, position: int) -> tuple[int, int]:
        """Start and size of the block at a position."""
        key = self.order[position]
        return key & _ADDRESS, key >> _ADDRESS_BITS

    def position_of(self, start: int) -> int:
        """Position of the block that starts there."""
        return bisect_left(self.order, self.size_at[start] << _ADDRESS_BITS | start)

    def take(self, position: int, size: int, *, least_rest: int) -> tuple[int, int]:
        """Take `size` from the beginning of a block, and all of it where less than `least_rest` would be left.

        Returns start and size of what was taken.
        """
        key = self.order.pop(position)
        start, found = key & _ADDRESS, key >> _ADDRESS_BITS
        del self.size_at[start]
        rest = found - size
        if rest < least_rest:
            del self.start_at[start + found]
            return start, found
        cut = start + size
        self.size_at[cut] = rest
        self.start_at[cut + rest] = cut
        insort(self.order, rest << _ADDRESS_BITS | cut)
        return start, size

    def take_at(self, start: int) -> int:
        """Take the whole block that starts there; returns its size."""
        del self.order[self.position_of(start)]
        size = self.size_at.pop(start)
        del self.start_at[start + size]
        return size

    def put(self, start: int, size: int) -> None:
        """Add a block, merged with free neighbours (try_merge_blocks)."""
        size_at, start_at, order = self.size_at, self.start_at, self.order
        end = start + size
        before = start_at.pop(start, None)
        if before is not None:
            del order[bisect_left(order, size_at.pop(before) << _ADDRESS_BITS | before)]
            start = before
        after = size_at.pop(end, None)
        if after is not None:
            del order[bisect_left(order, after << _ADDRESS_BITS | end)]
            end += after
        size_at[start] = end - start
        start_at[end] = start
        insort(order, (end - start) << _ADDRESS_BITS | start)
