"""Norms, each as a family's block describes it; all multiply by their weight in fp32, before the cast to x's dtype."""

import torch.nn.functional as F
from torch import Tensor, nn

from converters.families.blocks import Norm


class OffsetNorm(nn.RMSNorm):
    """RMSNorm whose factor is 1 + weight, in fp32: in 16 bits the sum would lose bits of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps)
        return normed.type_as(x)


class PlainNorm(nn.Module):
    """RMSNorm without a weight, in fp32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.width, self.eps = width, eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (self.width,), eps=self.eps).type_as(x)


def make_norm(norm: Norm | None, width: int) -> nn.Module:
    """The norm of `width` features that a family's block describes; without one, nothing."""
    if norm is None:
        return nn.Identity()
    if not norm.has_weight:
        return PlainNorm(width, norm.eps)
    if norm.centers:
        return nn.LayerNorm(width, norm.eps, bias=False)
    return (OffsetNorm if norm.plus_one else nn.RMSNorm)(width, eps=norm.eps)
