"""A snapshot holds what was there when it was taken; its memory is used again, shared with a process, and pinned."""

import os
import pickle

import pytest
import torch
import torch.distributed as dist

from converters.common.errors import CheckpointError
from converters.families.llama3 import FLAVORS
from converters.model.model_info import ModelInfo
from converters.store.location import locate
from converters.store.manifest import check_files
from trainer.checkpoints import staging as checkpoint_staging
from trainer.checkpoints.checkpoints import Checkpoints
from trainer.checkpoints.staging import HostMemory, SharedMemory, SnapshotPlanner, take_snapshot
from trainer.checkpoints.step_folders import step_folder
from trainer.checkpoints.write import write_step
from trainer.config.sections import Checkpoint

INFO = ModelInfo("llama3", FLAVORS["debug_gqa"])


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('pg')}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def _state(scale=1.0):
    torch.manual_seed(3)
    return {
        "a.weight": torch.randn(6, 5) * scale,
        "b.weight": (torch.randn(4, 3) * scale).to(torch.bfloat16),
        "rows.weight": (torch.randn(7, 2) * scale).t(),  # not contiguous
        "empty": torch.zeros(0, 3),
        "optimizer": {"state.a.weight.step": torch.tensor(4.0), "param_groups.a.weight.betas": [0.9, 0.95]},
        "rng": {"cpu.0": torch.arange(16, dtype=torch.uint8)},
    }


def _bytes(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("memory_type", [HostMemory, SharedMemory])
def test_a_snapshot_is_written_as_the_state_was(tmp_path, group, memory_type):
    memory, state = memory_type(), _state()
    write_step(tmp_path / "expected", state, info=INFO, group=group)
    snapshot = take_snapshot(state, memory, is_coordinator=True)
    if memory_type is SharedMemory:  # which another process writes; a thread gets the snapshot itself
        snapshot = pickle.loads(pickle.dumps(snapshot))
    for tensor in (state["a.weight"], state["rows.weight"], state["optimizer"]["state.a.weight.step"]):
        tensor.zero_()
    state["optimizer"]["param_groups.a.weight.betas"][0] = -1
    planner = SnapshotPlanner(snapshot, memory.get(snapshot.num_bytes))
    write_step(tmp_path / "found", {}, info=INFO, group=group, planner=planner)
    assert _bytes(tmp_path / "found") == _bytes(tmp_path / "expected")
    assert check_files(tmp_path / "found") == []
    memory.close()


@pytest.mark.parametrize("memory_type", [HostMemory, SharedMemory])
def test_the_memory_is_used_again_and_grows(memory_type):
    memory = memory_type()
    first = take_snapshot(_state(), memory, is_coordinator=True)
    place = memory.get(first.num_bytes).data_ptr()
    assert take_snapshot(_state(2.0), memory, is_coordinator=True).offsets == first.offsets
    assert memory.get(first.num_bytes).data_ptr() == memory.get(8).data_ptr() == place
    assert memory.get(10 * first.num_bytes).numel() == 10 * first.num_bytes
    memory.close()


def test_both_ends_of_shared_memory_see_the_same_bytes_also_after_it_grew():
    ours = SharedMemory()
    theirs = SharedMemory(os.dup(ours.descriptor))
    for size in (10, 5000):
        ours.get(size)[size - 1] = 7
        assert theirs.get(size)[size - 1] == 7
    theirs.close()
    ours.close()


@pytest.fixture
def pinned(monkeypatch):
    """A GPU whose runtime notes what is pinned and let go, and answers with `status`."""

    class Runtime:
        calls: list = []
        status = 0

        def cudaHostRegister(self, pointer, size, flags):  # noqa: N802
            self.calls.append(("pin", pointer, size, flags))
            return self.status

        def cudaHostUnregister(self, pointer):  # noqa: N802
            self.calls.append(("free", pointer))
            return self.status

    runtime = Runtime()
    monkeypatch.setattr(Runtime, "calls", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


@pytest.mark.parametrize("memory_type", [HostMemory, SharedMemory])
def test_with_a_gpu_the_memory_is_pinned_once_for_each_size_and_let_go(pinned, memory_type):
    memory = memory_type()
    small = memory.get(100).data_ptr()
    memory.get(50)
    large = memory.get(200).data_ptr()
    if memory_type is SharedMemory:
        theirs = SharedMemory(os.dup(memory.descriptor))
        theirs.get(200)  # the other process has no GPU, and pins nothing
        theirs.close()
    memory.close()
    assert pinned.calls == [("pin", small, 100, 0), ("free", small), ("pin", large, 200, 0), ("free", large)]
    with pytest.raises(RuntimeError, match="status 2"):
        checkpoint_staging.check_cuda(2)


def test_memory_that_cannot_be_pinned_is_used_as_it_is_unless_pinned_memory_was_asked_for(pinned, monkeypatch, capsys):
    pinned.status = 2
    monkeypatch.setattr(torch, "zeros", lambda *_, device: None)  # a kernel on a GPU
    memory = HostMemory()
    assert memory.get(100).numel() == 100
    memory.close()
    assert [call[0] for call in pinned.calls] == ["pin"]
    assert (
        "WARNING: CUDA: pinning memory for checkpoints failed with status 2: training waits" in capsys.readouterr().err
    )
    with pytest.raises(RuntimeError, match="status 2"):
        SharedMemory().get(100)


def test_numbers_too_large_for_the_export_dtype_are_refused(tmp_path, group):
    checkpoints = Checkpoints(locate(tmp_path), Checkpoint(export_dtype="float16"), INFO, group=group)
    with pytest.raises(CheckpointError, match=r"too large .* 'float16':\n  b$"):
        checkpoints._cast({"a": torch.tensor([1.0, float("inf")]), "b": torch.tensor([1e6])})
    assert checkpoints._cast({"a": torch.tensor([1.5])})["a"].dtype == torch.float16
    assert not step_folder(tmp_path, 1).exists()
