"""Checkpoints are copied off the GPU into memory that is pinned, shared, and as it was. Skipped where there is none."""

import os

import pytest
import torch

from trainer.checkpoints.staging import HostMemory, SharedMemory, SnapshotPlanner, take_snapshot

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("memory_type", [HostMemory, SharedMemory])
def test_a_snapshot_of_a_gpu_is_what_was_there(memory_type):
    memory = memory_type()
    state = {"a": torch.randn(1000, 1000, device="cuda"), "b": torch.randn(70, 30, device="cuda").bfloat16().t()}
    expected = {fqn: tensor.cpu() for fqn, tensor in state.items()}
    snapshot = take_snapshot(state, memory, is_coordinator=True)
    for tensor in state.values():
        tensor.zero_()
    torch.cuda.synchronize()
    place = memory.get(snapshot.num_bytes)
    assert place.is_pinned()
    if memory_type is SharedMemory:  # as another process sees it
        place = SharedMemory(os.dup(memory.descriptor)).get(snapshot.num_bytes)
    planner = SnapshotPlanner(snapshot, place)
    found = {item.index.fqn: planner.resolve_data(item) for item in snapshot.plan.items}
    assert all(torch.equal(found[fqn], expected[fqn]) for fqn in expected)
    memory.close()
