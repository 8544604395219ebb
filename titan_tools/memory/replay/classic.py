"""The allocator with segments of cudaMalloc, torch's default."""

from titan_tools.memory.replay.pool import Pool
from titan_tools.memory.replay.rules import FIRST_ADDRESS, GAP, MIN_BLOCK, SMALL, DriverCall, OutOfMemory, segment_size


class Classic:
    """`expandable_segments:False`: see allocator.Allocator.

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
