"""CUDACachingAllocator, modelled: what a GPU's memory is given out from, and how much of it is taken from the driver.

Tests hold both kinds equal to that allocator's own compiled code, event by event (tests/recorded_allocator).
"""

from typing import Literal, Protocol

from titan_tools.memory.replay.classic import Classic
from titan_tools.memory.replay.expandable import Expandable
from titan_tools.memory.replay.pool import Pool
from titan_tools.memory.replay.rules import DriverCall

AllocatorName = Literal["classic", "expandable"]


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
    return {"classic": Classic, "expandable": Expandable}[name](capacity_bytes)
