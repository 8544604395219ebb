"""CPU offload, where a CPU stands in for the GPU: which storages lie in host memory, and the copies between the two.

Parameters, their gradients and optimizer states stay in host memory; FSDP copies a shard to the GPU before it gathers,
and a reduced gradient back. Both sides are the same device here, so what moves is told by where FSDP moves it, and
what is computed lies where its inputs do.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.utils._pytree import tree_iter

import trainer.build
from titan_tools.memory.trace.record.recorder import RecordedTensors, Recorder


@dataclass(slots=True)
class HostMemory:
    """Bytes of tensors that a rank holds in host memory."""

    held_bytes: int = 0
    peak_bytes: int = 0

    def add(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


class OffloadRecorder(Recorder):
    """Writes down what a GPU is asked for; host memory is only counted."""

    def __init__(self, host: HostMemory):
        super().__init__()
        self.host = host
        self.is_host = False  # what is made now
        self.is_settled = False  # whoever set that knows better than the inputs do
        self._on_host: set[int] = set()

    def see(self, tensor: Tensor) -> None:
        if not self.is_host:
            super().see(tensor)
            return
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if self.is_paused or key in self._watched:
            return
        self._on_host.add(key)
        self._watched[key] = weakref.ref(storage, lambda _: self._gone_from_host(key, num_bytes))
        self.host.add(num_bytes)

    def lies_on_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._on_host

    @contextmanager
    def beside(self, *, is_host: bool, is_settled: bool) -> Iterator[None]:
        """Within, storages that come lie there."""
        before = self.is_host, self.is_settled
        self.is_host, self.is_settled = is_host, is_settled
        try:
            yield
        finally:
            self.is_host, self.is_settled = before

    def on_host(self):
        """Within, storages that come lie in host memory."""
        return self.beside(is_host=True, is_settled=True)

    def _gone_from_host(self, key: int, num_bytes: int) -> None:
        del self._watched[key]
        self._on_host.discard(key)
        if not self._is_over:
            self.host.add(-num_bytes)


class OffloadedTensors(RecordedTensors):
    """What is made of tensors in host memory alone lies there too, all else on the GPU."""

    recorder: OffloadRecorder

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        recorder = self.recorder
        if recorder.is_settled:
            return super().dispatch(func, types, args, kwargs)
        inputs = (each for each in tree_iter((args, kwargs or {})) if isinstance(each, FakeTensor))
        sides = {recorder.lies_on_host(each) for each in inputs}  # no list of them: it would hold them, and be counted
        with recorder.beside(is_host=sides == {True}, is_settled=False):
            return super().dispatch(func, types, args, kwargs)

    def _within_kernel(self, num_bytes: int, args: tuple) -> None:
        if not self.recorder.is_host:
            super()._within_kernel(num_bytes, args)


@contextmanager
def offload_seen(recorder: OffloadRecorder) -> Iterator[None]:
    """Within, a model that is built keeps its parameters in host memory, and FSDP's copies are made."""
    to_gpu = _moving(recorder, FSDPParam.all_gather_inputs.fget, to_host=False)
    to_host = _moving(recorder, _fsdp_param_group.foreach_reduce, to_host=True)
    with ExitStack() as patches:
        for owner, name, new in (
            (trainer.build, "keep_on_cpu", _keeping(recorder, trainer.build.keep_on_cpu)),
            (FSDPParam, "all_gather_inputs", property(to_gpu)),
            (_fsdp_param_group, "foreach_reduce", to_host),
        ):
            patches.enter_context(patch.object(owner, name, new))
        yield


def _keeping(recorder: OffloadRecorder, own: Callable) -> Callable:
    def keep_on_cpu(model: nn.Module, device: torch.device) -> None:
        """`own`, which once more makes for the GPU what is not in host memory."""
        with recorder.on_host():
            own(model, device)
        for module in model.modules():
            if next(module.parameters(), None) is None:
                module.to(device)
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))

    return keep_on_cpu


def _moving(recorder: OffloadRecorder, own: Callable, *, to_host: bool) -> Callable:
    """`own`, in which `tensor.to(device)` makes a copy on the other side."""
    own_to = torch.Tensor.to

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(args[0], torch.device):
            return own_to(tensor, *args, **kwargs)
        with recorder.beside(is_host=to_host, is_settled=True):
            return tensor.clone()

    def run(*args: Any, **kwargs: Any) -> Any:
        with patch.object(torch.Tensor, "to", to):
            return own(*args, **kwargs)

    return run
