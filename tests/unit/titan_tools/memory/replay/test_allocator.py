"""The model of torch's CUDA allocator: held to that allocator's own answers, to its rules one by one, to invariants."""

import importlib.metadata
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recorded_allocator.record import RECORDED, record
from titan_tools.memory.replay.allocator import make_allocator
from titan_tools.memory.replay.pool import CapacityExceeded
from titan_tools.memory.trace.events import COMPUTE

KIB, MIB = 1 << 10, 1 << 20
BOTH = pytest.mark.parametrize("name", ["classic", "expandable"])


def _recordings() -> list[tuple[str, int, list[str]]]:
    found = []
    for line in RECORDED.read_text().splitlines():
        if line.startswith("="):
            _, name, capacity_mib = line.split()
            found.append((name, int(capacity_mib) * MIB, []))
        elif not line.startswith("#"):
            found[-1][2].append(line)
    return found


@pytest.mark.parametrize("recording", range(len(_recordings())))
def test_torchs_own_allocator_gives_the_same_bytes_and_addresses_event_by_event(recording):
    name, capacity_bytes, lines = _recordings()[recording]
    gpu = make_allocator(name, capacity_bytes=capacity_bytes or None)
    addresses, failed = {}, 0
    for line in lines:
        event, expected = line.split("; ")
        kind, number, *request = event.split()
        if kind == "a":
            try:
                addresses[number] = gpu.allocate(int(request[0]), request[1])
            except CapacityExceeded:
                addresses[number] = 0
                failed += 1
        else:
            gpu.free(addresses[number])
        assert f"{gpu.allocated_bytes} {gpu.reserved_bytes} {addresses[number]}" == expected, line
    assert failed == 0 or capacity_bytes


@pytest.mark.slow
def test_the_torch_at_hand_still_answers_as_recorded():
    import torch

    if not (torch.version.cuda or "").startswith("13"):
        pytest.skip("torch here is not built for CUDA 13")
    if not (shutil.which("g++") and shutil.which("nm")):
        pytest.skip("no compiler")
    site_packages = Path(importlib.metadata.distribution("torch").locate_file("."))
    recorded = [line for line in RECORDED.read_text().splitlines() if not line.startswith("#")]
    assert record(site_packages)[1:] == recorded


# --- the rules, one by one; the names are those of CUDACachingAllocator.cpp


@BOTH
@pytest.mark.parametrize(
    ("asked", "taken"), [(1, 512), (512, 512), (513, 1024), (MIB - 1, MIB), (3 * MIB + 1, 3 * MIB + 512)]
)
def test_sizes_are_rounded_to_512_bytes_round_size(name, asked, taken):
    gpu = make_allocator(name)
    gpu.allocate(asked, COMPUTE)
    assert gpu.allocated_bytes == taken


@BOTH
def test_no_bytes_take_nothing(name):
    gpu = make_allocator(name)
    gpu.free(gpu.allocate(0, COMPUTE))
    assert gpu.allocated_bytes == gpu.reserved_bytes == 0 and not gpu.driver_calls


@pytest.mark.parametrize(
    ("asked", "classic", "expandable"),
    [
        (1, 2, 2),
        (MIB, 2, 2),  # kSmallSize is still small
        (MIB + 1, 20, 20),
        (10 * MIB - 512, 20, 20),
        (10 * MIB, 10, 20),  # kMinLargeAlloc: a segment of its own, if not expandable
        (10 * MIB + 1, 12, 20),  # kRoundLarge
        (21 * MIB, 22, 40),
    ],
)
def test_what_is_taken_from_the_driver_get_allocation_size_and_map(asked, classic, expandable):
    for name, expected in (("classic", classic), ("expandable", expandable)):
        gpu = make_allocator(name)
        gpu.allocate(asked, COMPUTE)
        assert gpu.reserved_bytes == expected * MIB


