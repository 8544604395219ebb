"""Copy what a rank saves to host memory, so that training continues while the copy is written.

The copy is one block of bytes and a plan with the offset of each item. It needs neither mesh nor process group, so
another process that shares the memory can write it.
"""

import copy
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from trainer.observability.log import note

_ALIGNMENT = 64  # of each tensor, so that the memory can be viewed as any dtype


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State that a rank saves, but for the tensors' bytes, which are in host memory. Plain values can be pickled."""

    plan: SavePlan
    offsets: Mapping[MetadataIndex, int]  # of tensors, in bytes
    values: Mapping[MetadataIndex, Any]
    num_bytes: int


class HostMemory:
    """Memory of this process, pinned if there is a GPU to copy from. Grows as needed, and stays allocated.

    Copies to pageable memory are several times slower, and training waits for them. torch's own pinned memory is
    rounded up to a power of two.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False

    def get(self, num_bytes: int) -> torch.Tensor:
        if self._bytes.numel() < num_bytes:
            self.close()  # free the old memory first
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
            try:
                self._is_pinned = _pin(self._bytes)
            except RuntimeError as error:
                note(f"WARNING: {error}: training waits longer for the copies of checkpoints")
                with suppress(RuntimeError):
                    torch.zeros(1, device="cuda")  # CUDA keeps the error for the next kernel, which is this one
        return self._bytes

    def close(self) -> None:
        if self._is_pinned:
            _unpin(self._bytes)
        self._is_pinned = False
        self._bytes = torch.empty(0, dtype=torch.uint8)


class SharedMemory:
    """Memory that is shared with a process started with `descriptor`; pinned if there is a GPU to copy from.

    A memfd, not a file: it is freed with the last process that has it, and does not count against /dev/shm, which is
    small in containers.
    """

    def __init__(self, descriptor: int | None = None):
        self.descriptor = os.memfd_create("titan-checkpoint") if descriptor is None else descriptor
        self._is_owner = descriptor is None
        self._is_pinned = False
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def get(self, num_bytes: int) -> torch.Tensor:
        num_bytes = max(num_bytes, 1)
        if self._bytes.numel() < num_bytes:
            self._release()
            if self._is_owner:
                os.ftruncate(self.descriptor, num_bytes)
            self._bytes = torch.frombuffer(mmap.mmap(self.descriptor, num_bytes), dtype=torch.uint8)
            if self._is_owner:
                self._is_pinned = _pin(self._bytes)
        return self._bytes

    def close(self) -> None:
        self._release()
        os.close(self.descriptor)

    def _release(self) -> None:
        if self._is_pinned:
            _unpin(self._bytes)
        self._is_pinned = False
        self._bytes = torch.empty(0, dtype=torch.uint8)


def _pin(memory: torch.Tensor) -> bool:
    """Pin memory if there is a GPU; whether it is pinned now. Raises RuntimeError if CUDA refuses."""
    if not torch.cuda.is_available():
        return False
    check_cuda(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))  # type: ignore[no-untyped-call]
    return True


def _unpin(memory: torch.Tensor) -> None:
    check_cuda(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))  # type: ignore[no-untyped-call]


def check_cuda(status: Any) -> None:
    """Raise RuntimeError if a call of the CUDA runtime failed."""
    if int(status) != 0:
        raise RuntimeError(f"CUDA: pinning memory for checkpoints failed with status {int(status)}")


@torch.no_grad()
def take_snapshot(nested: Mapping[str, Any], memory: HostMemory | SharedMemory, *, is_coordinator: bool) -> Snapshot:
    """Copy this rank's part of a state dict into `memory`; afterwards the originals may change."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(nested), is_coordinator=is_coordinator)
    plan = planner.create_local_plan()
    values, tensors, offsets, end = {}, {}, {}, 0
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            values[item.index] = copy.deepcopy(planner.lookup_object(item.index))
        else:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)
            tensors[item.index] = tensor
            offsets[item.index] = end
            end += -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
    buffer = memory.get(end)
    for index, tensor in tensors.items():
        _view(buffer, offsets[index], tensor.dtype, tensor.shape).copy_(tensor, non_blocking=True)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.current_stream().synchronize()
    return Snapshot(plan, offsets, values, end)


class SnapshotPlanner(DefaultSavePlanner):
    """Uses a snapshot's plan, and takes its tensors from the memory."""

    def __init__(self, snapshot: Snapshot, memory: torch.Tensor):
        super().__init__(dedup_save_to_lowest_rank=True)
        self._snapshot = snapshot
        self._memory = memory

    def create_local_plan(self) -> SavePlan:
        self.plan = self._snapshot.plan
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._snapshot.values[index]

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        assert write_item.tensor_data is not None
        dtype, shape = write_item.tensor_data.properties.dtype, write_item.tensor_data.chunk.sizes
        return _view(self._memory, self._snapshot.offsets[write_item.index], dtype, shape)


def _view(memory: torch.Tensor, offset: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return memory[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)
