"""The most that a replayed trace holds: how much, when, and of what."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from titan_tools.memory.replay.rules import TAKING, DriverCall
from titan_tools.memory.trace.events import COMPUTE, Place, Trace

NUM_LARGEST = 20


@dataclass(frozen=True, slots=True)
class Instant:
    """After one of a trace's events."""

    place: Place
    event: int  # its number, from 0


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """A block that is allocated at the peak, with its share of it."""

    num_bytes: int
    part: str
    owner: str  # FQN of its parameter or module; where that is not known, of the module that allocated it
    stream: str
    place: Place


@dataclass(frozen=True, slots=True)
class Peak:
    """Peaks of allocated and of reserved memory over some steps, and what the allocated one consists of.

    Bytes are as torch.cuda.max_memory_allocated and max_memory_reserved count them. What was reserved in earlier steps
    counts: the allocator keeps it.
    """

    allocated_bytes: int
    reserved_bytes: int
    allocated_at: Instant
    reserved_at: Instant  # when the last of it was taken from the driver
    by_part: dict[str, int]  # sums to allocated_bytes; largest first
    activations_by_module: dict[str, int]  # of the part "activations", in the order of the step
    largest: tuple[HeldBlock, ...]
    unused_by_stream: dict[str, int]  # sums to reserved - allocated

    @property
    def active_bytes(self) -> int:
        """Allocated, or freed but still in use by another stream: FSDP2 and the collectives leave none of these."""
        return self.allocated_bytes

    @property
    def fragmentation_bytes(self) -> int:
        """Reserved but not allocated when most is allocated, in the pool of the stream that computes."""
        return self.unused_by_stream.get(COMPUTE, 0)

    @property
    def idle_pools_bytes(self) -> int:
        """The same of all other streams, whose free blocks the computation cannot use."""
        return self.reserved_bytes - self.allocated_bytes - self.fragmentation_bytes


def find_peak(
    trace: Trace,
    *,
    begin: int,
    end: int,
    sizes: Sequence[int],
    allocated: array,
    reserved: array,
    driver_calls: Sequence[tuple[int, DriverCall]],
) -> Peak | None:
    """The peak over events [begin, end); None if these are none.

    `sizes`: what each block takes; `allocated`, `reserved`: bytes after each event; `driver_calls`: with their events.
    """
    if begin >= end:
        return None
    highest = max(allocated[begin:end])
    most = max(reserved[begin:end])
    at = allocated.index(highest, begin, end)
    reserved_at = reserved.index(most, 0, end)
    live, place = _live_after(trace, at)
    held = sorted((HeldBlock(sizes[b], *_described(trace, b)) for b in live), key=lambda block: -block.num_bytes)
    by_part, by_stream, by_module = Counter(), Counter(), Counter()
    for number in live:
        block, size = trace.blocks[number], sizes[number]
        by_part[block.part] += size
        by_stream[block.stream] += size
        if block.part == "activations":
            by_module[block.place.module] += size
    unused = Counter()
    for event, call in driver_calls:
        if event <= reserved_at:
            unused[call.stream] += call.num_bytes if call.action in TAKING else -call.num_bytes
    unused.subtract(by_stream)
    return Peak(
        highest,
        most,
        Instant(place, at),
        Instant(place_of(trace, reserved_at), reserved_at),
        dict(by_part.most_common()),
        dict(by_module),
        tuple(held[:NUM_LARGEST]),
        dict(unused.most_common()),
    )


def _described(trace: Trace, number: int) -> tuple[str, str, str, Place]:
    block = trace.blocks[number]
    return block.part, block.owner or block.place.module, block.stream, block.place


def _live_after(trace: Trace, at: int) -> tuple[dict[int, None], Place]:
    """Blocks that are allocated after event number `at`, in the order in which they came, and where that is."""
    live: dict[int, None] = {}
    for number, (segment, event) in enumerate(trace.events()):
        if event >= 0:
            live[event] = None
        else:
            del live[~event]
        if number == at:
            return live, segment.place
    raise IndexError(at)


def place_of(trace: Trace, number: int) -> Place:
    """Where event `number` happens."""
    for segment in trace.segments:
        number -= len(segment.events)
        if number < 0:
            return segment.place
    raise IndexError(number)
