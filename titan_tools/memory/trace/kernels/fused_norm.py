"""RMSNorm in one kernel, as on a GPU. A CPU's torch makes a chain of operations of it, which keep copies in fp32."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from trainer.mesh import local_part


class _FusedRMSNorm(torch.autograd.Function):
    """aten._fused_rms_norm as derivatives.yaml has it: input, weight and one fp32 number per row are kept.

    Shapes without values. A DTensor's rows are computed where they are; what each rank says of the weight is a share of
    a sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor) -> Tensor:
        own = local_part(x)
        inverse_deviation = own.new_empty((*own.shape[: -len(shape)], *[1] * len(shape)), dtype=torch.float32)
        ctx.save_for_backward(x, weight, inverse_deviation)
        return _laid_out_as(x, torch.empty_like(own))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        x, weight, _ = ctx.saved_tensors
        grad_x = _laid_out_as(x, torch.empty_like(local_part(x)))
        grad_weight = torch.empty_like(local_part(weight))
        if isinstance(weight, DTensor):
            shares = [Partial() if placement.is_shard() else Replicate() for placement in x.placements]
            grad_weight = DTensor.from_local(grad_weight, weight.device_mesh, shares, run_check=False)
        return grad_x, None, grad_weight


def _laid_out_as(x: Tensor, own: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        return own
    return DTensor.from_local(own, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def _rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    if torch.compiler.is_compiling():  # a compiler takes the operation apart, and needs to see what it computes
        return torch.ops.aten._fused_rms_norm(x, list(normalized_shape), weight, eps)[0]
    return _FusedRMSNorm.apply(x, list(normalized_shape), weight)


@contextmanager
def fused_norm() -> Iterator[None]:
    """Within, norms with a weight are one operation."""
    with patch.object(F, "rms_norm", _rms_norm):
        yield
