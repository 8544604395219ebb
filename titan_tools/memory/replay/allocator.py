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

AllocatorName = Literal["classic", "expandable"]


class Memory(Protocol):
    """The memory that a stream holds for blocks of one size class."""

    pool: Pool  # its free blocks
    least_rest: int  # a block is taken whole where less would remain of it

    def best_fit(self, size: int) -> int:
        """Position of the free block to use; len(pool.order) if there is none."""
        ...

    def grow(self, size: int) -> int | None:
        """Take memory from the driver for a free block of `size` or more: its position; None if there is too little."""
        ...

    def release_cached(self) -> None:
        """Return to the driver what is not used."""
        ...


class Allocator:
    """Bytes are those of torch.cuda.memory_allocated and of memory_reserved."""

    def __init__(self, name: AllocatorName, capacity_bytes: int | None):
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.driver_calls: list[DriverCall] = []
        self._make_memory = _Segments if name == "classic" else _Ranges
        self._memories: dict[str, tuple[Memory, Memory]] = {}  # by stream, for large and for small blocks
        self._live: dict[int, tuple[int, Pool]] = {}
        self._next_address = FIRST_ADDRESS

    def allocate(self, num_bytes: int, stream: str) -> int:
        """The address of a new block, whose size is rounded up to 512 bytes (round_size); 0 for no bytes.

        Raises CapacityExceeded.
        """
        if not num_bytes:
            return 0
        size = (num_bytes + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK
        if (both := self._memories.get(stream)) is None:
            large, small = (self._make_memory(self, Pool(stream, is_small=is_small)) for is_small in (False, True))
            both = self._memories[stream] = large, small
        memory = both[size <= SMALL]
        pool = memory.pool
        position = memory.best_fit(size)
        if position == len(pool.order):
            position = self._grow(memory, size)
        address, size = pool.take(position, size, least_rest=memory.least_rest)
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
        return [memory.pool for both in self._memories.values() for memory in both]

    def fits(self, num_bytes: int) -> bool:
        """Whether the driver has that much left."""
        return self.capacity_bytes is None or self.reserved_bytes + num_bytes <= self.capacity_bytes

    def reserve_addresses(self, num_bytes: int) -> int:
        """The start of addresses that are not adjacent to any other."""
        start = self._next_address
        self._next_address += num_bytes + GAP
        return start

    def record(self, action: str, pool: Pool, address: int, num_bytes: int) -> None:
        """Record that the driver gave memory, or took it back where `num_bytes` is negative."""
        self.reserved_bytes += num_bytes
        self.driver_calls.append(DriverCall(action, address, abs(num_bytes), pool.stream, pool.is_small))

    def _grow(self, memory: Memory, size: int) -> int:
        position = memory.grow(size)
        if position is None:
            for both in self._memories.values():
                for each in both:
                    each.release_cached()
            position = memory.grow(size)
        if position is None:
            raise CapacityExceeded(f"{size} bytes")
        return position


def make_allocator(name: AllocatorName, *, capacity_bytes: int | None = None) -> Allocator:
    """A new allocator. `capacity_bytes`: what the driver can give it, None for any amount."""
    return Allocator(name, capacity_bytes)


class _Segments:
    """`expandable_segments:False`: segments of cudaMalloc.

    A block that is too large is split only if enough remains (should_split), so it may hold, and count as allocated, up
    to 1 MiB more than requested.
    """

    def __init__(self, allocator: Allocator, pool: Pool):
        self.allocator, self.pool = allocator, pool
        self.least_rest = MIN_BLOCK if pool.is_small else SMALL + 1
        self.best_fit = pool.find
        self._sizes: dict[int, int] = {}  # of segments, by start

    def grow(self, size: int) -> int | None:
        """Allocate a segment."""
        segment = segment_size(size)
        if not self.allocator.fits(segment):
            return None
        address = self.allocator.reserve_addresses(segment)
        self._sizes[address] = segment
        self.allocator.record("segment_alloc", self.pool, address, segment)
        self.pool.put(address, segment)
        return self.pool.find(segment)

    def release_cached(self) -> None:
        """Return segments that are one free block (release_cached_blocks)."""
        for start, size in list(self.pool.size_at.items()):
            if self._sizes.get(start) == size:
                self.pool.take_at(start)
                del self._sizes[start]
                self.allocator.record("segment_free", self.pool, start, -size)


# The address space of one expandable segment: 1 1/8 of the GPU's memory in torch, plenty where that is not known
_PLENTY = LARGE_SEGMENT << 18


class _Ranges:
    """`expandable_segments:True`: Note [Expandable Segments] of CUDACachingAllocator.cpp.

    One address range per stream and pool; physical memory is mapped at its end, in granules of 20 MiB (large) or 2 MiB
    (small): mapped free memory is in `pool`, unmapped addresses in `unmapped`. Every block is split down to its
    request. Nothing returns to the driver unless the capacity is reached.
    """

    least_rest = MIN_BLOCK

    def __init__(self, allocator: Allocator, pool: Pool):
        self.allocator, self.pool = allocator, pool
        self.granule = granule(pool.is_small)
        self.unmapped: dict[int, int] = {}  # start → size
        self._starts: list[int] = []  # of `unmapped`, sorted
        self._spaces: dict[int, int] = {}  # start → size of whole ranges

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

    def grow(self, size: int) -> int | None:
        """Map what is missing of a free block (try_allocate_expandable_block)."""
        pool, allocator = self.pool, self.allocator
        if allocator.capacity_bytes is not None and size > allocator.capacity_bytes:
            return None  # no range has that many addresses
        start = self._find_space(size)
        if start is None:
            start = self._new_range()
        while (missing := size - pool.size_at.get(start, 0)) > 0:
            end = start + size - missing
            num_bytes = self._granules(min(missing, self.unmapped[end]))
            if not allocator.fits(num_bytes):
                return None
            self._map(end, num_bytes)
            allocator.record("segment_map", pool, end, num_bytes)
        return pool.position_of(start)

    def release_cached(self) -> None:
        """Unmap every granule that is free from end to end (release_cached_blocks, unmap_block)."""
        for start in list(self.pool.size_at):
            end = start + self.pool.size_at[start]
            first, last = self._granules(start), end // self.granule * self.granule
            if first >= last:
                continue
            self.pool.take_at(start)
            if start < first:
                self.pool.put(start, first - start)
            if last < end:
                self.pool.put(last, end - last)
            self._merge_unmapped(first, last - first)
            self.allocator.record("segment_unmap", self.pool, first, first - last)

    def _granules(self, num_bytes: int) -> int:
        """Bytes, rounded up to whole granules."""
        return -(-num_bytes // self.granule) * self.granule

    def _find_space(self, size: int) -> int | None:
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

    def _new_range(self) -> int:
        capacity = self.allocator.capacity_bytes
        space = _PLENTY if capacity is None else capacity // 8 * 9
        space = -(-space // LARGE_SEGMENT) * LARGE_SEGMENT
        start = self.allocator.reserve_addresses(space)
        self._spaces[start] = space
        self._add_unmapped(start, space)
        return start

    def _map(self, start: int, num_bytes: int) -> None:
        """Map granules at the beginning of unmapped space (map_block)."""
        space = self._take_unmapped(start)
        if space > num_bytes:
            self._add_unmapped(start + num_bytes, space - num_bytes)
        self.pool.put(start, num_bytes)

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
