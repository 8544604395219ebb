"""The free blocks of one stream and size class, as CUDACachingAllocator's BlockPool keeps them: sorted, coalesced."""

from bisect import bisect_left, insort

# A free block's place in the order (size, address) is one integer: much faster to compare than a tuple.
_ADDRESS_BITS = 52
_ADDRESS = (1 << _ADDRESS_BITS) - 1


class Pool:
    """Free blocks by size, then address (BlockComparatorSize), and by both of their ends.

    Segments must not touch each other: blocks that touch are merged.
    """

    __slots__ = ("stream", "is_small", "_order", "size_at", "start_at")

    def __init__(self, stream: str, *, is_small: bool):
        self.stream, self.is_small = stream, is_small
        self._order: list[int] = []
        self.size_at: dict[int, int] = {}  # start → size
        self.start_at: dict[int, int] = {}  # end → start

    def __len__(self) -> int:
        return len(self._order)

    def find(self, size: int) -> int:
        """Position of the smallest block of at least `size`, the lowest of those; len(self) if there is none."""
        return bisect_left(self._order, size << _ADDRESS_BITS)

    def at(self, position: int) -> tuple[int, int]:
        """Start and size of the block at a position."""
        key = self._order[position]
        return key & _ADDRESS, key >> _ADDRESS_BITS

    def take(self, position: int) -> tuple[int, int]:
        """Take a block out: its start and size."""
        key = self._order.pop(position)
        start, size = key & _ADDRESS, key >> _ADDRESS_BITS
        del self.size_at[start], self.start_at[start + size]
        return start, size

    def take_at(self, start: int) -> int:
        """Take the block that starts there out: its size."""
        return self.take(bisect_left(self._order, self.size_at[start] << _ADDRESS_BITS | start))[1]

    def put(self, start: int, size: int) -> None:
        """Add a block, merged with free neighbours (try_merge_blocks)."""
        if (before := self.start_at.get(start)) is not None:
            size += self.take_at(before)
            start = before
        if start + size in self.size_at:
            size += self.take_at(start + size)
        self.put_apart(start, size)

    def put_apart(self, start: int, size: int) -> None:
        """Add a block that has no free neighbour."""
        self.size_at[start] = size
        self.start_at[start + size] = start
        insort(self._order, size << _ADDRESS_BITS | start)
