"""A model of torch's CUDACachingAllocator: addresses of blocks, and the memory taken from the driver.

Tests compare both kinds with that allocator's own compiled code, event by event (tests/recorded_allocator).
"""

from bisect import insort
from typing import Literal, Protocol

from titan_tools.memory.replay.pool import (
    FIRST_ADDRESS,
    GAP,
    LARGE_SEGMENT,
    MIN_BLOCK,
    SMALL,
    CapacityExceeded,
    DriverCall,
    Pool,
    granule,
    segment_size,
)


class Classic:
    """`expandable_segments:False`, with segments of cudaMalloc: see Allocator.

    Sizes are rounded up to 512 bytes (round_size). A block that is too large is split only if enough remains
    (should_split), so it may hold, and count as allocated, up to 1 MiB more than requested.
    """

    def __init__(self, capacity_bytes: int | None = None):
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.driver_calls: list[DriverCall] = []
        self._pools: dict[str, tuple[Pool, Pool]] = {}
        self._live: dict[int, tuple[int, Pool]] = {}
        self._segments: dict[int, int] = {}  # start → size
        self._next_address = FIRST_ADDRESS

    def allocate(self, num_bytes: int, stream: str) -> int:
        """See Allocator."""
        if not num_bytes:
            return 0
        size = (num_bytes + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK
        if (pools := self._pools.get(stream)) is None:
            pools = self._pools[stream] = Pool(stream, is_small=False), Pool(stream, is_small=True)
        pool = pools[size <= SMALL]
        position = pool.find(size)
        if position == len(pool.order):
            position = self._new_segment(pool, size)
        address, size = pool.take(position, size, least_rest=MIN_BLOCK if pool.is_small else SMALL + 1)
        self._live[address] = size, pool
        self.allocated_bytes += size
        return address

    def free(self, address: int) -> None:
        """Return a block to its pool."""
        if address:
            size, pool = self._live.pop(address)
            self.allocated_bytes -= size
            pool.put(address, size)

    def pools(self) -> list[Pool]:
        return [pool for both in self._pools.values() for pool in both]

    def _new_segment(self, pool: Pool, size: int) -> int:
        """Allocate a segment from the driver; returns the position of its free block."""
        segment = segment_size(size)
        if not self._fits(segment):
            self._release_cached()
            if not self._fits(segment):
                raise CapacityExceeded(f"{size} bytes")
        address = self._next_address
        self._next_address += segment + GAP
        self._segments[address] = segment
        self.reserved_bytes += segment
        self.driver_calls.append(DriverCall("segment_alloc", address, segment, pool.stream, pool.is_small))
        pool.put(address, segment)
        return pool.find(segment)

    def _fits(self, num_bytes: int) -> bool:
        return self.capacity_bytes is None or self.reserved_bytes + num_bytes <= self.capacity_bytes

    def _release_cached(self) -> None:
        """Return segments that are one free block to the driver (release_cached_blocks)."""
        for pool in self.pools():
            for start, size in list(pool.size_at.items()):
                if self._segments.get(start) == size:
                    pool.take_at(start)
                    del self._segments[start]
                    self.reserved_bytes -= size
                    self.driver_calls.append(DriverCall("segment_free", start, size, pool.stream, pool.is_small))


# The address space of one expandable segment: 1 1/8 of the GPU's memory in torch, plenty where that is not known
_PLENTY = LARGE_SEGMENT << 18


class Expandable:
    """`expandable_segments:True`: see Allocator, and Note [Expandable Segments] of CUDACachingAllocator.cpp.

    One address range per stream and pool; physical memory is mapped at its end, in granules of 20 MiB (large) or 2 MiB
    (small). Every block is split down to its request. Nothing returns to the driver unless the capacity is reached.
    """

    def __init__(self, capacity_bytes: int | None = None):
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.driver_calls: list[DriverCall] = []
        self._ranges: dict[str, tuple[_Ranges, _Ranges]] = {}
        self._live: dict[int, tuple[int, _Ranges]] = {}
        self._next_address = FIRST_ADDRESS

    def allocate(self, num_bytes: int, stream: str) -> int:
        """See Allocator."""
        if not num_bytes:
            return 0
        size = (num_bytes + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK
        if (both := self._ranges.get(stream)) is None:
            both = self._ranges[stream] = _Ranges(stream, is_small=False), _Ranges(stream, is_small=True)
        ranges = both[size <= SMALL]
        pool = ranges.pool
        position = ranges.best_fit(size)
        if position == len(pool.order):
            position = self._grow(ranges, size)
        address, size = pool.take(position, size, least_rest=MIN_BLOCK)
        self._live[address] = size, ranges
        self.allocated_bytes += size
        return address

    def free(self, address: int) -> None:
        """Return a block to its pool."""
        if address:
            size, ranges = self._live.pop(address)
            self.allocated_bytes -= size
            ranges.pool.put(address, size)

    def pools(self) -> list[Pool]:
        return [ranges.pool for both in self._ranges.values() for ranges in both]

    def _grow(self, ranges: "_Ranges", size: int) -> int:
        """Map memory for a free block of at least `size`: its position (try_allocate_expandable_block)."""
        start = self._mapped(ranges, size)
        if start is None:
            self._release_cached()
            start = self._mapped(ranges, size)
        if start is None:
            raise CapacityExceeded(f"{size} bytes")
        return ranges.pool.position_of(start)

    def _mapped(self, ranges: "_Ranges", size: int) -> int | None:
        """Start of a free block of at least `size`, after mapping what was missing; None if memory ran out."""
        if self.capacity_bytes is not None and size > self.capacity_bytes:
            return None  # no range has that many addresses
        start = ranges.find_space(size)
        if start is None:
            start = self._new_range(ranges)
        pool = ranges.pool
        while (missing := size - pool.size_at.get(start, 0)) > 0:
            end = start + size - missing
            num_bytes = ranges.granules(min(missing, ranges.unmapped[end]))
            if self.capacity_bytes is not None and self.reserved_bytes + num_bytes > self.capacity_bytes:
                return None
            ranges.map(end, num_bytes)
            self._record("segment_map", ranges, end, num_bytes)
        return start

    def _new_range(self, ranges: "_Ranges") -> int:
        space = _PLENTY if self.capacity_bytes is None else self.capacity_bytes // 8 * 9
        space = -(-space // LARGE_SEGMENT) * LARGE_SEGMENT
        start = self._next_address
        self._next_address += space + GAP
        ranges.add(start, space)
        return start

    def _release_cached(self) -> None:
        """Unmap every granule that is free from end to end (release_cached_blocks, unmap_block)."""
        for both in self._ranges.values():
            for ranges in both:
                for start in list(ranges.pool.size_at):
                    for first, num_bytes in ranges.unmap(start):
                        self._record("segment_unmap", ranges, first, -num_bytes)

    def _record(self, action: str, ranges: "_Ranges", address: int, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        pool = ranges.pool
        self.driver_calls.append(DriverCall(action, address, abs(num_bytes), pool.stream, pool.is_small))


class _Ranges:
    """The address ranges of a stream's pool: mapped free memory in `pool`, unmapped addresses in `unmapped`."""

    def __init__(self, stream: str, *, is_small: bool):
        self.pool = Pool(stream, is_small=is_small)
        self.granule = granule(is_small)
        self.unmapped: dict[int, int] = {}  # start → size
        self._starts: list[int] = []  # of `unmapped`, sorted
        self._spaces: dict[int, int] = {}  # start → size of whole ranges

    def granules(self, num_bytes: int) -> int:
        """Bytes, rounded up to whole granules."""
        return -(-num_bytes // self.granule) * self.granule

    def best_fit(self, size: int) -> int:
        """Position of the block to use, len(pool.order) if there is none (get_free_block).

        A block followed by unmapped space counts as large as it could become, so that the range's end is used last.
        """
        pool, unmapped = self.pool, self.unmapped
        position, last = pool.find(size), len(pool.order) - 1
        while position < last:
            start, here = pool.at(position)
            space = unmapped.get(start + here)
            if space is None:
                break
            start, there = pool.at(position + 1)
            if there + unmapped.get(start + there, 0) >= here + space:
                break
            position += 1
        return position

    def find_space(self, size: int) -> int | None:
        """The lowest start of free or unmapped space of `size` that is in part unmapped (find_expandable_block)."""
        pool = self.pool
        for unmapped in self._starts:
            start = end = pool.start_at.get(unmapped, unmapped)
            while end - start < size:
                step = pool.size_at.get(end) or self.unmapped.get(end)
                if step is None:
                    break
                end += step
            if end - start >= size:
                return start
        return None

    def add(self, start: int, size: int) -> None:
        """Add a range that is not mapped."""
        self._spaces[start] = size
        self._add_unmapped(start, size)

    def map(self, start: int, num_bytes: int) -> None:
        """Map granules at the beginning of unmapped space (map_block)."""
        space = self._take_unmapped(start)
        if space > num_bytes:
            self._add_unmapped(start + num_bytes, space - num_bytes)
        self.pool.put(start, num_bytes)

    def unmap(self, start: int) -> list[tuple[int, int]]:
        """Unmap the whole granules in a free block: none, or one run, as [(start, size)]."""
        end = start + self.pool.size_at[start]
        first, last = self.granules(start), end // self.granule * self.granule
        if first >= last:
            return []
        self.pool.take_at(start)
        if start < first:
            self.pool.put(start, first - start)
        if last < end:
            self.pool.put(last, end - last)
        self._merge_unmapped(first, last - first)
        return [(first, last - first)]

    def _merge_unmapped(self, start: int, size: int) -> None:
        for before in self._starts:
            if before + self.unmapped[before] == start:
                size += self._take_unmapped(before)
                start = before
                break
        if start + size in self.unmapped:
            size += self._take_unmapped(start + size)
        if self._spaces.get(start) == size:  # the whole range: freed with its addresses
            del self._spaces[start]
        else:
            self._add_unmapped(start, size)

    def _add_unmapped(self, start: int, size: int) -> None:
        self.unmapped[start] = size
        insort(self._starts, start)

    def _take_unmapped(self, start: int) -> int:
        self._starts.remove(start)
        return self.unmapped.pop(start)


AllocatorName = Literal["classic", "expandable"]


class Allocator(Protocol):
    """Bytes are those of torch.cuda.memory_allocated and of memory_reserved."""

    allocated_bytes: int
    reserved_bytes: int
    driver_calls: list[DriverCall]

    def allocate(self, num_bytes: int, stream: str) -> int:
        """The address of a new block; 0 for no bytes. Raises OutOfMemory."""
        ...

    def free(self, address: int) -> None: ...

    def pools(self) -> list[Pool]: ...


def make_allocator(name: AllocatorName, *, capacity_bytes: int | None = None) -> Allocator:
    """A new allocator. `capacity_bytes`: what the driver can give it, None for any amount."""
    return Classic(capacity_bytes) if name == "classic" else Expandable(capacity_bytes)
