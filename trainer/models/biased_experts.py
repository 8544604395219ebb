"""GPT-OSS's experts: biases, one matrix with rows of gates and up-projections in turn, and a clamped activation.

Shape letters as in trainer/models/moe.py; G = 2 * F rows of gates and up-projections, L experts on this rank.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from converters.families.blocks import Experts
from trainer.models.grouped_product import grouped_outer, grouped_product

_SLOPE = 1.702  # of the sigmoid that gates: x * sigmoid(1.702 * x) approximates GELU
_MULTIPLE = 8  # columns that torch's grouped kernels take, in every dtype


class BiasedExperts(nn.Module):
    """Experts as in OpenAI's gpt_oss/torch/model.py, stacked."""

    def __init__(self, dim: int, experts: Experts):
        super().__init__()
        assert experts.clamp is not None
        self.clamp = experts.clamp
        self.adds_last_bias = True  # False on a rank whose output is added to that of one which adds it
        self.mlp1_weight = nn.Parameter(torch.empty(experts.num, 2 * experts.hidden, dim))
        self.mlp1_bias = nn.Parameter(torch.empty(experts.num, 2 * experts.hidden))
        self.mlp2_weight = nn.Parameter(torch.empty(experts.num, dim, experts.hidden))
        self.mlp2_bias = nn.Parameter(torch.empty(experts.num, dim))

    def forward(self, x_RD: Tensor, ends_E: Tensor) -> Tensor:
        return self.multiply(x_RD, ends_E, (self.mlp1_weight, self.mlp2_weight), (self.mlp1_bias, self.mlp2_bias))

    def multiply(
        self, x_RD: Tensor, ends_L: Tensor, weights: tuple[Tensor, Tensor], biases: tuple[Tensor, Tensor]
    ) -> Tensor:
        """The output of each expert's rows with these parts of mlp1 and mlp2."""
        rows_R = torch.arange(x_RD.shape[0], dtype=ends_L.dtype, device=ends_L.device)
        experts_R = torch.searchsorted(ends_L, rows_R, right=True)
        hidden_RG = grouped_product(x_RD, weights[0], ends_L)
        bias_RG: Tensor = _BiasOfRows.apply(biases[0], experts_R, ends_L, True)  # type: ignore[no-untyped-call]
        hidden_RG = bias_RG.add_(hidden_RG)
        out_RD = grouped_product(clamped_swiglu(hidden_RG, self.clamp), weights[1], ends_L)
        bias_RD: Tensor = _BiasOfRows.apply(  # type: ignore[no-untyped-call]
            biases[1], experts_R, ends_L, self.adds_last_bias
        )
        return bias_RD.add_(out_RD)


def clamped_swiglu(x_RG: Tensor, clamp: float) -> Tensor:
    """[…, 2F] → […, F]: `(up + 1) * gate * sigmoid(1.702 * gate)` of gates at even, up-projections at odd positions.

    Gates are clamped from above only.
    """
    gate_RF, up_RF = x_RG.unflatten(-1, (-1, 2)).unbind(-1)  # type: ignore[no-untyped-call]
    gate_RF, up_RF = gate_RF.clamp(max=clamp), up_RF.clamp(-clamp, clamp)
    hidden_RF: Tensor = (up_RF + 1) * (gate_RF * torch.sigmoid(gate_RF * _SLOPE))
    return hidden_RF


class _BiasOfRows(Function):
    """The bias of each row's expert, or zeros unless `adds`; the gradient is that of a bias which is added.

    So the ranks that hold slices of an expert all have the whole gradient of a bias that one of them adds. It is a
    product with ones, which adds up in a fixed order. The caller adds in place, as torch 2.11 compiles a function that
    changes what it returns in place to one whose inputs get zeros as gradients (pytorch#180642).
    """

    @staticmethod
    def forward(ctx: Any, bias_LO: Tensor, experts_R: Tensor, ends_L: Tensor, adds: bool) -> Tensor:
        ctx.save_for_backward(ends_L)
        return (bias_LO * float(adds)).index_select(0, experts_R)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor, None, None, None]:
        (ends_L,) = ctx.saved_tensors
        ones = grad_RO.new_ones(grad_RO.shape[0], _MULTIPLE)
        grad_LO = grouped_outer(grad_RO, ones, ends_L)[..., 0].contiguous()
        return grad_LO, None, None, None
