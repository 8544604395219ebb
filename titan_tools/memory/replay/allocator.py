"""CUDACachingAllocator, modelled: what a GPU's memory is given out from, and how much of it is taken from the driver.

Names in capitals and in parentheses are those of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h,
torch 2.11 to 2.13 with default settings. Tests hold both allocators equal to that code, event by event.
"""

from typing import Literal, NamedTuple, Protocol

from titan_tools.memory.replay.pool import Pool

MIN_BLOCK = 512  # kMinBlockSize: sizes are rounded up to it
SMALL = 1 << 20  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT = 2 << 20  # kSmallBuffer
LARGE_SEGMENT = 20 << 20  # large_segment_size, as it is by default
MIN_LARGE = 10 << 20  # kMinLargeAlloc: requests below it share a large segment
ROUND_LARGE = 2 << 20  # kRoundLarge

# No outcome depends on where segments lie, but on their order: the driver's is taken to be that of the requests.
FIRST_ADDRESS = LARGE_SEGMENT << 16
GAP = LARGE_SEGMENT

AllocatorName = Literal["classic", "expandable"]


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


class Allocator(Protocol):
    """Gives out addresses. Bytes are those of torch.cuda.memory_allocated, and of memory_reserved.

    Active bytes are the allocated ones: nothing calls record_stream.
    """

    allocated_bytes: int
    reserved_bytes: int
    driver_calls: list[DriverCall]

    @property
    def active_bytes(self) -> int: ...

    def allocate(self, num_bytes: int, stream: str) -> int:
        """The address of a new block; 0 for no bytes. Raises OutOfMemory."""
        ...

    def free(self, address: int) -> None: ...

    def pools(self) -> list[Pool]: ...


def make_allocator(name: AllocatorName, *, capacity_bytes: int | None = None) -> Allocator:
    """An allocator without memory. `capacity_bytes`: what the driver has for it, None for any amount."""
    from titan_tools.memory.replay.expandable import Expandable

    return {"classic": Classic, "expandable": Expandable}[name](capacity_bytes)


def pools_of(stream: str) -> tuple[Pool, Pool]:
    """A stream's pools: the large one, and the small one. Blocks never move between pools."""
    return Pool(stream, is_small=False), Pool(stream, is_small=True)


class Classic:
    """Segments of cudaMalloc (`expandable_segments:False`, torch's default).

    Sizes are rounded up to 512 bytes (round_size). A block that is too large is split only if what is left is worth it
    (should_split), so it may hold, and count as allocated, up to 1 MiB more than was asked for.
    """

    def __init__(self, capacity_bytes: int | None = None):
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.driver_calls: list[DriverCall] = []
        self._pools: dict[str, tuple[Pool, Pool]] = {}
        self._live: dict[int, tuple[int, Pool]] = {}
        self._segments: dict[int, int] = {}  # start → size
        self._next_address = FIRST_ADDRESS

    @property
    def active_bytes(self) -> int:
        return self.allocated_bytes

    def allocate(self, num_bytes: int, stream: str) -> int:
        """See Allocator."""
        if not num_bytes:
            return 0
        size = (num_bytes + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK
        if (pools := self._pools.get(stream)) is None:
            pools = self._pools[stream] = pools_of(stream)
        pool = pools[size <= SMALL]
        position = pool.find(size)
        if position == len(pool.order):
            position = self._new_segment(pool, size)
        address, size = pool.take(position, size, least_rest=MIN_BLOCK if pool.is_small else SMALL + 1)
        self._live[address] = size, pool
        self.allocated_bytes += size
        return address

    def free(self, address: int) -> None:
        """Give a block back to its pool."""
        if address:
            size, pool = self._live.pop(address)
            self.allocated_bytes -= size
            pool.put(address, size)

    def pools(self) -> list[Pool]:
        return [pool for both in self._pools.values() for pool in both]

    def _new_segment(self, pool: Pool, size: int) -> int:
        """Position of the free block that a new segment is."""
        segment = segment_size(size)
        if not self._fits(segment):
            self._release_cached()
            if not self._fits(segment):
                raise OutOfMemory(f"{size} bytes")
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
        """Give segments that are one free block back to the driver (release_cached_blocks)."""
        for pool in self.pools():
            for start, size in list(pool.size_at.items()):
                if self._segments.get(start) == size:
                    pool.take_at(start)
                    del self._segments[start]
                    self.reserved_bytes -= size
                    self.driver_calls.append(DriverCall("segment_free", start, size, pool.stream, pool.is_small))


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
