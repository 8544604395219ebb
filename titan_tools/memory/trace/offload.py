"""CPU offload in a trace: which storages are in host memory, and the copies between host and GPU.

Parameters, their gradients and optimizer states stay in host memory; FSDP copies a shard to the GPU before it gathers,
and a reduced gradient back. Both sides are the same device in a trace, so a copy is recognized where FSDP makes it, and
a result is on the side of its inputs.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.utils._pytree import tree_iter

from titan_tools.memory.trace.recorder import Recorder
from titan_tools.memory.trace.tensors import RecordedTensors


class OffloadRecorder(Recorder):
    """Records allocations of the GPU, and knows which storages are in host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.is_host = False  # where new storages are
        self.is_fixed = False  # whether that overrides the side of the inputs
        self._host_storages: set[int] = set()

    def record(self, tensor: Tensor) -> None:
        if not self.is_host:
            super().record(tensor)
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if self.is_paused or key in self._watched:
            return
        self._host_storages.add(key)
        self._watched[key] = weakref.ref(storage, lambda _: self._storage_freed(key))

    def is_on_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._host_storages

    @contextmanager
    def on_side(self, *, is_host: bool, is_fixed: bool) -> Iterator[None]:
        """Put new storages on this side."""
        before = self.is_host, self.is_fixed
        self.is_host, self.is_fixed = is_host, is_fixed
        try:
            yield
        finally:
            self.is_host, self.is_fixed = before

    def on_host(self) -> AbstractContextManager[None]:
        """Put new storages in host memory."""
        return self.on_side(is_host=True, is_fixed=True)

    def _storage_freed(self, key: int) -> None:
        self._host_storages.discard(key)
        super()._storage_freed(key)


class OffloadedTensors(RecordedTensors):  # type: ignore[no-untyped-call]
    """A result whose inputs are all in host memory is there too; every other result is on the GPU."""

    recorder: OffloadRecorder

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        recorder = self.recorder
        if recorder.is_fixed:
            return super().dispatch(func, types, args, kwargs)
        inputs = (each for each in tree_iter((args, kwargs or {})) if isinstance(each, FakeTensor))
        sides = {recorder.is_on_host(each) for each in inputs}  # a list of the inputs would count as a reference
        with recorder.on_side(is_host=sides == {True}, is_fixed=False):
            return super().dispatch(func, types, args, kwargs)

    def _record_workspace(self, num_bytes: int, args: tuple[Any, ...]) -> None:
        if not self.recorder.is_host:
            super()._record_workspace(num_bytes, args)


@contextmanager
def track_offload(recorder: OffloadRecorder) -> Iterator[None]:
    """Record FSDP's copies."""
    getter = FSDPParam.__dict__["all_gather_inputs"].fget
    to_gpu = property(_copying(recorder, getter, to_host=False))
    to_host = _copying(recorder, foreach_reduce, to_host=True)
    with (
        patch.object(FSDPParam, "all_gather_inputs", to_gpu),
        patch.object(_fsdp_param_group, "foreach_reduce", to_host),
    ):
        yield


def move_to_gpu(parts: Sequence[nn.Module]) -> None:
    """Allocate anew, on the GPU, what a model has besides parameters, as trainer/parallel/fsdp.py's keep_on_cpu."""
    for part in parts:
        for module in part.modules():
            if next(module.parameters(), None) is None:
                module.to("cpu")  # computes the rotary embedding's frequencies again
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def _copying(recorder: OffloadRecorder, own: Callable[..., Any], *, to_host: bool) -> Callable[..., Any]:
    """`own`, in which `tensor.to(device)` makes a copy on the other side."""
    own_to = torch.Tensor.to

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not args or not isinstance(args[0], torch.device):
            return own_to(tensor, *args, **kwargs)
        with recorder.on_side(is_host=to_host, is_fixed=True):
            return tensor.clone()

    def run(*args: Any, **kwargs: Any) -> Any:
        with patch.object(torch.Tensor, "to", to):
            return own(*args, **kwargs)

    return run
