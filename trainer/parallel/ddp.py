"""Data parallelism over whole copies of the model (DDP): gradients are all-reduced while backward runs.

Not torch's DistributedDataParallel, which changes its gradient buckets after the first step: with three or more ranks a
resumed run would then sum in another order than an uninterrupted one. Here each gradient is reduced separately, always
in the same order; parameters of large models are large enough for that. Torch is imported inside functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from converters.layout.mesh_shape import MeshShape

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn

    from trainer.batch import Inputs
    from trainer.runner import Runner


def is_ddp(dims: MeshShape) -> bool:
    """Whether ranks hold whole copies. Replicas of shards (TP, PP) are HSDP with a shard degree of 1."""
    return dims.dp_replicate > 1 and dims.world_size == dims.dp_replicate


class Replicated:
    """The runner of a replicated model: runs it and sums the gradients of all replicas."""

    def __init__(self, runner: Runner, model: nn.Module, group: dist.ProcessGroup, reduce_dtype: torch.dtype):
        self._runner, self._group, self._reduce_dtype = runner, group, reduce_dtype
        self._parameters = list(model.parameters())
        self._is_accumulating = False
        self._is_summed = False
        self._sums: list[tuple[dist.Work, Tensor, Tensor]] = []  # gradients, and what is reduced of them
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._sum_gradient)  # type: ignore[no-untyped-call]

    def forward_backward(self, inputs: Inputs, num_units: Tensor | float) -> Tensor:
        self._take_own_share()
        loss = self._runner.forward_backward(inputs, num_units)
        for waiting, gradient, reduced in self._sums:
            waiting.wait()
            if reduced is not gradient:
                gradient.copy_(reduced)
        self._sums.clear()
        self._is_summed = not self._is_accumulating
        return loss

    def forward_loss(self, inputs: Inputs) -> Tensor:
        return self._runner.forward_loss(inputs)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Context in which gradients are not reduced; the first batch after it reduces what was accumulated."""
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    def _sum_gradient(self, parameter: nn.Parameter) -> None:
        import torch.distributed as dist

        if not self._is_accumulating and (gradient := parameter.grad) is not None:
            reduced = gradient.to(self._reduce_dtype)
            waiting = dist.all_reduce(reduced, group=self._group, async_op=True)
            self._sums.append((waiting, gradient, reduced))

    def _take_own_share(self) -> None:
        """Divide gradients that were already reduced and not cleared, so that they count once and not once per rank."""
        import torch

        left = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if self._is_summed and left:
            torch._foreach_div_(left, self._group.size())
        self._is_summed = False


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Make modules compute with their parameters cast to another dtype, as FSDP's mixed precision does.

    A class property hides the parameter, so FQNs do not change, and recomputation casts again. Gradients have the
    parameter's dtype. Call it after anything that sets or ties parameters.
    """
    for module in model.modules():
        if names := [name for name, own in module.named_parameters(recurse=False) if own.dtype != dtype]:
            kind = type(module)
            module.__class__ = type(kind.__name__, (kind,), {name: _cast(name, dtype) for name in names})


def _cast(name: str, dtype: torch.dtype) -> property:
    return property(lambda module: module._parameters[name].to(dtype))
