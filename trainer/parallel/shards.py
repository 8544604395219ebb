"""Differentiable collectives: gather the tensors of all ranks, and scatter their sum."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

# torch 2.13 renamed these and warns about the old names
_all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
_reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_shards(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' tensors, concatenated along dim 0. Backward reduce-scatters the gradients."""
    gathered: Tensor = _GatherShards.apply(x, group)  # type: ignore[no-untyped-call]
    return gathered


def scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part along dim 0 of the sum of all ranks' tensors. Backward all-gathers the gradients."""
    scattered: Tensor = _ScatterSum.apply(x, group)  # type: ignore[no-untyped-call]
    return scattered


# Forward uses the functional collectives: activation checkpointing can save the result of an operation, but not a
# buffer that an operation has filled.


class _GatherShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered: Tensor = funcol.wait_tensor(_all_gather(x.contiguous(), 0, group))  # type: ignore[no-untyped-call]
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        own = gradient.new_empty(gradient.shape[0] // dist.get_world_size(ctx.group), *gradient.shape[1:])
        _reduce_scatter_into(own, gradient.contiguous(), group=ctx.group)
        return own, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        scattered: Tensor = funcol.wait_tensor(  # type: ignore[no-untyped-call]
            _reduce_scatter(x.contiguous(), "sum", 0, group)
        )
        return scattered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        whole = gradient.new_empty(gradient.shape[0] * dist.get_world_size(ctx.group), *gradient.shape[1:])
        _gather_into(whole, gradient.contiguous(), group=ctx.group)
        return whole, None
