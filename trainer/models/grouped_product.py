"""The product of rows, grouped by expert, with each expert's matrix, forward and backward."""

import torch
from torch import Tensor

# torch.nn.functional.grouped_mm needs rows whose strides are multiples of 16 bytes
_ALIGNED_BYTES = 16


def grouped_product(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """`x_RI[start:end] @ weight_EOI[e].T` for each expert e, whose rows end at `ends_E[e]` (int32). Returns [R, O].

    Every row belongs to an expert: `ends_E[-1]` is R. An expert without rows gets a zero gradient.
    """
    return _GroupedProduct.apply(x_RI, weight_EOI, ends_E)


class _GroupedProduct(torch.autograd.Function):
    """torch's own backward needs a contiguous gradient, which `sum().backward()` does not give."""

    @staticmethod
    def forward(ctx, x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_RI, weight_EOI, ends_E)
        return torch.nn.functional.grouped_mm(x_RI, weight_EOI.transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx, grad_RO: Tensor):
        x_RI, weight_EOI, ends_E = ctx.saved_tensors
        grad_RO = grad_RO.contiguous()
        mm = torch.nn.functional.grouped_mm
        grad_x = mm(grad_RO, weight_EOI, offs=ends_E) if ctx.needs_input_grad[0] else None
        grad_w = mm(grad_RO.T, x_RI, offs=ends_E) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None
