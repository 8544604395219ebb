"""Replay a trace with a model of the GPU's allocator: bytes after each event, and what the peaks consist of."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from titan_tools.memory.replay.allocator import Allocator, AllocatorName, make_allocator
from titan_tools.memory.replay.pool import TAKING, CapacityExceeded, DriverCall
from titan_tools.memory.trace.events import COMPUTE, StepPoint, Trace, TraceSegment


@dataclass(frozen=True, slots=True)
class Peak:
    """Peaks of allocated and of reserved memory over some steps, and what the allocated one consists of.

    Bytes are as torch.cuda.max_memory_allocated and max_memory_reserved count them. What was reserved in earlier steps
    counts: the allocator keeps it.
    """

    allocated_bytes: int
    reserved_bytes: int
    point: StepPoint  # of the allocated peak
    event: int  # its number in the trace, from 0
    by_part: dict[str, int]  # sums to allocated_bytes; largest first
    activations_by_module: dict[str, int]  # of the part "activations", in the order of the step
    unused_by_stream: dict[str, int]  # sums to reserved - allocated

    @property
    def fragmentation_bytes(self) -> int:
        """Reserved but not allocated at the allocated peak, in the pool of the stream that computes."""
        return self.unused_by_stream.get(COMPUTE, 0)

    @property
    def idle_pools_bytes(self) -> int:
        """The same of all other streams, whose free blocks the computation cannot use."""
        return self.reserved_bytes - self.allocated_bytes - self.fragmentation_bytes


@dataclass
class Replayed:
    """A trace with the allocator's results. A replay that runs out of memory ends there."""

    trace: Trace
    allocator: AllocatorName
    sizes: list[int]  # by block: what it takes of the GPU; 0 after the replay's end
    addresses: list[int]  # by block
    allocated: "array[int]" = field(default_factory=lambda: array("q"))  # bytes after each event
    reserved: "array[int]" = field(default_factory=lambda: array("q"))
    driver_calls: list[tuple[int, DriverCall]] = field(default_factory=list)  # each with its event's number
    out_of_memory: bool = False

    @cached_property
    def step1(self) -> Peak:
        """The peak of the build and of step 1."""
        return _find_peak(self, 0, self._end_of_step1)

    @cached_property
    def steady(self) -> Peak:
        """The peak of the steps from 2, which have all optimizer states; of step 1 if the trace has no more."""
        end = len(self.allocated)
        return _find_peak(self, self._end_of_step1, end) if self._end_of_step1 < end else self.step1

    @property
    def reserved_bytes(self) -> int:
        return max(self.reserved)

    def worst(self) -> Peak:
        """Over all steps. Step 1 may allocate the most, and a later one reserve the most."""
        step1, steady = self.step1, self.steady
        if steady.allocated_bytes >= step1.allocated_bytes:
            return steady
        if step1.reserved_bytes >= steady.reserved_bytes:
            return step1
        return _find_peak(self, 0, len(self.allocated))

    @property
    def _end_of_step1(self) -> int:
        first = sum(len(segment.events) for segment in self.trace.segments if segment.point.step < 2)
        return min(first, len(self.allocated))


def replay(trace: Trace, *, allocator: AllocatorName, capacity_bytes: int | None = None) -> Replayed:
    """Replay a trace, about 2 µs per event.

    `capacity_bytes`: everything that the allocator can get from the GPU, None for any amount.
    """
    gpu = make_allocator(allocator, capacity_bytes=capacity_bytes)
    num_blocks = len(trace.blocks)
    result = Replayed(trace, allocator, [0] * num_blocks, [0] * num_blocks)
    try:
        for segment in trace.segments:
            _replay_segment(segment, gpu, result)
    except CapacityExceeded:
        result.out_of_memory = True
    return result


def _replay_segment(segment: TraceSegment, gpu: Allocator, result: Replayed) -> None:
    blocks, sizes, addresses, calls = result.trace.blocks, result.sizes, result.addresses, gpu.driver_calls
    allocate, free = gpu.allocate, gpu.free
    add_allocated, add_reserved = result.allocated.append, result.reserved.append
    before, num_calls = gpu.allocated_bytes, len(calls)
    for event in segment.events:
        if event >= 0:
            block = blocks[event]
            addresses[event] = allocate(block.num_bytes, block.stream)
            after = gpu.allocated_bytes
            sizes[event] = after - before
            if len(calls) > num_calls:
                result.driver_calls += [(len(result.allocated), call) for call in calls[num_calls:]]
                num_calls = len(calls)
        else:
            free(addresses[~event])
            after = gpu.allocated_bytes
        before = after
        add_allocated(after)
        add_reserved(gpu.reserved_bytes)


def _find_peak(result: Replayed, begin: int, end: int) -> Peak:
    """The peak over events [begin, end)."""
    trace, sizes = result.trace, result.sizes
    allocated_bytes = max(result.allocated[begin:end])
    reserved_bytes = max(result.reserved[begin:end])
    at = result.allocated.index(allocated_bytes, begin, end)
    live, point = _live_after(trace, at)
    by_part: Counter[str] = Counter()
    by_stream: Counter[str] = Counter()
    by_module: Counter[str] = Counter()
    for number in live:
        block, size = trace.blocks[number], sizes[number]
        by_part[block.part] += size
        by_stream[block.stream] += size
        if block.part == "activations":
            by_module[block.point.module] += size
    unused = _reserved_by_stream(result.driver_calls, until=result.reserved.index(reserved_bytes, 0, end))
    unused.subtract(by_stream)
    return Peak(
        allocated_bytes,
        reserved_bytes,
        point,
        at,
        dict(by_part.most_common()),
        dict(by_module),
        dict(unused.most_common()),
    )


def _reserved_by_stream(driver_calls: Sequence[tuple[int, DriverCall]], *, until: int) -> Counter[str]:
    reserved: Counter[str] = Counter()
    for event, call in driver_calls:
        if event <= until:
            reserved[call.stream] += call.num_bytes if call.action in TAKING else -call.num_bytes
    return reserved


def _live_after(trace: Trace, at: int) -> tuple[dict[int, None], StepPoint]:
    """Blocks that are allocated after event number `at`, in the order of their allocation, and the event's point."""
    live: dict[int, None] = {}
    for number, (segment, event) in enumerate(trace.events()):
        if event >= 0:
            live[event] = None
        else:
            del live[~event]
        if number == at:
            return live, segment.point
    raise IndexError(at)
