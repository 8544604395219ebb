"""Replayed traces: peaks of the first step and of later ones, their parts, and unused reserved memory."""

import pytest

from tests.memory_traces import MIB, TraceMaker, make_step_trace
from titan_tools.memory.replay.allocator import make_allocator
from titan_tools.memory.replay.replay import replay
from titan_tools.memory.trace.events import COMPUTE, StepPoint

BOTH = pytest.mark.parametrize("allocator", ["classic", "expandable"])


def _small() -> TraceMaker:
    """Peaks: 60 MiB in step 1, 80 MiB in step 2."""
    maker = TraceMaker()
    maker.allocate(20 * MIB, "parameters", owner="output.weight")
    maker.at(1, "forward", 0, 0, "layers.0")
    first = maker.allocate(40 * MIB, "activations")
    maker.at(1, "backward", 0, 0, "layers.0")
    maker.free(first)
    maker.at(1, "optimizer")
    maker.allocate(20 * MIB, "optimizer", owner="output.weight")
    maker.at(2, "forward", 0, 0, "layers.0")
    first = maker.allocate(40 * MIB, "activations")
    maker.at(2, "backward", 0, 0, "layers.0")
    maker.free(first, maker.allocate(20 * MIB, "gradients", stream="reduce_scatter"))
    return maker


@BOTH
def test_peaks_by_hand(allocator):
    found = replay(_small().trace, allocator=allocator)
    assert found.step1.allocated_bytes == 60 * MIB
    assert found.step1.point == StepPoint(1, "forward", 0, 0, "layers.0")
    assert found.step1.event == 1
    assert found.step1.by_part == {"activations": 40 * MIB, "parameters": 20 * MIB}
    assert found.steady.allocated_bytes == 100 * MIB
    assert found.steady.point.phase == "backward"
    assert found.steady.by_part == {
        "activations": 40 * MIB,
        "parameters": 20 * MIB,
        "optimizer": 20 * MIB,
        "gradients": 20 * MIB,
    }
    assert found.steady.activations_by_module == {"layers.0": 40 * MIB}


def test_reserved_by_hand():
    found = replay(_small().trace, allocator="classic")
    # The optimizer's states split the segment of the activations, so that step 2 needs another one
    assert found.step1.reserved_bytes == 60 * MIB
    assert found.steady.reserved_bytes == 120 * MIB
    assert found.steady.unused_by_stream == {COMPUTE: 20 * MIB, "reduce_scatter": 0}
    assert found.steady.fragmentation_bytes == 20 * MIB and found.steady.idle_pools_bytes == 0


def test_the_worst_of_all_steps_combines_allocated_and_reserved_peaks():
    maker = TraceMaker()
    maker.at(1, "forward", 0, 0, "layers.0")
    maker.free(maker.allocate(100 * MIB, "activations"))
    maker.at(2, "forward", 0, 0, "layers.0")
    maker.free(maker.allocate(60 * MIB, "activations"), maker.allocate(30 * MIB, "gradients", stream="reduce_scatter"))
    found = replay(maker.trace, allocator="classic")
    worst = found.worst()
    assert (found.step1.reserved_bytes, found.steady.reserved_bytes) == (100 * MIB, 130 * MIB)
    assert (worst.allocated_bytes, worst.event) == (100 * MIB, found.step1.event)
    assert worst.reserved_bytes == 130 * MIB
    assert worst.unused_by_stream == {COMPUTE: 0, "reduce_scatter": 30 * MIB}


def test_reserved_memory_of_earlier_steps_still_counts():
    maker = TraceMaker()
    maker.at(1, "forward")
    maker.free(maker.allocate(40 * MIB, "activations"))
    maker.at(2, "forward")
    maker.allocate(10 * MIB, "activations")
    found = replay(maker.trace, allocator="expandable")
    assert found.steady.allocated_bytes == 10 * MIB and found.steady.reserved_bytes == 40 * MIB
    only_step1 = replay(make_step_trace(num_steps=1), allocator="expandable")
    assert only_step1.steady == only_step1.step1


@BOTH
def test_the_parts_of_a_peak_and_what_is_unused_sum_to_it(allocator):
    found = replay(make_step_trace(), allocator=allocator)
    for peak in (found.step1, found.steady):
        assert sum(peak.by_part.values()) == peak.allocated_bytes
        assert sum(peak.unused_by_stream.values()) == peak.reserved_bytes - peak.allocated_bytes
        assert peak.fragmentation_bytes + peak.idle_pools_bytes == peak.reserved_bytes - peak.allocated_bytes
        assert sum(peak.activations_by_module.values()) == peak.by_part["activations"]
    assert found.steady.idle_pools_bytes >= 2 * 24 * MIB  # gathered layers and gradients lie in pools of their own
    assert found.steady.allocated_bytes == max(found.allocated)


@BOTH
def test_a_replay_is_the_allocator_asked_in_the_traces_order(allocator):
    trace = make_step_trace()
    found, gpu, addresses = replay(trace, allocator=allocator), make_allocator(allocator), {}
    for number, (_, event) in enumerate(trace.events()):
        if event >= 0:
            addresses[event] = gpu.allocate(trace.blocks[event].num_bytes, trace.blocks[event].stream)
            assert found.addresses[event] == addresses[event]
        else:
            gpu.free(addresses[~event])
        assert (found.allocated[number], found.reserved[number]) == (gpu.allocated_bytes, gpu.reserved_bytes)
    assert [call for _, call in found.driver_calls] == gpu.driver_calls


@BOTH
def test_a_limit_is_kept_or_the_replay_says_where_memory_ran_out(allocator):
    trace = make_step_trace()
    free = replay(trace, allocator=allocator)
    needed = free.steady.reserved_bytes
    assert not free.out_of_memory
    assert replay(trace, allocator=allocator, capacity_bytes=needed).out_of_memory is False
    short = replay(trace, allocator=allocator, capacity_bytes=free.step1.allocated_bytes - MIB)
    assert short.out_of_memory
    assert len(short.allocated) <= free.step1.event
    assert max(short.reserved) <= free.step1.allocated_bytes - MIB


def test_giving_back_what_is_cached_can_make_room():
    maker = TraceMaker()
    maker.free(maker.allocate(60 * MIB, "all_gather", stream="all_gather"))
    maker.allocate(60 * MIB, "activations")
    found = replay(maker.trace, allocator="expandable", capacity_bytes=80 * MIB)
    assert not found.out_of_memory and found.step1.reserved_bytes == 60 * MIB
    assert [call.action for _, call in found.driver_calls] == ["segment_map", "segment_unmap", "segment_map"]


def test_blocks_of_no_bytes_take_nothing():
    maker = TraceMaker()
    maker.allocate(512, "parameters")
    maker.free(maker.allocate(0, "parameters"))
    found = replay(maker.trace, allocator="classic")
    assert found.step1.allocated_bytes == 512 and found.sizes == [512, 0]
