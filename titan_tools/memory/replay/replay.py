"""Give a trace's blocks out with a model of the GPU's allocator: what is allocated and reserved after each event."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from titan_tools.memory.replay.allocator import Allocator, AllocatorName, make_allocator
from titan_tools.memory.replay.pool import TAKING, CapacityExceeded, DriverCall
from titan_tools.memory.trace.events import COMPUTE, StepPoint, Trace, TraceSegment

NUM_LARGEST = 20


@dataclass(frozen=True, slots=True)
class Instant:
    """After one of a trace's events."""

    point: StepPoint
    event: int  # its number, from 0


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """A block that is allocated at the peak, with its share of it."""

    num_bytes: int
    part: str
    owner: str  # FQN of its parameter or module; where that is not known, of the module that allocated it
    stream: str
    point: StepPoint


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
    live, point = _live_after(trace, at)
    held = sorted((HeldBlock(sizes[b], *_described(trace, b)) for b in live), key=lambda block: -block.num_bytes)
    by_part, by_stream, by_module = Counter(), Counter(), Counter()
    for number in live:
        block, size = trace.blocks[number], sizes[number]
        by_part[block.part] += size
        by_stream[block.stream] += size
        if block.part == "activations":
            by_module[block.point.module] += size
    unused = Counter()
    for event, call in driver_calls:
        if event <= reserved_at:
            unused[call.stream] += call.num_bytes if call.action in TAKING else -call.num_bytes
    unused.subtract(by_stream)
    return Peak(
        highest,
        most,
        Instant(point, at),
        Instant(point_of(trace, reserved_at), reserved_at),
        dict(by_part.most_common()),
        dict(by_module),
        tuple(held[:NUM_LARGEST]),
        dict(unused.most_common()),
    )


def _described(trace: Trace, number: int) -> tuple[str, str, str, StepPoint]:
    block = trace.blocks[number]
    return block.part, block.owner or block.point.module, block.stream, block.point


def _live_after(trace: Trace, at: int) -> tuple[dict[int, None], StepPoint]:
    """Blocks that are allocated after event number `at`, in the order in which they came, and where that is."""
    live: dict[int, None] = {}
    for number, (segment, event) in enumerate(trace.events()):
        if event >= 0:
            live[event] = None
        else:
            del live[~event]
        if number == at:
            return live, segment.point
    raise IndexError(at)


def point_of(trace: Trace, number: int) -> StepPoint:
    """Where event `number` happens."""
    for segment in trace.segments:
        number -= len(segment.events)
        if number < 0:
            return segment.point
    raise IndexError(number)


@dataclass(slots=True)
class Replayed:
    """A trace with its allocator's answers. Peaks are of the first step, and of the steps with optimizer states."""

    trace: Trace
    allocator: AllocatorName
    sizes: list[int]  # by block: what it takes of the GPU; 0 where the replay did not come so far
    addresses: list[int]  # by block
    allocated: array = field(default_factory=lambda: array("q"))  # bytes after each event
    reserved: array = field(default_factory=lambda: array("q"))
    driver_calls: list[tuple[int, DriverCall]] = field(default_factory=list)  # each with its event's number
    step1: Peak | None = None  # of steps 0 and 1
    steady: Peak | None = None  # of the steps from 2; None where the trace has none
    out_of_memory: Instant | None = None  # the request that did not fit, at which the replay ended

    def worst(self) -> Peak:
        """Over all steps. Step 1 may allocate the most, and a later one reserve the most."""
        step1, steady = self.step1, self.steady or self.step1
        if steady.allocated_bytes >= step1.allocated_bytes:
            return steady
        return step1 if step1.reserved_bytes >= steady.reserved_bytes else _peak(self, 0, len(self.allocated))


def replay(trace: Trace, *, allocator: AllocatorName, capacity_bytes: int | None = None) -> Replayed:
    """Replay a trace. `capacity_bytes`: all that the allocator can get of the GPU, None for as much as it asks for.

    About 2 µs per event.
    """
    gpu = make_allocator(allocator, capacity_bytes=capacity_bytes)
    num_blocks = len(trace.blocks)
    made = Replayed(trace, allocator, [0] * num_blocks, [0] * num_blocks)
    try:
        for segment in trace.segments:
            _replay_segment(segment, gpu, made)
    except CapacityExceeded:
        made.out_of_memory = Instant(segment.point, len(made.allocated))
    first = sum(len(segment.events) for segment in trace.segments if segment.point.step < 2)
    first = min(first, len(made.allocated))
    made.step1 = _peak(made, 0, first)
    made.steady = _peak(made, first, len(made.allocated))
    return made


def _replay_segment(segment: TraceSegment, gpu: Allocator, made: Replayed) -> None:
    blocks, sizes, addresses, calls = made.trace.blocks, made.sizes, made.addresses, gpu.driver_calls
    allocate, free, held, reserved = gpu.allocate, gpu.free, made.allocated.append, made.reserved.append
    before, num_calls = gpu.allocated_bytes, len(calls)
    for event in segment.events:
        if event >= 0:
            block = blocks[event]
            addresses[event] = allocate(block.num_bytes, block.stream)
            after = gpu.allocated_bytes
            sizes[event] = after - before
            if len(calls) > num_calls:
                made.driver_calls += [(len(made.allocated), call) for call in calls[num_calls:]]
                num_calls = len(calls)
        else:
            free(addresses[~event])
            after = gpu.allocated_bytes
        before = after
        held(after)
        reserved(gpu.reserved_bytes)


def _peak(made: Replayed, begin: int, end: int) -> Peak | None:
    return find_peak(
        made.trace,
        begin=begin,
        end=end,
        sizes=made.sizes,
        allocated=made.allocated,
        reserved=made.reserved,
        driver_calls=made.driver_calls,
    )
