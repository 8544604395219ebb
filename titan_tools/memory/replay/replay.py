"""Give a trace's blocks out with a model of the GPU's allocator: what is allocated and reserved after each event."""

from array import array
from dataclasses import dataclass, field

from titan_tools.memory.replay.allocator import Allocator, AllocatorName, make_allocator
from titan_tools.memory.replay.peaks import Instant, Peak, find_peak
from titan_tools.memory.replay.rules import DriverCall, OutOfMemory
from titan_tools.memory.trace.events import Segment, Trace


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
    except OutOfMemory:
        made.out_of_memory = Instant(segment.place, len(made.allocated))
    first = sum(len(segment.events) for segment in trace.segments if segment.place.step < 2)
    first = min(first, len(made.allocated))
    made.step1 = _peak(made, 0, first)
    made.steady = _peak(made, first, len(made.allocated))
    return made


def _replay_segment(segment: Segment, gpu: Allocator, made: Replayed) -> None:
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