def test_a_large_block_is_split_only_if_more_than_a_mib_is_left_should_split():
    gpu = make_allocator("classic")
    gpu.allocate(11 * MIB, COMPUTE)  # of 12: the rest is exactly 1 MiB
    assert gpu.allocated_bytes == gpu.reserved_bytes == 12 * MIB
    gpu = make_allocator("classic")
    gpu.allocate(11 * MIB - 512, COMPUTE)
    assert gpu.allocated_bytes == 11 * MIB - 512
    gpu = make_allocator("expandable")
    gpu.allocate(20 * MIB - 512, COMPUTE)
    assert gpu.allocated_bytes == 20 * MIB - 512
    gpu.allocate(512, COMPUTE)  # small: not from the large pool's rest
    assert gpu.reserved_bytes == 22 * MIB


@BOTH
def test_a_small_block_is_split_down_to_512_bytes(name):
    gpu = make_allocator(name)
    first = gpu.allocate(MIB, COMPUTE)
    second = gpu.allocate(MIB - 512, COMPUTE)
    third = gpu.allocate(1, COMPUTE)
    assert (second, third) == (first + MIB, first + 2 * MIB - 512) and gpu.reserved_bytes == 2 * MIB


@BOTH
def test_the_smallest_block_that_fits_is_taken_the_lowest_of_equals_get_free_block(name):
    gpu = make_allocator(name)
    blocks = [gpu.allocate(size, COMPUTE) for size in (300 * KIB, 512, 100 * KIB, 512, 200 * KIB, 512, 100 * KIB, 512)]
    for freed in (6, 4, 2, 0):
        gpu.free(blocks[freed])
    assert gpu.allocate(60 * KIB, COMPUTE) == blocks[2]
    assert gpu.allocate(150 * KIB, COMPUTE) == blocks[4]
    assert gpu.allocate(90 * KIB, COMPUTE) == blocks[6]


@BOTH
def test_neighbours_that_are_free_become_one_try_merge_blocks(name):
    gpu = make_allocator(name)
    first, second, third = (gpu.allocate(500 * KIB, COMPUTE) for _ in range(3))
    gpu.free(first)
    gpu.free(third)
    gpu.free(second)
    assert gpu.pools()[1].size_at == {first: 2 * MIB}


@BOTH
def test_a_stream_does_not_use_what_another_freed(name):
    gpu = make_allocator(name)
    gpu.free(gpu.allocate(20 * MIB, COMPUTE))
    gpu.allocate(20 * MIB, "all_gather")
    assert gpu.reserved_bytes == 40 * MIB
    assert {call.stream: call.num_bytes for call in gpu.driver_calls} == {COMPUTE: 20 * MIB, "all_gather": 20 * MIB}


def test_an_expandable_segment_grows_at_its_end_from_the_free_block_there_find_expandable_block():
    gpu = make_allocator("expandable")
    first = gpu.allocate(15 * MIB, COMPUTE)
    second = gpu.allocate(30 * MIB, COMPUTE)  # 5 MiB lie free: 25 more are lacking, mapped as 2 granules
    assert second == first + 15 * MIB
    assert [call.num_bytes for call in gpu.driver_calls] == [20 * MIB, 40 * MIB]
    assert make_and_count("classic", 15 * MIB, 30 * MIB) == 16 * MIB + 30 * MIB


def make_and_count(name: str, *sizes: int) -> int:
    gpu = make_allocator(name)
    for size in sizes:
        gpu.allocate(size, COMPUTE)
    return gpu.reserved_bytes


def test_the_end_that_can_expand_is_used_last():
    gpu = make_allocator("expandable")
    hole = gpu.allocate(14 * MIB, COMPUTE)
    gpu.allocate(14 * MIB, COMPUTE)  # 12 MiB left at the end: the better fit, were it not for what can follow
    gpu.free(hole)
    assert gpu.allocate(11 * MIB, COMPUTE) == hole


def test_at_the_limit_cached_segments_go_back_to_the_driver_release_cached_blocks():
    gpu = make_allocator("classic", capacity_bytes=40 * MIB)
    gpu.free(gpu.allocate(20 * MIB, "all_gather"))
    kept = gpu.allocate(12 * MIB, COMPUTE)
    gpu.allocate(24 * MIB, COMPUTE)
    assert gpu.reserved_bytes == 36 * MIB
    assert [call.action for call in gpu.driver_calls] == [
        "segment_alloc",
        "segment_alloc",
        "segment_free",
        "segment_alloc",
    ]
    gpu.free(kept)
    with pytest.raises(CapacityExceeded):
        gpu.allocate(20 * MIB, COMPUTE)  # 12 are given back: 16 lie free


