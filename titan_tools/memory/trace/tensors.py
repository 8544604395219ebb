"""Fake tensors that record their storages, and act like real ones where autograd or the train step asks."""

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter

from titan_tools.memory.trace.kernels import KernelBuffers
from titan_tools.memory.trace.recorder import PHASES_WITH_OWNERS, Recorder, assign_owners, owner_of_list

aten = torch.ops.aten

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, FakeTensor))
_SUMS_IN_PLACE = (aten.add.Tensor, aten.scatter_add.default)
_NONFINITE_CHECKS = {aten.isnan.default, aten.isinf.default, aten.any.default, aten.any.dim, aten.any.dims}

UseCounts = tuple[int, int, int]  # references to a tensor, to its storage, and to its Python object


class RecordedTensors(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors that a recorder sees. `workspaces`: what kernels allocate internally, by operation."""

    def __init__(self, recorder: Recorder, workspaces: Mapping[Any, KernelBuffers]):
        self._gradient_use_counts = gradient_use_counts()
        # An operation without a fake kernel is an error; it must not run on real memory.
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.recorder, self.workspaces = recorder, workspaces

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        # A DTensor's operation is dispatched again for its local tensor. super() returns the same, but slowly.
        if DTensor in types:
            return NotImplemented
        if func is torch.ops.prim.device.default:  # half of all calls
            return args[0].device
        if func.namespace == "profiler":  # FSDP's record_function
            return func(*args, **(kwargs or {}))
        is_plain = _PLAIN.issuperset(types)
        if is_plain and func is aten._local_scalar_dense.default:
            return scalar_value(args[0])
        # With memory, both would return their input
        if is_plain and func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        if is_plain and is_sum_in_place(func, args, self._gradient_use_counts):
            return args[0]
        if func is aten._scaled_mm.out:  # torch has no fake kernel for it
            return (kwargs or {})["out"]
        if not is_plain:
            return super().dispatch(func, types, args, kwargs or {})
        with self.recorder.paused():  # tensors inside of a fake kernel are not the real kernel's
            result = super().dispatch(func, types, args, kwargs or {})
        mark_nonfinite_check(func, result)
        if not self.recorder.is_paused and not self._is_host_step_count(func):
            record = self.recorder.record
            if isinstance(result, FakeTensor):
                record(result)
            elif isinstance(result, (tuple, list)):
                for each in tree_iter(result):
                    if isinstance(each, FakeTensor):
                        record(each)
            if workspace := self.workspaces.get(func):
                self._record_workspace(workspace(args), args)  # allocated while the result is there
            if self.recorder.point.phase in PHASES_WITH_OWNERS:
                assign_owners(self.recorder, args, result)
        return result

    def _is_host_step_count(self, func: Any) -> bool:
        """Whether the optimizer makes a tensor of a number that it keeps on the host."""
        recorder = self.recorder
        return recorder.counts_steps_on_host and recorder.point.phase == "optimizer" and func is aten.lift_fresh.default

    def _record_workspace(self, num_bytes: int, args: tuple[Any, ...]) -> None:
        if num_bytes:
            block = self.recorder.allocate(num_bytes, part="workspaces")
            if isinstance(args[0], (list, tuple)):
                self.recorder.trace.blocks[block].owner = owner_of_list(self.recorder, args[0])
            self.recorder.free(block)


def mark_nonfinite_check(operation: Any, result: Any) -> None:
    """Mark the result of a check for NaN or infinity: in a good run it finds none."""
    if operation in _NONFINITE_CHECKS:
        result.finds_nothing = True


def scalar_value(tensor: Tensor) -> float | int | bool:
    """The value of a fake scalar: False for a marked check, else 1, which can be counted with and divided by."""
    if getattr(tensor, "finds_nothing", False):
        return False
    return 1.0 if tensor.is_floating_point() else 1


def is_sum_in_place(func: Any, args: tuple[Any, ...], sole_owner: UseCounts) -> bool:
    """Whether autograd would add to `args[0]` in place if the tensors had memory: gradients, or rows to gather's zeros.

    Torch never does so with fake tensors, so every sum of gradients would count as new memory: at a residual stream,
    one gradient of the hidden states per layer. `InputBuffer` (torch/csrc/autograd/input_buffer.cpp) adds in place if
    the first gradient is dense and nothing else refers to it or its storage; `gather_backward` (FunctionsManual.cpp)
    always does. Gradients of gradients, which we never take, are always new. `sole_owner`: what gradient_use_counts
    returned.
    """
    if func not in _SUMS_IN_PLACE or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    if func is aten.add.Tensor and not isinstance(args[1], Tensor):
        return False
    return _use_counts(args) == sole_owner and is_dense(args[0])


def _use_counts(args: tuple[Any, ...]) -> UseCounts:
    """References to an operation's first tensor, with those between autograd and here.

    Python's references count too: compiled code keeps tensors in names, which torch 2.11's counts do not show.
    """
    first = args[0]
    return first._use_count(), torch._C._storage_Use_Count(first.untyped_storage()._cdata), sys.getrefcount(first)


@cache
def gradient_use_counts() -> UseCounts:
    """The use counts, in a mode's dispatch, of a gradient that only autograd holds; measured, as versions differ.

    Not to be called from within a dispatch, where there are no gradients.
    """
    seen: list[UseCounts] = []

    class Sums(FakeTensorMode):  # type: ignore[no-untyped-call]
        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
            if func is aten.add.Tensor:
                seen.append(_use_counts(args))
            return super().dispatch(func, types, args, kwargs or {})

    with Sums(), torch.enable_grad():
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        torch.cat((y.sin(), y.cos())).sum().backward()  # type: ignore[no-untyped-call]
    assert len(seen) == 1, seen
    return seen[0]