def test_at_the_limit_free_granules_are_unmapped_unmap_block():
    gpu = make_allocator("expandable", capacity_bytes=80 * MIB)
    first, second = gpu.allocate(10 * MIB, COMPUTE), gpu.allocate(70 * MIB, COMPUTE)
    gpu.free(second)  # free from 10 to 80: granules 20 to 80 can go
    gpu.allocate(60 * MIB, "all_gather")
    assert gpu.reserved_bytes == 80 * MIB
    assert [(call.action, call.address - first, call.num_bytes) for call in gpu.driver_calls[2:3]] == [
        ("segment_unmap", 20 * MIB, 60 * MIB)
    ]
    assert gpu.allocate(10 * MIB, COMPUTE) == first + 10 * MIB
    with pytest.raises(CapacityExceeded):
        gpu.allocate(2 * MIB, COMPUTE)


@BOTH
@pytest.mark.parametrize("capacity_bytes", [0, 30 * MIB])
def test_more_than_the_whole_memory_is_out_of_memory(name, capacity_bytes):
    gpu = make_allocator(name, capacity_bytes=capacity_bytes)
    with pytest.raises(CapacityExceeded):
        gpu.allocate(100 * MIB, COMPUTE)
    with pytest.raises(CapacityExceeded):
        gpu.allocate(40 * MIB, COMPUTE)


# --- invariants

_STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.one_of(st.integers(1, 4 * KIB), st.integers(1, 3 * MIB), st.integers(MIB, 60 * MIB)),
            st.sampled_from([COMPUTE, "all_gather", "reduce_scatter"]),
        ),
        st.integers(0, 1 << 30),  # frees one of the live ones
    ),
    max_size=60,
)


@BOTH
@given(steps=_STEPS, capacity=st.sampled_from([None, 200 * MIB]))
@settings(max_examples=120, deadline=None)
def test_blocks_never_overlap_and_sums_agree(name, steps, capacity):
    gpu = make_allocator(name, capacity_bytes=capacity)
    live: dict[int, int] = {}  # address → bytes asked for
    for step in steps:
        if isinstance(step, int):
            if live:
                address = list(live)[step % len(live)]
                del live[address]
                gpu.free(address)
        else:
            try:
                address = gpu.allocate(*step)
            except CapacityExceeded:
                assert capacity is not None
                continue
            assert address not in live
            live[address] = step[0]
        _check(gpu, live, slack=MIB if name == "classic" else 0)
        assert capacity is None or gpu.reserved_bytes <= capacity
    for address in live:
        gpu.free(address)
    _check(gpu, {}, slack=0)
    mapped = {}
    for call in gpu.driver_calls:
        sign = 1 if call.action in ("segment_alloc", "segment_map") else -1
        mapped[call.stream, call.is_small] = mapped.get((call.stream, call.is_small), 0) + sign * call.num_bytes
    assert {key: size for key, size in mapped.items() if size} == {
        (pool.stream, pool.is_small): sum(pool.size_at.values()) for pool in gpu.pools() if pool.order
    }
    if capacity is None and name == "expandable":
        assert all(len(pool.order) <= 1 for pool in gpu.pools())


def _check(gpu, live: dict[int, int], *, slack: int) -> None:
    rounded = sum(-(-size // 512) * 512 for size in live.values())
    assert rounded <= gpu.allocated_bytes <= rounded + slack * len(live)
    free = [(start, start + size) for pool in gpu.pools() for start, size in pool.size_at.items()]
    assert gpu.reserved_bytes == gpu.allocated_bytes + sum(end - start for start, end in free)
    spans = sorted(free + [(start, start + size) for start, size in live.items()])
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    ends = {end for _, end in free}
    assert not any(start in ends for start, _ in free), "free neighbours that were not merged"
